import numpy as np
import pytest

from trajectories.schema import Closing, Episode, Version, VersionSpan


@pytest.fixture
def one_closing() -> Closing:
    """Two members of one group, four prompt tokens, three sampled ones each."""
    episodes = tuple(
        Episode(
            run_id="run",
            group_id=3,
            attempt=0,
            sample=sample,
            group_size=2,
            tokens_T=np.asarray([1, 2, 3, 4, 10 + sample, 11, 12]),
            loss_mask_T=np.asarray([0, 0, 0, 0, 1, 1, 1], bool),
            logprobs_T=np.asarray([0, 0, 0, 0, -1.5, -0.25, -0.125]),
            prompt_length=4,
            version_spans=(VersionSpan(4, Version(5 - sample, 2)),),
            reward=float(sample),
        )
        for sample in range(2)
    )
    return Closing("run", 3, 0, "c", 2, episodes, advantages=(-1.0, 1.0))
