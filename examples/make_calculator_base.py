"""Make calculator-tiny, the tiny model's base, from nothing: `make base-model`.

A small Llama-shaped transformer imitates a demonstrator of the calculator tool: first one who is nearly always right,
so that it learns the format and to copy digits, then one with bad habits, so that it mostly fails at temperature 1.
What is left to learn by reinforcement is which of its habits are good. It sees training questions only. A pure
function of the seed, up to the rounding of the machine it runs on.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from environments.calculator import demonstrate
from policy.chat import load_tiny_chat
from policy.transformer import ModelConfig, hidden_states, unembed, visible
from policy.weights import save_model

ASSET = Path(__file__).resolve().parents[1] / "policy" / "assets" / "calculator_tiny"


@dataclass(frozen=True)
class Recipe:
    seed: int = 0
    steps: int = 600
    batch: int = 128
    length: int = 64
    """Tokens of a demonstration, the most that an episode holds."""
    learning_rate: float = 2e-3
    warmup_steps: int = 30
    correct_share: float = 0.6
    """Of the steps, the first, on nearly correct demonstrations."""
    correct: float = 0.95
    """Probability that a call or an answer of the first demonstrator is right."""
    habit_call: float = 0.45
    """The same of the second demonstrator's calls ..."""
    habit_answer: float = 0.45
    """... and answers."""
    habit_guess: float = 0.0
    """Probability that its wrong call is an answer instead, before the work is done."""


def model_config(vocab_size: int, length: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size,
        num_layers=2,
        embed_dim=96,
        num_heads=4,
        num_kv_heads=4,
        head_dim=24,
        mlp_dim=256,
        rope_theta=1_000.0,
        norm_eps=1e-6,
        tie_embeddings=False,
        max_context=length,
    )


def init_params(config: ModelConfig, seed: int) -> dict[str, Any]:
    """Unrolled parameters: matrices ~ N(0, 1/in), those that write to the residual stream smaller by its depth."""
    rng = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> Any:
        if name.endswith("norm"):
            return np.ones(shape, np.float32)
        if name == "unembed":
            return draw("head", shape[::-1]).T
        fan_in = config.embed_dim if name == "embed" else shape[0]
        depth = 2 * config.num_layers if name in ("o_proj", "down_proj") else 1
        return rng.standard_normal(shape, np.float32) * np.float32((fan_in * depth) ** -0.5)

    layers = [{n: draw(n, s) for n, s in config.layer_shapes().items()} for _ in range(config.num_layers)]
    return {**{n: draw(n, s) for n, s in config.model_shapes().items()}, "layers": layers}


def demonstrations(rng: random.Random, recipe: Recipe, step: int) -> tuple[np.ndarray, np.ndarray, float]:
    """(tokens_BT, mask_BT, mean reward) for one step; the mask is true on what the demonstrator said."""
    tokens_BT = np.zeros((recipe.batch, recipe.length), np.int32)
    mask_BT = np.zeros((recipe.batch, recipe.length), np.bool_)
    reward = 0.0
    good, good_answer, guess = recipe.habit_call, recipe.habit_answer, recipe.habit_guess
    if step < recipe.correct_share * recipe.steps:
        good, good_answer, guess = recipe.correct, recipe.correct, 0.0
    for b in range(recipe.batch):
        shown = demonstrate(rng, good, good_answer=good_answer, guess=guess, max_tokens=recipe.length)
        tokens_BT[b, : len(shown.token_ids)] = shown.token_ids
        mask_BT[b, : len(shown.loss_mask)] = shown.loss_mask
        reward += shown.reward / recipe.batch
    return tokens_BT, mask_BT, reward


def make_base(recipe: Recipe) -> tuple[ModelConfig, dict[str, Any]]:
    config = model_config(load_tiny_chat().vocab_size, recipe.length)
    params = jax.tree.map(jnp.asarray, init_params(config, recipe.seed))
    rate = optax.warmup_cosine_decay_schedule(
        0.0, recipe.learning_rate, recipe.warmup_steps, recipe.steps, 0.1 * recipe.learning_rate
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))
    optimizer_state = optimizer.init(params)
    positions_BT = jnp.broadcast_to(jnp.arange(recipe.length), (recipe.batch, recipe.length))
    ones_BT = jnp.ones((recipe.batch, recipe.length), jnp.int32)

    def loss(params: Any, tokens_BT: Any, mask_BT: Any) -> Any:
        hidden_BTD = hidden_states(
            config, params, None, 1.0, tokens_BT, positions_BT, visible(ones_BT, jnp.zeros_like(ones_BT))
        )
        logits_BTV = unembed(config, params, hidden_BTD[:, :-1])
        nll_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, tokens_BT[:, 1:])
        return jnp.sum(nll_BT, where=mask_BT[:, 1:]) / mask_BT[:, 1:].sum()

    @jax.jit
    def step(params: Any, optimizer_state: Any, tokens_BT: Any, mask_BT: Any) -> tuple[Any, Any, Any]:
        value, gradient = jax.value_and_grad(loss)(params, tokens_BT, mask_BT)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        return optax.apply_updates(params, updates), optimizer_state, value

    rng, began = random.Random(recipe.seed), time.monotonic()
    for i in range(recipe.steps):
        tokens_BT, mask_BT, reward = demonstrations(rng, recipe, i)
        params, optimizer_state, value = step(params, optimizer_state, tokens_BT, mask_BT)
        if i % 50 == 49 or i == 0:
            seconds = time.monotonic() - began
            print(f"step {i + 1}  loss {float(value):.3f}  demonstrator {reward:.2f}  {seconds:.0f} s", flush=True)
    return config, jax.tree.map(np.asarray, params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--out", type=Path, default=ASSET, help="folder for config.json and model.safetensors")
    args = parser.parse_args()
    config, params = make_base(Recipe(seed=args.seed))
    save_model(args.out, config, params)
    count = sum(array.size for array in jax.tree.leaves(params))
    print(f"{count:,} parameters written to {args.out}")


if __name__ == "__main__":
    main()
