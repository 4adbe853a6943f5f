"""How fast the sampling engine is on a CPU: against the machine's memory, and against `transformers.generate`.

SmolLM2-135M in float32, everything in one run, ours and theirs in turns. The reference runs in an environment of its
own, which `make bench-decode` builds.

    python -m benchmarks.decode --json     # in the repository's root
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reference import Reference
from environments.calculator import WordCalculator
from policy.allocator import keep_freed_memory
from policy.chat import load_chat
from policy.client import SamplingParams
from policy.files import SMOLLM2, find_model
from policy.settings import SamplingSettings
from trajectories.schema import Version

ROOT = Path(__file__).resolve().parent.parent
REFERENCE_PYTHON = ROOT / ".venv-reference" / "bin" / "python"
THREADS = 2
PROMPT, NEW = 32, 128
"""Tokens of the batches' prompts and completions."""
READ_BYTES = 1 << 30
EPISODES, GROUP, TURNS, TOOL_S, TOOL_TOKENS = 64, 16, 3, 0.5, 12
"""Live episodes, members that share a prompt, turns, a tool's seconds and what it says."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--pairs", type=int, default=5, help="measurements of each side (default: 5)")
    parser.add_argument(
        "--reference", type=Path, default=REFERENCE_PYTHON, help="a Python with torch, transformers and gguf"
    )
    parser.add_argument("--ours-only", action="store_true", help="leave the reference out")
    parser.add_argument("--no-episodes", action="store_true", help="leave the live episodes out (most of the time)")
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    keep_freed_memory()
    if args.memory:
        print(json.dumps(memory()))
        return 0
    if not args.ours_only and not args.reference.exists():
        parser.error(f"{args.reference} does not exist: `make bench-decode` builds it, --ours-only leaves it out")
    result = measure(args.pairs, None if args.ours_only else args.reference, episodes=not args.no_episodes)
    for name, value in result.items():
        print(f"{name:28} {value}")
    if args.json:
        print(json.dumps(result))
    return 0


def measure(pairs: int, reference_python: Path | None, *, episodes: bool = True) -> dict[str, Any]:
    """All measurements; medians, with the raw samples beside them."""
    remembered = subprocess.run(
        [sys.executable, "-m", "benchmarks.decode", "--memory"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    used = json.loads(remembered.stdout.splitlines()[-1])
    result: dict[str, Any] = {"peak_memory_ratio": used["peak_bytes"] / used["needed_bytes"], "memory": used}
    bandwidth = max(read_bandwidth() for _ in range(5))
    weight_bytes = used["weight_bytes"]
    one, many = Ours(slots=1), Ours(slots=32)
    samples: dict[str, list[float]] = {"batch1": [], "batch32": [], "torch_fp32": [], "torch_bf16": []}
    theirs = None if reference_python is None else Theirs(reference_python)
    for engine, prompts in ((one, 1), (many, 32)):
        engine.batch(random_prompts(prompts, 99), 8)
    for i in range(pairs):
        samples["batch1"].append(one.batch(random_prompts(1, i), NEW))
        samples["batch32"].append(many.batch(random_prompts(32, i), NEW))
        if theirs is not None:
            for dtype, name in (("float32", "torch_fp32"), ("bfloat16", "torch_bf16")):
                if i == 0:
                    theirs.batch(random_prompts(32, 99), 8, dtype)
                samples[name].append(theirs.batch(random_prompts(32, i), NEW, dtype))
    one.close()
    many.close()
    # tokens per second, prompts included in the time as everywhere
    speed = {
        name: [(1 if name == "batch1" else 32) * NEW / s for s in seconds]
        for name, seconds in samples.items()
        if seconds
    }
    medians = {name: statistics.median(values) for name, values in speed.items()}
    result |= {
        "read_bandwidth_gb_s": bandwidth / 1e9,
        "batch1_bandwidth_fraction": medians["batch1"] * weight_bytes / bandwidth,
        "tokens_per_s": {name: [round(value, 2) for value in values] for name, values in speed.items()},
    }
    if theirs is not None:
        result["batch32_vs_torch_fp32"] = medians["batch32"] / medians["torch_fp32"]
        result["batch32_vs_torch_bf16"] = medians["batch32"] / medians["torch_bf16"]
    if episodes:
        measure_episodes(result, (pairs + 1) // 2, theirs)
    if theirs is not None:
        theirs.close()
    return result


def measure_episodes(result: dict[str, Any], pairs: int, theirs: Theirs | None) -> None:
    """The live episodes, into `result`."""
    live = Ours(slots=EPISODES)
    live.episodes(Script(99))
    seconds: dict[str, list[float]] = {"ours": [], "static": []}
    for i in range(pairs):
        script = Script(i)
        seconds["ours"].append(live.episodes(script))
        if theirs is not None:
            seconds["static"].append(theirs.episodes(script))
    live.close()
    if theirs is not None:
        result["episodes_vs_static"] = statistics.median(seconds["static"]) / statistics.median(seconds["ours"])
    result["episodes_s"] = {name: [round(s, 2) for s in values] for name, values in seconds.items()}


def read_bandwidth() -> float:
    """Bytes per second that two threads read from memory."""
    blocks = [np.ones(READ_BYTES // THREADS // 8, np.int64) for _ in range(THREADS)]
    start = threading.Barrier(THREADS + 1)

    def read(block: Any) -> None:
        start.wait()
        for piece in np.split(block, 64):
            piece.max()

    threads = [threading.Thread(target=read, args=(block,)) for block in blocks]
    for thread in threads:
        thread.start()
    start.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    return READ_BYTES / (time.perf_counter() - began)


def random_prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts that share nothing."""
    generator = np.random.default_rng([seed, count])
    ids: list[list[int]] = generator.integers(100, 40_000, (count, PROMPT)).tolist()
    return ids


