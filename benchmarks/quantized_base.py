"""What a quantised base holds in memory, and what a training step on it costs, beside the dense one in the same run.

    python -m benchmarks.quantized_base --json     # in the repository's root

Bytes are those of live arrays, without adapter and optimizer. Steps are of one call; the formats take turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import time
from typing import Any

import jax
import numpy as np

from learner.losses import LossSettings
from learner.step import OptimizerSettings, Trainer
from policy.families import PROJECTIONS
from policy.files import SMOLLM2
from policy.lora import LoraSettings
from policy.settings import Quantization, Remat
from policy.weights import Dtype, ModelSettings, load_model
from trajectories.packing import pack
from trajectories.schema import Closing, Episode, Row

MEMBERS = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--model", default=SMOLLM2, help=f"as model.path (default: {SMOLLM2})")
    parser.add_argument("--dtype", type=Dtype, default=Dtype.FLOAT32, help="as model.dtype (default: float32)")
    parser.add_argument("--bucket", type=int, default=512, help="tokens of the step's one row (default: 512)")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each format (default: 3)")
    args = parser.parse_args()
    result = measure(args.model, args.dtype, args.bucket, args.rounds)
    for name, found in result["formats"].items():
        print(
            f"{name:6} base {found['base_mb']:8.1f} MB, projections {found['projection_bytes_per_weight']:.4f} bytes "
            f"a weight, step {found['step_s']:.2f} s ({found['step_ratio']:.2f} of dense)"
        )
    if args.json:
        print(json.dumps(result))
    return 0


def measure(path: str, dtype: Dtype, bucket: int, rounds: int) -> dict[str, Any]:
    """Bytes and seconds of each format."""
    trainers: dict[Quantization, Trainer] = {}
    base: dict[Quantization, int] = {}
    model = load_model(ModelSettings(path, dtype))
    for format in Quantization:
        before = _live_bytes()
        trainer = Trainer(
            model.config,
            model.weights,
            LoraSettings(),
            OptimizerSettings(),
            LossSettings(),
            buckets=(bucket,),
            rows_per_call=1,
            temperature=1.0,
            seed=0,
            remat=Remat.ATTENTION,
            quantize=format,
        )
        base[format] = _live_bytes() - before - sum(x.nbytes for x in jax.tree.leaves(trainer.state()))
        trainers[format] = trainer
    shapes = model.config.layer_shapes()
    weights = model.config.num_layers * sum(int(np.prod(shapes[name])) for name in PROJECTIONS)
    outside = base[Quantization.NONE] - weights * dtype.numpy.itemsize
    rows = _rows(model.config.vocab_size, bucket)
    seconds: dict[Quantization, list[float]] = {format: [] for format in trainers}
    for trainer in trainers.values():
        trainer.compile()
        trainer.run(trainer.prepare(rows))
    for _ in range(rounds):
        for format, trainer in trainers.items():
            prepared = trainer.prepare(rows)
            began = time.perf_counter()
            trainer.run(prepared)
            seconds[format].append(time.perf_counter() - began)
    steps = {format: statistics.median(found) for format, found in seconds.items()}
    return {
        "model": path,
        "dtype": dtype.value,
        "device": jax.devices()[0].device_kind,
        "bucket": bucket,
        "projection_weights": weights,
        "formats": {
            str(format): {
                "base_mb": round(base[format] / 1e6, 2),
                "projection_bytes_per_weight": round((base[format] - outside) / weights, 4),
                "step_s": round(steps[format], 4),
                "step_ratio": round(steps[format] / steps[Quantization.NONE], 3),
            }
            for format in trainers
        },
    }


def _live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def _rows(vocab_size: int, bucket: int) -> list[Row]:
    """One full row: a prompt of a ninth of it and eight members as long."""
    rng = np.random.default_rng(0)
    length = bucket // (MEMBERS + 1)
    prompt_T = rng.integers(0, vocab_size, length)
    mask_T = np.arange(2 * length) >= length
    episodes = []
    for sample in range(MEMBERS):
        tokens_T = np.concatenate([prompt_T, rng.integers(0, vocab_size, length)])
        logprobs_T = np.where(mask_T, -np.log(vocab_size), 0.0)
        episodes.append(Episode("bench", 0, 0, sample, MEMBERS, tokens_T, mask_T, logprobs_T, length))
    closing = Closing("bench", 0, 0, "c", MEMBERS, tuple(episodes))
    closing = dataclasses.replace(closing, advantages=tuple(float(x) for x in rng.normal(size=MEMBERS)))
    return list(pack([closing], bucket).rows)


if __name__ == "__main__":
    raise SystemExit(main())
