"""The learner of `test_train.py` as a process that can be killed: `python -m tests.learner.process FOLDER SETTINGS`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

from learner.settings import CheckpointSettings, EvaluationSettings, LearnerSettings
from learner.train import LearnerSpec, leave, train
from policy.weights import ModelSettings
from tests.learner.actors import BUCKETS, LORA, Tasks
from trajectories.packing import PackingSettings
from trajectories.topics import Topics


def spec_of(settings: dict[str, Any]) -> LearnerSpec:
    return LearnerSpec(
        run_id=settings["run_id"],
        topics=Topics("headrace-test", settings["run_id"]),
        storage_url=settings["storage_url"],
        model=ModelSettings(settings["model"]),
        lora=LORA,
        packing=PackingSettings(buckets=BUCKETS),
        learner=LearnerSettings(groups_per_step=3, group_size=4, steps=settings["steps"], unstarted_deadline_s=5),
        checkpoints=CheckpointSettings(every_steps=settings["every_steps"]),
        evaluation=EvaluationSettings(questions=0),
    )


def main() -> NoReturn:
    folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    leave(train(spec_of(settings), Tasks(), folder))


if __name__ == "__main__":
    main()
