"""Run by test_sharding in a process with eight virtual devices; asserts, and prints what it has shown.

python on_meshes.py step | gemma | kernel | places | quantized
"""

import dataclasses
import math
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS.parents[1]), str(TESTS)]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from test_step import CONFIG, LORA, closings, limited, packed_rows, random_adapter, random_params  # noqa: E402

from learner import hlo  # noqa: E402
from learner.attention import RowLayout  # noqa: E402
from learner.checkpoints import Checkpoints, Snapshot  # noqa: E402
from learner.losses import LossSettings  # noqa: E402
from learner.parallel import MeshModel  # noqa: E402
from learner.sharding import Sharding, ShardingSettings, abstract  # noqa: E402
from learner.step import OptimizerSettings, Trainer  # noqa: E402
from policy.lora import init_adapter  # noqa: E402
from policy.settings import Quantization, Remat  # noqa: E402
from policy.transformer import stack_layers  # noqa: E402
from policy.weights import ModelSettings, load_model, save_model  # noqa: E402
from trajectories.storage import open_storage  # noqa: E402

MESHES = [ShardingSettings(*sizes) for sizes in ((8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4))]
GEMMA = dataclasses.replace(
    CONFIG,
    family="gemma2",
    num_layers=4,
    activation="gelu",
    output_norms=True,
    scale_embedding=True,
    query_scale=0.3,
    attention_softcap=5.0,
    final_softcap=4.0,
    sliding_window=20,
    local_layers=(0, 2),
)
"""Odd in all that Gemma 2 is: windows, softcaps, norms; and 61 tokens of vocabulary, which no mesh divides."""


def make(config, mesh, *, compiled=True, buckets=(128,), **settings):
    trainer = Trainer(
        config,
        random_params(config=config),
        LORA,
        OptimizerSettings(),
        LossSettings(),
        buckets=buckets,
        rows_per_call=8,
        temperature=0.9,
        seed=0,
        sharding=mesh,
        **settings,
    )
    if compiled:
        trainer.compile()
    trainer.restore(trainer.state()._replace(adapter=random_adapter(trainer.adapter)))
    return trainer


def assert_close(found, expected, tolerance=1e-6):
    """Of trees: no entry is off by more than this share of the whole's norm."""
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    assert pairs
    apart = max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)
    whole = math.sqrt(sum(float((np.asarray(b) ** 2).sum()) for _, b in pairs))
    assert apart <= tolerance * whole, (apart, whole, apart / whole)


def assert_same_step(config, rows, meshes, **settings):
    """Loss, gradient and update on these meshes are those of one device; returns its trainer and theirs."""
    one = make(config, None, **settings)
    expected, sums = one.gradient(one.prepare(rows))
    metrics = one.run(one.prepare(rows))
    trainers = [one]
    for number, mesh in enumerate(meshes):
        trainer = make(config, mesh, **settings, remat=list(Remat)[number % 3])
        gradient, found = trainer.gradient(trainer.prepare(rows))
        assert float(found.tokens) == float(sums.tokens)
        np.testing.assert_allclose(found.loss, sums.loss, rtol=1e-6)
        assert_close(gradient, expected)
        compiled = trainer.compiles
        many = trainer.run(trainer.prepare(rows))
        np.testing.assert_allclose(many.gradient_norm, metrics.gradient_norm, rtol=1e-6)
        trainer.restore(jax.tree.map(np.asarray, trainer.state()))
        assert trainer.run(trainer.prepare(rows)).updated
        assert trainer.compiles == compiled
        trainers.append(trainer)
    print("equal")
    return trainers


