"""A stand-in for the rollout job: real clients, real messages, made-up episodes.

It follows `latest.json` and stamps what it samples with the version in force when it begins, so that staleness, leases
and redelivery are those of the real thing. Everything it does is a function of the task.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from learner.clients import publisher_client, subscriber_client
from learner.train import LearnerSpec
from policy.adapters import AdapterStore
from policy.lora import LoraSettings
from policy.transformer import ModelConfig
from policy.weights import ModelSettings, save_model
from trajectories import codec
from trajectories.advantages import advantages
from trajectories.packing import bucket_of, pack
from trajectories.schema import (
    Closing,
    Episode,
    Heartbeat,
    Kind,
    Outcome,
    Status,
    Task,
    Timings,
    Verdict,
    Version,
    VersionSpan,
    stream_seed,
)
from trajectories.storage import open_storage
from trajectories.topics import Topics

CONFIG = ModelConfig(
    vocab_size=29, num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=24, max_context=64
)
LORA = LoraSettings(rank=2, alpha=4.0)
BUCKETS = (64,)
PROMPT, REPLY = 5, 6


def tiny_model(folder: Path) -> ModelSettings:
    """A random model in `folder`."""
    rng = np.random.default_rng(0)
    outside = {name: rng.normal(size=shape).astype(np.float32) for name, shape in CONFIG.model_shapes().items()}
    layers = [
        {name: rng.normal(size=shape, scale=0.3).astype(np.float32) for name, shape in CONFIG.layer_shapes().items()}
        for _ in range(CONFIG.num_layers)
    ]
    save_model(folder, CONFIG, {**outside, "layers": layers})
    return ModelSettings(str(folder))


class Tasks:
    """Numbers as payloads."""

    def task(self, group_id: int) -> dict[str, Any]:
        return {"question": group_id}

    def eval_tasks(self, count: int) -> list[dict[str, Any]]:
        return [{"question": -1 - index} for index in range(count)]


@dataclass
class Habits:
    """What the actors do with a task."""

    latency_s: Callable[[Task], float] = lambda task: 0.02
    filtered: Callable[[Task], bool] = lambda task: task.group_id % 5 == 4
    failing_members: int = 0
    failed: Callable[[Task], bool] = lambda task: False
    swallow: Callable[[Task], bool] = lambda task: False
    """Take the task and never answer."""
    twice: Callable[[Task], bool] = lambda task: False
    """Answer a task with two closings."""
    heartbeat_s: float = 0.3
    follows: bool = True
    """Load new adapters; else stay with the first."""
    solves: Callable[[Task], bool] = lambda task: task.temperature == 0
    """Whether an evaluation's question is answered right."""


@dataclass(order=True)
class _Due:
    at: float
    serial: int
    task: Task = field(compare=False)
    version: Version | None = field(compare=False)


