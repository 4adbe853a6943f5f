"""An environment whose every step is written in its task's payload: how long it takes, what it gives, how it fails."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from environments.environment import Action, Environment, Message, StepResult, TaskSource
from environments.tools import Tool


def _answer(fault: str) -> Any:
    """What the scripted tool gives back."""
    if fault == "tool_big":
        return "7" * 1_000_000
    if fault == "tool_bytes":
        return b"7\xff\xfe"
    if fault == "tool_hang":
        time.sleep(3600)
    raise RuntimeError("the scripted tool raised")


TOOLS = {
    fault: Tool("scripted", "", {"type": "object"}, functools.partial(_answer, fault), timeout_s=0.3)
    for fault in ("tool_big", "tool_bytes", "tool_hang", "tool_raise")
}


@dataclass
class _Scripted:
    """One turn: sleep `latencies_s[sample]`, suffer `faults[sample]` and end with `rewards[sample]`."""

    tools: Sequence[Mapping[str, Any]] = ()

    async def reset(self, payload: Mapping[str, Any], *, episode_id: str, seed: int) -> Sequence[Message]:
        self.payload = payload
        self.sample = int(episode_id.rpartition("/")[2])
        return [Message("user", "1+1")]

    async def step(self, action: Action) -> StepResult:
        await asyncio.sleep(self._of_sample("latencies_s", 0.0))
        fault = self._of_sample("faults", "")
        metrics: Mapping[str, float] = {}
        if fault == "raise":
            raise RuntimeError("the scripted environment raised \udcff")
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "nan":
            return StepResult(done=True, reward=float("nan"))
        if fault:
            metrics = (await TOOLS[fault].run({})).counts
        reward = self._of_sample("rewards", 0.0)
        return StepResult(done=True, reward=reward, success=reward > 0.5, metrics=metrics)

    async def close(self) -> None:
        return None

    def _of_sample(self, name: str, default: Any) -> Any:
        values = self.payload.get(name)
        return values[self.sample] if values else default


@dataclass(frozen=True)
class Scripted:
    """The environment of the run file. The tests publish the tasks themselves; its own ask for nothing."""

    seed: int = 0

    @property
    def tasks(self) -> TaskSource:
        return self

    def task(self, group_id: int) -> Mapping[str, Any]:
        return {}

    def eval_tasks(self, count: int) -> list[Mapping[str, Any]]:
        return [{"held_out": number} for number in range(count)]

    def make(self) -> Environment:
        return _Scripted()
