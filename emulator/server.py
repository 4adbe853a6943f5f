"""The gRPC surface: google.pubsub.v1's Publisher and Subscriber on grpcio's generic handlers.

Invariant: every answer comes after the broker's commit, and a stream's end, however it comes about, returns the
stream's leases. google-cloud-pubsub has no servicer classes: each method is a name, a request class and a coroutine.
"""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf import any_pb2, empty_pb2
from google.pubsub_v1 import types
from google.rpc import error_details_pb2, status_pb2

from emulator.broker import Broker, Clock
from emulator.resources import SubscriptionState, protobuf_class
from emulator.storage import Durability, Log, LogError
from emulator.validation import Refused, check_range, invalid

PULL_WAIT_S = 0.012
"""How long a pull without messages waits for one. The service waits for seconds; here one thread may serve a whole
pipeline (Beam's DirectRunner), whose timers stand still meanwhile."""
MAX_RECEIVE_BYTES = 64 * 1024 * 1024
"""Above the largest publish request, so that a too large one gets the service's own refusal."""
MAX_STREAM_MESSAGES = 1000
"""Most messages in one streaming response."""
STOP_GRACE_S = 0.5
"""What running requests get to finish at shutdown."""
UNLIMITED = 1 << 60

Method = Callable[[Any, Any], Awaitable[Any]]


