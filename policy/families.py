"""Model families as data: how other formats describe the architectures that `policy.transformer` computes.

A family is one entry of `FAMILIES`: what its config.json and its GGUF fields say in our terms, and what its tensors are
called. A family is known here or not at all: no other module names an architecture or a foreign tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
PROJECTIONS = ATTENTION + MLP
"""The linear layers of a block, each of shape [in, out]; LoRA may adapt any of them."""

Fields = dict[str, Any]
"""Fields of `policy.transformer.ModelConfig`."""
Read = Callable[..., Any]
"""read(name) or read(name, default) of a GGUF file's fields, without the architecture's prefix."""


class Unsupported(ValueError):
    """A model of a known family, of a kind that is not computed here."""


@dataclass(frozen=True)
class Family:
    """One architecture."""

    name: str
    model_types: tuple[str, ...]
    """Values of config.json's `model_type`."""
    hf_fields: Callable[[Mapping[str, Any]], Fields]
    """What a config.json says beyond `_hf_common`. Raises Unsupported."""
    gguf_fields: Callable[[Read, Fields], Fields]
    """What GGUF fields say beyond `_gguf_common`, whose result is the second argument. Raises Unsupported."""
    hf_layer: Mapping[str, str] = field(default_factory=lambda: _HF_LAYER)
    """Our name -> name of a layer's tensor behind `model.layers.{i}.`."""
    norm_offset: float = 0.0
    """Added to the norm weights of Hugging Face checkpoints: Gemma multiplies by 1 + w. GGUF files hold the sum."""
    gguf_permuted: tuple[str, ...] = ()
    """Projections whose output rows GGUF interleaves (pairs of rotary dimensions side by side)."""
    hf_activations: Mapping[str, str] = field(default_factory=lambda: _ACTIVATIONS)
    """Name of an activation in config.json -> ours."""
    hf_defaults: Mapping[str, Any] = field(default_factory=dict)
    """What a config.json means where it is silent: folders of published models leave such keys out."""

    def hf_names(self, num_layers: int) -> dict[tuple[str, int | None], str]:
        """(our name, layer) -> tensor name in a Hugging Face checkpoint."""
        names: dict[tuple[str, int | None], str] = {(name, None): foreign for name, foreign in _HF_MODEL.items()}
        for i in range(num_layers):
            names.update({(name, i): f"model.layers.{i}.{foreign}" for name, foreign in self.hf_layer.items()})
        return names

    def gguf_names(self, num_layers: int) -> dict[tuple[str, int | None], str]:
        """(our name, layer) -> tensor name in a GGUF file."""
        names: dict[tuple[str, int | None], str] = {(name, None): foreign for name, foreign in _GGUF_MODEL.items()}
        for i in range(num_layers):
            names.update({(name, i): f"blk.{i}.{foreign}" for name, foreign in _GGUF_LAYER.items()})
        return names


_HF_MODEL = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "unembed": "lm_head.weight"}
_HF_LAYER: Mapping[str, str] = MappingProxyType(
    {"input_norm": "input_layernorm.weight", "post_norm": "post_attention_layernorm.weight"}
    | {name: f"self_attn.{name}.weight" for name in ATTENTION}
    | {f"{name}_bias": f"self_attn.{name}_proj.bias" for name in "qkv"}
    | {name: f"self_attn.{name}.weight" for name in ("q_norm", "k_norm")}
    | {name: f"mlp.{name}.weight" for name in MLP}
)
_HF_SANDWICH_LAYER: Mapping[str, str] = MappingProxyType(
    {
        **_HF_LAYER,
        "attention_output_norm": "post_attention_layernorm.weight",
        "post_norm": "pre_feedforward_layernorm.weight",
        "mlp_output_norm": "post_feedforward_layernorm.weight",
    }
)
_GGUF_MODEL = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "unembed": "output.weight"}
_GGUF_LAYER = {
    "input_norm": "attn_norm.weight",
    "q_proj": "attn_q.weight",
    "k_proj": "attn_k.weight",
    "v_proj": "attn_v.weight",
    "o_proj": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "attention_output_norm": "post_attention_norm.weight",
    "post_norm": "ffn_norm.weight",
    "gate_proj": "ffn_gate.weight",
    "up_proj": "ffn_up.weight",
    "down_proj": "ffn_down.weight",
    "mlp_output_norm": "post_ffw_norm.weight",
}
GGUF_ROPE_FACTORS = "rope_freqs.weight"
"""Factors by which Llama 3's rotary frequencies are divided; they stand for a rope scaling."""


TEXT_ROOT = "model"
NESTED_ROOT = "model.language_model"
"""Where a Hugging Face model holds its decoder: one that reads text alone, and one that sees pictures too."""


