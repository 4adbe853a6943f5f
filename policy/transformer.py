"""The decoder-only transformer that sampler and learner share: one block, two layouts of the same weights.

Every family of `policy.families` is this one decoder with other values in its `ModelConfig`.

Parameters are plain pytrees; the computation of a layer is `Block`, whose attention is injected, so that the engine
(KV cache) and the learner (rows of packed segments) compute everything else with the same lines:

    {"embed": [V, D], "final_norm": [D], "unembed": [V, D] if untied, "layers": X}

where X is stacked (one dict of arrays with a leading layer axis; training scans over it), unrolled (a list of dicts) or
fused (a list of dicts in which projections of one input are one matrix; sampling runs fastest so). Matrices are
[in, out], but [out, in] where they are fused, as checkpoints have them.

Axes: B batch, T sequence, S keys, D embedding, H query heads, K key/value heads, d head dimension, F MLP, V vocabulary,
N any flat list of positions, L layers, r LoRA rank.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from numpy.typing import NDArray

from policy.families import TEXT_ROOT, family_of, llama3_frequency
from policy.lora import Adapter, columns, layer_adapter, multiply, project, project_columns, rows
from policy.settings import Remat

Array = Any
"""A JAX array; `Any` because JAX is not part of the type check."""
Layer = Mapping[str, Array]
Params = dict[str, Any]
Attend = Callable[[Array, Array, Array], Array]
"""(q_BTHd, k_BTKd, v_BTKd) -> o_BTHd; queries and keys are rotated already."""
Kernel = Callable[..., Array]
"""(q_BTHd, k_BTKd, v_BTKd, visible_BTT, softcap) -> o_BTHd."""
LayerAttend = Callable[[Array, Array, Array, "bool | Array"], Array]
"""`Attend` with a fourth argument: whether the layer is local. A scan over layers of both kinds passes an array."""
Rotation = tuple[Array, Array]
"""Cosines and sines of positions, each [B, T, d / 2]."""
Gather = Callable[[Layer, "Adapter | None"], "tuple[Layer, Adapter | None]"]
"""One layer's parameters and its share of the adapter, laid out as its products need them."""


@dataclass(frozen=True)
class Projection:
    """A matrix [in, out] with its share of the adapter, if it has one."""

    name: str
    weight: Array
    adapter: Any


class Spread(Protocol):
    """How activations lie on a mesh."""

    def constrain(self, x: Array, axes: tuple[str | None, ...]) -> Array:
        """`x`, laid out as the logical names of its axes say; None is an axis that is not spread."""
        ...

    def project(self, x: Array, projections: Sequence[Projection], lora_scale: float | Array) -> Sequence[Array]:
        """`policy.lora.project` of one input, which comes from the residual stream or goes back to it."""
        ...


RESIDUAL = ("rows", "sequence", None)
"""Logical axes of the residual stream [B, T, D] ..."""
WHOLE = ("rows", None, None)
"""... and of what the projections read and the unembedding takes."""
_PROJECTION = "projection"
"""Marks the outputs of the projections for `Remat.ATTENTION`."""
MASKED = -1e30
"""Finite, so that a query that sees nothing gives a mean and not NaN."""
QUERY_BLOCK = 256
"""Queries that `blocked_attention` takes at a time: smaller ones waste less of the triangle and compile longer."""
LOGPROB_CHUNK = 128
"""Positions whose logits exist at a time in `token_logprobs`."""


class Activation(StrEnum):
    """Of the MLP's gate."""

    SILU = "silu"
    GELU = "gelu"
    """Its tanh approximation."""

    def __call__(self, x: Array) -> Array:
        return jax.nn.silu(x) if self is Activation.SILU else jax.nn.gelu(x, approximate=True)


