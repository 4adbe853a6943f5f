"""What a compiled program costs, read from its HLO text: products, bytes of memory moved, collectives.

Invariant: the body of a loop counts as often as it runs, which XLA's own cost analysis does not do. A loop whose number
of trips is not written in its condition runs as often as the caller says.

What an instruction moves is what it reads and writes of the device's main memory: arrays in faster memories (`S(1)` in
a TPU's layouts) cost nothing, a slice of an array counts as the slice, and a fusion counts at its border.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_BYTES = {
    "pred": 1,
    "s4": 0.5,
    "u4": 0.5,
    "s8": 1,
    "u8": 1,
    "f8e4m3fn": 1,
    "f8e5m2": 1,
    "s16": 2,
    "u16": 2,
    "f16": 2,
    "bf16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "u64": 8,
    "f64": 8,
}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_FREE = frozenset(
    (
        "add-dependency",
        "after-all",
        "bitcast",
        "call",
        "conditional",
        "constant",
        "get-tuple-element",
        "iota",
        "opt-barrier",
        "parameter",
        "partition-id",
        "replica-id",
        "tuple",
        "while",
    )
)
"""Instructions that touch no memory themselves."""

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_NAME = re.compile(r"%([\w.\-]+)")


@dataclass(frozen=True)
class Array:
    """One array of a type."""

    shape: tuple[int, ...]
    bytes: float
    main_memory: bool

    @property
    def moved(self) -> float:
        return self.bytes if self.main_memory else 0.0


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    root: bool

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        return arrays(self.type)


Computation = dict[str, Instruction]
"""By name, in order."""


@dataclass
class Collectives:
    """Of one kind, per device and run of the program."""

    count: float = 0.0
    bytes: float = 0.0
    """What a device sends, by a ring."""


@dataclass
class Costs:
    """Per device and run of the program."""

    flops: float = 0.0
    """Of matrix products, and what kernels say of themselves."""
    bytes: float = 0.0
    """Main memory read and written."""
    collectives: dict[str, Collectives] = field(default_factory=dict)

    def __add__(self, other: Costs) -> Costs:
        joined = Costs(self.flops + other.flops, self.bytes + other.bytes)
        for each in (self.collectives, other.collectives):
            for kind, more in each.items():
                total = joined.collectives.setdefault(kind, Collectives())
                total.count += more.count
                total.bytes += more.bytes
        return joined

    @property
    def sent(self) -> float:
        """Bytes that a device sends."""
        return sum(each.bytes for each in self.collectives.values())


def costs(text: str, unknown_trips: float = 1.0) -> Costs:
    """The costs of a module; loops of unknown length run `unknown_trips` times."""
    computations, entry = parse(text)
    total = Costs()
    for name, times in _runs(computations, entry, unknown_trips):
        _add(total, computations, computations[name], times)
    return total


def arrays(text: str) -> tuple[Array, ...]:
    """The arrays of a type, of a tuple all of them."""
    found = []
    for kind, dimensions, layout in _ARRAY.findall(text):
        if kind in _BYTES:
            shape = tuple(int(n) for n in dimensions.split(",") if n)
            space = re.search(r"S\((\d+)\)", layout)
            found.append(Array(shape, math.prod(shape) * _BYTES[kind], space is None or space[1] == "0"))
    return tuple(found)


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """(computations by name, the entry's name). Raises ValueError if the text is no HLO module."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            current = computations.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif current is not None and (found := _INSTRUCTION.match(line)):
            kind, rest = _split_type(found[2])
            opcode, _, rest = rest.partition("(")
            inside, attributes = _split_parenthesis(rest)
            root = line.lstrip().startswith("ROOT ")
            operands = tuple(_NAME.findall(inside)) if opcode not in ("constant", "parameter") else (inside,)
            current[found[1]] = Instruction(found[1], kind, opcode.strip(), operands, attributes, root)
    if not entry:
        raise ValueError("an HLO module must have an entry computation")
    return computations, entry


def _split_type(text: str) -> tuple[str, str]:
    """(type, the rest), where a tuple's type is in parentheses."""
    if text.startswith("("):
        inside, rest = _split_parenthesis(text[1:])
        return f"({inside})", rest.lstrip()
    kind, _, rest = text.partition(" ")
    return kind, rest


def _split_parenthesis(text: str) -> tuple[str, str]:
    """(what stands before the parenthesis that closes, what stands behind it)."""
    depth = 1
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[:i], text[i + 1 :]
    return text, ""


# How often computations run


def _runs(computations: Mapping[str, Computation], entry: str, unknown_trips: float) -> Iterator[tuple[str, float]]:
    """(computation, times) for the entry and all that control flow reaches; fusions are part of their caller."""
    waiting = [(entry, 1.0)]
    while waiting:
        name, times = waiting.pop()
        yield name, times
        for instruction in computations[name].values():
            called = _CALLED.findall(instruction.attributes)
            if instruction.opcode == "while":
                trips = trip_count(computations, instruction)
                body = re.search(r"body=%?([\w.\-]+)", instruction.attributes)
                assert body is not None
                waiting.append((body[1], times * (unknown_trips if trips is None else trips)))
            elif instruction.opcode == "conditional":
                branches = _BRANCHES.search(instruction.attributes)
                called += _NAME.findall(branches[1]) if branches else []
                # One of them runs; for lack of knowledge, as often as each other.
                waiting += [(branch, times / len(called)) for branch in called]
            elif instruction.opcode in ("call", "async-start"):
                waiting += [(target, times) for target in called]


def trip_count(computations: Mapping[str, Computation], loop: Instruction) -> int | None:
    """Trips of a `while` whose count is known: as XLA noted it, or as the constant that its condition compares with."""
    if known := re.search(r'known_trip_count"?[:=]\{"?n"?[:=]"?(\d+)', loop.attributes):
        return int(known[1])
    named = re.search(r"condition=%?([\w.\-]+)", loop.attributes)
    condition = computations[named[1]] if named else {}
    for instruction in condition.values():
        if instruction.root and instruction.opcode == "compare" and "direction=LT" in instruction.attributes:
            limit = condition.get(instruction.operands[1])
            if limit is not None and limit.opcode == "constant" and limit.operands[0].isdigit():
                return int(limit.operands[0])
    return None


# What instructions cost


def _add(total: Costs, computations: Mapping[str, Computation], computation: Computation, times: float) -> None:
    seen: set[tuple[str, str, str]] = set()
    for instruction in computation.values():
        total.bytes += times * _moved(computations, computation, instruction)
        for inner, place, part in _inside(computations, computation, instruction):
            total.flops += times * _flops(place, inner)
            kind = inner.opcode.removesuffix("-start")
            if kind not in COLLECTIVES or (kind != "collective-permute" and group_size(inner.attributes) == 1):
                continue
            if part:
                # A collective that overlaps with products appears in each fusion that carries a piece of it.
                channel = re.search(r"channel_id=(\d+)", inner.attributes)
                key = (kind, channel[1] if channel else inner.name, re.sub(r"\{.*", "", inner.type))
                if key in seen:
                    continue
                seen.add(key)
                operands = [a for name in inner.operands for a in place[name].arrays]
                total.bytes += times * sum(a.moved for a in (*operands, *inner.arrays))
            if kind == "all-reduce" and "all-reduce-scatter" in part:
                kind = "reduce-scatter"
            each = total.collectives.setdefault(kind, Collectives())
            each.count += times
            each.bytes += times * _sent(kind, place, inner)


def _inside(
    computations: Mapping[str, Computation], computation: Computation, instruction: Instruction
) -> Iterator[tuple[Instruction, Computation, str]]:
    """(instruction, its computation, the fusion it is part of) of the instruction itself or all that it fuses."""
    if instruction.opcode != "fusion":
        yield instruction, computation, ""
        return
    for name in _CALLED.findall(instruction.attributes):
        for inner in computations[name].values():
            for found, place, _ in _inside(computations, computations[name], inner):
                yield found, place, name


def _flops(computation: Computation, instruction: Instruction) -> float:
    if instruction.opcode == "custom-call":
        found = re.search(r'"cost_estimate":(\{[^}]*\})', instruction.attributes)
        return float(json.loads(found[1]).get("flops", 0)) if found else 0.0
    if instruction.opcode not in ("dot", "convolution"):
        return 0.0
    outputs = math.prod(instruction.arrays[0].shape)
    sides = [computation[name].arrays[0].shape for name in instruction.operands[:2]]
    if instruction.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        summed = math.prod(sides[0][int(n)] for n in contracted[1].split(",") if n) if contracted else 1
    else:
        # Each output sums over the kernel but for the kernel's output features.
        labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.attributes)
        features = sides[1][labels[1].index("o")] if labels else 1
        summed = math.prod(sides[1]) // max(features, 1)
    return 2.0 * outputs * summed


