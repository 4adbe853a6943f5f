"""Retention, with a clock that the tests move: the broker over a real log, without gRPC."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.pubsub_v1 import types

from emulator.broker import Broker, Clock
from emulator.resources import PubsubMessage, Snapshot, Subscription, Topic, protobuf_class
from emulator.storage import Durability, Log
from emulator.validation import Refused

TOPIC = "projects/retention/topics/topic"
SUBSCRIPTION = "projects/retention/subscriptions/subscription"
SNAPSHOT = "projects/retention/snapshots/snapshot"
HOUR_S = 3600
DAY_S = 24 * HOUR_S

PublishRequest = protobuf_class(types.PublishRequest)


class Stand:
    """A broker on a folder, and its time."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 1_000_000.0
        loop = asyncio.get_running_loop()
        self.failures: list[Exception] = []
        self.log = Log(
            folder, durability=Durability.PROCESS, post=loop.call_soon_threadsafe, failed=self.failures.append
        )
        self.broker = Broker(self.log, Clock(lambda: self.now_s, lambda: int(self.now_s * 1e9)))
        self.log.start()

    async def create(self, *, topic: dict[str, Any] | None = None, **subscription: Any) -> None:
        await self.broker.create_topic(Topic(name=TOPIC, **(topic or {})))
        await self.broker.create_subscription(Subscription(name=SUBSCRIPTION, topic=TOPIC, **subscription))

    async def publish(self, body: bytes) -> None:
        await self.broker.publish(PublishRequest(topic=TOPIC, messages=[PubsubMessage(data=body)]))

    async def pull(self) -> list[bytes]:
        """Everything there is, acknowledged."""
        received = await self.broker.pull(SUBSCRIPTION, 100, 0)
        await self.broker.acknowledge(self.broker.open(SUBSCRIPTION), [m.ack_id for m in received])
        return [m.message.data for m in received]

    async def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.broker.housekeep()
        await self.broker._commit(lambda log: None)

    def count(self, table: str) -> int:
        return int(self.log._reading.execute(f"SELECT count(*) FROM {table}").fetchone()[0])

    def close(self) -> None:
        self.broker.close()
        self.log.close()
        assert not self.failures


def run(folder: Path, test: Callable[[Stand], Awaitable[None]]) -> None:
    async def body() -> None:
        stand = Stand(folder)
        try:
            await test(stand)
        finally:
            stand.close()

    asyncio.run(body())


def test_unacknowledged_messages_expire(tmp_path):
    async def test(stand):
        await stand.create(message_retention_duration={"seconds": HOUR_S})
        await stand.publish(b"old")
        await stand.pass_time(HOUR_S - 1)
        await stand.publish(b"new")
        await stand.pass_time(2)
        assert await stand.pull() == [b"new"]
        assert stand.count("message") == 0

    run(tmp_path, test)


def test_retained_acknowledged_messages_expire(tmp_path):
    async def test(stand):
        await stand.create(message_retention_duration={"seconds": HOUR_S}, retain_acked_messages=True)
        await stand.publish(b"old")
        await stand.pass_time(HOUR_S / 2)
        await stand.publish(b"new")
        assert sorted(await stand.pull()) == [b"new", b"old"]
        assert stand.count("message") == 2
        await stand.pass_time(HOUR_S / 2 + 1)
        await stand.broker.seek(SUBSCRIPTION, since_ns=0)
        assert await stand.pull() == [b"new"]

    run(tmp_path, test)


def test_topic_retention_expires(tmp_path):
    async def test(stand):
        await stand.create(topic={"message_retention_duration": {"seconds": HOUR_S}})
        await stand.publish(b"x")
        assert await stand.pull() == [b"x"]
        await stand.broker.seek(SUBSCRIPTION, since_ns=0)
        assert await stand.pull() == [b"x"]
        await stand.pass_time(HOUR_S + 1)
        await stand.broker.seek(SUBSCRIPTION, since_ns=0)
        assert await stand.pull() == []
        assert stand.count("message") == 0

    run(tmp_path, test)


def test_switching_retention_off_lets_go(tmp_path):
    async def test(stand):
        await stand.create(retain_acked_messages=True)
        await stand.publish(b"x")
        await stand.pull()
        assert stand.count("message") == 1
        mask = types.UpdateSubscriptionRequest.pb(
            types.UpdateSubscriptionRequest(update_mask={"paths": ["retain_acked_messages"]})
        ).update_mask
        await stand.broker.update_subscription(Subscription(name=SUBSCRIPTION), mask)
        assert stand.count("message") == 0

    run(tmp_path, test)


def test_snapshots_expire_seven_days_after_their_oldest_message(tmp_path):
    async def test(stand):
        await stand.create()
        await stand.publish(b"x")
        await stand.pass_time(3 * DAY_S)
        snapshot: Snapshot = await stand.broker.create_snapshot(SNAPSHOT, SUBSCRIPTION, {})
        assert snapshot.expire_time.ToNanoseconds() == int((stand.now_s + 4 * DAY_S) * 1e9)
        await stand.pull()
        assert stand.count("message") == 1
        await stand.pass_time(4 * DAY_S)
        with pytest.raises(Refused) as caught:
            stand.broker.get_snapshot(SNAPSHOT)
        assert caught.value.code is grpc.StatusCode.NOT_FOUND
        assert stand.count("message") == stand.count("captured") == 0

    run(tmp_path, test)


def test_a_snapshot_of_an_old_backlog_is_refused(tmp_path):
    async def test(stand):
        await stand.create(message_retention_duration={"seconds": 10 * DAY_S})
        await stand.publish(b"x")
        await stand.pass_time(7 * DAY_S - HOUR_S / 2)
        with pytest.raises(Refused) as caught:
            await stand.broker.create_snapshot(SNAPSHOT, SUBSCRIPTION, {})
        assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION

    run(tmp_path, test)


def test_a_deleted_topic_is_forgotten_with_its_last_subscription(tmp_path):
    async def test(stand):
        await stand.create()
        await stand.broker.delete_topic(TOPIC)
        await stand.pass_time(1)
        assert stand.count("topic") == 1
        await stand.broker.delete_subscription(SUBSCRIPTION)
        await stand.pass_time(1)
        assert stand.count("topic") == 0

    run(tmp_path, test)


def test_dead_letters_wait_for_an_absent_topic(tmp_path):
    """The message is not lost: it is delivered again until the dead-letter topic is there."""

    async def test(stand):
        dead = "projects/retention/topics/dead"
        await stand.broker.create_topic(Topic(name=dead))
        await stand.create(dead_letter_policy={"dead_letter_topic": dead, "max_delivery_attempts": 5})
        await stand.broker.delete_topic(dead)
        await stand.publish(b"x")
        subscription = stand.broker.open(SUBSCRIPTION)
        for _ in range(7):
            (received,) = await stand.broker.pull(SUBSCRIPTION, 1, 5)
            stand.broker.modify(subscription, [(received.ack_id, 0)])
            await asyncio.sleep(0.05)
        assert received.delivery_attempt == 7

    run(tmp_path, test)


def test_a_cancelled_publish_is_still_delivered(tmp_path):
    """Its commit is under way: what is in the log must not wait there for a restart."""

    async def test(stand):
        await stand.create()
        publishing = asyncio.get_running_loop().create_task(stand.publish(b"x"))
        await asyncio.sleep(0)
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)
        await stand.broker._commit(lambda log: None)
        assert await stand.pull() == [b"x"]

    run(tmp_path, test)
