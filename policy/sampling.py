"""Draw one token per row from logits, each row from its own random stream.

A row's token is a pure function of its logits, its temperature and limits, and (seed, index): it never depends on the
other rows of the batch. The log-probability is that of the distribution drawn from. `policy.client.SamplingParams`
defines that distribution.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trajectories.schema import IntArray

Array = Any
"""A JAX array; `Any` because JAX is not part of the type check."""

BLOCK = 256
"""Vocabulary entries summed as one in the first of the two levels."""
FINE_BLOCK = 32
"""Vocabulary entries that share one maximum in the search for the most likely tokens."""
EMPTY = -1e30
"""Logit of the entries that pad the vocabulary to whole blocks: their probability is exactly 0."""

NOT_KEPT = -1
"""Fills up a row of kept ids."""


class Limits(NamedTuple):
    """What each row is limited to, as in `SamplingParams`; a row whose values are all off draws from everything."""

    top_k_B: Array
    """int32; 0 is off."""
    top_p_B: Array
    """float32; 1 is off."""
    min_p_B: Array
    """float32; 0 is off."""


def seed_words(seed: int) -> IntArray:
    """The two 32-bit words (as int32 bits) of a request's seed; seeds are taken modulo 2^64."""
    return np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32).view(np.int32)


def uniforms(seeds_B2: Array, indices_B: Array) -> Array:
    """uniforms_B2 in [0, 1): two independent numbers for token `index` of the request with that seed."""

    def one(words: Array, index: Array) -> Array:
        key = jax.random.wrap_key_data(jax.lax.bitcast_convert_type(words, jnp.uint32), impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, index), (2,), jnp.float32)

    return jax.vmap(one)(seeds_B2, indices_B)


def sample(logits_BV: Array, temperatures_B: Array, uniforms_B2: Array) -> tuple[Array, Array]:
    """(token_ids_B, logprobs_B) drawn from softmax(logits / temperature).

    Inverse transform in two levels: the first uniform chooses a block of the vocabulary by its mass, the second a token
    within the block. So the vocabulary is read twice and needs no noise of its own size. Temperature 0 takes the
    largest logit (the first of equal ones) and reports the log-probability at temperature 1.
    """
    tokens_B, logprobs_B, _ = _sample(_scaled(logits_BV, temperatures_B), temperatures_B <= 0, uniforms_B2)
    return tokens_B, logprobs_B


def sample_kept(
    logits_BV: Array, temperatures_B: Array, uniforms_B2: Array, limits: Limits, max_kept: int
) -> tuple[Array, Array, Array]:
    """(token_ids_B, logprobs_B, kept_BK), each row drawn from what its limits keep, K = max_kept tokens at the most.

    `kept_BK` holds the ids that a row was drawn from, ascending, NOT_KEPT behind them. A row that is greedy or has no
    limits draws as in `sample` and keeps none. A token whose probability is 0 in float32 is never kept. The masses that
    top-p compares are float32 sums over the tokens by rank. On a CPU, 48 rows of 49 to 262 thousand logits take 1 to 5
    ms more than in `sample`.
    """
    K = min(max_kept, logits_BV.shape[1])
    scaled_BV, greedy_B = _scaled(logits_BV, temperatures_B), temperatures_B <= 0
    # Without the barrier XLA's CPU backend goes through the vocabulary again for what follows: five times as slow.
    (whole_tokens_B, whole_logprobs_B, whole_mass_B), (values_BK, ids_BK) = jax.lax.optimization_barrier(
        (_sample(scaled_BV, greedy_B, uniforms_B2), _most_likely(logits_BV, K))
    )
    # Relative to the most likely token. The difference comes first: it is exactly 0 for that token and its equals.
    values_BK = (values_BK - values_BK[:, :1]) * _factor(temperatures_B)[:, None]
    weights_BK = jnp.exp(values_BK)
    top_k_B, top_p_B, min_p_B = limits
    k_B = jnp.where(top_k_B > 0, jnp.minimum(top_k_B, K), K)
    weights_BK = jnp.where(jnp.arange(K) < k_B[:, None], weights_BK, 0.0)
    cumulative_BK = jnp.cumsum(weights_BK, -1)
    before_BK = jnp.pad(cumulative_BK[:, :-1], ((0, 0), (1, 0)))
    mass_B = jnp.where(top_k_B > 0, cumulative_BK[:, -1], whole_mass_B)
    # Off means off: rounding must not make a tail of top_p = 1.
    nucleus_BK = (before_BK < (top_p_B * mass_B)[:, None]) | (top_p_B >= 1)[:, None]
    # However small top_p is, and though it be 0 in float32, the most likely token stays.
    nucleus_BK = nucleus_BK.at[:, 0].set(True)
    kept_BK = nucleus_BK & (weights_BK >= min_p_B[:, None]) & (weights_BK > 0)
    weights_BK = jnp.where(kept_BK, weights_BK, 0.0)

    chosen_B1 = _draw(weights_BK, uniforms_B2[:, 0])[:, None]
    tokens_B = jnp.take_along_axis(ids_BK, chosen_B1, 1)[:, 0]
    logprobs_B = jnp.take_along_axis(values_BK, chosen_B1, 1)[:, 0] - jnp.log(weights_BK.sum(-1))

    limited_B = (temperatures_B > 0) & ((top_k_B > 0) | (top_p_B < 1) | (min_p_B > 0))
    last = jnp.iinfo(jnp.int32).max
    ascending_BK = jnp.sort(jnp.where(kept_BK & limited_B[:, None], ids_BK, last), -1)
    ascending_BK = jnp.where(ascending_BK == last, NOT_KEPT, ascending_BK)
    return (
        jnp.where(limited_B, tokens_B, whole_tokens_B).astype(jnp.int32),
        jnp.where(limited_B, logprobs_B, whole_logprobs_B),
        jnp.pad(ascending_BK, ((0, 0), (0, max_kept - K)), constant_values=NOT_KEPT),
    )


