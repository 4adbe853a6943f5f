"""Topics, subscriptions and snapshots: what the API's requests mean, apart from gRPC.

Invariant: one thread (the event loop's) owns all state here; what the log's writer runs gets plain values. A request
changes memory so that a later request sees it in order, submits to the log, and answers after the commit. A published
message becomes deliverable when its commit is reported; an acknowledged one leaves memory at once, so it is not
delivered again while its commit is under way.

Memory holds a small record for each unacknowledged message and a bounded cache of bodies; the bodies are in the log.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc
from google.pubsub_v1 import types

from emulator.delivery import Delivery, Lease, Pending
from emulator.filters import parse_filter
from emulator.names import DELETED_TOPIC, check_name, check_project
from emulator.resources import (
    BodyCache,
    PubsubMessage,
    ReceivedMessage,
    Snapshot,
    SnapshotState,
    Subscription,
    SubscriptionState,
    Topic,
    TopicState,
    delivery_settings,
    put_snapshot,
    put_subscription,
    put_topic,
)
from emulator.storage import Log, NewMessage, Operations, StoredMessage
from emulator.validation import (
    DAY_S,
    Refused,
    check_publish,
    check_topic,
    complete_subscription,
    invalid,
    named,
    updated,
)

T = TypeVar("T")

MAX_RESPONSE_BYTES = 4_000_000
"""Message bytes in one response, one larger message apart: a client of an emulator has gRPC's limit of 4 MiB."""
CACHE_BYTES = 64 * 1024 * 1024
"""Bodies kept in memory for delivery soon after publishing."""
TICK_S = 0.05
"""How late a deadline or a backoff may be noticed."""
HOUSEKEEPING_S = 10.0
"""How late a message's or a snapshot's retention may be noticed, and spare disk space given back."""
SNAPSHOT_LIFE_S = 7 * DAY_S
SNAPSHOT_MIN_LIFE_S = 3600
DEFAULT_PAGE = 1000

SECOND_NS = 1_000_000_000


@dataclass(frozen=True)
class Clock:
    """The time, from outside."""

    monotonic: Callable[[], float]
    """Seconds that never go back: leases and backoffs."""
    wall_ns: Callable[[], int]
    """Nanoseconds since the epoch: publish times and retention."""


