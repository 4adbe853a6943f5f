"""The claim itself, small: the learner stays busy while tools are slow.

The real path (Pub/Sub server, Beam job, learner) with a simulated policy on the worker side, so that nothing but the
path is measured; tools of 1 s and 5 s; slots and staleness by Little's law. Beside it the same learner fed from memory,
and Headrace itself in synchronous mode. The learner's model is sized in the same run so that a step takes about 0.5 s.

    python -m benchmarks.utilization --json     # in the repository's root
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.slow_tool import SlowTool
from environments.environment import EnvironmentSettings
from environments.orchestrator import RolloutOrchestrator
from learner.memory_fed import MemoryFed, train_from_memory
from learner.train import make_trainer
from pipelines import settings
from pipelines.config import Run
from pipelines.learner import learner_spec
from policy import chat
from policy.client import SamplingParams
from policy.transformer import ModelConfig
from policy.weights import load_model, save_model
from trajectories.advantages import AdvantageSettings, advantages
from trajectories.packing import bucket_of, pack
from trajectories.schema import Closing, Episode, Pack, Task

ROOT = Path(__file__).resolve().parent.parent
GROUPS, MEMBERS = 4, 4
STEP_S = 0.5
OVERHEAD_S = 0.8
"""Time of a group beyond its tool: queues, polls, packing, transit."""
BUCKET = 256


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps per measurement (default: 60)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-utilization-") as folder:
        result = measure(Path(folder), args.steps)
    for name, value in result.items():
        print(f"{name:26} {value}")
    if args.json:
        print(json.dumps(result))
    return 0


def measure(folder: Path, steps: int) -> dict[str, Any]:
    """All measurements, one after the other."""
    packs = sample_packs(8)
    model, memory = sized_model(folder, packs)
    result: dict[str, Any] = {"memory_fed_step_s": memory.step_s, "memory_fed_tokens_per_s": memory.tokens_per_s}
    throughputs = []
    for tool_s in (1, 5):
        staleness = math.ceil((tool_s * 1.1 + OVERHEAD_S) / STEP_S)
        found = run(folder / f"async-{tool_s}", model, tool_s, staleness, steps)
        sync = run(folder / f"sync-{tool_s}", model, tool_s, 0, max(4, steps // 6), synchronous=True)
        throughputs.append(found["tokens_per_s"])
        result |= {
            f"busy_{tool_s}s": found["learner_busy"],
            f"busy_sync_{tool_s}s": sync["learner_busy"],
            f"tokens_per_s_{tool_s}s": found["tokens_per_s"],
            f"step_s_{tool_s}s": found["step_s"],
            f"max_staleness_{tool_s}s": staleness,
            f"staleness_{tool_s}s": found["staleness"],
            f"slots_{tool_s}s": (staleness + 1) * GROUPS * MEMBERS,
            f"stall_s_{tool_s}s": found["stall_s"],
        }
    again = fed_from_memory(model, packs, steps)
    result["memory_fed_tokens_per_s_after"] = again.tokens_per_s
    reference = (memory.tokens_per_s + again.tokens_per_s) / 2
    result["throughput_vs_memory_fed"] = min(throughputs) / reference
    return result


def run_of(model: str, tool_s: float, staleness: int, steps: int, *, synchronous: bool = False) -> Run:
    """The run file of one measurement."""
    slots = (staleness + 1) * GROUPS * MEMBERS
    return settings.read(
        Run,
        {
            "name": "utilization",
            "model": {"path": model},
            "lora": {"rank": 8, "alpha": 16.0},
            "sampling": {"backend": "simulated", "slots": slots, "max_tokens": 20, "max_context": 128},
            "environment": {
                "name": "benchmarks.slow_tool:SlowTool",
                "options": {"latency_s": float(tool_s)},
                "max_concurrency": slots,
            },
            "packing": {"buckets": [BUCKET], "closings_per_pack": 1},
            "learner": {
                "groups_per_step": GROUPS,
                "group_size": MEMBERS,
                "steps": steps,
                "max_staleness": staleness,
                "rows_per_call": GROUPS,
                "synchronous": synchronous,
            },
            "evaluation": {"questions": 0},
            "code": {"path": str(ROOT)},
        },
    )


def run(
    out: Path, model: str, tool_s: float, staleness: int, steps: int, *, synchronous: bool = False
) -> dict[str, Any]:
    """One run on the real path; its summary, with tokens/s and step time over the steps after the first."""
    file = out.with_suffix(".json")
    file.write_text(run_of(model, tool_s, staleness, steps, synchronous=synchronous).to_json())
    command = [sys.executable, "-m", "pipelines.cli", "run", str(file), "--out", str(out)]
    print(f"{out.name}: {steps} steps", file=sys.stderr, flush=True)
    subprocess.run(command, check=True, cwd=ROOT, stdout=sys.stderr)
    summary = dict(json.loads((out / "summary.json").read_text()))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    seconds = lines[-1]["train_s"] - lines[0]["train_s"]
    summary["tokens_per_s"] = sum(line["tokens"] for line in lines[1:]) / seconds
    summary["step_s"] = sum(line["step_s"] for line in lines[1:]) / len(lines[1:])
    return summary


def sample_packs(count: int) -> list[Pack]:
    """Packs as the run's workers make them, from the same environment and simulated policy without latency."""
    from policy.simulated import SimulatedPolicy

    tiny = chat.load_chat("calculator-tiny")
    run = run_of("calculator-tiny", 0.0, 1, 1)

    async def episodes() -> list[list[Episode]]:
        policy = SimulatedPolicy(tiny.vocab_size, tiny.stop_token_ids)
        orchestrator = RolloutOrchestrator(
            policy,
            tiny,
            SlowTool(0.0),
            EnvironmentSettings(name=run.environment.name),
            SamplingParams(temperature=1.0, max_tokens=run.sampling.max_tokens),
            0,
        )
        tasks = [Task("memory", group, 0, group_size=MEMBERS, payload=SlowTool().task(group)) for group in range(count)]
        return [await asyncio.gather(*(orchestrator.run(task, n) for n in range(MEMBERS))) for task in tasks]

    packs = []
    for group, members in enumerate(asyncio.run(episodes())):
        rewards = [float(number % 2) for number in range(MEMBERS)]
        estimates = advantages(rewards, AdvantageSettings())
        closing = Closing("memory", group, 0, str(group), MEMBERS, tuple(members), advantages=estimates)
        packs.append(pack([closing], bucket_of(closing, run.packing.buckets)))
    return packs