def assert_same_resume(trainer, others, rows):
    """From a checkpoint of one mesh the others take its next step; its own takes it bit for bit."""
    storage = open_storage(tempfile.mkdtemp())
    Checkpoints(storage, 1, keep=1).save(Snapshot(trainer.step_number, trainer.state(), b"", {}))
    gradient = trainer.gradient(trainer.prepare(rows))[0]
    metrics = trainer.run(trainer.prepare(rows))
    expected = jax.tree.map(np.asarray, trainer.state())
    for other in (trainer, *others):
        tolerance = 0.0 if other is trainer else 1e-6
        other.restore(Checkpoints(storage, 2, keep=1).newest(other.state()).state)
        assert_close(other.gradient(other.prepare(rows))[0], gradient, tolerance)
        found = other.run(other.prepare(rows))
        assert (found.step, found.updated) == (metrics.step, True)
        np.testing.assert_allclose(found.loss, metrics.loss, rtol=tolerance)
        assert_close(other.state(), expected, tolerance)


def step():
    """Rows of groups that share their prompts, whose tokens and whose one key head `tensor` does not divide; then each
    goes on from a checkpoint of the first mesh."""
    rows = packed_rows(closings(), 129)
    config = dataclasses.replace(CONFIG, num_kv_heads=1)
    meshes = [ShardingSettings(fsdp=4, tensor=2), ShardingSettings(data=2)]
    one, first, second = assert_same_step(config, rows, meshes, buckets=(129,))
    assert_same_resume(first, (second, one), rows)


def gemma():
    """Such rows with kept ids, an unembedding of its own, and layers of both kinds."""
    config = dataclasses.replace(GEMMA, tie_embeddings=False)
    assert_same_step(config, packed_rows(limited(closings())), MESHES, max_kept=9)


def kernel():
    """The TPU's attention, interpreted, under shard_map: two key heads for four devices, both kinds of layers."""
    rows = packed_rows(closings())[:4]
    arrays = [np.stack([getattr(row, name) for row in rows]) for name in ("tokens_T", "segment_ids_T", "parent_ids_T")]
    tokens_BT, layout = arrays[0], RowLayout(*arrays[1:], np.stack([row.positions_T for row in rows]))
    params = stack_layers(random_params(config=GEMMA))
    adapter = random_adapter(init_adapter(GEMMA, LORA, 0))
    used = layout.segment_ids_BT[..., None] > 0

    def value(model, params, adapter):
        def total(adapter):
            hidden = model.hidden_states(params, adapter, LORA.scale, tokens_BT, layout, remat=Remat.LAYER)
            return (jnp.sin(hidden) * used).sum(), hidden * used

        return jax.jit(jax.grad(total, has_aux=True))(adapter)

    expected = value(MeshModel(GEMMA, Sharding(ShardingSettings())), params, adapter)
    sharding = Sharding(ShardingSettings(fsdp=2, tensor=4))
    found = value(
        MeshModel(GEMMA, sharding, interpret=True), sharding.put_params(params), sharding.put_adapter(adapter)
    )
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b)
    print("equal")