class RopeKind(StrEnum):
    LINEAR = "linear"
    """Positions are divided by `factor` (Chen et al. 2023, arXiv:2306.15595)."""
    LLAMA3 = "llama3"
    """See `policy.families.llama3_frequency`."""


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies were stretched for contexts beyond the one of pre-training."""

    kind: RopeKind
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    """Tokens. This and the two before it belong to `llama3` alone."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", RopeKind(self.kind))
        if not self.factor >= 1:
            raise ValueError(f"rope_scaling.factor must be at least 1, found {self.factor}")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                "rope_scaling.low_freq_factor must be above 0 and below high_freq_factor, found "
                f"{self.low_freq_factor} and {self.high_freq_factor}"
            )

    def apply(self, frequency: float) -> float:
        if self.kind is RopeKind.LINEAR:
            return frequency / self.factor
        return llama3_frequency(
            frequency, self.factor, self.low_freq_factor, self.high_freq_factor, self.original_context
        )


@dataclass(frozen=True)
class ModelConfig:
    """Everything about a model that is not a weight. The defaults are Llama's."""

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
    """Entry of `policy.families.FAMILIES`: how other formats name its tensors."""
    module_root: str = TEXT_ROOT
    """Path of the decoder in the Hugging Face model, which the names in adapters begin with."""
    activation: Activation = Activation.SILU
    attention_bias: bool = False
    """q, k and v have biases."""
    qk_norm: bool = False
    """Queries and keys are normed per head before they are rotated."""
    output_norms: bool = False
    """The outputs of attention and MLP are normed too, before they join the residual."""
    scale_embedding: bool = False
    """Embeddings are multiplied by sqrt(embed_dim)."""
    query_scale: float | None = None
    """Factor of the attention scores; head_dim ** -0.5 by default."""
    attention_softcap: float | None = None
    """Scores s become cap * tanh(s / cap) before the mask (Gemma 2)."""
    final_softcap: float | None = None
    """The same for the logits."""
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    """In local layers a token at position p sees positions above p - sliding_window alone."""
    local_layers: tuple[int, ...] = ()
    local_rope_theta: float | None = None
    """Rotary base of the local layers, which then have no scaling (Gemma 3); that of all layers by default."""

    def __post_init__(self) -> None:
        family_of(self.family)
        object.__setattr__(self, "activation", Activation(self.activation))
        object.__setattr__(self, "local_layers", tuple(self.local_layers))
        scaling: Any = self.rope_scaling  # a mapping where it comes from JSON
        if isinstance(scaling, Mapping):
            object.__setattr__(self, "rope_scaling", RopeScaling(**scaling))
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
        if self.local_layers and not (self.sliding_window and self.sliding_window > 0):
            raise ValueError(f"local_layers need a sliding_window of at least 1, found {self.sliding_window}")
        strange = [i for i in self.local_layers if not 0 <= i < self.num_layers]
        if strange or list(self.local_layers) != sorted(set(self.local_layers)):
            raise ValueError(
                f"local_layers must be ascending and below num_layers = {self.num_layers}, found {self.local_layers}"
            )

    def is_local(self, layer: int) -> bool:
        """Whether the layer sees through the sliding window."""
        return layer in self.local_layers

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of one layer's parameters."""
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
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
        if self.attention_bias:
            shapes |= {"q_bias": (query,), "k_bias": (key,), "v_bias": (key,)}
        if self.qk_norm:
            shapes |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
        if self.output_norms:
            shapes |= {"attention_output_norm": (self.embed_dim,), "mlp_output_norm": (self.embed_dim,)}
        return shapes

    def model_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the parameters outside the layers."""
        shapes: dict[str, tuple[int, ...]] = {
            "embed": (self.vocab_size, self.embed_dim),
            "final_norm": (self.embed_dim,),
        }
        if not self.tie_embeddings:
            shapes["unembed"] = (self.vocab_size, self.embed_dim)
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


FUSED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "o_proj": ("o_proj",),
        "gate_up_proj": ("gate_proj", "up_proj"),
        "down_proj": ("down_proj",),
    }
)
"""Matrix of the fused layout -> the projections whose outputs it holds, one behind the other."""
_GROUPS = {members: name for name, members in FUSED.items()}


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x²) + eps) * weight, computed in float32 (Zhang & Sennrich 2019, arXiv:1910.07467)."""
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps)
    return (normed * weight.astype(jnp.float32)).astype(x.dtype)


