"""What comes in: rows, verdicts, eval results, heartbeats and dead letters, by streaming pull.

Invariants: every message is handed on decoded, or published as a dead letter with its reason and then acknowledged; no
message can stop the stream; nothing is acknowledged here but what could not be read. The rest is the receiver's to
acknowledge, by calling `Arrival.ack` when a durable checkpoint holds the effect.

Callbacks run on the client's threads and do nothing but decode and hand on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from learner.clients import MEBIBYTE, PUBLISH_TIMEOUT_S, publish_retry, subscriber_client
from trajectories.codec import CodecError, attributes, decode, encode
from trajectories.schema import DeadLetter, Episode, Heartbeat, Pack, Task, Verdict
from trajectories.topics import Topics

logger = logging.getLogger(__name__)

Incoming = Pack | Verdict | Episode | Heartbeat | DeadLetter
TYPES: dict[str, type[Incoming]] = {
    "rows": Pack,
    "verdicts": Verdict,
    "results": Episode,
    "heartbeats": Heartbeat,
    "dead-letters": DeadLetter,
}
PAYLOAD_BYTES = 4096
"""Of an unreadable message that its dead letter keeps."""
_DECODERS = 2


@dataclass(frozen=True, slots=True)
class Arrival:
    """A decoded message."""

    content: Incoming
    at: float
    """When it came, by the learner's clock."""
    ack: Callable[[], None]


@dataclass(frozen=True, slots=True)
class PublishFailed:
    """A message could not be published for `clients.RETRY_S`, or never will be."""

    content: Task | DeadLetter
    error: BaseException


class Outbox:
    """Publishes tasks and dead letters, in the background."""

    def __init__(self, topics: Topics, client: Any, inbox: Callable[[Any], None]) -> None:
        """`inbox` is called with `PublishFailed` on failure, from another thread."""
        self._topics, self._client, self._inbox = topics, client, inbox
        self._retry = publish_retry()

    def task(self, task: Task) -> None:
        """Publish a task; raises CodecError if it is too large."""
        self._publish(self._topics.tasks, task, lambda: None)

    def dead_letter(self, letter: DeadLetter, published: Callable[[], None]) -> None:
        """Publish a dead letter and call `published` when the server has it."""
        self._publish(self._topics.dead_letters, letter, published)

    def _publish(self, topic: str, content: Task | DeadLetter, published: Callable[[], None]) -> None:
        future = self._client.publish(
            topic, encode(content), retry=self._retry, timeout=PUBLISH_TIMEOUT_S, **attributes(content)
        )

        def done(future: Any) -> None:
            error = future.exception()
            if error is None:
                published()
            else:
                self._inbox(PublishFailed(content, error))

        future.add_done_callback(done)

    def close(self, timeout_s: float) -> None:
        """Send what waits, for `timeout_s` at most."""
        stopper = threading.Thread(target=self._client.stop, name="publisher-stop", daemon=True)
        stopper.start()
        stopper.join(timeout_s)


@dataclass
class _Stream:
    name: str
    future: Any
    executor: ThreadPoolExecutor


class Subscriber:
    """Streaming pulls of the run's five incoming subscriptions, kept alive until `close`."""

    def __init__(
        self,
        topics: Topics,
        outbox: Outbox,
        inbox: Callable[[Arrival], None],
        clock: Callable[[], float],
        *,
        max_lease_s: float,
    ) -> None:
        """`inbox` gets every arrival, on one of the client's threads. Messages are leased for up to `max_lease_s`."""
        self._topics, self._outbox, self._inbox, self._clock = topics, outbox, inbox, clock
        self._max_lease_s = max_lease_s
        self._client = subscriber_client()
        self._streams: list[_Stream] = []
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep_open, name="subscriber-keeper", daemon=True)

    def start(self) -> None:
        self._streams = [self._open(name) for name in TYPES]
        self._keeper.start()

    def close(self, timeout_s: float) -> None:
        """Stop pulling; bounded, because the client's own shutdown can hang."""
        self._closing.set()
        for stream in self._streams:
            stream.future.cancel()
            stream.executor.shutdown(wait=False, cancel_futures=True)
        closer = threading.Thread(target=self._settle, name="subscriber-close", daemon=True)
        closer.start()
        closer.join(timeout_s)

    def _settle(self) -> None:
        """Wait until the streams have sent the acknowledgements they were given."""
        for stream in self._streams:
            error = stream.future.exception()
            if error is not None:
                logger.debug("the %s stream ended with %r", stream.name, error)
        self._client.close()

    def _open(self, name: str) -> _Stream:
        from google.cloud.pubsub_v1.subscriber.scheduler import ThreadScheduler
        from google.cloud.pubsub_v1.types import FlowControl

        # Messages stay unacknowledged until a checkpoint: the limits must exceed what an interval consumes.
        flow = FlowControl(
            max_messages=100_000, max_bytes=4096 * MEBIBYTE, max_lease_duration=max(3600.0, self._max_lease_s)
        )
        executor = ThreadPoolExecutor(_DECODERS, f"decode-{name}")
        future = self._client.subscribe(
            self._topics.subscription(name),
            callback=lambda message: self._receive(name, message),
            flow_control=flow,
            scheduler=ThreadScheduler(executor),
        )
        return _Stream(name, future, executor)

    def _keep_open(self) -> None:
        while not self._closing.wait(1.0):
            for index, stream in enumerate(self._streams):
                if stream.future.done() and not self._closing.is_set():
                    error = stream.future.exception()
                    logger.warning("the %s stream broke off and is opened again: %s", stream.name, error)
                    stream.executor.shutdown(wait=False)
                    self._streams[index] = self._open(stream.name)

    def _receive(self, name: str, message: Any) -> None:
        expected = TYPES[name]
        try:
            content = decode(message.data, expected)
        except CodecError as error:
            self._refuse(name, message, type(error).__name__, str(error))
            return
        if content.run_id != self._topics.run_id:
            self._refuse(name, message, "ForeignRun", f"the message belongs to run {content.run_id!r}")
            return
        self._inbox(Arrival(content, self._clock(), message.ack))

    def _refuse(self, name: str, message: Any, reason: str, detail: str) -> None:
        logger.warning("a message of %s cannot be read: %s: %s", name, reason, detail)
        letter = DeadLetter(self._topics.run_id, f"learner.{name}", reason, detail, bytes(message.data[:PAYLOAD_BYTES]))
        self._outbox.dead_letter(letter, message.ack)
