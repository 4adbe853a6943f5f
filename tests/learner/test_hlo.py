"""What a compiled program costs: loops count as often as they run, slices as slices, collectives by what they send."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from learner import hlo


def compiled(function, *shapes):
    return jax.jit(function).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile().as_text()


def test_a_loop_counts_its_body_as_often_as_it_runs():
    def scanned(x, weights):
        return lax.scan(lambda x, w: (x @ w, None), x, weights)[0]

    text = compiled(scanned, (8, 64), (5, 64, 64))
    product = 2 * 8 * 64 * 64
    assert hlo.costs(text).flops == 5 * product
    # Each trip reads one matrix of the stack, not the stack.
    stack = 5 * 64 * 64 * 4
    assert stack <= hlo.costs(text).bytes < 4 * stack


def test_a_loop_of_unknown_length_runs_as_often_as_the_caller_says():
    def loop(x, w, n):
        return lax.fori_loop(0, n.astype(jnp.int32), lambda i, x: x @ w, x)

    text = compiled(loop, (8, 64), (64, 64), ())
    assert hlo.costs(text, 3).flops == 3 * 2 * 8 * 64 * 64


TPU = """
HloModule jit_f, is_scheduled=true

%gather_fusion (p.0: bf16[2,8], p.1: bf16[4,16]) -> (bf16[4,4], bf16[4,8]) {
  %p.0 = bf16[2,8]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.1 = bf16[4,8]{1,0:T(8,128)(2,1)} all-gather(%p.0), channel_id=7, replica_groups=mesh['a'=2,'b'=3] {'a'}
  %p.1 = bf16[4,16]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %convolution.1 = bf16[4,4]{1,0} convolution(%p.1, %p.1), dim_labels=bf_oi->bf
  ROOT %t = (bf16[4,4]{1,0}, bf16[4,8]{1,0}) tuple(%convolution.1, %all-gather.1)
}

%all-reduce-scatter.3 (input: f32[8,8]) -> f32[2,8] {
  %input = f32[8,8]{1,0} parameter(0)
  %all-reduce.9 = f32[8,8]{1,0} all-reduce(%input), channel_id=9, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %slice.1 = f32[2,8]{1,0} slice(%all-reduce.9), slice={[0:2], [0:8]}
}

%body (p: (s32[], bf16[2,8], bf16[4,16], f32[8,8])) -> (s32[], bf16[2,8], bf16[4,16], f32[8,8]) {
  %p = (s32[], bf16[2,8]{1,0}, bf16[4,16]{1,0:S(1)}, f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %a = bf16[2,8]{1,0:T(8,128)(2,1)} get-tuple-element(%p), index=1
  %b = bf16[4,16]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%p), index=2
  %c = f32[8,8]{1,0} get-tuple-element(%p), index=3
  %fusion.1 = (bf16[4,4]{1,0}, bf16[4,8]{1,0}) fusion(%a, %b), kind=kCustom, calls=%gather_fusion
  %fusion.2 = (bf16[4,4]{1,0}, bf16[4,8]{1,0}) fusion(%a, %b), kind=kCustom, calls=%gather_fusion
  %fusion.3 = f32[2,8]{1,0} fusion(%c), kind=kCustom, calls=%all-reduce-scatter.3
  %kernel.1 = f32[8,8]{1,0} custom-call(%c), custom_call_target="tpu_custom_call", backend_config={"x":{"cost_estimate":{"flops":"100","bytes_accessed":"7"}}}
  ROOT %tuple.1 = (s32[], bf16[2,8]{1,0}, bf16[4,16]{1,0:S(1)}, f32[8,8]{1,0}) tuple(%i, %a, %b, %kernel.1)
}

%condition (p: (s32[], bf16[2,8], bf16[4,16], f32[8,8])) -> pred[] {
  %p = (s32[], bf16[2,8]{1,0}, bf16[4,16]{1,0:S(1)}, f32[8,8]{1,0}) parameter(0)
  %n = s32[]{:T(128)} constant(10)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: (s32[], bf16[2,8], bf16[4,16], f32[8,8])) -> (s32[], bf16[2,8], bf16[4,16], f32[8,8]) {
  %x = (s32[], bf16[2,8]{1,0}, bf16[4,16]{1,0:S(1)}, f32[8,8]{1,0}) parameter(0)
  ROOT %while.1 = (s32[], bf16[2,8]{1,0}, bf16[4,16]{1,0:S(1)}, f32[8,8]{1,0}) while(%x), condition=%condition, body=%body
}
"""  # noqa: E501
"""What libtpu writes: a gather that is carried by two fusions of products, a reduce-scatter as a fused all-reduce, a
kernel that says what it costs, an array in vector memory."""


def test_what_libtpu_writes_is_read():
    costs = hlo.costs(TPU)
    assert costs.flops == 10 * (2 * 2 * 4 * 4 * 16 + 100)
    gather, scatter = costs.collectives["all-gather"], costs.collectives["reduce-scatter"]
    assert (gather.count, gather.bytes) == (10, 10 * 2 * 8 * 2)  # a group of two: each sends its share once
    assert (scatter.count, scatter.bytes) == (10, 10 * 8 * 8 * 4 * 3 / 4)
    assert costs.sent == gather.bytes + scatter.bytes
    products, kernel = 2 * 4 * 4 * 2, 2 * 8 * 8 * 4
    gathered, scattered = (2 * 8 + 4 * 8) * 2, 2 * 8 * 8 * 4 + 2 * 8 * 4
    assert costs.bytes == 10 * (products + kernel + gathered + scattered)


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("replica_groups={{0,1,2},{3,4,5}}, x", 3),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4,'axis_2'=3] {'axis_0','axis_2'}", 6),
        ("channel_id=1", 1),
    ],
)
def test_groups_in_any_notation(groups, size):
    assert hlo.group_size(groups) == size


def test_another_text_is_refused():
    with pytest.raises(ValueError, match="entry"):
        hlo.parse("module @jit_f {}")
