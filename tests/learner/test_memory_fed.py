from __future__ import annotations

from pathlib import Path

import pytest

from learner.memory_fed import train_from_memory
from learner.settings import LearnerSettings
from learner.train import LearnerSpec, make_trainer
from policy.weights import load_model
from tests.learner.actors import BUCKETS, LORA, episode, tiny_model
from trajectories.packing import PackingSettings, pack
from trajectories.schema import Closing, Task, Version
from trajectories.topics import Topics

pytestmark = pytest.mark.usefixtures("compilation_cache")
SETTINGS = LearnerSettings(groups_per_step=2, group_size=2)


def closing(group: int) -> Closing:
    episodes = tuple(episode(Task("r", group, group_size=2), sample, Version(0, 1)) for sample in range(2))
    return Closing("r", group, 0, f"c{group}", 2, episodes, advantages=(-1.0, 1.0))


def test_steps_go_round_the_packs_and_are_measured(tmp_path: Path) -> None:
    spec = LearnerSpec("r", Topics("headrace-test", "r"), str(tmp_path), lora=LORA, packing=PackingSettings(BUCKETS))
    trainer = make_trainer(spec, load_model(tiny_model(tmp_path / "model")))
    packs = [pack([closing(0), closing(1)], 64), pack([closing(2)], 64)]
    found = train_from_memory(trainer, packs, SETTINGS, steps=6)
    assert trainer.step_number == found.steps == 6
    assert 0 < found.busy <= 1
    assert found.tokens_per_s > 0
    with pytest.raises(ValueError, match="as many closings"):
        train_from_memory(trainer, packs[1:], SETTINGS, steps=6)
