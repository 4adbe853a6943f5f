"""Whether a step fits a slice: the arithmetic, the search, and the compiler's word where libtpu is installed."""

import dataclasses
import importlib.util
import math

import pytest

from learner import planning
from learner.planning import GIB, Figures, Plan, PlanError, Source, Topology, describe, estimate, mends, ranked
from learner.sharding import ShardingSettings
from policy.lora import LoraSettings
from policy.presets import PRESETS
from policy.settings import Quantization, Remat
from policy.transformer import ModelConfig

TINY = ModelConfig(
    vocab_size=250, num_layers=3, embed_dim=128, num_heads=4, num_kv_heads=2, head_dim=64, mlp_dim=256, max_context=512
)


def plan(model="llama-3.1-8b", topology="v5e-8", bucket=4096, rows=8, **more):
    config = model if isinstance(model, ModelConfig) else PRESETS[model]
    return Plan(config, Topology.parse(topology), bucket, rows, **more)


@pytest.mark.parametrize(
    ("name", "shape", "chips"),
    [
        ("v5e-64", (8, 8), 64),
        ("v5e-8", (2, 4), 8),
        ("v5p-64", (2, 4, 4), 32),  # Google counts the TensorCores of a v5p, two a chip
        ("v5p:4x4x4", (4, 4, 4), 64),
        ("v6e-256", (16, 16), 256),
    ],
)
def test_slices_are_named_as_google_names_them(name, shape, chips):
    topology = Topology.parse(name)
    assert (topology.shape, topology.chips) == (shape, chips)
    assert Topology.parse(topology.name) == topology


@pytest.mark.parametrize("name", ["v5e-63", "v5e:8x9", "h100-8", "v5e", ""])
def test_other_slices_are_refused_with_the_known_ones(name):
    with pytest.raises(PlanError, match="v5e-64"):
        Topology.parse(name)


def test_a_mesh_covers_the_slice_and_divides_the_rows():
    asked = plan()
    asked.check(ShardingSettings(fsdp=2, tensor=4))
    with pytest.raises(PlanError, match="8 chips of v5e-8, found tensor=4 = 4"):
        asked.check(ShardingSettings(tensor=4))
    with pytest.raises(PlanError, match="multiple of data × fsdp = 8, found 4: try 8"):
        plan(rows=4).check(ShardingSettings(fsdp=8))
    for mesh in asked.meshes():
        asked.check(mesh)
    assert len(asked.meshes()) == len({describe(mesh) for mesh in asked.meshes()}) == 10  # 8 = data × fsdp × tensor


def test_rows_that_spread_over_no_mesh_are_refused_with_the_mend():
    with pytest.raises(PlanError, match="try 256 rows"):
        ranked(plan("gemma-2-2b", "v5e-256", rows=8))


def test_figures_survive_their_way_between_processes():
    figures = estimate(plan(), ShardingSettings(fsdp=2, tensor=4))
    assert Figures.from_json(figures.to_json()) == figures


def test_an_estimate_counts_what_a_step_must_do():
    config, tokens = PRESETS["llama-3.1-8b"], 8 * 4096
    weights = sum(math.prod(shape) for shape in config.layer_shapes().values()) * config.num_layers
    found = estimate(plan(), ShardingSettings(fsdp=2, tensor=4))
    products = 6 * weights * tokens / 8
    assert products < found.flops < 1.3 * products
    base = 2 * (weights + 2 * config.vocab_size * config.embed_dim) / 8
    assert base < found.argument_bytes < 1.2 * base
    # Half the products, and a third of what they cost in time, are those of the layers made again.
    kept = estimate(plan(remat=Remat.NONE), ShardingSettings(fsdp=2, tensor=4))
    assert kept.flops < 0.75 * found.flops
    assert kept.peak_bytes > 2 * found.peak_bytes
    spread = estimate(plan(), ShardingSettings(fsdp=8))
    assert spread.sent_bytes != found.sent_bytes
    assert estimate(plan(), ShardingSettings(data=8)).argument_bytes > 6 * spread.argument_bytes


def test_an_estimate_counts_codes_and_scales_in_place_of_weights():
    config, mesh = PRESETS["llama-3.1-8b"], ShardingSettings(fsdp=2, tensor=4)
    weights = config.num_layers * sum(math.prod(shape) for shape in config.layer_shapes().values() if len(shape) == 2)
    dense, nf4 = (estimate(plan(quantize=format), mesh) for format in (Quantization.NONE, Quantization.NF4))
    assert dense.argument_bytes - nf4.argument_bytes == pytest.approx((2 - 9 / 16) * weights / 8, rel=1e-3)
    assert nf4.sent_bytes < dense.sent_bytes
    assert nf4.memory_bytes < dense.memory_bytes
    assert nf4.flops == dense.flops