class Broker:
    """See the module's docstring. Its coroutines raise Refused for what the service would refuse."""

    def __init__(self, log: Log, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._cache = BodyCache(CACHE_BYTES)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="log-reader")
        self._administration = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._consumers = 0
        self._last_published_ns = 0
        self._load()

    def _load(self) -> None:
        contents = self._log.contents()
        self._next_id = contents.next_id
        self._ack_prefix = contents.instance
        self._boot = secrets.token_hex(4)
        self._topics: dict[str, TopicState] = {}
        self._subscriptions: dict[str, SubscriptionState] = {}
        self._snapshots: dict[str, SnapshotState] = {}
        by_id: dict[int, TopicState] = {}
        for row in contents.topics:
            by_id[row.id] = topic = TopicState(row.id, Topic.FromString(row.proto), deleted=row.name is None)
            if row.name is not None:
                self._topics[row.name] = topic
        for row in contents.subscriptions:
            subscription = self._subscription_state(row.id, Subscription.FromString(row.proto), by_id[row.topic])
            self._register(subscription)
            subscription.delivery.add(_pending(self._log.backlog(row.id)))
        for row in contents.snapshots:
            snapshot = SnapshotState(row.id, Snapshot.FromString(row.proto), by_id[row.topic], row.cut)
            self._snapshots[snapshot.proto.name] = snapshot
            snapshot.topic.snapshots += 1

    # Running

    async def run(self) -> None:
        """Notice deadlines, backoffs and retention until cancelled."""
        housekeeping_at = self._clock.monotonic() + HOUSEKEEPING_S
        while True:
            await asyncio.sleep(TICK_S)
            now = self._clock.monotonic()
            for subscription in self._subscriptions.values():
                if subscription.delivery.tick(now):
                    self._settle(subscription)
            if now >= housekeeping_at:
                housekeeping_at = now + HOUSEKEEPING_S
                self.housekeep()

    def housekeep(self) -> None:
        """Delete what no retention covers any more and give spare disk space back."""
        wall_ns = self._clock.wall_ns()
        for subscription in self._subscriptions.values():
            self._expire(subscription, wall_ns - subscription.proto.message_retention_duration.ToNanoseconds())
        for topic in self._topics.values():
            if topic.retention_ns is not None:
                self._submit(
                    partial(Operations.expire_retained, topic=topic.id, before_ns=wall_ns - topic.retention_ns)
                )
        for snapshot in list(self._snapshots.values()):
            if snapshot.proto.expire_time.ToNanoseconds() <= wall_ns:
                self._drop_snapshot(snapshot)
        self._submit(Operations.forget_deleted_topics)
        self._log.tidy()

    def _expire(self, subscription: SubscriptionState, before_ns: int) -> None:
        expired = subscription.delivery.older_than(before_ns)
        for message in expired:
            subscription.delivery.forget(message)
        if expired:
            subscription.wake()
            self._submit(lambda log: log.acknowledge(subscription.id, expired))
        if subscription.proto.retain_acked_messages:
            self._submit(lambda log: log.expire_acknowledged(subscription.id, subscription.topic.id, before_ns))

    def close(self) -> None:
        """Release the reading thread. The log is the caller's."""
        for task in self._tasks:
            task.cancel()
        self._reader.shutdown(wait=True, cancel_futures=True)

    # Topics

    async def create_topic(self, proto: Any) -> Any:
        """Create a topic; returns it."""
        check_topic(proto)
        async with self._administration:
            if proto.name in self._topics:
                raise _exists(proto.name)
            topic = TopicState(self._new_id(), proto)
            await self._commit(put_topic(topic))
            self._topics[proto.name] = topic
        return proto

    async def update_topic(self, wanted: Any, mask: Any) -> Any:
        """Change the fields of `mask`; returns the whole topic."""
        async with self._administration:
            topic = self._topic(wanted.name)
            proto = updated("topic", topic.proto, wanted, mask)
            check_topic(proto)
            topic.proto = proto
            put = put_topic(topic)

            def change(log: Operations) -> None:
                put(log)
                log.sweep(topic.id)

            await self._commit(change)
        return proto

    def get_topic(self, name: str) -> Any:
        """The topic of this name."""
        return self._topic(name).proto

    def list_topics(self, project: str, page_size: int, page_token: str) -> tuple[list[Any], str]:
        """One page of a project's topics, and the token of the next."""
        return _page(self._of_project(self._topics, project), page_size, page_token)

    def list_topic_subscriptions(self, topic: str, page_size: int, page_token: str) -> tuple[list[str], str]:
        """One page of the names of a topic's subscriptions, and the token of the next."""
        names = {s.proto.name: s.proto.name for s in self._topic(topic).subscriptions.values()}
        return _page(names, page_size, page_token)

    def list_topic_snapshots(self, topic: str, page_size: int, page_token: str) -> tuple[list[str], str]:
        """One page of the names of a topic's snapshots, and the token of the next."""
        state = self._topic(topic)
        names = {s.proto.name: s.proto.name for s in self._snapshots.values() if s.topic is state}
        return _page(names, page_size, page_token)

    async def delete_topic(self, name: str) -> None:
        """Delete a topic. Its subscriptions and snapshots stay, with what they hold."""
        async with self._administration:
            topic = self._topic(name)
            del self._topics[name]
            topic.deleted = True
            puts: list[Callable[[Operations], None]] = []
            for subscription in self._subscriptions.values():
                if subscription.topic is topic:
                    subscription.proto.topic = DELETED_TOPIC
                    puts.append(put_subscription(subscription))
            for snapshot in self._snapshots.values():
                if snapshot.topic is topic:
                    snapshot.proto.topic = DELETED_TOPIC
                    puts.append(put_snapshot(snapshot))

            def delete(log: Operations) -> None:
                log.delete_topic(topic.id)
                for put in puts:
                    put(log)

            await self._commit(delete)

    async def publish(self, request: Any) -> list[str]:
        """Publish; returns the message ids after the commit."""
        check_publish(request)
        topic = self._topic(request.topic)
        return await self._publish(topic, request.messages)

    async def _publish(
        self, topic: TopicState, protos: Iterable[Any], also: Callable[[Operations], None] | None = None
    ) -> list[str]:
        """Append messages to a topic and, in the same transaction, do `also`."""
        self._last_published_ns = published_ns = max(self._clock.wall_ns(), self._last_published_ns)
        messages = []
        ids = []
        arrivals: list[tuple[SubscriptionState, list[NewMessage]]] = [(s, []) for s in topic.subscriptions.values()]
        retains = topic.snapshots > 0 or topic.retention_ns is not None
        for proto in protos:
            number = self._new_id()
            ids.append(str(number))
            proto.message_id = ids[-1]
            proto.publish_time.FromNanoseconds(published_ns)
            message = NewMessage(number, published_ns, proto.ordering_key, proto.SerializeToString())
            wanted = retains
            for subscription, arrived in arrivals:
                if subscription.matches is None or subscription.matches(proto.attributes):
                    arrived.append(message)
                    wanted = True
            if wanted:
                messages.append(message)
        deliveries = [(message.message, s.id) for s, arrived in arrivals for message in arrived]
        last = self._next_id - 1

        def append(log: Operations) -> None:
            if messages:
                log.append(topic.id, messages, deliveries)
            log.note_id(last)
            if also is not None:
                also(log)

        def deliver(_: None) -> None:
            for message in messages:
                self._cache.put(message.message, message.body)
            for subscription, arrived in arrivals:
                if arrived and subscription.closed is None:
                    subscription.delivery.add(Pending(m.message, len(m.body), m.published_ns, m.key) for m in arrived)
                    subscription.wake()

        await self._commit(append, deliver)
        return ids

    # Subscriptions

    async def create_subscription(self, proto: Any) -> Any:
        """Create a subscription; returns it with its defaults filled in."""
        complete_subscription(proto)
        named(check_name, proto.topic, "topics")
        async with self._administration:
            if proto.name in self._subscriptions:
                raise _exists(proto.name)
            topic = self._topic(proto.topic)
            if proto.HasField("dead_letter_policy"):
                self._topic(proto.dead_letter_policy.dead_letter_topic)
            proto.state = types.Subscription.State.ACTIVE
            proto.detached = False
            subscription = self._subscription_state(self._new_id(), proto, topic)
            await self._commit(put_subscription(subscription))
            self._register(subscription)
        return self._shown(subscription)

    async def update_subscription(self, wanted: Any, mask: Any) -> Any:
        """Change the fields of `mask`; returns the whole subscription."""
        async with self._administration:
            subscription = self._subscription(wanted.name)
            proto = updated("subscription", subscription.proto, wanted, mask)
            complete_subscription(proto)
            if proto.HasField("dead_letter_policy"):
                self._topic(proto.dead_letter_policy.dead_letter_topic)
            subscription.proto = proto
            subscription.delivery.settings = delivery_settings(proto)
            subscription.wake()
            put = put_subscription(subscription)
            retains = proto.retain_acked_messages

            def change(log: Operations) -> None:
                put(log)
                if not retains:
                    log.drop_acknowledged(subscription.id, subscription.topic.id)

            await self._commit(change)
        return self._shown(subscription)

    def get_subscription(self, name: str) -> Any:
        """The subscription of this name."""
        return self._shown(self._subscription(name))

    def list_subscriptions(self, project: str, page_size: int, page_token: str) -> tuple[list[Any], str]:
        """One page of a project's subscriptions, and the token of the next."""
        return _page(self._of_project(self._subscriptions, project), page_size, page_token)

    async def delete_subscription(self, name: str) -> None:
        """Delete a subscription and its backlog."""
        async with self._administration:
            subscription = self._subscription(name)
            del self._subscriptions[name]
            self._close(subscription, Refused(grpc.StatusCode.NOT_FOUND, f"Resource not found (resource={name})."))
            await self._commit(lambda log: log.delete_subscription(subscription.id, subscription.topic.id))

    async def detach_subscription(self, name: str) -> None:
        """Cut a subscription off its topic and drop its backlog."""
        async with self._administration:
            subscription = self._subscription(name)
            subscription.proto.detached = True
            self._close(subscription, _detached(name))
            put = put_subscription(subscription)

            def detach(log: Operations) -> None:
                put(log)
                log.drop_backlog(subscription.id, subscription.topic.id)

            await self._commit(detach)

    def open(self, name: str) -> SubscriptionState:
        """A subscription that messages can be had from. Raises Refused for an unknown or a detached one."""
        subscription = self._subscription(name)
        if subscription.closed is not None:
            raise subscription.closed
        return subscription

    # Messages

    def attach(self, subscription: SubscriptionState) -> int:
        """A stream begins; returns its number."""
        self._consumers += 1
        subscription.delivery.attach(self._consumers)
        return self._consumers

    def detach(self, subscription: SubscriptionState, consumer: int) -> None:
        """A stream has ended, however it ended: what it held is ready for others."""
        subscription.delivery.detach(consumer, self._clock.monotonic())
        self._settle(subscription)

    async def pull(self, name: str, max_messages: int, wait_s: float) -> list[Any]:
        """Up to `max_messages` ReceivedMessages, waiting at most `wait_s` for the first."""
        subscription = self.open(name)
        if max_messages <= 0:
            raise invalid(f"max_messages must be positive, found {max_messages}")
        until = self._clock.monotonic() + wait_s
        with subscription.listening() as event:
            while True:
                event.clear()
                lease_s = subscription.proto.ack_deadline_seconds
                leases = self.take(subscription, max_messages, MAX_RESPONSE_BYTES, lease_s)
                left_s = until - self._clock.monotonic()
                if leases or left_s <= 0:
                    break
                try:
                    await asyncio.wait_for(event.wait(), left_s)
                except TimeoutError:
                    break
                if subscription.closed is not None:
                    raise subscription.closed
        return await self.received(subscription, leases)

    def take(
        self, subscription: SubscriptionState, max_messages: int, max_bytes: int, lease_s: float, consumer: int = 0
    ) -> list[Lease]:
        """Lease what is ready, for at most one response."""
        return subscription.delivery.take(
            max_messages, min(max_bytes, MAX_RESPONSE_BYTES), self._clock.monotonic(), lease_s, consumer
        )

    async def received(self, subscription: SubscriptionState, leases: Sequence[Lease]) -> list[Any]:
        """The ReceivedMessages of these leases."""
        bodies = {lease.pending.message: self._cache.get(lease.pending.message) for lease in leases}
        absent = [message for message, body in bodies.items() if body is None]
        if absent:
            loop = asyncio.get_running_loop()
            try:
                bodies.update(await loop.run_in_executor(self._reader, self._log.bodies, absent))
            except asyncio.CancelledError:
                self._return(subscription, leases)
                raise
        counted = subscription.delivery.settings.max_attempts > 0
        received = []
        for lease in leases:
            body = bodies[lease.pending.message]
            if body is None:
                continue  # Acknowledged under an earlier lease while the log was being read.
            message = ReceivedMessage(
                ack_id=self._ack_id(subscription, lease), delivery_attempt=lease.pending.attempts if counted else 0
            )
            message.message.ParseFromString(body)
            received.append(message)
        return received

    async def acknowledge(self, subscription: SubscriptionState, ack_ids: Iterable[str]) -> list[str]:
        """Acknowledge; returns, after the commit, those ids that did not count."""
        done = []
        refused = []
        for ack_id in ack_ids:
            message, serial = self._parse_ack_id(subscription, ack_id)
            if subscription.delivery.acknowledge(message, serial):
                done.append(message)
                if len(subscription.topic.subscriptions) == 1:
                    self._cache.drop(message)
            else:
                refused.append(ack_id)
        if done:
            subscription.wake()
            retain = subscription.proto.retain_acked_messages
            await self._commit(lambda log: log.acknowledge(subscription.id, done, retain=retain))
        return refused

    def modify(self, subscription: SubscriptionState, changes: Iterable[tuple[str, int]]) -> list[str]:
        """Move the deadlines of (ack id, seconds from now), 0 to give back; returns those ids that did not count."""
        now = self._clock.monotonic()
        refused = []
        for ack_id, seconds in changes:
            message, serial = self._parse_ack_id(subscription, ack_id)
            if not subscription.delivery.modify(message, serial, seconds, now):
                refused.append(ack_id)
        self._settle(subscription)
        return refused

    # Snapshots and seek

    async def create_snapshot(self, name: str, subscription_name: str, labels: dict[str, str]) -> Any:
        """Capture a subscription's backlog and all that follows; returns the Snapshot."""
        named(check_name, name, "snapshots")
        async with self._administration:
            if name in self._snapshots:
                raise _exists(name)
            subscription = self.open(subscription_name)
            topic = subscription.topic
            if topic.deleted:
                raise Refused(grpc.StatusCode.FAILED_PRECONDITION, f"the topic of {subscription_name} is deleted")
            wall_ns = self._clock.wall_ns()
            oldest = next(iter(subscription.delivery.pending.values()), None)
            age_ns = wall_ns - oldest.published_ns if oldest else 0
            life_ns = SNAPSHOT_LIFE_S * SECOND_NS - age_ns
            if life_ns < SNAPSHOT_MIN_LIFE_S * SECOND_NS:
                raise Refused(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    "the oldest unacknowledged message is too old: the snapshot would live for less than an hour",
                )
            proto = Snapshot(name=name, topic=topic.proto.name, labels=labels)
            proto.expire_time.FromNanoseconds(wall_ns + life_ns)
            snapshot = SnapshotState(self._new_id(), proto, topic, cut=self._next_id - 1)
            topic.snapshots += 1
            put = put_snapshot(snapshot)

            def create(log: Operations) -> None:
                put(log)
                log.capture(snapshot.id, subscription.id)

            await self._commit(create)
            self._snapshots[name] = snapshot
        return proto

    def get_snapshot(self, name: str) -> Any:
        """The snapshot of this name."""
        return self._snapshot(name).proto

    def list_snapshots(self, project: str, page_size: int, page_token: str) -> tuple[list[Any], str]:
        """One page of a project's snapshots, and the token of the next."""
        return _page(self._of_project(self._snapshots, project), page_size, page_token)

    async def update_snapshot(self, wanted: Any, mask: Any) -> Any:
        """Change a snapshot's labels or expiry; returns it."""
        async with self._administration:
            snapshot = self._snapshot(wanted.name)
            snapshot.proto = updated("snapshot", snapshot.proto, wanted, mask)
            await self._commit(put_snapshot(snapshot))
        return snapshot.proto

    async def delete_snapshot(self, name: str) -> None:
        """Delete a snapshot."""
        async with self._administration:
            await self._drop_snapshot(self._snapshot(name))

    def _drop_snapshot(self, snapshot: SnapshotState) -> asyncio.Future[None]:
        del self._snapshots[snapshot.proto.name]
        snapshot.topic.snapshots -= 1
        return self._submit(lambda log: log.delete_snapshot(snapshot.id, snapshot.topic.id))

    async def seek(self, name: str, *, since_ns: int | None = None, snapshot: str | None = None) -> None:
        """Set a subscription's backlog to what was published since a time, or to a snapshot."""
        async with self._administration:
            subscription = self.open(name)
            state = None if snapshot is None else self._snapshot(snapshot)
            if state is not None and state.topic is not subscription.topic:
                raise Refused(grpc.StatusCode.FAILED_PRECONDITION, f"{snapshot} is of another topic than {name}")
            matches = subscription.matches
            wanted = None if matches is None else lambda body: matches(PubsubMessage.FromString(body).attributes)
            retain = subscription.proto.retain_acked_messages
            subscription.delivery.clear()

            def reload(backlog: list[StoredMessage]) -> None:
                subscription.delivery.clear()
                subscription.delivery.add(_pending(backlog))
                subscription.wake()

            await self._commit(
                lambda log: log.seek(
                    subscription.id,
                    subscription.topic.id,
                    since_ns=since_ns,
                    snapshot=None if state is None else (state.id, state.cut),
                    wanted=wanted,
                    retain=retain,
                ),
                reload,
            )

    # Inside

    def _settle(self, subscription: SubscriptionState) -> None:
        """After anything that may have given messages back: note attempts, forward the dead, wake who waits."""
        came_back, dead = subscription.delivery.drain_returned()
        if came_back and subscription.delivery.settings.max_attempts:
            attempts = [(pending.message, pending.attempts) for pending in came_back]
            self._submit(lambda log: log.note_attempts(subscription.id, attempts))
        for pending in dead:
            task = asyncio.get_running_loop().create_task(self._forward(subscription, pending))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if came_back:
            subscription.wake()

    async def _forward(self, subscription: SubscriptionState, pending: Pending) -> None:
        """Move a message that was delivered too often to the dead-letter topic, in one transaction."""
        message = pending.message
        topic = self._topics.get(subscription.proto.dead_letter_policy.dead_letter_topic)
        body = self._cache.get(message)
        if body is None:
            read = await asyncio.get_running_loop().run_in_executor(self._reader, self._log.bodies, [message])
            body = read.get(message)
        if subscription.delivery.pending.get(message) is not pending or body is None:
            return
        if topic is None or topic.deleted:
            subscription.delivery.revive(pending)
            subscription.wake()
            return
        proto = PubsubMessage.FromString(body)
        _, project, _, name = subscription.proto.name.split("/")
        proto.attributes["CloudPubSubDeadLetterSourceDeliveryCount"] = str(pending.attempts)
        proto.attributes["CloudPubSubDeadLetterSourceSubscription"] = name
        proto.attributes["CloudPubSubDeadLetterSourceSubscriptionProject"] = project
        proto.attributes["CloudPubSubDeadLetterSourceTopicPublishTime"] = proto.publish_time.ToJsonString()
        subscription.delivery.forget(message)
        subscription.wake()
        retain = subscription.proto.retain_acked_messages
        await self._publish(topic, [proto], lambda log: log.acknowledge(subscription.id, [message], retain=retain))

    def _return(self, subscription: SubscriptionState, leases: Iterable[Lease]) -> None:
        now = self._clock.monotonic()
        for lease in leases:
            subscription.delivery.modify(lease.pending.message, lease.serial, 0, now)
        self._settle(subscription)

    def _submit(
        self, operation: Callable[[Operations], T], done: Callable[[T], None] | None = None
    ) -> asyncio.Future[T]:
        """Have the log commit `operation`; then `done` runs here, also if nobody waits for the future any more."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def report(result: T) -> None:
            if done is not None:
                done(result)
            if not future.done():
                future.set_result(result)

        self._log.submit(operation, report)
        return future

    async def _commit(self, operation: Callable[[Operations], T], done: Callable[[T], None] | None = None) -> T:
        return await self._submit(operation, done)

    def _new_id(self) -> int:
        number = self._next_id
        self._next_id += 1
        return number

    def _ack_id(self, subscription: SubscriptionState, lease: Lease) -> str:
        return f"{self._ack_prefix}-{self._boot}-{subscription.id:x}-{lease.pending.message:x}-{lease.serial:x}"

    def _parse_ack_id(self, subscription: SubscriptionState, ack_id: str) -> tuple[int, int]:
        """(message, serial); serial 0: leased before a restart; message 0: of another subscription."""
        try:
            log, boot, of, message, serial = ack_id.split("-")
            numbers = int(of, 16), int(message, 16), int(serial, 16)
        except ValueError:
            if subscription.delivery.settings.exactly_once:
                return 0, 0
            raise invalid(f"You have passed an invalid ack ID to the service (ack_id={ack_id}).") from None
        if log != self._ack_prefix or numbers[0] != subscription.id:
            return 0, 0
        return numbers[1], numbers[2] if boot == self._boot else 0

    def _topic(self, name: str) -> TopicState:
        named(check_name, name, "topics")
        if name not in self._topics:
            raise _not_found(name)
        return self._topics[name]

    def _subscription(self, name: str) -> SubscriptionState:
        named(check_name, name, "subscriptions")
        if name not in self._subscriptions:
            raise _not_found(name)
        return self._subscriptions[name]

    def _snapshot(self, name: str) -> SnapshotState:
        named(check_name, name, "snapshots")
        if name not in self._snapshots:
            raise _not_found(name)
        return self._snapshots[name]

    def _subscription_state(self, number: int, proto: Any, topic: TopicState) -> SubscriptionState:
        return SubscriptionState(
            id=number,
            proto=proto,
            topic=topic,
            delivery=Delivery(delivery_settings(proto)),
            matches=parse_filter(proto.filter) if proto.filter else None,
            closed=_detached(proto.name) if proto.detached else None,
        )

    def _register(self, subscription: SubscriptionState) -> None:
        self._subscriptions[subscription.proto.name] = subscription
        if subscription.closed is None:
            subscription.topic.subscriptions[subscription.id] = subscription

    def _close(self, subscription: SubscriptionState, why: Refused) -> None:
        subscription.closed = why
        subscription.topic.subscriptions.pop(subscription.id, None)
        subscription.delivery.clear()
        subscription.wake()

    def _shown(self, subscription: SubscriptionState) -> Any:
        proto = Subscription()
        proto.CopyFrom(subscription.proto)
        if subscription.topic.retention_ns is not None:
            proto.topic_message_retention_duration.FromNanoseconds(subscription.topic.retention_ns)
        return proto

    def _of_project(self, states: dict[str, Any], project: str) -> dict[str, Any]:
        named(check_project, project)
        return {name: state.proto for name, state in states.items() if name.startswith(f"{project}/")}


def _pending(stored: Iterable[StoredMessage]) -> list[Pending]:
    return [Pending(m.message, m.size, m.published_ns, m.key, m.attempts) for m in stored]


def _page(found: dict[str, T], page_size: int, page_token: str) -> tuple[list[T], str]:
    """Items by name after the token's, and the token of the next page."""
    if page_size < 0:
        raise invalid(f"page_size must not be negative, found {page_size}")
    names = sorted(name for name in found if name > page_token)
    size = min(page_size or DEFAULT_PAGE, DEFAULT_PAGE)
    return [found[name] for name in names[:size]], names[size - 1] if len(names) > size else ""


def _exists(name: str) -> Refused:
    return Refused(grpc.StatusCode.ALREADY_EXISTS, f"Resource already exists in the project (resource={name}).")


def _not_found(name: str) -> Refused:
    return Refused(grpc.StatusCode.NOT_FOUND, f"Resource not found (resource={name}).")


def _detached(name: str) -> Refused:
    return Refused(grpc.StatusCode.FAILED_PRECONDITION, f"{name} is detached from its topic.")
