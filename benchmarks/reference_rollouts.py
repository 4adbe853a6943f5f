"""The other side of `benchmarks.rollouts`: google-tunix's agentic GRPO learner, in an environment of its own.

    .venv-tunix/bin/python benchmarks/reference_rollouts.py --tool-s 1 --slots 64 --groups 8 --members 4 --steps 10

Groups of `members` episodes, two turns each, behind every turn a tool of `tool-s` seconds; a simulated sampler that
takes 0.05 s a turn and never queues; a 2-layer Qwen 3 with LoRA that trains after each `groups` groups, one step off
policy. Sampler and trainer are on two devices, so that Tunix works asynchronously and its weights move. Prints one JSON
object: trained episodes a second from the end of the first weight transfer, behind compilation, to that of the last.
"""

import argparse
import json
import os
import random
import time

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name, kind in (("tool-s", float), ("slots", int), ("groups", int), ("members", int), ("steps", int)):
    parser.add_argument(f"--{name}", type=kind, required=True)
args = parser.parse_args()

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import numpy as np
import optax
import qwix
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl import rl_cluster
from tunix.rl.agentic import agentic_grpo_learner
from tunix.rl.agentic.agents import agent_types, base_agent
from tunix.rl.agentic.environments import base_environment
from tunix.rl.rollout import base_rollout

TURNS, POLICY_S, SPREAD = 2, 0.05, 0.1
MAX_PROMPT, MAX_TOKENS, MAX_RESPONSE = 128, 16, 128
PAD, EOS, VOCABULARY = 0, 2, 264


class Letters:
    """A tokenizer of bytes."""

    def encode(self, text, **_):
        return [byte + 3 for byte in str(text).encode()]

    def decode(self, ids, **_):
        return bytes(int(i) - 3 for i in np.asarray(ids).ravel() if 35 <= int(i) < 130).decode()

    def bos_id(self):
        return 1

    def eos_id(self):
        return EOS

    def pad_id(self):
        return PAD


class Template:
    """A chat template: a letter for each role."""

    assistant_token = "A:"

    def parse(self, messages, add_generation_prompt=False, is_first_msg=False):
        text = "".join(f"{message['role'][0].upper()}:{message['content']}\n" for message in messages)
        return text + (self.assistant_token if add_generation_prompt else "")

    def update_assistant_end_tokens(self, tokens):
        return tokens, 0


class SlowTool(base_environment.BaseTaskEnv):
    """Waits behind every turn; the last one brings a reward by lot."""

    def __init__(self, task, **options):
        super().__init__(task, max_steps=TURNS, **options)

    def _initial_observation(self):
        return str(np.asarray(self.task["prompts"]).item())

    def _step_impl(self, action):
        time.sleep(args.tool_s * random.uniform(1 - SPREAD, 1 + SPREAD))
        done = self.step_count >= self.max_steps
        return base_environment.EnvStepResult("12", float(done and random.random() < 0.5), done, {})


class Agent(base_agent.ConversationAgentBase):
    """Appends what it reads and says."""

    def _observation_to_messages(self, observation, reward, done, info):
        self._messages.append({"role": "user", "content": str(observation)})

    def update_from_model(self, response, **_):
        self._messages.append({"role": "assistant", "content": response})
        action = agent_types.Action(action=response)
        step = agent_types.Step(chat_completions=list(self._messages), action=action, model_response=response)
        self._trajectory.steps.append(step)
        return action


