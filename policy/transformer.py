"""The decoder-only transformer that sampler and learner share: one block, two layouts of the same weights.

Parameters are plain pytrees; the computation of a layer is `Block`, whose attention is injected, so that the engine
(KV cache) and the learner (rows of packed segments) compute everything else with the same lines:

    {"embed": [V, D], "final_norm": [D], "unembed": [D, V] if untied, "layers": X}

where X is stacked (one dict of arrays with a leading layer axis; training scans over it) or unrolled (a list of dicts;
CPU sampling runs fastest so). Matrices are [in, out].

Axes: B batch, T sequence, S keys, D embedding, H query heads, K key/value heads, d head dimension, F MLP, V vocabulary,
N any flat list of positions, L layers, r LoRA rank.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from policy.families import family_of
from policy.lora import Adapter, layer_adapter, project

Array = Any
"""A JAX array; `Any` because JAX is not part of the type check."""
Layer = Mapping[str, Array]
Params = dict[str, Any]
Attend = Callable[[Array, Array, Array], Array]
"""(q_BTHd, k_BTKd, v_BTKd) -> o_BTHd; queries and keys are rotated already."""
Kernel = Callable[[Array, Array, Array, Array], Array]
"""(q_BTHd, k_BTKd, v_BTKd, visible_BTT) -> o_BTHd."""

_PROJECTION = "projection"
"""Marks the outputs of the projections for `Remat.ATTENTION`."""
MASKED = -1e30
"""Finite, so that a query that sees nothing gives a mean and not NaN."""
QUERY_BLOCK = 256
"""Queries that `blocked_attention` takes at a time: smaller ones waste less of the triangle and compile longer."""
LOGPROB_CHUNK = 128
"""Positions whose logits exist at a time in `token_logprobs`."""


@dataclass(frozen=True)
class ModelConfig:
    """Everything about a model that is not a weight."""

    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    """The unembedding is the transposed embedding."""
    max_context: int = 2048
    """Tokens the model was trained to see at once."""
    family: str = "llama"

    def __post_init__(self) -> None:
        family_of(self.family)
        sizes = (
            "vocab_size",
            "num_layers",
            "embed_dim",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "mlp_dim",
            "max_context",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, found {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, found {self.head_dim}")

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of one layer's parameters."""
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "input_norm": (self.embed_dim,),
            "q_proj": (self.embed_dim, query),
            "k_proj": (self.embed_dim, key),
            "v_proj": (self.embed_dim, key),
            "o_proj": (query, self.embed_dim),
            "post_norm": (self.embed_dim,),
            "gate_proj": (self.embed_dim, self.mlp_dim),
            "up_proj": (self.embed_dim, self.mlp_dim),
            "down_proj": (self.mlp_dim, self.embed_dim),
        }

    def model_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the parameters outside the layers."""
        shapes: dict[str, tuple[int, ...]] = {
            "embed": (self.vocab_size, self.embed_dim),
            "final_norm": (self.embed_dim,),
        }
        if not self.tie_embeddings:
            shapes["unembed"] = (self.embed_dim, self.vocab_size)
        return shapes

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> ModelConfig:
        """Read what `to_json` wrote; ValueError names unknown and missing fields."""
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError(f"a model config is a JSON object, found {type(found).__name__}")
        fields = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(found.keys() - fields.keys())
        missing = sorted(n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in found)
        if unknown or missing:
            raise ValueError(f"model config: unknown fields {unknown}, missing fields {missing}")
        return cls(**found)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x²) + eps) * weight, the statistics in float32 (Zhang & Sennrich 2019, arXiv:1910.07467)."""
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps)).astype(x.dtype) * weight


def rotate(x_BTHd: Array, positions_BT: Array, theta: float) -> Array:
    """Rotary positions (Su et al. 2021, arXiv:2104.09864), halves paired as in Hugging Face's Llama: i with i + d/2."""
    half = x_BTHd.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = (positions_BT[..., None].astype(jnp.float32) * frequency)[:, :, None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    left, right = x_BTHd[..., :half].astype(jnp.float32), x_BTHd[..., half:].astype(jnp.float32)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1).astype(x_BTHd.dtype)


def attention(q_BTHd: Array, k_BSKd: Array, v_BSKd: Array, visible_BTS: Array) -> Array:
    """Grouped-query attention -> o_BTHd; scores and softmax in float32. Query head h reads key head h // (H / K)."""
    B, T, H, d = q_BTHd.shape
    K = k_BSKd.shape[2]
    q = q_BTHd.reshape(B, T, K, H // K, d)
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k_BSKd, preferred_element_type=jnp.float32) * d**-0.5
    weights = jax.nn.softmax(jnp.where(visible_BTS[:, None, None], scores, MASKED), -1).astype(v_BSKd.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, v_BSKd).reshape(B, T, H, d)


