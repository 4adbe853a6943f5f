"""What the learner's packing, shared prompts and device thread are worth, and its step beside google-tunix's trainer.

One small random model on the CPU; every figure is a ratio within this run, from measurements in turns. Tunix runs in a
process and an environment of its own, which `make bench-setup` builds.

    python -m benchmarks.learner --json     # in the repository's root

    packed_vs_padded          tokens/s of a step's packed, bucketed rows / of the same episodes padded to the longest
    padding_fraction          of what the device computes for the packed rows
    shared_prompt_vs_repeated trained tokens/s with the prompt once in a row / once for each member
    vs_tunix                  trained tokens/s of GRPO groups / of Tunix's trainer on the same episodes
    step_gap_fraction         of the time of 100 steps, that in which no XLA executable runs (profiler's trace)
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.profiler import ProfileData, ProfileOptions
from numpy.typing import NDArray

from benchmarks.reference import Reference
from learner.buffer import Held, lay_out_updates
from learner.losses import LossSettings
from learner.memory_fed import train_from_memory
from learner.settings import LearnerSettings
from learner.step import OptimizerSettings, PreparedStep, Trainer
from policy.allocator import keep_freed_memory
from policy.lora import LoraSettings
from policy.settings import Remat
from policy.transformer import ModelConfig, Params
from trajectories.packing import bucket_of, pack
from trajectories.schema import Closing, Episode, Pack, Row

KEEPS_FREED_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""What `keep_freed_memory` does for this process, for the other side's."""
ROOT = Path(__file__).resolve().parent.parent
TUNIX_PYTHON = ROOT / ".venv-tunix" / "bin" / "python"
LORA = LoraSettings(rank=8, alpha=16.0)
OPTIMIZER = OptimizerSettings()
LOSS = LossSettings(policy_loss="ppo", correction="none", clip_low=0.2, clip_high=0.2)
"""GRPO's clip with the mean over tokens and no KL penalty: Tunix has the same with `token-mean` and `beta=0`."""


