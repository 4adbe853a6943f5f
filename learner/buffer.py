"""Closings that wait to train, and the assembly of a step from them.

Invariants: a step holds `groups_per_step` closings, each whole, none of them older than the staleness bound at the
number of the step that trains it; no row of a step holds a token of a closing that is not in it.

Closings train in the order of their oldest version. Under `pace` a step waits where going on without an outstanding
group would leave it no place within the bound (see `choose`). Pure: no clock, no thread, no ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from learner.settings import LearnerSettings, StalenessPolicy
from trajectories.advantages import token_rewards
from trajectories.packing import fit, pack
from trajectories.schema import PROMPT_SAMPLE, Closing, Pack, Row


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A closing in the buffer."""

    closing: Closing
    source: Pack
    """The message it came in."""
    version_step: int
    """Step part of its oldest version."""
    order: int
    """Of arrival."""

    def age(self, step: int) -> int:
        """Staleness at `step`, in optimizer steps."""
        return max(0, step - self.version_step)


@dataclass(frozen=True, slots=True)
class Choice:
    """What to do for one step: train `chosen` if it is not empty; in any case give up `discarded`."""

    chosen: tuple[Held, ...] = ()
    discarded: tuple[Held, ...] = ()
    """Past the bound."""
    straggler: bool = False
    """Enough closings are here, but the step has to wait for a group that is still out."""


def choose(held: Collection[Held], in_flight: Iterable[int], step: int, settings: LearnerSettings) -> Choice:
    """The closings that train at `step`.

    `in_flight` holds, for each outstanding group without a closing, the least step its versions can have. A group of
    version v must train at step v + max_staleness or before: its due step. Steps k+1 .. j have room for
    (j - k) * groups_per_step groups; if more are due by j than there is room for after step k, then step k took a
    closing that could have waited. Under `pace` it waits instead, provided that a group in flight could take the
    place of a chosen closing that is due later: otherwise waiting would not help.
    """
    size, bound = settings.groups_per_step, settings.max_staleness
    discarded = tuple(item for item in held if item.age(step) > bound)
    usable = sorted((i for i in held if i.age(step) <= bound), key=lambda item: (item.version_step, item.order))
    if len(usable) < size:
        return Choice(discarded=discarded)
    chosen, rest = tuple(usable[:size]), usable[size:]
    if settings.staleness is StalenessPolicy.PACE:
        out = Counter(version_step + bound for version_step in in_flight)
        due = out + Counter(item.version_step + bound for item in rest)
        last_chosen = max(item.version_step + bound for item in chosen)
        waiting = out_by = 0
        for due_step in sorted(due):
            waiting += due[due_step]
            out_by += out[due_step]
            room = max(0, due_step - step) * size
            if waiting > room and out_by and last_chosen > due_step:
                return Choice(discarded=discarded, straggler=True)
    return Choice(chosen, discarded)


