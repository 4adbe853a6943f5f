"""What a call of the Python tool's sandbox costs: `python -m benchmarks.sandbox [--json]`.

For each interpreter: the median of calls one after the other, and how many a second when more wait than there are
slots. Beside it: a fresh CPython process for each call, without any protection.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

from environments.sandbox.client import ExecutionStatus, Interpreter, Sandbox, SandboxSettings

CODE = """
import json, math
def primes(limit):
    sieve = [True] * limit
    for n in range(2, int(math.sqrt(limit)) + 1):
        if sieve[n]:
            for multiple in range(n * n, limit, n):
                sieve[multiple] = False
    return [n for n in range(2, limit) if sieve[n]]
print(json.dumps(primes(100)))
len(primes(1000))
"""
"""About what a model writes: an import, a function, a line of output and a last expression."""
RESULT = "168"


@dataclass(frozen=True)
class Cost:
    start_ms: float
    """Until the fork server has answered its first call."""
    median_ms: float
    p95_ms: float
    cpu_ms: float
    """Median processor time of a call's process."""
    calls_per_s: float
    """With four times as many callers as slots."""


async def measure(interpreter: Interpreter, slots: int, calls: int) -> Cost:
    began = time.perf_counter()
    async with Sandbox(SandboxSettings(interpreter=interpreter, slots=slots)) as sandbox:
        start_s = time.perf_counter() - began

        async def call() -> tuple[float, float]:
            began = time.perf_counter()
            execution = await sandbox.run(CODE)
            if (execution.status, execution.result) != (ExecutionStatus.COMPLETED, RESULT):
                raise RuntimeError(f"a wrong answer: {execution}")
            return time.perf_counter() - began, execution.cpu_s

        for _ in range(20):
            await call()
        alone = [await call() for _ in range(calls)]

        async def caller() -> None:
            for _ in range(calls // slots):
                await call()

        callers = 4 * slots
        began = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(callers)))
        rate = callers * (calls // slots) / (time.perf_counter() - began)
    latencies = sorted(latency for latency, _ in alone)
    return Cost(
        start_ms=1e3 * start_s,
        median_ms=1e3 * statistics.median(latencies),
        p95_ms=1e3 * latencies[int(0.95 * len(latencies))],
        cpu_ms=1e3 * statistics.median(cpu for _, cpu in alone),
        calls_per_s=rate,
    )


def fresh_process_ms(calls: int) -> float:
    """Median of starting an interpreter for each call."""
    latencies = []
    for _ in range(calls):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-I", "-c", CODE], check=True, stdout=subprocess.DEVNULL)
        latencies.append(time.perf_counter() - began)
    return 1e3 * statistics.median(latencies)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sandbox", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--slots", type=int, default=2, help="calls at once (2)")
    parser.add_argument("--calls", type=int, default=400, help="calls one after the other (400)")
    arguments = parser.parse_args()
    costs = {
        interpreter: asyncio.run(measure(interpreter, arguments.slots, arguments.calls)) for interpreter in Interpreter
    }
    fresh_ms = fresh_process_ms(max(10, arguments.calls // 10))
    if arguments.json:
        named = {str(interpreter): asdict(cost) for interpreter, cost in costs.items()}
        print(json.dumps({"slots": arguments.slots, **named, "fresh_process_ms": fresh_ms}))
        return
    for interpreter, cost in costs.items():
        print(
            f"{interpreter:<10}  {cost.median_ms:5.1f} ms median, {cost.p95_ms:5.1f} ms p95, {cost.cpu_ms:4.1f} ms of "
            f"processor, {cost.calls_per_s:5.0f} calls/s in {arguments.slots} slots, started in {cost.start_ms:.0f} ms"
        )
    print(f"fresh       {fresh_ms:5.1f} ms median: an unprotected `python -I -c` for each call")


if __name__ == "__main__":
    main()
