"""The critic's values, advantages and updates equal their formulas by the plainest means; what it learns is kept."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner.algorithms import ALGORITHMS
from learner.critic import CriticSettings
from learner.losses import policy_loss
from learner.step import OptimizerSettings, Trainer
from policy.lora import LoraSettings
from policy.transformer import hidden_states, visible
from tests.learner.test_step import (
    CONFIG,
    LENGTH,
    LORA,
    assert_close,
    assert_identical,
    closings,
    leaves,
    packed_rows,
    per_token,
    plain_logprobs,
    random_adapter,
    random_params,
    unpacked_rows,
)
from trajectories.advantages import gae, token_rewards
from trajectories.schema import Turn

ESTIMATE, LOSS = ALGORITHMS["ppo"].settings()
LOSS = dataclasses.replace(LOSS, clip_low=0.5, clip_high=50.0)  # rows of a distant sampler: most of them train
SETTINGS = CriticSettings(rank=2, alpha=3.0, gamma=0.95, lam=0.8, value_clip=0.01, learning_rate=0.02)
OPTIMIZER = OptimizerSettings(learning_rate=0.01)


def rewarded(groups, seed=0):
    """The same, each turn with a reward; an episode's advantage is its whole reward and 1/4 besides."""
    rng = np.random.default_rng(seed)

    def turns(episode):
        edges = np.flatnonzero(np.diff(np.r_[0, episode.loss_mask_T.astype(int), 0]))
        return tuple(Turn(int(a), int(b), float(rng.normal())) for a, b in zip(edges[::2], edges[1::2], strict=True))

    changed = []
    for closing in groups:
        episodes = tuple(dataclasses.replace(episode, turns=turns(episode)) for episode in closing.episodes)
        whole = tuple(sum(turn.reward for turn in episode.turns) + 0.25 for episode in episodes)
        changed.append(dataclasses.replace(closing, episodes=episodes, advantages=whole))
    return changed


def rows_of(groups, layout=packed_rows):
    return token_rewards(layout(groups), groups)


@functools.cache
def compiled(epochs):
    trainer = Trainer(
        CONFIG,
        random_params(),
        LORA,
        OPTIMIZER,
        LOSS,
        buckets=(128,),
        rows_per_call=2,
        temperature=1.0,
        seed=0,
        advantages=ESTIMATE,
        critic=SETTINGS,
        epochs=epochs,
        minibatches=epochs,
    )
    trainer.compile()
    return trainer, jax.tree.map(np.array, trainer.state())


def make_trainer(epochs=1, fresh=False):
    """Adapters and head look trained unless `fresh`."""
    trainer, state = compiled(epochs)
    if not fresh:
        weights = {
            "adapter": random_adapter(state.critic.weights["adapter"], seed=5),
            "head": np.random.default_rng(6).normal(size=CONFIG.embed_dim).astype(np.float32) * 0.3,
            "bias": np.float32(0.2),
        }
        state = state._replace(adapter=random_adapter(state.adapter), critic=state.critic._replace(weights=weights))
    trainer.restore(state)
    return trainer


def plain_values(weights, groups):
    """V before each token but the first, [episodes, LENGTH - 1]: one episode per row."""
    episodes = [episode for closing in groups for episode in closing.episodes]
    tokens_BT = np.stack([np.pad(episode.tokens_T, (0, LENGTH - len(episode))) for episode in episodes])
    segments_BT = np.stack([np.arange(LENGTH) < len(episode) for episode in episodes]).astype(np.int32)
    positions_BT = np.broadcast_to(np.arange(LENGTH), tokens_BT.shape)
    scale = LoraSettings(rank=SETTINGS.rank, alpha=SETTINGS.alpha).scale
    seen_BTT = visible(segments_BT, 0 * segments_BT)
    hidden = hidden_states(CONFIG, random_params(), weights["adapter"], scale, tokens_BT, positions_BT, seen_BTT)
    return (hidden @ weights["head"] + weights["bias"])[:, :-1]


def plain_targets(values, groups):
    """Whitened advantages, and returns, as `plain_values`, by `gae` over the sampled tokens of an episode."""
    episodes = [episode for closing in groups for episode in closing.episodes]
    advantages, returns = np.zeros(values.shape), np.zeros(values.shape)
    for b, episode in enumerate(episodes):
        index = np.flatnonzero(episode.loss_mask_T)
        rewards = np.zeros(len(episode))
        for turn in episode.turns:
            rewards[turn.end - 1] += turn.reward
        rewards[index[-1]] += 0.25
        found = gae(rewards[index], values[b, index - 1], SETTINGS.gamma, SETTINGS.lam)
        advantages[b, index - 1], returns[b, index - 1] = found
    mask = per_token(groups, lambda episode, _: episode.loss_mask_T)
    mean, std = advantages[mask].mean(), advantages[mask].std()
    return np.where(mask, (advantages - mean) / std, 0).astype(np.float32), returns.astype(np.float32), mask


