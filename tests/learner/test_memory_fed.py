from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from learner.memory_fed import train_from_memory
from learner.settings import LearnerSettings
from learner.train import LearnerSpec, make_trainer
from policy.weights import load_model
from tests.learner.actors import BUCKETS, LORA, episode, tiny_model
from trajectories.packing import PackingSettings, bucket_of, pack
from trajectories.schema import Closing, Episode, Task, Version
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


def test_a_long_run_of_mixed_lengths_compiles_nothing_after_its_first_row(tmp_path: Path) -> None:
    buckets = (32, 64, 128)
    spec = LearnerSpec("r", Topics("headrace-test", "r"), str(tmp_path), lora=LORA, packing=PackingSettings(buckets))
    trainer = make_trainer(spec, load_model(tiny_model(tmp_path / "model")))

    def mixed(group: int) -> Closing:
        rng = np.random.default_rng(group)
        prompt, size = rng.integers(1, 29, rng.integers(1, 40)), int(rng.integers(1, 6))

        def member(sample: int) -> Episode:
            tokens_T = np.concatenate([prompt, rng.integers(1, 29, rng.integers(1, 60))])
            mask_T = np.arange(len(tokens_T)) >= len(prompt)
            return Episode("r", group, 0, sample, size, tokens_T, mask_T, np.where(mask_T, -3.0, 0.0), len(prompt))

        episodes = tuple(member(sample) for sample in range(size))
        return Closing("r", group, 0, f"c{group}", size, episodes, advantages=(0.5,) * size)

    packs = [pack([one], bucket_of(one, buckets)) for one in map(mixed, range(97))]
    assert {source.bucket for source in packs} == set(buckets)
    found = train_from_memory(trainer, packs, LearnerSettings(groups_per_step=3, group_size=2), steps=100)
    assert found.compiles_after_warmup == 0
    assert trainer.step_number == 100
