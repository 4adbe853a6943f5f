"""Draw one token per row from logits, each row from its own random stream.

A row's token is a pure function of its logits, its temperature and (seed, index): it never depends on the other rows
of the batch. The log-probability is that of the distribution drawn from.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trajectories.schema import IntArray

Array = Any
"""A JAX array; `Any` because JAX is not part of the type check."""

BLOCK = 256
"""Vocabulary entries summed as one in the first of the two levels."""
EMPTY = -1e30
"""Logit of the entries that pad the vocabulary to whole blocks: their probability is exactly 0."""


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
    B, V = logits_BV.shape
    greedy = temperatures_B <= 0
    block = min(BLOCK, V)
    scaled = (
        logits_BV.astype(jnp.float32) * jnp.where(greedy, 1.0, 1.0 / jnp.where(greedy, 1.0, temperatures_B))[:, None]
    )
    scaled = jnp.pad(scaled, ((0, 0), (0, -V % block)), constant_values=EMPTY)
    blocks_BNb = scaled.reshape(B, -1, block)
    peaks_BN = blocks_BNb.max(-1)
    peak_B = peaks_BN.max(-1)
    masses_BN = jnp.exp(blocks_BNb - peak_B[:, None, None]).sum(-1)

    chosen_B = jnp.where(greedy, peaks_BN.argmax(-1), _draw(masses_BN, uniforms_B2[:, 0]))
    within_Bb = jnp.take_along_axis(blocks_BNb, chosen_B[:, None, None], 1)[:, 0]
    # The block's own peak as reference: a block of tiny mass must not vanish in the exponent.
    weights_Bb = jnp.exp(within_Bb - within_Bb.max(-1, keepdims=True))
    offset_B = jnp.where(greedy, within_Bb.argmax(-1), _draw(weights_Bb, uniforms_B2[:, 1]))
    chosen_logit_B = jnp.take_along_axis(within_Bb, offset_B[:, None], 1)[:, 0]
    logprob_B = chosen_logit_B - peak_B - jnp.log(masses_BN.sum(-1))
    return (chosen_B * block + offset_B).astype(jnp.int32), logprob_B


def _draw(weights_BN: Array, uniforms_B: Array) -> Array:
    """index_B with probability weight / sum; never an index of weight 0."""
    cumulative = jnp.cumsum(weights_BN, -1)
    hit = (cumulative > uniforms_B[:, None] * cumulative[:, -1:]) & (weights_BN > 0)
    # Rounding may leave no hit at all; the heaviest entry is then as good as any.
    return jnp.where(hit.any(-1), hit.argmax(-1), weights_BN.argmax(-1))
