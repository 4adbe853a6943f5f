"""The sampler's truncated distribution is the learner's: engine, episode, message, row, gradient."""

import asyncio
import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np

from environments.calculator import Calculator
from environments.environment import EnvironmentSettings
from environments.orchestrator import RolloutOrchestrator
from learner.buffer import fault
from learner.losses import LossSettings, policy_loss
from learner.step import OptimizerSettings, Trainer
from policy.chat import load_chat
from policy.client import SamplingParams
from policy.engine import Engine
from policy.lora import LoraSettings, init_adapter
from policy.settings import SamplingSettings
from policy.transformer import hidden_states, unembed, visible
from policy.weights import ModelSettings, load_model
from trajectories.codec import decode, encode
from trajectories.packing import pack
from trajectories.schema import Closing, Pack, Task, Version, kept_offsets

MODEL = "calculator-tiny"
LORA = LoraSettings(rank=4, alpha=8.0)
SETTINGS = SamplingSettings(
    slots=12,
    small_batch=0,
    max_context=64,
    max_tokens=16,
    temperature=0.8,
    top_k=5,
    top_p=0.9,
    min_p=0.02,
    max_kept=8,
)
LOSS = LossSettings(kl_coefficient=0.05)
GROUPS, MEMBERS, LENGTH = 3, 4, 64


def trained_adapter(config):
    """One that moves the policy, but not far."""
    rng = np.random.default_rng(5)
    adapter = init_adapter(config, LORA, 0)
    return jax.tree.map(lambda x: np.asarray(x) + rng.normal(0, 0.03, x.shape).astype(np.float32), adapter)


def sampled_closings(model, adapter):
    """Three groups at the real environment, sampled by the real engine."""
    chat = load_chat(MODEL)
    engine = Engine(model.config, model.params, adapter, Version(3, 1), SETTINGS, LORA.scale)
    params = SamplingParams(
        SETTINGS.temperature, SETTINGS.max_tokens, top_k=SETTINGS.top_k, top_p=SETTINGS.top_p, min_p=SETTINGS.min_p
    )
    tasks = [
        Task("run", g, group_size=MEMBERS, payload={"question": f"{17 + g}+25", "answer": 42 + g}) for g in range(3)
    ]

    async def play():
        players = RolloutOrchestrator(
            engine, chat, Calculator(latency_s=0), EnvironmentSettings(), params, 7, time.time
        )
        return await asyncio.gather(*(players.run(task, sample) for task in tasks for sample in range(MEMBERS)))

    try:
        episodes = asyncio.run(asyncio.wait_for(play(), 100))
    finally:
        engine.close()
    assert not any(episode.status.failed for episode in episodes), {episode.error for episode in episodes}
    advantages = tuple(np.random.default_rng(0).normal(size=MEMBERS).tolist())
    return [
        Closing("run", g, 0, f"c{g}", MEMBERS, tuple(episodes[g * MEMBERS : (g + 1) * MEMBERS]), advantages=advantages)
        for g in range(GROUPS)
    ]


def plain_loss(model, adapter, closings):
    """(mean loss, gradient) by the plainest means: one episode per row, all logits, a mask of what was left out."""
    episodes = [(e, a) for c in closings for e, a in zip(c.episodes, c.advantages, strict=True)]

    def laid(value):
        return np.stack([np.pad(value(e, a), (0, LENGTH - len(e))) for e, a in episodes])

    tokens, mask = laid(lambda e, _: e.tokens_T), laid(lambda e, _: e.loss_mask_T)
    behaviour = laid(lambda e, _: e.logprobs_T)
    advantages = laid(lambda e, a: np.full(len(e), a, np.float32))
    segments = laid(lambda e, _: np.ones(len(e), np.int32))
    positions = np.broadcast_to(np.arange(LENGTH), tokens.shape)
    left_out = np.zeros((*tokens.shape, model.config.vocab_size), bool)
    for b, (episode, _) in enumerate(episodes):
        offsets = kept_offsets(episode.kept_counts_T)
        for t in np.flatnonzero(episode.loss_mask_T):
            left_out[b, t] = True
            left_out[b, t, episode.kept_ids_K[offsets[t] : offsets[t + 1]]] = False

    def logprobs(adapter):
        seen = visible(segments, 0 * segments)
        hidden = hidden_states(model.config, model.params, adapter, LORA.scale, tokens, positions, seen)
        logits = unembed(model.config, model.params, hidden)[:, :-1] / SETTINGS.temperature
        table = jax.nn.log_softmax(jnp.where(left_out[:, 1:], -jnp.inf, logits))
        return jnp.take_along_axis(table, tokens[:, 1:, None], -1)[..., 0]

    def mean(adapter):
        parts = (x[:, 1:] for x in (behaviour, advantages, mask))
        total, _ = policy_loss(logprobs(adapter), *parts, LOSS, reference_N=logprobs(None))
        return total / mask.sum()

    return jax.value_and_grad(mean)(adapter)


def make_trainer(model, adapter, max_kept):
    trainer = Trainer(
        model.config,
        model.params,
        LORA,
        OptimizerSettings(),
        LOSS,
        buckets=(128,),
        rows_per_call=2,
        temperature=SETTINGS.temperature,
        max_kept=max_kept,
        seed=0,
    )
    trainer.compile()
    trainer.restore(trainer.state()._replace(adapter=adapter))
    return trainer


def test_the_learner_recomputes_what_a_truncating_sampler_reports():
    model = load_model(ModelSettings(MODEL))
    adapter = trained_adapter(model.config)
    closings = sampled_closings(model, adapter)
    counts = np.concatenate([e.kept_counts_T[e.loss_mask_T] for c in closings for e in c.episodes])
    assert counts.min() >= 1
    assert set(counts.tolist()) >= {1, 2, 3}
    assert counts.max() <= SETTINGS.top_k

    packed = decode(encode(pack(closings, 128)), Pack)
    assert list(packed.closings) == closings
    assert fault(packed, (128,), model.config.vocab_size, SETTINGS.max_kept) is None
    trainer = make_trainer(model, adapter, SETTINGS.max_kept)
    prepared = trainer.prepare(packed.rows)
    value, expected = plain_loss(model, adapter, closings)
    gradient, sums = trainer.gradient(prepared)
    assert sums.invalid == 0
    assert abs(float(sums.loss) / prepared.loss_tokens - float(value)) < 1e-5
    for found, plain in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, plain, rtol=0, atol=1e-5 * np.abs(plain).max() + 1e-9)
    metrics = trainer.run(prepared)
    assert metrics.updated
    assert metrics.max_abs_log_ratio < 1e-4
    assert metrics.capped_fraction == metrics.clipped_fraction == 0

    # Without the kept ids the same log-probs are those of another policy.
    whole = make_trainer(model, adapter, 0)
    none = np.zeros(0, np.int32)
    rows = [dataclasses.replace(row, kept_counts_T=none, kept_ids_K=none) for row in packed.rows]
    assert whole.run(whole.prepare(rows)).max_abs_log_ratio > 0.05
