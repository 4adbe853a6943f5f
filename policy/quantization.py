"""Matrices of a frozen base in 8 or 4 bits, as QLoRA trains on them (Dettmers et al. 2023, arXiv:2305.14314).

    w[i, o] = level[code[i, o]] * scale[i // block, o]      block: up to 64 inputs of one output

    int8  levels -127 ... 127, scale = absmax / 127   a code is a byte
    int4  levels -7 ... 7,     scale = absmax / 7     two codes share one
    nf4   the 16 levels of the paper's appendix E, scale = absmax, so do these

Invariants: a block's codes depend on that block alone, so they are the same on any mesh; whatever the backward pass
keeps, it does not keep a dense matrix, but makes it again from the codes; no gradient flows into it.

The arithmetic is our own, for the sake of nf4. On a v5e (libtpu's compiler; [8192, 4096] by [4096, 14336] in bfloat16,
fsdp 2, tensor 4) `qwix.dequantize` 0.1.8 looks nf4 levels up one by one in an array that it makes flat before, which
costs 941 MB of temporaries and 3.6 GB of traffic; the selections below become part of the product: none, and 67 MB.
Its int8 and int4 are as good as these.

Axes: I inputs, O outputs, N blocks, C rows of codes (I of int8, else I / 2).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from policy.families import PROJECTIONS
from policy.settings import Quantization

Array = Any

BLOCK = 64
"""Most inputs that share a scale."""
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Levels of NormalFloat: quantiles of the normal distribution, 0 among them, scaled to end at 1."""
_LARGEST = {Quantization.INT8: 127.0, Quantization.INT4: 7.0, Quantization.NF4: 1.0}
"""The level of a block's absolute maximum."""
_BIAS = 8
"""Added to the levels of int4, so that codes are not negative."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """One matrix [I, O], or a stack of them with an axis in front of every part."""

    codes: Array
    """[C, O]: int8, or uint8 whose low half is the code of an input of the block's first half, and whose high half
    that of the input half a block later. So a block's bytes lie together, however the matrix is spread."""
    scales: Array
    """[N, O], float32."""
    format: Quantization = dataclasses.field(metadata={"static": True})

    def dense(self, dtype: Any) -> Array:
        """The matrix [I, O] that the codes stand for."""
        blocks, outputs = self.scales.shape
        codes = self.codes.reshape(blocks, -1, outputs)
        if self.format is Quantization.INT8:
            levels = codes.astype(jnp.float32)
        else:
            # Both halves by one elementwise expression, which a product can take in; a concatenation it cannot.
            halves = codes[:, None] >> jnp.array([0, 4], jnp.uint8)[:, None, None]
            nibbles = (halves & 15).reshape(blocks, -1, outputs).astype(jnp.int32)
            levels = _nf4(nibbles) if self.format is Quantization.NF4 else nibbles.astype(jnp.float32) - _BIAS
        return (levels * self.scales[:, None]).reshape(-1, outputs).astype(dtype)


def quantize(matrix: Array, format: Quantization) -> Quantized:
    """The nearest codes of a matrix [I, O], and the scales [N, O] of its blocks. Traceable."""
    inputs, outputs = matrix.shape
    blocks = matrix.astype(jnp.float32).reshape(-1, block_of(inputs, format), outputs)
    scales = jnp.abs(blocks).max(1) / _LARGEST[format]
    units = blocks / jnp.where(scales > 0, scales, 1.0)[:, None]
    if format is Quantization.INT8:
        return Quantized(jnp.round(units).astype(jnp.int8).reshape(inputs, outputs), scales, format)
    if format is Quantization.INT4:
        codes = (jnp.round(units) + _BIAS).astype(jnp.uint8)
    else:
        middles = [(low + high) / 2 for low, high in itertools.pairwise(NF4)]
        codes = sum((units > middle).astype(jnp.uint8) for middle in middles)
    low, high = jnp.split(codes, 2, axis=1)
    return Quantized((low | high << 4).reshape(-1, outputs), scales, format)


def rounded(matrix: NDArray[Any], format: Quantization) -> NDArray[Any]:
    """The matrix [I, O] that the codes of this one stand for, in its type."""
    if format is Quantization.NONE:
        return matrix
    return np.asarray(quantize(jnp.asarray(matrix), format).dense(matrix.dtype))


def block_of(inputs: int, format: Quantization) -> int:
    """Inputs that share a scale: the largest power of two up to 64 that divides them.

    Raises ValueError if two of them cannot share a byte.
    """
    block = math.gcd(inputs, BLOCK)
    if block < 2 and format is not Quantization.INT8:
        raise ValueError(f"{format} packs inputs in pairs, and a matrix has {inputs} of them: int8 takes any number")
    return block


def check_shapes(shapes: Mapping[str, tuple[int, ...]], format: Quantization) -> None:
    """Raises ValueError if a projection of these {name: (inputs, outputs)} cannot be held so, and names it."""
    for name, shape in shapes.items():
        if format is not Quantization.NONE and name in PROJECTIONS:
            try:
                block_of(shape[0], format)
            except ValueError as error:
                raise ValueError(f"model.quantize is {format}, which {name} does not allow: {error}") from error


def parts_of(shape: tuple[int, int], format: Quantization) -> tuple[tuple[tuple[int, int], np.dtype[Any]], ...]:
    """(shape, dtype) of the codes and scales of a matrix [I, O]."""
    inputs, outputs = shape
    whole = format is Quantization.INT8
    codes = ((inputs, outputs), np.dtype(np.int8)) if whole else ((inputs // 2, outputs), np.dtype(np.uint8))
    return codes, ((inputs // block_of(inputs, format), outputs), np.dtype(np.float32))


def product(x: Array, weight: Array | Quantized) -> Array:
    """x W, in the type of x, for x [..., I] and W [I, O], quantised or not."""
    return _product(x, weight) if isinstance(weight, Quantized) else x @ weight


def _product_value(x: Array, weight: Quantized) -> Array:
    return x @ weight.dense(x.dtype)


def _product_fwd(x: Array, weight: Quantized) -> tuple[Array, Quantized]:
    return _product_value(x, weight), weight


def _product_bwd(weight: Quantized, gradient: Array) -> tuple[Array, None]:
    return gradient @ weight.dense(gradient.dtype).T, None


_product = jax.custom_vjp(_product_value)
_product.defvjp(_product_fwd, _product_bwd)


def _nf4(codes: Array) -> Array:
    """NF4[codes], by the codes' bits.

    The last bit is a factor, and so is no selection between constants: scans would keep those, each as large as the
    matrix.
    """
    last = (codes & 1).astype(jnp.float32)
    found = [low + last * (high - low) for low, high in zip(NF4[::2], NF4[1::2], strict=True)]
    for bit in (2, 4, 8):
        pairs = zip(found[::2], found[1::2], strict=True)
        found = [jnp.where(codes & bit != 0, high, low) for low, high in pairs]
    return found[0]