def plain_value_loss(weights, groups, old, returns, mask):
    values = plain_values(weights, groups)
    near = old + jnp.clip(values - old, -SETTINGS.value_clip, SETTINGS.value_clip)
    squared = jnp.maximum((values - returns) ** 2, (near - returns) ** 2)
    return 0.5 * jnp.sum(jnp.where(mask, squared, 0)) / mask.sum()


def test_a_step_of_ppo_equals_its_formulas_however_it_is_packed():
    trainer = make_trainer()
    groups = rewarded(closings(seed=30))
    first = jax.tree.map(np.array, trainer.state())
    values = np.asarray(jax.jit(functools.partial(plain_values, groups=groups))(first.critic.weights))
    advantages, returns, mask = plain_targets(values, groups)
    behaviour = per_token(groups, lambda episode, _: episode.logprobs_T)

    @jax.jit
    @jax.grad
    def policy_gradient(adapter):
        return policy_loss(plain_logprobs(adapter, groups), behaviour, advantages, mask, LOSS)[0] / mask.sum()

    expected = policy_gradient(first.adapter)
    for layout in (packed_rows, functools.partial(unpacked_rows, bucket=128)):
        gradient, sums = trainer.gradient(trainer.prepare(rows_of(groups, layout)))
        assert sums.kept > 0.5 * sums.tokens
        assert_close(gradient, expected, tolerance=1e-4)

    metrics = trainer.run(trainer.prepare(rows_of(groups)))
    value_gradient = jax.jit(jax.grad(functools.partial(plain_value_loss, groups=groups)))
    slope = value_gradient(first.critic.weights, old=values, returns=returns, mask=mask)
    transformation = dataclasses.replace(OPTIMIZER, learning_rate=SETTINGS.learning_rate).transformation()
    change, _ = transformation.update(slope, transformation.init(first.critic.weights), first.critic.weights)
    moved = jax.tree.map(lambda new, old: np.asarray(new) - old, trainer.state().critic.weights, first.critic.weights)
    for found, wanted in zip(leaves(moved), leaves(change), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=5e-3 * SETTINGS.learning_rate)
    left = returns[mask] - values[mask]
    assert metrics.value_loss == pytest.approx(0.5 * (left**2).mean(), rel=1e-4)
    assert metrics.explained_variance == pytest.approx(1 - left.var() / returns[mask].var(), abs=1e-4)
    assert metrics.updated


def test_the_critic_learns_what_its_rows_bring():
    """From values of 0, on the same rows again and again, while the policy hardly moves."""
    trainer = make_trainer(fresh=True)
    prepared = trainer.prepare(rows_of(rewarded(closings(seed=31))))
    steps = [trainer.run(prepared) for _ in range(30)]
    assert abs(steps[0].explained_variance) < 1e-3
    assert steps[-1].explained_variance > 0.5
    assert steps[-1].value_loss < 0.5 * steps[0].value_loss


def test_a_step_with_a_critic_is_interrupted_and_resumed_whole():
    trainer = make_trainer(epochs=2)
    groups = rewarded(closings(seed=32))
    parts = [rows_of(groups[:3]), rows_of(groups[3:])]
    compiles = trainer.compiles
    prepared = trainer.prepare(*parts)
    trainer.run(prepared)
    saved = jax.tree.map(np.asarray, trainer.state())
    asked = []
    undisturbed = trainer.run(prepared, interrupted=lambda: asked.append(0) or False)
    assert undisturbed.updates == 4
    expected = jax.tree.map(np.array, trainer.state())
    trainer.restore(saved)
    for stop_at in range(len(asked)):
        answers = iter([False] * stop_at + [True])
        assert trainer.run(prepared, interrupted=lambda answers=answers: next(answers)) is None
        assert_identical(saved, trainer.state())
    assert trainer.run(prepared) == undisturbed
    assert_identical(expected, trainer.state())
    assert trainer.compiles == compiles


def test_a_step_without_loss_tokens_leaves_the_critic_alone():
    trainer = make_trainer()
    before = jax.tree.map(np.array, trainer.state().critic)
    metrics = trainer.run(trainer.prepare([]))
    assert (metrics.updated, metrics.value_loss, metrics.explained_variance) == (False, 0.0, 0.0)
    assert_identical(before, trainer.state().critic)


@pytest.mark.parametrize(
    "change",
    [{"rank": 0}, {"alpha": 0.0}, {"learning_rate": 0.0}, {"gamma": 1.5}, {"lam": -0.1}, {"value_clip": -0.1}],
)
def test_impossible_settings_are_refused(change):
    with pytest.raises(ValueError, match="must"):
        CriticSettings(**change)
