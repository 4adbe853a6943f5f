"""Groups close once, with the members that ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.test_pipeline import TestPipeline as Pipeline
from apache_beam.testing.test_stream import TestStream as Stream
from apache_beam.testing.util import assert_that

from tests.transforms.conftest import MakeEpisode
from trajectories.advantages import AdvantageSettings, advantages
from trajectories.failures import FailFast, FailurePolicy, MinViableGroup, RetryOnFailure
from trajectories.schema import Closing, Episode, Outcome, Status, Verdict
from transforms.dead_letters import VERDICTS
from transforms.groups import GroupEpisodes, close
from transforms.settings import RolloutSettings

FOREVER_S = 1e11
LENIENT = MinViableGroup(2)
SETTINGS = RolloutSettings(group_deadline_s=60.0, closed_mark_s=FOREVER_S)
PAST_EVERY_DEADLINE_S = 1e10
"""The test's clock begins at 0 and timers are set by the real one."""


def gathered(
    steps: Sequence[Sequence[Episode] | None],
    expect: list[tuple[Any, ...]],
    policy: FailurePolicy = LENIENT,
) -> None:
    """Run the stage over batches of members; None lets every deadline pass. `expect`: `shape` of each output."""
    stream = Stream()
    for step in steps:
        if step is None:
            stream = stream.advance_processing_time(PAST_EVERY_DEADLINE_S)
        else:
            stream = stream.add_elements(list(step))

    def check(found: list[Closing | Verdict]) -> None:
        assert sorted(map(shape, found)) == sorted(expect)

    with Pipeline(options=PipelineOptions([], streaming=True)) as pipeline:
        grouped = (
            pipeline
            | stream.with_output_types(Episode)
            | beam.Map(lambda episode: episode).with_output_types(Episode)
            | GroupEpisodes(SETTINGS, policy)
        )
        assert_that((grouped.closings, grouped[VERDICTS]) | beam.Flatten(), check)


def shape(result: Closing | Verdict) -> tuple[Any, ...]:
    if isinstance(result, Verdict):
        return "verdict", result.key, result.outcome.value, result.members, result.failed_members
    samples = tuple(episode.sample for episode in result.episodes)
    return "closing", result.key, samples, result.failed_members, result.missing_members


def test_a_group_closes_when_all_members_have_ended(make_episode: MakeEpisode) -> None:
    others = [make_episode(sample, group_id=4) for sample in (0, 1)]
    gathered(
        [[make_episode(2), *others], [make_episode(0)], [make_episode(1)]],
        [("closing", "3.0", (0, 1, 2), 0, 0)],
    )


def test_a_failed_member_takes_no_part_and_does_not_stop_its_group(make_episode: MakeEpisode) -> None:
    failed = make_episode(1, status=Status.TIMEOUT, reward=0.0)
    gathered([[make_episode(0), failed, make_episode(2)]], [("closing", "3.0", (0, 2), 1, 0)])


def test_a_group_of_failed_members_yields_a_verdict(make_episode: MakeEpisode) -> None:
    members = [make_episode(sample, status=Status.ENVIRONMENT_ERROR) for sample in range(3)]
    gathered([members], [("verdict", "3.0", "failed", 0, 3)])


def test_a_deadline_closes_with_the_members_there_are(make_episode: MakeEpisode) -> None:
    gathered([[make_episode(0), make_episode(2)], None], [("closing", "3.0", (0, 2), 0, 1)])


def test_a_deadline_with_one_member_yields_a_verdict(make_episode: MakeEpisode) -> None:
    gathered([[make_episode(1)], None], [("verdict", "3.0", "failed", 1, 0)])


def test_duplicates_and_late_members_are_dropped(make_episode: MakeEpisode) -> None:
    gathered(
        [
            [make_episode(0), make_episode(0), make_episode(1)],
            None,
            [make_episode(2), make_episode(0)],
            [make_episode(sample, attempt=1) for sample in range(3)],
        ],
        [("closing", "3.0", (0, 1), 0, 1), ("closing", "3.1", (0, 1, 2), 0, 0)],
    )


def test_a_verdict_carries_the_statistics_of_the_usable_members(make_episode: MakeEpisode) -> None:
    result = close([make_episode(0, reward=0.25, success=True)], "c", MinViableGroup(2))
    assert isinstance(result, Verdict)
    assert result.outcome is Outcome.FAILED
    assert (result.reward_mean, result.success_mean, result.members) == (0.25, 1.0, 1)
    assert (result.sampled_tokens, result.duration_s) == (7, 2.5)
    assert "1 of 3 members are usable" in result.reason


def test_a_member_in_which_nothing_was_sampled_is_not_usable(make_episode: MakeEpisode) -> None:
    empty = make_episode(0, loss_mask_T=[False] * 12)
    result = close([empty, make_episode(1), make_episode(2)], "c", MinViableGroup(2))
    assert isinstance(result, Closing)
    assert [episode.sample for episode in result.episodes] == [1, 2]
    assert result.failed_members == 1


@pytest.mark.parametrize("policy", [FailFast(), RetryOnFailure(2)])
def test_where_only_whole_groups_train_the_first_failure_closes_the_group(
    make_episode: MakeEpisode, policy: FailurePolicy
) -> None:
    failed = make_episode(1, status=Status.TIMEOUT, reward=0.0)
    gathered(
        [[make_episode(0), failed], [make_episode(2)], [make_episode(s, attempt=1) for s in range(3)]],
        [("verdict", "3.0", "failed", 1, 1), ("closing", "3.1", (0, 1, 2), 0, 0)],
        policy,
    )


def test_where_only_whole_groups_train_a_missing_member_fails_the_group_at_the_deadline(
    make_episode: MakeEpisode,
) -> None:
    gathered([[make_episode(0), make_episode(2)], None], [("verdict", "3.0", "failed", 2, 0)], RetryOnFailure(2))


def test_a_verdict_says_which_member_failed_and_why(make_episode: MakeEpisode) -> None:
    failed = make_episode(1, status=Status.TIMEOUT, error="the environment's step passed its limit")
    result = close([make_episode(0), failed], "c", FailFast())
    assert isinstance(result, Verdict)
    assert "1 were not waited for; 3.0/1: timeout: the environment's step passed its limit" in result.reason


def test_min_viable_group_compares_those_that_lived_and_no_failure_is_a_reward_of_0(make_episode: MakeEpisode) -> None:
    failed = [make_episode(sample, status=Status.ENVIRONMENT_ERROR, reward=0.0, group_size=4) for sample in (0, 3)]
    alive = [make_episode(1, reward=1.0, group_size=4), make_episode(2, reward=0.5, group_size=4)]
    result = close([*failed, *alive], "c", MinViableGroup(2))
    assert isinstance(result, Closing)
    assert [episode.reward for episode in result.episodes] == [1.0, 0.5]
    assert advantages([episode.reward for episode in result.episodes], AdvantageSettings("dr_grpo")) == (0.25, -0.25)
    below = close([*failed, *alive], "c", MinViableGroup(3))
    assert isinstance(below, Verdict)
    assert (below.outcome, below.members, below.failed_members) == (Outcome.FAILED, 2, 2)