def peft_module(projection: str, layer: int, root: str = TEXT_ROOT) -> str:
    """Path of a projection in a Hugging Face model, as PEFT names it. The same in every family."""
    return f"{root}.layers.{layer}.{'self_attn' if projection in ATTENTION else 'mlp'}.{projection}"


# What config.json files say.


def hf_config(found: Mapping[str, Any]) -> Fields:
    """Fields of ModelConfig, `family` among them, from a config.json. Raises ValueError for what is not supported."""
    text = found.get("text_config")
    if isinstance(text, Mapping):  # a model that sees pictures too: its language model is what trains here
        outer = {"tie_word_embeddings": True, "quantization_config": None}
        outer |= {name: found[name] for name in outer if name in found}
        return {**hf_config({**outer, **text}), "module_root": NESTED_ROOT}
    family = _family_by(lambda family: found.get("model_type") in family.model_types, "model_type", found)
    refused = [
        f"{name} = {found[name]!r}"
        for name, plain in _HF_PLAIN.items()
        if name in found and found[name] not in (plain, None)
    ]
    if refused:
        raise Unsupported(f"a {family.name} model with {', '.join(refused)} is not supported")
    found = {**family.hf_defaults, **found}
    try:
        return {"family": family.name, **_hf_common(found, family), **family.hf_fields(found)}
    except KeyError as error:
        raise Unsupported(f"config.json of a {family.name} model lacks {error}") from error


