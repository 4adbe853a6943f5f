"""The published shapes of the supported families' models, for planning and tests without their weights.

Each entry is what `policy.weights` makes of the model's own config.json (the instruction-tuned one where base and
tuned models differ), so that a plan made from a preset fits the model that is loaded later.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from policy.families import NESTED_ROOT, TEXT_ROOT
from policy.transformer import Activation, ModelConfig, RopeKind, RopeScaling


def _llama2(num_layers: int, embed_dim: int, num_heads: int, num_kv_heads: int, mlp_dim: int) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=32_000,
        num_layers=num_layers,
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        mlp_dim=mlp_dim,
        tie_embeddings=False,
        max_context=4096,
    )


def _llama3(
    num_layers: int, embed_dim: int, num_heads: int, mlp_dim: int, *, head_dim: int = 128, small: bool = False
) -> ModelConfig:
    """Llama 3.1, or 3.2 (`small`)."""
    return ModelConfig(
        family="llama",
        vocab_size=128_256,
        num_layers=num_layers,
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=head_dim,
        mlp_dim=mlp_dim,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(kind=RopeKind.LLAMA3, factor=32.0 if small else 8.0),
        tie_embeddings=small,
        max_context=131_072,
    )


def _mistral(vocab_size: int, rope_theta: float, sliding_window: int | None) -> ModelConfig:
    return ModelConfig(
        family="mistral",
        vocab_size=vocab_size,
        num_layers=32,
        embed_dim=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=14_336,
        rope_theta=rope_theta,
        tie_embeddings=False,
        max_context=32_768,
        sliding_window=sliding_window,
        local_layers=tuple(range(32)) if sliding_window is not None else (),
    )


def _smollm2(
    num_layers: int, embed_dim: int, num_heads: int, num_kv_heads: int, mlp_dim: int, rope_theta: float
) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=49_152,
        num_layers=num_layers,
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=64,
        mlp_dim=mlp_dim,
        rope_theta=rope_theta,
        max_context=8192,
    )


def _qwen2(
    num_layers: int, embed_dim: int, num_heads: int, num_kv_heads: int, mlp_dim: int, *, small: bool = False
) -> ModelConfig:
    """Qwen 2.5; the `small` ones tie their embeddings, the others pad their vocabulary further."""
    return ModelConfig(
        family="qwen2",
        vocab_size=151_936 if small else 152_064,
        num_layers=num_layers,
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=embed_dim // num_heads,
        mlp_dim=mlp_dim,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        tie_embeddings=small,
        max_context=32_768,
        attention_bias=True,
    )


def _qwen3(num_layers: int, embed_dim: int, num_heads: int, mlp_dim: int, *, small: bool = False) -> ModelConfig:
    return ModelConfig(
        family="qwen3",
        vocab_size=151_936,
        num_layers=num_layers,
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=mlp_dim,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        tie_embeddings=small,
        max_context=40_960,
        qk_norm=True,
    )


def _gemma(num_layers: int, embed_dim: int, num_heads: int, num_kv_heads: int, mlp_dim: int) -> ModelConfig:
    return ModelConfig(
        family="gemma",
        vocab_size=256_000,
        num_layers=num_layers,
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=256,
        mlp_dim=mlp_dim,
        norm_eps=1e-6,
        max_context=8192,
        activation=Activation.GELU,
        scale_embedding=True,
    )


def _gemma2(
    num_layers: int,
    embed_dim: int,
    num_heads: int,
    num_kv_heads: int,
    mlp_dim: int,
    *,
    head_dim: int = 256,
    query_divisor: int = 256,
) -> ModelConfig:
    """`query_divisor` is config.json's query_pre_attn_scalar."""
    return ModelConfig(
        family="gemma2",
        vocab_size=256_000,
        num_layers=num_layers,
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp_dim=mlp_dim,
        norm_eps=1e-6,
        max_context=8192,
        activation=Activation.GELU,
        output_norms=True,
        scale_embedding=True,
        query_scale=query_divisor**-0.5,
        attention_softcap=50.0,
        final_softcap=30.0,
        sliding_window=4096,
        local_layers=tuple(range(0, num_layers, 2)),
    )


