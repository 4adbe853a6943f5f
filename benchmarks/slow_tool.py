"""An environment whose only work is to wait: turns with a slow tool behind them, and a reward by lot."""

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
    turns: int = 2
    """Policy turns of an episode."""
    calls: int = 1
    """Calls of the tool: one behind each of the first turns."""
    seed: int = 0

    @property
    def tasks(self) -> SlowTool:
        return self

    def task(self, group_id: int) -> Mapping[str, Any]:
        return {"question": str(group_id)}

    def eval_tasks(self, count: int) -> list[Mapping[str, Any]]:
        return [{"question": f"0{number}"} for number in range(count)]

    def make(self) -> SlowToolEnvironment:
        return SlowToolEnvironment(self)


class SlowToolEnvironment:
    """One episode: the tool is waited for after each of the first `calls` turns, the last turn ends it."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, spec: SlowTool) -> None:
        self._spec = spec
        self._turns = 0

    async def reset(self, payload: Mapping[str, Any], *, episode_id: str, seed: int) -> Sequence[Message]:
        self._random = random.Random(stream_seed(seed, episode_id))
        return [Message("user", payload["question"])]

    async def step(self, action: Action) -> StepResult:
        self._turns += 1
        if self._turns <= self._spec.calls:
            await asyncio.sleep(self._spec.latency_s * self._random.uniform(0.9, 1.1))
        if self._turns < self._spec.turns:
            return StepResult((Message("tool", "12"),))
        reward = float(self._random.random() < 0.5)
        return StepResult((), reward, True, {"lot": reward}, success=bool(reward))

    async def close(self) -> None:
        """Nothing to give back."""