@functools.lru_cache(maxsize=16)
def rotary_frequencies(config: ModelConfig, local: bool = False) -> NDArray[np.float32]:
    """Radians per position of each pair of dimensions, [d / 2]; `local` for layers with a sliding window."""
    half, apart = config.head_dim // 2, local and config.local_rope_theta is not None
    theta = config.local_rope_theta if local and config.local_rope_theta is not None else config.rope_theta
    plain = [theta ** (-i / half) for i in range(half)]
    if config.rope_scaling is not None and not apart:
        plain = [config.rope_scaling.apply(frequency) for frequency in plain]
    return np.array(plain, np.float32)


def rotary_angles(positions_BT: Array, frequencies: Array) -> Rotation:
    """(cos, sin), each [B, T, d / 2], of positions; `frequencies` is [d / 2], see `rotary_frequencies`."""
    angles = positions_BT[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BTHd: Array, rotation: Rotation) -> Array:
    """Rotary positions (Su et al. 2021, arXiv:2104.09864), halves paired as in Hugging Face's Llama: i with i + d/2."""
    half = x_BTHd.shape[-1] // 2
    cos, sin = (angles[:, :, None] for angles in rotation)
    left, right = x_BTHd[..., :half].astype(jnp.float32), x_BTHd[..., half:].astype(jnp.float32)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1).astype(x_BTHd.dtype)


def attention_weights(scores: Array, visible: Array, softcap: float | None) -> Array:
    """Float32 softmax over the last axis of the visible scores, capped first where the model caps them."""
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    return jax.nn.softmax(jnp.where(visible, scores, MASKED), -1)


def attention(q_BTHd: Array, k_BSKd: Array, v_BSKd: Array, visible_BTS: Array, softcap: float | None = None) -> Array:
    """Grouped-query attention -> o_BTHd; scores and softmax in float32. Query head h reads key head h // (H / K)."""
    B, T, H, d = q_BTHd.shape
    K = k_BSKd.shape[2]
    q = q_BTHd.reshape(B, T, K, H // K, d)
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k_BSKd, preferred_element_type=jnp.float32) * d**-0.5
    weights = attention_weights(scores, visible_BTS[:, None, None], softcap).astype(v_BSKd.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, v_BSKd).reshape(B, T, H, d)


def blocked_attention(
    q_BTHd: Array, k_BTKd: Array, v_BTKd: Array, visible_BTT: Array, softcap: float | None = None
) -> Array:
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
                weights = attention_weights(scores.reshape(G, -1, stop), visible_TT[start:stop, :stop], softcap)
                weights = weights.reshape(-1, stop).astype(v.dtype)
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


def windowed(visible_BTT: Array, positions_BT: Array, window: int) -> Array:
    """`visible` of a local layer: of what token i sees, what lies less than `window` positions before it."""
    return visible_BTT & (positions_BT[:, :, None] - positions_BT[:, None, :] < window)


