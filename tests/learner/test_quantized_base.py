"""A step on a quantised base is that on the weights its codes stand for, and their bytes are all that it holds."""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner.losses import KlPlace, LossSettings
from learner.sharding import Sharding, ShardingSettings
from learner.step import OptimizerSettings, Trainer
from policy.families import PROJECTIONS
from policy.lora import LoraSettings
from policy.quantization import Quantized
from policy.settings import Quantization, Remat
from policy.transformer import stack_layers
from policy.weights import ModelSettings, load_model, save_model
from tests.learner.test_step import CONFIG, build, closings, packed_rows, random_adapter, random_params

FORMATS = [Quantization.INT8, Quantization.INT4, Quantization.NF4]
LOSS = LossSettings(kl_coefficient=0.1, kl_in=KlPlace.LOSS)
LARGE = dataclasses.replace(CONFIG, num_layers=8, embed_dim=256, num_heads=8, head_dim=32, mlp_dim=1024)
MATRICES = LARGE.num_layers * sum(int(np.prod(LARGE.layer_shapes()[name])) for name in PROJECTIONS)


def dense(params):
    """What the codes stand for."""

    def of(stack):
        return jax.vmap(lambda one: one.dense(jnp.float32))(stack) if isinstance(stack, Quantized) else stack

    return {**params, "layers": {name: of(parameter) for name, parameter in params["layers"].items()}}


@pytest.fixture(scope="module")
def plain():
    trainer = build(loss=LOSS, buckets=(64,))
    trainer.compile()
    return trainer


@pytest.mark.parametrize(("format", "remat"), zip(FORMATS, Remat, strict=True))
def test_the_step_is_that_on_the_weights_that_the_codes_stand_for(plain, format, remat):
    trainer = build(loss=LOSS, buckets=(64,), quantize=format, remat=remat)
    trainer.compile()
    adapter = random_adapter(trainer.adapter)
    rows = packed_rows(closings(prompts=(25, 37)), 64)
    found = []
    plain._params = dense(trainer._params)
    for each in (plain, trainer):
        each.restore(each.state()._replace(adapter=adapter))
        gradient, sums = each.gradient(each.prepare(rows))
        found.append((jax.tree.leaves(gradient), sums))
    (expected, sums), (gradient, own) = found
    np.testing.assert_allclose(own.loss, sums.loss, rtol=1e-5)
    # The reference is the same base, without the adapter.
    assert float(own.reference_kl) > 0
    np.testing.assert_allclose(own.reference_kl, sums.reference_kl, rtol=1e-5)
    whole = np.sqrt(sum(np.square(leaf).sum() for leaf in expected))
    for one, other in zip(gradient, expected, strict=True):
        assert np.abs(one - other).max() <= 1e-5 * whole
    assert trainer.run(trainer.prepare(rows)).updated


def held_bytes():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def large(format):
    return Trainer(
        LARGE, random_params(config=LARGE), LoraSettings(rank=1), OptimizerSettings(), LossSettings(), buckets=(64,),
        rows_per_call=1, temperature=1.0, seed=0, quantize=format,
    )  # fmt: skip


@pytest.fixture(scope="module")
def resident():
    """Format -> (bytes of the base that are resident, the compiled call's memory)."""
    found = {}
    for format in (Quantization.NONE, *FORMATS):
        before = held_bytes()
        trainer = large(format)
        rest = sum(x.nbytes for x in jax.tree.leaves(trainer.state()))
        base = held_bytes() - before - rest
        program, batch = trainer._program, trainer._program.abstract_batch(64)
        memory = None
        if format in (Quantization.NONE, Quantization.NF4):
            params = program.abstract_params(np.float32, format)
            memory = program.lower_accumulate(params, batch).compile().memory_analysis()
        found[format] = base, memory
        del trainer
    return found


@pytest.mark.parametrize(
    ("format", "per_weight"),
    [(Quantization.INT8, 1 + 1 / 16), (Quantization.INT4, 1 / 2 + 1 / 16), (Quantization.NF4, 1 / 2 + 1 / 16)],
)
def test_resident_are_the_codes_and_a_scale_for_64_of_them(resident, format, per_weight):
    outside = resident[Quantization.NONE][0] - 4 * MATRICES
    assert outside < 0.1 * MATRICES
    assert resident[format][0] - outside == pytest.approx(per_weight * MATRICES, rel=1e-3)


def test_the_compiled_call_takes_the_codes_and_makes_one_layer_dense_at_a_time(resident):
    """Also where the backward pass computes nothing again: no layer's dense matrices wait for it."""
    plain, nf4 = resident[Quantization.NONE][1], resident[Quantization.NF4][1]
    saved = resident[Quantization.NONE][0] - resident[Quantization.NF4][0]
    assert plain.argument_size_in_bytes - nf4.argument_size_in_bytes == pytest.approx(saved, rel=1e-2)
    layer = 4 * MATRICES / LARGE.num_layers
    assert nf4.temp_size_in_bytes - plain.temp_size_in_bytes < 1.5 * layer


def test_from_disk_it_is_the_same_base(tmp_path):
    save_model(tmp_path, CONFIG, random_params())
    sharding = Sharding(ShardingSettings())
    loaded = sharding.load_params(load_model(ModelSettings(str(tmp_path))).weights, Quantization.NF4)
    put = sharding.put_params(stack_layers(random_params()), Quantization.NF4)
    assert jax.tree.structure(loaded) == jax.tree.structure(put)
    for one, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(put), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("format", FORMATS)
def test_a_workers_base_is_what_the_learners_codes_stand_for(tmp_path, format):
    save_model(tmp_path, CONFIG, random_params())
    weights = load_model(ModelSettings(str(tmp_path), quantize=format)).weights
    learners = dense(Sharding(ShardingSettings()).load_params(weights, format))
    fused = weights.fused()
    for i, layer in enumerate(weights.unrolled()["layers"]):
        for name, array in layer.items():
            np.testing.assert_array_equal(array, learners["layers"][name][i])
        members = [layer[name].T for name in ("gate_proj", "up_proj")]
        np.testing.assert_array_equal(fused["layers"][i]["gate_up_proj"], np.concatenate(members))
    np.testing.assert_array_equal(fused["embed"], learners["embed"])
