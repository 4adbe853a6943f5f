"""Beam coders of the contract's types: what crosses a stage or lies in state is a message of `trajectories.codec`.

Invariants: no experience is ever pickled; messages are never changed once they are made, so that one which was encoded
or decoded lately stands for its bytes. Importing this module registers the coders; keys are plain strings.
"""

# mypy: allow-subclassing-any

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from typing import Any, TypeVar

from apache_beam import coders

from trajectories import codec
from trajectories.schema import Closing, DeadLetter, Episode, Pack, Task, Verdict
from transforms.pending import Member, Pending, Phase

M = TypeVar("M", bound=codec.Message)
RECENT_BYTES = 16 << 20
"""Encoded bytes whose messages are remembered."""


class Recent:
    """Messages beside their bytes, the latest `limit` bytes of them. Thread-safe.

    State is read and written many times by the process that made what lies in it, tasks at every look at them."""

    def __init__(self, limit: int = RECENT_BYTES) -> None:
        self._limit, self._bytes = limit, 0
        self._lock = threading.Lock()
        self._values: OrderedDict[bytes, codec.Message] = OrderedDict()
        self._data: dict[int, bytes] = {}
        """By the identity of a value in `_values`, which lives as long as its entry."""

    def encode(self, value: codec.Message) -> bytes:
        """As `codec.encode`, without a limit."""
        with self._lock:
            data = self._data.get(id(value))
            if data is not None:
                self._values.move_to_end(data)
                return data
        data = codec.encode(value, limit=None)
        self.note(value, data)
        return data

    def decode(self, data: bytes, expect: type[M]) -> M:
        """As `codec.decode`, without a limit."""
        with self._lock:
            known = self._values.get(data)
            if type(known) is expect:
                self._values.move_to_end(data)
                return known
        value = codec.decode(data, expect, limit=None)
        self.note(value, data)
        return value

    def note(self, value: codec.Message, data: bytes) -> None:
        """Remember that `data` is what `value` is encoded as."""
        with self._lock:
            if data in self._values:
                return
            self._values[data] = value
            self._data[id(value)] = data
            self._bytes += len(data)
            while self._bytes > self._limit:
                old, forgotten = self._values.popitem(last=False)
                del self._data[id(forgotten)]
                self._bytes -= len(old)


recent = Recent()


class MessageCoder(coders.Coder):
    """Encodes one type of message; `message` names it. Raises CodecError on foreign bytes."""

    message: type[Any]

    def encode(self, value: codec.Message) -> bytes:
        return recent.encode(value)

    def decode(self, encoded: bytes) -> Any:
        return recent.decode(encoded, self.message)

    def is_deterministic(self) -> bool:
        return False

    def to_type_hint(self) -> type[Any]:
        return self.message

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


class TaskCoder(MessageCoder):
    message = Task


class EpisodeCoder(MessageCoder):
    message = Episode


class ClosingCoder(MessageCoder):
    message = Closing


class PackCoder(MessageCoder):
    message = Pack


class VerdictCoder(MessageCoder):
    message = Verdict


class DeadLetterCoder(MessageCoder):
    message = DeadLetter


for _coder in (TaskCoder, EpisodeCoder, ClosingCoder, PackCoder, VerdictCoder, DeadLetterCoder):
    coders.registry.register_coder(_coder.message, _coder)


_MEMBER = struct.Struct("<IBI")
_PHASES = {phase.value: phase for phase in Phase}


class PendingCoder(coders.Coder):
    """State of RunEpisodes: u32 length, the task's message, then (u32 starts, u8 phase, u32 retries) per member."""

    def encode(self, value: Pending) -> bytes:
        task = recent.encode(value.task)
        members = b"".join(_MEMBER.pack(member.starts, member.phase.value, member.retries) for member in value.members)
        return struct.pack("<I", len(task)) + task + members

    def decode(self, encoded: bytes) -> Pending:
        (length,) = struct.unpack_from("<I", encoded)
        members = _MEMBER.iter_unpack(encoded[4 + length :])
        return Pending(
            recent.decode(encoded[4 : 4 + length], Task),
            tuple(Member(starts, _PHASES[phase], retries) for starts, phase, retries in members),
        )

    def is_deterministic(self) -> bool:
        return False
