"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685), kept apart from the frozen base.

    y = x W + ((x a) b) * alpha / rank

An adapter is a pytree {target: {"a": [L, in, r], "b": [L, r, out]}} with the layer axis in front; it is never merged
into W. With b = 0 the policy is the base exactly.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from policy.families import NESTED_ROOT, PROJECTIONS, TEXT_ROOT, peft_module
from policy.quantization import product

if TYPE_CHECKING:
    from policy.transformer import ModelConfig

ALL_LINEAR = "all-linear"
"""PEFT's name for all projections."""
_PROBES = (*range(21), 37, 58, 79, 101, 125)
"""Layers at which a regular expression is tried."""

Adapter = dict[str, dict[str, Any]]
"""{target: {"a": [L, in, r], "b": [L, r, out]}}, arrays of numpy or JAX."""


@dataclass(frozen=True)
class LoraSettings:
    """Section `lora` of the run file."""

    rank: int = 16
    """Inner dimension r."""
    alpha: float = 32.0
    """The update is scaled by alpha / rank."""
    targets: tuple[str, ...] = PROJECTIONS
    """The projections that get an adapter: names (`q_proj`), regular expressions that match a name or a whole module
    path (`.*self_attn.*`), or `all-linear`. A projection is adapted in every layer or in none."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank must be at least 1, found {self.rank}")
        if not (self.alpha > 0 and np.isfinite(self.alpha)):
            raise ValueError(f"lora.alpha must be a number above 0, found {self.alpha}; 2 × rank is a usual choice")
        if not self.targets or len(set(self.targets)) != len(self.targets):
            raise ValueError(
                f"lora.targets must name one or more of {', '.join(PROJECTIONS)}, each once, found {list(self.targets)}"
            )
        for target in self.targets:
            if not _matched(target):
                raise ValueError(
                    f"lora.targets must match one or more of {', '.join(PROJECTIONS)}, found {target!r}, which matches "
                    "none"
                )

    @property
    def projections(self) -> tuple[str, ...]:
        """What `targets` stand for, in the order of `PROJECTIONS`."""
        matched = {name for target in self.targets for name in _matched(target)}
        return tuple(name for name in PROJECTIONS if name in matched)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@functools.lru_cache(maxsize=64)
def _matched(target: str) -> tuple[str, ...]:
    """The projections that one target matches, in every layer. Raises ValueError if it tells layers apart."""
    if target == ALL_LINEAR:
        return PROJECTIONS
    if target in PROJECTIONS:
        return (target,)
    try:
        pattern = re.compile(target)
    except re.error as error:
        raise ValueError(f"lora.targets must hold regular expressions, found {target!r}: {error}") from error
    found = []
    for name in PROJECTIONS:
        # PEFT takes the end of a module's path in a list, and a match of the whole path in a text.
        short = pattern.fullmatch(name) or peft_module(name, 0).endswith(f".{target}")
        paths = [[peft_module(name, layer, root) for root in (TEXT_ROOT, NESTED_ROOT)] for layer in _PROBES]
        matches = [bool(short or any(pattern.fullmatch(path) for path in same)) for same in paths]
        if any(matches) and not all(matches):
            raise ValueError(
                f"lora.targets must adapt a projection in every layer or in none, found {target!r}, which matches "
                f"{name} in some layers"
            )
        if all(matches):
            found.append(name)
    return tuple(found)


def adapter_shapes(config: ModelConfig, settings: LoraSettings) -> dict[str, dict[str, tuple[int, int, int]]]:
    """{target: {"a": (L, in, r), "b": (L, r, out)}}."""
    shapes = config.layer_shapes()
    return {
        name: {
            "a": (config.num_layers, shapes[name][0], settings.rank),
            "b": (config.num_layers, settings.rank, shapes[name][1]),
        }
        for name in settings.projections
    }


def init_adapter(config: ModelConfig, settings: LoraSettings, seed: int) -> Adapter:
    """A fresh float32 adapter: a ~ N(0, 1/in), b = 0. A pure function of its arguments, on any machine."""
    generator = np.random.default_rng(seed)
    return {
        name: {
            "a": generator.standard_normal(shape["a"], np.float32) * np.float32(shape["a"][1] ** -0.5),
            "b": np.zeros(shape["b"], np.float32),
        }
        for name, shape in adapter_shapes(config, settings).items()
    }


def zero_adapter(config: ModelConfig, settings: LoraSettings) -> Adapter:
    """The adapter of the base itself: all zeros, float32, of the same shapes as a trained one."""
    return {
        name: {part: np.zeros(size, np.float32) for part, size in shape.items()}
        for name, shape in adapter_shapes(config, settings).items()
    }


def layer_adapter(adapter: Adapter | None, layer: int) -> Adapter | None:
    """Layer `layer`'s share: {target: {"a": [in, r], "b": [r, out]}}; None stays None."""
    if adapter is None:
        return None
    return {name: {part: array[layer] for part, array in parts.items()} for name, parts in adapter.items()}