def blocked_attention(q_BTHd: Array, k_BTKd: Array, v_BTKd: Array, visible_BTT: Array) -> Array:
    """`attention` for a lower-triangular mask, as plain matrix products: 2 to 4 times as fast on a CPU.

    A query block multiplies only the keys up to its own end, one key head at a time, because XLA's CPU backend runs
    batched products far below the speed of its matrix product.
    """
    B, T, H, d = q_BTHd.shape
    K = k_BTKd.shape[2]
    G = H // K

    def sequence(q_THd: Array, k_TKd: Array, v_TKd: Array, visible_TT: Array) -> Array:
        heads = []
        for head in range(K):
            q, k, v = q_THd[:, head * G : (head + 1) * G], k_TKd[:, head], v_TKd[:, head]
            blocks = []
            for start in range(0, T, QUERY_BLOCK):
                stop = min(start + QUERY_BLOCK, T)
                rows = q[start:stop].swapaxes(0, 1).reshape(-1, d)
                scores = jnp.dot(rows, k[:stop].T, preferred_element_type=jnp.float32) * d**-0.5
                scores = jnp.where(visible_TT[start:stop, :stop], scores.reshape(G, -1, stop), MASKED)
                weights = jax.nn.softmax(scores, -1).reshape(-1, stop).astype(v.dtype)
                blocks.append((weights @ v[:stop]).reshape(G, -1, d))
            heads.append(jnp.concatenate(blocks, 1))
        return jnp.concatenate(heads).swapaxes(0, 1)

    if B == 1:
        return sequence(q_BTHd[0], k_BTKd[0], v_BTKd[0], visible_BTT[0])[None]
    return lax.map(lambda arrays: sequence(*arrays), (q_BTHd, k_BTKd, v_BTKd, visible_BTT))


def visible(segment_ids_BT: Array, parent_ids_BT: Array) -> Array:
    """bool_BTT, [b, i, j]: token i attends to token j.

    j <= i, and j lies in i's own segment or in its parent's (0 marks padding, which nobody sees but itself).
    """
    T = segment_ids_BT.shape[1]
    own, parent, key = segment_ids_BT[:, :, None], parent_ids_BT[:, :, None], segment_ids_BT[:, None, :]
    index = jnp.arange(T)
    causal = index[:, None] >= index[None, :]
    return (causal & (key != 0) & ((key == own) | (key == parent))) | jnp.eye(T, dtype=bool)


class Remat(StrEnum):
    """What the backward pass of `hidden_states` computes again instead of keeping."""

    NONE = "none"
    """Nothing: fastest, and the attention weights of every layer stay in memory."""
    ATTENTION = "attention"
    """Attention and the elementwise parts; the outputs of the projections are kept. A few percent slower than NONE."""
    LAYER = "layer"
    """Everything but each layer's input: least memory, one more forward pass."""


class Block(nnx.Module):  # type: ignore[misc]  # JAX and flax are not part of the type check
    """One pre-norm decoder layer; its state is exactly the layer's dict of parameters."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        for name, shape in config.layer_shapes().items():
            setattr(self, name, nnx.Param(jnp.zeros(shape)))

    def __call__(
        self,
        x_BTD: Array,
        positions_BT: Array,
        attend: Attend,
        adapter_layer: Adapter | None = None,
        lora_scale: float | Array = 1.0,
    ) -> Array:
        """x_BTD -> x_BTD. `adapter_layer` is one layer's share (`layer_adapter`); targets it lacks stay the base."""
        config = self.config

        def linear(name: str, x: Array) -> Array:
            adapter = None if adapter_layer is None else adapter_layer.get(name)
            return checkpoint_name(project(x, getattr(self, name)[...], adapter, lora_scale), _PROJECTION)

        def heads(name: str, x: Array, count: int) -> Array:
            return linear(name, x).reshape(*x.shape[:2], count, config.head_dim)

        h = rms_norm(x_BTD, self.input_norm[...], config.norm_eps)
        q = rotate(heads("q_proj", h, config.num_heads), positions_BT, config.rope_theta)
        k = rotate(heads("k_proj", h, config.num_kv_heads), positions_BT, config.rope_theta)
        v = heads("v_proj", h, config.num_kv_heads)
        x_BTD = x_BTD + linear("o_proj", attend(q, k, v).reshape(*x_BTD.shape[:2], -1))
        h = rms_norm(x_BTD, self.post_norm[...], config.norm_eps)
        return x_BTD + linear("down_proj", jax.nn.silu(linear("gate_proj", h)) * linear("up_proj", h))


