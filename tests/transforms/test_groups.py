"""Groups close once, with the members that ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.test_pipeline import TestPipeline as Pipeline
from apache_beam.testing.test_stream import TestStream as Stream
from apache_beam.testing.util import assert_that

from tests.transforms.conftest import MakeEpisode
from trajectories.schema import Closing, Episode, Outcome, Status, Verdict
from transforms.dead_letters import VERDICTS
from transforms.groups import GroupEpisodes, close
from transforms.settings import RolloutSettings

FOREVER_S = 1e11
SETTINGS = RolloutSettings(group_deadline_s=60.0, closed_mark_s=FOREVER_S)
PAST_EVERY_DEADLINE_S = 1e10
"""The test's clock begins at 0 and timers are set by the real one."""


def gathered(steps: Sequence[Sequence[Episode] | None], expect: list[tuple[Any, ...]]) -> None:
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
            | GroupEpisodes(SETTINGS)
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
    result = close([make_episode(0, reward=0.25, success=True)], "c", min_members=2)
    assert isinstance(result, Verdict)
    assert result.outcome is Outcome.FAILED
    assert (result.reward_mean, result.success_mean, result.members) == (0.25, 1.0, 1)
    assert (result.sampled_tokens, result.duration_s) == (7, 2.5)
    assert "1 of 3 members are usable" in result.reason


def test_a_member_in_which_nothing_was_sampled_is_not_usable(make_episode: MakeEpisode) -> None:
    empty = make_episode(0, loss_mask_T=[False] * 12)
    result = close([empty, make_episode(1), make_episode(2)], "c", min_members=2)
    assert isinstance(result, Closing)
    assert [episode.sample for episode in result.episodes] == [1, 2]
    assert result.failed_members == 1


def test_min_members_is_at_least_two() -> None:
    with pytest.raises(ValueError, match=r"rollouts\.min_members must be at least 2"):
        dataclasses.replace(SETTINGS, min_members=1)