def lay_out(chosen: Sequence[Held]) -> tuple[Row, ...]:
    """Rows that hold exactly the chosen closings.

    Rows are taken as they came where all closings of their message are chosen. The closings of a bucket are packed anew
    if some of their messages' closings are not chosen, or if that takes fewer rows: messages that left the packer by
    its timer are half empty. All are packed together where that takes fewer tokens: the closings of short rows fill
    what those of long rows leave.
    """
    rows: list[Row] = []
    buckets = sorted({item.source.bucket for item in chosen})
    for bucket in buckets:
        members = [item for item in chosen if item.source.bucket == bucket]
        ids = {item.closing.closing_id for item in members}
        sources = {id(item.source): item.source for item in members}.values()
        whole = all(ids.issuperset(closing.closing_id for closing in source.closings) for source in sources)
        came = [row for source in sources for row in source.rows]
        used = sum(row.used for row in came)
        if whole and len(came) == -(-used // bucket):
            rows.extend(came)
            continue
        anew = pack([item.closing for item in sorted(members, key=lambda item: item.order)], bucket).rows
        rows.extend(came if whole and len(came) <= len(anew) else anew)
    if len(buckets) > 1:
        together = fit([item.closing for item in sorted(chosen, key=lambda item: item.order)], buckets)
        if sum(row.bucket for row in together) < sum(row.bucket for row in rows):
            return together
    return tuple(rows)


def lay_out_updates(
    chosen: Sequence[Held], minibatches: int = 1, *, rewards: bool = False
) -> tuple[tuple[Row, ...], ...]:
    """The rows of each update of a pass over the chosen closings, of which update k has every `minibatches`-th from k:
    young and old ones alike. With `rewards` they hold the rewards of their tokens in place of advantages."""
    parts = tuple(lay_out(chosen[first::minibatches]) for first in range(minibatches))
    return tuple(token_rewards(rows, [held.closing for held in chosen]) for rows in parts) if rewards else parts


class Buffer:
    """Closings that the ledger has bound and no step has taken."""

    def __init__(self, settings: LearnerSettings) -> None:
        self._settings = settings
        self._held: dict[str, Held] = {}
        self._order = count()

    def __len__(self) -> int:
        return len(self._held)

    def add(self, closing: Closing, source: Pack, step: int) -> Held:
        """Hold a closing of `source`. One without versions (nothing was sampled) counts as of `step`."""
        version = closing.oldest_version
        item = Held(closing, source, step if version is None else version.step, next(self._order))
        self._held[closing.closing_id] = item
        return item

    def put_back(self, items: Iterable[Held]) -> None:
        """Hold again what a step took and did not train."""
        for item in items:
            self._held[item.closing.closing_id] = item

    def take(self, in_flight: Iterable[int], step: int) -> Choice:
        """Choose for `step`, and let go of what is chosen or discarded."""
        choice = choose(self._held.values(), in_flight, step, self._settings)
        for item in (*choice.chosen, *choice.discarded):
            del self._held[item.closing.closing_id]
        return choice


def fault(pack: Pack, buckets: Collection[int], vocab_size: int, max_kept: int = 0) -> str | None:
    """Why the pack cannot train, in words; None if it can. What it lets pass cannot stop a step.

    `max_kept` is the most kept ids of one token that the step was compiled for; 0 for none at all.
    """
    if pack.bucket not in buckets:
        return (
            f"its rows have {pack.bucket} tokens and the learner compiled {sorted(buckets)}: both sides of a run must "
            "read the same packing.buckets"
        )
    if not pack.rows or not pack.closings:
        return "it has no rows or no closings"
    for row in pack.rows:
        arrays = (
            row.tokens_T,
            row.segment_ids_T,
            row.parent_ids_T,
            row.positions_T,
            row.loss_mask_T,
            row.logprobs_T,
            row.advantages_T,
        )
        if any(array.shape != (pack.bucket,) for array in arrays):
            return f"the arrays of a row do not all have {pack.bucket} entries"
        if row.tokens_T.min() < 0 or row.tokens_T.max() >= vocab_size:
            return f"it has token ids outside the model's vocabulary of {vocab_size}"
        if reason := _kept_fault(row, vocab_size, max_kept):
            return reason
        ids = {0, *(segment.segment_id for segment in row.segments)}
        if len(ids) != len(row.segments) + 1 or not ids.issuperset(segment.parent for segment in row.segments):
            return "a row's segments do not have ids of their own, or name a parent that is not in their row"
    laid = Counter((s.closing_id, s.sample) for row in pack.rows for s in row.segments if s.sample != PROMPT_SAMPLE)
    if laid != Counter((c.closing_id, episode.sample) for c in pack.closings for episode in c.episodes) or any(
        number > 1 for number in laid.values()
    ):
        return "its rows do not hold each episode of its closings once, and nothing else"
    if {closing.run_id for closing in pack.closings} != {pack.run_id}:
        return "its closings are not of its run"
    if len({closing.closing_id for closing in pack.closings}) != len(pack.closings):
        return "it has a closing twice"
    for closing in pack.closings:
        if len(closing.advantages) != len(closing.episodes) or not closing.episodes:
            return (
                f"closing {closing.closing_id} has {len(closing.advantages)} advantages for "
                f"{len(closing.episodes)} episodes"
            )
    return None


def _kept_fault(row: Row, vocab_size: int, max_kept: int) -> str | None:
    """What is wrong with the kept ids of a row, whose other arrays are sound."""
    counts_T, ids_K = row.kept_counts_T, row.kept_ids_K
    if not len(counts_T):
        return "a row has kept ids and counts none" if len(ids_K) else None
    if counts_T.shape != row.tokens_T.shape or counts_T.min() < 0 or counts_T.sum(dtype=np.int64) != len(ids_K):
        return "a row's counts of kept ids do not fit its tokens or its kept ids"
    if counts_T.max() > max_kept:
        return (
            f"a token was drawn from {counts_T.max()} kept ids and the learner compiled "
            f"{max_kept or 'none, as its run truncates no draw'}: both sides of a run must read the same [sampling]"
        )
    if len(ids_K) and (ids_K.min() < 0 or ids_K.max() >= vocab_size):
        return f"it has kept ids outside the model's vocabulary of {vocab_size}"
    if counts_T[~row.loss_mask_T].any():
        return "a row has kept ids of tokens outside its loss mask"
    owners_K = np.repeat(np.arange(row.bucket), counts_T)
    if len(np.unique(owners_K[ids_K == row.tokens_T[owners_K]])) != np.count_nonzero(counts_T):
        return "a sampled token is not among the kept ids that it was drawn from"
    return None