class Block(nnx.Module):  # type: ignore[misc]  # JAX and flax are not part of the type check
    """One pre-norm decoder layer; its state is exactly the layer's dict of parameters."""

    def __init__(self, config: ModelConfig, fused: bool = False) -> None:
        self.config, self.fused = config, fused
        shapes = config.layer_shapes()
        if fused:
            for group, members in FUSED.items():
                rows = sum(shapes[name][1] for name in members)
                columns = shapes[members[0]][0]
                shapes = {name: shape for name, shape in shapes.items() if name not in members}
                shapes[group] = (rows, columns)
        for name, shape in shapes.items():
            setattr(self, name, nnx.Param(jnp.zeros(shape)))

    def __call__(
        self,
        x_BTD: Array,
        where: Array | Rotation,
        attend: Attend,
        adapter_layer: Adapter | None = None,
        lora_scale: float | Array = 1.0,
        *,
        local: bool | Array = False,
        spread: Spread | None = None,
    ) -> Array:
        """x_BTD -> x_BTD. `adapter_layer` is one layer's share (`layer_adapter`; `fuse_adapter` for a fused layer);
        targets it lacks stay the base.

        `where` is positions_BT or what `rotary_angles` makes of them; of positions, `local` chooses the rotary
        frequencies. The window itself is the business of `attend`. `spread` lays the activations over a mesh.
        """
        config = self.config
        if not isinstance(where, tuple):
            frequencies = rotary_frequencies(config, local is True)
            if not isinstance(local, bool) and config.local_rope_theta is not None:
                frequencies = jnp.where(local, rotary_frequencies(config, True), frequencies)
            where = rotary_angles(where, frequencies)

        share = adapter_layer or {}

        def constrain(x: Array, axes: tuple[str | None, ...]) -> Array:
            return x if spread is None else spread.constrain(x, axes)

        def linear(x: Array, *names: str) -> tuple[Array, ...]:
            """The projections of one input, which come from the residual stream or go back to it."""
            if self.fused:
                return tuple(rows(y_ON, x.shape[:-1]) for y_ON in linear_columns(columns(x), *names))
            operands = [Projection(name, getattr(self, name).get_value(), share.get(name)) for name in names]
            if spread is not None:
                outputs = spread.project(x, operands, lora_scale)
            else:
                outputs = [project(x, one.weight, one.adapter, lora_scale) for one in operands]
            return tuple(checkpoint_name(y, _PROJECTION) for y in outputs)

        def linear_columns(x_IN: Array, *names: str) -> tuple[Array, ...]:
            group = _GROUPS[names]
            widths = [config.layer_shapes()[name][1] for name in names]
            y_ON = project_columns(x_IN, getattr(self, group)[...], share.get(group), lora_scale, widths)
            return tuple(jnp.split(y_ON, np.cumsum(widths)[:-1]))

        def mlp(x: Array) -> Array:
            if self.fused:  # in columns throughout: turning them costs as much as the activation
                gate, up = linear_columns(columns(x), "gate_proj", "up_proj")
                (y_ON,) = linear_columns(config.activation(gate) * up, "down_proj")
                return rows(y_ON, x.shape[:-1])
            gate, up = linear(x, "gate_proj", "up_proj")
            (y,) = linear(constrain(config.activation(gate) * up, ("rows", None, "mlp")), "down_proj")
            return y

        def norm(name: str, x: Array) -> Array:
            return rms_norm(x, getattr(self, name)[...], config.norm_eps)

        def heads(name: str, y: Array, count: int) -> Array:
            if config.attention_bias:
                y = y + getattr(self, f"{name}_bias")[...].astype(y.dtype)
            y = y.reshape(*y.shape[:2], count, config.head_dim)
            return norm(f"{name}_norm", y) if config.qk_norm and name != "v" else y

        def residual(x: Array) -> Array:
            return constrain(x, RESIDUAL)

        q, k, v = linear(residual(norm("input_norm", x_BTD)), "q_proj", "k_proj", "v_proj")
        q = rotate(heads("q", q, config.num_heads), where)
        k = rotate(heads("k", k, config.num_kv_heads), where)
        v = heads("v", v, config.num_kv_heads)
        if config.query_scale is not None:
            # Every attention divides by sqrt(d).
            q = q * (config.query_scale * config.head_dim**0.5)
        q = constrain(q, ("rows", None, "heads", None))
        k, v = (constrain(x, ("rows", None, "kv_heads", None)) for x in (k, v))
        o = constrain(attend(q, k, v).reshape(*x_BTD.shape[:2], -1), ("rows", None, "heads"))
        h = residual(*linear(o, "o_proj"))
        x_BTD = residual(x_BTD + (norm("attention_output_norm", h) if config.output_norms else h))
        h = residual(mlp(residual(norm("post_norm", x_BTD))))
        return residual(x_BTD + (norm("mlp_output_norm", h) if config.output_norms else h))


@functools.lru_cache(maxsize=16)
def _block_graph(config: ModelConfig, fused: bool) -> Any:
    return nnx.split(nnx.eval_shape(lambda: Block(config, fused)))[0]


