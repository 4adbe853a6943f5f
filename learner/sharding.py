"""Where arrays lie: every axis of a parameter has a logical name, and one table maps the names to mesh axes.

Invariant: the same program runs on one device and on many; only this table and the mesh differ. A dimension that its
mesh axes do not divide is replicated, but the vocabulary, which is filled up with rows that are no tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from policy.families import PROJECTIONS
from policy.quantization import Quantized, parts_of, quantize
from policy.settings import Quantization
from policy.transformer import ModelConfig
from policy.weights import Weights

MESH_AXES = ("data", "fsdp", "tensor")

RULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "rows": ("data", "fsdp"),
        "sequence": ("tensor",),
        "embed": ("fsdp",),
        "heads": ("tensor",),
        "kv_heads": ("tensor",),
        "mlp": ("tensor",),
        "vocab": ("tensor",),
        "layers": (),
        "rank": (),
        "norm": (),
    }
)
"""Logical axis -> mesh axes. Another layout is an edit of this table.

`rows` and `sequence` are axes of activations: the residual stream, which the backward pass keeps for every layer, is
spread over tokens where the products are spread over heads and MLP (Korthikanti et al. 2022, arXiv:2205.05198).
"""
_FILLED = ("embed", "unembed")
"""Parameters whose vocabulary is filled up to a multiple of its mesh axes."""

PARAMETER_AXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "embed": ("vocab", "embed"),
        "unembed": ("vocab", "embed"),
        "final_norm": ("norm",),
        "input_norm": ("norm",),
        "post_norm": ("norm",),
        "q_norm": ("norm",),
        "k_norm": ("norm",),
        "attention_output_norm": ("norm",),
        "mlp_output_norm": ("norm",),
        "q_bias": ("heads",),
        "k_bias": ("kv_heads",),
        "v_bias": ("kv_heads",),
        "q_proj": ("embed", "heads"),
        "k_proj": ("embed", "kv_heads"),
        "v_proj": ("embed", "kv_heads"),
        "o_proj": ("heads", "embed"),
        "gate_proj": ("embed", "mlp"),
        "up_proj": ("embed", "mlp"),
        "down_proj": ("mlp", "embed"),
    }
)
"""Parameter -> logical axes; stacked layers have "layers" in front."""


@dataclass(frozen=True)
class ShardingSettings:
    """The `[sharding]` section of the run file: the mesh. 1 × 1 × 1 is one device."""

    data: int = 1
    """Devices over which rows are spread; each holds all parameters."""
    fsdp: int = 1
    """Devices over which rows and parameters are spread."""
    tensor: int = 1
    """Devices over which heads, MLP and vocabulary are spread."""
    hosts: int = 1
    """Learner processes that share the mesh, each with an equal part of its devices; see docs/hosts.md."""

    def __post_init__(self) -> None:
        for name in (*MESH_AXES, "hosts"):
            if getattr(self, name) < 1:
                raise ValueError(f"sharding.{name} must be at least 1, found {getattr(self, name)}; 1 is no sharding")
        if self.devices % self.hosts:
            raise ValueError(
                f"sharding.hosts must divide data × fsdp × tensor = {self.devices} devices evenly, found {self.hosts}"
            )

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.tensor


def partition(axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mapping[str, int]) -> PartitionSpec:
    """The partition of an array whose dimensions have these logical names, on a mesh of these sizes."""

    def spread(axis: str | None, size: int) -> tuple[str, ...] | None:
        mesh_axes = tuple(name for name in RULES[axis] if mesh[name] > 1) if axis else ()
        return mesh_axes if mesh_axes and size % _size(mesh_axes, mesh) == 0 else None

    return PartitionSpec(*(spread(axis, size) for axis, size in zip(axes, shape, strict=True)))


def _size(mesh_axes: tuple[str, ...], mesh: Mapping[str, int]) -> int:
    return math.prod(mesh[name] for name in mesh_axes)


class Sharding:
    """Places arrays on the mesh of `settings`, over the first of `devices`: by default those of all processes, which
    then must all have a part in it."""

    def __init__(self, settings: ShardingSettings, devices: Sequence[Any] | None = None) -> None:
        devices = jax.devices() if devices is None else devices
        if settings.devices > len(devices):
            raise ValueError(
                f"sharding data × fsdp × tensor must be at most the {len(devices)} devices there are, found "
                f"{settings.data} × {settings.fsdp} × {settings.tensor} = {settings.devices}; lower one of them"
            )
        if settings.hosts > 1 and settings.devices != len(devices):
            raise ValueError(
                f"sharding data × fsdp × tensor must be the {len(devices)} devices of all {settings.hosts} hosts, "
                f"found {settings.devices}"
            )
        shape = (settings.data, settings.fsdp, settings.tensor)
        self.mesh = Mesh(
            # On a TPU an axis lies along links; it may take part of a dimension of the torus.
            create_device_mesh(shape, list(devices[: settings.devices]), allow_split_physical_axes=True),
            MESH_AXES,
            axis_types=(AxisType.Auto,) * len(MESH_AXES),
        )

    def check_rows(self, rows_per_call: int) -> None:
        """Raises ValueError unless the rows of a call spread evenly."""
        if rows_per_call % self.shares:
            raise ValueError(
                f"rows_per_call must be a multiple of sharding.data × sharding.fsdp = {self.shares}, found "
                f"{rows_per_call}"
            )

    @property
    def platform(self) -> str:
        """`cpu`, `gpu` or `tpu`: of the mesh's devices, which need not be there."""
        return str(self.mesh.devices.flat[0].platform)

    @property
    def shares(self) -> int:
        """Shares that the rows of a call are spread in."""
        return _size(RULES["rows"], self.mesh.shape)

    @property
    def rows_spec(self) -> tuple[str, ...]:
        """The mesh axes of rows."""
        return RULES["rows"]

    def spec(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """The partition of an array whose dimensions have these logical names; None is not spread."""
        return partition(axes, shape, self.mesh.shape)

    def vocabulary(self, vocab_size: int) -> int:
        """Rows of the tables: tokens, and what fills up the last share."""
        share = _size(RULES["vocab"], self.mesh.shape)
        return -(-vocab_size // share) * share

    # What is traced

    def constrain(self, array: Any, axes: tuple[str | None, ...]) -> Any:
        """A traced array, laid out by the logical names of its axes (`policy.transformer.Constrain`)."""
        if self.mesh.size == 1:
            return array
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, self.spec(axes, array.shape)))

    def gather(self, layer: Mapping[str, Any], share: Any) -> tuple[Mapping[str, Any], Any]:
        """One layer's parameters and its share of the adapter without the spread of `embed`: the product of rows that
        lie apart needs them so (`policy.transformer.Gather`)."""

        def gathered(array: Any, axes: tuple[str, ...]) -> Any:
            return self.constrain(array, tuple(None if axis == "embed" else axis for axis in axes))

        def parts(parameter: Any, axes: tuple[str, ...]) -> Any:
            """Of a quantised matrix, codes and scales travel, not what they stand for."""
            return jax.tree.map(lambda array: gathered(array, axes), parameter)

        layer = {name: parts(parameter, PARAMETER_AXES[name]) for name, parameter in layer.items()}
        if share is not None:
            share = {
                name: {part: gathered(array, adapter_axes(name)[part][1:]) for part, array in parts.items()}
                for name, parts in share.items()
            }
        return layer, share

    # What is placed

    def load_params(self, weights: Weights, format: Quantization = Quantization.NONE) -> dict[str, Any]:
        """The base, with stacked layers, read from disk straight into the slices that each device holds.

        Projections are quantised to `format`, one matrix at a time.
        """

        def place(name: str, shape: tuple[int, ...], read: Callable[[Any], Any]) -> Any:
            axes = PARAMETER_AXES[name]
            if format is not Quantization.NONE and name in PROJECTIONS:
                at = NamedSharding(self.mesh, self.spec(axes, shape[1:]))

                def layer(i: int) -> Any:
                    return jax.make_array_from_callback(shape[1:], at, lambda index: read((slice(i, i + 1), *index))[0])

                return self._quantized(name, shape, layer, format)
            axes = axes if len(shape) == len(axes) else ("layers", *axes)
            if name in _FILLED:
                tokens, shape = shape[0], (self.vocabulary(shape[0]), *shape[1:])
                read = _filled(read, tokens, shape[0])
            return jax.make_array_from_callback(shape, NamedSharding(self.mesh, self.spec(axes, shape)), read)

        return weights.stacked(place)

    def put_params(self, params: Mapping[str, Any], format: Quantization = Quantization.NONE) -> dict[str, Any]:
        """The base, with stacked layers, on the mesh; projections quantised to `format`."""

        def put(name: str, stack: Any) -> Any:
            axes = PARAMETER_AXES[name]
            if format is not Quantization.NONE and name in PROJECTIONS:
                return self._quantized(name, stack.shape, lambda i: self._put(stack[i], axes), format)
            return self._put(stack, ("layers", *axes))

        layers = {name: put(name, stack) for name, stack in params["layers"].items()}
        outside = {
            name: self._put(self._fill(array) if name in _FILLED else array, PARAMETER_AXES[name])
            for name, array in params.items()
            if name != "layers"
        }
        return {**outside, "layers": layers}

    def _quantized(
        self, name: str, shape: tuple[int, ...], layer: Callable[[int], Any], format: Quantization
    ) -> Quantized:
        """The stack [L, I, O] of a projection's matrices, of which `layer` places one at a time, dense."""
        layers, inputs, outputs = shape
        abstract_stack = self._describe_quantized(name, (inputs, outputs), format, layers)
        at = jax.tree.map(lambda part: part.sharding, abstract_stack)
        stack: Quantized = _empty_stack(abstract_stack, at)
        for i in range(layers):
            # Waiting keeps one dense matrix in memory, not those that the host can read in the meantime.
            stack = jax.block_until_ready(_layer_setter(at)(stack, layer(i), np.int32(i)))
        return stack

    def _describe_quantized(self, name: str, shape: tuple[int, int], format: Quantization, *stack: int) -> Quantized:
        axes = ("layers", *PARAMETER_AXES[name]) if stack else PARAMETER_AXES[name]
        codes, scales = (self._describe((*stack, *size), dtype, axes) for size, dtype in parts_of(shape, format))
        return Quantized(codes, scales, format)

    def _fill(self, table_VD: Any) -> Any:
        more = self.vocabulary(len(table_VD)) - len(table_VD)
        return jnp.pad(table_VD, ((0, more), (0, 0))) if more else table_VD

    def put_adapter(self, adapter: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """The adapter: `a` lies as its matrix's inputs do, `b` as its outputs."""
        return {
            name: {part: self._put(array, adapter_axes(name)[part]) for part, array in parts.items()}
            for name, parts in adapter.items()
        }

    def put_batch(self, array: Any) -> Any:
        """Rows, and lists that hold a share for each share of the rows, are spread over the mesh."""
        return place(array, self._rows)

    @property
    def _rows(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(self.rows_spec))

    # The same places for arrays that are not there.

    def abstract_params(
        self, config: ModelConfig, dtype: Any, format: Quantization = Quantization.NONE
    ) -> dict[str, Any]:
        """The base, with stacked layers; matrices of `dtype`, norms and biases float32, projections of `format`."""

        def describe(name: str, shape: tuple[int, ...], *stack: int) -> Any:
            if format is not Quantization.NONE and name in PROJECTIONS:
                return self._describe_quantized(name, (shape[0], shape[1]), format, *stack)
            kind = dtype if len(shape) > 1 else jnp.float32
            axes = PARAMETER_AXES[name]
            return self._describe((*stack, *shape), kind, ("layers", *axes) if stack else axes)

        layers = {name: describe(name, shape, config.num_layers) for name, shape in config.layer_shapes().items()}
        outside = config.model_shapes()
        for name in _FILLED:
            if name in outside:
                outside[name] = (self.vocabulary(outside[name][0]), *outside[name][1:])
        return {**{name: describe(name, shape) for name, shape in outside.items()}, "layers": layers}

    def abstract_adapter(self, shapes: Mapping[str, Mapping[str, tuple[int, ...]]]) -> dict[str, dict[str, Any]]:
        """A float32 adapter of these shapes (`policy.lora.adapter_shapes`)."""
        return {
            name: {part: self._describe(shape, jnp.float32, adapter_axes(name)[part]) for part, shape in parts.items()}
            for name, parts in shapes.items()
        }

    def abstract_batch(self, array: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self._rows)

    def _describe(self, shape: tuple[int, ...], dtype: Any, axes: tuple[str, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, self.spec(axes, shape)))

    def put_replicated(self, array: Any) -> Any:
        return place(array, self.replicated)

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def _put(self, array: Any, axes: tuple[str, ...]) -> Any:
        return place(array, NamedSharding(self.mesh, self.spec(axes, array.shape)))


def place(array: Any, sharding: Any) -> Any:
    """The array, laid out by `sharding`. Where that is over several processes, each gives its devices their parts of an
    array that is the same in all."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    array = np.asarray(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def adapter_axes(name: str) -> dict[str, tuple[str, ...]]:
    """Logical axes of the two parts of a projection's adapter."""
    inputs, outputs = PARAMETER_AXES[name]
    return {"a": ("layers", inputs, "rank"), "b": ("layers", "rank", outputs)}


def _empty_stack(stack: Quantized, at: Quantized) -> Quantized:
    zeros = jax.jit(lambda: jax.tree.map(lambda part: jnp.zeros(part.shape, part.dtype), stack), out_shardings=at)
    return zeros()  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=16)
def _layer_setter(at: Quantized) -> Callable[..., Quantized]:
    """(stack, matrix, i) -> the stack, whose buffers are used again, with the matrix quantised at place i."""

    def put(stack: Quantized, matrix: Any, i: Any) -> Quantized:
        parts = quantize(matrix, stack.format)
        put_each = jax.lax.dynamic_update_index_in_dim
        placed: Quantized = jax.tree.map(lambda x, part: put_each(x, part, i, 0), stack, parts)
        return placed

    return jax.jit(put, donate_argnums=0, out_shardings=at)  # type: ignore[no-any-return]


def _filled(read: Callable[[Any], Any], tokens: int, rows: int) -> Callable[[Any], Any]:
    """`read` of a table of `tokens` rows, as of one of `rows`, those behind the tokens being 0."""

    def slices(index: Any) -> Any:
        first, last, _ = index[0].indices(rows)
        array = read((slice(min(first, tokens), min(last, tokens)), *index[1:]))
        return np.pad(array, ((0, last - first - len(array)), (0, 0)))

    return slices


def abstract(array: Any) -> jax.ShapeDtypeStruct:
    """The array's shape, type and place, to compile for."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
