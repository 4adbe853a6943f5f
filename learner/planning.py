"""Does the step fit a TPU slice, and how fast can it be: known before anyone rents one.

    Plan        what is asked: model, slice, rows, adapter
    estimate    from shapes alone, for any mesh, in microseconds: ranks meshes, and stands in where libtpu is absent
    compiled    by libtpu's ahead-of-time compiler, on a machine without a TPU

Invariant: what is compiled are the functions of `StepProgram`, the ones that `Trainer` runs, over abstract arrays on
the mesh of the slice. The compiler runs in a process of its own (`python -m learner.planning`, a plan on standard
input), whose environment says what a TPU machine would say.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from learner import hlo
from learner.losses import LossSettings
from learner.parallel import CHUNK
from learner.sharding import MESH_AXES, PARAMETER_AXES, ShardingSettings, adapter_axes, partition
from policy.families import PROJECTIONS
from policy.lora import LoraSettings, adapter_shapes
from policy.quantization import check_shapes, parts_of
from policy.settings import Quantization, Remat
from policy.transformer import ModelConfig

GIB = 2**30
LIBTPU = "0.0.42"
"""The release that this project's JAX was built for; newer ones failed on v5p."""
_MARGIN = 0.92
"""An estimate calls a mesh good if it fills no more of the memory."""


class PlanError(ValueError):
    """A plan that cannot be made, with what would mend it."""


@dataclass(frozen=True)
class Chip:
    """One kind of TPU. Sources: Google's system architecture pages; the memory is what libtpu lets a program use."""

    name: str
    memory_gib: float
    flops: float
    """Of bfloat16 products, per second."""
    memory_bytes_s: float
    link_bytes_s: float
    """One link between two chips, in one direction."""
    cores: int
    """TensorCores of a chip, where a slice's name counts those; else 1."""
    slices: tuple[tuple[int, ...], ...]
    """Shapes that are sold."""
    wrapped_from: int
    """A slice of which no dimension is shorter is a torus."""


CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        chip.name: chip
        for chip in (
            Chip(
                "v5e",
                memory_gib=15.75,
                flops=197e12,
                memory_bytes_s=819e9,
                link_bytes_s=50e9,
                cores=1,
                slices=((2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
                wrapped_from=16,
            ),
            Chip(
                "v6e",
                memory_gib=31.25,
                flops=918e12,
                memory_bytes_s=1640e9,
                link_bytes_s=100e9,
                cores=1,
                slices=((2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
                wrapped_from=16,
            ),
            Chip(
                "v5p",
                memory_gib=95.74,
                flops=459e12,
                memory_bytes_s=2765e9,
                link_bytes_s=100e9,
                cores=2,
                slices=(
                    (2, 2, 1),
                    (2, 2, 2),
                    (2, 2, 4),
                    (2, 4, 4),
                    (4, 4, 4),
                    (4, 4, 8),
                    (4, 8, 8),
                    (8, 8, 8),
                    (8, 8, 16),
                ),
                wrapped_from=4,
            ),
        )
    }
)


@dataclass(frozen=True)
class Topology:
    """One slice."""

    chip: Chip
    shape: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Topology:
        """`v5e-64` as Google names slices, or `v5p:4x4x4` by its shape. Raises PlanError with the known ones."""
        found = re.fullmatch(r"(v\d\w?)(?:-([0-9]{1,6})|:([0-9]{1,6}(?:x[0-9]{1,6})+))", text)
        chip = CHIPS.get(found[1]) if found else None
        if found is None or chip is None:
            raise PlanError(f"a topology is {', '.join(f'{name}-N' for name in CHIPS)}, such as v5e-64; found {text!r}")
        if found[2]:
            shapes = [shape for shape in chip.slices if math.prod(shape) * chip.cores == int(found[2])]
        else:
            given = tuple(int(n) for n in found[3].split("x"))
            shapes = [shape for shape in chip.slices if shape == given]
        if not shapes:
            every = [cls(chip, shape) for shape in chip.slices]
            known = ", ".join(one.name if found[2] else f"{one.name} ({one.layout})" for one in every)
            raise PlanError(f"slices of {chip.name} are {known}; found {text!r}")
        return cls(chip, shapes[0])

    @property
    def name(self) -> str:
        return f"{self.chip.name}-{self.chips * self.chip.cores}"

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def layout(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def ring_bytes_s(self) -> float:
        """What a chip sends in a collective along one dimension of the slice: both ways round a torus, else one way."""
        return self.chip.link_bytes_s * (2 if min(self.shape) >= self.chip.wrapped_from else 1)

    def larger(self) -> Iterator[Topology]:
        """Larger slices of the same chip."""
        yield from (Topology(self.chip, shape) for shape in self.chip.slices if math.prod(shape) > self.chips)


@dataclass(frozen=True)
class Plan:
    """What is asked, but for the mesh. Rows are those of one call."""

    config: ModelConfig
    topology: Topology
    bucket: int
    rows: int
    lora: LoraSettings = field(default_factory=LoraSettings)
    remat: Remat = Remat.LAYER
    quantize: Quantization = Quantization.NONE
    """Of the base's projections; the rest is bfloat16."""

    def __post_init__(self) -> None:
        if self.bucket < 1 or self.rows < 1:
            raise PlanError(f"bucket and rows must be at least 1, found {self.bucket} and {self.rows}")
        check_shapes(self.config.layer_shapes(), self.quantize)

    def check(self, mesh: ShardingSettings) -> None:
        """Raises PlanError unless the mesh covers the slice and the rows spread over it."""
        chips, spread = self.topology.chips, mesh.data * mesh.fsdp
        if mesh.devices != chips:
            raise PlanError(
                f"the mesh must have the {chips} chips of {self.topology.name}, found {describe(mesh)} = {mesh.devices}"
            )
        if self.rows % spread:
            raise PlanError(
                f"rows must be a multiple of data × fsdp = {spread}, found {self.rows}: try {spread}, or a mesh with "
                "more tensor"
            )

    def meshes(self) -> list[ShardingSettings]:
        """The meshes that rows and heads spread over evenly."""
        chips, config = self.topology.chips, self.config
        return [
            ShardingSettings(data, fsdp, chips // (data * fsdp))
            for data in _divisors(chips)
            for fsdp in _divisors(chips // data)
            if self.rows % (data * fsdp) == 0
            and config.num_heads % (chips // (data * fsdp)) == 0
            and config.mlp_dim % (chips // (data * fsdp)) == 0
        ]


class Source(StrEnum):
    """Where figures come from."""

    COMPILED = "compiled"
    ESTIMATED = "estimated"


@dataclass(frozen=True)
class Figures:
    """Of one mesh, per device; a step is one call of `rows` rows and one update."""

    mesh: ShardingSettings
    source: Source
    argument_bytes: float
    """What the call is given: base, adapter, gradient, rows; and the optimizer's state, which waits beside it."""
    temporary_bytes: float
    """What it makes on the way, results and the program itself."""
    flops: float
    memory_bytes: float
    """Main memory read and written."""
    collectives: Mapping[str, tuple[float, float]]
    """Kind -> (how many, bytes that a device sends)."""
    compile_s: float | None = None
    refused: str = ""
    """Why the compiler gave up: it ran out of the chip's memory."""

    @property
    def peak_bytes(self) -> float:
        return self.argument_bytes + self.temporary_bytes

    @property
    def sent_bytes(self) -> float:
        return sum(sent for _, sent in self.collectives.values())

    def fits(self, topology: Topology) -> bool:
        return not self.refused and self.peak_bytes <= topology.chip.memory_gib * GIB

    def seconds(self, topology: Topology) -> tuple[float, float, float]:
        """(products at peak, memory, collectives), each as if it were alone."""
        chip = topology.chip
        return self.flops / chip.flops, self.memory_bytes / chip.memory_bytes_s, self.sent_bytes / topology.ring_bytes_s

    def roofline_s(self, topology: Topology) -> float:
        """Seconds of a step in which the three overlap wholly."""
        return max(self.seconds(topology))

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Figures:
        collectives = {kind: (count, sent) for kind, (count, sent) in found["collectives"].items()}
        mesh, source = ShardingSettings(**found["mesh"]), Source(found["source"])
        return cls(**{**found, "mesh": mesh, "source": source, "collectives": collectives})


def describe(mesh: ShardingSettings) -> str:
    """`fsdp=8,tensor=8`, as `--mesh` takes it."""
    parts = [f"{name}={getattr(mesh, name)}" for name in MESH_AXES if getattr(mesh, name) > 1]
    return ",".join(parts) or "data=1"


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


# From shapes alone


def estimate(plan: Plan, mesh: ShardingSettings) -> Figures:
    """What a step costs on the mesh, from the shapes of its arrays. Memory is an upper guess."""
    config, sizes = plan.config, {name: getattr(mesh, name) for name in MESH_AXES}
    data_fsdp, tensor = mesh.data * mesh.fsdp, mesh.tensor
    tokens = plan.rows // data_fsdp * plan.bucket
    """Of one device."""
    kept_tokens = tokens / (tensor if plan.bucket % tensor == 0 else 1)

    def share(shape: tuple[int, ...], axes: tuple[str, ...]) -> float:
        """Elements that a device holds."""
        parts = [(part,) if isinstance(part, str) else part or () for part in partition(axes, shape, sizes)]
        return math.prod(shape) / float(math.prod(sizes[name] for part in parts for name in part))

    def gathered(shape: tuple[int, ...], axes: tuple[str, ...]) -> float:
        return share(shape, tuple("norm" if axis == "embed" else axis for axis in axes))

    layer = config.layer_shapes()
    stored = [(name, *part) for name, shape in layer.items() for part in _stored(name, shape, plan.quantize)]
    """(parameter, shape, bytes of an element) of what holds one layer."""
    table = (config.vocab_size, config.embed_dim)
    tables = 2 * share((-(-table[0] // tensor) * tensor, table[1]), ("vocab", "embed")) * (2 - config.tie_embeddings)
    base = tables + config.num_layers * sum(size * share(shape, PARAMETER_AXES[name]) for name, shape, size in stored)
    adapter = 4 * sum(
        share(shape, adapter_axes(name)[part])
        for name, parts in adapter_shapes(config, plan.lora).items()
        for part, shape in parts.items()
    )
    # Adapter, gradient and two moments; the update makes a new adapter and new moments beside the old ones.
    arguments = base + 4 * adapter + 10 * 4 * tokens
    one_layer = sum(size * gathered(shape, PARAMETER_AXES[name]) for name, shape, size in stored)
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    projections = 2 * (tokens * (width + 2 * config.mlp_dim) / tensor + 2 * kept_tokens * config.embed_dim)
    residual = 2 * kept_tokens * config.embed_dim
    kept = {Remat.LAYER: residual, Remat.ATTENTION: residual + projections, Remat.NONE: residual + 3 * projections}
    head = 2 * gathered(table, ("vocab", "embed")) / (1 if table[0] % tensor == 0 else tensor)
    working = 2 * one_layer + 2 * projections + 8 * tokens * config.embed_dim
    logits = 3 * 4 * CHUNK * table[0] / tensor + 6 * tokens * config.embed_dim
    temporaries = config.num_layers * kept[plan.remat] + max(working, head + logits, 3 * adapter)

    matrices = config.num_layers * sum(math.prod(shape) for shape in layer.values() if len(shape) == 2)
    matrix_bytes = config.num_layers * sum(size * math.prod(shape) for _, shape, size in stored if len(shape) == 2)
    passes = {Remat.LAYER: 3, Remat.ATTENTION: 2, Remat.NONE: 2}[plan.remat]
    attention = 0.5 * plan.bucket * config.num_heads * config.head_dim * config.num_layers
    # Forward 2 products, backward 7, and 2 more where attention is computed again.
    attended = (9 if plan.remat is Remat.NONE else 11) * 2 * attention * tokens / tensor
    flops = (2 * passes * matrices + 4 * math.prod(table)) * tokens / tensor + attended

    reads = 3 if plan.remat is Remat.LAYER else 2
    memory = reads * matrix_bytes / tensor + config.num_layers * 12 * (projections + residual)
    fsdp, along = (mesh.fsdp - 1) / mesh.fsdp, (tensor - 1) / tensor
    gathers = 2 * (matrix_bytes / tensor + head) * fsdp
    exchanges = config.num_layers * (11 if plan.remat is Remat.LAYER else 8)
    collectives = {
        "all-gather and reduce-scatter": (0.0, gathers + exchanges * 2 * tokens * config.embed_dim * along),
    }
    return Figures(mesh, Source.ESTIMATED, arguments, temporaries, flops, memory, collectives)


def _stored(name: str, shape: tuple[int, ...], quantize: Quantization) -> list[tuple[tuple[int, ...], int]]:
    """(shape, bytes of an element) of the arrays that hold one layer's parameter."""
    if quantize is Quantization.NONE or name not in PROJECTIONS:
        return [(shape, 2)]
    return [(size, dtype.itemsize) for size, dtype in parts_of((shape[0], shape[1]), quantize)]


def ranked(plan: Plan) -> list[Figures]:
    """Estimates of all meshes, the best first: those that fit by their time, then the others by their memory.

    Raises PlanError if rows and heads spread over none.
    """
    found = [estimate(plan, mesh) for mesh in plan.meshes()]
    if not found:
        raise PlanError(
            f"{plan.rows} rows spread over no mesh of {plan.topology.chips} chips: data × fsdp must divide the rows "
            f"and tensor the {plan.config.num_heads} heads; try {plan.topology.chips} rows"
        )
    room = _MARGIN * plan.topology.chip.memory_gib * GIB

    def rank(figures: Figures) -> tuple[bool, float]:
        full = figures.peak_bytes > room
        return full, figures.peak_bytes if full else sum(figures.seconds(plan.topology))

    return sorted(found, key=rank)


def mends(plan: Plan, mesh: ShardingSettings | None) -> list[str]:
    """What would make a plan fit that does not, by estimate: other meshes, less in a call, a larger slice."""
    room = _MARGIN * plan.topology.chip.memory_gib * GIB
    found = []

    def best(other: Plan) -> Figures | None:
        fitting = [f for f in (estimate(other, mesh) for mesh in other.meshes()) if f.peak_bytes <= room]
        return min(fitting, key=lambda f: sum(f.seconds(other.topology)), default=None)

    def say(how: str, figures: Figures) -> None:
        found.append(f"{how} (about {figures.peak_bytes / GIB:.1f} GiB)")

    same = best(plan)
    if same is not None and same.mesh != mesh:
        say(f"--mesh {describe(same.mesh)}", same)
    if plan.remat is not Remat.LAYER:
        lighter = dataclasses.replace(plan, remat=Remat.LAYER)
        if fits := best(lighter):
            say(f"--remat layer --mesh {describe(fits.mesh)}", fits)
    if plan.quantize is Quantization.NONE:
        smaller = dataclasses.replace(plan, quantize=Quantization.NF4)
        if fits := best(smaller):
            say(f"--quantize nf4 --mesh {describe(fits.mesh)}", fits)
    for rows in (n for n in reversed(_divisors(plan.rows)) if n < plan.rows):
        if fits := best(dataclasses.replace(plan, rows=rows)):
            say(f"--rows {rows} --mesh {describe(fits.mesh)}", fits)
            break
    for larger in plan.topology.larger():
        rows = math.lcm(plan.rows, larger.chips // math.gcd(larger.chips, plan.config.num_heads))
        if fits := best(dataclasses.replace(plan, topology=larger, rows=rows)):
            more = f" --rows {rows}" if rows != plan.rows else ""
            say(f"--topology {larger.name}{more} --mesh {describe(fits.mesh)}", fits)
            break
    return found


# By the compiler


def missing() -> str:
    """Why nothing can be compiled here, and what to do about it; empty where it can."""
    if importlib.util.find_spec("libtpu") is None:
        return "libtpu is not installed: pip install 'headrace[plan]' (or libtpu==" + LIBTPU + ".*)"
    version = importlib.metadata.version("libtpu")
    if not version.startswith(f"{LIBTPU}."):
        return f"libtpu is {version}, and this JAX was built for {LIBTPU}: pip install 'libtpu=={LIBTPU}.*'"
    return ""


def compiled(plan: Plan, mesh: ShardingSettings) -> Figures:
    """Compile the step for the mesh, in a process of its own: seconds to minutes. Raises PlanError if it fails."""
    asked = {"plan": dataclasses.asdict(plan), "mesh": dataclasses.asdict(mesh)}
    asked["plan"]["topology"] = f"{plan.topology.chip.name}:{plan.topology.layout}"
    root = str(Path(__file__).resolve().parents[1])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", "")))),
        "JAX_PLATFORMS": "cpu",
        # What a TPU machine's metadata server would say: libtpu asks for it.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        # Nothing is run: several compilers may be at work at once, and none needs a log.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOG_DIR": "disabled",
        "TPU_STDERR_LOG_LEVEL": "3",
    }
    child = subprocess.run(
        [sys.executable, "-m", "learner.planning"],
        input=json.dumps(asked),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode:
        raise PlanError(f"the compiler failed on {describe(mesh)}: {child.stderr.strip()[-2000:]}")
    return Figures.from_json(json.loads(child.stdout.splitlines()[-1]))


def _compile(plan: Plan, mesh: ShardingSettings) -> Figures:
    """What the child does."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    from learner.sharding import Sharding
    from learner.step import OptimizerSettings, StepProgram

    name = f"{plan.topology.chip.name}:{plan.topology.layout}"
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    program = StepProgram(
        plan.config,
        plan.lora,
        OptimizerSettings(),
        LossSettings(),
        Sharding(mesh, devices),
        rows_per_call=plan.rows,
        remat=plan.remat,
    )
    params, batch = program.abstract_params(jnp.bfloat16, plan.quantize), program.abstract_batch(plan.bucket)
    state = program.abstract_state()
    began = time.perf_counter()
    try:
        accumulate = program.lower_accumulate(params, batch).compile()
        update = program.lower_update(state).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        guess = estimate(plan, mesh)
        return dataclasses.replace(
            guess,
            source=Source.COMPILED,
            temporary_bytes=max(guess.temporary_bytes, _asked_for(str(error)) - guess.argument_bytes),
            compile_s=time.perf_counter() - began,
            refused=str(error).partition("\n")[0].removeprefix("RESOURCE_EXHAUSTED: "),
        )
    compile_s = time.perf_counter() - began

    waiting = sum(map(_held, jax.tree.leaves(state.optimizer)))
    beside = sum(map(_held, jax.tree.leaves((params, batch))))
    first, second = (_memory(done.memory_analysis()) for done in (accumulate, update))
    first, second = (first[0] + waiting, first[1]), (second[0] + beside, second[1])
    arguments, temporaries = max((first, second), key=sum)
    # A call may be all loss tokens: the loop over their chunks is the one whose length the program does not know.
    chunks = math.ceil(plan.rows // (mesh.data * mesh.fsdp) * plan.bucket / CHUNK)
    costs = hlo.costs(accumulate.as_text(), chunks) + hlo.costs(update.as_text())
    return Figures(
        mesh,
        Source.COMPILED,
        arguments,
        temporaries,
        costs.flops,
        costs.bytes,
        {kind: (each.count, each.bytes) for kind, each in costs.collectives.items()},
        compile_s,
    )


def _held(array: Any) -> int:
    """Bytes that a device holds of an abstract array."""
    shape: tuple[int, ...] = array.sharding.shard_shape(array.shape)
    return math.prod(shape) * int(array.dtype.itemsize)


def _memory(found: Any) -> tuple[float, float]:
    """(arguments, what comes on top)."""
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.argument_size_in_bytes, results + found.temp_size_in_bytes + found.generated_code_size_in_bytes


def _asked_for(text: str) -> float:
    """The bytes that a compiler's refusal names first, e.g. `Used 17.2G of 15.75G hbm`; 0 if it names none."""
    found = re.search(r"(?:Used |temporaries \()([\d.]+)([KMGT])", text)
    return float(found[1]) * 2.0 ** {"K": 10, "M": 20, "G": 30, "T": 40}[found[2]] if found else 0.0


def _plan_from_json(found: Mapping[str, Any]) -> Plan:
    config = ModelConfig.from_json(json.dumps(found["config"]))
    lora = LoraSettings(**{**found["lora"], "targets": tuple(found["lora"]["targets"])})
    topology = Topology.parse(found["topology"])
    remat, quantize = Remat(found["remat"]), Quantization(found["quantize"])
    return Plan(config, topology, found["bucket"], found["rows"], lora, remat, quantize)


def main() -> None:
    asked = json.load(sys.stdin)
    figures = _compile(_plan_from_json(asked["plan"]), ShardingSettings(**asked["mesh"]))
    print(json.dumps(figures.to_json()))


if __name__ == "__main__":
    main()