def test_meshes_are_ranked_by_time_and_those_that_do_not_fit_come_last():
    asked = plan("llama-3.1-70b", "v5e-64")
    found = ranked(asked)
    fitting = [figures.fits(asked.topology) for figures in found]
    assert fitting[0]
    times = [sum(figures.seconds(asked.topology)) for figures in found[: fitting.index(False)]]
    assert times[0] == min(times)
    assert not any(figures.fits(asked.topology) for figures in ranked(plan("llama-3.1-405b", "v5e-64")))


@pytest.mark.parametrize(
    ("asked", "mesh", "mend"),
    [
        (plan(rows=64), ShardingSettings(fsdp=8), "--rows 32"),
        (plan("llama-3.1-70b"), ShardingSettings(fsdp=8), "--topology v5e-"),
        (plan("llama-3.1-8b"), ShardingSettings(data=8), "--mesh "),
        (plan("llama-3.1-8b", rows=16, remat=Remat.NONE), ShardingSettings(fsdp=8), "--remat layer"),
    ],
)
def test_what_would_fit_is_said(asked, mesh, mend):
    assert not estimate(asked, mesh).fits(asked.topology)
    assert any(how.startswith(mend) for how in mends(asked, mesh)), mends(asked, mesh)


def test_the_memory_that_a_refusal_names():
    assert planning._asked_for("Used 17.25G of 15.75G hbm. Exceeded hbm capacity by 1.5G.") == 17.25 * GIB
    assert planning._asked_for("required for HLO temporaries (1.98T) exceeds available HBM (95.74G).") == 1.98 * 2**40
    assert planning._asked_for("something else") == 0


if importlib.util.find_spec("libtpu") is not None:

    def test_libtpu_compiles_the_trainers_own_step():
        """Windows, softcaps, shared prompts; key heads that do not spread; a vocabulary that is filled up."""
        config = dataclasses.replace(
            TINY, num_layers=6, attention_softcap=50.0, final_softcap=30.0, sliding_window=64, local_layers=(0, 2, 4)
        )
        asked = plan(config, "v5e-8", bucket=256, rows=2, lora=LoraSettings(rank=4))
        found = planning.compiled(asked, ShardingSettings(fsdp=2, tensor=4))
        assert (found.source, found.refused) == (Source.COMPILED, "")
        assert found.fits(asked.topology)
        assert found.compile_s > 0
        guess = estimate(asked, found.mesh)
        # Six layers, each forward, again and backward: had the loop counted once, a third of this would be missing.
        assert 0.7 * guess.flops < found.flops < 1.5 * guess.flops
        assert found.argument_bytes < 2 * guess.argument_bytes
        assert found.collectives["all-gather"][0] > 6 * 2 * 7
        assert found.sent_bytes > 0.5 * guess.sent_bytes

    def test_libtpu_compiles_a_step_on_four_bits():
        """Codes in place of weights, also beside the products: what they take there is less than one dense matrix."""
        wide = dataclasses.replace(TINY, embed_dim=1024, mlp_dim=4096)
        mesh = ShardingSettings(fsdp=4, tensor=2)
        asked = [
            plan(wide, "v5e-8", bucket=256, rows=4, quantize=format) for format in (Quantization.NONE, Quantization.NF4)
        ]
        dense, nf4 = (planning.compiled(each, mesh) for each in asked)
        weights = 3 * sum(math.prod(shape) for shape in wide.layer_shapes().values() if len(shape) == 2)
        saved = dense.argument_bytes - nf4.argument_bytes
        assert saved == pytest.approx((2 - 9 / 16) * weights / 8, rel=0.02)
        matrix = 2 * wide.embed_dim * wide.mlp_dim / mesh.tensor
        assert nf4.temporary_bytes < dense.temporary_bytes + matrix
        assert nf4.collectives["all-gather"][1] < dense.collectives["all-gather"][1]

    def test_libtpu_refuses_what_does_not_fit():
        asked = plan(TINY, "v5e-8", bucket=4096, rows=4096, remat=Remat.NONE)
        found = planning.compiled(asked, ShardingSettings(fsdp=8))
        assert not found.fits(asked.topology)
        assert "15.75G" in found.refused
        assert found.peak_bytes > asked.topology.chip.memory_gib * GIB

else:

    def test_without_libtpu_it_says_how_to_install_it():
        assert "pip install 'headrace[plan]'" in planning.missing()
