"""PackRows: closings of one bucket wait for each other briefly and are packed, best fit, into one message's rows.

Invariant: a closing leaves in exactly one pack that fits a message, or as a failed verdict with its dead letter.
"""

# mypy: allow-subclassing-any, allow-untyped-decorators
# ruff: noqa: B008 (Beam's way to ask for state and timers)

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import apache_beam as beam
from apache_beam.coders import BooleanCoder, TupleCoder, VarIntCoder
from apache_beam.pvalue import TaggedOutput
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import BagStateSpec, ReadModifyWriteStateSpec, TimerSpec, on_timer
from apache_beam.typehints import with_input_types, with_output_types

from trajectories import codec
from trajectories.packing import PackingSettings, TooLong, bucket_of, pack, packed_length
from trajectories.schema import Closing, DeadLetter, Outcome, Pack, Verdict
from transforms import metrics
from transforms.coders import ClosingCoder
from transforms.dead_letters import DEAD, VERDICTS, dead_letter
from transforms.groups import verdict


def due(closings: int, tokens: int, bucket: int, settings: PackingSettings) -> bool:
    """Whether closings of `tokens` packed tokens in all should wait no longer."""
    rows = max(1, math.ceil(tokens / bucket))
    return closings >= settings.closings_per_pack or tokens >= settings.fill * rows * bucket


def packs(
    closings: Sequence[Closing], bucket: int, limit: int = codec.MAX_MESSAGE_BYTES
) -> Iterator[Pack | tuple[Closing, str]]:
    """The closings in packs that each fit a message of `limit` bytes; one that fits none comes with the reason."""
    if not closings:
        return
    try:
        packed = pack(closings, bucket)
        codec.encode(packed, limit=limit)
    except (codec.CodecError, ValueError) as error:
        if len(closings) == 1:
            yield closings[0], str(error)
            return
        half = len(closings) // 2
        yield from packs(closings[:half], bucket, limit)
        yield from packs(closings[half:], bucket, limit)
        return
    yield packed


class PackRows(beam.PTransform):
    """Closing → Pack, and verdicts, and dead letters."""

    def __init__(self, settings: PackingSettings) -> None:
        super().__init__()
        self.settings = settings

    def expand(self, closings: Any) -> tuple[Any, Any, Any]:
        bucketed = closings | "ToBuckets" >> beam.ParDo(_ToBuckets(self.settings)).with_outputs(
            VERDICTS, DEAD, main="closings"
        )
        packed = bucketed.closings | "Pack" >> beam.ParDo(_Pack(self.settings)).with_outputs(
            VERDICTS, DEAD, main="packs"
        )
        return (
            packed.packs,
            (bucketed[VERDICTS], packed[VERDICTS]) | "Verdicts" >> beam.Flatten(),
            (bucketed[DEAD], packed[DEAD]) | "DeadLetters" >> beam.Flatten(),
        )


@with_input_types(Closing)
@with_output_types(tuple[str, Closing], verdicts=Verdict, dead_letters=DeadLetter)
class _ToBuckets(beam.DoFn):
    def __init__(self, settings: PackingSettings) -> None:
        self.settings = settings

    def process(self, closing: Closing) -> Iterator[Any]:
        try:
            bucket = bucket_of(closing, self.settings.buckets)
        except TooLong as error:
            yield from _refused(closing, "TooLong", str(error))
            return
        yield f"{bucket}/{closing.group_id % self.settings.shards}", closing


@with_input_types(tuple[str, Closing])
@with_output_types(Pack, verdicts=Verdict, dead_letters=DeadLetter)
class _Pack(beam.DoFn):
    WAITING = BagStateSpec("waiting", ClosingCoder())
    SIZE = ReadModifyWriteStateSpec("size", TupleCoder((VarIntCoder(), VarIntCoder())))
    ARMED = ReadModifyWriteStateSpec("armed", BooleanCoder())
    FLUSH = TimerSpec("flush", TimeDomain.REAL_TIME)

    def __init__(self, settings: PackingSettings) -> None:
        self.settings = settings

    def process(
        self,
        keyed: tuple[str, Closing],
        waiting: Any = beam.DoFn.StateParam(WAITING),
        size: Any = beam.DoFn.StateParam(SIZE),
        armed: Any = beam.DoFn.StateParam(ARMED),
        flush: Any = beam.DoFn.TimerParam(FLUSH),
    ) -> Iterator[Any]:
        key, closing = keyed
        closings, tokens = size.read() or (0, 0)
        closings, tokens = closings + 1, tokens + packed_length(closing)
        waiting.add(closing)
        size.write((closings, tokens))
        if due(closings, tokens, _bucket(key), self.settings):
            yield from self._flush(key, waiting, size)
        elif not armed.read():
            armed.write(True)
            flush.set(time.time() + self.settings.flush_s)

    @on_timer(FLUSH)
    def on_flush(
        self,
        key: str = beam.DoFn.KeyParam,
        waiting: Any = beam.DoFn.StateParam(WAITING),
        size: Any = beam.DoFn.StateParam(SIZE),
        armed: Any = beam.DoFn.StateParam(ARMED),
    ) -> Iterator[Any]:
        armed.clear()
        yield from self._flush(key, waiting, size)

    def _flush(self, key: str, waiting: Any, size: Any) -> Iterator[Any]:
        # In at-least-once mode a closing may come twice.
        closings = {closing.closing_id: closing for closing in waiting.read()}
        waiting.clear()
        size.clear()
        for packed in packs(tuple(closings.values()), _bucket(key)):
            if isinstance(packed, Pack):
                metrics.count("rows/packed", len(packed.rows))
                metrics.observe("rows/fill", sum(row.used for row in packed.rows) / (len(packed.rows) * packed.bucket))
                yield packed
            else:
                yield from _refused(packed[0], "Oversized", packed[1])


def _bucket(key: str) -> int:
    return int(key.partition("/")[0])


def _refused(closing: Closing, reason: str, detail: str) -> Iterator[TaggedOutput]:
    yield TaggedOutput(VERDICTS, verdict(closing, Outcome.FAILED, detail))
    yield TaggedOutput(DEAD, dead_letter(closing.run_id, "PackRows", reason, f"group {closing.key}: {detail}"))