_HF_PLAIN = {
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "num_experts": 0,
    "num_local_experts": 0,
    "use_bidirectional_attention": False,
    "quantization_config": None,
}
"""Options that change what is computed, and their only supported value."""
_ACTIVATIONS: Mapping[str, str] = MappingProxyType({"silu": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"})
_GEMMA_ACTIVATIONS: Mapping[str, str] = MappingProxyType({**_ACTIVATIONS, "gelu": "gelu"})
"""Gemma 1 was published as "gelu", which means the tanh approximation there and nowhere else."""


def _hf_common(found: Mapping[str, Any], family: Family) -> Fields:
    heads = int(found["num_attention_heads"])
    activation = found.get("hidden_activation") or found.get("hidden_act", "silu")
    if activation not in family.hf_activations:
        known = ", ".join(family.hf_activations)
        raise Unsupported(f"a {family.name} model with activation {activation!r} is not supported; supported: {known}")
    theta, scaling = _hf_rope(found, "full_attention")
    return {
        "vocab_size": int(found["vocab_size"]),
        "num_layers": int(found["num_hidden_layers"]),
        "embed_dim": int(found["hidden_size"]),
        "num_heads": heads,
        "num_kv_heads": int(found.get("num_key_value_heads") or heads),
        "head_dim": int(found.get("head_dim") or found["hidden_size"] // heads),
        "mlp_dim": int(found["intermediate_size"]),
        "norm_eps": float(found["rms_norm_eps"]),
        "tie_embeddings": bool(found.get("tie_word_embeddings", False)),
        "max_context": int(found["max_position_embeddings"]),
        "activation": family.hf_activations[activation],
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


def _hf_rope(found: Mapping[str, Any], layer_type: str) -> tuple[float, Fields | None]:
    """(theta, RopeScaling's fields), of a config.json of either style: one table, or theta and scaling apart."""
    rope = found.get("rope_parameters")
    if isinstance(rope, Mapping):
        rope = rope.get(layer_type, rope)
        theta, scaling = rope.get("rope_theta", found.get("rope_theta", 10_000.0)), rope
    else:
        theta, scaling = found.get("rope_theta", 10_000.0), found.get("rope_scaling") or {}
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise Unsupported(f"partial_rotary_factor = {scaling['partial_rotary_factor']} is not supported")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return float(theta), None
    if kind == "linear":
        return float(theta), {"kind": "linear", "factor": float(scaling["factor"])}
    if kind == "llama3":
        return float(theta), {
            "kind": "llama3",
            "factor": float(scaling["factor"]),
            "low_freq_factor": float(scaling["low_freq_factor"]),
            "high_freq_factor": float(scaling["high_freq_factor"]),
            "original_context": int(scaling["original_max_position_embeddings"]),
        }
    raise Unsupported(f"rope type {kind!r} is not supported; supported: default, linear, llama3")


def _hf_local(found: Mapping[str, Any], default: Callable[[int], bool]) -> Fields:
    """The layers with a sliding window: as `layer_types` lists them, else by the family's own rule."""
    count, types = int(found["num_hidden_layers"]), found.get("layer_types")
    if found.get("sliding_window") is None:
        return {}
    if types is None:
        local = tuple(i for i in range(count) if default(i))
    else:
        unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
        if unknown or len(types) != count:
            raise Unsupported(f"layer_types must name full_attention or sliding_attention {count} times, found {types}")
        local = tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
    return {"sliding_window": int(found["sliding_window"]), "local_layers": local} if local else {}


def _no_attention_bias(found: Mapping[str, Any]) -> None:
    if found.get("attention_bias"):
        raise Unsupported("attention_bias = true is not supported: it adds a bias to o_proj as well")


def _hf_llama(found: Mapping[str, Any]) -> Fields:
    _no_attention_bias(found)
    return {}


def _hf_mistral(found: Mapping[str, Any]) -> Fields:
    return _hf_local(found, lambda i: True)


def _hf_qwen2(found: Mapping[str, Any]) -> Fields:
    local = {}
    if found.get("use_sliding_window"):
        local = _hf_local(found, lambda i: i >= int(found["max_window_layers"]))
    return {"attention_bias": True, **local}


def _hf_qwen3(found: Mapping[str, Any]) -> Fields:
    _no_attention_bias(found)
    return {**_hf_qwen2(found), "attention_bias": False, "qk_norm": True}


def _hf_gemma(found: Mapping[str, Any]) -> Fields:
    _no_attention_bias(found)
    return {"activation": "gelu", "scale_embedding": True}


def _hf_gemma2(found: Mapping[str, Any]) -> Fields:
    return {
        **_hf_gemma(found),
        **_hf_local(found, lambda i: i % 2 == 0),
        "output_norms": True,
        "query_scale": float(found["query_pre_attn_scalar"]) ** -0.5,
        "attention_softcap": _optional(found.get("attn_logit_softcapping")),
        "final_softcap": _optional(found.get("final_logit_softcapping")),
    }


def _hf_gemma3(found: Mapping[str, Any]) -> Fields:
    pattern = int(found.get("sliding_window_pattern") or 6)
    local = _hf_local(found, lambda i: (i + 1) % pattern != 0)
    rope = found.get("rope_parameters")
    theta = _hf_rope(found, "sliding_attention")[0] if isinstance(rope, Mapping) else found["rope_local_base_freq"]
    return {
        **_hf_gemma2(found),
        **local,
        "qk_norm": True,
        "local_rope_theta": float(theta) if local else None,
    }


def _optional(value: Any) -> float | None:
    return None if value is None else float(value)


# What GGUF files say.


def gguf_config(architecture: str, read: Read, factors: tuple[float, ...] | None) -> Fields:
    """Fields of ModelConfig but `vocab_size` and `tie_embeddings`, which the tensors tell.

    `read` gives the file's fields; `factors` are those of the tensor `GGUF_ROPE_FACTORS`. Raises ValueError.
    """
    family = _family_by(lambda family: family.name == architecture, "GGUF architecture", {"": architecture})
    common = _gguf_common(read, family, factors)
    return {"family": family.name, **common, **family.gguf_fields(read, common)}


def _gguf_common(read: Read, family: Family, factors: tuple[float, ...] | None) -> Fields:
    embed_dim, heads = int(read("embedding_length")), int(read("attention.head_count"))
    head_dim = int(read("attention.key_length", embed_dim // heads))
    refused = [
        f"{name} = {found!r} (supported: {supported!r})"
        for name, found, supported in (
            ("rope.dimension_count", int(read("rope.dimension_count", head_dim)), head_dim),
            ("attention.value_length", int(read("attention.value_length", head_dim)), head_dim),
            ("expert_count", int(read("expert_count", 0)), 0),
        )
        if found != supported
    ]
    kind = str(read("rope.scaling.type", "none"))
    if kind not in ("none", "linear"):
        refused.append(f"rope.scaling.type = {kind!r} (supported: 'none', 'linear')")
    if refused:
        raise Unsupported(f"a {family.name} model with {', '.join(refused)} is not supported")
    scaling: Fields | None = None
    if kind == "linear" and float(read("rope.scaling.factor", 1.0)) != 1.0:
        scaling = {"kind": "linear", "factor": float(read("rope.scaling.factor"))}
    theta = float(read("rope.freq_base", 10_000.0))
    if factors is not None:
        scaling = _llama3_scaling(theta, factors)
    return {
        "num_layers": int(read("block_count")),
        "embed_dim": embed_dim,
        "num_heads": heads,
        "num_kv_heads": int(read("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "mlp_dim": int(read("feed_forward_length")),
        "norm_eps": float(read("attention.layer_norm_rms_epsilon")),
        "max_context": int(read("context_length")),
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


def _llama3_scaling(theta: float, factors: tuple[float, ...]) -> Fields:
    """The scaling that GGUF wrote down as factors. Llama 3.1 to 3.3 differ in `factor` alone."""
    scaling = {
        "kind": "llama3",
        "factor": max(factors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_context": 8192,
    }
    for i, found in enumerate(factors):
        frequency = theta ** (-i / len(factors))
        expected = frequency / llama3_frequency(frequency, max(factors), 1.0, 4.0, 8192)
        if not math.isclose(found, expected, rel_tol=1e-3):
            raise Unsupported(
                f"{GGUF_ROPE_FACTORS} holds factors that are not Llama 3's: {found} at {i}, not {expected}"
            )
    return scaling


def llama3_frequency(frequency: float, factor: float, low: float, high: float, original: int) -> float:
    """A rotary frequency [radians per position] as Llama 3.1 scales it: long waves are stretched by `factor`, short
    ones stay, those between are blended (Llama Team 2024, arXiv:2407.21783, and the model's published code)."""
    wavelength = 2 * math.pi / frequency
    if wavelength > original / low:
        return frequency / factor
    if wavelength < original / high:
        return frequency
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _gguf_plain(read: Read, common: Fields) -> Fields:
    window = read("attention.sliding_window", 0)
    return {"sliding_window": int(window), "local_layers": tuple(range(common["num_layers"]))} if window else {}


def _gguf_qwen2(read: Read, common: Fields) -> Fields:
    return {"attention_bias": True}


def _gguf_qwen3(read: Read, common: Fields) -> Fields:
    return {"qk_norm": True}


def _gguf_gemma(read: Read, common: Fields) -> Fields:
    return {"activation": "gelu", "scale_embedding": True}


def _gguf_sandwich(read: Read, common: Fields, pattern: int, large: int) -> Fields:
    """Gemma 2 and 3. The query scale is in no field: the largest model (`large` layers) has a rule of its own."""
    count = common["num_layers"]
    per_head = common["embed_dim"] / common["num_heads"] if count == large else common["head_dim"]
    window = int(read("attention.sliding_window", 0))
    local = tuple(i for i in range(count) if (i + 1) % pattern) if window else ()
    return {
        **_gguf_gemma(read, common),
        "output_norms": True,
        "query_scale": per_head**-0.5,
        **({"sliding_window": window, "local_layers": local} if local else {}),
    }


def _gguf_gemma2(read: Read, common: Fields) -> Fields:
    return {
        **_gguf_sandwich(read, common, pattern=2, large=46),
        "attention_softcap": float(read("attn_logit_softcapping", 50.0)),
        "final_softcap": float(read("final_logit_softcapping", 30.0)),
    }


def _gguf_gemma3(read: Read, common: Fields) -> Fields:
    fields = _gguf_sandwich(read, common, pattern=6, large=62)
    local = {"local_rope_theta": float(read("rope.freq_base_swa", 10_000.0))} if "local_layers" in fields else {}
    return {**fields, "qk_norm": True, "rope_theta": float(read("rope.freq_base", 1_000_000.0)), **local}


_TIED: Mapping[str, Any] = MappingProxyType({"tie_word_embeddings": True})
_GEMMA3: Mapping[str, Any] = MappingProxyType(
    {
        "tie_word_embeddings": True,
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    }
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.name: family
        for family in (
            Family("llama", ("llama",), _hf_llama, _gguf_plain, gguf_permuted=("q_proj", "k_proj")),
            Family("mistral", ("mistral",), _hf_mistral, _gguf_plain, gguf_permuted=("q_proj", "k_proj")),
            Family("qwen2", ("qwen2",), _hf_qwen2, _gguf_qwen2),
            Family("qwen3", ("qwen3",), _hf_qwen3, _gguf_qwen3),
            Family(
                "gemma",
                ("gemma",),
                _hf_gemma,
                _gguf_gemma,
                norm_offset=1.0,
                hf_activations=_GEMMA_ACTIVATIONS,
                hf_defaults=_TIED,
            ),
            Family("gemma2", ("gemma2",), _hf_gemma2, _gguf_gemma2, _HF_SANDWICH_LAYER, 1.0, hf_defaults=_TIED),
            Family("gemma3", ("gemma3_text",), _hf_gemma3, _gguf_gemma3, _HF_SANDWICH_LAYER, 1.0, hf_defaults=_GEMMA3),
        )
    }
)
"""Llama also means SmolLM2, and Llama 2 and 3; Mistral's GGUF files call themselves llama."""


def family_of(name: str) -> Family:
    """The family called `name`; ValueError lists the supported ones."""
    if name not in FAMILIES:
        raise ValueError(f"model family must be one of {', '.join(FAMILIES)}, found {name!r}")
    return FAMILIES[name]


def _family_by(fits: Callable[[Family], bool], what: str, found: Mapping[str, Any]) -> Family:
    for family in FAMILIES.values():
        if fits(family):
            return family
    value = found.get("model_type", found.get(""))
    raise Unsupported(f"{what} {value!r} is not supported; supported: {', '.join(FAMILIES)}")
