"""Where the time of one decode call goes: XLA's own trace of it, summed by kind of operation and shape.

SmolLM2-135M in float32, rows in the middle of their context. Threads' times are added up; what of the call's time no
thread spends in an operation is `idle`, for the calling thread as for the others.

    python -m benchmarks.decode_operations --rows 1 --json     # in the repository's root
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.decode import Ours
from policy.allocator import keep_freed_memory

CALLS = 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--rows", type=int, default=1, help="rows that draw in the call (default: 1)")
    parser.add_argument("--top", type=int, default=15, help="operations to print (default: 15)")
    args = parser.parse_args()
    keep_freed_memory()
    result = measure(args.rows, args.top)
    print(f"call {result['call_ms']:.2f} ms, in {result['executed']:.0f} operations; idle {result['idle_ms']:.2f} ms")
    for one in result["operations"]:
        print(f"{one['ms']:8.2f} ms {one['calls']:6.0f} x {one['operation']}")
    if args.json:
        print(json.dumps(result))
    return 0


def measure(rows: int, top: int) -> dict[str, Any]:
    """Milliseconds of a call, in all and by operation; `idle_ms` before and between its operations."""
    live = Ours(slots=rows)
    engine = live._engine
    size = engine._shape(rows)
    arguments = engine._no_draws(size)
    arguments[1][:] = engine.max_context // 2
    function: Any = engine._decode_functions[size]

    def call() -> None:
        jax.block_until_ready(engine._call_decode(size, arguments, engine._adapter))

    call()
    seconds = []
    for _ in range(CALLS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level, options.host_tracer_level = 0, 2
        with jax.profiler.trace(folder, profiler_options=options):
            began = time.perf_counter()
            for _ in range(CALLS):
                call()
            traced_s = time.perf_counter() - began
        trace = jax.profiler.ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))
    live.close()
    names = dict(described(function.as_text()))
    spans = [(e.start_ns, e.start_ns + e.duration_ns, e.name) for p in trace.planes for n in p.lines for e in n.events]
    spans = sorted(span for span in spans if span[2] in names)
    total: collections.Counter[str] = collections.Counter()
    count: collections.Counter[str] = collections.Counter()
    for start, end, name in spans:
        total[names[name]] += end - start
        count[names[name]] += 1
    return {
        "rows": rows,
        "call_ms": 1e3 * statistics.median(seconds),
        "idle_ms": (1e9 * traced_s - covered(spans)) / 1e6 / CALLS,
        "executed": len(spans) / CALLS,
        "operations": [
            {"operation": name, "ms": ns / 1e6 / CALLS, "calls": count[name] / CALLS}
            for name, ns in total.most_common(top)
        ],
    }


def described(text: str) -> Iterator[tuple[str, str]]:
    """(name, kind and shapes) of every instruction of a compiled module's text; of products the operands' shapes."""
    found = re.findall(r"^ *(?:ROOT )?%?(\S+) = (\S+) ([\w-]+)\(([^)]*)\)", text, re.MULTILINE)
    shapes = {name: re.sub(r"\{.*", "", shape) for name, shape, _, _ in found}
    for name, _, kind, operands in found:
        if kind in ("parameter", "constant", "bitcast", "tuple", "get-tuple-element"):
            continue
        label = f"{re.sub(r'[.0-9]+$', '', name)} {shapes[name]}"
        of = [shapes.get(operand.split()[-1].lstrip("%"), "?") for operand in operands.split(", ") if operand]
        yield name, f"{label} = {' x '.join(of)}" if kind == "dot" else label


def covered(spans: list[tuple[Any, Any, str]]) -> float:
    """Nanoseconds in which at least one of the spans, sorted by their start, is under way."""
    total, until = 0.0, -np.inf
    for start, end, _ in spans:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


if __name__ == "__main__":
    sys.exit(main())
