"""Beam coders of the contract's types: what crosses a stage or lies in state is a message of `trajectories.codec`.

Invariant: no experience is ever pickled. Importing this module registers the coders; keys are plain strings.
"""

# mypy: allow-subclassing-any

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

from apache_beam import coders

from trajectories import codec
from trajectories.schema import Closing, DeadLetter, Episode, Pack, Task, Verdict
from transforms.pending import Member, Pending, Phase


class MessageCoder(coders.Coder):
    """Encodes one type of message; `message` names it. Raises CodecError on foreign bytes."""

    message: type[Any]

    def encode(self, value: codec.Message) -> bytes:
        return codec.encode(value, limit=None)

    def decode(self, encoded: bytes) -> Any:
        return codec.decode(encoded, self.message, limit=None)

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


class PendingCoder(coders.Coder):
    """State of RunEpisodes: u32 length, the task's message, then (u32 starts, u8 phase, u32 retries) per member."""

    def encode(self, value: Pending) -> bytes:
        task = codec.encode(value.task, limit=None)
        members = b"".join(_MEMBER.pack(member.starts, member.phase.value, member.retries) for member in value.members)
        return struct.pack("<I", len(task)) + task + members

    def decode(self, encoded: bytes) -> Pending:
        (length,) = struct.unpack_from("<I", encoded)
        members = _MEMBER.iter_unpack(encoded[4 + length :])
        return Pending(
            _decode_task(encoded[4 : 4 + length]),
            tuple(Member(starts, Phase(phase), retries) for starts, phase, retries in members),
        )

    def is_deterministic(self) -> bool:
        return False


@lru_cache(maxsize=4096)
def _decode_task(data: bytes) -> Task:
    # The same tasks are read at every look, ten times a second.
    return codec.decode(data, Task, limit=None)