def sized_model(folder: Path, packs: list[Pack]) -> tuple[str, MemoryFed]:
    """A random model of as many layers as make a step of about STEP_S, and what it does when fed from memory."""
    layers = 4
    for _ in range(3):
        path = make_model(folder / f"model-{layers}-{time.monotonic_ns()}", layers)
        found = fed_from_memory(path, packs, 12)
        if abs(found.step_s / STEP_S - 1) < 0.15:
            break
        layers = max(1, round(layers * STEP_S / found.step_s))
    return path, found


def make_model(folder: Path, layers: int) -> str:
    """A model folder with random weights and the tiny vocabulary."""
    tiny = chat.load_chat("calculator-tiny")
    config = ModelConfig(
        vocab_size=tiny.vocab_size,
        num_layers=layers,
        embed_dim=384,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        mlp_dim=1024,
    )
    random = np.random.default_rng(0)

    def weights(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        return {
            name: np.ones(shape, np.float32)
            if len(shape) == 1
            else (random.standard_normal(shape, np.float32) * np.float32(0.5 * shape[0] ** -0.5))
            for name, shape in shapes.items()
        }

    params = {**weights(config.model_shapes()), "layers": [weights(config.layer_shapes()) for _ in range(layers)]}
    save_model(folder, config, params)
    shutil.copy(chat.ASSETS / "calculator_tiny" / "vocabulary.json", folder)
    return str(folder)


def fed_from_memory(model: str, packs: list[Pack], steps: int) -> MemoryFed:
    """The learner of the runs, without anything before it."""
    run = run_of(model, 0.0, 1, steps)
    return train_from_memory(make_trainer(learner_spec(run), load_model(run.model)), packs, run.learner, steps)


if __name__ == "__main__":
    sys.exit(main())
