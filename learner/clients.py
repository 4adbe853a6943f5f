"""Stock Pub/Sub clients, made so that big messages arrive and a restarted server is found again soon.

With PUBSUB_EMULATOR_HOST the stock client builds a channel with gRPC's receive limit of 4 MiB, over which messages
vanish without an error; and a channel whose server died may wait two minutes before it tries again.
"""

from __future__ import annotations

import os
from typing import Any

MEBIBYTE = 1 << 20
PUBLISH_TIMEOUT_S = 60.0
"""Of one publish request; the client repeats it for `RETRY_S`."""
RETRY_S = 600.0

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


def _emulator_channel() -> Any | None:
    host = os.environ.get("PUBSUB_EMULATOR_HOST")
    if not host:
        return None
    import grpc

    return grpc.insecure_channel(host, options=[*_CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)])


def publisher_client() -> Any:
    """A publisher that sends at once: tasks are few and their latency is what the learner waits for."""
    from google.cloud import pubsub_v1
    from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport

    batch = pubsub_v1.types.BatchSettings(max_messages=100, max_bytes=4 * MEBIBYTE, max_latency=0.005)
    channel = _emulator_channel()
    if channel is None:
        return pubsub_v1.PublisherClient(batch_settings=batch)
    return pubsub_v1.PublisherClient(batch_settings=batch, transport=PublisherGrpcTransport(channel=channel))


def subscriber_client() -> Any:
    """A subscriber without a limit on the size of a message."""
    from google.cloud import pubsub_v1
    from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcTransport

    channel = _emulator_channel()
    if channel is None:
        return pubsub_v1.SubscriberClient()
    return pubsub_v1.SubscriberClient(transport=SubscriberGrpcTransport(channel=channel))


def publish_retry() -> Any:
    """Retry that asks a server that is away again within a second, for `RETRY_S`."""
    from google.api_core import exceptions, retry

    again = retry.if_exception_type(
        exceptions.Aborted,
        exceptions.DeadlineExceeded,
        exceptions.InternalServerError,
        exceptions.ResourceExhausted,
        exceptions.ServiceUnavailable,
        exceptions.Unknown,
        exceptions.Cancelled,
    )
    return retry.Retry(predicate=again, initial=0.1, maximum=1.0, multiplier=1.5, timeout=RETRY_S)
