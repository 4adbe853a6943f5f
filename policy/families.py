"""Model families as data: which architectures the transformer computes, and what other formats call their tensors.

A family is known here or not at all: no other module names an architecture or a foreign tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
PROJECTIONS = ATTENTION + MLP
"""The linear layers of a block, each of shape [in, out]; LoRA may adapt any of them."""


@dataclass(frozen=True)
class Family:
    """One architecture that `policy.transformer` computes."""

    name: str
    gguf_architecture: str
    """Value of `general.architecture`, and the prefix of the other fields."""
    gguf_model: Mapping[str, str]
    """Our name -> GGUF name of the tensors outside the layers. `unembed` is absent from files with tied embeddings."""
    gguf_layer: Mapping[str, str]
    """Our name -> GGUF name of a layer's tensors, with `{i}` for the layer."""
    gguf_permuted: tuple[str, ...]
    """Projections whose output rows GGUF interleaves (pairs of rotary dimensions side by side)."""
    peft_module: Mapping[str, str]
    """Our name -> path of a projection in a Hugging Face checkpoint, with `{i}` for the layer."""


LLAMA = Family(
    name="llama",
    gguf_architecture="llama",
    gguf_model=MappingProxyType(
        {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "unembed": "output.weight"}
    ),
    gguf_layer=MappingProxyType(
        {
            "input_norm": "blk.{i}.attn_norm.weight",
            "q_proj": "blk.{i}.attn_q.weight",
            "k_proj": "blk.{i}.attn_k.weight",
            "v_proj": "blk.{i}.attn_v.weight",
            "o_proj": "blk.{i}.attn_output.weight",
            "post_norm": "blk.{i}.ffn_norm.weight",
            "gate_proj": "blk.{i}.ffn_gate.weight",
            "up_proj": "blk.{i}.ffn_up.weight",
            "down_proj": "blk.{i}.ffn_down.weight",
        }
    ),
    gguf_permuted=("q_proj", "k_proj"),
    peft_module=MappingProxyType(
        {name: f"model.layers.{{i}}.self_attn.{name}" for name in ATTENTION}
        | {name: f"model.layers.{{i}}.mlp.{name}" for name in MLP}
    ),
)

FAMILIES: Mapping[str, Family] = MappingProxyType({family.name: family for family in (LLAMA,)})


def family_of(name: str) -> Family:
    """The family called `name`; ValueError lists the supported ones."""
    if name not in FAMILIES:
        raise ValueError(f"model family must be one of {', '.join(FAMILIES)}, found {name!r}")
    return FAMILIES[name]


def family_of_gguf(architecture: str) -> Family:
    """The family of a GGUF file's `general.architecture`; ValueError lists the supported ones."""
    for family in FAMILIES.values():
        if family.gguf_architecture == architecture:
            return family
    supported = ", ".join(family.gguf_architecture for family in FAMILIES.values())
    raise ValueError(f"GGUF architecture {architecture!r} is not supported; supported: {supported}")