@dataclass(frozen=True)
class Workload:
    """How much the measurements compute."""

    model: ModelConfig = ModelConfig(  # noqa: RUF009 - frozen
        vocab_size=2048,
        num_layers=2,
        embed_dim=256,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        mlp_dim=768,
        rope_theta=1e6,
        norm_eps=1e-6,
        attention_bias=True,
        max_context=4096,
        family="qwen2",
    )
    """Of Qwen 2's architecture, which is one that Tunix packs."""
    episodes: int = 64
    """Of the packed stream. No two share a prompt, so that packing alone counts."""
    median: float = 224.0
    """Tokens; lengths are log-normal ..."""
    sigma: float = 0.7
    longest: int = 1024
    """... and no longer than this, as a sampler's `max_context` cuts them."""
    buckets: tuple[int, ...] = (512, 1024)
    """As the run file has them by default."""
    prompt: int = 1024
    members: int = 16
    completion: int = 128
    """Of the shared prompt: its tokens, the members that share it, the tokens of each."""
    groups: int = 6
    group_size: int = 8
    """Of the comparison with Tunix."""
    group_prompt: float = 120.0
    group_completion: float = 180.0
    """Medians of tokens; sigma is 0.5 and that of above."""
    group_longest: tuple[int, int] = (400, 600)
    group_buckets: tuple[int, ...] = (1024, 2048)
    tunix: tuple[tuple[str, int], ...] = (("padded", 8), ("packed", 1024), ("packed", 2048))
    """Layouts and sizes that Tunix tries; the fastest one counts."""
    steps: int = 100
    """Of the trace."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--pairs", type=int, default=3, help="measurements of each side (default: 3)")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="measure this part alone; repeatable")
    parser.add_argument("--tunix", type=Path, default=TUNIX_PYTHON, help="a Python with google-tunix")
    args = parser.parse_args()
    keep_freed_memory()
    jax.config.update("jax_platforms", "cpu")
    result = measure(Workload(), args.pairs, args.only or list(PARTS), args.tunix)
    for name, value in result.items():
        print(f"{name:28} {value}")
    if args.json:
        print(json.dumps(result))
    return 0


def measure(workload: Workload, pairs: int, parts: Sequence[str], tunix: Path) -> dict[str, Any]:
    """The named parts; medians of ratios, with the raw samples beside them."""
    result: dict[str, Any] = {}
    for name in parts:
        progress(f"{name}: began")
        began = time.perf_counter()
        found = PARTS[name](workload, pairs, tunix)
        progress(f"{name}: {found[name]} after {time.perf_counter() - began:.0f} s")
        result |= found
        gc.collect()
    return result


# The parts


def measure_packing(workload: Workload, pairs: int, tunix: Path) -> dict[str, Any]:
    """Episodes of log-normal lengths, packed into the buckets' rows, and each in a row of the longest one's length."""
    random = np.random.default_rng(0)
    lengths = log_normal(random, workload.median, workload.sigma, workload.episodes, 16, workload.longest)
    closings = [one_group(workload, random, n, [(8, length - 8)]) for n, length in enumerate(lengths)]
    longest, tokens = max(lengths), sum(lengths)
    packed = make_trainer(workload, workload.buckets, rows_per_call=1)
    padded = make_trainer(workload, (longest,), rows_per_call=1)
    held = hold(closings, workload.buckets)
    alone = [row for closing in closings for row in pack([closing], longest).rows]
    prepared = packed.prepare(*lay_out_updates(held))
    seconds = in_turns(
        pairs,
        packed=lambda: step(packed, lambda: lay_out_updates(held)),
        padded=lambda: step(padded, lambda: (tuple(alone),)),
    )
    return {
        "packed_vs_padded": ratio(seconds["padded"], seconds["packed"]),
        "padding_fraction": 1 - prepared.used_tokens / prepared.call_tokens,
        "padded_padding_fraction": 1 - tokens / padded.prepare(alone).call_tokens,
        "packing": {
            "episodes": len(closings),
            "tokens": tokens,
            "longest": longest,
            "rows": rows_by_bucket(prepared),
            "packed_tokens_per_s": rates(tokens, seconds["packed"]),
            "padded_tokens_per_s": rates(tokens, seconds["padded"]),
        },
    }


def measure_shared_prompt(workload: Workload, pairs: int, tunix: Path) -> dict[str, Any]:
    """A group whose prompt stands once in a row, and its members each in a row that their own copy fills exactly."""
    random = np.random.default_rng(1)
    closing = one_group(workload, random, 0, [(workload.prompt, workload.completion)] * workload.members)
    alone = [
        dataclasses.replace(closing, closing_id=f"{n}", episodes=(episode,), advantages=(advantage,))
        for n, (episode, advantage) in enumerate(zip(closing.episodes, closing.advantages, strict=True))
    ]
    once = workload.prompt + workload.members * workload.completion
    each = workload.prompt + workload.completion
    shared, repeated = make_trainer(workload, (once,), 1), make_trainer(workload, (each,), 1)
    share, repeat = pack([closing], once).rows, tuple(row for one in alone for row in pack([one], each).rows)
    difference = compare(shared, shared.prepare(share), repeated, repeated.prepare(repeat))
    seconds = in_turns(
        pairs, shared=lambda: step(shared, lambda: (share,)), repeated=lambda: step(repeated, lambda: (repeat,))
    )
    tokens = workload.members * workload.completion
    return {
        "shared_prompt_vs_repeated": ratio(seconds["repeated"], seconds["shared"]),
        "shared_prompt": {
            "row_tokens": [once * len(share), each * len(repeat)],
            "shared_tokens_per_s": rates(tokens, seconds["shared"]),
            "repeated_tokens_per_s": rates(tokens, seconds["repeated"]),
            "difference": difference,
        },
    }


def measure_tunix(workload: Workload, pairs: int, tunix: Path) -> dict[str, Any]:
    """GRPO groups, trained by Tunix's trainer and by ours."""
    if not tunix.exists():
        return {"vs_tunix": None, "tunix": f"{tunix} does not exist: `make bench-setup` builds it"}
    random = np.random.default_rng(2)
    closings = []
    for group in range(workload.groups):
        most, longest = workload.group_longest
        (prompt,) = log_normal(random, workload.group_prompt, 0.5, 1, 8, most)
        lengths = log_normal(random, workload.group_completion, workload.sigma, workload.group_size, 8, longest)
        closings.append(one_group(workload, random, group, [(prompt, length) for length in lengths]))
    ours = make_trainer(workload, workload.group_buckets, rows_per_call=1)
    held = hold(closings, workload.group_buckets)
    prepared = ours.prepare(*lay_out_updates(held))
    first = ours.run(prepared)
    assert first is not None
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        file = Path(folder) / "episodes.npz"
        write_episodes(file, workload, closings)
        theirs = Reference(tunix, "reference_learner.py", str(file), environment=KEEPS_FREED_MEMORY)

        def train(layout: str, size: int) -> dict[str, Any]:
            """One optimizer step over all episodes."""
            return theirs.ask({"layout": layout, "size": size})

        try:
            tries: dict[str, float] = {}
            for layout, size in workload.tunix:
                warm = train(layout, size)
                # Their packing masks by segment alone where flash attention is off: on a CPU its loss is not the same.
                if layout == "padded" and abs(warm["loss"] - first.loss) > 1e-4:
                    raise RuntimeError(f"Tunix's loss is {warm['loss']} and ours {first.loss} on the same episodes")
                tries[f"{layout} {size}"] = train(layout, size)["seconds"]
                progress(f"tunix, {layout} {size}: {tries[f'{layout} {size}']:.2f} s")
            layout, size = min(workload.tunix, key=lambda way: tries[f"{way[0]} {way[1]}"])
            seconds = in_turns(
                pairs,
                ours=lambda: step(ours, lambda: lay_out_updates(held)),
                tunix=lambda: float(train(layout, size)["seconds"]),
            )
        finally:
            theirs.close()
    return {
        "vs_tunix": ratio(seconds["tunix"], seconds["ours"]),
        "tunix": {
            "best": f"{layout} {size}",
            "tried_s": {name: round(value, 3) for name, value in tries.items()},
            "loss": first.loss,
            "rows": rows_by_bucket(prepared),
            "trained_tokens": prepared.loss_tokens,
            "ours_tokens_per_s": rates(prepared.loss_tokens, seconds["ours"]),
            "tunix_tokens_per_s": rates(prepared.loss_tokens, seconds["tunix"]),
        },
    }


