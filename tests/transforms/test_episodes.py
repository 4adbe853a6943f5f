"""The stage on Beam's runner, with processes that die under it."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.test_pipeline import TestPipeline as Pipeline
from apache_beam.testing.test_stream import TestStream as Stream

from tests.transforms.conftest import MakeEpisode
from trajectories import codec
from trajectories.failures import MinViableGroup
from trajectories.schema import DeadLetter, Episode, Kind, Status, Task
from transforms.dead_letters import DEAD, EVALUATED
from transforms.episodes import RunEpisodes, fault, next_poll
from transforms.pending import Absent, Look
from transforms.tasks import shard_of

PAST_EVERY_DEADLINE_S = 1e10


@dataclass(frozen=True)
class DyingProcess:
    """A process that an episode kills as soon as it starts: whoever asks next asks another, which knows nothing."""

    folder: Path

    def start(self) -> DyingProcess:
        return self

    def claim(self, episode_id: str, starts: int) -> None:
        (self.folder / f"{episode_id.replace('/', '-')}.{starts}.claim").touch()

    def look(self, episode_id: str) -> Look:
        return Absent.ABSENT

    def room(self) -> int:
        return 8

    def submit(self, task: Task, sample: int) -> None:
        raise AssertionError("no start number was ever committed and known")

    def forget(self, episode_id: str) -> None:
        raise AssertionError("there is no result")


def _keep(message: codec.Message, folder: Path, name: str) -> None:
    (folder / f"{name}-{uuid.uuid4().hex}").write_bytes(codec.encode(message))


def test_a_task_that_kills_its_process_is_given_up_and_its_group_and_the_dead_letters_learn_of_it(
    tmp_path: Path,
) -> None:
    kept, claims = tmp_path / "kept", tmp_path / "claims"
    kept.mkdir()
    claims.mkdir()
    tasks = [Task("run-1", 5, group_size=2), Task("run-1", 6, kind=Kind.EVAL)]
    keyed = [(shard_of(task, 4), task) for task in tasks]
    stream = Stream().add_elements(keyed).advance_processing_time(PAST_EVERY_DEADLINE_S)
    with Pipeline(options=PipelineOptions([], streaming=True)) as pipeline:
        ended = (
            pipeline
            | stream
            | beam.Map(lambda one: one).with_output_types(tuple[str, Task])
            | RunEpisodes("run-1", DyingProcess(claims), poll_interval_s=0.1, max_attempts=3, policy=MinViableGroup(2))
        )
        for name, output in (("train", ended.episodes), ("eval", ended[EVALUATED]), ("dead", ended[DEAD])):
            output | name >> beam.Map(_keep, kept, name)
    found = {
        name: [codec.decode(path.read_bytes(), kind) for path in kept.glob(f"{name}-*")]
        for name, kind in (("train", Episode), ("eval", Episode), ("dead", DeadLetter))
    }
    assert sorted(episode.episode_id for episode in found["train"]) == ["5.0/0", "5.0/1"]
    assert [episode.episode_id for episode in found["eval"]] == ["eval-6.0/0"]
    assert all(episode.status is Status.ENVIRONMENT_ERROR for episode in found["train"] + found["eval"])
    assert len(found["dead"]) == 3
    assert all("3 starts" in letter.detail for letter in found["dead"])
    # Each of the three starts of each of the three members was written down.
    assert len(list(claims.iterdir())) == 9


def test_polls_of_all_keys_fall_on_one_grid() -> None:
    assert next_poll(12.34, 0.1) - 12.4 < 1e-9
    assert {round(next_poll(now, 0.25), 6) for now in (3.01, 3.1, 3.2499)} == {3.25}
    assert all(next_poll(now / 7, 0.1) > now / 7 for now in range(1000))


def test_faults_of_tools_are_named_gravest_first(make_episode: MakeEpisode) -> None:
    assert fault(make_episode()) == ""
    assert fault(make_episode(metrics={"tool_calls": 2.0})) == ""
    assert fault(make_episode(metrics={"cut_outputs": 1.0, "tool_timeouts": 1.0})) == "tool_timeouts"
    assert fault(make_episode(status=Status.TIMEOUT, metrics={"cut_outputs": 1.0})) == "timeout"
