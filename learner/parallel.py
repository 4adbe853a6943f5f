"""The policy's forward pass on a mesh: what GSPMD would not spread well is written for one device here.

Invariant: values and gradients do not depend on the mesh. A look-up of embeddings moves no part of their table, hidden
states stay with the device of their row, a projection moves the tokens of its rows once (Megatron-LM with sequence
parallelism, arXiv:2205.05198), and the logits of a token exist in shares of the vocabulary, for a chunk of tokens at a
time.

On one CPU this is `policy.transformer.hidden_states` and `token_logprobs`.

Axes: B rows, T tokens, D embedding, V vocabulary, N loss tokens (S shares of N / S, one for each share of the rows).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from learner.attention import NO_WINDOW, RowLayout, row_attention
from learner.sharding import PARAMETER_AXES, Sharding
from policy.lora import Adapter, project
from policy.settings import Remat
from policy.transformer import (
    RESIDUAL,
    WHOLE,
    Kernel,
    LayerAttend,
    ModelConfig,
    Params,
    Projection,
    attention,
    blocked_attention,
    final_norm,
    hidden_states,
    logprobs_and_slopes,
    run_layers,
    token_logprobs,
    unembedding,
    visible,
    windowed,
)

Array = Any
CHUNK = 512
"""Loss tokens of one device whose logits exist at a time: an accelerator wants larger products than a CPU."""


class MeshModel:
    """The functions that `StepProgram` traces: hidden states of rows, and log-probs of their loss tokens."""

    def __init__(self, config: ModelConfig, sharding: Sharding, *, interpret: bool = False) -> None:
        """`interpret` takes the TPU's attention on any machine, slowly."""
        self._config, self._sharding, self._interpret = config, sharding, interpret
        self._tpu = sharding.platform == "tpu" or interpret
        self._spread = self._tpu or sharding.platform != "cpu" or sharding.mesh.size > 1

    def hidden_states(
        self,
        params: Params,
        adapter: Adapter | None,
        lora_scale: float,
        tokens_BT: Array,
        layout: RowLayout,
        *,
        remat: bool | Remat,
    ) -> Array:
        """hidden_BTD after the final norm."""
        config, sharding = self._config, self._sharding
        if not self._spread:
            visible_BTT = visible(layout.segment_ids_BT, layout.parent_ids_BT)
            return hidden_states(
                config, params, adapter, lora_scale, tokens_BT, layout.positions_BT, visible_BTT, remat=remat
            )
        x_BTD = sharding.constrain(self._embed(params["embed"], tokens_BT), RESIDUAL)
        x_BTD = run_layers(
            config,
            params["layers"],
            adapter,
            lora_scale,
            x_BTD,
            layout.positions_BT,
            self._attend_by_kernel(layout) if self._tpu else self._attend_by_mask(layout),
            remat=remat,
            spread=self,
            gather=sharding.gather,
        )
        return sharding.constrain(final_norm(config, params, x_BTD), WHOLE)

    def token_logprobs(
        self,
        params: Params,
        hidden_BTD: Array,
        predecessors_N: Array,
        targets_N: Array,
        counts_S: Array,
        temperature: float,
        kept_NK: Array | None,
    ) -> Array:
        """logprobs_N. Share s of the rows has the loss tokens of share s of N, of which the first `counts_S[s]` count;
        `predecessors_N` are indices into the tokens [B / S, T] of that share."""
        if not self._spread:
            hidden_ND = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])[predecessors_N]
            return token_logprobs(self._config, params, hidden_ND, targets_N, counts_S[0], temperature, kept_NK)
        table_VD = unembedding(self._config, params)
        if kept_NK is None:
            kept_NK = jnp.zeros((len(targets_N), 0), jnp.int32)
        spec = self._sharding.spec(("vocab", "embed"), table_VD.shape)
        head = _Head(self._config, self._sharding.mesh, self._sharding.rows_spec, spec, temperature)
        return _head_logprobs(head, hidden_BTD, table_VD, predecessors_N, targets_N, counts_S, kept_NK)

    # Embedding

    def _embed(self, table_VD: Array, tokens_BT: Array) -> Array:
        """x_BTD. Each device looks its rows of the table up for all tokens of its `fsdp` group, and sends each its own.

        Of the table nothing moves; of the embeddings every device sends and receives as much as it keeps.
        """
        config, sharding = self._config, self._sharding
        vocab, embed = sharding.spec(("vocab", "embed"), table_VD.shape)
        rows, sequence, _ = sharding.spec(RESIDUAL, (*tokens_BT.shape, config.embed_dim))

        def lookup(table: Array, tokens: Array) -> Array:
            if embed:
                tokens = lax.all_gather(tokens, embed, axis=0, tiled=True)
            local = tokens - (lax.axis_index(vocab) * len(table) if vocab else 0)
            x = jnp.where(((local >= 0) & (local < len(table)))[..., None], table[local.clip(0, len(table) - 1)], 0)
            if vocab and sequence == vocab:
                x = lax.psum_scatter(x, vocab, scatter_dimension=1, tiled=True)
            elif vocab:
                x = lax.psum(x, vocab)
            return lax.all_to_all(x, embed, split_axis=0, concat_axis=2, tiled=True) if embed else x

        x_BTD = self._each(
            lookup,
            (PartitionSpec(vocab, embed), PartitionSpec(rows)),
            PartitionSpec(rows, sequence if vocab and sequence == vocab else None),
        )(table_VD, tokens_BT)
        return x_BTD * jnp.asarray(config.embed_dim**0.5, x_BTD.dtype) if config.scale_embedding else x_BTD

    # Projections (`policy.transformer.Spread`)

    def constrain(self, x: Array, axes: tuple[str | None, ...]) -> Array:
        """`x`, laid out as the logical names of its axes say."""
        return self._sharding.constrain(x, axes)

    def project(self, x: Array, projections: Sequence[Projection], lora_scale: float | Array) -> Sequence[Array]:
        """From the residual stream, spread over tokens, to outputs spread over heads or MLP, or the other way."""
        if PARAMETER_AXES[projections[0].name][0] == "embed":
            return self._from_residual(x, projections, lora_scale)
        return [self._to_residual(x, one, lora_scale) for one in projections]

    def _from_residual(self, x_BTD: Array, projections: Sequence[Projection], lora_scale: float | Array) -> list[Array]:
        """Each device gathers the tokens of its rows once, for the outputs that are its own. Where outputs do not
        spread (fewer key heads than devices) it computes all of them for its own tokens."""
        rows, tokens, _ = self._sharding.spec(RESIDUAL, x_BTD.shape)
        own, laid = zip(*(self._laid(one)[1:] for one in projections), strict=True)

        def each(x: Array, operands: tuple[Any, ...]) -> tuple[Array, ...]:
            whole = _gathered(x, tokens) if tokens and any(own) else x
            return tuple(
                project(whole if outputs else x, weight, adapter, lora_scale)
                for outputs, (weight, adapter) in zip(own, operands, strict=True)
            )

        out = tuple(PartitionSpec(rows, None if outputs else tokens, outputs) for outputs in own)
        operands = tuple((one.weight, one.adapter) for one in projections)
        return list(self._each(each, (PartitionSpec(rows, tokens), laid), out)(x_BTD, operands))

    def _to_residual(self, x: Array, projection: Projection, lora_scale: float | Array) -> Array:
        """Each device's inputs give a part of every sum; the sums end spread over tokens."""
        inputs, _, laid = self._laid(projection)
        rows, tokens, _ = self._sharding.spec(RESIDUAL, x.shape)

        def each(x: Array, operand: tuple[Any, Any]) -> Array:
            y = project(x, *operand, lora_scale)
            if inputs and tokens:
                return _scattered(y, inputs)
            return lax.psum(y, inputs) if inputs else y

        if not inputs:  # every device has all inputs: of its own tokens
            x = self.constrain(x, RESIDUAL)
        specs = (PartitionSpec(rows, None if inputs else tokens, inputs), laid)
        return self._each(each, specs, PartitionSpec(rows, tokens))(x, (projection.weight, projection.adapter))

    def _laid(self, projection: Projection) -> tuple[str | None, str | None, Any]:
        """The mesh axes of its inputs and of its outputs, and how its matrix and its adapter lie, gathered
        (`Sharding.gather`). A quantised matrix is spread where both its codes and its scales are."""
        axes = tuple(None if axis == "embed" else axis for axis in PARAMETER_AXES[projection.name])
        parts = [self._sharding.spec(axes, part.shape) for part in jax.tree.leaves(projection.weight)]
        inputs, outputs = (specs[0] if len(set(specs)) == 1 else None for specs in zip(*parts, strict=True))
        weight = jax.tree.map(lambda _: PartitionSpec(inputs, outputs), projection.weight)
        adapter = {"a": PartitionSpec(inputs), "b": PartitionSpec(None, outputs)} if projection.adapter else None
        return inputs, outputs, (weight, adapter)

    # Attention: each device has its rows and its heads.

    def _attend_by_kernel(self, layout: RowLayout) -> LayerAttend:
        config = self._config

        def attend(q: Array, k: Array, v: Array, local: bool | Array) -> Array:
            def each(q: Array, k: Array, v: Array, window: Array, *layout: Array) -> Array:
                k, v = self._own_heads(q, k), self._own_heads(q, v)
                return row_attention(
                    q,
                    k,
                    v,
                    RowLayout(*layout),
                    window=window,
                    softcap=config.attention_softcap,
                    interpret=self._interpret,
                )

            window = NO_WINDOW
            if config.sliding_window is not None:
                window = jnp.where(local, config.sliding_window, NO_WINDOW)
            rows = PartitionSpec(self._sharding.rows_spec)
            specs = (*self._head_specs(q, k), PartitionSpec(), rows, rows, rows)
            return self._each(each, specs, specs[0])(q, k, v, jnp.asarray(window, jnp.int32), *layout)

        return attend

    def _attend_by_mask(self, layout: RowLayout) -> LayerAttend:
        config = self._config
        visible_BTT = visible(layout.segment_ids_BT, layout.parent_ids_BT)
        windowed_BTT = visible_BTT
        if config.sliding_window is not None:
            windowed_BTT = windowed(visible_BTT, layout.positions_BT, config.sliding_window)
        kernels: dict[str, Kernel] = {"cpu": blocked_attention, "gpu": gpu_attention}
        kernel = kernels.get(self._sharding.platform, attention)

        def attend(q: Array, k: Array, v: Array, local: bool | Array) -> Array:
            def each(q: Array, k: Array, v: Array, visible: Array) -> Array:
                k, v = self._own_heads(q, k), self._own_heads(q, v)
                return kernel(q, k, v, visible, config.attention_softcap)

            if isinstance(local, bool):
                mask = windowed_BTT if local else visible_BTT
            else:
                mask = jnp.where(local, windowed_BTT, visible_BTT)
            specs = (*self._head_specs(q, k), PartitionSpec(self._sharding.rows_spec))
            return self._each(each, specs, specs[0])(q, k, v, mask)

        return attend

    def _head_specs(self, q: Array, k: Array) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
        of_q = self._sharding.spec(("rows", None, "heads", None), q.shape)
        of_k = self._sharding.spec(("rows", None, "kv_heads", None), k.shape)
        return of_q, of_k, of_k

    def _own_heads(self, q: Array, k: Array) -> Array:
        """The key heads that this device's query heads read, of all where they do not spread evenly."""
        config = self._config
        group, own = config.num_heads // config.num_kv_heads, q.shape[2]
        if own == config.num_heads or k.shape[2] < config.num_kv_heads:
            return k
        first = lax.axis_index("tensor") * own
        if group % own == 0:
            return lax.dynamic_slice_in_dim(k, first // group, 1, 2)
        return jnp.take(k, (first + jnp.arange(own)) // group, axis=2)

    def _each(self, function: Callable[..., Array], in_specs: Any, out_specs: Any) -> Callable[..., Array]:
        """`function`, on what each device holds."""
        mapped: Callable[..., Array] = jax.shard_map(
            function, mesh=self._sharding.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        return mapped


def gpu_attention(
    q: Array, k: Array, v: Array, visible_BTT: Array, softcap: float | None, *, implementation: str = "cudnn"
) -> Array:
    """cuDNN's attention where it can compute the model's: in half precision, with heads of at most 128 dimensions, and
    without a softcap."""
    d = q.shape[-1]
    if softcap is not None or q.dtype not in (jnp.bfloat16, jnp.float16) or d > 128 or d % 8:
        return attention(q, k, v, visible_BTT, softcap)
    return jax.nn.dot_product_attention(q, k, v, mask=visible_BTT[:, None], implementation=implementation)


# A sum that ends spread over the second axis of an array is compiled, inside a loop, as a whole sum of which each
# device takes its part: twice the traffic. Over an axis of its own in front it stays what it is.


def _gathered(x: Array, axis: str) -> Array:
    """[B, T / n, D] of each device along a mesh axis of n -> [B, T, D]."""
    x_nBtD = lax.all_gather(x, axis)
    return x_nBtD.swapaxes(0, 1).reshape(len(x), -1, x.shape[-1])


def _scattered(y: Array, axis: str) -> Array:
    """[B, T, D] of each device, a part of the sum -> [B, T / n, D] of the sum."""
    y_BntD = y.reshape(len(y), lax.axis_size(axis), -1, y.shape[-1])
    return lax.psum_scatter(y_BntD.swapaxes(0, 1), axis)


# Log-probs. The rule for the gradient stands outside of the shard_map, so that no sum over devices is differentiated.


@dataclass(frozen=True)
class _Head:
    config: ModelConfig
    mesh: Mesh
    rows: Any
    """Mesh axes of the rows, and so of N and S."""
    table: PartitionSpec
    temperature: float

    def each(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        mapped: Callable[..., Any] = jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        return mapped


def _head_forward(
    head: _Head,
    hidden_BTD: Array,
    table_VD: Array,
    predecessors_N: Array,
    targets_N: Array,
    counts_S: Array,
    kept_NK: Array,
) -> tuple[Array, Array]:
    """(logprobs_N, the gradient of each by the hidden state of its predecessor [N, D])."""
    _, embed = head.table

    def each(
        hidden: Array, table: Array, predecessors: Array, targets: Array, count: Array, kept: Array
    ) -> tuple[Array, Array]:
        if embed:
            table = lax.all_gather(table, embed, axis=1, tiled=True)
        hidden = hidden.reshape(-1, hidden.shape[-1])[predecessors]
        return logprobs_and_slopes(
            head.config, table, hidden, targets, count[0], head.temperature, kept, chunk=CHUNK, axis="tensor"
        )

    rows = PartitionSpec(head.rows)
    result: tuple[Array, Array] = head.each(each, (rows, head.table, rows, rows, rows, rows), (rows, rows))(
        hidden_BTD, table_VD, predecessors_N, targets_N, counts_S, kept_NK
    )
    return result


def _head_logprobs_value(head: _Head, *arguments: Array) -> Array:
    return _head_forward(head, *arguments)[0]


def _head_logprobs_fwd(head: _Head, hidden_BTD: Array, *arguments: Array) -> tuple[Array, tuple[Array, Array, int]]:
    logprobs_N, slopes_ND = _head_forward(head, hidden_BTD, *arguments)
    return logprobs_N, (slopes_ND, arguments[1], hidden_BTD.shape[1])


def _head_logprobs_bwd(head: _Head, kept: tuple[Array, Array, int], gradient_N: Array) -> tuple[Any, ...]:
    slopes_ND, predecessors_N, T = kept

    def each(slopes: Array, predecessors: Array, gradient: Array) -> Array:
        more = (gradient[:, None] * slopes).astype(slopes.dtype)
        return jnp.zeros_like(slopes).at[predecessors].add(more).reshape(-1, T, slopes.shape[-1])

    rows = PartitionSpec(head.rows)
    gradient_BTD = head.each(each, (rows, rows, rows), rows)(slopes_ND, predecessors_N, gradient_N)
    return gradient_BTD, None, None, None, None, None


_head_logprobs = jax.custom_vjp(_head_logprobs_value, nondiff_argnums=(0,))
_head_logprobs.defvjp(_head_logprobs_fwd, _head_logprobs_bwd)
