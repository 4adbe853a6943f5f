"""Drawing tokens: the right distribution, the exact log-probability, and a stream of their own for every request."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy.sampling import sample, seed_words, uniforms


def draws(logits_V, count, temperature=1.0, seed=0):
    logits = jnp.broadcast_to(jnp.asarray(logits_V, jnp.float32), (count, len(logits_V)))
    seeds = jnp.broadcast_to(seed_words(seed), (count, 2))
    tokens, logprobs = jax.jit(sample)(
        logits, jnp.full(count, temperature), uniforms(seeds, jnp.arange(count, dtype=jnp.int32))
    )
    return np.asarray(tokens), np.asarray(logprobs)


@pytest.mark.parametrize(("vocabulary", "temperature"), [(24, 1.0), (256, 0.7), (1000, 1.0), (1000, 2.0)])
def test_frequencies_are_those_of_the_tempered_softmax(vocabulary, temperature):
    logits = np.random.default_rng(1).normal(0, 2, vocabulary)
    count = 20_000
    tokens, logprobs = draws(logits, count, temperature)
    expected = np.asarray(jax.nn.softmax(jnp.asarray(logits) / temperature))
    assert np.abs(logprobs - np.log(expected)[tokens]).max() < 1e-5
    # Pearson's statistic over the tokens that are expected often enough, the rest as one.
    common = expected * count >= 5
    observed = np.bincount(tokens, minlength=vocabulary)
    cells = [*zip(observed[common], expected[common] * count, strict=True)]
    cells.append((observed[~common].sum(), max(expected[~common].sum() * count, 1e-9)))
    statistic = sum((o - e) ** 2 / e for o, e in cells if e >= 5)
    degrees = sum(1 for _, e in cells if e >= 5) - 1
    assert statistic < degrees + 5 * np.sqrt(2 * degrees)


def test_greedy_takes_the_first_largest_logit_and_reports_at_temperature_1():
    logits = np.random.default_rng(2).normal(size=1000)
    logits[[300, 700]] = 9.0
    tokens, logprobs = draws(logits, 5, temperature=0.0)
    assert (tokens == 300).all()
    assert np.allclose(logprobs, np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))[300], atol=1e-5)


def test_impossible_tokens_and_the_padding_of_the_vocabulary_are_never_drawn():
    logits = np.full(300, -1e4)
    logits[[3, 299]] = [0.0, 1.0]
    tokens, logprobs = draws(logits, 2000)
    assert set(tokens.tolist()) == {3, 299}
    assert np.isfinite(logprobs).all()


def test_a_rare_block_is_drawn_with_its_exact_share():
    # All mass of the second block lies 60 nats below the first; it is never drawn, and its log-probability is exact.
    logits = np.concatenate([np.zeros(256), np.full(256, -60.0)])
    tokens, _ = draws(logits, 1000)
    assert (tokens < 256).all()


def test_a_draw_depends_on_seed_and_index_alone():
    seeds = jnp.asarray(np.stack([seed_words(s) for s in (5, 5, 6, 2**62 + 5)]))
    u = np.asarray(uniforms(seeds, jnp.asarray([0, 1, 0, 0], jnp.int32)))
    assert len({tuple(row) for row in u.tolist()}) == 4
    alone = np.asarray(uniforms(seeds[2:3], jnp.asarray([0], jnp.int32)))
    assert (alone[0] == u[2]).all()
    assert ((u >= 0) & (u < 1)).all()


def test_numbers_that_are_not_finite_show_in_the_log_probability():
    _, logprobs = draws(np.full(30, np.nan), 1)
    assert not np.isfinite(logprobs).all()
