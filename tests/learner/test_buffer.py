from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.buffer import Buffer, choose, fault, lay_out
from learner.settings import LearnerSettings, StalenessPolicy
from trajectories.packing import bucket_of, pack, unpack
from trajectories.schema import PROMPT_SAMPLE, Closing, Episode, Pack, Version, VersionSpan

BUCKETS = (32, 64)


def closing(group: int, version: int = 0, members: int = 2, length: int = 10) -> Closing:
    episodes = tuple(
        Episode(
            run_id="r",
            group_id=group,
            attempt=0,
            sample=sample,
            group_size=members,
            tokens_T=np.arange(1, length + 1) + sample,
            loss_mask_T=np.arange(length) >= 4,
            logprobs_T=np.where(np.arange(length) >= 4, -1.0, 0.0),
            prompt_length=0 if length < 4 else 1,
            version_spans=(VersionSpan(4, Version(version, 1)),),
        )
        for sample in range(members)
    )
    return Closing("r", group, 0, f"c{group}", members, episodes, advantages=(1.0, -1.0) * (members // 2))


def limited(one: Closing) -> Closing:
    """Each sampled token was drawn from itself and token 9."""

    def kept(episode: Episode) -> Episode:
        ids = [[int(token), 9] for token in episode.tokens_T[episode.loss_mask_T]]
        counts_T = np.where(episode.loss_mask_T, 2, 0)
        return replace(episode, kept_counts_T=counts_T, kept_ids_K=np.array(ids).ravel())

    return replace(one, episodes=tuple(kept(episode) for episode in one.episodes))


def packed(*closings: Closing, bucket: int = 64) -> Pack:
    return pack(closings, bucket)


def filled(settings: LearnerSettings, versions: list[int]) -> Buffer:
    buffer = Buffer(settings)
    for group, version in enumerate(versions):
        one = closing(group, version)
        buffer.add(one, packed(one), version)
    return buffer


def groups(items: object) -> list[int]:
    return [item.closing.group_id for item in items]  # type: ignore[attr-defined]


def test_oldest_train_first_and_ties_in_order_of_arrival() -> None:
    buffer = filled(LearnerSettings(groups_per_step=2, max_staleness=3), [2, 1, 1, 0])
    assert groups(buffer.take([], 2).chosen) == [3, 1]
    assert groups(buffer.take([], 3).chosen) == [2, 0]
    assert buffer.take([], 4).chosen == ()


def test_what_is_past_the_bound_is_discarded_even_where_no_step_follows() -> None:
    buffer = filled(LearnerSettings(groups_per_step=2, max_staleness=1), [0, 3])
    choice = buffer.take([], 3)
    assert groups(choice.discarded) == [0]
    assert choice.chosen == ()
    assert len(buffer) == 1


def test_pace_waits_for_a_straggler_that_is_due_and_drop_does_not() -> None:
    pace = LearnerSettings(groups_per_step=2, max_staleness=1)
    versions = [1, 1]
    assert filled(pace, versions).take([0], 1).straggler  # its last chance is this step
    assert groups(filled(pace, versions).take([1], 1).chosen) == [0, 1]  # it may train at the next
    drop = replace(pace, staleness=StalenessPolicy.DROP)
    assert groups(filled(drop, versions).take([0], 1).chosen) == [0, 1]


def test_pace_looks_ahead_where_later_steps_lack_room() -> None:
    settings = LearnerSettings(groups_per_step=2, max_staleness=1)
    # Three groups in flight are due at step 2, which has room for two: one of them has to train now.
    assert filled(settings, [2, 2]).take([1, 1, 1], 1).straggler
    assert not filled(settings, [2, 2]).take([1, 1], 1).straggler


def test_pace_does_not_wait_where_waiting_cannot_help() -> None:
    settings = LearnerSettings(groups_per_step=2, max_staleness=1)
    # All that is chosen is due as well: whoever waits, somebody will be late.
    choice = filled(settings, [0, 0]).take([0, 0, 0], 1)
    assert groups(choice.chosen) == [0, 1]


@given(
    versions=st.lists(st.integers(0, 5), max_size=12),
    out=st.lists(st.integers(0, 5), max_size=12),
    step=st.integers(0, 6),
    size=st.integers(1, 4),
    bound=st.integers(0, 4),
)
def test_no_step_breaks_the_bound(versions: list[int], out: list[int], step: int, size: int, bound: int) -> None:
    settings = LearnerSettings(groups_per_step=size, max_staleness=bound)
    held = list(filled(settings, versions)._held.values())
    choice = choose(held, out, step, settings)
    assert len(choice.chosen) in (0, size)
    assert all(item.age(step) <= bound for item in choice.chosen)
    assert all(item.age(step) > bound for item in choice.discarded)
    if choice.chosen and step in {version + bound for version in out}:
        assert max(item.version_step for item in choice.chosen) + bound <= step  # only those as urgent as the straggler


def content(rows: object) -> dict[str, list[tuple[int, ...]]]:
    """Closing -> the token ids under its loss mask, member by member."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for row in rows:  # type: ignore[attr-defined]
        covered = np.zeros(row.bucket, bool)
        for segment in row.segments:
            place = slice(segment.start, segment.start + segment.length)
            covered[place] = True
            if segment.sample >= 0:
                loss = tuple(row.tokens_T[place][row.loss_mask_T[place]].tolist())
                found.setdefault(segment.closing_id, []).append(loss)
        assert not row.loss_mask_T[~covered].any()
    return {name: sorted(parts) for name, parts in found.items()}


def test_rows_of_a_step_hold_its_closings_and_no_other() -> None:
    settings = LearnerSettings(groups_per_step=3, max_staleness=2)
    source = packed(closing(0), closing(1), closing(2), closing(3))
    other = packed(closing(4, length=6), bucket=32)
    buffer = Buffer(settings)
    for pack_ in (source, other):
        for one in unpack(pack_):
            buffer.add(one, pack_, 0)
    first, second = buffer.take([], 0), buffer.take([], 0)
    assert (groups(first.chosen), groups(second.chosen)) == ([0, 1, 2], [])
    assert content(lay_out(first.chosen)) == content(packed(closing(0), closing(1), closing(2)).rows)


def test_half_empty_messages_are_packed_together_and_full_ones_left_alone() -> None:
    settings = LearnerSettings(groups_per_step=3, max_staleness=2)
    trickle = filled(settings, [0, 0, 0])
    chosen = trickle.take([], 0).chosen
    rows = lay_out(chosen)
    assert len(rows) == 1 < sum(len(item.source.rows) for item in chosen)
    assert content(rows) == content([row for item in chosen for row in item.source.rows])
    full = packed(*(closing(g) for g in range(3)))
    buffer = Buffer(settings)
    for one in full.closings:
        buffer.add(one, full, 0)
    assert lay_out(buffer.take([], 0).chosen) == full.rows


def test_closings_of_short_rows_fill_what_long_rows_leave() -> None:
    long = [closing(group, length=22) for group in range(2)]  # 44 of 64 tokens
    short = [closing(group, length=10) for group in range(2, 5)]  # 20 of 32
    sources = [packed(one, bucket=bucket_of(one, BUCKETS)) for one in (*long, *short)]
    assert [source.bucket for source in sources] == [64, 64, 32, 32, 32]
    buffer = Buffer(LearnerSettings(groups_per_step=5))
    for source in sources:
        buffer.add(source.closings[0], source, 0)
    rows = lay_out(buffer.take([], 0).chosen)
    assert sum(row.bucket for row in rows) == 160 < sum(row.bucket for source in sources for row in source.rows)
    laid = {(s.closing_id, s.sample) for row in rows for s in row.segments if s.sample != PROMPT_SAMPLE}
    assert laid == {(f"c{group}", sample) for group in range(5) for sample in range(2)}


@pytest.mark.parametrize("members", [2, 8])
def test_a_closing_of_several_rows_stays_whole(members: int) -> None:
    big = closing(0, members=members, length=20)
    bucket = bucket_of(big, BUCKETS)
    source = packed(big, closing(1), bucket=bucket)
    buffer = Buffer(LearnerSettings(groups_per_step=1))
    for one in source.closings:
        buffer.add(one, source, 0)
    chosen = buffer.take([], 0).chosen
    assert content(lay_out(chosen)) == content(pack([big], bucket).rows)


def test_a_pack_that_could_stop_a_step_or_train_what_is_not_counted_is_refused() -> None:
    good = packed(closing(0), closing(1))
    assert fault(good, BUCKETS, 100) is None
    (row,) = good.rows
    orphan = replace(row, segments=tuple(replace(s, parent=9) if s.parent else s for s in row.segments))
    twins = replace(row, segments=tuple(replace(s, segment_id=1, parent=0) for s in row.segments))
    for wrong in (
        replace(good, rows=(orphan,)),
        replace(good, rows=(twins,)),
        replace(good, rows=(row, row)),
        replace(good, closings=good.closings[:1]),
        replace(good, closings=(good.closings[0], good.closings[0])),
        replace(good, closings=(good.closings[0], replace(good.closings[1], run_id="another"))),
    ):
        assert fault(wrong, BUCKETS, 100) is not None


def test_kept_ids_that_the_step_cannot_renormalise_over_are_refused() -> None:
    good = packed(limited(closing(0)), closing(1))
    assert fault(good, BUCKETS, 100, 2) is None
    (row,) = good.rows
    counts_T, ids_K = row.kept_counts_T, row.kept_ids_K
    other = ids_K.copy()
    other[:2] = 50
    moved = np.roll(counts_T, -1)
    for wrong, max_kept, reason in (
        (row, 0, "none, as its run truncates no draw"),
        (row, 1, "drawn from 2 kept ids and the learner compiled 1"),
        (replace(row, kept_ids_K=ids_K[:-1]), 2, "do not fit"),
        (replace(row, kept_counts_T=counts_T[:-1]), 2, "do not fit"),
        (replace(row, kept_counts_T=-counts_T), 2, "do not fit"),
        (replace(row, kept_counts_T=counts_T[:0]), 2, "counts none"),
        (replace(row, kept_ids_K=np.where(ids_K == 9, 100, ids_K)), 2, "outside the model's vocabulary"),
        (replace(row, kept_ids_K=np.where(ids_K == 9, -1, ids_K)), 2, "outside the model's vocabulary"),
        (replace(row, kept_counts_T=moved), 2, "outside its loss mask"),
        (replace(row, kept_ids_K=other), 2, "not among the kept ids"),
    ):
        found = fault(replace(good, rows=(wrong,)), BUCKETS, 100, max_kept)
        assert found is not None
        assert reason in found


def test_kept_ids_stay_with_their_tokens_when_closings_are_packed_anew() -> None:
    source = packed(limited(closing(0)), closing(1), limited(closing(2)))
    buffer = Buffer(LearnerSettings(groups_per_step=1))
    for one in unpack(source):
        buffer.add(one, source, 0)
    for group in range(3):
        (row,) = lay_out(buffer.take([], 0).chosen)
        assert fault(Pack("r", 64, (row,), (closing(group),)), BUCKETS, 100, 2) is None
        assert row.kept_counts_T.sum() == (0 if group == 1 else 2 * row.loss_mask_T.sum())
