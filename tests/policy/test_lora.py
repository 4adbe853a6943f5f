"""Adapters: the base exactly at the start, the same from the same seed, unmerged equal to merged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy.families import PROJECTIONS
from policy.lora import LoraSettings, adapter_shapes, init_adapter, layer_adapter, zero_adapter
from policy.transformer import ModelConfig, fuse_adapter, fuse_layers, hidden_states, visible

CONFIG = ModelConfig(vocab_size=19, num_layers=2, embed_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=24)
SETTINGS = LoraSettings(rank=4, alpha=12.0)


def random_params():
    generator = np.random.default_rng(0)

    def draw(shape):
        return (generator.standard_normal(shape) * shape[0] ** -0.5).astype(np.float32)

    layers = [{n: draw(s) for n, s in CONFIG.layer_shapes().items()} for _ in range(CONFIG.num_layers)]
    return {**{n: draw(s) for n, s in CONFIG.model_shapes().items()}, "layers": layers}


def run(params, adapter, scale=SETTINGS.scale):
    tokens = np.arange(12).reshape(2, 6)
    segments = np.ones((2, 6), np.int32)
    positions = np.broadcast_to(np.arange(6), (2, 6))
    return np.asarray(
        hidden_states(CONFIG, params, adapter, scale, tokens, positions, visible(segments, np.zeros_like(segments)))
    )


def test_a_fresh_adapter_is_the_base_bit_for_bit():
    params = random_params()
    base = run(params, None)
    np.testing.assert_array_equal(run(params, init_adapter(CONFIG, SETTINGS, 7)), base)
    np.testing.assert_array_equal(run(params, zero_adapter(CONFIG, SETTINGS)), base)


def test_init_is_a_pure_function_of_the_seed():
    first, again, other = (init_adapter(CONFIG, SETTINGS, seed) for seed in (3, 3, 4))
    for name in SETTINGS.targets:
        np.testing.assert_array_equal(first[name]["a"], again[name]["a"])
        assert not np.array_equal(first[name]["a"], other[name]["a"])
        assert first[name]["a"].dtype == np.float32
    wide = init_adapter(ModelConfig(19, 2, 512, 2, 1, 8, 24), SETTINGS, 0)["q_proj"]["a"]
    np.testing.assert_allclose(wide.std(), 512**-0.5, rtol=0.05)


@pytest.mark.parametrize("targets", [SETTINGS.targets, ("q_proj", "down_proj"), ("v_proj", "up_proj")])
def test_unmerged_equals_merged(targets):
    settings = LoraSettings(rank=4, alpha=12.0, targets=targets)
    params, generator = random_params(), np.random.default_rng(1)
    adapter = init_adapter(CONFIG, settings, 0)
    for parts in adapter.values():
        parts["b"] = generator.standard_normal(parts["b"].shape).astype(np.float32) * 0.2
    merged = []
    for i, layer in enumerate(params["layers"]):
        share = layer_adapter(adapter, i)
        merged.append(
            layer | {n: layer[n] + share[n]["a"] @ share[n]["b"] * np.float32(settings.scale) for n in targets}
        )
    unmerged = run(params, adapter, settings.scale)
    np.testing.assert_allclose(unmerged, run({**params, "layers": merged}, None), rtol=1e-4, atol=1e-5)
    assert np.abs(unmerged - run(params, None)).max() > 1e-2
    shares = [fuse_adapter(CONFIG, layer_adapter(adapter, i)) for i in range(CONFIG.num_layers)]
    fused = run(fuse_layers(params), jax.tree.map(lambda *parts: np.stack(parts), *shares), settings.scale)
    np.testing.assert_allclose(fused, unmerged, rtol=1e-4, atol=1e-5)


def test_shapes_follow_the_layer():
    shapes = adapter_shapes(CONFIG, LoraSettings(rank=4, targets=("down_proj", "k_proj")))
    assert shapes == {
        "k_proj": {"a": (2, 16, 4), "b": (2, 4, 8)},
        "down_proj": {"a": (2, 24, 4), "b": (2, 4, 16)},
    }
    assert layer_adapter(None, 0) is None


def test_adapters_follow_the_activations_dtype():
    params = random_params()
    half = {
        **{n: jnp.asarray(params[n], jnp.bfloat16) for n in ("embed", "final_norm")},
        "layers": [{n: jnp.asarray(a, jnp.bfloat16) for n, a in layer.items()} for layer in params["layers"]],
    }
    assert run(half, init_adapter(CONFIG, SETTINGS, 0)).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ({"rank": 0}, "lora.rank must be at least 1"),
        ({"alpha": 0.0}, "lora.alpha must be a number above 0"),
        ({"targets": ("q_proj", "lm_head")}, "lora.targets must match one or more of q_proj.*found 'lm_head'"),
        ({"targets": ("(",)}, "lora.targets must hold regular expressions"),
        ({"targets": (r"model\.layers\.[0-3]\..*",)}, "in every layer or in none.*matches q_proj in some layers"),
        ({"targets": ()}, "lora.targets must name"),
        ({"targets": ("q_proj", "q_proj")}, "each once"),
    ],
)
def test_bad_settings_say_what_to_write(wrong, found):
    with pytest.raises(ValueError, match=found):
        LoraSettings(**wrong)


@pytest.mark.parametrize(
    ("targets", "projections"),
    [
        (("all-linear",), PROJECTIONS),
        (("v_proj", "q_proj"), ("q_proj", "v_proj")),
        ((r".*\.self_attn\.(q|v)_proj",), ("q_proj", "v_proj")),
        ((r"model\.layers\.\d+\.mlp\..*", "self_attn.o_proj"), ("o_proj", "gate_proj", "up_proj", "down_proj")),
        (("[qk]_proj",), ("q_proj", "k_proj")),
    ],
)
def test_targets_are_names_or_regular_expressions_as_peft_reads_them(targets, projections):
    settings = LoraSettings(targets=targets)
    assert settings.projections == projections
    assert tuple(adapter_shapes(CONFIG, settings)) == projections