class Script:
    """What 64 episodes do, so that both sides do the same: prompts of groups, lengths of turns, tool results."""

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        source, chat = WordCalculator(seed=seed), load_chat(SMOLLM2)
        environment = source.make()
        self.prompts = []
        for group in range(EPISODES // GROUP):
            messages = asyncio.run(environment.reset(source.tasks.task(group), episode_id=f"{group}", seed=0))
            self.prompts += [chat.prompt(messages)] * GROUP
        self.lengths = np.clip(generator.lognormal(3.0, 0.5, (TURNS, EPISODES)), 6, 72).astype(int)
        self.tools = generator.integers(100, 40_000, (TURNS, EPISODES, TOOL_TOKENS)).tolist()


class Ours:
    """The engine."""

    def __init__(self, slots: int) -> None:
        from policy.engine import Engine
        from policy.lora import LoraSettings, init_adapter
        from policy.weights import ModelSettings, load_model

        model, lora = load_model(ModelSettings(SMOLLM2)), LoraSettings()
        settings = SamplingSettings(slots=slots, max_tokens=NEW, max_context=640 if slots == EPISODES else 192)
        adapter = init_adapter(model.config, lora, 0)
        self._engine = Engine(model.config, model.weights, adapter, Version(0, 1), settings, lora.scale)
        self._calls = 0

    def batch(self, prompts: Sequence[Sequence[int]], new: int) -> float:
        """Seconds for all of them at once."""

        async def run() -> float:
            began = time.perf_counter()
            await asyncio.gather(*(self._sample(prompt, new) for prompt in prompts))
            return time.perf_counter() - began

        return asyncio.run(run())

    def episodes(self, script: Script) -> float:
        """Seconds until the last episode has ended."""

        async def episode(number: int) -> None:
            self._calls += 1
            session, ids = f"episode {self._calls}", list(script.prompts[number])
            for turn in range(TURNS):
                params = SamplingParams(max_tokens=int(script.lengths[turn][number]), seed=self._calls)
                done = await self._engine.sample(session, ids, params)
                ids = [*ids, *done.token_ids_N.tolist()]
                await asyncio.sleep(TOOL_S)
                ids += script.tools[turn][number]
            self._engine.close_session(session)

        async def run() -> float:
            began = time.perf_counter()
            await asyncio.gather(*(episode(number) for number in range(EPISODES)))
            return time.perf_counter() - began

        return asyncio.run(run())

    def close(self) -> None:
        self._engine.close()

    async def _sample(self, prompt: Sequence[int], new: int) -> None:
        self._calls += 1
        session = f"request {self._calls}"
        await self._engine.sample(session, prompt, SamplingParams(max_tokens=new, seed=self._calls))
        self._engine.close_session(session)


class Theirs:
    """`transformers.generate` in its own process."""

    def __init__(self, python: Path) -> None:
        gguf = find_model(SMOLLM2).gguf
        self._process = Reference(python, "reference_decode.py", str(gguf), str(THREADS))

    def batch(self, prompts: Sequence[Sequence[int]], new: int, dtype: str = "float32") -> float:
        return float(self._process.ask({"dtype": dtype, "prompts": prompts, "new_tokens": new})["seconds"])

    def episodes(self, script: Script) -> float:
        """Static batches: all episodes of a turn as one, which runs as long as its longest member, then the tools.
        Prompts are cut to one length, in the reference's favour."""
        ids = [list(prompt) for prompt in script.prompts]
        length = min(map(len, ids))
        ids = [prompt[-length:] for prompt in ids]
        seconds = 0.0
        for turn in range(TURNS):
            new = int(script.lengths[turn].max())
            seconds += self.batch(ids, new) + TOOL_S
            filler = np.random.default_rng(turn).integers(100, 40_000, (EPISODES, new)).tolist()
            ids = [[*a, *b, *c] for a, b, c in zip(ids, filler, script.tools[turn], strict=True)]
        return seconds

    def close(self) -> None:
        self._process.close()


def memory() -> dict[str, int]:
    """Bytes of this process at its peak above those after the imports, beside what weights and cache need."""
    import jax

    from policy.engine import Engine  # noqa: F401 - the import is what counts here
    from policy.weights import ModelSettings, load_model

    jax.devices()
    slots, length = 32, 512
    after_imports = _resident()
    model = load_model(ModelSettings(SMOLLM2))
    config = model.config
    weight_bytes = 4 * sum(int(np.prod(shape)) for shape in config.model_shapes().values())
    weight_bytes += 4 * config.num_layers * sum(int(np.prod(shape)) for shape in config.layer_shapes().values())
    cache_bytes = 2 * 4 * config.num_layers * config.num_kv_heads * config.head_dim * slots * length
    del model
    engine = Ours(slots)
    engine.batch(random_prompts(slots, 0), 32)
    engine.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "peak_bytes": peak - after_imports,
        "needed_bytes": weight_bytes + cache_bytes,
        "weight_bytes": weight_bytes,
        "cache_bytes": cache_bytes,
    }


def _resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status names no VmRSS: this measurement needs Linux")


if __name__ == "__main__":
    sys.exit(main())
