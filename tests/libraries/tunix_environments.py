"""An environment in Tunix's shape that imports nothing of Tunix, and one of Tunix's own."""

import threading


class Guess:
    """Say the word; two tries."""

    tool_schemas = ()

    def __init__(self, task):
        self.task, self.tries, self.closed = task, 0, False

    def reset(self):
        self.task["touched"] = True  # of its own copy
        return {"question": f"Guess: {self.task['hint']}"}, {}

    def step(self, action):
        self.tries += 1
        right = action == self.task["word"]
        observation = {} if right else {"told": "no"}
        return observation, float(right), right or self.tries == 2, {"metadata": {"tries": self.tries, "note": "text"}}

    def close(self):
        self.closed = True


class Odd:
    """Blocks, or answers in another shape, as it is told; reset gives the observation alone."""

    def __init__(self, task):
        self.released = threading.Event()

    def reset(self):
        return "say what I do"

    def step(self, action):
        if action == "block":
            self.released.wait(10)
        return ("seen", 1.0, True, False, {}) if action == "five" else ("seen", 1.0, True, None)

    def close(self):
        self.released.set()


def schemas():
    """Of one tool."""
    return [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def tool_environment(task):
    """google-tunix's ToolEnvironment with its calculator."""
    from tunix.rl.agentic.environments.tool_environment import ToolEnvironment
    from tunix.rl.agentic.rewards.reward_types import RewardOutput
    from tunix.rl.agentic.tools.calculator_tool import CalculatorTool

    def reward(task, action):
        return RewardOutput(reward=float(action.strip() == task["answer"]), metadata={"length": len(action)})

    return ToolEnvironment(task, tool_map={"calculator": CalculatorTool}, reward_fn=reward, max_steps=4)
