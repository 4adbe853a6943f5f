"""`headrace plan`: whether a training step fits a TPU slice, and how fast it can be, without a TPU.

Exit status 0 if the step fits, 1 if it does not.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from learner.planning import Figures, Plan
    from learner.sharding import ShardingSettings
    from policy.lora import LoraSettings
    from policy.transformer import ModelConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument(
        "file", nargs="?", help="a run file (TOML), whose model, adapter, mesh and rows are planned for"
    )
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting")
    parser.add_argument(
        "--model", help="a published model's name (llama-3.1-70b), a folder with config.json, or a .gguf"
    )
    parser.add_argument("--topology", required=True, help="the slice: v5e-64, v5p-64, v6e-8, or by shape v5p:4x4x4")
    parser.add_argument("--bucket", type=int, help="tokens of a row (default: the run file's largest, else 4096)")
    parser.add_argument("--rows", type=int, help="rows of one call, over all devices (default: the run file's, else 8)")
    parser.add_argument(
        "--mesh", help="data=D,fsdp=F,tensor=T (default: the run file's; without one search, and recommend one)"
    )
    parser.add_argument("--lora-rank", type=int, help="rank of the adapter (default: the run file's, else 16)")
    parser.add_argument(
        "--remat",
        choices=("layer", "attention", "none"),
        help="what the backward pass computes again: as learner.remat (default: the run file's, else layer)",
    )
    parser.add_argument(
        "--quantize",
        choices=("none", "int8", "int4", "nf4"),
        help="how the base's projections are held: as model.quantize, none being bfloat16 (default: the run file's, "
        "else none)",
    )
    parser.add_argument(
        "--compile",
        type=int,
        default=3,
        metavar="N",
        dest="candidates",
        help="meshes that a search compiles, the best by estimate; 0 estimates alone (default: 3)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object on the last line")


def run(args: argparse.Namespace) -> int:
    """Plan and print. Raises SettingsError for what cannot be planned."""
    from learner.planning import Plan, PlanError, Topology
    from pipelines.settings import SettingsError
    from policy.lora import LoraSettings
    from policy.settings import Quantization, Remat

    lora = None
    if args.file:
        lora = _from_file(args)
    elif args.set:
        raise SettingsError("--set changes settings of a run file: name one")
    elif args.model is None:
        raise SettingsError("name a run file, or give --model")
    if args.candidates < 0:
        raise SettingsError(f"--compile must be 0 (estimate alone) or more meshes, found {args.candidates}")
    rank = 16 if args.lora_rank is None else args.lora_rank
    try:
        plan = Plan(
            model_config(args.model),
            Topology.parse(args.topology),
            4096 if args.bucket is None else args.bucket,
            8 if args.rows is None else args.rows,
            lora or LoraSettings(rank=rank, alpha=2.0 * rank),
            Remat(args.remat or "layer"),
            Quantization(args.quantize or "none"),
        )
        mesh = parse_mesh(args.mesh or "")
        if mesh is not None:
            plan.check(mesh)
    except ValueError as error:  # PlanError, or what the settings' own checks say
        raise SettingsError(str(error)) from error
    try:
        return _report(args, plan, mesh)
    except PlanError as error:
        raise SettingsError(str(error)) from error


def _from_file(args: argparse.Namespace) -> LoraSettings | None:
    """Fill in from the run file what the arguments leave out; the adapter's settings, unless `--lora-rank` is given.

    A mesh of one device is none: `[sharding]` left out asks for a search.
    """
    from learner.sharding import MESH_AXES
    from pipelines.config import load_run

    run = load_run(args.file, args.set)
    if run.model.dtype != "bfloat16":
        print(f"The base is planned in bfloat16; {args.file} has model.dtype = {run.model.dtype}, which holds more")
    args.model = args.model or run.model.path
    args.bucket = run.packing.buckets[-1] if args.bucket is None else args.bucket
    args.rows = run.learner.rows_per_call if args.rows is None else args.rows
    args.remat = args.remat or run.learner.remat.value
    args.quantize = args.quantize or run.model.quantize.value
    if args.mesh is None and run.sharding.devices > 1:
        args.mesh = ",".join(f"{axis}={getattr(run.sharding, axis)}" for axis in MESH_AXES)
    return run.lora if args.lora_rank is None else None


def model_config(name: str) -> ModelConfig:
    """The shapes of a published model, or of one on disk, whose weights need not be there. Raises SettingsError."""
    from pipelines.settings import SettingsError
    from policy.families import hf_config
    from policy.files import ModelError, find_model
    from policy.presets import PRESETS, published
    from policy.transformer import ModelConfig
    from policy.weights import ModelSettings, load_model

    if name in PRESETS:
        return PRESETS[name]
    try:
        if not name:
            raise ModelError("it is empty")
        files = find_model(name)
        if files.folder is None:
            return load_model(ModelSettings(name)).config
        text = (files.folder / "config.json").read_bytes()
        found = json.loads(text)
        foreign = isinstance(found, dict) and ("model_type" in found or "architectures" in found)
        return ModelConfig(**hf_config(found)) if foreign else ModelConfig.from_json(text)
    except ModelError as error:
        if name and Path(name).exists():
            raise SettingsError(f"--model {name}: {error}") from error
        if (known := published(name)) is not None:
            return PRESETS[known]
        raise SettingsError(f"--model {name!r} is no folder, no .gguf file and none of {', '.join(PRESETS)}") from error
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise SettingsError(f"--model {name}: {error}") from error


def parse_mesh(text: str) -> ShardingSettings | None:
    """`fsdp=8,tensor=8` as a mesh; None for nothing. Raises PlanError."""
    from learner.planning import PlanError
    from learner.sharding import MESH_AXES, ShardingSettings

    if not text:
        return None
    sizes = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in MESH_AXES or not re.fullmatch("[0-9]{1,9}", size) or name in sizes:
            raise PlanError(
                f"--mesh gives each of {', '.join(MESH_AXES)} once, such as fsdp=8,tensor=8; found {text!r}"
            )
        sizes[name] = int(size)
    try:
        return ShardingSettings(**sizes)
    except ValueError as error:
        raise PlanError(f"--mesh: {error}") from error


def _report(args: argparse.Namespace, plan: Plan, mesh: ShardingSettings | None) -> int:
    from learner.planning import describe, estimate, mends, missing

    topology, chip = plan.topology, plan.topology.chip
    print(
        f"{args.model} on {topology.name}: {topology.chips} chips, {topology.layout}, {chip.memory_gib} GiB each; "
        f"{plan.rows} rows of {plan.bucket} tokens a call, LoRA rank {plan.lora.rank} on "
        f"{'bfloat16' if plan.quantize == 'none' else plan.quantize}, remat {plan.remat}",
        flush=True,
    )
    reason = missing() if args.candidates else "--compile 0"
    if reason:
        print(f"An estimate from shapes, nothing was compiled: {reason}")
    found = _found(args, plan, mesh, bool(reason))
    best = found[0]
    for figures in found:
        _print(plan, figures)
    fits = best.fits(topology)
    remedies = [] if fits else mends(plan, best.mesh)
    if mesh is None and fits:
        print(f"\nRecommended: --mesh {describe(best.mesh)}; in the run file {_run_file(plan, best.mesh)}")
    if not fits:
        print("\nIt does not fit. By estimate, this would: " + ("; ".join(remedies) or "no slice of this chip"))
    if args.json:
        print(json.dumps(_json(args, plan, best, estimate(plan, best.mesh), remedies)))
    return 0 if fits else 1


def _found(args: argparse.Namespace, plan: Plan, mesh: ShardingSettings | None, estimate_only: bool) -> list[Figures]:
    """The figures of the mesh that was asked for, or of those of a search, the recommended one first."""
    from learner.planning import compiled, describe, estimate, ranked

    if mesh is not None:
        candidates = [estimate(plan, mesh)]
    else:
        every = ranked(plan)
        print(f"{len(every)} meshes spread {plan.rows} rows over {plan.topology.chips} chips")
        candidates = every[: max(args.candidates, 3) if estimate_only else args.candidates]
    if estimate_only:
        return candidates
    found: list[Figures] = []
    for candidate in candidates:
        print(f"compiling {describe(candidate.mesh)} ...", flush=True)
        found.append(compiled(plan, candidate.mesh))
    return sorted(found, key=lambda f: (not f.fits(plan.topology), sum(f.seconds(plan.topology))))


def _print(plan: Plan, figures: Figures) -> None:
    from learner.planning import GIB, describe

    topology, chip = plan.topology, plan.topology.chip
    how = figures.source.value + (f" in {figures.compile_s:.0f} s" if figures.compile_s is not None else "")
    print(f"\nmesh {describe(figures.mesh)} ({how})")
    print(
        f"  memory       arguments {figures.argument_bytes / GIB:.2f} + temporaries "
        f"{figures.temporary_bytes / GIB:.2f} = peak {figures.peak_bytes / GIB:.2f} of {chip.memory_gib} GiB a device: "
        + ("fits" if figures.fits(topology) else f"OUT OF MEMORY {figures.refused}".rstrip())
    )
    if figures.refused:
        return
    products, memory, collectives = figures.seconds(topology)
    tokens = plan.rows * plan.bucket
    print(
        f"  products     {figures.flops / 1e12:.1f} TFLOP a device: {products:.3f} s at {chip.flops / 1e12:.0f} TFLOP/s"
    )
    print(
        f"  main memory  {figures.memory_bytes / 1e9:.1f} GB a device: {memory:.3f} s at "
        f"{chip.memory_bytes_s / 1e9:.0f} GB/s"
    )
    print(
        f"  collectives  {figures.sent_bytes / 1e9:.1f} GB sent by a device: {collectives:.3f} s at "
        f"{topology.ring_bytes_s / 1e9:.0f} GB/s"
    )
    for kind, (count, sent) in sorted(figures.collectives.items()):
        number = f"{count:.0f} × " if count else ""
        print(f"    {number}{kind}, {sent / 1e9:.2f} GB")
    roofline = figures.roofline_s(topology)
    print(
        f"  a step       {roofline:.3f} s if the three overlap wholly ({tokens / roofline:.0f} row tokens/s), "
        f"{products + memory + collectives:.3f} s if not at all"
    )


def _run_file(plan: Plan, mesh: ShardingSettings) -> str:
    from learner.sharding import MESH_AXES

    axes = ", ".join(f"sharding.{name} = {getattr(mesh, name)}" for name in MESH_AXES if getattr(mesh, name) > 1)
    model = 'model.dtype = "bfloat16"' + ("" if plan.quantize == "none" else f', model.quantize = "{plan.quantize}"')
    return f'{axes or "no [sharding]"}, learner.rows_per_call = {plan.rows}, learner.remat = "{plan.remat}", {model}'


def _json(
    args: argparse.Namespace, plan: Plan, figures: Figures, guess: Figures, remedies: list[str]
) -> dict[str, Any]:
    from learner.planning import GIB
    from learner.sharding import MESH_AXES

    topology = plan.topology
    products, memory, collectives = figures.seconds(topology)
    return {
        "fits": figures.fits(topology),
        "peak_gib_per_device": round(figures.peak_bytes / GIB, 3),
        "hbm_gib_per_device": topology.chip.memory_gib,
        "mesh": {axis: getattr(figures.mesh, axis) for axis in MESH_AXES},
        "compile_s": None if figures.compile_s is None else round(figures.compile_s, 1),
        "step_s_roofline": None if figures.refused else round(figures.roofline_s(topology), 4),
        "source": figures.source.value,
        "argument_gib_per_device": round(figures.argument_bytes / GIB, 3),
        "temporary_gib_per_device": round(figures.temporary_bytes / GIB, 3),
        "estimated_peak_gib_per_device": round(guess.peak_bytes / GIB, 3),
        "flops_per_device": figures.flops,
        "memory_bytes_per_device": figures.memory_bytes,
        "collectives": {kind: {"count": n, "bytes": sent} for kind, (n, sent) in figures.collectives.items()},
        "step_s": {"products": products, "memory": memory, "collectives": collectives},
        "model": args.model,
        "topology": topology.name,
        "chips": topology.chips,
        "bucket": plan.bucket,
        "rows": plan.rows,
        "lora_rank": plan.lora.rank,
        "remat": plan.remat.value,
        "quantize": plan.quantize.value,
        "refused": figures.refused,
        "would_fit": remedies,
    }