def measure_step_gap(workload: Workload, pairs: int, tunix: Path) -> dict[str, Any]:
    """Steps of the device thread, with the next one prepared while one runs, under the profiler."""
    random = np.random.default_rng(3)
    per_step = 4
    lengths = log_normal(random, workload.median, workload.sigma, 8 * per_step, 16, workload.longest)
    closings = [one_group(workload, random, n, [(8, length - 8)]) for n, length in enumerate(lengths)]
    packs = [held.source for held in hold(closings, workload.buckets, closings_per_pack=1)]
    trainer = AlreadyCompiled(make_trainer(workload, workload.buckets, rows_per_call=1))
    settings = LearnerSettings(groups_per_step=per_step)
    train_from_memory(trainer, packs, settings, 4)
    options = ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 2
    with tempfile.TemporaryDirectory(prefix="headrace-trace-") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            fed = train_from_memory(trainer, packs, settings, workload.steps)
        (file,) = Path(folder).rglob("*.xplane.pb")
        runs = executions(ProfileData.from_file(str(file)))
    return {
        "step_gap_fraction": gap_fraction(runs),
        "step_gap": {
            "steps": fed.steps,
            "step_ms": round(1e3 * fed.step_s, 2),
            "executions": len(runs),
            "traced_s": round((max(end for _, end in runs) - min(start for start, _ in runs)) / 1e9, 3),
            "longest_gaps_ms": [round(gap / 1e6, 3) for gap in sorted(gaps(runs), reverse=True)[:5]],
        },
    }


PARTS: dict[str, Callable[[Workload, int, Path], dict[str, Any]]] = {
    "packed_vs_padded": measure_packing,
    "shared_prompt_vs_repeated": measure_shared_prompt,
    "vs_tunix": measure_tunix,
    "step_gap_fraction": measure_step_gap,
}


