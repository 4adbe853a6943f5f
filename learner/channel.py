"""A link between two of the learner's hosts: frames over TCP.

    frame = length of the head (4 bytes), head (JSON: kind, fields, lengths of the parts), parts

Invariants: both sides of a link say something at least every `beat_s`, however busy their processes are, so that one
that is dead, frozen or cut off is noticed within `patience_s`; frames arrive whole, once and in the order in which they
were sent; nothing is ever unpickled; `send` never waits for the other side.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

BEAT_S = 5.0
PATIENCE_S = 30.0
"""Silence after which a host counts as lost."""
MAX_HEAD_BYTES = 16_000_000
_LENGTH = struct.Struct("!I")


class Kind(StrEnum):
    """What a frame says."""

    HELLO = "hello"
    """Follower: who I am, and that I know the token."""
    BEAT = "beat"
    COMPILE = "compile"
    RESTORE = "restore"
    """Owner: the training state to go on from."""
    PREPARE = "prepare"
    """Owner: the rows of a step, before their turn."""
    RUN = "run"
    """Owner: take the step."""
    TURN = "turn"
    """Owner, before every call of a step: whether it is given up."""
    FETCH = "fetch"
    """Owner: send your parts of an array."""
    REPLY = "reply"
    """Follower: the answer to COMPILE or FETCH."""
    INTERRUPT = "interrupt"
    """Follower: somebody asked me to end."""
    FAILED = "failed"
    """Follower: I cannot go on."""
    END = "end"
    """Owner: end, with this exit status."""


class BadFrame(ValueError):
    """These bytes are no frame."""


@dataclass(frozen=True, slots=True)
class Frame:
    kind: Kind
    fields: Mapping[str, Any] = field(default_factory=dict)
    """JSON."""
    parts: tuple[bytes, ...] = ()


def encode_frame(frame: Frame) -> bytes:
    head = json.dumps([frame.kind, frame.fields, [len(part) for part in frame.parts]]).encode()
    return b"".join((_LENGTH.pack(len(head)), head, *frame.parts))


def read_frame(
    connection: socket.socket,
    *,
    max_head_bytes: int = MAX_HEAD_BYTES,
    max_parts_bytes: float = math.inf,
    deadline: float = math.inf,
) -> Frame | None:
    """The next frame; None where the other side has ended. Raises BadFrame, TimeoutError, OSError.

    `deadline`, by the monotonic clock, is that of the whole frame; without, the connection's own timeout holds for each
    piece of it.
    """
    prefix = _read_exactly(connection, _LENGTH.size, deadline, may_end=True)
    if prefix is None:
        return None
    (length,) = _LENGTH.unpack(prefix)
    if length > max_head_bytes:
        raise BadFrame(f"a frame's head has at most {max_head_bytes} bytes, found {length}")
    head = _read_exactly(connection, length, deadline) or b""
    try:
        kind, fields, sizes = json.loads(head)
        kind, fields, sizes = Kind(kind), dict(fields), [int(size) for size in sizes]
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise BadFrame(f"a frame's head is not readable: {error}") from error
    if min(sizes, default=0) < 0 or sum(sizes) > max_parts_bytes:
        raise BadFrame(f"a frame's head announces parts of {sizes} bytes")
    return Frame(kind, fields, tuple(_read_exactly(connection, size, deadline) or b"" for size in sizes))


def _read_exactly(connection: socket.socket, size: int, deadline: float, *, may_end: bool = False) -> bytes | None:
    data = bytearray(size)
    view, found = memoryview(data), 0
    while found < size:
        if deadline < math.inf:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the frame did not come to its end in time")
            connection.settimeout(left_s)
        count = connection.recv_into(view[found:])
        if count == 0:
            if may_end and found == 0:
                return None
            raise ConnectionResetError("the connection ended within a frame")
        found += count
    return bytes(data)


def encode_array(array: Any) -> bytes:
    """In numpy's .npy format."""
    file = io.BytesIO()
    np.save(file, np.asarray(array), allow_pickle=False)
    return file.getvalue()


def decode_array(data: bytes) -> NDArray[Any]:
    array: NDArray[Any] = np.load(io.BytesIO(data), allow_pickle=False)
    return array


class Link:
    """One end of a connection. Reads and writes in threads of its own."""

    def __init__(
        self,
        connection: socket.socket,
        received: Callable[[Frame], None],
        lost: Callable[[str], None],
        *,
        beat_s: float = BEAT_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`received` is given every frame, and `lost` why the link ended unless `close` was called before. Both are
        called in the reading thread and must not wait for long."""
        self._connection, self._received, self._lost = connection, received, lost
        self._beat_s, self._patience_s = beat_s, patience_s
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._closing = False
        self._why: str | None = None
        """Why the writing thread gave the link up."""
        self._ended = threading.Event()
        connection.settimeout(patience_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = threading.Thread(target=self._read, name="link-reader", daemon=True)
        self._writer = threading.Thread(target=self._write, name="link-writer", daemon=True)
        self._reader.start()
        self._writer.start()

    def send(self, frame: Frame) -> None:
        """Send behind what was sent before. From any thread; a lost link is `lost`'s business."""
        self.send_bytes(encode_frame(frame))

    def send_bytes(self, data: bytes) -> None:
        """Send an encoded frame."""
        self._frames.put(data)

    def close(self, timeout_s: float) -> None:
        """Send what is waiting, then wait until the other side has ended the connection, for `timeout_s` at most."""
        self._closing = True
        self._frames.put(None)
        self._writer.join(timeout_s)
        self._ended.wait(timeout_s)
        self._connection.close()

    def _read(self) -> None:
        why = "its process ended"
        try:
            while (frame := read_frame(self._connection)) is not None:
                if frame.kind is not Kind.BEAT:
                    self._received(frame)
        except TimeoutError:
            why = f"it said nothing for {self._patience_s:g} s"
        except (OSError, BadFrame) as error:
            why = f"its connection failed: {error}"
        except Exception as error:
            logger.exception("a frame could not be handled")
            why = f"what it says cannot be handled: {error!r}"
        self._ended.set()
        if not self._closing:
            self._lost(self._why or why)

    def _write(self) -> None:
        beat = encode_frame(Frame(Kind.BEAT))
        try:
            while True:
                try:
                    data = self._frames.get(timeout=self._beat_s)
                except queue.Empty:
                    data = beat
                if data is None:
                    self._connection.shutdown(socket.SHUT_WR)
                    return
                # In pieces, each with its own timeout: that of `sendall` is for the whole.
                view = memoryview(data)
                while view:
                    view = view[self._connection.send(view) :]
        except TimeoutError:
            self._why = f"it took nothing for {self._patience_s:g} s"
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            # The reading thread says what became of the link.
            return