def _sent(kind: str, computation: Computation, instruction: Instruction) -> float:
    """Bytes that one device sends, by a ring over its group."""
    group = group_size(instruction.attributes)
    inputs = sum(a.bytes for name in instruction.operands for a in computation[name].arrays)
    share = (group - 1) / group
    if kind == "all-gather":
        return inputs * (group - 1)
    if kind == "all-reduce":
        return 2 * inputs * share
    return inputs if kind == "collective-permute" else inputs * share


def group_size(attributes: str) -> int:
    """Devices of a collective's group, in any of the notations of replica groups."""
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(listed[1].split(","))
    if shaped := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", attributes):
        return int(shaped[2])
    if meshed := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", meshed[1])}
        return math.prod(sizes.get(name, 1) for name in re.findall(r"'([^']*)'", meshed[2]))
    return 1


def _moved(computations: Mapping[str, Computation], computation: Computation, instruction: Instruction) -> float:
    """Bytes of main memory that the instruction reads and writes."""
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith("-done") or instruction.name.startswith("async-collective-done"):
        return 0.0
    operands = [computation[name] for name in instruction.operands if name in computation]
    if opcode == "slice-start":
        return 2 * sum(a.bytes for a in instruction.arrays[len(operands) : len(operands) + 1])
    if opcode.endswith("-start"):
        # Its type holds its operands again, and what it waits with.
        return sum(a.moved for o in operands for a in o.arrays) + sum(a.moved for a in instruction.arrays[:1])
    if opcode == "fusion":
        (name,) = _CALLED.findall(instruction.attributes)[:1]
        return _moved_by_fusion(computations, computations[name], instruction, operands)
    written = sum(a.moved for a in instruction.arrays)
    if opcode in ("dynamic-slice", "slice", "gather"):
        return written + min(written, sum(a.moved for a in operands[0].arrays))
    if opcode == "dynamic-update-slice":
        return min(written, 2 * sum(a.bytes for a in operands[1].arrays))
    return written + sum(a.moved for o in operands for a in o.arrays)