# Measuring


def in_turns(pairs: int, **sides: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each side, one after the other, `pairs` times; once before that, to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(pairs + 1):
        for name, side in sides.items():
            taken = side()
            if turn:
                seconds[name].append(taken)
                progress(f"{name}: {taken:.3f} s")
    return seconds


def step(trainer: Trainer, rows: Callable[[], tuple[tuple[Row, ...], ...]]) -> float:
    """Seconds of one optimizer step, from closings to the new adapter."""
    began = time.perf_counter()
    if trainer.run(trainer.prepare(*rows())) is None:
        raise RuntimeError("the step was given up")
    return time.perf_counter() - began


def ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """The median of the pairs' ratios."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def rates(tokens: int, seconds: Iterable[float]) -> list[float]:
    return [round(tokens / s, 1) for s in seconds]


def compare(a: Trainer, in_a: PreparedStep, b: Trainer, in_b: PreparedStep) -> dict[str, float]:
    """The differences of loss and gradient, as fractions of the largest entry; raises RuntimeError above 1e-5."""
    (gradient, sums), (other, other_sums) = a.gradient(in_a), b.gradient(in_b)
    leaves, others = jax.tree.leaves(gradient), jax.tree.leaves(other)
    size = max(float(np.abs(leaf).max()) for leaf in leaves)
    loss = float(sums.loss) / in_a.denominator
    found = {
        "loss": abs(loss - float(other_sums.loss) / in_b.denominator) / abs(loss),
        "gradient": max(float(np.abs(x - y).max()) for x, y in zip(leaves, others, strict=True)) / size,
    }
    if max(found.values()) > 1e-5:
        raise RuntimeError(f"the two layouts do not compute the same: {found}")
    return found


def executions(trace: ProfileData) -> list[tuple[float, float]]:
    """(begin, end) in nanoseconds of each run of an XLA executable: of all events that name the run, those of its
    operations and the one that lasts until they are all done."""
    runs: dict[int, tuple[float, float]] = {}
    for plane in trace.planes:
        for line in plane.lines:
            for event in line.events:
                run = next((int(value) for name, value in event.stats if name == "run_id"), None)
                if run is not None:
                    start, end = runs.get(run, (event.start_ns, event.end_ns))
                    runs[run] = min(start, event.start_ns), max(end, event.end_ns)
    if not runs:
        raise RuntimeError("the trace holds no run of an XLA executable")
    return list(runs.values())


def gaps(runs: Iterable[tuple[float, float]]) -> list[float]:
    """The times between the first begin and the last end in which nothing runs."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(runs):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return [later[0] - earlier[1] for earlier, later in pairwise(merged)]


def gap_fraction(runs: Sequence[tuple[float, float]]) -> float:
    """The part of the time from the first begin to the last end in which nothing runs."""
    return sum(gaps(runs)) / (max(end for _, end in runs) - min(start for start, _ in runs))


class AlreadyCompiled:
    """A trainer whose compilation is no part of what is traced."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def compile(self) -> float:
        return 0.0


# What is trained


def make_trainer(workload: Workload, buckets: tuple[int, ...], rows_per_call: int) -> Trainer:
    """The run's trainer, compiled, with an adapter that has moved away from the base already."""
    trainer = Trainer(
        workload.model,
        random_params(workload.model),
        LORA,
        OPTIMIZER,
        LOSS,
        buckets=buckets,
        rows_per_call=rows_per_call,
        temperature=1.0,
        seed=0,
        remat=Remat.NONE,
    )
    progress(f"compiled rows of {', '.join(map(str, buckets))} in {trainer.compile():.1f} s")
    return trainer


def random_params(config: ModelConfig) -> Params:
    """Weights with which log-probs stay near those of a uniform policy."""
    random = np.random.default_rng(0)

    def draw(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        found = {}
        for name, shape in shapes.items():
            scale = 0.02 if len(shape) == 1 or name == "embed" else 0.5 * shape[0] ** -0.5
            found[name] = random.standard_normal(shape, np.float32) * np.float32(scale)
            if "norm" in name:
                found[name] += 1
        return found

    return {**draw(config.model_shapes()), "layers": [draw(config.layer_shapes()) for _ in range(config.num_layers)]}


def log_normal(
    random: np.random.Generator, median: float, sigma: float, count: int, least: int, most: int
) -> list[int]:
    lengths: list[int] = np.clip(random.lognormal(np.log(median), sigma, count), least, most).astype(int).tolist()
    return lengths


def one_group(
    workload: Workload, random: np.random.Generator, group: int, lengths: Sequence[tuple[int, int]]
) -> Closing:
    """A closing whose members have one prompt and the given (prompt, completion) lengths."""
    vocab = workload.model.vocab_size

    def draw(length: int) -> NDArray[np.int64]:
        return random.integers(1, vocab, length)

    prompt_T = draw(lengths[0][0])

    def member(sample: int, length: int) -> Episode:
        tokens_T = np.concatenate([prompt_T, draw(length)])
        sampled_T = np.arange(len(tokens_T)) >= len(prompt_T)
        logprobs_T = np.where(sampled_T, -np.log(vocab) + 0.05 * random.standard_normal(len(tokens_T)), 0.0)
        return Episode("bench", group, 0, sample, len(lengths), tokens_T, sampled_T, logprobs_T, len(prompt_T))

    episodes = tuple(member(sample, length) for sample, (_, length) in enumerate(lengths))
    advantages = tuple(float(a) for a in random.standard_normal(len(lengths)))
    return Closing("bench", group, 0, f"{group}", len(lengths), episodes, advantages=advantages)


def hold(closings: Sequence[Closing], buckets: Sequence[int], closings_per_pack: int = 4) -> tuple[Held, ...]:
    """The closings as a learner has them: packed in messages of one bucket by the workers."""
    held: list[Held] = []
    waiting: dict[int, list[Closing]] = {bucket: [] for bucket in buckets}

    def send(bucket: int) -> None:
        if waiting[bucket]:
            packed: Pack = pack(waiting[bucket], bucket)
            held.extend(Held(one, packed, version_step=0, order=len(held) + n) for n, one in enumerate(waiting[bucket]))
            waiting[bucket] = []

    for closing in closings:
        bucket = bucket_of(closing, buckets)
        waiting[bucket].append(closing)
        if len(waiting[bucket]) == closings_per_pack:
            send(bucket)
    for bucket in buckets:
        send(bucket)
    return tuple(held)


def rows_by_bucket(prepared: PreparedStep) -> dict[str, int]:
    """Bucket -> calls of the step."""
    buckets = [bucket for bucket, _ in prepared.calls]
    return {str(bucket): buckets.count(bucket) for bucket in sorted(set(buckets))}


def write_episodes(file: Path, workload: Workload, closings: Sequence[Closing]) -> None:
    """Episodes, weights and settings for Tunix's process."""
    config, params = workload.model, random_params(workload.model)
    members = [
        (episode, advantage)
        for closing in closings
        for episode, advantage in zip(closing.episodes, closing.advantages, strict=True)
    ]
    ends = np.cumsum([len(episode) for episode, _ in members])
    places = [(end - len(e), end - len(e) + e.prompt_length, end) for (e, _), end in zip(members, ends, strict=True)]
    weights = {"embed": params["embed"], "final_norm": params["final_norm"]}
    for i, layer in enumerate(params["layers"]):
        weights |= {f"{i}/{name}": array for name, array in layer.items()}
    settings = {
        "model": dataclasses.asdict(config),
        "lora": {"rank": LORA.rank, "alpha": LORA.alpha, "targets": LORA.projections},
        "optimizer": dataclasses.asdict(OPTIMIZER),
        "group_size": workload.group_size,
    }
    np.savez(
        file,
        settings=json.dumps(settings),
        places=np.array(places),
        advantages=np.array([advantage for _, advantage in members], np.float32),
        tokens=np.concatenate([episode.tokens_T for episode, _ in members]),
        behaviour=np.concatenate([episode.logprobs_T for episode, _ in members]),
        **{f"weights/{name}": array for name, array in weights.items()},
    )


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
