"""Advantages equal their papers' formulas, and what has no gradient is known before it is packed."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajectories.advantages import (
    ESTIMATORS,
    AdvantageSettings,
    advantages,
    filtered,
    gae,
    token_rewards,
    whitened,
    zero_variance,
)
from trajectories.packing import pack
from trajectories.schema import Closing, Episode, Turn

rewards = st.lists(st.floats(0, 100), min_size=2, max_size=32)


@given(rewards)
def test_estimators_equal_their_formulas(values: list[float]) -> None:
    count = len(values)
    mean = sum(values) / count
    std = math.sqrt(sum((value - mean) ** 2 for value in values) / count)
    expected = {
        "grpo": [(value - mean) / (std + 1e-4) for value in values],
        "dr_grpo": [value - mean for value in values],
        "rloo": [value - (sum(values) - value) / (count - 1) for value in values],
        "reinforce++": values,
        "gae": values,
        "reinforce++_baseline": [value - mean for value in values],
        "maxrl": [(value - mean) / (mean + 1e-4) for value in values],
    }
    assert expected.keys() == ESTIMATORS.keys()
    for name, wanted in expected.items():
        found = advantages(values, AdvantageSettings(name))
        assert np.allclose(found, wanted, rtol=1e-6, atol=1e-6 * max(1.0, *map(abs, values)))


@given(st.floats(-100, 100), st.integers(2, 32))
def test_equal_rewards_are_zero_variance(value: float, members: int) -> None:
    assert zero_variance([value] * members)
    assert not zero_variance([value] * members + [value + 1])


def test_only_estimators_with_a_group_baseline_filter_groups_without_variance() -> None:
    assert filtered([1.0, 1.0], AdvantageSettings())
    assert not filtered([1.0, 0.0], AdvantageSettings())
    assert not filtered([1.0, 1.0], AdvantageSettings("reinforce++"))
    assert not filtered([1.0, 1.0], AdvantageSettings("gae"))
    for name, estimator in ESTIMATORS.items():
        assert estimator.group_relative == (not any(advantages([3.0] * 4, AdvantageSettings(name))))


def test_long_episodes_lose_reward_by_the_papers_formula() -> None:
    """DAPO: L_max 20, L_cache 8."""
    lengths = [1, 12, 13, 16, 20, 21, 500]
    expected = [0, 0, (20 - 8 - 13) / 8, (20 - 8 - 16) / 8, -1, -1, -1]
    settings = AdvantageSettings("dr_grpo", overlong_tokens=20, overlong_buffer=8)
    mean = sum(expected) / len(expected)
    found = advantages([0.5] * len(lengths), settings, lengths)
    np.testing.assert_allclose(found, [value - mean for value in expected], atol=1e-12)
    sharp = advantages([1.0, 1.0], AdvantageSettings("dr_grpo", overlong_tokens=20), [20, 21])
    assert sharp == (0.5, -0.5)
    assert advantages([1.0, 0.0], AdvantageSettings("dr_grpo"), [1, 500]) == (0.5, -0.5)


def test_a_step_is_whitened_over_its_loss_tokens_however_it_is_packed() -> None:
    def closing(group: int) -> Closing:
        episodes = tuple(
            Episode("r", group, 0, sample, 2, np.arange(9), np.arange(9) > 5 - sample, np.zeros(9), 3)
            for sample in range(2)
        )
        return Closing("r", group, 0, f"c{group}", 2, episodes, advantages=(0.25 * group, 1.0 - group))

    closings = [closing(group) for group in range(4)]
    tokens = [
        advantage
        for one in closings
        for episode, advantage in zip(one.episodes, one.advantages, strict=True)
        for _ in range(episode.sampled_tokens)
    ]
    mean = sum(tokens) / len(tokens)
    std = math.sqrt(sum((value - mean) ** 2 for value in tokens) / len(tokens))
    for rows in (pack(closings, 64).rows, [row for one in closings for row in pack([one], 32).rows]):
        found = np.concatenate([row.advantages_T[row.loss_mask_T] for row in whitened(rows)])
        np.testing.assert_allclose(sorted(found), sorted((value - mean) / std for value in tokens), rtol=1e-5)
        assert not any(row.advantages_T[~row.loss_mask_T].any() for row in whitened(rows))
    assert whitened([]) == ()
    (row,) = pack(closings[:1], 32).rows
    spoilt = dataclasses.replace(row, advantages_T=np.where(row.loss_mask_T, np.float32(np.nan), 0))
    assert whitened([spoilt]) == (spoilt,)


def test_rewards_lie_at_the_last_token_of_their_turn_however_it_is_packed() -> None:
    """The rest of an episode's reward, such as a punishment, lies at its last sampled token."""

    def closing(group: int) -> Closing:
        mask_T = np.array([0, 0, 0, 1, 1, 0, 1, 1, 1, 0], bool)
        episodes = tuple(
            Episode(
                "r", group, 0, sample, 2, np.arange(10), mask_T, np.zeros(10), 3,
                turns=(Turn(3, 5, 1.0 + group), Turn(6, 9, 0.5 * sample)),
            )
            for sample in range(2)
        )  # fmt: skip
        return Closing("r", group, 0, f"c{group}", 2, episodes, advantages=(1.0 + group, 1.25 + group))

    closings = [closing(group) for group in range(3)]
    for rows in (pack(closings, 64).rows, [row for one in closings for row in pack([one], 32).rows]):
        found = {}
        for row in token_rewards(rows, closings):
            assert not row.advantages_T[~row.loss_mask_T].any()
            for segment in row.segments:
                place = slice(segment.start, segment.start + segment.length)
                if segment.parent:
                    found[segment.closing_id, segment.sample] = row.advantages_T[place].tolist()
        assert found == {
            (f"c{group}", sample): [0, 1 + group, 0, 0, 0, [0, 0.25][sample], 0]
            for group in range(3)
            for sample in (0, 1)
        }


