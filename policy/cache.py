"""The slotted key/value cache, and the compiled functions that touch it: decode, prefill, and the copying of rows.

A row of the cache holds the keys and values of one token sequence, position by position; what lies at or beyond a
row's length is garbage that no query sees. The functions consume the cache they are given (donated buffers) and write
in place. Rows lie in segments, arrays of their own, so that decode can run on the leading segments alone.

Axes as in policy.transformer; further n rows of a segment, R rows of a call, C tokens of a chunk, S decoding rows,
T = P b cached positions in P blocks of b. Keys are stored [n, K, P, d, b] and values [n, K, T, d]: then both products
of one query's attention are small matrix products over memory in order (benchmarks/layouts.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from policy.lora import Adapter
from policy.sampling import Limits, sample, sample_kept, uniforms
from policy.transformer import (
    ModelConfig,
    Params,
    attention_weights,
    embed,
    final_norm,
    make_block,
    rotary_frequencies,
    unembed,
)

Array = Any
"""A JAX array; `Any` because JAX is not part of the type check."""
Segment = dict[str, list[Array]]
"""["k" | "v"][layer] -> array."""
Cache = list[Segment]
BLOCK, BLOCK_MULTIPLE = 64, 8
"""The most positions of one block of keys, and what their number is a multiple of."""
LayerAdapters = list[Adapter]
"""One layer's share after the other, as `policy.transformer.fuse_adapter` gives them: slices of a stacked adapter
inside a compiled function are kernels of their own, hundreds of them."""
Compiled = Callable[..., Any]


def new_cache(config: ModelConfig, segments: tuple[int, ...], length: int) -> Cache:
    """An empty cache of at least `length` positions for sum(segments) rows, float32."""
    K, d = config.num_kv_heads, config.head_dim
    blocks = -(-length // BLOCK)
    size = -(-length // blocks // BLOCK_MULTIPLE) * BLOCK_MULTIPLE

    def arrays(*shape: int) -> list[Array]:
        return [jnp.zeros(shape, jnp.float32) for _ in range(config.num_layers)]

    return [{"k": arrays(n, K, blocks, d, size), "v": arrays(n, K, blocks * size, d)} for n in segments]


def cache_length(cache: Cache) -> int:
    """Positions of a row."""
    return int(cache[0]["v"][0].shape[2])


def _scores(q_nKGd: Array, keys_nKPdb: Array) -> Array:
    """q kᵀ as [n, K, G, T], for the G queries that look at each key head.

    The queries are repeated for each block, so that every product is one small matrix by another: that is twice as fast
    as one long product, and eight times as fast as leaving the repetition to XLA.
    """
    n, K, P, d, b = keys_nKPdb.shape
    G = q_nKGd.shape[2]
    q_nKPGd = jnp.broadcast_to(q_nKGd[:, :, None], (n, K, P, G, d))
    scores_nKPGb = jnp.einsum("nkpgd,nkpdb->nkpgb", q_nKPGd, keys_nKPdb)
    return scores_nKPGb.swapaxes(2, 3).reshape(n, K, G, P * b)


def rotations(config: ModelConfig, length: int) -> dict[bool, NDArray[np.float32]]:
    """{local: [length, 2, d / 2]}, the cosines and sines of every position.

    The compiled functions look them up: left to itself, XLA computes them anew for every head of every layer.
    """
    tables = {}
    for local in {config.is_local(layer) for layer in range(config.num_layers)}:
        angles = np.arange(length, dtype=np.float32)[:, None] * rotary_frequencies(config, local)
        tables[local] = np.stack([np.cos(angles), np.sin(angles)], 1)
    return tables


def _looked_up(tables: dict[bool, Array], positions_BT: Array) -> dict[bool, tuple[Array, Array]]:
    """{local: (cos, sin)}, each [B, T, d / 2]. Positions beyond the table get the last: nobody reads what they make."""
    found = {local: jnp.take(table, positions_BT, 0, mode="clip") for local, table in tables.items()}
    return {local: (angles[..., 0, :], angles[..., 1, :]) for local, angles in found.items()}


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

    `params` are fused, with `rotations` beside them. Row s puts token `tokens_S[s]` at position `positions_S[s]`; a
    position at or beyond the cache's length writes nothing (rows that do not decode). `indices_S` counts the tokens
    that the row's request has drawn. Returns the cache and (token_ids, logprobs), each [steps, S]; with `limits`
    (policy.sampling.sample_kept) also the kept ids, [steps, S, max_kept].

    Rows write their keys and values first, and then read. A segment of one row reads what it holds, its own key and
    value beside it, and writes behind the draw: otherwise XLA copies the row four times. For more rows that takes 4 %
    longer.
    """
    offsets = _offsets(cache)
    K, G, d = config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim
    column = jnp.arange(cache_length(cache))

    def step(i: Array, carry: tuple[Cache, Array, tuple[Array, ...]]) -> tuple[Cache, Array, tuple[Array, ...]]:
        cache, tokens_S, draws = carry
        cache = [{name: list(layers) for name, layers in segment.items()} for segment in cache]
        positions = positions_S + i
        later: list[tuple[Segment, int, Array, Array, int]] = []

        def attend(layer: int, q_S1Hd: Array, k_S1Kd: Array, v_S1Kd: Array) -> Array:
            outputs = []
            for (offset, size), segment in zip(offsets, cache, strict=True):
                part = slice(offset, offset + size)
                q_nKGd = q_S1Hd[part, 0].reshape(size, K, G, d) * d**-0.5
                k_nKd, v_nKd = k_S1Kd[part, 0], v_S1Kd[part, 0]
                at_n1 = positions[part, None]
                seen_n11T = _seen(config, layer, column, at_n1)[:, None, None]
                if size > 1:
                    _put(segment, layer, k_nKd, v_nKd, positions[part])
                    weights = attention_weights(
                        _scores(q_nKGd, segment["k"][layer]), seen_n11T, config.attention_softcap
                    )
                    outputs.append(jnp.einsum("nkgt,nktd->nkgd", weights, segment["v"][layer]))
                else:
                    later.append((segment, layer, k_nKd, v_nKd, offset))
                    own_n11T = (column == at_n1)[:, None, None]
                    cached = segment["k"][layer], segment["v"][layer]
                    outputs.append(
                        _attend_beside(q_nKGd, k_nKd, v_nKd, *cached, own_n11T, seen_n11T, config.attention_softcap)
                    )
            # The cache is float32; what goes on is of the model's type, as in the learner.
            return jnp.concatenate(outputs).reshape(q_S1Hd.shape).astype(q_S1Hd.dtype)

        rotation = _looked_up(params["rotations"], positions[:, None])
        x = embed(config, params, tokens_S[:, None])
        for index, parameters in enumerate(params["layers"]):
            block = make_block(config, parameters)
            share = None if adapter is None else adapter[index]
            attends = functools.partial(attend, index)
            local = config.is_local(index)
            x = block(x, rotation[local], attends, share, lora_scale, local=local)
        logits = unembed(config, params, final_norm(config, params, x)[:, 0])
        noise = uniforms(seeds_S2, indices_S + i)
        if limits is None:
            drawn: tuple[Array, ...] = sample(logits, temperatures_S, noise)
        else:
            drawn = sample_kept(logits, temperatures_S, noise, limits, max_kept)
        # A token is never negative, but that XLA cannot know: it must write when all has been read.
        after = positions + (drawn[0] >> 31)
        for segment, layer, k_nKd, v_nKd, row in later:
            _put(segment, layer, k_nKd, v_nKd, after[row : row + 1])
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


