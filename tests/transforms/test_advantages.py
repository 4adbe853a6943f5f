"""What the Advantages stage makes of truncated members."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from learner.metrics import of_closing, of_verdict
from tests.transforms.conftest import MakeEpisode
from trajectories.advantages import AdvantageSettings, Truncated
from trajectories.schema import Closing, Episode, Outcome, Status, Verdict
from transforms.advantages import estimate


def closing(members: Sequence[Episode], failed: int = 0) -> Closing:
    return Closing("run-1", 3, 0, "c", len(members) + failed, tuple(members), failed_members=failed)


@pytest.fixture
def mixed(make_episode: MakeEpisode) -> Closing:
    """Solved, wrong, cut by a limit with part of a reward, solved although cut; and one that failed."""
    return closing(
        [
            make_episode(0, reward=1.0, success=True),
            make_episode(1, reward=0.0),
            make_episode(2, reward=0.5, status=Status.MAX_TOKENS),
            make_episode(3, reward=1.0, success=True, status=Status.MAX_TURNS),
        ],
        failed=1,
    )


@pytest.mark.parametrize(
    ("mode", "samples", "advantages"),
    [
        (Truncated.TRAIN, (0, 1, 2, 3), (0.375, -0.625, -0.125, 0.375)),
        (Truncated.MASK, (0, 1), (0.375, -0.625)),
        (Truncated.DROP, (0, 1), (0.5, -0.5)),
    ],
)
def test_who_trains_and_who_votes(
    mixed: Closing, mode: Truncated, samples: tuple[int, ...], advantages: tuple[float, ...]
) -> None:
    result = estimate(mixed, AdvantageSettings("dr_grpo", truncated=mode))
    assert isinstance(result, Closing)
    assert tuple(episode.sample for episode in result.episodes) == samples
    assert result.advantages == advantages
    # Whoever trains, the statistics are of all, and tell truncated, wrong and failed apart.
    statistics = of_closing(result)
    assert statistics.ends == {"solved": 2, "wrong": 1, "truncated": 1, "failed": 1}
    assert (statistics.success, statistics.reward, statistics.members) == (0.5, 0.625, 5)


@pytest.mark.parametrize("mode", [Truncated.MASK, Truncated.DROP])
def test_a_group_that_was_truncated_whole_is_filtered_and_its_verdict_says_so(
    make_episode: MakeEpisode, mode: Truncated
) -> None:
    cut = closing([make_episode(sample, reward=sample / 4, status=Status.CONTEXT_OVERFLOW) for sample in range(3)])
    result = estimate(cut, AdvantageSettings("dr_grpo", truncated=mode))
    assert isinstance(result, Verdict)
    assert result.outcome is Outcome.FILTERED
    assert "truncated" in result.reason
    assert of_verdict(result).ends == {"solved": 0, "wrong": 0, "truncated": 3, "failed": 0}


def test_equal_rewards_are_filtered_whatever_becomes_of_truncated_members(make_episode: MakeEpisode) -> None:
    members = [make_episode(0, reward=0.0), make_episode(1, reward=0.0), make_episode(2, reward=0.0)]
    members.append(make_episode(3, reward=1.0, status=Status.MAX_TOKENS, success=True))
    for mode, outcome in ((Truncated.DROP, "every reward is 0"), (Truncated.MASK, None), (Truncated.TRAIN, None)):
        result = estimate(closing(members), AdvantageSettings("dr_grpo", truncated=mode))
        assert (result.reason if isinstance(result, Verdict) else None) == outcome