def _scaled(logits_BV: Array, temperatures_B: Array) -> Array:
    """Float32 logits / temperature (greedy: / 1), padded with EMPTY to whole blocks."""
    return _whole_blocks(logits_BV.astype(jnp.float32) * _factor(temperatures_B)[:, None], BLOCK)


def _factor(temperatures_B: Array) -> Array:
    """1 / temperature, or 1 where that is 0."""
    greedy_B = temperatures_B <= 0
    return jnp.where(greedy_B, 1.0, 1.0 / jnp.where(greedy_B, 1.0, temperatures_B))


def _whole_blocks(logits_BV: Array, block: int) -> Array:
    """Padded with EMPTY to whole blocks, if it is longer than one."""
    V = logits_BV.shape[1]
    return jnp.pad(logits_BV, ((0, 0), (0, -V % min(block, V))), constant_values=EMPTY)


def _sample(scaled_BV: Array, greedy_B: Array, uniforms_B2: Array) -> tuple[Array, Array, Array]:
    """(token_ids_B, logprobs_B, mass_B): mass is that of the vocabulary in units of its most likely token."""
    B, V = scaled_BV.shape
    block = min(BLOCK, V)
    if B == 1:
        # In order, with the exponentials kept apart: a sum over them would have each made alone.
        blocks_Nb = scaled_BV.reshape(-1, block)
        blocks_NbB, peaks_NB = blocks_Nb[..., None], blocks_Nb.max(1, keepdims=True)
        peak_B = peaks_NB.max(0)
        masses_BN = jax.lax.optimization_barrier(jnp.exp(blocks_Nb - peak_B)).sum(1)[None]
    else:
        # As the unembedding leaves them on a CPU, a row of the batch in each lane: nothing is turned, sums are vectors.
        blocks_NbB = scaled_BV.T.reshape(-1, block, B)
        peaks_NB = jax.lax.optimization_barrier(blocks_NbB.max(1))  # or XLA takes the peak from the turned vocabulary
        peak_B = peaks_NB.max(0)
        masses_BN = jnp.exp(blocks_NbB - peak_B).sum(1).T
    mass_B = masses_BN.sum(-1)

    chosen_B = jnp.where(greedy_B, peaks_NB.argmax(0), _draw(masses_BN, uniforms_B2[:, 0]))
    within_Bb = blocks_NbB[chosen_B, :, jnp.arange(B)]
    # The block's own peak as reference: a block of tiny mass must not vanish in the exponent.
    weights_Bb = jnp.exp(within_Bb - within_Bb.max(-1, keepdims=True))
    offset_B = jnp.where(greedy_B, within_Bb.argmax(-1), _draw(weights_Bb, uniforms_B2[:, 1]))
    chosen_logit_B = jnp.take_along_axis(within_Bb, offset_B[:, None], 1)[:, 0]
    logprob_B = chosen_logit_B - peak_B - jnp.log(mass_B)
    return (chosen_B * block + offset_B).astype(jnp.int32), logprob_B, mass_B


def _most_likely(logits_BV: Array, count: int) -> tuple[Array, Array]:
    """(values_BK, ids_BK) of the `count` largest float32 values by rank: equal ones by id.

    They lie in the `count` blocks of the largest maxima (of equal ones the first), for each block that comes before
    another holds a token that comes before all of the other's. So one pass over the vocabulary finds the blocks'
    maxima, and only so many blocks are ranked token by token: a fifth to a third of the time of one `top_k` over 49 to
    262 thousand entries on a CPU.
    """
    B, V = logits_BV.shape
    logits_BV = logits_BV.astype(jnp.float32)
    if count * FINE_BLOCK >= V:
        values_BK, ids_BK = jax.lax.top_k(logits_BV, count)
        return values_BK, ids_BK
    blocks_BNb = _whole_blocks(logits_BV, FINE_BLOCK).reshape(B, -1, FINE_BLOCK)
    _, chosen_BK = jax.lax.top_k(blocks_BNb.max(-1), count)
    # In the vocabulary's order again, so that equal values stay in the order of their ids.
    chosen_BK = jnp.sort(chosen_BK, -1)
    candidates_BKb = jnp.take_along_axis(blocks_BNb, chosen_BK[:, :, None], 1)
    values_BK, places_BK = jax.lax.top_k(candidates_BKb.reshape(B, -1), count)
    blocks_BK = jnp.take_along_axis(chosen_BK, places_BK // FINE_BLOCK, 1)
    return values_BK, blocks_BK * FINE_BLOCK + places_BK % FINE_BLOCK


def _draw(weights_BN: Array, uniforms_B: Array) -> Array:
    """index_B with probability weight / sum; never an index of weight 0."""
    cumulative = jnp.cumsum(weights_BN, -1)
    hit = (cumulative > uniforms_B[:, None] * cumulative[:, -1:]) & (weights_BN > 0)
    # Rounding may leave no hit at all; the heaviest entry is then as good as any.
    return jnp.where(hit.any(-1), hit.argmax(-1), weights_BN.argmax(-1))
