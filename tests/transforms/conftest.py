"""Episodes, groups and a spec of the smallest kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trajectories.schema import Episode, Status, Timings, Turn, Version, VersionSpan

MakeEpisode = Callable[..., Episode]


@pytest.fixture
def make_episode() -> MakeEpisode:
    def make(sample: int = 0, **changes: Any) -> Episode:
        length, prompt = changes.pop("length", 12), 5
        mask_T = np.arange(length) >= prompt
        values: dict[str, Any] = {
            "run_id": "run-1",
            "group_id": 3,
            "attempt": 0,
            "sample": sample,
            "group_size": 3,
            "tokens_T": np.where(mask_T, np.arange(length) + sample, np.arange(length)),
            "loss_mask_T": mask_T,
            "logprobs_T": np.where(mask_T, -0.5, 0.0),
            "prompt_length": prompt,
            "version_spans": (VersionSpan(prompt, Version(4, 1)),),
            "turns": (Turn(prompt, length),),
            "reward": float(sample),
            "status": Status.COMPLETED,
            "timings": Timings(started_at=10.0, ended_at=12.5),
        }
        return Episode(**{**values, **changes})

    return make