def project(x: Any, weight: Any, adapter: dict[str, Any] | None, scale: Any) -> Any:
    """x W + ((x a) b) * scale, for x [..., in] and W [in, out]; the plain product without an adapter.

    W may be quantised; the adapter's products stay in the type of x."""
    # Flat, so that the gradients of a and b are plain matrix products: a contraction over two axes at once, B and T, is
    # several times slower on XLA's CPU backend.
    flat = x.reshape(-1, x.shape[-1])
    y = product(flat, weight)
    if adapter is not None:
        y = y + ((flat @ adapter["a"].astype(x.dtype)) @ adapter["b"].astype(x.dtype)) * scale
    return y.reshape(*x.shape[:-1], y.shape[-1])


def project_columns(x_IN: Any, weight: Any, adapter: dict[str, Any] | None, scale: Any, widths: Sequence[int]) -> Any:
    """`project` of a fused layer, on columns: y_ON for W [out, in], whose outputs are those of projections of `widths`,
    one behind the other, and for an adapter as `policy.transformer.fuse_adapter` lays it out; the same sums in another
    order."""
    y = multiply_columns(weight, x_IN)
    if adapter is not None:
        a_RI, b_Gwr = (adapter[part].astype(x_IN.dtype) for part in ("a", "b"))
        blocks, width, rank = b_Gwr.shape
        inner_RN = multiply_columns(a_RI, x_IN) * scale
        if blocks == 1:
            return y + multiply_columns(b_Gwr[0], inner_RN)
        inner_MrN = inner_RN.reshape(len(widths), rank, -1)
        each = [
            jnp.broadcast_to(inner, (of // width, *inner.shape)) for inner, of in zip(inner_MrN, widths, strict=True)
        ]
        y = y + jnp.einsum("gwr,grn->gwn", b_Gwr, jnp.concatenate(each)).reshape(y.shape)
    return y


def multiply(weight: Any, x: Any, dtype: Any = None) -> Any:
    """x Wᵀ for x [..., in] and W [out, in], accumulated and given in `dtype` (that of x by default)."""
    return rows(multiply_columns(weight, columns(x), dtype), x.shape[:-1])


def multiply_columns(weight: Any, x_IN: Any, dtype: Any = None) -> Any:
    """W x for columns x_IN and W [out, in]. One column is a product of matrix and vector.

    On a CPU, for few columns, XLA's matrix product is faster with the large matrix on the left, in order, than x Wᵀ
    (benchmarks/layouts.py).
    """
    if x_IN.shape[1] == 1:
        return jnp.matmul(weight, x_IN[:, 0], preferred_element_type=dtype)[:, None]
    return jnp.matmul(weight, x_IN, preferred_element_type=dtype)


def columns(x: Any) -> Any:
    """x [..., in] as columns x_IN."""
    return _apart(x.reshape(-1, x.shape[-1]).T)


def rows(x_ON: Any, shape: tuple[int, ...]) -> Any:
    """Columns as rows, [*shape, out]."""
    return _apart(x_ON).T.reshape(*shape, x_ON.shape[0])


def _apart(x: Any) -> Any:
    """On a CPU, x as it stands: left alone, XLA folds transposes back into the product they were made for."""
    return jax.lax.optimization_barrier(x) if jax.default_backend() == "cpu" and x.shape[1] > 1 else x
