"""The slotted key/value cache, and the compiled functions that touch it: decode, prefill, and the copying of rows.

A row of the cache holds the keys and values of one token sequence, position by position; what lies at or beyond a
row's length is garbage that no query sees. The functions consume the cache they are given (donated buffers) and write
in place. Rows lie in segments, arrays of their own, so that decode can run on the leading segments alone.

Axes as in policy.transformer; further n rows of a segment, R rows of a call, C tokens of a chunk, S decoding rows.
Keys are stored [n, K, d, T] and values [n, K, T, d]: then both products of one query's attention are plain matrix
products over memory in order. With keys in the layout of the values they took four times as long on a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from policy.lora import Adapter
from policy.sampling import Limits, sample, sample_kept, uniforms
from policy.transformer import (
    ModelConfig,
    Params,
    attention_weights,
    embed,
    final_norm,
    make_block,
    unembed,
)

Array = Any
"""A JAX array; `Any` because JAX is not part of the type check."""
Cache = list[dict[str, list[Array]]]
"""[segment]["k" | "v"][layer] -> array."""
LayerAdapters = list[Adapter]
"""One layer's share after the other, as `policy.transformer.fuse_adapter` gives them: slices of a stacked adapter
inside a compiled function are kernels of their own, hundreds of them."""
Compiled = Callable[..., Any]


def new_cache(config: ModelConfig, segments: tuple[int, ...], length: int) -> Cache:
    """An empty cache of `length` positions for sum(segments) rows, float32."""
    K, d = config.num_kv_heads, config.head_dim

    def arrays(*shape: int) -> list[Array]:
        return [jnp.zeros(shape, jnp.float32) for _ in range(config.num_layers)]

    return [{"k": arrays(n, K, d, length), "v": arrays(n, K, length, d)} for n in segments]


def _offsets(cache: Cache) -> list[tuple[int, int]]:
    """(first row, rows) of each segment."""
    offsets, offset = [], 0
    for segment in cache:
        size = segment["k"][0].shape[0]
        offsets.append((offset, size))
        offset += size
    return offsets


def _seen(config: ModelConfig, layer: int, column_T: Array, positions_X1: Array) -> Array:
    """Which columns a query at each position sees, [..., T]."""
    seen = column_T <= positions_X1
    if config.is_local(layer):
        assert config.sliding_window is not None
        seen &= column_T > positions_X1 - config.sliding_window
    return seen


def decode(
    config: ModelConfig,
    lora_scale: float,
    steps: int,
    params: Params,
    adapter: LayerAdapters | None,
    cache: Cache,
    tokens_S: Array,
    positions_S: Array,
    seeds_S2: Array,
    indices_S: Array,
    temperatures_S: Array,
    limits: Limits | None = None,
    *,
    max_kept: int = 0,
) -> tuple[Any, ...]:
    """Feed one token to every row of `cache` and draw the next, `steps` times.

    Row s puts token `tokens_S[s]` at position `positions_S[s]`; a position at or beyond the cache's length writes
    nothing (rows that do not decode). `indices_S` counts the tokens that the row's request has drawn. Returns the cache
    and (token_ids, logprobs), each [steps, S]; with `limits` (policy.sampling.sample_kept) also the kept ids,
    [steps, S, max_kept].
    """
    offsets = _offsets(cache)
    length = cache[0]["v"][0].shape[2]
    K, G, d = config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim
    column = jnp.arange(length)

    def step(i: Array, carry: tuple[Cache, Array, tuple[Array, ...]]) -> tuple[Cache, Array, tuple[Array, ...]]:
        cache, tokens_S, draws = carry
        cache = [{name: list(layers) for name, layers in segment.items()} for segment in cache]
        positions = positions_S + i

        def attend(layer: int, q_S1Hd: Array, k_S1Kd: Array, v_S1Kd: Array) -> Array:
            outputs = []
            for (offset, size), segment in zip(offsets, cache, strict=True):
                part = slice(offset, offset + size)
                rows, at = jnp.arange(size), positions[part]
                keys = segment["k"][layer].at[rows, :, :, at].set(k_S1Kd[part, 0], mode="drop", unique_indices=True)
                values = segment["v"][layer].at[rows, :, at].set(v_S1Kd[part, 0], mode="drop", unique_indices=True)
                segment["k"][layer], segment["v"][layer] = keys, values
                q = q_S1Hd[part, 0].reshape(size, K, G, d)
                scores = jnp.einsum("nkgd,nkdt->nkgt", q, keys) * d**-0.5
                seen = _seen(config, layer, column, at[:, None])
                weights = attention_weights(scores, seen[:, None, None], config.attention_softcap)
                outputs.append(jnp.einsum("nkgt,nktd->nkgd", weights, values))
            # The cache is float32; what goes on is of the model's type, as in the learner.
            return jnp.concatenate(outputs).reshape(q_S1Hd.shape).astype(q_S1Hd.dtype)

        x = embed(config, params, tokens_S[:, None])
        for index, layer in enumerate(params["layers"]):
            block = make_block(config, layer)
            share = None if adapter is None else adapter[index]
            attends = functools.partial(attend, index)
            x = block(x, positions[:, None], attends, share, lora_scale, local=config.is_local(index))
        logits = unembed(config, params, final_norm(config, params, x)[:, 0])
        noise = uniforms(seeds_S2, indices_S + i)
        if limits is None:
            drawn: tuple[Array, ...] = sample(logits, temperatures_S, noise)
        else:
            drawn = sample_kept(logits, temperatures_S, noise, limits, max_kept)
        return cache, drawn[0], tuple(all_.at[i].set(one) for all_, one in zip(draws, drawn, strict=True))

    shape = (steps, len(tokens_S))
    draws: tuple[Array, ...] = (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
    if limits is not None:
        draws = (*draws, jnp.zeros((*shape, max_kept), jnp.int32))
    carry = (cache, tokens_S, draws)
    if steps == 1:
        cache, _, draws = step(jnp.int32(0), carry)
    else:
        cache, _, draws = lax.fori_loop(0, steps, step, carry)
    return (cache, *draws)


def prefill(
    config: ModelConfig,
    lora_scale: float,
    params: Params,
    adapter: LayerAdapters | None,
    cache: Cache,
    tokens_RC: Array,
    rows_R: Array,
    starts_R: Array,
    counts_R: Array,
) -> Cache:
    """Append chunks: the first `counts_R[r]` tokens of chunk r go to row `rows_R[r]`, from position `starts_R[r]` on.

    A count of 0 makes a chunk a dummy. No row may occur twice. Nothing is drawn: the token before the first draw
    is fed by `decode`.
    """
    offsets = _offsets(cache)
    length = cache[0]["v"][0].shape[2]
    R, C = tokens_RC.shape
    K, G, d = config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim
    cache = [{name: list(layers) for name, layers in segment.items()} for segment in cache]
    chunk = jnp.arange(C)
    positions_RC = starts_R[:, None] + chunk
    written_RC = jnp.where(chunk < counts_R[:, None], positions_RC, length)
    column = jnp.arange(length)

    def attend(layer: int, q_RCHd: Array, k_RCKd: Array, v_RCKd: Array) -> Array:
        keys = values = None
        for (offset, size), segment in zip(offsets, cache, strict=True):
            inside = (rows_R >= offset) & (rows_R < offset + size)
            local = jnp.clip(rows_R - offset, 0, size - 1)
            at = jnp.where(inside[:, None], written_RC, length)
            segment["k"][layer] = segment["k"][layer].at[local[:, None], :, :, at].set(k_RCKd, mode="drop")
            segment["v"][layer] = segment["v"][layer].at[local[:, None], :, at].set(v_RCKd, mode="drop")
            mine = inside[:, None, None, None]
            k, v = segment["k"][layer][local], segment["v"][layer][local]
            keys = k if keys is None else jnp.where(mine, k, keys)
            values = v if values is None else jnp.where(mine, v, values)
        q = q_RCHd.reshape(R, C, K, G, d)
        scores = jnp.einsum("rckgd,rkdt->rkgct", q, keys) * d**-0.5
        seen_RCT = _seen(config, layer, column, positions_RC[..., None])
        weights = attention_weights(scores, seen_RCT[:, None, None], config.attention_softcap)
        return jnp.einsum("rkgct,rktd->rckgd", weights, values).reshape(q_RCHd.shape).astype(q_RCHd.dtype)

    x = embed(config, params, tokens_RC)
    for index, layer in enumerate(params["layers"]):
        block = make_block(config, layer)
        share = None if adapter is None else adapter[index]
        attends = functools.partial(attend, index)
        x = block(x, positions_RC, attends, share, lora_scale, local=config.is_local(index))
    return cache


def read_row(cache: Cache, row: Array) -> dict[str, list[Array]]:
    """A copy of one row, ["k" | "v"][layer]. Consumes nothing.

    A function apart from `write_row`: in one, XLA reads from the array that it writes and copies the whole cache first.
    """
    offsets = _offsets(cache)

    def read(arrays: tuple[Array, ...]) -> Array:
        value = None
        for (offset, size), array in zip(offsets, arrays, strict=True):
            here = lax.dynamic_index_in_dim(array, jnp.clip(row - offset, 0, size - 1), keepdims=False)
            value = here if value is None else jnp.where(row >= offset, here, value)
        return value

    return {name: [read(arrays) for arrays in zip(*(part[name] for part in cache), strict=True)] for name in ("k", "v")}


def write_row(cache: Cache, row: Array, content: dict[str, list[Array]]) -> Cache:
    """Put what `read_row` gave into row `row`."""
    written: Cache = []
    for (offset, size), segment in zip(_offsets(cache), cache, strict=True):
        local = jnp.where((row >= offset) & (row < offset + size), row - offset, size)[None]
        written.append(
            {
                name: [a.at[local].set(c[None], mode="drop") for a, c in zip(segment[name], content[name], strict=True)]
                for name in ("k", "v")
            }
        )
    return written
