"""Arrays lie where the table says, and the step does not depend on the mesh."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from learner.sharding import Sharding, ShardingSettings

REPOSITORY = Path(__file__).resolve().parents[2]

STEP_ON_MESHES = """
import sys, tempfile
from pathlib import Path
sys.path[:0] = [{repository!r}, {tests!r}]
import jax, numpy as np
from jax.sharding import PartitionSpec as P
from learner.sharding import Sharding, ShardingSettings
from learner.losses import LossSettings
from learner.step import OptimizerSettings, Trainer
from policy.transformer import stack_layers
from policy.weights import ModelSettings, load_model, save_model
from test_step import CONFIG, LORA, closings, packed_rows, random_adapter, random_params

assert len(jax.devices()) == 8
rows = packed_rows(closings())


def step(settings):
    trainer = Trainer(CONFIG, random_params(), LORA, OptimizerSettings(), LossSettings(), buckets=(128,),
                      rows_per_call=4, temperature=1.0, seed=0, sharding=settings)
    trainer.compile()
    trainer.restore(trainer.state()._replace(adapter=random_adapter(trainer.adapter)))
    gradient, _ = trainer.gradient(trainer.prepare(rows))
    compiled = trainer.compiles
    metrics = trainer.run(trainer.prepare(rows))
    trainer.restore(jax.tree.map(np.asarray, trainer.state()))
    assert trainer.run(trainer.prepare(rows)).updated and trainer.compiles == compiled
    return trainer, gradient, metrics


_, expected, one = step(None)
trainer, gradient, many = step(ShardingSettings(data=2, fsdp=2, tensor=2))
assert trainer.adapter["q_proj"]["a"].sharding.spec == P(None, ("fsdp",), None), trainer.adapter["q_proj"]["a"].sharding
assert trainer.adapter["q_proj"]["a"].addressable_shards[0].data.shape[1] == CONFIG.embed_dim // 2
for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
np.testing.assert_allclose(many.loss, one.loss, rtol=1e-5)
np.testing.assert_allclose(many.gradient_norm, one.gradient_norm, rtol=1e-5)

# From disk each device gets its slices, the same as by way of the whole model in memory.
folder = tempfile.mkdtemp()
save_model(Path(folder), CONFIG, random_params())
sharding = Sharding(ShardingSettings(data=2, fsdp=2, tensor=2))
loaded = sharding.load_params(load_model(ModelSettings(folder)).weights)
put = sharding.put_params(stack_layers(random_params()))
assert jax.tree.structure(loaded) == jax.tree.structure(put)
for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(put), strict=True):
    assert a.sharding == b.sharding and a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)
assert loaded["layers"]["q_proj"].addressable_shards[0].data.nbytes * 4 == loaded["layers"]["q_proj"].nbytes
print("equal")
"""


def test_eight_devices_take_the_step_of_one():
    code = STEP_ON_MESHES.format(repository=str(REPOSITORY), tests=str(Path(__file__).parent))
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "equal" in done.stdout


def test_one_device_is_a_mesh_too():
    placed = Sharding(ShardingSettings()).put_adapter({"q_proj": {"a": np.ones((2, 4, 1)), "b": np.ones((2, 1, 4))}})
    assert placed["q_proj"]["a"].sharding.is_fully_replicated


def test_impossible_meshes_are_refused_with_the_mend():
    with pytest.raises(ValueError, match="1 is no sharding"):
        ShardingSettings(tensor=0)
    with pytest.raises(ValueError, match="lower one of them"):
        Sharding(ShardingSettings(data=64))
