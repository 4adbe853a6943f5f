"""Making a run's topics and subscriptions, through the stock clients."""

from __future__ import annotations

import contextlib

import grpc
from google.api_core.exceptions import AlreadyExists
from google.cloud import pubsub_v1
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport
from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcTransport

from trajectories.topics import NAMES, Topics

ACK_DEADLINE_S = 60
TIMEOUT_S = 30.0


def create_topics(topics: Topics, emulator_address: str | None = None) -> None:
    """Create every topic of the run and its subscription; those that exist stay as they are.

    With `emulator_address` on a local server, else on Google Cloud with the default credentials.
    """
    if emulator_address:
        channel = grpc.insecure_channel(emulator_address)
        publisher = pubsub_v1.PublisherClient(transport=PublisherGrpcTransport(channel=channel))
        subscriber = pubsub_v1.SubscriberClient(transport=SubscriberGrpcTransport(channel=channel))
    else:
        publisher, subscriber = pubsub_v1.PublisherClient(), pubsub_v1.SubscriberClient()
    for name in NAMES:
        topic, subscription = topics.topic(name), topics.subscription(name)
        with contextlib.suppress(AlreadyExists):
            publisher.create_topic(name=topic, timeout=TIMEOUT_S)
        with contextlib.suppress(AlreadyExists):
            subscriber.create_subscription(
                name=subscription, topic=topic, ack_deadline_seconds=ACK_DEADLINE_S, timeout=TIMEOUT_S
            )
    subscriber.close()
    publisher.stop()