@functools.lru_cache(maxsize=16)
def _block_graph(config: ModelConfig) -> Any:
    return nnx.split(nnx.eval_shape(lambda: Block(config)))[0]


def make_block(config: ModelConfig, layer: Layer) -> Block:
    """The block around one layer's parameters. Costs nothing at run time when called while tracing."""
    return nnx.merge(_block_graph(config), dict(layer))  # type: ignore[no-any-return]


def is_stacked(params: Params) -> bool:
    """Whether the layers are one dict with a leading layer axis (else a list of dicts)."""
    return isinstance(params["layers"], Mapping)


def stack_layers(params: Params) -> Params:
    """The same parameters with stacked layers; numpy stays numpy."""
    if is_stacked(params):
        return params
    layers = params["layers"]
    stack = np.stack if isinstance(layers[0]["q_proj"], np.ndarray) else jnp.stack
    return {**params, "layers": {name: stack([layer[name] for layer in layers]) for name in layers[0]}}


def unstack_layers(params: Params) -> Params:
    """The same parameters with unrolled layers; numpy stays numpy (views)."""
    if not is_stacked(params):
        return params
    layers = params["layers"]
    count = len(layers["q_proj"])
    return {**params, "layers": [{name: array[i] for name, array in layers.items()} for i in range(count)]}


def embed(params: Params, tokens_BT: Array) -> Array:
    """x_BTD, the input of the first block."""
    return jnp.asarray(params["embed"])[tokens_BT]


def final_norm(config: ModelConfig, params: Params, x: Array) -> Array:
    """The norm before the unembedding."""
    return rms_norm(x, params["final_norm"], config.norm_eps)


def unembed(config: ModelConfig, params: Params, hidden: Array) -> Array:
    """Float32 logits [..., V] of hidden states [..., D] that passed the final norm."""
    if config.tie_embeddings:
        return jnp.einsum("...d,vd->...v", hidden, params["embed"], preferred_element_type=jnp.float32)
    return jnp.einsum("...d,dv->...v", hidden, params["unembed"], preferred_element_type=jnp.float32)


def hidden_states(
    config: ModelConfig,
    params: Params,
    adapter: Adapter | None,
    lora_scale: float | Array,
    tokens_BT: Array,
    positions_BT: Array,
    visible_BTT: Array,
    *,
    remat: bool | Remat = Remat.NONE,
    kernel: Kernel | None = None,
) -> Array:
    """hidden_BTD after the final norm; `unembed` turns it into logits.

    Scans over stacked layers, loops over unrolled ones. `remat=True` is `Remat.ATTENTION`. `kernel` replaces the
    attention; `visible_BTT` must be lower triangular, as `visible` makes it.
    """
    remat = (Remat.ATTENTION if remat else Remat.NONE) if isinstance(remat, bool) else Remat(remat)

    if kernel is None:
        kernel = blocked_attention if jax.default_backend() == "cpu" else attention

    def attend(q: Array, k: Array, v: Array) -> Array:
        return kernel(q, k, v, visible_BTT)

    def step(x: Array, layer: Layer, share: Adapter | None) -> Array:
        return make_block(config, layer)(x, positions_BT, attend, share, lora_scale)

    if remat is Remat.ATTENTION:
        step = jax.checkpoint(step, policy=jax.checkpoint_policies.save_only_these_names(_PROJECTION))
    elif remat is Remat.LAYER:
        step = jax.checkpoint(step)
    x = embed(params, tokens_BT)
    if is_stacked(params):
        x, _ = lax.scan(lambda x, xs: (step(x, *xs), None), x, (params["layers"], adapter))
    else:
        for i, layer in enumerate(params["layers"]):
            x = step(x, layer, layer_adapter(adapter, i))
    return final_norm(config, params, x)


