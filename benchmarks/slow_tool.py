"""An environment whose only work is to wait: two turns around one slow tool, and a reward by lot."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from environments.environment import Action, Message, StepResult
from trajectories.schema import stream_seed


@dataclass(frozen=True)
class SlowTool:
    """`benchmarks.slow_tool:SlowTool`: the environment and its tasks."""

    latency_s: float = 1.0
    """Mean seconds of the tool; single calls lie within a tenth of it."""
    seed: int = 0

    @property
    def tasks(self) -> SlowTool:
        return self

    def task(self, group_id: int) -> Mapping[str, Any]:
        return {"question": str(group_id)}

    def eval_tasks(self, count: int) -> list[Mapping[str, Any]]:
        return [{"question": f"0{number}"} for number in range(count)]

    def make(self) -> SlowToolEnvironment:
        return SlowToolEnvironment(self.latency_s)


class SlowToolEnvironment:
    """One episode: the first turn waits for the tool, the second ends it."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, latency_s: float) -> None:
        self._latency_s = latency_s
        self._turns = 0

    async def reset(self, payload: Mapping[str, Any], *, episode_id: str, seed: int) -> Sequence[Message]:
        self._random = random.Random(stream_seed(seed, episode_id))
        return [Message("user", payload["question"])]

    async def step(self, action: Action) -> StepResult:
        self._turns += 1
        if self._turns == 1:
            await asyncio.sleep(self._latency_s * self._random.uniform(0.9, 1.1))
            return StepResult((Message("tool", "12"),))
        reward = float(self._random.random() < 0.5)
        return StepResult((), reward, True, {"lot": reward}, success=bool(reward))

    async def close(self) -> None:
        """Nothing to give back."""
