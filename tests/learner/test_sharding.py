"""Arrays lie where the table says, and the step does not depend on the mesh."""

from pathlib import Path

import numpy as np
import pytest

from learner.sharding import Sharding, ShardingSettings
from tests.learner.elsewhere import run_elsewhere


@pytest.mark.parametrize("what", ["step", "gemma", "kernel", "places", "quantized"])
def test_eight_devices_take_the_step_of_one(what):
    script = Path(__file__).with_name("on_meshes.py")
    assert "equal" in run_elsewhere(str(script), what, timeout_s=280, devices=8)


def test_one_device_is_a_mesh_too():
    placed = Sharding(ShardingSettings()).put_adapter({"q_proj": {"a": np.ones((2, 4, 1)), "b": np.ones((2, 1, 4))}})
    assert placed["q_proj"]["a"].sharding.is_fully_replicated


def test_impossible_meshes_are_refused_with_the_mend():
    with pytest.raises(ValueError, match="1 is no sharding"):
        ShardingSettings(tensor=0)
    with pytest.raises(ValueError, match="lower one of them"):
        Sharding(ShardingSettings(data=64))