def token_logprobs(
    config: ModelConfig,
    params: Params,
    hidden_ND: Array,
    targets_N: Array,
    count: Array | int,
    temperature: Array | float,
    *,
    chunk: int = LOGPROB_CHUNK,
) -> Array:
    """logprobs_N = log_softmax(logits / temperature)[target] for the first `count` entries, 0 for the rest.

    Only ceil(count / chunk) chunks are computed, forward and backward, whatever N is, and logits exist for one chunk
    at a time. `count` may be traced. The gradient flows to `hidden_ND` alone: the base is frozen, and temperature is a
    setting. Temperature 0 (greedy) reports at temperature 1, as the sampler does.
    """
    N = len(hidden_ND)
    if N == 0:
        return jnp.zeros((0,), jnp.float32)
    chunk = min(chunk, N)
    padding = -N % chunk
    hidden = jnp.pad(hidden_ND, ((0, padding), (0, 0)))
    targets = jnp.pad(targets_N.astype(jnp.int32), (0, padding))
    temperature = jnp.asarray(temperature, jnp.float32)
    temperature = jnp.where(temperature > 0, temperature, 1.0)
    count = jnp.clip(jnp.asarray(count, jnp.int32), 0, N)
    head = {name: jnp.asarray(params[name]) for name in ("embed", "unembed") if name in params}
    return _token_logprobs((config, chunk), head, hidden, targets, count, temperature)[:N]


def _chunk_logits(config: ModelConfig, head: Params, hidden_ND: Array, start: Array, chunk: int) -> Array:
    return unembed(config, head, lax.dynamic_slice_in_dim(hidden_ND, start, chunk))


def _forward(
    static: tuple[ModelConfig, int],
    head: Params,
    hidden_ND: Array,
    targets_N: Array,
    count: Array,
    temperature: Array,
    differentiate: bool,
) -> tuple[Array, Array]:
    """(logprobs_N, d logprob_n / d hidden_n as slopes_ND if `differentiate`), both 0 from `count` on."""
    config, chunk = static

    def body(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        logprobs, slopes = carry
        start = i * chunk
        scaled = _chunk_logits(config, head, hidden_ND, start, chunk) / temperature
        normalizer = jax.nn.logsumexp(scaled, -1)
        target = lax.dynamic_slice_in_dim(targets_N, start, chunk)
        logprob = jnp.take_along_axis(scaled, target[:, None], -1, mode="clip")[:, 0] - normalizer
        live = start + jnp.arange(chunk) < count
        logprobs = lax.dynamic_update_slice_in_dim(logprobs, jnp.where(live, logprob, 0.0), start, 0)
        if differentiate:
            slope = _slope(config, head, jnp.exp(scaled - normalizer[:, None]), target) / temperature
            slope = jnp.where(live[:, None], slope, 0.0).astype(slopes.dtype)
            slopes = lax.dynamic_update_slice_in_dim(slopes, slope, start, 0)
        return logprobs, slopes

    zeros = jnp.zeros(hidden_ND.shape[0], jnp.float32), jnp.zeros_like(hidden_ND) if differentiate else jnp.zeros(())
    result: tuple[Array, Array] = lax.fori_loop(0, (count + chunk - 1) // chunk, body, zeros)
    return result


def _slope(config: ModelConfig, head: Params, probabilities_NV: Array, targets_N: Array) -> Array:
    """d log_softmax(z)[target] / d hidden with z = hidden W, as [N, D]: W[target] - softmax(z) W."""
    if config.tie_embeddings:
        return head["embed"][targets_N] - probabilities_NV.astype(head["embed"].dtype) @ head["embed"]
    chosen = jnp.take(head["unembed"], targets_N, axis=1, mode="clip").T
    return chosen - jnp.einsum("nv,dv->nd", probabilities_NV.astype(head["unembed"].dtype), head["unembed"])


def _logprobs(
    static: tuple[ModelConfig, int], head: Params, hidden_ND: Array, targets_N: Array, count: Array, temperature: Array
) -> Array:
    return _forward(static, head, hidden_ND, targets_N, count, temperature, False)[0]


def _logprobs_fwd(
    static: tuple[ModelConfig, int], head: Params, hidden_ND: Array, targets_N: Array, count: Array, temperature: Array
) -> tuple[Array, Array]:
    return _forward(static, head, hidden_ND, targets_N, count, temperature, True)


def _logprobs_bwd(static: tuple[ModelConfig, int], slopes_ND: Array, gradient_N: Array) -> tuple[Any, ...]:
    """A token's log-prob depends on its own hidden state alone, so the backward pass is one product.

    The slopes are made in the forward pass, while the probabilities are at hand: computing the logits again would cost
    a third more.
    """
    return None, (gradient_N[:, None] * slopes_ND).astype(slopes_ND.dtype), None, None, None


_token_logprobs = jax.custom_vjp(_logprobs, nondiff_argnums=(0,))
_token_logprobs.defvjp(_logprobs_fwd, _logprobs_bwd)
