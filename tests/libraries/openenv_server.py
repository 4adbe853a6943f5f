"""An OpenEnv server in a process of its own: counts down from what reset is told, or from 3."""

import sys
import time

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Say(Action):
    message: str


class Heard(Observation):
    text: str = ""


class Countdown(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(episode_id="", step_count=0)

    def reset(self, seed=None, episode_id=None, start=3, **more):
        self.left = start
        self._state = State(episode_id=episode_id, step_count=0)
        return Heard(text=f"say {self.left}, episode {episode_id}, seed {seed}", done=False, reward=None)

    def step(self, action, timeout_s=None, **more):
        if action.message == "sleep":
            time.sleep(30)
        if action.message == "die":
            import os

            os._exit(3)
        right = action.message == str(self.left)
        self.left -= right
        done = self.left == 0
        return Heard(text="done" if done else f"say {self.left}", done=done, reward=float(done))

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Countdown, Say, Heard, max_concurrent_envs=16)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", ws="websockets")
