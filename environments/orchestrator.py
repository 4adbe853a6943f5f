"""Many episodes at once on one event loop.

Invariant: `run` comes back with an Episode whatever a task's environment, tools or policy do, and its place is free
again then, at the latest `episode_timeout_s` + `close_timeout_s` after it started. An episode costs no thread; only
blocking tools do, and of those there is a bounded number.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from environments.agent import ToolAgent
from environments.environment import Environment, EnvironmentSettings, EnvironmentSpec
from environments.tools import BlockingCalls, blocking_calls, bounded_text, describe, passes
from policy.chat import ChatFormat
from policy.client import SamplingClient, SamplingParams
from trajectories.schema import Episode, Status, Task, Timings


@dataclass(frozen=True, slots=True)
class Gauges:
    """How many episodes are where. `started == running + finished + cancelled`."""

    waiting: int = 0
    """Asked for, and without a place yet."""
    running: int = 0
    started: int = 0
    finished: int = 0
    cancelled: int = 0
    abandoned: int = 0
    """Environments that did not stop when their time was up, ever."""
    hung_threads: int = 0
    """Threads that are stuck in blocking calls which were given up, now."""


class RolloutOrchestrator:
    """Runs episodes of one environment, at most `settings.max_concurrency` at once. All calls on one event loop."""

    def __init__(
        self,
        client: SamplingClient,
        chat: ChatFormat,
        spec: EnvironmentSpec,
        settings: EnvironmentSettings,
        sampling: SamplingParams,
        run_seed: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._spec = spec
        self._clock = clock
        self._agent = ToolAgent(client, chat, settings, sampling, run_seed, clock, on_abandoned=self._count_abandoned)
        self._places = asyncio.Semaphore(settings.max_concurrency)
        self._blocking = BlockingCalls(settings.blocking_threads)
        self._gauges = Gauges()
        self._tasks: dict[str, set[asyncio.Task[object]]] = {}

    @property
    def gauges(self) -> Gauges:
        return replace(self._gauges, hung_threads=self._blocking.abandoned)

    async def run(self, task: Task, sample: int) -> Episode:
        """One episode, once there is a place for it. Raises nothing but CancelledError."""
        episode_id, me = task.episode_id(sample), asyncio.current_task()
        assert me is not None
        self._tasks.setdefault(episode_id, set()).add(me)
        try:
            return await self._run(task, sample)
        finally:
            self._tasks[episode_id].discard(me)
            if not self._tasks[episode_id]:
                del self._tasks[episode_id]

    def cancel(self, episode_id: str) -> bool:
        """Cancel whoever awaits `run` for this episode; says whether anybody did."""
        tasks = self._tasks.get(episode_id, set())
        for task in tasks:
            task.cancel()
        return bool(tasks)

    async def close(self) -> None:
        """Cancel every episode and wait until each has cleaned up after itself."""
        tasks = [task for tasks in self._tasks.values() for task in tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self, task: Task, sample: int) -> Episode:
        loop = asyncio.get_running_loop()
        asked = loop.time()
        self._count(waiting=1)
        try:
            await self._places.acquire()
        finally:
            self._count(waiting=-1)
        self._count(running=1, started=1)
        ended = "cancelled"
        try:
            blocking_calls.set(self._blocking)
            try:
                environment: Environment = self._spec.make()
            except BaseException as error:
                if not isinstance(error, Exception) and passes(error):
                    raise
                episode = self._unmade(task, sample, describe(error))
            else:
                episode = await self._agent.run(task, sample, environment, queued_s=loop.time() - asked)
            ended = "finished"
            return episode
        finally:
            self._count(running=-1, **{ended: 1})
            self._places.release()

    def _unmade(self, task: Task, sample: int, reason: str) -> Episode:
        """The episode of an environment that could not be made."""
        nothing, now = np.zeros(0), self._clock()
        return Episode(
            run_id=task.run_id,
            group_id=task.group_id,
            attempt=task.attempt,
            sample=sample,
            group_size=task.group_size,
            kind=task.kind,
            tokens_T=nothing.astype(np.int32),
            loss_mask_T=nothing.astype(np.bool_),
            logprobs_T=nothing.astype(np.float32),
            prompt_length=0,
            status=Status.ENVIRONMENT_ERROR,
            error=bounded_text(f"the environment could not be made: {reason}", 2000)[0],
            timings=Timings(started_at=now, ended_at=now),
        )

    def _count_abandoned(self) -> None:
        self._count(abandoned=1)

    def _count(self, **changes: int) -> None:
        self._gauges = replace(
            self._gauges, **{name: getattr(self._gauges, name) + change for name, change in changes.items()}
        )
