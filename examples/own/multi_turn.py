"""An environment class that answers each turn itself: `environment.name = "multi_turn:Tries"`."""

from pathlib import Path

from environments.environment import Environment, Message, Spec, StepResult
from environments.tasks import task_file


class ThreeTries(Environment):
    """A wrong call is met with the question again, twice; a later right one is worth less."""

    async def reset(self, payload, *, episode_id, seed):
        self.payload, self.tries = payload, 0
        return [Message("user", payload["question"])]

    async def step(self, action):
        self.tries += 1
        right = action.text == f"<calc>{self.payload['question']}</calc>"
        if right or self.tries == 3:
            return StepResult(reward=right / self.tries, done=True, success=right)
        return StepResult(messages=(Message("user", self.payload["question"]),))


def Tries(seed=0):
    tasks = task_file(Path(__file__).with_name("sums.jsonl"), seed=seed, key="question", held_out=0.2)
    return Spec(ThreeTries, tasks)