def places():
    """What lies where, and what never moves."""
    mesh = ShardingSettings(data=2, fsdp=2, tensor=2)
    trainer = make(CONFIG, mesh, compiled=False)
    a = trainer.adapter["q_proj"]["a"]
    assert a.sharding.spec == P(None, "fsdp", None), a.sharding
    assert a.addressable_shards[0].data.shape[1] == CONFIG.embed_dim // 2

    # What is compiled for machines that are not there is what is there.
    program = trainer._program
    for expected, found in (
        (program.abstract_state(), trainer.state()),
        (program.abstract_params(np.float32), trainer._params),
        (program.abstract_batch(128), trainer.prepare(packed_rows(closings())).calls[0][1]),
    ):
        assert jax.tree.structure(expected) == jax.tree.structure(found)
        for one, other in zip(jax.tree.leaves(expected), map(abstract, jax.tree.leaves(found)), strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            assert one.sharding.is_equivalent_to(other.sharding, len(one.shape)), (one, other)

    # From disk each device gets its slices, the same as by way of the whole model in memory.
    folder = tempfile.mkdtemp()
    save_model(Path(folder), CONFIG, random_params())
    sharding = Sharding(mesh)
    loaded = sharding.load_params(load_model(ModelSettings(folder)).weights)
    put = sharding.put_params(stack_layers(random_params()))
    assert jax.tree.structure(loaded) == jax.tree.structure(put)
    for one, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(put), strict=True):
        assert (one.sharding, one.dtype) == (other.sharding, other.dtype)
        np.testing.assert_array_equal(one, other)
    assert loaded["layers"]["q_proj"].addressable_shards[0].data.nbytes * 4 == loaded["layers"]["q_proj"].nbytes
    assert loaded["embed"].shape == (62, CONFIG.embed_dim)
    assert loaded["embed"].addressable_shards[0].data.nbytes * 4 == loaded["embed"].nbytes

    # Hidden states of all rows are never in one place, nor is the table because of a look-up.
    trainer = make(CONFIG, ShardingSettings(fsdp=8))
    hidden = 8 * 128 * CONFIG.embed_dim * 4
    text = trainer._compiled[128].as_text()
    sizes = [
        array.bytes
        for computation in hlo.parse(text)[0].values()
        for instruction in computation.values()
        if instruction.opcode.removesuffix("-start") in ("all-gather", "all-reduce")
        and hlo.group_size(instruction.attributes) > 1
        for array in instruction.arrays
    ]
    assert sizes
    assert max(sizes) < hidden / 8, sorted(sizes)[-5:]
    sharding = Sharding(ShardingSettings(fsdp=4, tensor=2))
    table = sharding.put_params(stack_layers(random_params()))["embed"]
    tokens = sharding.put_batch(packed_rows(closings())[0].tokens_T[None].repeat(8, 0))
    lookup = jax.jit(MeshModel(CONFIG, sharding)._embed).lower(table, tokens).compile()
    moved = hlo.costs(lookup.as_text()).collectives
    # The tokens of four shares go round, and of the embeddings each device sends what the others of its group keep.
    assert moved["all-gather"].bytes == 3 * tokens.nbytes / 4
    assert set(moved) <= {"all-gather", "all-to-all", "all-reduce", "reduce-scatter"}
    np.testing.assert_array_equal(lookup(table, tokens), random_params()["embed"][np.asarray(tokens)])
    print("equal")


def quantized():
    """A base in 4 bits: the step of one device, the places that are planned, and codes that travel, not weights."""
    rows = packed_rows(closings())
    one, trainer = (make(CONFIG, mesh, quantize=Quantization.NF4) for mesh in (None, ShardingSettings(2, 2, 2)))
    (expected, sums), (gradient, found) = (each.gradient(each.prepare(rows)) for each in (one, trainer))
    np.testing.assert_allclose(found.loss, sums.loss, rtol=1e-6)
    assert_close(gradient, expected)

    planned = trainer._program.abstract_params(np.float32, Quantization.NF4)
    assert jax.tree.structure(planned) == jax.tree.structure(trainer._params)
    for one, other in zip(jax.tree.leaves(planned), map(abstract, jax.tree.leaves(trainer._params)), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.sharding.is_equivalent_to(other.sharding, len(one.shape)), (one, other)
    up = trainer._params["layers"]["up_proj"]
    assert up.codes.addressable_shards[0].data.nbytes * 4 == up.codes.nbytes == math.prod((3, 24, 40)) / 2

    gathered = [
        (array.shape, instruction.type.lstrip("(")[:2])
        for computation in hlo.parse(trainer._compiled[128].as_text())[0].values()
        for instruction in computation.values()
        if instruction.opcode.removesuffix("-start") == "all-gather"
        for array in instruction.arrays
    ]
    # Shares of the tensor axis, whole along `embed`: q, o, up, down.
    assert {shape[-2:] for shape, kind in gathered if kind == "u8"} >= {(12, 12), (6, 24), (12, 20), (10, 24)}, gathered
    dense = {(24, 12), (12, 24), (24, 20), (20, 24)}
    assert not dense & {shape[-2:] for shape, kind in gathered if kind in ("f3", "bf")}, gathered
    print("equal")


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    {"step": step, "gemma": gemma, "kernel": kernel, "places": places, "quantized": quantized}[sys.argv[1]]()