def _attend_beside(
    q_nKGd: Array,
    k_nKd: Array,
    v_nKd: Array,
    keys_nKPdb: Array,
    values_nKTd: Array,
    own_n11T: Array,
    seen_n11T: Array,
    softcap: float | None,
) -> Array:
    """o_nKGd over the cached positions and the token's own key and value, which are not in the cache yet and take the
    place of what it holds at `own_n11T`."""
    k_nK1d, v_nK1d = (x[:, :, None].astype(values_nKTd.dtype) for x in (k_nKd, v_nKd))
    scores = jnp.where(own_n11T, (q_nKGd * k_nK1d).sum(-1, keepdims=True), _scores(q_nKGd, keys_nKPdb))
    weights = attention_weights(scores, seen_n11T, softcap)
    cached = jnp.einsum("nkgt,nktd->nkgd", jnp.where(own_n11T, 0.0, weights), values_nKTd)
    return cached + jnp.where(own_n11T, weights, 0.0).sum(-1, keepdims=True) * v_nK1d


def _put(segment: Segment, layer: int, k_nKd: Array, v_nKd: Array, at_n: Array) -> None:
    """Write each row's key and value at its position; one at or beyond the cache's length is not written."""
    keys, values = segment["k"][layer], segment["v"][layer]
    length, width = values.shape[2], keys.shape[-1]
    k, v = k_nKd.astype(keys.dtype), v_nKd.astype(values.dtype)
    if len(at_n) > 1:
        rows, drop = jnp.arange(len(at_n)), {"mode": "drop", "unique_indices": True}
        segment["k"][layer] = keys.at[rows, :, at_n // width, :, at_n % width].set(k, **drop)
        segment["v"][layer] = values.at[rows, :, at_n].set(v, **drop)
        return
    # One row's scatter would be an update of a slice that may be empty, and that copies the row. What is not to be
    # written becomes zeros at the last position, which no sequence reaches: its token has no successor to be fed for.
    k, v = (jnp.where(at_n[0] < length, x, 0.0) for x in (k, v))
    at = jnp.minimum(at_n[0], length - 1)
    index = (0, 0, at // width, 0, at % width)
    segment["k"][layer] = lax.dynamic_update_slice(keys, k[:, :, None, :, None], index)
    segment["v"][layer] = lax.dynamic_update_slice(values, v[:, :, None], (0, 0, at, 0))


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
    length, width = cache_length(cache), cache[0]["k"][0].shape[-1]
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
            rows = local[:, None]
            segment["k"][layer] = segment["k"][layer].at[rows, :, at // width, :, at % width].set(k_RCKd, mode="drop")
            segment["v"][layer] = segment["v"][layer].at[rows, :, at].set(v_RCKd, mode="drop")
            k, v = segment["k"][layer][local], segment["v"][layer][local]
            keys = k if keys is None else jnp.where(inside[:, None, None, None, None], k, keys)
            values = v if values is None else jnp.where(inside[:, None, None, None], v, values)
        # The queries of a key head side by side, and both sides kept so: XLA's own order of axes took twice as long.
        q_RKGCd = q_RCHd.reshape(R, C, K, G, d).transpose(0, 2, 3, 1, 4)
        q_RKMd = lax.optimization_barrier(q_RKGCd.reshape(R, K, G * C, d) * d**-0.5)
        assert keys is not None
        keys_RKdT = lax.optimization_barrier(keys.swapaxes(2, 3).reshape(R, K, d, length))
        scores = jnp.einsum("rkmd,rkdt->rkmt", q_RKMd, keys_RKdT).reshape(R, K, G, C, length)
        seen_RCT = _seen(config, layer, column, positions_RC[..., None])
        weights = attention_weights(scores, seen_RCT[:, None, None], config.attention_softcap)
        output = jnp.einsum("rkmt,rktd->rkmd", weights.reshape(R, K, G * C, length), values)
        output = lax.optimization_barrier(output).reshape(R, K, G, C, d).transpose(0, 3, 1, 2, 4)
        return output.reshape(q_RCHd.shape).astype(q_RCHd.dtype)

    rotation = _looked_up(params["rotations"], positions_RC)
    x = embed(config, params, tokens_RC)
    for index, layer in enumerate(params["layers"]):
        block = make_block(config, layer)
        share = None if adapter is None else adapter[index]
        attends = functools.partial(attend, index)
        local = config.is_local(index)
        x = block(x, rotation[local], attends, share, lora_scale, local=local)
    return cache


def read_row(segment: dict[str, list[Array]], row: Array, room: dict[str, list[Array]]) -> dict[str, list[Array]]:
    """A copy of one row of a segment, ["k" | "v"][layer]. Consumes `room`, an earlier copy, to lie in its place.

    A function apart from `write_row`: in one, XLA reads from the array that it writes and copies the whole cache first.
    """
    del room
    return {
        name: [lax.dynamic_index_in_dim(a, row, keepdims=False) for a in arrays] for name, arrays in segment.items()
    }


def write_row(segment: dict[str, list[Array]], row: Array, content: dict[str, list[Array]]) -> dict[str, list[Array]]:
    """Put what `read_row` gave into row `row` of a segment."""
    return {
        name: [lax.dynamic_update_index_in_dim(a, c, row, 0) for a, c in zip(arrays, content[name], strict=True)]
        for name, arrays in segment.items()
    }


class Mover:
    """Copies whole rows of a cache, in place. Every function is compiled at construction."""

    def __init__(self, cache: Cache, compiled: Callable[..., Compiled]) -> None:
        """`compiled` compiles (function, donated arguments, *arguments)."""
        self._offsets = _offsets(cache)
        self._rooms: list[dict[str, list[Array]]] = []
        room, row = self._take_room(cache), jnp.int32(0)
        self._read = [compiled(read_row, (2,), segment, row, room) for segment in cache]
        self._write = [compiled(write_row, (0,), segment, row, room) for segment in cache]
        self._rooms.append(room)

    def copy(self, cache: Cache, source: int, targets: Sequence[int]) -> None:
        """Row `source` into each of `targets`."""
        content = self._read_into_room(cache, source)
        for target in targets:
            self._write_into(cache, target, content)
        self._rooms.append(content)

    def swap(self, cache: Cache, a: int, b: int) -> None:
        """Exchange two rows."""
        of_a, of_b = self._read_into_room(cache, a), self._read_into_room(cache, b)
        self._write_into(cache, a, of_b)
        self._write_into(cache, b, of_a)
        self._rooms += [of_a, of_b]

    def clear(self, cache: Cache, row: int) -> None:
        """Zeros into the row."""
        nothing = {name: [jnp.zeros_like(array[0]) for array in arrays] for name, arrays in cache[0].items()}
        self._write_into(cache, row, nothing)

    def _take_room(self, cache: Cache) -> dict[str, list[Array]]:
        """Memory for one row. A failed call takes it along, hence out of the list while it is used."""
        if self._rooms:
            return self._rooms.pop()
        return {name: [jnp.zeros_like(array[0]) for array in arrays] for name, arrays in cache[0].items()}

    def _read_into_room(self, cache: Cache, row: int) -> dict[str, list[Array]]:
        segment, local = self._locate(row)
        content: dict[str, list[Array]] = self._read[segment](cache[segment], local, self._take_room(cache))
        return content

    def _write_into(self, cache: Cache, row: int, content: dict[str, list[Array]]) -> None:
        segment, local = self._locate(row)
        cache[segment] = self._write[segment](cache[segment], local, content)

    def _locate(self, row: int) -> tuple[int, Any]:
        """(segment, row in it)."""
        segment = max(i for i, (offset, _) in enumerate(self._offsets) if offset <= row)
        return segment, np.int32(row - self._offsets[segment][0])
