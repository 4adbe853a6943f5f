"""Drawing tokens: the right distribution, the exact log-probability, and a stream of their own for every request."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.client import SamplingParams
from policy.sampling import NOT_KEPT, Limits, sample, sample_kept, seed_words, uniforms
from policy.settings import SamplingSettings


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


def reference(logits_V, temperature, top_k, top_p, min_p, max_kept):
    """(ids by rank, probabilities renormalised over them), filter after filter as `SamplingParams` says; float64."""
    scaled = logits_V.astype(np.float32) * (np.float32(1) / np.float32(temperature))
    p = np.exp(scaled.astype(np.float64) - scaled.max())
    ranked = sorted(range(len(p)), key=lambda i: (-np.float32(logits_V[i]), i))
    if top_k:
        ranked = ranked[:top_k]
    if top_p < 1:
        mass = p[ranked].sum()
        ranked = [i for rank, i in enumerate(ranked) if p[ranked[:rank]].sum() < top_p * mass]
    ranked = [i for i in ranked if p[i] >= min_p * p[ranked[0]]][:max_kept]
    return np.array(ranked), p[ranked] / p[ranked].sum()


def kept_draws(logits_BV, params, max_kept, count=1):
    """Tokens, log-probs and kept ids of `count` draws from each row."""
    logits = np.repeat(np.asarray(logits_BV, np.float32), count, 0)
    size = len(logits)
    seeds = jnp.broadcast_to(seed_words(3), (size, 2))
    limits = Limits(
        np.full(size, params.top_k, np.int32),
        np.full(size, params.top_p, np.float32),
        np.full(size, params.min_p, np.float32),
    )
    temperatures = np.full(size, params.temperature, np.float32)
    noise = uniforms(seeds, jnp.arange(size, dtype=jnp.int32))
    drawn = jax.jit(sample_kept, static_argnums=4)(logits, temperatures, noise, limits, max_kept)
    return tuple(np.asarray(x) for x in drawn)


@st.composite
def logit_rows(draw):
    """Rows with many ties within and across the blocks of the search."""
    vocabulary = draw(st.sampled_from([7, 24, 300, 1000, 2100]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    steps = draw(st.sampled_from([1.0, 0.25, 1e-3]))
    return np.round(rng.normal(0, draw(st.sampled_from([0.5, 3.0])), (3, vocabulary)) / steps) * steps + 0.0


@given(
    logits=logit_rows(),
    temperature=st.sampled_from([0.5, 0.8, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 8]),
    top_p=st.sampled_from([1.0, 0.95, 0.9, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    max_kept=st.sampled_from([8, 11, 64]),
)
@settings(max_examples=150, deadline=None)
def test_what_is_kept_is_what_the_filters_keep_one_after_the_other(logits, temperature, top_k, top_p, min_p, max_kept):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    tokens, logprobs, kept = kept_draws(logits, params, max_kept)
    assert kept.shape == (3, max_kept)
    for row in range(3):
        found = kept[row][kept[row] != NOT_KEPT]
        if not params.truncates:
            assert len(found) == 0
            continue
        # Float32 sums put a token on either side of a threshold that it meets to six digits.
        less, more = max(top_p - 1e-5 * (top_p < 1), 1e-9), min(top_p + 1e-5, 1.0)
        fewest, _ = reference(logits[row], temperature, top_k, less, min(min_p * (1 + 1e-5), 1.0), max_kept)
        most, _ = reference(logits[row], temperature, top_k, more, min_p * (1 - 1e-5), max_kept)
        assert set(fewest) <= set(found) <= set(most)
        assert (np.diff(found) > 0).all()
        assert (kept[row][len(found) :] == NOT_KEPT).all()
        assert tokens[row] in found
        scaled = logits[row][found] / temperature
        expected = scaled - np.logaddexp.reduce(scaled)
        assert abs(expected[list(found).index(tokens[row])] - logprobs[row]) < 1e-5


def test_of_equal_tokens_the_first_ids_are_kept():
    logits = np.zeros((1, 5000))
    logits[0, [4999, 1234]] = 1.0
    for params, expected in (
        (SamplingParams(top_k=4), [0, 1, 1234, 4999]),
        (SamplingParams(top_k=1), [1234]),
        (SamplingParams(min_p=1.0), [1234, 4999]),
        (SamplingParams(min_p=1e-6), [*range(14), 1234, 4999]),
    ):
        _, _, kept = kept_draws(logits, params, 16)
        assert kept[0][kept[0] != NOT_KEPT].tolist() == expected


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=12, temperature=1.3),
        SamplingParams(top_p=0.8, temperature=0.9),
        SamplingParams(min_p=0.05),
        SamplingParams(top_k=20, top_p=0.9, min_p=0.02, temperature=0.8),
    ],
)
def test_frequencies_are_those_of_the_kept_tokens(params):
    logits, count = np.random.default_rng(4).normal(0, 2, (1, 3000)), 20_000
    tokens, logprobs, kept = kept_draws(logits, params, 32, count)
    assert (kept == kept[0]).all()
    ids, p = reference(logits[0], params.temperature, params.top_k, params.top_p, params.min_p, 32)
    assert sorted(ids) == kept[0][kept[0] != NOT_KEPT].tolist()
    table = dict(zip(ids.tolist(), p, strict=True))
    assert np.abs(logprobs - np.log([table[token] for token in tokens.tolist()])).max() < 1e-5
    observed = np.array([(tokens == i).sum() for i in ids])
    assert observed.sum() == count
    # Pearson's statistic of one fixed seed against its value at p = 0.001 (Wilson and Hilferty's approximation).
    statistic, degrees = ((observed - p * count) ** 2 / (p * count)).sum(), len(ids) - 1
    assert (p * count).min() > 5
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 3.09 * np.sqrt(2 / (9 * degrees))) ** 3


def test_a_row_draws_alike_whatever_the_others_are_limited_to():
    """A plain row beside truncated ones draws what a plain call draws; a greedy row keeps nothing."""
    logits = np.random.default_rng(6).normal(0, 2, (4, 1000)).astype(np.float32)
    noise = uniforms(np.stack([seed_words(s) for s in range(4)]), np.zeros(4, np.int32))
    temperatures = np.array([0.7, 0.7, 0.0, 1.5], np.float32)
    limits = Limits(np.array([0, 3, 3, 0], np.int32), np.array([1, 1, 0.5, 0.4], np.float32), np.zeros(4, np.float32))
    tokens, logprobs, kept = map(np.asarray, sample_kept(logits, temperatures, noise, limits, 16))
    plain_tokens, plain_logprobs = map(np.asarray, sample(logits, temperatures, noise))
    counts = (kept != NOT_KEPT).sum(1)
    assert (tokens[[0, 2]] == plain_tokens[[0, 2]]).all()
    assert (logprobs[[0, 2]] == plain_logprobs[[0, 2]]).all()
    assert (counts[0], counts[1], counts[2]) == (0, 3, 0)
    for row in (1, 3):
        one = slice(row, row + 1)
        alone = sample_kept(logits[one], temperatures[one], noise[one], Limits(*(x[one] for x in limits)), 16)
        assert [np.asarray(x).tolist() for x in alone] == [x[one].tolist() for x in (tokens, logprobs, kept)]


def test_limits_hide_no_number_that_is_not_finite():
    logits = np.random.default_rng(7).normal(size=(1, 3000))
    logits[0, 2000] = np.nan
    _, logprobs, _ = kept_draws(logits, SamplingParams(top_k=5), 8)
    assert not np.isfinite(logprobs).any()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"top_k": -1}, "top_k must be 0"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.5}, "top_p must be above 0"),
        ({"min_p": -0.1}, "min_p must lie between"),
        ({"temperature": 2e-38}, "temperature must be 0 .greedy. or at least 0.0001, found 2e-38"),
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"temperature": float("inf")}, "temperature must be 0"),
        ({"stop": ("",)}, "stop must hold"),
        ({"stop": ("x",) * 17}, "stop must hold at most 16 strings, found 17"),
        ({"stop": ("x" * 257,)}, "stop must hold strings of at most 256 characters, found one of 257"),
        ({"stop": ("\ud800",)}, "stop must hold text, found lone surrogates"),
    ],
)
def test_values_that_define_no_distribution_are_refused(values, text):
    with pytest.raises(ValueError, match=text):
        SamplingParams(**values)
    with pytest.raises(ValueError, match=rf"sampling\.{text}"):
        SamplingSettings(**values)


def test_a_request_has_so_many_stop_tokens_at_the_most():
    assert SamplingParams(stop_token_ids=tuple(range(256))).stop_set == frozenset(range(256))
    with pytest.raises(ValueError, match="stop_token_ids must hold at most 256 ids, found 257"):
        SamplingParams(stop_token_ids=tuple(range(257)))


def test_truncation_without_kept_ids_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"sampling\.max_kept.*renormalise"):
        SamplingSettings(top_p=0.9, max_kept=0)
    with pytest.raises(ValueError, match=r"at least sampling\.top_k \(100\)"):
        SamplingSettings(top_k=100)
    assert not SamplingSettings(max_kept=0).truncates