def _gemma3(
    num_layers: int,
    embed_dim: int,
    num_heads: int,
    num_kv_heads: int,
    mlp_dim: int,
    *,
    head_dim: int = 256,
    query_divisor: int = 256,
    small: bool = False,
) -> ModelConfig:
    """The language model; `small` is the one that sees no pictures."""
    return ModelConfig(
        family="gemma3",
        module_root=TEXT_ROOT if small else NESTED_ROOT,
        vocab_size=262_144 if small else 262_208,
        num_layers=num_layers,
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp_dim=mlp_dim,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        max_context=32_768 if small else 131_072,
        activation=Activation.GELU,
        qk_norm=True,
        output_norms=True,
        scale_embedding=True,
        query_scale=query_divisor**-0.5,
        rope_scaling=None if small else RopeScaling(kind=RopeKind.LINEAR, factor=8.0),
        sliding_window=512 if small else 1024,
        local_layers=tuple(i for i in range(num_layers) if (i + 1) % 6),
        local_rope_theta=10_000.0,
    )


PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "gemma-2b": _gemma(18, 2048, 8, 1, 16_384),
        "gemma-7b": _gemma(28, 3072, 16, 16, 24_576),
        "gemma-2-2b": _gemma2(26, 2304, 8, 4, 9216),
        "gemma-2-9b": _gemma2(42, 3584, 16, 8, 14_336),
        "gemma-2-27b": _gemma2(46, 4608, 32, 16, 36_864, head_dim=128, query_divisor=144),
        "gemma-3-1b": _gemma3(26, 1152, 4, 1, 6912, small=True),
        "gemma-3-4b": _gemma3(34, 2560, 8, 4, 10_240),
        "gemma-3-12b": _gemma3(48, 3840, 16, 8, 15_360),
        "gemma-3-27b": _gemma3(62, 5376, 32, 16, 21_504, head_dim=128, query_divisor=168),
        "llama-2-7b": _llama2(32, 4096, 32, 32, 11_008),
        "llama-2-13b": _llama2(40, 5120, 40, 40, 13_824),
        "llama-2-70b": _llama2(80, 8192, 64, 8, 28_672),
        "llama-3.1-8b": _llama3(32, 4096, 32, 14_336),
        "llama-3.1-70b": _llama3(80, 8192, 64, 28_672),
        "llama-3.1-405b": _llama3(126, 16_384, 128, 53_248),
        "llama-3.2-1b": _llama3(16, 2048, 32, 8192, head_dim=64, small=True),
        "llama-3.2-3b": _llama3(28, 3072, 24, 8192, small=True),
        "mistral-7b-v0.1": _mistral(32_000, 10_000.0, 4096),
        "mistral-7b-v0.3": _mistral(32_768, 1_000_000.0, None),
        "qwen2.5-0.5b": _qwen2(24, 896, 14, 2, 4864, small=True),
        "qwen2.5-1.5b": _qwen2(28, 1536, 12, 2, 8960, small=True),
        "qwen2.5-3b": _qwen2(36, 2048, 16, 2, 11_008, small=True),
        "qwen2.5-7b": _qwen2(28, 3584, 28, 4, 18_944),
        "qwen2.5-14b": _qwen2(48, 5120, 40, 8, 13_824),
        "qwen2.5-32b": _qwen2(64, 5120, 40, 8, 27_648),
        "qwen2.5-72b": _qwen2(80, 8192, 64, 8, 29_568),
        "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, small=True),
        "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, small=True),
        "qwen3-4b": _qwen3(36, 2560, 32, 9728, small=True),
        "qwen3-8b": _qwen3(36, 4096, 32, 12_288),
        "qwen3-14b": _qwen3(40, 5120, 40, 17_408),
        "qwen3-32b": _qwen3(64, 5120, 64, 25_600),
        "smollm2-135m": _smollm2(30, 576, 9, 3, 1536, 100_000.0),
        "smollm2-360m": _smollm2(32, 960, 15, 5, 2560, 100_000.0),
        "smollm2-1.7b": _smollm2(24, 2048, 32, 32, 8192, 130_000.0),
    }
)
"""Model name, in lower case and without its publisher -> config."""


def published(path: str) -> str | None:
    """The name in `PRESETS` of the model that a path is called after, as its publisher calls it (google/gemma-2-2b-it
    is a tuned gemma-2-2b, with the same shapes); None if there is none."""
    name = path.rstrip("/").rpartition("/")[2].lower()
    for tuned in ("-it", "-instruct", "-chat"):
        name = name.removesuffix(tuned)
    return name if name in PRESETS else None
