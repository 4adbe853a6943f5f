"""Packing closings into fixed-shape rows whose members share their prompt, and back.

Invariants: `unpack(pack(closings, bucket))` is exactly `closings`; nothing but its own prompt crosses a segment's
boundary; a closing that one row cannot hold takes several, each with the prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trajectories.schema import PROMPT_SAMPLE, Closing, Episode, Pack, Row, Segment, kept_offsets

_Place = tuple[Row, Segment, NDArray[np.int64]]
"""A segment, its row, and the row's `kept_offsets`."""


class TooLong(ValueError):
    """An episode is longer than the row that should hold it."""


@dataclass(frozen=True, slots=True)
class PackingSettings:
    """Section [packing] of the run file."""

    buckets: tuple[int, ...] = (512, 1024)
    """Row lengths in tokens, ascending. Each is one compiled shape of the learner."""
    closings_per_pack: int = 4
    """Closings of one bucket that are packed together at the most."""
    fill: float = 0.9
    """Closings are packed at once when they fill their rows to this fraction."""
    flush_s: float = 0.5
    """Seconds after which waiting closings are packed all the same."""
    shards: int = 1
    """Packing shards per bucket: how many workers may pack at once."""

    def __post_init__(self) -> None:
        if not self.buckets or min(self.buckets) < 1 or list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(f"buckets must be ascending row lengths, e.g. [512, 1024]; found {list(self.buckets)}")
        if self.closings_per_pack < 1 or self.shards < 1:
            raise ValueError(
                f"closings_per_pack and shards must be at least 1, found {self.closings_per_pack} and {self.shards}"
            )
        if not 0 < self.fill <= 1:
            raise ValueError(f"fill must be a fraction above 0 and up to 1, found {self.fill}")
        if not self.flush_s >= 0:
            raise ValueError(f"flush_s must be 0 seconds or more, found {self.flush_s}")


@dataclass(frozen=True, slots=True)
class _Piece:
    """Members of one closing that share one prompt and one row."""

    closing: int
    members: tuple[int, ...]
    length: int


def packed_length(closing: Closing) -> int:
    """Tokens that the closing takes if one row holds it: each distinct prompt once, and the rest of each member."""
    return sum(_length(closing, members) for members in _by_prompt(closing))