class Actors:
    """One worker process of the stand-in, in a thread. `with Actors(spec, habits) as actors: ...`"""

    def __init__(self, spec: LearnerSpec, habits: Habits | None = None) -> None:
        self.spec, self.habits = spec, habits or Habits()
        self.started: Counter[str] = Counter()
        self.versions_seen: list[Version] = []
        self._holding: dict[str, Task] = {}
        self._heap: list[_Due] = []
        self._changed = threading.Condition()
        self._closing = False
        self._serial = 0
        self._first_token_at: dict[str, float] = {}
        self._finished = 0
        self._worker_id = uuid.uuid4().hex
        self._store = AdapterStore(open_storage(spec.storage_url), CONFIG, LORA)
        self._publisher, self._subscriber = publisher_client(), subscriber_client()

    def __enter__(self) -> Actors:
        self._pull = self._subscriber.subscribe(self.spec.topics.subscription("tasks"), self._take)
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._work, self._beat)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(10)
        self._pull.cancel()
        self._publisher.stop()

    def _take(self, message: Any) -> None:
        task = codec.decode(message.data, Task)
        message.ack()  # as the DirectRunner does: what a dead worker held is lost
        latest = self._store.latest()
        version = task.version or (latest.version if latest else None)
        assert version is not None, "a task came before any adapter"
        if not self.habits.follows and self.versions_seen and task.kind is Kind.TRAIN:
            version = self.versions_seen[0]
        with self._changed:
            self.versions_seen.append(version)
            self.started[task.key] += 1
            self._first_token_at.setdefault(str(version), time.time())
            self._holding[task.key] = task
            if not self.habits.swallow(task):
                self._serial += 1
                at = time.monotonic() + self.habits.latency_s(task)
                heapq.heappush(self._heap, _Due(at, self._serial, task, version))
                self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                wait = self._heap[0].at - time.monotonic() if self._heap else None
                if self._closing:
                    return
                if wait is None or wait > 0:
                    self._changed.wait(wait)
                    continue
                due = heapq.heappop(self._heap)
                self._holding.pop(due.task.key, None)
                self._finished += due.task.group_size
            assert due.version is not None
            self._answer(due.task, due.version)

    def _beat(self) -> None:
        while not self._closing:
            with self._changed:
                heartbeat = Heartbeat(
                    run_id=self.spec.run_id,
                    worker_id=self._worker_id,
                    sent_at=time.time(),
                    interval_s=self.habits.heartbeat_s,
                    first_token_at=dict(self._first_token_at),
                    holding=tuple(self._holding),
                    finished=self._finished,
                )
                self._first_token_at.clear()
            self._publish(self.spec.topics.heartbeats, heartbeat)
            time.sleep(self.habits.heartbeat_s)

    def _answer(self, task: Task, version: Version) -> None:
        topics = self.spec.topics
        if task.kind is Kind.EVAL:
            self._publish(topics.results, replace(episode(task, 0, version), success=self.habits.solves(task)))
            return
        members = [episode(task, sample, version) for sample in range(task.group_size)]
        members = members[self.habits.failing_members :]
        if self.habits.failed(task):
            reason = f"{task.episode_id(1)}: the browser is gone"
            failed = Verdict(task.run_id, task.group_id, task.attempt, Outcome.FAILED, reason, failed_members=1)
            self._publish(topics.verdicts, failed)
            return
        if self.habits.filtered(task):
            verdict = Verdict(
                task.run_id,
                task.group_id,
                task.attempt,
                Outcome.FILTERED,
                "zero variance",
                members=len(members),
                success_mean=1.0,
                reward_mean=1.0,
            )
            self._publish(topics.verdicts, verdict)
            return
        for _ in range(2 if self.habits.twice(task) else 1):
            closing = Closing(
                task.run_id,
                task.group_id,
                task.attempt,
                uuid.uuid4().hex,
                task.group_size,
                tuple(members),
                failed_members=self.habits.failing_members,
                advantages=advantages([member.reward for member in members], self.spec.advantages),
            )
            self._publish(topics.rows, pack([closing], bucket_of(closing, BUCKETS)))

    def _publish(self, topic: str, content: Any) -> None:
        self._publisher.publish(topic, codec.encode(content), **codec.attributes(content))


def episode(task: Task, sample: int, version: Version) -> Episode:
    rng = np.random.default_rng(stream_seed(task.key, sample))
    tokens = np.concatenate(
        [np.random.default_rng(task.group_id % 997).integers(1, 29, PROMPT), rng.integers(1, 29, REPLY)]
    )
    mask = np.arange(PROMPT + REPLY) >= PROMPT
    return Episode(
        run_id=task.run_id,
        group_id=task.group_id,
        attempt=task.attempt,
        sample=sample,
        group_size=task.group_size,
        tokens_T=tokens,
        loss_mask_T=mask,
        logprobs_T=np.where(mask, -np.log(29.0), 0.0),
        prompt_length=PROMPT,
        version_spans=(VersionSpan(PROMPT, version),),
        reward=float(sample % 2),
        success=bool(sample % 2),
        status=Status.COMPLETED,
        kind=task.kind,
        temperature=1.0 if task.temperature is None else task.temperature,
        timings=Timings(time.time(), time.time() + 0.01),
    )


def topics_for(address: str, run_id: str) -> Topics:
    """The run's topics, made on the server at `address`."""
    os.environ["PUBSUB_EMULATOR_HOST"] = address
    topics = Topics("headrace-test", run_id)
    publisher, subscriber = publisher_client(), subscriber_client()
    for name in ("tasks", "rows", "verdicts", "results", "heartbeats", "dead-letters"):
        publisher.create_topic(name=topics.topic(name), timeout=30)
        subscriber.create_subscription(
            name=topics.subscription(name), topic=topics.topic(name), ack_deadline_seconds=60, timeout=30
        )
    subscriber.close()
    return topics