def make_block(config: ModelConfig, layer: Layer) -> Block:
    """The block around one layer's parameters. Costs nothing at run time when called while tracing."""
    return nnx.merge(_block_graph(config, "qkv_proj" in layer), dict(layer))  # type: ignore[no-any-return]


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


def fuse_layers(params: Params) -> Params:
    """The same parameters in the fused layout; numpy stays numpy."""
    fused = []
    for layer in unstack_layers(params)["layers"]:
        join = np.concatenate if isinstance(layer["q_proj"], np.ndarray) else jnp.concatenate
        members = {name for group in FUSED.values() for name in group}
        rest = {name: array for name, array in layer.items() if name not in members}
        fused.append({**rest, **{group: join([layer[name].T for name in names]) for group, names in FUSED.items()}})
    return {**params, "layers": fused}


def fuse_adapter(config: ModelConfig, share: Adapter | None) -> Adapter | None:
    """One layer's share of an adapter for a fused layer, numpy: {group: {"a": [M r, in], "b": [G, width, r]}}.

    A group's M projections lie one behind the other in "a". Of "b", each block of `width` outputs, the largest that
    divides all of the group's projections, belongs to one of them. A projection without an adapter has zeros.
    """
    if share is None:
        return None
    fused: Adapter = {}
    for group, names in FUSED.items():
        present = [name for name in names if name in share]
        if not present:
            continue
        shapes = config.layer_shapes()
        rank = share[present[0]]["a"].shape[1]
        width = math.gcd(*(shapes[name][1] for name in names))

        def part(name: str, which: str, shape: tuple[int, int]) -> NDArray[Any]:
            return np.asarray(share[name][which]).T if name in share else np.zeros(shape, np.float32)

        fused[group] = {
            "a": np.concatenate([part(name, "a", (rank, shapes[name][0])) for name in names]),
            "b": np.concatenate([part(name, "b", (shapes[name][1], rank)) for name in names]).reshape(-1, width, rank),
        }
    return fused


def embed(config: ModelConfig, params: Params, tokens_BT: Array) -> Array:
    """x_BTD, the input of the first block."""
    x = jnp.asarray(params["embed"])[tokens_BT]
    return x * jnp.asarray(config.embed_dim**0.5, x.dtype) if config.scale_embedding else x


def final_norm(config: ModelConfig, params: Params, x: Array) -> Array:
    """The norm before the unembedding."""
    return rms_norm(x, params["final_norm"], config.norm_eps)


def unembed(config: ModelConfig, params: Params, hidden: Array) -> Array:
    """Float32 logits [..., V] of hidden states [..., D] that passed the final norm."""
    return _final_cap(config, multiply(unembedding(config, params), hidden, jnp.float32))


def unembedding(config: ModelConfig, params: Params) -> Array:
    """Its matrix [V, D]."""
    return params["embed" if config.tie_embeddings else "unembed"]


def _final_cap(config: ModelConfig, logits: Array) -> Array:
    cap = config.final_softcap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


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
    if kernel is None:
        kernel = blocked_attention if jax.default_backend() == "cpu" else attention
    windowed_BTT = visible_BTT
    if config.local_layers:
        assert config.sliding_window is not None
        windowed_BTT = windowed(visible_BTT, positions_BT, config.sliding_window)

    def attend(q: Array, k: Array, v: Array, local: bool | Array) -> Array:
        if isinstance(local, bool):
            mask = windowed_BTT if local else visible_BTT
        else:
            mask = jnp.where(local, windowed_BTT, visible_BTT)
        return kernel(q, k, v, mask, config.attention_softcap)

    x = embed(config, params, tokens_BT)
    x = run_layers(config, params["layers"], adapter, lora_scale, x, positions_BT, attend, remat=remat)
    return final_norm(config, params, x)