def _moved_by_fusion(
    computations: Mapping[str, Computation], fused: Computation, instruction: Instruction, operands: list[Instruction]
) -> float:
    """What crosses the border of a fusion, but for the buffers of collectives that are under way beside its products:
    those count once, where the collective does."""
    total = 0.0
    for inner in fused.values():
        if inner.opcode == "parameter" and int(inner.operands[0]) < len(operands):
            whole = sum(a.moved for a in operands[int(inner.operands[0])].arrays)
            total += _read(computations, fused, inner.name, whole)
    root = next((inner for inner in fused.values() if inner.root), None)
    while root is not None and root.opcode == "bitcast" and root.operands[0] in fused:
        root = fused[root.operands[0]]
    parts = [fused.get(name) for name in root.operands] if root is not None and root.opcode == "tuple" else [root]
    for array, part in zip(instruction.arrays, parts, strict=False):
        if part is not None and part.opcode == "dynamic-update-slice":
            update = fused[part.operands[1]]
            total += min(array.moved, sum(a.bytes for a in update.arrays))
        elif part is None or (part.opcode != "parameter" and part.opcode.removesuffix("-start") not in COLLECTIVES):
            total += array.moved
    return total


def _read(computations: Mapping[str, Computation], fused: Computation, name: str, whole: float) -> float:
    """Bytes that a fusion reads of a value of `whole` bytes: of its slices, if slices are all that is made of it."""
    total = 0.0
    for user in fused.values():
        if name not in user.operands or user.opcode in ("tuple", *COLLECTIVES):
            continue
        if user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
            total += sum(a.bytes for a in user.arrays)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
            continue
        elif user.opcode == "bitcast":
            total += _read(computations, fused, user.name, whole)
        elif user.opcode == "fusion":
            (called,) = _CALLED.findall(user.attributes)[:1]
            number = str(user.operands.index(name))
            for inner in computations[called].values():
                if inner.opcode == "parameter" and inner.operands[0] == number:
                    total += _read(computations, computations[called], inner.name, whole)
        else:
            return whole
    return min(total, whole)
