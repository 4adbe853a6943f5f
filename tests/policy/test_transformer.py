"""The transformer: layouts agree, shared prompts equal separate sequences, and the chunked head equals the formula."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy.lora import LoraSettings, init_adapter
from policy.settings import Remat
from policy.transformer import (
    ModelConfig,
    attention,
    blocked_attention,
    hidden_states,
    is_stacked,
    stack_layers,
    token_logprobs,
    unembed,
    unstack_layers,
    visible,
)

CONFIG = ModelConfig(
    vocab_size=37, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=48, max_context=64
)
UNTIED = ModelConfig(
    vocab_size=37,
    num_layers=2,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=1,
    head_dim=8,
    mlp_dim=48,
    tie_embeddings=False,
    max_context=64,
)


def random_params(config, seed=0):
    generator = np.random.default_rng(seed)

    def draw(shape):
        scale = shape[0] ** -0.5 if len(shape) == 2 else 1.0
        return (generator.standard_normal(shape) * scale).astype(np.float32)

    params = {name: draw(shape) for name, shape in config.model_shapes().items()}
    layers = [{name: draw(shape) for name, shape in config.layer_shapes().items()} for _ in range(config.num_layers)]
    return {**params, "layers": layers}


def random_adapter(config, seed=1):
    settings = LoraSettings(rank=4, alpha=8.0)
    generator = np.random.default_rng(seed)
    adapter = init_adapter(config, settings, seed)
    return {
        name: {"a": parts["a"], "b": generator.standard_normal(parts["b"].shape).astype(np.float32) * 0.1}
        for name, parts in adapter.items()
    }


def causal(tokens):
    """positions_BT, visible_BTT of whole sequences."""
    B, T = tokens.shape
    segments = np.ones((B, T), np.int32)
    return np.broadcast_to(np.arange(T), (B, T)), visible(segments, np.zeros_like(segments))


def plain_logprobs(config, params, hidden, targets, temperature):
    return jnp.take_along_axis(
        jax.nn.log_softmax(unembed(config, params, hidden) / temperature, -1), targets[:, None], -1
    )[:, 0]


def test_config_survives_json():
    assert ModelConfig.from_json(CONFIG.to_json()) == CONFIG
    assert ModelConfig.from_json(UNTIED.to_json()) == UNTIED


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{}", "missing fields"),
        ("[1]", "found list"),
        (CONFIG.to_json().replace("vocab_size", "vocabulary"), "unknown fields \\['vocabulary'\\]"),
        (CONFIG.to_json().replace('"llama"', '"mamba"'), "must be one of llama, .*, found 'mamba'"),
        (CONFIG.to_json().replace('"num_kv_heads": 2', '"num_kv_heads": 3'), "multiple of num_kv_heads"),
    ],
)
def test_bad_configs_are_refused(text, found):
    with pytest.raises(ValueError, match=found):
        ModelConfig.from_json(text)


def test_layouts_round_trip():
    params = random_params(CONFIG)
    stacked = stack_layers(params)
    assert is_stacked(stacked)
    assert not is_stacked(params)
    assert stacked["layers"]["q_proj"].shape == (2, 32, 32)
    again = unstack_layers(stacked)
    for ours, theirs in zip(params["layers"], again["layers"], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("config", "remat"), [(CONFIG, False), (CONFIG, True), (UNTIED, Remat.LAYER)], ids=["none", "attention", "layer"]
)
def test_scanned_equals_unrolled_in_value_and_gradient(config, remat):
    params, adapter = random_params(config), random_adapter(config)
    tokens = np.random.default_rng(2).integers(0, config.vocab_size, (2, 11))
    positions, mask = causal(tokens)

    def loss(adapter, params):
        hidden = hidden_states(config, params, adapter, 2.0, tokens, positions, mask, remat=remat)
        return (unembed(config, params, hidden) ** 2).mean()

    run = jax.jit(jax.value_and_grad(loss))
    loss_unrolled, gradient_unrolled = run(adapter, params)
    loss_stacked, gradient_stacked = run(adapter, stack_layers(params))
    np.testing.assert_allclose(loss_unrolled, loss_stacked, rtol=1e-5)
    for name, parts in gradient_unrolled.items():
        for part, array in parts.items():
            np.testing.assert_allclose(array, gradient_stacked[name][part], rtol=2e-4, atol=1e-5, err_msg=name + part)
            assert np.abs(array).max() > 0


def test_visible_is_what_the_contract_says():
    # prompt 1 (3 tokens), members 2 and 3 of it, prompt 4 of another closing, padding
    segments = np.array([[1, 1, 1, 2, 2, 3, 3, 4, 0, 0]])
    parents = np.array([[0, 0, 0, 1, 1, 1, 1, 0, 0, 0]])
    seen = np.asarray(visible(segments, parents))[0]
    for i in range(10):
        for j in range(10):
            own = segments[0, j] == segments[0, i]
            parent = segments[0, j] == parents[0, i]
            expected = (j <= i and segments[0, j] != 0 and (own or parent)) or i == j
            assert seen[i, j] == expected, (i, j)


def test_members_that_share_a_prompt_equal_separate_sequences():
    params, adapter = stack_layers(random_params(CONFIG)), random_adapter(CONFIG)
    generator = np.random.default_rng(3)
    prompt, members = generator.integers(0, 37, 7), [generator.integers(0, 37, n) for n in (4, 1, 6)]
    row = np.concatenate([prompt, *members, [0, 0]])[None]
    segments = np.concatenate([[1] * 7, *([k + 2] * len(m) for k, m in enumerate(members)), [0, 0]])[None]
    parents = np.where(segments > 1, 1, 0)
    positions = np.concatenate([np.arange(7), *(7 + np.arange(len(m)) for m in members), [0, 0]])[None]
    packed = hidden_states(CONFIG, params, adapter, 2.0, row, positions, visible(segments, parents))[0]
    assert np.isfinite(packed).all()
    start = 7
    for member in members:
        alone = np.concatenate([prompt, member])[None]
        apart = hidden_states(CONFIG, params, adapter, 2.0, alone, *causal(alone))[0]
        np.testing.assert_allclose(packed[start : start + len(member)], apart[7:], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(packed[:7], apart[:7], rtol=1e-4, atol=1e-5)
        start += len(member)


@pytest.mark.parametrize(("batch", "length"), [(1, 19), (2, 16), (2, 5)])
def test_blocked_attention_equals_attention(monkeypatch, batch, length):
    monkeypatch.setattr("policy.transformer.QUERY_BLOCK", 8)
    generator = np.random.default_rng(6)
    q, k, v, weight = (
        generator.standard_normal((batch, length, heads, 8)).astype(np.float32) for heads in (6, 2, 2, 6)
    )
    segments = generator.integers(0, 4, (batch, length))
    mask = visible(segments, np.where(segments > 1, 1, 0))

    def run(kernel):
        return jax.value_and_grad(lambda q, k, v: (kernel(q, k, v, mask) * weight).sum(), (0, 1, 2))(q, k, v)

    for blocked, plain in zip(jax.tree.leaves(run(blocked_attention)), jax.tree.leaves(run(attention)), strict=True):
        np.testing.assert_allclose(blocked, plain, rtol=1e-4, atol=1e-5)


def test_attention_that_sees_nothing_stays_finite():
    q = jnp.ones((1, 2, 4, 8))
    out = attention(q, q[:, :, :2], q[:, :, :2], jnp.zeros((1, 2, 2), bool))
    assert np.isfinite(out).all()


@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
def test_token_logprobs_equal_the_plain_formula(config):
    params = random_params(config)
    generator = np.random.default_rng(4)
    hidden = generator.standard_normal((21, 32)).astype(np.float32)
    targets = generator.integers(0, config.vocab_size, 21)
    weights = generator.standard_normal(21).astype(np.float32)

    def chunked(hidden, count, temperature):
        logprobs = token_logprobs(config, params, hidden, targets, count, temperature, chunk=8)
        return (logprobs * weights).sum(), logprobs

    def plain(hidden, count, temperature):
        logprobs = plain_logprobs(config, params, hidden, targets, temperature)
        logprobs = jnp.where(np.arange(21) < count, logprobs, 0.0)
        return (logprobs * weights).sum(), logprobs

    chunked, plain = (jax.jit(jax.grad(function, has_aux=True)) for function in (chunked, plain))
    for count, temperature in itertools.product((0, 1, 8, 9, 21), (1.0, 0.6)):
        gradient, logprobs = chunked(hidden, count, temperature)
        expected_gradient, expected = plain(hidden, count, temperature)
        np.testing.assert_allclose(logprobs, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-5)
        assert not np.asarray(gradient)[count:].any()


def test_token_logprobs_compile_once_for_every_count():
    params = random_params(CONFIG)
    compiled = jax.jit(lambda hidden, count: token_logprobs(CONFIG, params, hidden, np.zeros(20), count, 1.0, chunk=8))
    hidden = np.ones((20, 32), np.float32)
    for count in range(21):
        assert (np.asarray(compiled(hidden, np.int32(count))) != 0).sum() == count
    assert compiled._cache_size() == 1


def test_token_logprobs_ignore_rubbish_behind_the_count_and_survive_extremes():
    params = random_params(CONFIG)
    hidden = np.full((10, 32), np.nan, np.float32)
    hidden[:3] = np.array([[1e4], [-1e4], [0.0]])
    value, gradient = jax.value_and_grad(
        lambda h: token_logprobs(CONFIG, params, h, np.full(10, 5), 3, 1.0, chunk=8).sum()
    )(hidden)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


def test_greedy_log_probabilities_are_those_at_temperature_one():
    params = random_params(CONFIG)
    hidden = np.random.default_rng(5).standard_normal((4, 32)).astype(np.float32)
    targets = np.arange(4)
    np.testing.assert_array_equal(
        token_logprobs(CONFIG, params, hidden, targets, 4, 0.0), token_logprobs(CONFIG, params, hidden, targets, 4, 1.0)
    )
