"""Closings become packs that fit a message; what fits none says so."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.test_pipeline import TestPipeline as Pipeline
from apache_beam.testing.test_stream import TestStream as Stream

from tests.transforms.conftest import MakeEpisode
from trajectories import codec
from trajectories.advantages import AdvantageSettings
from trajectories.packing import PackingSettings, unpack
from trajectories.schema import Closing, DeadLetter, Outcome, Pack, Verdict
from transforms.advantages import Advantages
from transforms.dead_letters import DEAD, VERDICTS
from transforms.rows import PackRows, due, packs

PAST_EVERY_DEADLINE_S = 1e10


def closing(make_episode: MakeEpisode, number: int, members: int = 3, **changes: Any) -> Closing:
    episodes = tuple(make_episode(sample, group_id=number, **changes) for sample in range(members))
    return Closing("run-1", number, 0, f"closing-{number}", 3, episodes)


def outputs(
    closings: Sequence[Closing],
    packing: PackingSettings,
    folder: Path,
    settings: AdvantageSettings = AdvantageSettings(),  # noqa: B008 (frozen)
) -> list[Any]:
    """What Advantages and PackRows make of the closings, once every timer has fired."""
    stream = Stream().add_elements(list(closings)).advance_processing_time(PAST_EVERY_DEADLINE_S)
    with Pipeline(options=PipelineOptions([], streaming=True)) as pipeline:
        estimated = pipeline | stream | beam.Map(lambda one: one).with_output_types(Closing) | Advantages(settings)
        packed, refused, unpackable = estimated.closings | PackRows(packing)
        everything = (packed, refused, unpackable, estimated[VERDICTS], estimated[DEAD]) | beam.Flatten()
        everything | beam.Map(_keep, folder)
    kinds = {kind.__name__: kind for kind in (Pack, Verdict, DeadLetter)}
    return [codec.decode(path.read_bytes(), kinds[path.suffix[1:]]) for path in sorted(folder.iterdir())]


def _keep(message: codec.Message, folder: Path) -> None:
    (folder / f"{uuid.uuid4().hex}.{type(message).__name__}").write_bytes(codec.encode(message))


def test_closings_are_packed_together_and_come_back_exactly(make_episode: MakeEpisode, tmp_path: Path) -> None:
    closings = [closing(make_episode, number) for number in range(3)]
    (packed,) = outputs(closings, PackingSettings(buckets=(64,), closings_per_pack=3, fill=1.0), tmp_path)
    unpacked = unpack(packed)
    assert [one.episodes for one in unpacked] == [one.episodes for one in closings]
    for one in unpacked:
        assert one.advantages == pytest.approx((-1.2245, 0.0, 1.2245), abs=1e-3)


def test_a_timer_flushes_what_waits(make_episode: MakeEpisode, tmp_path: Path) -> None:
    (packed,) = outputs(
        [closing(make_episode, 1)], PackingSettings(buckets=(64,), closings_per_pack=4, fill=1.0), tmp_path
    )
    assert [one.group_id for one in packed.closings] == [1]


def test_each_closing_takes_the_smallest_bucket_that_holds_it(make_episode: MakeEpisode, tmp_path: Path) -> None:
    small, large = closing(make_episode, 1), closing(make_episode, 2, length=30)
    found = outputs([small, large], PackingSettings(buckets=(32, 128)), tmp_path)
    assert sorted((packed.bucket, packed.closings[0].group_id) for packed in found) == [(32, 1), (128, 2)]


def test_a_group_without_variance_is_filtered(make_episode: MakeEpisode, tmp_path: Path) -> None:
    (result,) = outputs([closing(make_episode, 5, reward=0.5, success=True)], PackingSettings(), tmp_path)
    assert (result.outcome, result.group_id, result.reward_mean) == (Outcome.FILTERED, 5, 0.5)
    assert (result.success_mean, result.members, result.closing_id) == (1.0, 3, "closing-5")


def test_a_group_without_variance_trains_where_the_baseline_is_not_its_own(
    make_episode: MakeEpisode, tmp_path: Path
) -> None:
    one = closing(make_episode, 5, reward=0.5)
    (packed,) = outputs([one], PackingSettings(buckets=(64,)), tmp_path, AdvantageSettings("reinforce++"))
    assert packed.closings[0].advantages == (0.5, 0.5, 0.5)


def test_the_overlong_punishment_counts_sampled_tokens(make_episode: MakeEpisode, tmp_path: Path) -> None:
    one = closing(make_episode, 5)
    sampled = one.episodes[0].sampled_tokens
    for longest, expected in ((sampled, [0.0, 1.0, 2.0]), (sampled - 1, [-1.0, 0.0, 1.0])):
        folder = tmp_path / str(longest)
        folder.mkdir()
        settings = AdvantageSettings("reinforce++", overlong_tokens=longest)
        (packed,) = outputs([one], PackingSettings(buckets=(64,)), folder, settings)
        assert list(packed.closings[0].advantages) == expected


def test_a_closing_longer_than_every_row_leaves_a_dead_letter(make_episode: MakeEpisode, tmp_path: Path) -> None:
    found = outputs(
        [closing(make_episode, 1, length=40), closing(make_episode, 2)], PackingSettings(buckets=(32,)), tmp_path
    )
    by_type = {type(one): one for one in found}
    assert set(by_type) == {Pack, Verdict, DeadLetter}
    assert by_type[Verdict].outcome is Outcome.FAILED
    assert by_type[DeadLetter].reason == "TooLong"
    assert "40 tokens" in by_type[DeadLetter].detail


def test_rewards_that_are_no_numbers_fail_their_group_alone(make_episode: MakeEpisode, tmp_path: Path) -> None:
    bad = closing(make_episode, 1, reward=float("nan"))
    found = outputs([bad, closing(make_episode, 2)], PackingSettings(buckets=(64,)), tmp_path)
    assert sorted(type(one).__name__ for one in found) == ["DeadLetter", "Pack", "Verdict"]


def test_packs_are_split_until_each_fits_a_message(make_episode: MakeEpisode) -> None:
    closings = [closing(make_episode, number) for number in range(5)]
    one = len(codec.encode(next(packs(closings[:1], 64))))  # type: ignore[arg-type]
    found = list(packs(closings, 64, limit=one + one // 2))
    assert len(found) > 1
    kept = [kept for packed in found if isinstance(packed, Pack) for kept in packed.closings]
    assert [kept.group_id for kept in kept] == list(range(5))


def test_a_closing_that_fits_no_message_is_handed_back_with_the_reason(make_episode: MakeEpisode) -> None:
    ((refused, reason),) = packs([closing(make_episode, 1)], 64, limit=100)  # type: ignore[misc]
    assert refused.group_id == 1
    assert "exceeds the limit of 100" in reason


def test_when_packing_waits_no_longer() -> None:
    settings = PackingSettings(buckets=(100,), closings_per_pack=4, fill=0.9)
    assert not due(1, 50, 100, settings)
    assert due(1, 90, 100, settings)
    assert not due(2, 120, 100, settings)
    assert due(2, 180, 100, settings)
    assert due(4, 40, 100, settings)
    assert due(1, 40, 100, dataclasses.replace(settings, closings_per_pack=1))
