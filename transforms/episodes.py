"""RunEpisodes: an asynchronous stateful DoFn. Each episode leaves when it ends, not when a bundle or a batch does.

Key = shard; state = the tasks in flight; a processing-time timer looks at them every `poll_interval_s`. `process`
writes the task down and returns: it never blocks. The episodes run in the process's runtime, which the state outlives.

Invariant: a steady trickle never pushes the timer out (`armed`), and no data makes this stage raise. It raises only
where the process cannot run episodes at all, which nobody should overlook.
"""

# mypy: allow-subclassing-any, allow-untyped-decorators
# ruff: noqa: B008 (Beam's way to ask for state and timers)

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any, Protocol

import apache_beam as beam
from apache_beam.coders import BooleanCoder
from apache_beam.pvalue import TaggedOutput
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import BagStateSpec, ReadModifyWriteStateSpec, TimerSpec, on_timer
from apache_beam.typehints import with_input_types, with_output_types

from trajectories import codec
from trajectories.failures import FailurePolicy
from trajectories.schema import DeadLetter, Episode, Kind, Task
from transforms import metrics
from transforms.coders import PendingCoder
from transforms.dead_letters import DEAD, EVALUATED, dead_letter
from transforms.pending import Look, arrive, look_round

FAULTS = ("tool_timeouts", "tool_errors", "invalid_outputs", "cut_outputs", "close_errors")
"""Counts in an episode's metrics that tell of tools gone wrong, gravest first."""


class Runtime(Protocol):
    """What runs episodes in this process. No call blocks; each raises if the process cannot run episodes at all."""

    def claim(self, episode_id: str, starts: int) -> None:
        """Note that start number `starts` is about to be written to state."""
        ...

    def look(self, episode_id: str) -> Look:
        """The episode's result, or where it stands. A result stays until it is forgotten."""
        ...

    def room(self) -> int:
        """Episodes that may be started now."""
        ...

    def submit(self, task: Task, sample: int) -> None:
        """Start a member; harmless if it runs."""
        ...

    def forget(self, episode_id: str) -> None:
        """Drop a result."""
        ...


class RuntimeFactory(Protocol):
    """Travels in the job graph, so it holds settings only."""

    def start(self) -> Runtime:
        """This process's runtime, made at the first call. Returns at once."""
        ...


class RunEpisodes(beam.PTransform):
    """(shard, Task) → Episode, as each ends; those of eval tasks and dead letters apart."""

    def __init__(
        self,
        run_id: str,
        factory: RuntimeFactory,
        *,
        poll_interval_s: float,
        max_attempts: int,
        policy: FailurePolicy,
    ) -> None:
        super().__init__()
        self.dofn = _RunEpisodes(run_id, factory, poll_interval_s, max_attempts, policy)

    def expand(self, tasks: Any) -> Any:
        return tasks | "InFlight" >> beam.ParDo(self.dofn).with_outputs(EVALUATED, DEAD, main="episodes")


@with_input_types(tuple[str, Task])
@with_output_types(Episode, evaluated=Episode, dead_letters=DeadLetter)
class _RunEpisodes(beam.DoFn):
    PENDING = BagStateSpec("pending", PendingCoder())
    ARMED = ReadModifyWriteStateSpec("armed", BooleanCoder())
    POLL = TimerSpec("poll", TimeDomain.REAL_TIME)

    def __init__(
        self, run_id: str, factory: RuntimeFactory, poll_interval_s: float, max_attempts: int, policy: FailurePolicy
    ) -> None:
        self.run_id = run_id
        self.factory = factory
        self.poll_interval_s = poll_interval_s
        self.max_attempts = max_attempts
        self.policy = policy

    def setup(self) -> None:
        self.runtime = self.factory.start()

    def process(
        self,
        keyed: tuple[str, Task],
        pending: Any = beam.DoFn.StateParam(PENDING),
        armed: Any = beam.DoFn.StateParam(ARMED),
        poll: Any = beam.DoFn.TimerParam(POLL),
    ) -> None:
        _, task = keyed
        entry = arrive(tuple(pending.read()), task)
        if entry is None:
            metrics.count("tasks/duplicate")
            return
        pending.add(entry)
        for sample, member in enumerate(entry.members):
            self.runtime.claim(task.episode_id(sample), member.starts)
        if not armed.read():
            armed.write(True)
            poll.set(next_poll(time.time(), self.poll_interval_s))

    @on_timer(POLL)
    def on_poll(
        self,
        pending: Any = beam.DoFn.StateParam(PENDING),
        armed: Any = beam.DoFn.StateParam(ARMED),
        poll: Any = beam.DoFn.TimerParam(POLL),
    ) -> Iterator[Any]:
        before = tuple(pending.read())
        now = look_round(before, self.runtime.look, self.runtime.room(), self.max_attempts, self.policy)
        for episode_id in now.forget:
            self.runtime.forget(episode_id)
        for task, sample in now.start:
            self.runtime.submit(task, sample)
        for episode_id, starts in now.claim:
            self.runtime.claim(episode_id, starts)
        if now.changed:
            pending.clear()
            for entry in now.pending:
                pending.add(entry)
        if now.pending:
            poll.set(next_poll(time.time(), self.poll_interval_s))
        else:
            armed.clear()
        if now.vanished:
            metrics.count("episodes/vanished", now.vanished)
        tasks = {entry.task.key: entry.task for entry in before}
        for episode in now.retried:
            metrics.count("episodes/retried")
            yield self._letter(str(episode.status), episode, f"started again: {episode.error}", tasks[episode.key])
        for episode in now.emit:
            yield from self._emit(episode, tasks[episode.key])

    def _emit(self, episode: Episode, task: Task) -> Iterator[Any]:
        metrics.count(f"episodes/{episode.status}")
        metrics.observe("episode_s", episode.timings.duration_s)
        metrics.observe("tool_s", episode.timings.tool_s)
        metrics.observe("emit_delay_s", max(0.0, time.time() - episode.timings.ended_at))
        metrics.count("tokens/sampled", episode.sampled_tokens)
        yield TaggedOutput(EVALUATED, episode) if episode.kind is Kind.EVAL else episode
        if reason := fault(episode):
            counts = ", ".join(f"{name}={episode.metrics[name]:g}" for name in FAULTS if episode.metrics.get(name))
            yield self._letter(reason, episode, episode.error or counts, task)

    def _letter(self, reason: str, episode: Episode, detail: str, task: Task) -> TaggedOutput:
        detail, payload = f"{episode.episode_id}: {detail}", codec.encode(task, limit=None)
        return TaggedOutput(DEAD, dead_letter(self.run_id, "RunEpisodes", reason, detail, payload))


def next_poll(now: float, interval_s: float) -> float:
    """The next instant of a grid that all keys share: their timers fire together, in one bundle and not in many."""
    return (math.floor(now / interval_s) + 1) * interval_s


def fault(episode: Episode) -> str:
    """Why the episode, or a part of what its tools gave, was unusable; empty if all of it was of use."""
    if episode.status.failed:
        return str(episode.status)
    return next((name for name in FAULTS if episode.metrics.get(name)), "")
