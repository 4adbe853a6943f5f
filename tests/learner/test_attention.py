"""Attention over packed rows without a mask in memory equals attention under the mask, and reads few blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner import attention as kernels
from learner.attention import NO_WINDOW, RowLayout, row_attention
from learner.parallel import gpu_attention
from policy.transformer import attention, visible, windowed


def row(tokens, *groups):
    """Segment ids, parents and positions of a row of groups, each (prompt length, lengths of its members)."""
    segments, parents, positions = (np.zeros(tokens, np.int32) for _ in range(3))
    end = number = 0
    for prompt, members in groups:
        number += 1
        own = number
        for parent, length, first in [(0, prompt, 0), *((own, member, prompt) for member in members)]:
            place = slice(end, end + length)
            if parent:
                number += 1
            segments[place], parents[place], positions[place] = number, parent, first + np.arange(length)
            end += length
    assert end <= tokens
    return segments, parents, positions


def layout(*rows):
    return RowLayout(*(np.stack(arrays) for arrays in zip(*rows, strict=True)))


def both(rows, *, window=None, softcap=None, dtype=jnp.float32, heads=(4, 2)):
    """(expected, found): output and gradients of q, k and v, by the mask and by the kernel."""
    rng = np.random.default_rng(0)
    B, T = rows.segment_ids_BT.shape
    q, k, v = (jnp.asarray(rng.normal(size=(B, T, n, 16)), dtype) for n in (heads[0], heads[1], heads[1]))
    weight = rng.normal(size=q.shape).astype(np.float32)
    mask = visible(rows.segment_ids_BT, rows.parent_ids_BT)
    if window is not None:
        mask = windowed(mask, rows.positions_BT, window)

    def by_mask(q, k, v):
        return attention(q, k, v, mask, softcap)

    def by_kernel(q, k, v):
        traced = jnp.int32(NO_WINDOW if window is None else window)
        return row_attention(q, k, v, rows, window=traced, softcap=softcap, interpret=True)

    def total(function):
        def loss(q, k, v):
            o = function(q, k, v)
            return (o.astype(jnp.float32) * weight).sum(), o

        gradients, o = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
        return o, *gradients

    return total(by_mask), total(by_kernel)


def assert_close(rows, tolerance=2e-6, **settings):
    for expected, found in zip(*both(rows, **settings), strict=True):
        assert found.dtype == expected.dtype
        expected, found = np.asarray(expected, np.float32), np.asarray(found, np.float32)
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


SHARED = layout(row(384, (150, [30, 17, 60]), (9, [40, 1])), row(384, (3, [200]), (1, []), (40, [40, 40])))


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (50, 2.0)])
def test_shared_prompts_windows_and_caps(window, softcap, monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK", 128)
    assert_close(SHARED, window=window, softcap=softcap)


def test_rows_of_any_length_and_heads():
    assert_close(layout(row(70, (20, [10, 30]))), heads=(3, 1))


def test_bfloat16_rounds_as_the_mask_does():
    assert_close(layout(row(256, (100, [60, 90]))), dtype=jnp.bfloat16, tolerance=0.02)


def test_blocks_that_no_query_sees_are_not_read():
    """Sixteen members of one prompt: each block of members reads the prompt's blocks and itself."""
    rows = layout(row(4096, (1024, [192] * 16)))
    blocks = kernels._blocks(RowLayout(*map(jnp.asarray, rows)), jnp.int32(NO_WINDOW), 512)
    read = np.asarray(blocks.by_query_Bnn[0])
    seen = read == np.arange(8)
    assert seen.sum(1).tolist() == [1, 2, 3, 4, 4, 3, 4, 4]  # members lie across the ends of some blocks
    causal = 8 * 9 // 2
    assert seen.sum() < 0.7 * causal
    mask = np.asarray(visible(jnp.asarray(rows.segment_ids_BT), jnp.asarray(rows.parent_ids_BT)))[0]
    needed = mask.reshape(8, 512, 8, 512).any((1, 3))
    assert (seen >= needed).all()
    # A block that is not seen asks for one that is there already: nothing is fetched for it.
    assert all(seen[i, read[i, j]] for i in range(8) for j in range(8))
    local = kernels._blocks(RowLayout(*map(jnp.asarray, rows)), jnp.int32(256), 512)
    assert (np.asarray(local.by_query_Bnn[0]) == np.arange(8)).sum() < seen.sum()


@pytest.mark.parametrize(("softcap", "dtype"), [(None, jnp.bfloat16), (2.0, jnp.bfloat16), (None, jnp.float32)])
def test_a_gpu_is_asked_for_the_same_attention(softcap, dtype):
    """By the same call that cuDNN gets, computed by XLA; what cuDNN cannot do is not asked of it."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 384, heads, 16)), dtype) for heads in (4, 2, 2))
    mask = visible(SHARED.segment_ids_BT, SHARED.parent_ids_BT)
    found = gpu_attention(q, k, v, mask, softcap, implementation="xla").astype(jnp.float32)
    expected = attention(q, k, v, mask, softcap).astype(jnp.float32)
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.03 if dtype == jnp.bfloat16 else 1e-6)
