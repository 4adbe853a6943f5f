"""What 8 and 4 bits keep of a matrix, against plain NumPy, and what a product with it computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy.quantization import NF4, Quantized, block_of, parts_of, product, quantize
from policy.settings import Quantization

FORMATS = [Quantization.INT8, Quantization.INT4, Quantization.NF4]
LEVELS = {
    Quantization.INT8: np.arange(-127, 128) / 127,
    Quantization.INT4: np.arange(-7, 8) / 7,
    Quantization.NF4: np.array(NF4),
}


def reference(matrix, levels, block):
    """The nearest of absmax × level, block by block and output by output."""
    dense = np.zeros_like(matrix)
    for start in range(0, len(matrix), block):
        for column in range(matrix.shape[1]):
            values = matrix[start : start + block, column]
            allowed = np.abs(values).max() * levels
            dense[start : start + block, column] = allowed[np.abs(values[:, None] - allowed).argmin(1)]
    return dense


@pytest.fixture(scope="module")
def matrix():
    """Blocks of very different size, one of zeros, and inputs that blocks of 64 do not divide."""
    rng = np.random.default_rng(0)
    drawn = rng.normal(size=(96, 10)) * np.exp(rng.normal(size=(1, 10)))
    drawn[:32, 3] = 0
    return drawn.astype(np.float32)


@pytest.mark.parametrize("format", FORMATS)
def test_a_weight_becomes_the_nearest_level_of_its_block(format, matrix):
    found = np.asarray(jax.jit(lambda w: quantize(w, format).dense(jnp.float32))(matrix))
    expected = reference(matrix, LEVELS[format], 32)
    # A weight midway between two levels may fall to either; nothing else may differ.
    scales = np.abs(matrix).reshape(-1, 32, 10).max(1).repeat(32, 0)
    gap = np.diff(LEVELS[format]).max()
    assert (np.abs(found - expected) <= 1e-6 * scales).mean() > 0.995
    assert (np.abs(found - matrix) <= (gap / 2 + 1e-6) * scales).all()
    assert (found[:32, 3] == 0).all()
    # The largest of a block keeps its value; in nf4 one that is negative, too: its levels end at -1 and 1.
    largest = np.abs(matrix) == scales
    np.testing.assert_allclose(found[largest], matrix[largest], rtol=1e-6)


def test_of_normal_weights_nf4_keeps_more_than_int4():
    weights = np.random.default_rng(1).normal(size=(4096, 4)).astype(np.float32)
    error = {
        format: float(np.square(np.asarray(quantize(weights, format).dense(jnp.float32)) - weights).mean())
        for format in FORMATS
    }
    assert error[Quantization.INT8] < 1e-4 < error[Quantization.NF4] < 0.85 * error[Quantization.INT4]


@pytest.mark.parametrize(("inputs", "block"), [(4096, 64), (576, 64), (96, 32), (24, 8), (7, 1)])
def test_blocks_divide_the_inputs(inputs, block):
    assert block_of(inputs, Quantization.INT8) == block


def test_two_codes_share_a_byte_or_the_matrix_is_refused(matrix):
    for format, share in ((Quantization.INT8, 1.0), (Quantization.INT4, 0.5), (Quantization.NF4, 0.5)):
        held = quantize(matrix, format)
        assert held.codes.nbytes == share * matrix.size
        assert held.scales.nbytes == 4 * matrix.size / 32
        assert parts_of(matrix.shape, format) == tuple((x.shape, x.dtype) for x in (held.codes, held.scales))
    with pytest.raises(ValueError, match="int8 takes any number"):
        quantize(matrix[:7], Quantization.NF4)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_and_its_gradient_are_those_of_the_dense_matrix(format, dtype, matrix):
    x = jnp.asarray(np.random.default_rng(2).normal(size=(5, 96)), dtype)
    held = quantize(matrix, format)

    def value(weight):
        return jax.jit(jax.value_and_grad(lambda x: (product(x, weight).astype(jnp.float32) ** 2).sum()))(x)

    for found, expected in zip(value(held), value(held.dense(dtype)), strict=True):
        assert found.dtype == expected.dtype
        found, expected = (np.asarray(array, np.float32) for array in (found, expected))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_no_dense_matrix_is_kept_for_the_backward_pass(matrix):
    held = jax.tree.map(lambda part: jnp.stack([part] * 4), quantize(np.tile(matrix[:, :1], 96), Quantization.NF4))

    def loss(x, stack):
        return jax.lax.scan(lambda x, weight: (jnp.sin(product(x, weight)), None), x, stack)[0].sum()

    kept = jax.eval_shape(lambda x, stack: jax.vjp(lambda x: loss(x, stack), x)[1], jnp.ones((2, 96)), held)
    sizes = sorted(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))
    assert sizes
    assert sizes[-1] <= held.codes.nbytes < 4 * 96 * 96


def test_a_stack_is_scanned_like_an_array(matrix):
    layers = [quantize(matrix[i : i + 32], Quantization.INT4) for i in (0, 32)]
    stack = jax.tree.map(lambda *parts: jnp.stack(parts), *layers)
    assert isinstance(stack, Quantized)
    _, found = jax.lax.scan(lambda c, weight: (c, weight.dense(jnp.float32)), 0, stack)
    np.testing.assert_array_equal(found, np.stack([layer.dense(jnp.float32) for layer in layers]))
