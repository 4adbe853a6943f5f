"""Attention over packed rows on a TPU: the mask is a function of segments, parents and positions, never an array.

Invariant: `row_attention` equals `policy.transformer.attention` under `visible` and `windowed`, in value and gradient.

The kernels are FlashAttention's (Dao 2023, arXiv:2307.08691): scores exist for one block of queries and keys at a
time, and the backward pass makes them again from the log-sum-exp. A member of a group sees the segment that it names as
its parent and its own; which blocks of keys a block of queries can see at all follows from the least and the greatest
segment and parent in each, so that of a long row of many short members few blocks are read and computed.

Axes: B rows, H query heads, K key heads, G = H / K, T tokens, n blocks of a row, d head dimension, q and k the tokens
of one block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from policy.transformer import MASKED

Array = Any
NO_WINDOW = 2**30
"""A sliding window that hides nothing."""
BLOCK = 512
"""Most queries, and keys, that a kernel takes at a time."""
_LANES = 128
"""The least block; rows are filled up to a multiple of it."""


_when: Callable[[Any], Callable[[Callable[[], None]], None]] = pl.when


class RowLayout(NamedTuple):
    """Where the segments of rows lie, as in `trajectories.schema.Row`."""

    segment_ids_BT: Array
    parent_ids_BT: Array
    positions_BT: Array


class _Blocks(NamedTuple):
    """What the kernels read of a layout."""

    queries_BT3: Array
    """Segment, parent and position of each query ..."""
    keys_B2T: Array
    """... and segment and position of each key."""
    by_query_Bnn: Array
    """[b, i, j] = j if queries of block i see keys of block j, else a block that is at hand already: the one before
    that they see, or the first one."""
    by_key_Bnn: Array
    """[b, j, i], the same for the queries that see keys of block j."""
    window_1: Array


@dataclass(frozen=True)
class _Static:
    block: int
    scale: float
    softcap: float | None
    interpret: bool


def row_attention(
    q_BTHd: Array,
    k_BTKd: Array,
    v_BTKd: Array,
    layout: RowLayout,
    *,
    window: Array | int = NO_WINDOW,
    softcap: float | None = None,
    interpret: bool = False,
) -> Array:
    """o_BTHd. Token i attends to token j <= i if j lies in i's segment or in its parent, less than `window` positions
    before it; padding attends to itself. Scores are divided by sqrt(d), and capped where the model caps them.

    `window` may be traced. `interpret` computes the TPU kernel anywhere, slowly.
    """
    T, d = q_BTHd.shape[1], q_BTHd.shape[-1]
    padding = -T % _LANES
    block = next(size for size in (BLOCK, BLOCK // 2, _LANES) if (T + padding) % size == 0)
    static = _Static(block, d**-0.5, softcap, interpret)

    def heads_first(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))).swapaxes(1, 2)

    layout = RowLayout(*(jnp.pad(x, ((0, 0), (0, padding))) for x in layout))
    blocks = _blocks(layout, jnp.asarray(window, jnp.int32), block)
    o_BHTd = _attend(static, heads_first(q_BTHd), heads_first(k_BTKd), heads_first(v_BTKd), blocks)
    return o_BHTd.swapaxes(1, 2)[:, :T]


def _blocks(layout: RowLayout, window: Array, block: int) -> _Blocks:
    segments_BT, parents_BT, positions_BT = layout
    B, T = segments_BT.shape
    n = T // block

    def least_and_most(x_BT: Array) -> tuple[Array, Array]:
        """Of the ids in each block; of none, an interval that meets no other."""
        x_Bnk = x_BT.reshape(B, n, block)
        return jnp.where(x_Bnk == 0, jnp.iinfo(jnp.int32).max, x_Bnk).min(-1), x_Bnk.max(-1)

    def meet(a: tuple[Array, Array], b: tuple[Array, Array]) -> Array:
        return (a[0][:, :, None] <= b[1][:, None]) & (b[0][:, None] <= a[1][:, :, None])

    own, parents = least_and_most(segments_BT), least_and_most(parents_BT)
    positions_Bnk = positions_BT.reshape(B, n, block)
    near = positions_Bnk.min(-1)[:, :, None] - positions_Bnk.max(-1)[:, None] < window
    index = jnp.arange(n)
    causal = index[:, None] >= index
    live_Bnn = ((meet(own, own) | meet(parents, own)) & near & causal) | (index[:, None] == index)

    def at_hand(live: Array) -> Array:
        before = lax.cummax(jnp.where(live, index, -1), axis=2)
        return jnp.where(before < 0, jnp.argmax(live, -1)[..., None], before).astype(jnp.int32)

    return _Blocks(
        queries_BT3=jnp.stack((segments_BT, parents_BT, positions_BT), -1),
        keys_B2T=jnp.stack((segments_BT, positions_BT), 1),
        by_query_Bnn=at_hand(live_Bnn),
        by_key_Bnn=at_hand(live_Bnn.swapaxes(1, 2)),
        window_1=window[None],
    )


# Kernels. The leading axes of size 1 of a block are written as 0 here.


def _visible(queries: Array, keys: Array, i: Array, j: Array, window: Array, block: int) -> Array:
    """bool [q, k] for query block i and key block j."""
    q_segment, q_parent, q_position = queries[:, 0:1], queries[:, 1:2], queries[:, 2:3]
    k_segment, k_position = keys[0:1], keys[1:2]
    query = i * block + lax.broadcasted_iota(jnp.int32, (block, block), 0)
    key = j * block + lax.broadcasted_iota(jnp.int32, (block, block), 1)
    related = ((k_segment == q_segment) | (k_segment == q_parent)) & (k_segment != 0)
    return (related & (query >= key) & (q_position - k_position < window)) | (query == key)


def _scores(static: _Static, q: Array, k: Array, visible: Array) -> tuple[Array, Array | float]:
    """(masked float32 scores [q, k], d score / d uncapped score)."""
    scores = _dot(q, k, 1, 1) * static.scale
    slope: Array | float = 1.0
    if static.softcap is not None:
        bent = jnp.tanh(scores / static.softcap)
        scores, slope = bent * static.softcap, 1.0 - bent * bent
    return jnp.where(visible, scores, MASKED), slope


def _dot(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    """Float32 product that sums over axis `a_axis` of a and `b_axis` of b."""
    return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())), preferred_element_type=jnp.float32)


def _forward_kernel(
    static: _Static,
    by_query: Any,
    window: Any,
    queries: Any,
    keys: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    total: Any,
    most: Any,
    norm: Any,
) -> None:
    """Grid (B, H, query block, key block)."""
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @_when(j == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)
        most[...] = jnp.full_like(most, MASKED)
        norm[...] = jnp.zeros_like(norm)

    @_when(by_query[b, i, j] == j)
    def _() -> None:
        visible = _visible(queries[0], keys[0], i, j, window[0], static.block)
        scores, _ = _scores(static, q[0, 0], k[0, 0], visible)
        new = jnp.maximum(most[...], scores.max(-1, keepdims=True))
        weights = jnp.exp(scores - new)
        # A query that has seen nothing yet weighs what it did not see; its first visible key takes that to nothing.
        decay = jnp.exp(most[...] - new)
        norm[...] = norm[...] * decay + weights.sum(-1, keepdims=True)
        total[...] = total[...] * decay + _dot(weights.astype(v.dtype), v[0, 0], 1, 0)
        most[...] = new

    @_when(j == pl.num_programs(3) - 1)
    def _() -> None:
        o[0, 0] = (total[...] / norm[...]).astype(o.dtype)
        lse[0, 0] = most[...] + jnp.log(norm[...])


def _slopes(
    static: _Static, q: Array, k: Array, v: Array, do: Array, lse: Array, delta: Array, visible: Array
) -> tuple[Array, Array]:
    """(weights, d loss / d (q kᵀ)), both [q, k]."""
    scores, slope = _scores(static, q, k, visible)
    weights = jnp.exp(scores - lse)
    return weights, weights * (_dot(do, v, 1, 1) - delta) * slope * static.scale


def _query_kernel(
    static: _Static,
    by_query: Any,
    window: Any,
    queries: Any,
    keys: Any,
    q: Any,
    k: Any,
    v: Any,
    do: Any,
    lse: Any,
    delta: Any,
    dq: Any,
    total: Any,
) -> None:
    """Grid (B, H, query block, key block)."""
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @_when(j == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    @_when(by_query[b, i, j] == j)
    def _() -> None:
        visible = _visible(queries[0], keys[0], i, j, window[0], static.block)
        _, slopes = _slopes(static, q[0, 0], k[0, 0], v[0, 0], do[0, 0], lse[0, 0], delta[0, 0], visible)
        total[...] += _dot(slopes.astype(k.dtype), k[0, 0], 1, 0)

    @_when(j == pl.num_programs(3) - 1)
    def _() -> None:
        dq[0, 0] = total[...].astype(dq.dtype)


def _key_kernel(
    static: _Static,
    by_key: Any,
    window: Any,
    queries: Any,
    keys: Any,
    q: Any,
    k: Any,
    v: Any,
    do: Any,
    lse: Any,
    delta: Any,
    dk: Any,
    dv: Any,
    total_k: Any,
    total_v: Any,
) -> None:
    """Grid (B, K, key block, query head of the group, query block)."""
    b, j, g, i = pl.program_id(0), pl.program_id(2), pl.program_id(3), pl.program_id(4)

    @_when((g == 0) & (i == 0))
    def _() -> None:
        total_k[...] = jnp.zeros_like(total_k)
        total_v[...] = jnp.zeros_like(total_v)

    @_when(by_key[b, j, i] == i)
    def _() -> None:
        visible = _visible(queries[0], keys[0], i, j, window[0], static.block)
        weights, slopes = _slopes(static, q[0, 0], k[0, 0], v[0, 0], do[0, 0], lse[0, 0], delta[0, 0], visible)
        total_v[...] += _dot(weights.astype(do.dtype), do[0, 0], 0, 0)
        total_k[...] += _dot(slopes.astype(q.dtype), q[0, 0], 0, 0)

    @_when((g == pl.num_programs(3) - 1) & (i == pl.num_programs(4) - 1))
    def _() -> None:
        dk[0, 0] = total_k[...].astype(dk.dtype)
        dv[0, 0] = total_v[...].astype(dv.dtype)


# Calls of the kernels


def _call(
    static: _Static,
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    inputs: list[tuple[Array, pl.BlockSpec]],
    outputs: list[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    scratch: list[tuple[int, int]],
    scalars: tuple[Array, Array],
    products: int,
) -> Any:
    """`products`: matrix products of a block of queries with a block of keys."""
    B, heads, n = grid[0], inputs[2][0].shape[1], inputs[0][0].shape[1] // static.block
    # Half the blocks lie above the diagonal; how many of the others are empty is known when it runs.
    pairs = B * heads * (n * (n + 1) // 2) * static.block**2
    moved = sum(x.size * x.dtype.itemsize for x, _ in inputs) + sum(
        x.dtype.itemsize * functools.reduce(int.__mul__, x.shape) for x, _ in outputs
    )
    sequential = 1 if len(grid) == 4 else 2
    return pl.pallas_call(
        functools.partial(kernel, static),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid,
            in_specs=[spec for _, spec in inputs],
            out_specs=[spec for _, spec in outputs],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=[shape for shape, _ in outputs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * (len(grid) - sequential) + ("arbitrary",) * sequential
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * pairs * inputs[2][0].shape[-1], transcendentals=pairs, bytes_accessed=moved
        ),
        interpret=static.interpret,
        name=kernel.__name__.strip("_"),
    )(*scalars, *(x for x, _ in inputs))


def _by_query_specs(block: int, d: int, G: int) -> tuple[pl.BlockSpec, ...]:
    """(queries, keys, q-shaped, k-shaped, one number per query) on a grid (B, H, query block, key block)."""
    return (
        pl.BlockSpec((1, block, 3), lambda b, h, i, j, hand, window: (b, i, 0)),
        pl.BlockSpec((1, 2, block), lambda b, h, i, j, hand, window: (b, 0, hand[b, i, j])),
        pl.BlockSpec((1, 1, block, d), lambda b, h, i, j, hand, window: (b, h, i, 0)),
        pl.BlockSpec((1, 1, block, d), lambda b, h, i, j, hand, window: (b, h // G, hand[b, i, j], 0)),
        pl.BlockSpec((1, 1, block, 1), lambda b, h, i, j, hand, window: (b, h, i, 0)),
    )


def _by_key_specs(block: int, d: int, G: int) -> tuple[pl.BlockSpec, ...]:
    """The same on a grid (B, K, key block, query head of the group, query block)."""
    return (
        pl.BlockSpec((1, block, 3), lambda b, h, j, g, i, hand, window: (b, hand[b, j, i], 0)),
        pl.BlockSpec((1, 2, block), lambda b, h, j, g, i, hand, window: (b, 0, j)),
        pl.BlockSpec((1, 1, block, d), lambda b, h, j, g, i, hand, window: (b, h * G + g, hand[b, j, i], 0)),
        pl.BlockSpec((1, 1, block, d), lambda b, h, j, g, i, hand, window: (b, h, j, 0)),
        pl.BlockSpec((1, 1, block, 1), lambda b, h, j, g, i, hand, window: (b, h * G + g, hand[b, j, i], 0)),
    )


def _forward(static: _Static, q_BHTd: Array, k_BKTd: Array, v_BKTd: Array, blocks: _Blocks) -> tuple[Array, Array]:
    """(o_BHTd, log-sum-exp of each query's scores, float32 [B, H, T, 1])."""
    B, H, T, d = q_BHTd.shape
    n, G = T // static.block, H // k_BKTd.shape[1]
    queries, keys, of_q, of_k, number = _by_query_specs(static.block, d, G)
    o, lse = _call(
        static,
        _forward_kernel,
        (B, H, n, n),
        [(blocks.queries_BT3, queries), (blocks.keys_B2T, keys), (q_BHTd, of_q), (k_BKTd, of_k), (v_BKTd, of_k)],
        [(_like(q_BHTd), of_q), (jax.ShapeDtypeStruct((B, H, T, 1), jnp.float32), number)],
        [(static.block, d), (static.block, 1), (static.block, 1)],
        (blocks.by_query_Bnn, blocks.window_1),
        products=2,
    )
    return o, lse


def _backward(static: _Static, kept: Any, do_BHTd: Array) -> tuple[Array, Array, Array, None]:
    q_BHTd, k_BKTd, v_BKTd, blocks, o_BHTd, lse = kept
    B, H, T, d = q_BHTd.shape
    K = k_BKTd.shape[1]
    n, G = T // static.block, H // K
    delta = (o_BHTd.astype(jnp.float32) * do_BHTd.astype(jnp.float32)).sum(-1, keepdims=True)

    def inputs(specs: tuple[pl.BlockSpec, ...]) -> list[tuple[Array, pl.BlockSpec]]:
        queries, keys, of_q, of_k, number = specs
        arrays = [(blocks.queries_BT3, queries), (blocks.keys_B2T, keys), (q_BHTd, of_q), (k_BKTd, of_k)]
        return [*arrays, (v_BKTd, of_k), (do_BHTd, of_q), (lse, number), (delta, number)]

    by_query, by_key = _by_query_specs(static.block, d, G), _by_key_specs(static.block, d, G)
    (dq,) = _call(
        static,
        _query_kernel,
        (B, H, n, n),
        inputs(by_query),
        [(_like(q_BHTd), by_query[2])],
        [(static.block, d)],
        (blocks.by_query_Bnn, blocks.window_1),
        products=3,
    )
    dk, dv = _call(
        static,
        _key_kernel,
        (B, K, n, G, n),
        inputs(by_key),
        [(_like(k_BKTd), by_key[3]), (_like(v_BKTd), by_key[3])],
        [(static.block, d), (static.block, d)],
        (blocks.by_key_Bnn, blocks.window_1),
        products=4,
    )
    return dq, dk, dv, None


def _like(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _attend_value(static: _Static, q_BHTd: Array, k_BKTd: Array, v_BKTd: Array, blocks: _Blocks) -> Array:
    return _forward(static, q_BHTd, k_BKTd, v_BKTd, blocks)[0]


def _attend_forward(
    static: _Static, q_BHTd: Array, k_BKTd: Array, v_BKTd: Array, blocks: _Blocks
) -> tuple[Array, tuple[Array, ...]]:
    o_BHTd, lse = _forward(static, q_BHTd, k_BKTd, v_BKTd, blocks)
    return o_BHTd, (q_BHTd, k_BKTd, v_BKTd, blocks, o_BHTd, lse)


_attend = jax.custom_vjp(_attend_value, nondiff_argnums=(0,))
_attend.defvjp(_attend_forward, _backward)
