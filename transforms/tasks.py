"""ReadTasks: task messages from Pub/Sub, decoded and spread over shards.

Invariant: one message is one whole group and goes to one shard, so that its members run in one process, share their
prompt's prefill and meet again in one place.
"""

# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import apache_beam as beam
from apache_beam.io.gcp.pubsub import ReadFromPubSub
from apache_beam.pvalue import TaggedOutput
from apache_beam.typehints import with_output_types

import transforms.coders  # noqa: F401 (registers the coders)
from policy.client import check_temperature
from trajectories import codec
from trajectories.schema import DeadLetter, Task
from transforms import metrics
from transforms.dead_letters import DEAD, dead_letter
from transforms.settings import RolloutSpec

MAX_GROUP_SIZE = 4096
"""Members of a group that a task may ask for; more is a mistake, not a task."""


class ReadTasks(beam.PTransform):
    """Pub/Sub → (shard, Task), and dead letters."""

    def __init__(self, spec: RolloutSpec) -> None:
        super().__init__()
        self.spec = spec

    def expand(self, begin: Any) -> Any:
        return (
            begin
            | "Pull" >> ReadFromPubSub(subscription=self.spec.topics.subscription("tasks"))
            | "Decode" >> DecodeTasks(self.spec)
        )


class DecodeTasks(beam.PTransform):
    """bytes → (shard, Task), and dead letters."""

    def __init__(self, spec: RolloutSpec) -> None:
        super().__init__()
        self.spec = spec

    def expand(self, messages: Any) -> Any:
        return messages | "ToShards" >> beam.ParDo(
            _DecodeTask(self.spec.run_id, self.spec.rollouts.shards)
        ).with_outputs(DEAD, main="tasks")


def shard_of(task: Task, shards: int) -> str:
    """The shard of a task: a pure function of its group, so that a redelivered task meets its first delivery."""
    return f"shard-{zlib.crc32(task.key.encode()) % shards:04d}"


@with_output_types(tuple[str, Task], dead_letters=DeadLetter)
class _DecodeTask(beam.DoFn):
    def __init__(self, run_id: str, shards: int) -> None:
        self.run_id = run_id
        self.shards = shards

    def process(self, data: bytes) -> Iterator[Any]:
        try:
            task = codec.decode(data, Task)
            check(task, self.run_id)
        except ValueError as error:
            yield TaggedOutput(DEAD, dead_letter(self.run_id, "ReadTasks", type(error).__name__, str(error), data))
            return
        metrics.count("tasks/read")
        yield shard_of(task, self.shards), task


class ForeignRun(ValueError):
    """The task belongs to another run."""


class BadTask(ValueError):
    """The task asks for something that cannot be run."""


def check(task: Task, run_id: str) -> None:
    """Raises ForeignRun or BadTask for a task that decodes and yet cannot be run here."""
    if task.run_id != run_id:
        raise ForeignRun(f"the task belongs to run {task.run_id!r}, this job serves {run_id!r}")
    if not 1 <= task.group_size <= MAX_GROUP_SIZE:
        raise BadTask(f"group_size must be from 1 to {MAX_GROUP_SIZE}, found {task.group_size}")
    if task.temperature is not None:
        try:
            check_temperature(task.temperature)
        except ValueError as error:
            raise BadTask(str(error)) from error
    if task.group_id < 0 or task.attempt < 0:
        raise BadTask(f"group_id and attempt must be 0 or more, found {task.group_id} and {task.attempt}")