def run_layers(
    config: ModelConfig,
    layers: Any,
    adapter: Adapter | None,
    lora_scale: float | Array,
    x_BTD: Array,
    positions_BT: Array,
    attend: LayerAttend,
    *,
    remat: bool | Remat = Remat.NONE,
    spread: Spread | None = None,
    gather: Gather | None = None,
) -> Array:
    """The residual stream behind the last layer -> x_BTD. `layers` is `params["layers"]`, of either layout.

    `spread` and `gather` lay activations and parameters over a mesh; gathered parameters are gathered again in
    the backward pass, whatever `remat` keeps.
    """
    remat = (Remat.ATTENTION if remat else Remat.NONE) if isinstance(remat, bool) else Remat(remat)

    def step(x: Array, layer: Layer, share: Adapter | None, local: bool | Array) -> Array:
        if gather is not None:
            layer, share = gather(layer, share)

        def attend_here(q: Array, k: Array, v: Array) -> Array:
            return attend(q, k, v, local)

        block = make_block(config, layer)
        return block(x, positions_BT, attend_here, share, lora_scale, local=local, spread=spread)

    local_L = [config.is_local(i) for i in range(config.num_layers)]
    stacked = isinstance(layers, Mapping)
    # A scan computes every layer with the same lines: there, which mask and frequencies is data.
    mixed = stacked and len(set(local_L)) > 1
    static = () if mixed else (3,)
    if remat is Remat.ATTENTION:
        policy = jax.checkpoint_policies.save_only_these_names(_PROJECTION)
        step = jax.checkpoint(step, policy=policy, static_argnums=static)
    elif remat is Remat.LAYER:
        step = jax.checkpoint(step, static_argnums=static)
    elif gather is not None:
        step = jax.checkpoint(step, policy=_all_but_spread, static_argnums=static)
    if mixed:
        x_BTD, _ = lax.scan(lambda x, xs: (step(x, *xs), None), x_BTD, (layers, adapter, np.array(local_L)))
    elif stacked:
        x_BTD, _ = lax.scan(lambda x, xs: (step(x, xs[0], xs[1], local_L[0]), None), x_BTD, (layers, adapter))
    else:
        for i, layer in enumerate(layers):
            x_BTD = step(x_BTD, layer, layer_adapter(adapter, i), local_L[i])
    return x_BTD


def _all_but_spread(primitive: Any, *_: Any, **__: Any) -> bool:
    """A remat policy: keep everything but what was laid out anew. Gathered parameters of all layers would be the whole
    model."""
    return primitive.name not in ("sharding_constraint", "all_gather", "name")


def token_logprobs(
    config: ModelConfig,
    params: Params,
    hidden_ND: Array,
    targets_N: Array,
    count: Array | int,
    temperature: Array | float,
    kept_NK: Array | None = None,
    *,
    chunk: int = LOGPROB_CHUNK,
) -> Array:
    """logprobs_N = log_softmax(logits / temperature)[target] for the first `count` entries, 0 for the rest.

    With `kept_NK` (token ids, -1 where there is none) the softmax of an entry is over its kept ids alone, and over the
    whole vocabulary where it has none; a target that is not kept has the log-prob NaN.

    Only ceil(count / chunk) chunks are computed, forward and backward, whatever N is, and logits exist for one chunk
    at a time. `count` may be traced. The gradient flows to `hidden_ND` alone: the base is frozen, and temperature is a
    setting. Temperature 0 (greedy) reports at temperature 1, as the sampler does.
    """
    N = len(hidden_ND)
    if N == 0:
        return jnp.zeros((0,), jnp.float32)
    static = _Head(config, min(chunk, N))
    padded = _padded(static, hidden_ND, targets_N, count, temperature, kept_NK)
    return _token_logprobs(static, jnp.asarray(unembedding(config, params)), *padded)[:N]


