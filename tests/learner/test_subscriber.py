"""Streaming pull against the real server."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emulator.testing import ServerProcess
from learner.clients import publisher_client
from learner.subscriber import Arrival, Outbox, Subscriber
from tests.learner.actors import topics_for
from trajectories.codec import encode
from trajectories.packing import pack
from trajectories.schema import Closing, DeadLetter, Episode, Outcome, Pack, Verdict
from trajectories.topics import Topics


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path)
    process.start()
    yield process
    process.stop()


class Line:
    """A subscriber and what it has handed on."""

    def __init__(self, topics: Topics) -> None:
        self.inbox: queue.Queue[Any] = queue.Queue()
        self.publisher = publisher_client()
        self.outbox = Outbox(topics, self.publisher, self.inbox.put)
        self.subscriber = Subscriber(topics, self.outbox, self.inbox.put, time.monotonic, max_lease_s=60)
        self.subscriber.start()

    def next(self, timeout_s: float = 60) -> Arrival:
        event = self.inbox.get(timeout=timeout_s)
        assert isinstance(event, Arrival), event
        return event

    def close(self) -> None:
        began = time.monotonic()
        self.subscriber.close(5)
        self.outbox.close(5)
        assert time.monotonic() - began < 15


@pytest.fixture
def topics(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> Topics:
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", server.address)
    return topics_for(server.address, "line")


@pytest.fixture
def line(topics: Topics) -> Iterator[Line]:
    found = Line(topics)
    yield found
    found.close()


def verdict(group: int, run_id: str = "line") -> Verdict:
    return Verdict(run_id, group, 0, Outcome.FILTERED, "equal")


def big_pack(group: int) -> Pack:
    """About 3 MB that do not compress."""
    rng = np.random.default_rng(group)
    size = 300_000
    episode = Episode(
        "line", group, 0, 0, 2, rng.integers(0, 2**31 - 1, size), np.arange(size) > 0, rng.normal(size=size), 1
    )
    return pack([Closing("line", group, 0, f"c{group}", 2, (episode,), advantages=(1.0,))], size)


def test_messages_beyond_grpc_s_usual_limit_arrive(line: Line, topics: Topics) -> None:
    sent = [encode(big_pack(group)) for group in range(4)]
    assert 2_500_000 < len(sent[0]) < 3_500_000
    for data in sent:
        line.publisher.publish(topics.rows, data).result(60)
    arrivals = [line.next() for _ in sent]
    assert sorted(arrival.content.closings[0].group_id for arrival in arrivals) == [0, 1, 2, 3]  # type: ignore[union-attr]


def test_what_cannot_be_read_is_a_dead_letter_and_never_comes_back(line: Line, topics: Topics) -> None:
    for data in (b"noise", encode(verdict(1))[:-4], encode(verdict(1, run_id="another")), encode(verdict(2))):
        line.publisher.publish(topics.verdicts, data).result(60)
    arrivals = [line.next() for _ in range(4)]
    letters = [arrival.content for arrival in arrivals if isinstance(arrival.content, DeadLetter)]
    assert sorted(letter.reason for letter in letters) == ["Foreign", "ForeignRun", "Truncated"]
    assert {letter.stage for letter in letters} == {"learner.verdicts"}
    assert b"noise" in {letter.payload for letter in letters}
    for arrival in arrivals:
        arrival.ack()
    assert [a.content for a in arrivals if isinstance(a.content, Verdict)] == [verdict(2)]


def test_unacknowledged_messages_come_back_and_acknowledged_ones_do_not(
    line: Line, topics: Topics, server: ServerProcess
) -> None:
    """Across a server that is killed and comes back, and a new subscriber."""
    for group in range(2):
        line.publisher.publish(topics.verdicts, encode(verdict(group))).result(60)
    first = {arrival.content.group_id: arrival for arrival in (line.next(), line.next())}  # type: ignore[union-attr]
    first[0].ack()
    time.sleep(1)
    server.kill()
    server.start()
    line.publisher.publish(topics.verdicts, encode(verdict(2)), timeout=30).result(60)
    seen = set()
    while not {1, 2} <= seen:
        seen.add(line.next().content.group_id)  # type: ignore[union-attr]
    assert 0 not in seen