class SimulatedRollout(base_rollout.BaseRollout):
    """Random tokens after a fixed time, for any number of requests at once."""

    def __init__(self, rollout_actor=None, tokenizer=None, mesh=None, rollout_config=None, **_):
        self._tokenizer = tokenizer

    def generate(self, prompts, rollout_config, **_):
        time.sleep(POLICY_S)
        sampled = [np.random.randint(40, 120, size=MAX_TOKENS).astype(np.int32) for _ in prompts]
        length = rollout_config.max_prompt_length
        encoded = [np.asarray(self._tokenizer.encode(prompt), np.int32)[-length:] for prompt in prompts]
        return base_rollout.RolloutOutput(
            text=[self._tokenizer.decode(ids) for ids in sampled],
            logits=None,
            tokens=sampled,
            left_padded_prompt_tokens=np.stack([np.pad(ids, (length - len(ids), 0)) for ids in encoded]),
            logprobs=[np.full(MAX_TOKENS, -4.4, np.float32) for _ in prompts],
        )

    def get_per_token_logps(self, *_, **__):
        raise NotImplementedError("the sampler's own log-probs are used")

    def update_params(self, params, filter_types=None):
        """The sampler has no weights."""

    def pad_id(self):
        return PAD

    def eos_id(self):
        return EOS

    def model(self):
        """None: with a model here Tunix would take sampler and trainer to share their weights, and move none."""


def on(device, model):
    """The model's parameters on one device, and its mesh."""
    mesh = jax.sharding.Mesh(np.array([[device]]), ("fsdp", "tp"))
    graph, state = nnx.split(model)
    specs = jax.tree.map(
        lambda spec: jax.sharding.NamedSharding(mesh, spec if spec is not None else jax.sharding.PartitionSpec()),
        nnx.get_partition_spec(state),
    )
    return nnx.merge(graph, jax.device_put(state, specs)), mesh


def main():
    trainer_device, sampler_device = jax.devices()
    config = qwen3.ModelConfig(
        num_layers=2,
        vocab_size=VOCABULARY,
        embed_dim=64,
        hidden_dim=128,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        rope_theta=10000,
        norm_eps=1e-6,
        use_tied_embedding=True,
    )
    reference, mesh = on(trainer_device, qwen3.Qwen3(config, rngs=nnx.Rngs(0)))
    with mesh:
        lora = qwix.LoraProvider(
            module_path=".*(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)", rank=8, alpha=16.0
        )
        adapted = qwix.apply_lora_to_model(reference, lora, rngs=nnx.Rngs(1), **reference.get_model_input())
        actor, _ = on(trainer_device, adapted)
    sampler_mesh = jax.sharding.Mesh(np.array([[sampler_device]]), ("fsdp", "tp"))
    cluster = rl_cluster.RLCluster(
        actor=actor,
        reference=reference,
        tokenizer=Letters(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={
                rl_cluster.Role.ACTOR: mesh,
                rl_cluster.Role.REFERENCE: mesh,
                rl_cluster.Role.ROLLOUT: sampler_mesh,
            },
            rollout_engine=SimulatedRollout,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adamw(1e-4),
                eval_every_n_steps=10**6,
                max_steps=args.steps,
                mini_batch_size=args.groups,
                train_micro_batch_size=args.groups,
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_prompt_length=MAX_PROMPT,
                max_tokens_to_generate=MAX_RESPONSE,
                return_logprobs=True,
                kv_cache_size=512,
                temperature=1.0,
                eos_tokens=list(range(100, 116)),
            ),
        ),
    )
    learner = agentic_grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        reward_fns=None,
        algo_config=agentic_grpo_learner.GRPOConfig(
            num_generations=args.members,
            num_iterations=1,
            beta=0.0,
            max_response_length=MAX_RESPONSE,
            max_concurrency=args.slots,
            off_policy_steps=1,
            episode_timeout=600.0,
        ),
        chat_parser=Template(),
        agent_class=Agent,
        env_class=SlowTool,
    )

    transfers = []
    sync = cluster.sync_weights

    def noted(*positional, **named):
        sync(*positional, **named)
        transfers.append(time.monotonic())

    cluster.sync_weights = noted
    steps = args.steps + 3
    learner.train([{"prompts": np.array([f"{step}-{n}" for n in range(args.groups)])} for step in range(steps)])
    rate = (len(transfers) - 1) * args.groups * args.members / (transfers[-1] - transfers[0])
    print(json.dumps({"episodes_per_s": rate, "transfers": len(transfers)}), flush=True)
    os._exit(0)  # Tunix leaves threads behind that wait for ever


main()