@given(
    st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10)), max_size=12),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_gae_is_the_discounted_sum_of_temporal_differences(
    steps: list[tuple[float, float]], gamma: float, lam: float
) -> None:
    rewards_T, values_T = [r for r, _ in steps], [v for _, v in steps]
    found_T, returns_T = gae(rewards_T, values_T, gamma, lam)
    ahead = [*values_T[1:], 0.0]
    deltas = [r + gamma * v1 - v for r, v, v1 in zip(rewards_T, values_T, ahead, strict=False)]
    for t in range(len(steps)):
        expected = sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(steps)))
        assert found_T[t] == pytest.approx(expected, abs=1e-9)
        assert returns_T[t] == pytest.approx(expected + values_T[t], abs=1e-9)


def test_gae_at_its_ends_is_the_return_and_the_temporal_difference() -> None:
    rewards_T, values_T = np.array([0.0, 1.0, 0.0, 2.0]), np.array([0.5, -1.0, 2.0, 0.25])
    np.testing.assert_allclose(gae(rewards_T, values_T, 1.0, 1.0)[0], [2.5, 4.0, 0.0, 1.75])
    np.testing.assert_allclose(gae(rewards_T, values_T, 0.5, 0.0)[0], [-1.0, 3.0, -1.875, 1.75])
    with pytest.raises(ValueError, match="one shape"):
        gae([1.0], [1.0, 2.0], 1.0, 1.0)


def test_what_has_no_baseline_is_refused() -> None:
    with pytest.raises(ValueError, match="two members"):
        advantages([1.0], AdvantageSettings())
    with pytest.raises(ValueError, match="finite"):
        advantages([1.0, float("nan")], AdvantageSettings())
    with pytest.raises(ValueError, match="must be one of"):
        AdvantageSettings("grpq")
    with pytest.raises(ValueError, match="0 or more, found -1"):
        advantages([1.0, -1.0], AdvantageSettings("maxrl"))
    with pytest.raises(ValueError, match="must be 0 with the estimator maxrl"):
        AdvantageSettings("maxrl", overlong_tokens=8)
    with pytest.raises(ValueError, match="a fifth"):
        AdvantageSettings(overlong_tokens=8, overlong_buffer=9)