def bucket_of(closing: Closing, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds the closing in one row, else the largest; raises TooLong if a member fits none."""
    longest = max((len(episode) for episode in closing.episodes), default=0)
    if longest > buckets[-1]:
        raise TooLong(
            f"group {closing.key} has an episode of {longest} tokens and the largest bucket holds {buckets[-1]}: "
            "add a bucket in [packing] or lower the policy's max_context"
        )
    length = packed_length(closing)
    return next((bucket for bucket in buckets if bucket >= length), buckets[-1])


def pack(closings: Sequence[Closing], bucket: int) -> Pack:
    """Rows of `bucket` tokens that hold all of `closings` (of one run, at least one), by best fit decreasing.

    Raises TooLong if a member does not fit a row.
    """
    run_ids = {closing.run_id for closing in closings}
    if len(run_ids) != 1:
        raise ValueError(f"a pack holds closings of one run, found those of {sorted(run_ids)}")
    if len({closing.closing_id for closing in closings}) != len(closings):
        raise ValueError("a pack holds each closing once")
    return Pack(run_ids.pop(), bucket, fit(closings, (bucket,)), tuple(closings))


def fit(closings: Sequence[Closing], buckets: Sequence[int]) -> tuple[Row, ...]:
    """Rows of the lengths `buckets` (ascending) that hold all of `closings`, by best fit decreasing.

    A row is as short as what it was begun for allows; smaller closings fill what is left of longer rows. Raises TooLong
    if a member does not fit a row.
    """
    pieces = [piece for index, closing in enumerate(closings) for piece in _pieces(index, closing, buckets[-1])]
    rows: list[tuple[int, list[_Piece]]] = []
    space: list[int] = []
    for piece in sorted(pieces, key=lambda piece: -piece.length):
        fits = [(left - piece.length, row) for row, left in enumerate(space) if left >= piece.length]
        if fits:
            left, row = min(fits)
        else:
            bucket = next(bucket for bucket in buckets if bucket >= piece.length)
            left, row = bucket - piece.length, len(rows)
            rows.append((bucket, []))
            space.append(0)
        rows[row][1].append(piece)
        space[row] = left
    return tuple(_row(members, closings, bucket) for bucket, members in rows)


def unpack(packed: Pack) -> tuple[Closing, ...]:
    """The closings that a pack's rows hold, exactly as they were."""
    return restore(packed.rows, without_arrays(packed).closings)


def without_arrays(packed: Pack) -> Pack:
    """The pack with the arrays of its closings' episodes left out, for a message: its rows hold them."""
    closings = tuple(
        dataclasses.replace(closing, episodes=tuple(_header(episode) for episode in closing.episodes))
        for closing in packed.closings
    )
    return dataclasses.replace(packed, closings=closings)


def _header(episode: Episode) -> Episode:
    return dataclasses.replace(
        episode,
        tokens_T=np.zeros(0, np.int32),
        loss_mask_T=np.zeros(0, np.bool_),
        logprobs_T=np.zeros(0, np.float32),
        prompt_length=0,
        kept_counts_T=np.zeros(0, np.int32),
        kept_ids_K=np.zeros(0, np.int32),
    )


def restore(rows: Sequence[Row], headers: Sequence[Closing]) -> tuple[Closing, ...]:
    """Fill the episodes of closings that are `without_arrays`; raises ValueError where the rows lack one of them."""
    places: dict[tuple[str, int], _Place] = {}
    for row in rows:
        offsets = kept_offsets(row.kept_counts_T)
        for segment in row.segments:
            if not 0 <= segment.start <= segment.start + segment.length <= row.bucket:
                raise ValueError(f"segment {segment.segment_id} lies outside its row of {row.bucket} tokens")
            if segment.sample != PROMPT_SAMPLE:
                places[segment.closing_id, segment.sample] = row, segment, offsets
    return tuple(
        dataclasses.replace(
            closing,
            episodes=tuple(_restored(episode, closing.closing_id, places) for episode in closing.episodes),
        )
        for closing in headers
    )


def _restored(episode: Episode, closing_id: str, places: dict[tuple[str, int], _Place]) -> Episode:
    try:
        row, segment, offsets = places[closing_id, episode.sample]
    except KeyError:
        raise ValueError(f"no row holds episode {episode.episode_id} of closing {closing_id}") from None
    parts = [slice(segment.start, segment.start + segment.length)]
    prompt_length = 0
    if segment.parent:
        prompt = next((other for other in row.segments if other.segment_id == segment.parent), None)
        if prompt is None:
            raise ValueError(f"the prompt of episode {episode.episode_id} is not in its row")
        parts.insert(0, slice(prompt.start, prompt.start + prompt.length))
        prompt_length = prompt.length
    return dataclasses.replace(
        episode,
        tokens_T=np.concatenate([row.tokens_T[part] for part in parts]),
        loss_mask_T=np.concatenate([row.loss_mask_T[part] for part in parts]),
        logprobs_T=np.concatenate([row.logprobs_T[part] for part in parts]),
        prompt_length=prompt_length,
        kept_counts_T=np.concatenate([row.kept_counts_T[part] for part in parts]),
        kept_ids_K=np.concatenate(
            [row.kept_ids_K[offsets[part.start] : offsets[part.stop]] for part in parts if len(row.kept_counts_T)]
            or [row.kept_ids_K]
        ),
    )


def _by_prompt(closing: Closing) -> Iterable[list[int]]:
    """Indices of the members, those with the same prompt together."""
    groups: dict[bytes, list[int]] = {}
    for index, episode in enumerate(closing.episodes):
        groups.setdefault(episode.tokens_T[: episode.prompt_length].tobytes(), []).append(index)
    return groups.values()


def _length(closing: Closing, members: Sequence[int]) -> int:
    prompt_length = closing.episodes[members[0]].prompt_length
    return prompt_length + sum(len(closing.episodes[index]) - prompt_length for index in members)


def _pieces(number: int, closing: Closing, bucket: int) -> Iterable[_Piece]:
    """The closing cut into pieces that fit a row: one per prompt where that fits, else first fit decreasing."""
    for members in _by_prompt(closing):
        if (length := _length(closing, members)) <= bucket:
            yield _Piece(number, tuple(members), length)
            continue
        shares: list[list[int]] = []
        for index in sorted(members, key=lambda index: -len(closing.episodes[index])):
            episode = closing.episodes[index]
            if len(episode) > bucket:
                raise TooLong(f"episode {episode.episode_id} has {len(episode)} tokens and a row holds {bucket}")
            for share in shares:
                if _length(closing, [*share, index]) <= bucket:
                    share.append(index)
                    break
            else:
                shares.append([index])
        for share in shares:
            yield _Piece(number, tuple(sorted(share)), _length(closing, share))


def _row(pieces: Sequence[_Piece], closings: Sequence[Closing], bucket: int) -> Row:
    integers = {name: np.zeros(bucket, np.int32) for name in ("tokens", "segments", "parents", "positions")}
    floats = {name: np.zeros(bucket, np.float32) for name in ("logprobs", "advantages")}
    loss_mask_T = np.zeros(bucket, np.bool_)
    kept_counts_T, kept_ids = np.zeros(bucket, np.int32), [np.zeros(0, np.int32)]
    segments: list[Segment] = []
    end = 0

    def lay(closing: Closing, episode: Episode, sample: int, parent: int, first: int, last: int) -> int:
        """Lay tokens [first, last) of `episode` as the next segment; returns its id."""
        nonlocal end
        segment = Segment(closing.closing_id, sample, len(segments) + 1, parent, end, last - first)
        place = slice(end, end + segment.length)
        integers["tokens"][place] = episode.tokens_T[first:last]
        integers["segments"][place] = segment.segment_id
        integers["parents"][place] = parent
        integers["positions"][place] = np.arange(first, last)
        segments.append(segment)
        end = place.stop
        return segment.segment_id

    for piece in pieces:
        closing = closings[piece.closing]
        prompted = closing.episodes[piece.members[0]]
        parent = lay(closing, prompted, PROMPT_SAMPLE, 0, 0, prompted.prompt_length) if prompted.prompt_length else 0
        for index in piece.members:
            episode, start = closing.episodes[index], end
            lay(closing, episode, episode.sample, parent, episode.prompt_length, len(episode))
            loss_mask_T[start:end] = episode.loss_mask_T[episode.prompt_length :]
            floats["logprobs"][start:end] = episode.logprobs_T[episode.prompt_length :]
            if len(episode.kept_counts_T):
                kept_counts_T[start:end] = episode.kept_counts_T[episode.prompt_length :]
                kept_ids.append(episode.kept_ids_K)
            if closing.advantages:
                floats["advantages"][start:end] = np.where(loss_mask_T[start:end], closing.advantages[index], 0)
    return Row(
        tokens_T=integers["tokens"],
        segment_ids_T=integers["segments"],
        parent_ids_T=integers["parents"],
        positions_T=integers["positions"],
        loss_mask_T=loss_mask_T,
        logprobs_T=floats["logprobs"],
        advantages_T=floats["advantages"],
        segments=tuple(segments),
        kept_counts_T=kept_counts_T if len(kept_ids) > 1 else kept_ids[0],
        kept_ids_K=np.concatenate(kept_ids),
    )
