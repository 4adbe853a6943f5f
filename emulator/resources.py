"""What the broker keeps in memory of a topic, a subscription and a snapshot, and how each is written down.

Invariant: `put_*` takes the state's value when it is called, so that the log's writer thread never reads live state.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from google.pubsub_v1 import types

from emulator.delivery import Delivery, DeliverySettings
from emulator.filters import Filter
from emulator.storage import Operations
from emulator.validation import Refused, duration_s


def protobuf_class(wrapper: Any) -> Any:
    """The plain protobuf class behind one of google-cloud-pubsub's wrappers."""
    return type(wrapper.pb(wrapper()))


Topic = protobuf_class(types.Topic)
Subscription = protobuf_class(types.Subscription)
Snapshot = protobuf_class(types.Snapshot)
PubsubMessage = protobuf_class(types.PubsubMessage)
ReceivedMessage = protobuf_class(types.ReceivedMessage)


@dataclass(eq=False)
class TopicState:
    """A topic, deleted ones included as long as a subscription or snapshot refers to them."""

    id: int
    proto: Any
    """google.pubsub.v1.Topic."""
    subscriptions: "dict[int, SubscriptionState]" = field(default_factory=dict)
    """Those that get what is published: not the detached ones."""
    snapshots: int = 0
    deleted: bool = False

    @property
    def retention_ns(self) -> int | None:
        """How long the topic itself keeps its messages, if it does."""
        if self.deleted or not self.proto.HasField("message_retention_duration"):
            return None
        return int(self.proto.message_retention_duration.ToNanoseconds())


@dataclass(eq=False)
class SubscriptionState:
    """A subscription and its delivery."""

    id: int
    proto: Any
    """google.pubsub.v1.Subscription."""
    topic: TopicState
    delivery: Delivery
    matches: Filter | None
    """None: every message."""
    listeners: set[asyncio.Event] = field(default_factory=set)
    """Those who wait for something to deliver."""
    closed: Refused | None = None
    """Why nothing is delivered any more: deleted, or detached."""

    def wake(self) -> None:
        """Something may be ready, or the subscription has closed."""
        for listener in self.listeners:
            listener.set()

    @contextmanager
    def listening(self) -> Iterator[asyncio.Event]:
        """An event that is set whenever something may be ready."""
        event = asyncio.Event()
        self.listeners.add(event)
        try:
            yield event
        finally:
            self.listeners.discard(event)


@dataclass(eq=False)
class SnapshotState:
    """A snapshot: the messages captured in the log, and everything of the topic with an id above `cut`."""

    id: int
    proto: Any
    """google.pubsub.v1.Snapshot."""
    topic: TopicState
    cut: int


class BodyCache:
    """The most recently used bodies, up to a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bodies: OrderedDict[int, bytes] = OrderedDict()
        self._bytes = 0

    def put(self, message: int, body: bytes) -> None:
        """Keep a body, at the cost of those not used for longest."""
        self.drop(message)
        self._bodies[message] = body
        self._bytes += len(body)
        while self._bytes > self._max_bytes:
            self._bytes -= len(self._bodies.popitem(last=False)[1])

    def get(self, message: int) -> bytes | None:
        """The body, if it is here."""
        body = self._bodies.get(message)
        if body is not None:
            self._bodies.move_to_end(message)
        return body

    def drop(self, message: int) -> None:
        """Let go of a body."""
        body = self._bodies.pop(message, None)
        if body is not None:
            self._bytes -= len(body)


def delivery_settings(proto: Any) -> DeliverySettings:
    """What of a Subscription rules its delivery."""
    retries = proto.HasField("retry_policy")
    return DeliverySettings(
        ordered=proto.enable_message_ordering,
        exactly_once=proto.enable_exactly_once_delivery,
        max_attempts=proto.dead_letter_policy.max_delivery_attempts if proto.HasField("dead_letter_policy") else 0,
        min_backoff_s=duration_s(proto.retry_policy.minimum_backoff) if retries else 0.0,
        max_backoff_s=duration_s(proto.retry_policy.maximum_backoff) if retries else 0.0,
    )


def put_topic(topic: TopicState) -> Callable[[Operations], None]:
    """Write the topic down as it is now."""
    number, name, retention_ns, proto = topic.id, topic.proto.name, topic.retention_ns, topic.proto.SerializeToString()
    return lambda log: log.put_topic(number, name, retention_ns, proto)


def put_subscription(state: SubscriptionState) -> Callable[[Operations], None]:
    """Write the subscription down as it is now."""
    number, name, topic, proto = state.id, state.proto.name, state.topic.id, state.proto.SerializeToString()
    return lambda log: log.put_subscription(number, name, topic, proto)


def put_snapshot(state: SnapshotState) -> Callable[[Operations], None]:
    """Write the snapshot down as it is now."""
    number, name, topic, cut = state.id, state.proto.name, state.topic.id, state.cut
    proto = state.proto.SerializeToString()
    return lambda log: log.put_snapshot(number, name, topic, cut, proto)