@dataclass(frozen=True)
class ServerSettings:
    """How the server runs."""

    data: Path
    """Folder of the log; made if absent."""
    host: str = "127.0.0.1"
    """Address to listen on. There is no authentication."""
    port: int = 8085
    """Port to listen on; 0 picks a free one."""
    durability: Durability = Durability.PROCESS
    """What an acknowledged publish survives."""
    keepalive_s: float = 10.0
    """Silence after which a connection is probed."""
    keepalive_timeout_s: float = 20.0
    """How long the probe may go unanswered before the connection counts as dead."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be between 0 and 65535 (0 picks one), found {self.port}")
        if self.keepalive_s <= 0 or self.keepalive_timeout_s <= 0:
            raise ValueError(
                "keepalive_s and keepalive_timeout_s must be positive numbers of seconds, found "
                f"{self.keepalive_s} and {self.keepalive_timeout_s}"
            )


class Service:
    """The methods of the two services over one broker. Each takes a request and the call's context."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._stopping = False
        self._open: set[SubscriptionState] = set()

    def stop(self) -> None:
        """End the streams with a status that makes clients come back."""
        self._stopping = True
        for subscription in self._open:
            subscription.wake()

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        """The generic handlers for a grpc server."""
        publisher: dict[str, tuple[Any, Method]] = {
            "CreateTopic": (types.Topic, lambda r, _: self._broker.create_topic(r)),
            "UpdateTopic": (types.UpdateTopicRequest, self._update_topic),
            "Publish": (types.PublishRequest, self._publish),
            "GetTopic": (types.GetTopicRequest, self._get_topic),
            "ListTopics": (types.ListTopicsRequest, self._list_topics),
            "ListTopicSubscriptions": (types.ListTopicSubscriptionsRequest, self._list_topic_subscriptions),
            "ListTopicSnapshots": (types.ListTopicSnapshotsRequest, self._list_topic_snapshots),
            "DeleteTopic": (types.DeleteTopicRequest, self._delete_topic),
            "DetachSubscription": (types.DetachSubscriptionRequest, self._detach_subscription),
        }
        subscriber: dict[str, tuple[Any, Method]] = {
            "CreateSubscription": (types.Subscription, lambda r, _: self._broker.create_subscription(r)),
            "GetSubscription": (types.GetSubscriptionRequest, self._get_subscription),
            "UpdateSubscription": (types.UpdateSubscriptionRequest, self._update_subscription),
            "ListSubscriptions": (types.ListSubscriptionsRequest, self._list_subscriptions),
            "DeleteSubscription": (types.DeleteSubscriptionRequest, self._delete_subscription),
            "ModifyAckDeadline": (types.ModifyAckDeadlineRequest, self._modify_ack_deadline),
            "Acknowledge": (types.AcknowledgeRequest, self._acknowledge),
            "Pull": (types.PullRequest, self._pull),
            "ModifyPushConfig": (types.ModifyPushConfigRequest, self._modify_push_config),
            "GetSnapshot": (types.GetSnapshotRequest, self._get_snapshot),
            "ListSnapshots": (types.ListSnapshotsRequest, self._list_snapshots),
            "CreateSnapshot": (types.CreateSnapshotRequest, self._create_snapshot),
            "UpdateSnapshot": (types.UpdateSnapshotRequest, self._update_snapshot),
            "DeleteSnapshot": (types.DeleteSnapshotRequest, self._delete_snapshot),
            "Seek": (types.SeekRequest, self._seek),
        }
        streaming = grpc.stream_stream_rpc_method_handler(
            self._streaming_pull, protobuf_class(types.StreamingPullRequest).FromString, _serialize
        )
        return [
            grpc.method_handlers_generic_handler("google.pubsub.v1.Publisher", _unary(publisher)),
            grpc.method_handlers_generic_handler(
                "google.pubsub.v1.Subscriber", {**_unary(subscriber), "StreamingPull": streaming}
            ),
        ]

    # Publisher

    async def _update_topic(self, request: Any, _: Any) -> Any:
        return await self._broker.update_topic(request.topic, request.update_mask)

    async def _publish(self, request: Any, _: Any) -> Any:
        return _PublishResponse(message_ids=await self._broker.publish(request))

    async def _get_topic(self, request: Any, _: Any) -> Any:
        return self._broker.get_topic(request.topic)

    async def _list_topics(self, request: Any, _: Any) -> Any:
        topics, token = self._broker.list_topics(request.project, request.page_size, request.page_token)
        return _ListTopicsResponse(topics=topics, next_page_token=token)

    async def _list_topic_subscriptions(self, request: Any, _: Any) -> Any:
        names, token = self._broker.list_topic_subscriptions(request.topic, request.page_size, request.page_token)
        return _ListTopicSubscriptionsResponse(subscriptions=names, next_page_token=token)

    async def _list_topic_snapshots(self, request: Any, _: Any) -> Any:
        names, token = self._broker.list_topic_snapshots(request.topic, request.page_size, request.page_token)
        return _ListTopicSnapshotsResponse(snapshots=names, next_page_token=token)

    async def _delete_topic(self, request: Any, _: Any) -> Any:
        await self._broker.delete_topic(request.topic)
        return empty_pb2.Empty()

    async def _detach_subscription(self, request: Any, _: Any) -> Any:
        await self._broker.detach_subscription(request.subscription)
        return _DetachSubscriptionResponse()

    # Subscriber

    async def _get_subscription(self, request: Any, _: Any) -> Any:
        return self._broker.get_subscription(request.subscription)

    async def _update_subscription(self, request: Any, _: Any) -> Any:
        return await self._broker.update_subscription(request.subscription, request.update_mask)

    async def _list_subscriptions(self, request: Any, _: Any) -> Any:
        found, token = self._broker.list_subscriptions(request.project, request.page_size, request.page_token)
        return _ListSubscriptionsResponse(subscriptions=found, next_page_token=token)

    async def _delete_subscription(self, request: Any, _: Any) -> Any:
        await self._broker.delete_subscription(request.subscription)
        return empty_pb2.Empty()

    async def _modify_push_config(self, request: Any, _: Any) -> Any:
        self._broker.get_subscription(request.subscription)
        if request.push_config.ByteSize():
            raise Refused(grpc.StatusCode.UNIMPLEMENTED, "this server does not support push: pull instead")
        return empty_pb2.Empty()

    async def _pull(self, request: Any, _: Any) -> Any:
        wait_s = 0.0 if request.return_immediately else PULL_WAIT_S
        received = await self._broker.pull(request.subscription, request.max_messages, wait_s)
        return _PullResponse(received_messages=received)

    async def _acknowledge(self, request: Any, _: Any) -> Any:
        subscription = self._broker.open(request.subscription)
        if not request.ack_ids:
            raise invalid("No ack ids specified.")
        _report_refused(subscription, await self._broker.acknowledge(subscription, request.ack_ids))
        return empty_pb2.Empty()

    async def _modify_ack_deadline(self, request: Any, _: Any) -> Any:
        subscription = self._broker.open(request.subscription)
        if not request.ack_ids:
            raise invalid("No ack ids specified.")
        check_range("ack_deadline_seconds", request.ack_deadline_seconds, 0, 600)
        changes = ((ack_id, request.ack_deadline_seconds) for ack_id in request.ack_ids)
        _report_refused(subscription, self._broker.modify(subscription, changes))
        return empty_pb2.Empty()

    async def _get_snapshot(self, request: Any, _: Any) -> Any:
        return self._broker.get_snapshot(request.snapshot)

    async def _list_snapshots(self, request: Any, _: Any) -> Any:
        found, token = self._broker.list_snapshots(request.project, request.page_size, request.page_token)
        return _ListSnapshotsResponse(snapshots=found, next_page_token=token)

    async def _create_snapshot(self, request: Any, _: Any) -> Any:
        return await self._broker.create_snapshot(request.name, request.subscription, dict(request.labels))

    async def _update_snapshot(self, request: Any, _: Any) -> Any:
        return await self._broker.update_snapshot(request.snapshot, request.update_mask)

    async def _delete_snapshot(self, request: Any, _: Any) -> Any:
        await self._broker.delete_snapshot(request.snapshot)
        return empty_pb2.Empty()

    async def _seek(self, request: Any, _: Any) -> Any:
        target = request.WhichOneof("target")
        if target == "time":
            await self._broker.seek(request.subscription, since_ns=request.time.ToNanoseconds())
        elif target == "snapshot":
            await self._broker.seek(request.subscription, snapshot=request.snapshot)
        else:
            raise invalid("a seek needs a time or a snapshot")
        return _SeekResponse()

    # Streaming pull

    async def _streaming_pull(self, _: Any, context: Any) -> None:
        try:
            await self._stream(context)
        except Refused as refusal:
            await _abort(context, refusal)

    async def _stream(self, context: Any) -> None:
        first = await context.read()
        if first is grpc.aio.EOF:
            raise invalid("a streaming pull begins with a request that names its subscription")
        check_range("stream_ack_deadline_seconds", first.stream_ack_deadline_seconds, 10, 600)
        subscription = self._broker.open(first.subscription)
        stream = _Stream(self._broker, subscription, first)
        self._open.add(subscription)
        reading = asyncio.get_running_loop().create_task(stream.read(first, context))
        try:
            with subscription.listening() as event:
                stream.event = event
                reading.add_done_callback(lambda _: event.set())
                await context.write(stream.response())
                while not reading.done():
                    event.clear()
                    if self._stopping:
                        raise Refused(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
                    if subscription.closed is not None:
                        raise subscription.closed
                    response = await stream.next_response()
                    if response is None:
                        await event.wait()
                    else:
                        await context.write(response)
                reading.result()
        finally:
            reading.cancel()
            self._broker.detach(subscription, stream.consumer)
            if not subscription.listeners:
                self._open.discard(subscription)


class _Stream:
    """One streaming pull: its flow control, its deadline and what is to be confirmed."""

    def __init__(self, broker: Broker, subscription: SubscriptionState, first: Any) -> None:
        self._broker = broker
        self._subscription = subscription
        self._max_messages = first.max_outstanding_messages if first.max_outstanding_messages > 0 else UNLIMITED
        self._max_bytes = first.max_outstanding_bytes if first.max_outstanding_bytes > 0 else UNLIMITED
        self._deadline_s = first.stream_ack_deadline_seconds
        self._confirmations: list[Any] = []
        self.event = asyncio.Event()
        self.consumer = broker.attach(subscription)

    async def read(self, first: Any, context: Any) -> None:
        """Take in the client's requests until it stops sending."""
        await self._take_in(first)
        while (request := await context.read()) is not grpc.aio.EOF:
            if request.subscription or request.max_outstanding_messages or request.max_outstanding_bytes:
                raise invalid("subscription and flow control can be set by a stream's first request only")
            if request.stream_ack_deadline_seconds:
                check_range("stream_ack_deadline_seconds", request.stream_ack_deadline_seconds, 10, 600)
                self._deadline_s = request.stream_ack_deadline_seconds
            await self._take_in(request)

    async def _take_in(self, request: Any) -> None:
        ids, seconds = request.modify_deadline_ack_ids, request.modify_deadline_seconds
        if len(ids) != len(seconds):
            raise invalid(f"found {len(ids)} modify_deadline_ack_ids and {len(seconds)} modify_deadline_seconds")
        for value in seconds:
            check_range("modify_deadline_seconds", value, 0, 600)
        confirmation = _StreamingPullResponse()
        if ids:
            refused = set(self._broker.modify(self._subscription, zip(ids, seconds, strict=True)))
            confirmation.modify_ack_deadline_confirmation.ack_ids.extend(i for i in ids if i not in refused)
            confirmation.modify_ack_deadline_confirmation.invalid_ack_ids.extend(refused)
        if request.ack_ids:
            refused = set(await self._broker.acknowledge(self._subscription, request.ack_ids))
            confirmation.acknowledge_confirmation.ack_ids.extend(i for i in request.ack_ids if i not in refused)
            confirmation.acknowledge_confirmation.invalid_ack_ids.extend(refused)
        if self._subscription.delivery.settings.exactly_once and confirmation.ByteSize():
            self._confirmations.append(confirmation)
            self.event.set()

    async def next_response(self) -> Any | None:
        """What to send now, if anything."""
        if self._confirmations:
            return self.response(self._confirmations.pop(0))
        messages, size = self._subscription.delivery.outstanding(self.consumer)
        room, room_bytes = self._max_messages - messages, self._max_bytes - size
        if room <= 0 or room_bytes <= 0:
            return None
        leases = self._broker.take(
            self._subscription, min(room, MAX_STREAM_MESSAGES), room_bytes, self._deadline_s, self.consumer
        )
        if not leases:
            return None
        received = await self._broker.received(self._subscription, leases)
        return self.response(_StreamingPullResponse(received_messages=received))

    def response(self, response: Any = None) -> Any:
        """The response, with the subscription's properties: clients take an absent one for false."""
        response = response or _StreamingPullResponse()
        settings = self._subscription.delivery.settings
        response.subscription_properties.exactly_once_delivery_enabled = settings.exactly_once
        response.subscription_properties.message_ordering_enabled = settings.ordered
        return response


async def serve(settings: ServerSettings, listening: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT; calls `listening` with host:port once clients can connect. The exit status.

    Raises LogError if the log cannot be opened and OSError if the address cannot be had.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    failures: list[LogError] = []

    def failed(error: LogError) -> None:
        failures.append(error)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    log = Log(settings.data, durability=settings.durability, post=loop.call_soon_threadsafe, failed=failed)
    broker = Broker(log, Clock(time.monotonic, time.time_ns))
    service = Service(broker)
    server = grpc.aio.server(options=_options(settings))
    server.add_generic_rpc_handlers(service.handlers())
    try:
        port = server.add_insecure_port(f"{settings.host}:{settings.port}")
    except RuntimeError as error:
        log.close()
        raise OSError(
            f"cannot listen on {settings.host}:{settings.port}: choose another --port (0 picks one)"
        ) from error
    log.start()
    await server.start()
    running = loop.create_task(broker.run())
    running.add_done_callback(lambda _: stop.set())
    listening(f"{settings.host}:{port}")
    await stop.wait()
    service.stop()
    await server.stop(STOP_GRACE_S)
    if not running.done():
        running.cancel()
    broker.close()
    log.close()
    await asyncio.gather(running, return_exceptions=True)
    if failures:
        raise failures[0]
    if not running.cancelled():
        running.result()
    return 0


def _options(settings: ServerSettings) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
        ("grpc.max_send_message_length", -1),
        # Two servers on one port would each get half of the clients.
        ("grpc.so_reuseport", 0),
        # Probe silent connections, so that a frozen or vanished subscriber is noticed; allow clients to do the same.
        ("grpc.keepalive_time_ms", int(settings.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(settings.keepalive_timeout_s * 1000)),
        # gRPC's own bandwidth probe may be the ping in flight; then no other is sent and this limit alone counts.
        ("grpc.http2.ping_timeout_ms", int(settings.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ]


def _unary(methods: dict[str, tuple[Any, Method]]) -> dict[str, grpc.RpcMethodHandler]:
    return {
        name: grpc.unary_unary_rpc_method_handler(_refusing(method), protobuf_class(request).FromString, _serialize)
        for name, (request, method) in methods.items()
    }


def _refusing(method: Method) -> Method:
    async def call(request: Any, context: Any) -> Any:
        try:
            return await method(request, context)
        except Refused as refusal:
            return await _abort(context, refusal)

    return call


async def _abort(context: Any, refusal: Refused) -> None:
    """End the call with the refusal's status; invalid ack ids go along as the stock client expects them."""
    trailing: tuple[tuple[str, bytes], ...] = ()
    if refusal.invalid_ack_ids:
        detail = any_pb2.Any()
        detail.Pack(
            error_details_pb2.ErrorInfo(
                reason="EXACTLY_ONCE_ACKID_FAILURE",
                domain="pubsub.googleapis.com",
                metadata=dict.fromkeys(refusal.invalid_ack_ids, "PERMANENT_FAILURE_INVALID_ACK_ID"),
            )
        )
        status = status_pb2.Status(code=refusal.code.value[0], message=refusal.text, details=[detail])
        trailing = (("grpc-status-details-bin", status.SerializeToString()),)
    await context.abort(refusal.code, refusal.text, trailing)


def _report_refused(subscription: SubscriptionState, ack_ids: list[str]) -> None:
    """Only an exactly-once subscription reports acknowledgements that came too late."""
    if ack_ids and subscription.delivery.settings.exactly_once:
        raise Refused(
            grpc.StatusCode.INVALID_ARGUMENT,
            "Some acknowledgement ids in the request were invalid. This could be because the acknowledgement ids have "
            "expired or the acknowledgement ids were malformed.",
            invalid_ack_ids=ack_ids,
        )


def _serialize(message: Any) -> bytes:
    return bytes(message.SerializeToString())


_PublishResponse = protobuf_class(types.PublishResponse)
_ListTopicsResponse = protobuf_class(types.ListTopicsResponse)
_ListTopicSubscriptionsResponse = protobuf_class(types.ListTopicSubscriptionsResponse)
_ListTopicSnapshotsResponse = protobuf_class(types.ListTopicSnapshotsResponse)
_DetachSubscriptionResponse = protobuf_class(types.DetachSubscriptionResponse)
_ListSubscriptionsResponse = protobuf_class(types.ListSubscriptionsResponse)
_ListSnapshotsResponse = protobuf_class(types.ListSnapshotsResponse)
_PullResponse = protobuf_class(types.PullResponse)
_SeekResponse = protobuf_class(types.SeekResponse)
_StreamingPullResponse = protobuf_class(types.StreamingPullResponse)