def logprobs_and_slopes(
    config: ModelConfig,
    table_VD: Array,
    hidden_ND: Array,
    targets_N: Array,
    count: Array | int,
    temperature: Array | float,
    kept_NK: Array | None,
    *,
    chunk: int,
    axis: str,
) -> tuple[Array, Array]:
    """`token_logprobs` and the gradient of each by its hidden state, [N] and [N, D], inside a `shard_map`.

    The vocabulary is spread over the mesh axis `axis`: `table_VD` is this device's share of the unembedding, of equal
    size on all. Rows behind the model's vocabulary, which fill up the last share, are no tokens.
    """
    N = len(hidden_ND)
    static = _Head(config, min(chunk, N), axis)
    padded = _padded(static, hidden_ND, targets_N, count, temperature, kept_NK)
    logprobs_N, slopes_ND = _forward(static, table_VD, *padded, differentiate=True)
    return logprobs_N[:N], slopes_ND[:N]


@dataclass(frozen=True)
class _Head:
    """What is fixed of the computation of log-probs."""

    config: ModelConfig
    chunk: int
    axis: str | None = None
    """Mesh axis over which the vocabulary is spread."""

    def logits(self, table_VD: Array, hidden_ND: Array) -> Array:
        if self.axis is None:
            return _final_cap(self.config, multiply(table_VD, hidden_ND, jnp.float32))
        return _final_cap(self.config, jnp.matmul(hidden_ND, table_VD.T, preferred_element_type=jnp.float32))

    def offset(self, share: int) -> Array | int:
        """The first id of this device's `share` ids of the vocabulary."""
        return 0 if self.axis is None else lax.axis_index(self.axis) * share

    def logsumexp(self, x_NV: Array) -> Array:
        if self.axis is None:
            return jax.nn.logsumexp(x_NV, -1)
        most_N = lax.pmax(x_NV.max(-1), self.axis)
        return most_N + jnp.log(self.sum(jnp.exp(x_NV - most_N[:, None]).sum(-1)))

    def take(self, x_NV: Array, ids_N: Array) -> Array:
        """x_n[id_n], where `ids_N` count from this device's first id."""
        found_N = jnp.take_along_axis(x_NV, ids_N[:, None], -1, mode="clip")[:, 0]
        return found_N if self.axis is None else self.sum(jnp.where(self.mine(ids_N, x_NV.shape[1]), found_N, 0.0))

    def sum(self, x: Array) -> Array:
        return x if self.axis is None else lax.psum(x, self.axis)

    @staticmethod
    def mine(ids: Array, share: int) -> Array:
        return (ids >= 0) & (ids < share)


def _padded(
    static: _Head,
    hidden_ND: Array,
    targets_N: Array,
    count: Array | int,
    temperature: Array | float,
    kept_NK: Array | None,
) -> tuple[Array, ...]:
    """The arguments of `_forward` behind the table, filled up to whole chunks."""
    N = len(hidden_ND)
    padding = -N % static.chunk
    if kept_NK is None:
        kept_NK = jnp.zeros((N, 0), jnp.int32)
    kept = jnp.pad(kept_NK.astype(jnp.int32), ((0, padding), (0, 0)), constant_values=-1)
    hidden = jnp.pad(hidden_ND, ((0, padding), (0, 0)))
    targets = jnp.pad(targets_N.astype(jnp.int32), (0, padding))
    temperature = jnp.asarray(temperature, jnp.float32)
    temperature = jnp.where(temperature > 0, temperature, 1.0)
    count = jnp.clip(jnp.asarray(count, jnp.int32), 0, N)
    return hidden, targets, count, temperature, kept


