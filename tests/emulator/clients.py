"""Stock clients and the few calls that most tests make."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.cloud import pubsub_v1
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport
from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcTransport

TIMEOUT_S = 30.0
"""For every call: against a dead host a client would wait for minutes."""
PROJECT = "conformance"


@dataclass
class Clients:
    """Stock clients of one server, without gRPC's 4 MiB limit on what they receive."""

    address: str
    publisher: pubsub_v1.PublisherClient
    subscriber: pubsub_v1.SubscriberClient
    name: Callable[[str], str]
    patience_s: float
    """How long a pull waits for messages."""

    def topic(self, **fields: Any) -> str:
        """A new topic."""
        name = self.name("topics")
        self.publisher.create_topic(request={"name": name, **fields}, timeout=TIMEOUT_S)
        return name

    def subscription(self, topic: str, **fields: Any) -> str:
        """A new subscription of `topic`."""
        name = self.name("subscriptions")
        self.subscriber.create_subscription(request={"name": name, "topic": topic, **fields}, timeout=TIMEOUT_S)
        return name

    def publish(self, topic: str, *bodies: bytes, **attributes: str) -> list[str]:
        """Publish in one request; the message ids."""
        messages = [{"data": body, "attributes": attributes} for body in bodies]
        return list(self.publisher.api.publish(topic=topic, messages=messages, timeout=TIMEOUT_S).message_ids)

    def pull(self, subscription: str, count: int = 1, *, within_s: float | None = None) -> list[Any]:
        """Pull until there are `count` messages; fewer if they do not come in time."""
        received: list[Any] = []
        deadline = time.monotonic() + (within_s or self.patience_s)
        while len(received) < count and time.monotonic() < deadline:
            # At once: the service (and Google's emulator) would hold an empty answer back for many seconds.
            response = self.subscriber.pull(
                subscription=subscription,
                max_messages=count - len(received),
                return_immediately=True,
                timeout=TIMEOUT_S,
            )
            received += response.received_messages
            if not response.received_messages:
                time.sleep(0.01)
        return received

    def nothing_left(self, subscription: str, *, for_s: float = 0.3) -> bool:
        """Whether nothing more arrives for a while."""
        deadline = time.monotonic() + for_s
        while time.monotonic() < deadline:
            if self.subscriber.pull(
                subscription=subscription, max_messages=10, return_immediately=True, timeout=TIMEOUT_S
            ).received_messages:
                return False
            time.sleep(0.02)
        return True

    def acknowledge(self, subscription: str, received: list[Any]) -> None:
        """Acknowledge by the unary call."""
        ack_ids = [message.ack_id for message in received]
        self.subscriber.acknowledge(subscription=subscription, ack_ids=ack_ids, timeout=TIMEOUT_S)

    def give_back(self, subscription: str, received: list[Any]) -> None:
        """Nack by the unary call."""
        self.modify(subscription, received, 0)

    def modify(self, subscription: str, received: list[Any], seconds: int) -> None:
        """Move deadlines by the unary call."""
        ack_ids = [message.ack_id for message in received]
        self.subscriber.modify_ack_deadline(
            subscription=subscription, ack_ids=ack_ids, ack_deadline_seconds=seconds, timeout=TIMEOUT_S
        )


_numbers = itertools.count(1)


def new_name(collection: str) -> str:
    """A resource name that no other test uses."""
    return f"projects/{PROJECT}/{collection}/{collection}-{next(_numbers)}"


def connect(address: str, patience_s: float = 10.0) -> Clients:
    """Stock clients of the server at `address`."""
    options = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        # Back soon after the server was killed.
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 200),
    ]
    channel = grpc.insecure_channel(address, options=options)
    return Clients(
        address,
        pubsub_v1.PublisherClient(
            transport=PublisherGrpcTransport(channel=channel),
            publisher_options=pubsub_v1.types.PublisherOptions(enable_message_ordering=True),
        ),
        pubsub_v1.SubscriberClient(transport=SubscriberGrpcTransport(channel=channel)),
        new_name,
        patience_s,
    )


def wait_until(condition: Callable[[], bool], within_s: float = 20.0) -> bool:
    """Whether `condition` came true in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
