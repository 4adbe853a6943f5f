"""The other side of `benchmarks.learner`: google-tunix's own trainer and GRPO loss, in an environment of its own.

Trains the model, adapter shapes and episodes of the file that it is given, on the CPU. Reads one JSON request per line
from standard input and answers each with one JSON line:

    {"layout": "padded" | "packed", "size": n}  ->  {"seconds": s, "loss": x, "micro_batches": k}

One request is one optimizer step over all episodes. `padded`: prompts to the longest prompt, completions to the longest
completion, n episodes in a micro-batch. `packed`: Tunix's own sequence packing into rows of n tokens. The first
request of a layout and size also builds and compiles it, and its loss is that of the untrained adapter. The examples
are laid out once, outside of the time.
"""

import json
import os
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import nnx
from tunix.models.qwen2 import model as qwen2
from tunix.rl import common, function_registry, rl_cluster, trainer, utils
from tunix.rl.grpo import grpo_learner

PAD = 0


class RecordingTrainer(trainer.Trainer):
    """Tunix's trainer, which also keeps the loss of each micro-batch."""

    def _post_process_train_step(self, aux):
        super()._post_process_train_step(aux)
        self.losses.append(aux["pg_loss"])


def build_model(config, weights, lora):
    """Qwen 2 with our weights and a fresh adapter; ours has biases in its attention for this."""
    model = qwen2.Qwen2(
        qwen2.ModelConfig(
            num_layers=config["num_layers"],
            vocab_size=config["vocab_size"],
            embed_dim=config["embed_dim"],
            hidden_dim=config["mlp_dim"],
            num_heads=config["num_heads"],
            head_dim=config["head_dim"],
            num_kv_heads=config["num_kv_heads"],
            rope_theta=config["rope_theta"],
            norm_eps=config["norm_eps"],
            use_tied_embedding=True,
        ),
        rngs=nnx.Rngs(0),
    )

    def fill(parameter, array):
        parameter[...] = jnp.asarray(array).reshape(parameter[...].shape)

    fill(model.embedder.input_embedding, weights["embed"])
    fill(model.final_norm.w, weights["final_norm"])
    for i, layer in enumerate(model.layers):
        fill(layer.input_layernorm.w, weights[f"{i}/input_norm"])
        fill(layer.post_attention_layernorm.w, weights[f"{i}/post_norm"])
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            fill(getattr(layer.attn, name).w, weights[f"{i}/{name}"])
        for name in ("q_bias", "k_bias", "v_bias"):
            fill(getattr(layer.attn, name), weights[f"{i}/{name}"])
        for name in ("gate_proj", "up_proj", "down_proj"):
            fill(getattr(layer.mlp, name).kernel, weights[f"{i}/{name}"])
    provider = qwix.LoraProvider(module_path=f".*({'|'.join(lora['targets'])})", rank=lora["rank"], alpha=lora["alpha"])
    return qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(1), **model.get_model_input())


def examples(layout, size, episodes):
    """(micro-batches, tokens that each trains)."""
    prompt = max(len(p) for p, _, _, _ in episodes)
    completion = max(len(c) for _, c, _, _ in episodes)
    micro = size if layout == "padded" else len(episodes)
    batches = []
    for start in range(0, len(episodes), micro):
        part = episodes[start : start + micro]
        prompts = np.stack([np.pad(p, (prompt - len(p), 0), constant_values=PAD) for p, _, _, _ in part])
        completions = np.stack([np.pad(c, (0, completion - len(c)), constant_values=PAD) for _, c, _, _ in part])
        behaviour = np.stack([np.pad(b, (0, completion - len(b))) for _, _, b, _ in part])
        batches.append(
            common.TrainExample(
                prompt_ids=jnp.asarray(prompts),
                prompt_mask=jnp.asarray(prompts != PAD),
                completion_ids=jnp.asarray(completions),
                completion_mask=jnp.asarray(completions != PAD),
                advantages=jnp.asarray([a for _, _, _, a in part], jnp.float32),
                ref_per_token_logps=None,
                old_per_token_logps=jnp.asarray(behaviour, jnp.float32),
            )
        )
    if layout == "packed":
        batches = [example for found in utils.pack_sequences(iter([batches]), size, PAD) for example in found]
    return batches, [int(np.asarray(batch.completion_mask).sum()) for batch in batches]


class Run:
    """One layout and size: its trainer and its examples."""

    def __init__(self, model, optimizer, layout, size, episodes, group_size):
        self.batches, self.tokens = examples(layout, size, episodes)
        settings = rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.chain(
                optax.clip_by_global_norm(optimizer["clip_norm"]),
                optax.adamw(
                    optimizer["learning_rate"],
                    b1=optimizer["b1"],
                    b2=optimizer["b2"],
                    weight_decay=optimizer["weight_decay"],
                ),
            ),
            eval_every_n_steps=10**9,
            mini_batch_size=len(self.batches),
            train_micro_batch_size=1,
            max_seq_token_per_tpu=size if layout == "packed" else None,
        )
        self.trainer = RecordingTrainer(model, settings.actor_optimizer, settings, dict)
        self.trainer.is_managed_externally = True
        algorithm = grpo_learner.GRPOConfig(
            num_generations=group_size, beta=0.0, epsilon=0.2, loss_agg_mode="token-mean"
        )
        algorithm.temperature = 1.0
        loss = function_registry.get_policy_loss_fn(algorithm.policy_loss_fn)

        def loss_fn(model, train_example, algo_config):
            return loss(model, train_example, algo_config=algorithm, pad_id=PAD, eos_id=PAD)

        self.trainer.with_loss_fn(loss_fn, has_aux=True)
        self.trainer.with_gen_model_input_fn(lambda x: {"train_example": x, "algo_config": algorithm})
        self.trainer.with_rl_metrics_to_log({"kl": np.mean, "pg_clipfrac": np.mean})

    def step(self):
        """One optimizer step -> (seconds, loss over all tokens)."""
        self.trainer.losses = []
        steps = self.trainer.train_steps
        began = time.perf_counter()
        self.trainer.train(self.batches)
        jax.block_until_ready(nnx.state(self.trainer.model, nnx.LoRAParam))
        seconds = time.perf_counter() - began
        assert self.trainer.train_steps == steps + 1
        return seconds, float(np.average([float(x) for x in self.trainer.losses], weights=self.tokens))


def main():
    file = np.load(sys.argv[1])
    settings = json.loads(str(file["settings"]))
    weights = {name.removeprefix("weights/"): file[name] for name in file.files if name.startswith("weights/")}
    episodes = [
        (file["tokens"][start:middle], file["tokens"][middle:end], file["behaviour"][middle:end], advantage)
        for (start, middle, end), advantage in zip(file["places"], file["advantages"], strict=True)
    ]
    runs = {}
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        key = request["layout"], request["size"]
        if key not in runs:
            model = build_model(settings["model"], weights, settings["lora"])
            runs[key] = Run(model, settings["optimizer"], *key, episodes, settings["group_size"])
        seconds, loss = runs[key].step()
        answer = {"seconds": seconds, "loss": loss, "micro_batches": len(runs[key].batches)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
