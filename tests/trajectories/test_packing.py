import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trajectories.strategies import closing_sets
from trajectories.packing import PackingSettings, TooLong, bucket_of, pack, packed_length, unpack
from trajectories.schema import PROMPT_SAMPLE, Closing, Row, same

BUCKETS = st.sampled_from([40, 64, 200, 512])


def visible_from(row: Row, index: int) -> list[int]:
    """Brute force of the rule in Row's docstring."""
    own, parent = row.segment_ids_T[index], row.parent_ids_T[index]
    return [j for j in range(index + 1) if row.segment_ids_T[j] and row.segment_ids_T[j] in (own, parent)]


@given(closing_sets(), BUCKETS)
@settings(max_examples=150, deadline=None)
def test_any_closings_unpack_to_exactly_themselves(closings: list[Closing], bucket: int) -> None:
    assert same(unpack(pack(closings, bucket)), tuple(closings))


@given(closing_sets(), BUCKETS)
@settings(max_examples=100, deadline=None)
def test_a_packed_token_sees_exactly_what_it_saw_in_its_episode(closings: list[Closing], bucket: int) -> None:
    packed = pack(closings, bucket)
    episodes = {
        (c.closing_id, e.sample): (e, a) for c in closings for e, a in zip(c.episodes, c.advantages, strict=True)
    }
    seen = set()
    for row in packed.rows:
        before = row.predecessors_T()
        for segment in row.segments:
            if segment.sample == PROMPT_SAMPLE:
                assert segment.parent == 0
                assert not row.loss_mask_T[segment.start : segment.start + segment.length].any()
                continue
            episode, advantage = episodes[segment.closing_id, segment.sample]
            seen.add((segment.closing_id, segment.sample))
            for offset in range(segment.length):
                index, place = segment.start + offset, episode.prompt_length + offset
                assert row.positions_T[index] == place
                assert row.tokens_T[visible_from(row, index)].tolist() == episode.tokens_T[: place + 1].tolist()
                assert row.tokens_T[before[index]] == episode.tokens_T[place - 1]
                if row.loss_mask_T[index]:
                    assert row.advantages_T[index] == np.float32(advantage)
                else:
                    assert row.advantages_T[index] == row.logprobs_T[index] == 0
    assert seen == set(episodes)
    loss_tokens = sum(int(row.loss_mask_T.sum()) for row in packed.rows)
    assert loss_tokens == sum(episode.sampled_tokens for episode, _ in episodes.values())


@given(closing_sets())
@settings(max_examples=60, deadline=None)
def test_members_share_their_prompt_where_one_row_holds_the_closing(closings: list[Closing]) -> None:
    packed = pack(closings, 512)
    prompts = [s for row in packed.rows for s in row.segments if s.sample == PROMPT_SAMPLE]
    distinct = {(c.closing_id, e.tokens_T[: e.prompt_length].tobytes()) for c in closings for e in c.episodes}
    assert len(prompts) == len(distinct)
    assert sum(row.used for row in packed.rows) == sum(packed_length(closing) for closing in closings)


@given(closing_sets())
@settings(max_examples=60, deadline=None)
def test_bucket_is_the_smallest_that_holds_the_closing(closings: list[Closing]) -> None:
    buckets = (64, 128, 600)
    for closing in closings:
        bucket = bucket_of(closing, buckets)
        assert len(pack([closing], bucket).rows) == 1
        assert all(smaller < packed_length(closing) for smaller in buckets if smaller < bucket)


@given(closing_sets())
@settings(max_examples=40, deadline=None)
def test_an_episode_too_long_for_any_row_is_named(closings: list[Closing]) -> None:
    longest = max(len(episode) for closing in closings for episode in closing.episodes)
    culprit = next(closing for closing in closings if any(len(episode) == longest for episode in closing.episodes))
    with pytest.raises(TooLong, match="tokens"):
        bucket_of(culprit, (longest - 1,))
    with pytest.raises(TooLong):
        pack(closings, longest - 1)


def test_closings_of_two_runs_never_share_a_pack(one_closing: Closing) -> None:
    other = dataclasses.replace(one_closing, run_id="other", closing_id="other")
    with pytest.raises(ValueError, match="one run"):
        pack([one_closing, other], 512)


def test_settings_refuse_what_cannot_work() -> None:
    for wrong in ({"buckets": ()}, {"buckets": (512, 256)}, {"fill": 0.0}, {"closings_per_pack": 0}, {"flush_s": -1.0}):
        with pytest.raises(ValueError, match="must"):
            PackingSettings(**wrong)  # type: ignore[arg-type]
