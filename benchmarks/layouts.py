"""How the sampler's products are best written for XLA on a CPU: the table behind `policy.lora.multiply` and the cache.

Shapes of SmolLM2-135M in float32: every variant computes the same numbers from the same arrays in another layout.

    python -m benchmarks.layouts --json     # in the repository's root
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import optimization_barrier as apart

LAYERS, D, KEYS, F, V = 30, 576, 192, 1536, 49_152
K, G, HEAD, T, B = 3, 3, 64, 256, 64
"""Key heads, query heads of each, head dimension, cached positions, positions of a block."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each variant (default: 9)")
    args = parser.parse_args()
    table: dict[str, dict[str, float]] = {}
    for rows in (1, 32):
        cases = {name: (jax.jit(function), arrays) for name, function, arrays in variants(rows)}
        for function, arrays in cases.values():
            jax.block_until_ready(function(*arrays))
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(args.rounds):  # in turns, so that a slow minute of the machine hits all of them
            for name, (function, arrays) in cases.items():
                began = time.perf_counter()
                jax.block_until_ready(function(*arrays))
                seconds[name].append(time.perf_counter() - began)
        table[f"rows_{rows}_ms"] = {name: round(1e3 * statistics.median(times), 2) for name, times in seconds.items()}
    for title, found in table.items():
        print(title)
        for name, value in found.items():
            print(f"    {name:52}{value:9.2f}")
    if args.json:
        print(json.dumps(table))
    return 0


def variants(rows: int) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """(name, function, arguments): 30 layers' products, the unembedding, and 30 layers' attention over a cache."""
    generator = np.random.default_rng(rows)

    def draw(*shape: int) -> Any:
        return jnp.asarray(generator.standard_normal(shape, np.float32) * 0.05)

    x = draw(rows, D)
    q, o = ([draw(D, D) for _ in range(LAYERS)] for _ in range(2))
    k, v = ([draw(D, KEYS) for _ in range(LAYERS)] for _ in range(2))
    gate, up = ([draw(D, F) for _ in range(LAYERS)] for _ in range(2))
    down = [draw(F, D) for _ in range(LAYERS)]
    qkv = [jnp.concatenate(parts, 1) for parts in zip(q, k, v, strict=True)]
    gate_up = [jnp.concatenate(parts, 1) for parts in zip(gate, up, strict=True)]

    def layers(x: Any, parts: Any, product: Callable[[Any, Any], Any]) -> Any:
        for qkv, o, gate_up, down in zip(*parts, strict=True):
            y = jnp.concatenate([product(x, w) for w in qkv], -1)
            x = x + product(y[:, :D] * y[:, D : D + KEYS].mean() + y[:, D + KEYS :].mean(), o)
            h = jnp.concatenate([product(x, w) for w in gate_up], -1)
            x = jnp.tanh(x + product(jax.nn.silu(h[:, :F]) * h[:, F:], down))
        return x

    separate = (list(zip(q, k, v, strict=True)), o, list(zip(gate, up, strict=True)), down)
    fused = ([(w,) for w in qkv], o, [(w,) for w in gate_up], down)
    turned = jax.tree.map(lambda w: jnp.asarray(w.T), fused)
    yield "layers: x W, seven matrices", lambda x, p: layers(x, p, lambda x, w: x @ w), (x, separate)
    yield "layers: x W, four matrices", lambda x, p: layers(x, p, lambda x, w: x @ w), (x, fused)
    yield "layers: x Wᵀ, W as checkpoints have it", lambda x, p: layers(x, p, lambda x, w: x @ w.T), (x, turned)
    yield (
        "layers: (W xᵀ)ᵀ, transposes kept apart",
        lambda x, p: layers(x, p, lambda x, w: apart(w @ apart(x.T)).T),
        (x, turned),
    )
    for name, dtype in (("int8", jnp.int8), ("bfloat16", jnp.bfloat16)):
        narrow = jax.tree.map(lambda w, dtype=dtype: (w * 100).astype(dtype), turned)
        yield (
            f"layers: {name} W, widened in the product",
            lambda x, p: layers(x, p, lambda x, w: apart(w.astype(jnp.float32) @ apart(x.T)).T / 100),
            (x, narrow),
        )
    table = draw(V, D)
    yield "unembedding: x Eᵀ", lambda x, e: x @ e.T, (x, table)
    yield "unembedding: (E xᵀ)ᵀ, transposes kept apart", lambda x, e: apart(e @ apart(x.T)).T + 0, (x, table)

    query = draw(rows, K, G, HEAD)
    rowwise, columnwise = ([draw(rows, K, *shape) for _ in range(LAYERS)] for shape in ((T, HEAD), (HEAD, T)))

    def attend(q: Any, keys: Any, values: Any, scores: Callable[[Any, Any], Any]) -> Any:
        for k, v in zip(keys, values, strict=True):
            q = jnp.tanh(jnp.einsum("nkgt,nktd->nkgd", jax.nn.softmax(scores(q, k), -1), v))
        return q

    yield (
        "attention: keys [T, d]",
        lambda q, k, v: attend(q, k, v, lambda q, k: jnp.einsum("nkgd,nktd->nkgt", q, k)),
        (query, rowwise, rowwise),
    )
    yield (
        "attention: keys [d, T]",
        lambda q, k, v: attend(q, k, v, lambda q, k: jnp.einsum("nkgd,nkdt->nkgt", q, k)),
        (query, columnwise, rowwise),
    )

    def by_block(q: Any, keys: Any) -> Any:
        repeated = jnp.broadcast_to(q[:, :, None], (rows, K, T // B, G, HEAD))
        return jnp.einsum("nkpgd,nkpdb->nkpgb", repeated, keys).swapaxes(2, 3).reshape(rows, K, G, T)

    blocks = [draw(rows, K, T // B, HEAD, B) for _ in range(LAYERS)]
    yield "attention: keys in blocks [d, 64]", lambda q, k, v: attend(q, k, v, by_block), (query, blocks, rowwise)


if __name__ == "__main__":
    sys.exit(main())
