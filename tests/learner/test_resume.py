"""A resumed run's next step is the uninterrupted one's, bit for bit, whatever process takes it."""

import jax
import numpy as np

from learner.checkpoints import Checkpoints, Snapshot
from tests.learner.elsewhere import run_elsewhere
from tests.learner.resumed import take_step, trainer
from trajectories.storage import open_storage


def test_another_process_takes_the_same_next_step_bit_for_bit(tmp_path):
    """PPO, four updates a step: adapter, critic, both optimizers' moments and the step come back."""
    uninterrupted, storage = trainer(), open_storage(str(tmp_path))
    for step in (0, 1):
        take_step(uninterrupted, step)
    assert uninterrupted.step_number == 2
    Checkpoints(storage, 1, keep=9).save(Snapshot(2, uninterrupted.state(), b"", {}))
    metrics = take_step(uninterrupted, 2)
    assert metrics.updates == 4
    expected = jax.tree.map(np.array, uninterrupted.state())
    run_elsewhere("-m", "tests.learner.resumed", str(tmp_path), timeout_s=240)
    found = Checkpoints(storage, 3, keep=9).newest(expected)
    assert found.step == 3
    assert found.record == {name: getattr(metrics, name) for name in ("loss", "gradient_norm", "value_loss")}
    for (path, one), other in zip(jax.tree.leaves_with_path(found.state), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes(), jax.tree_util.keystr(path)