def _forward(
    static: _Head,
    table_VD: Array,
    hidden_ND: Array,
    targets_N: Array,
    count: Array,
    temperature: Array,
    kept_NK: Array,
    *,
    differentiate: bool,
) -> tuple[Array, Array]:
    """(logprobs_N, d logprob_n / d hidden_n as slopes_ND if `differentiate`), both 0 from `count` on."""
    chunk, share = static.chunk, len(table_VD)

    def body(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        logprobs, slopes = carry
        start = i * chunk
        offset = static.offset(share)
        logits = static.logits(table_VD, lax.dynamic_slice_in_dim(hidden_ND, start, chunk))
        scaled = logits / temperature
        target = lax.dynamic_slice_in_dim(targets_N, start, chunk) - offset
        if static.axis is not None:
            scaled = jnp.where(offset + jnp.arange(share) < static.config.vocab_size, scaled, MASKED)
        if kept_NK.shape[1]:
            scaled = _keep(scaled, lax.dynamic_slice_in_dim(kept_NK, start, chunk), offset)
        normalizer = static.logsumexp(scaled)
        chosen = static.take(scaled, target)
        logprob = jnp.where(chosen > MASKED, chosen - normalizer, jnp.nan)
        live = start + jnp.arange(chunk) < count
        logprobs = lax.dynamic_update_slice_in_dim(logprobs, jnp.where(live, logprob, 0.0), start, 0)
        if differentiate:
            slope = _slope(static, table_VD, logits, jnp.exp(scaled - normalizer[:, None]), target) / temperature
            slope = jnp.where(live[:, None], slope, 0.0).astype(slopes.dtype)
            slopes = lax.dynamic_update_slice_in_dim(slopes, slope, start, 0)
        return logprobs, slopes

    zeros = jnp.zeros(hidden_ND.shape[0], jnp.float32), jnp.zeros_like(hidden_ND) if differentiate else jnp.zeros(())
    result: tuple[Array, Array] = lax.fori_loop(0, (count + chunk - 1) // chunk, body, zeros)
    return result


def _keep(scaled_NV: Array, kept_NK: Array, offset: Array | int) -> Array:
    """The logits, whose first id is `offset`, with all but the kept ids masked, in rows that keep any."""
    rows, share = jnp.arange(len(scaled_NV))[:, None], scaled_NV.shape[1]
    index = jnp.where(_Head.mine(kept_NK - offset, share), kept_NK - offset, share)
    allowed = jnp.zeros(scaled_NV.shape, bool).at[rows, index].set(True, mode="drop")
    return jnp.where(allowed | (kept_NK < 0).all(-1, keepdims=True), scaled_NV, MASKED)


def _slope(static: _Head, table_VD: Array, logits_NV: Array, probabilities_NV: Array, targets_N: Array) -> Array:
    """d log_softmax(z)[target] / d hidden with z = f(hidden W), as [N, D]: f'[target] W[target] - (softmax(z) f') W,
    where f is the softcap, or nothing."""
    steepness_N1: Any = 1.0
    if static.config.final_softcap is not None:
        steepness_NV = 1.0 - (logits_NV / static.config.final_softcap) ** 2
        probabilities_NV = probabilities_NV * steepness_NV
        steepness_N1 = static.take(steepness_NV, targets_N)[:, None]
    if static.axis is None:
        return table_VD[targets_N] * steepness_N1 - probabilities_NV.astype(table_VD.dtype) @ table_VD
    # Each share sums over its own tokens; the sum over the shares is taken of both parts at once, in float32.
    hit_N1 = static.mine(targets_N, len(table_VD))[:, None]
    target_ND = jnp.where(hit_N1, table_VD[jnp.clip(targets_N, 0, len(table_VD) - 1)], 0).astype(jnp.float32)
    mean_ND = jnp.matmul(probabilities_NV.astype(table_VD.dtype), table_VD, preferred_element_type=jnp.float32)
    return static.sum(target_ND * steepness_N1 - mean_ND)


def _logprobs(static: _Head, *arguments: Array) -> Array:
    return _forward(static, *arguments, differentiate=False)[0]


def _logprobs_fwd(static: _Head, *arguments: Array) -> tuple[Array, Array]:
    return _forward(static, *arguments, differentiate=True)


def _logprobs_bwd(static: _Head, slopes_ND: Array, gradient_N: Array) -> tuple[Any, ...]:
    """A token's log-prob depends on its own hidden state alone, so the backward pass is one product.

    The slopes are made in the forward pass, while the probabilities are at hand: computing the logits again would cost
    a third more.
    """
    return None, (gradient_N[:, None] * slopes_ND).astype(slopes_ND.dtype), None, None, None, None


_token_logprobs = jax.custom_vjp(_logprobs, nondiff_argnums=(0,))
_token_logprobs.defvjp(_logprobs_fwd, _logprobs_bwd)
