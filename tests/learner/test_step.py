"""One optimizer step: what it computes does not depend on packing, and it compiles, fails and stops cleanly."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner.losses import Aggregation, Anchor, KlPlace, LossSettings, policy_loss
from learner.step import OptimizerSettings, Trainer
from policy.lora import LoraSettings
from policy.transformer import ModelConfig, hidden_states, unembed, visible
from trajectories.advantages import AdvantageSettings
from trajectories.packing import pack
from trajectories.schema import Closing, Episode, kept_offsets

CONFIG = ModelConfig(
    vocab_size=61, num_layers=3, embed_dim=24, num_heads=4, num_kv_heads=2, head_dim=6, mlp_dim=40, max_context=128
)
LORA = LoraSettings(rank=3, alpha=6.0)
BUCKETS = (64, 128)
LENGTH = 64
"""No episode is longer."""
PROMPTS = (25, 37, 1, 29, 32)


def random_params(seed=0, config=CONFIG):
    rng = np.random.default_rng(seed)

    def draw(name, shape):
        if "norm" in name:
            return (1 + 0.1 * rng.normal(size=shape)).astype(np.float32)
        return (rng.normal(size=shape) * (0.5 if name == "embed" else shape[-2] ** -0.5)).astype(np.float32)

    outside = {name: draw(name, shape) for name, shape in config.model_shapes().items()}
    layers = [
        {name: draw(name, shape) for name, shape in config.layer_shapes().items()} for _ in range(config.num_layers)
    ]
    return {**outside, "layers": layers}


def random_adapter(template, seed=1):
    """A trained-looking adapter: b is not 0, so that every LoRA parameter has a gradient."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: (rng.normal(size=x.shape) * 0.2).astype(np.float32), template)


def build(
    *,
    config=CONFIG,
    temperature=1.0,
    rows_per_call=2,
    buckets=BUCKETS,
    lora=LORA,
    loss=None,
    optimizer=None,
    remat=False,
    max_kept=0,
    **more,
):
    return Trainer(
        config,
        random_params(config=config),
        lora,
        optimizer or OptimizerSettings(),
        loss or LossSettings(),
        buckets=buckets,
        rows_per_call=rows_per_call,
        temperature=temperature,
        max_kept=max_kept,
        seed=3,
        remat=remat,
        **more,
    )


@functools.cache
def compiled(**settings):
    trainer = build(**settings)
    trainer.compile()
    return trainer, jax.tree.map(np.array, trainer.state())


def make_trainer(*, fresh=False, **settings):
    """A trainer at step 0, with a trained-looking adapter unless `fresh`. Equal settings share one compilation."""
    trainer, state = compiled(**settings)
    trainer.restore(state if fresh else state._replace(adapter=random_adapter(state.adapter)))
    return trainer


def episode(rng, group, sample, prompt_T, behaviour=None):
    """Two turns with a tool's answer between them, which is in no loss."""
    turn, answer = rng.integers(2, 7, 2), rng.integers(1, 5)
    length = int(turn.sum() + answer)
    loss_mask = np.ones(length, bool)
    loss_mask[turn[0] : turn[0] + answer] = False
    tokens_T = np.concatenate([prompt_T, rng.integers(0, CONFIG.vocab_size, length)])
    mask_T = np.concatenate([np.zeros(len(prompt_T), bool), loss_mask])
    logprobs_T = np.where(mask_T, -4 + 0.3 * rng.normal(size=len(tokens_T)), 0)
    return Episode("run", group, 0, sample, 4, tokens_T, mask_T, logprobs_T, len(prompt_T))


def closings(seed=0, members=4, prompts=PROMPTS):
    rng = np.random.default_rng(seed)
    result = []
    for group, length in enumerate(prompts):
        prompt_T = rng.integers(0, CONFIG.vocab_size, length)
        episodes = tuple(episode(rng, group, sample, prompt_T) for sample in range(members))
        advantages = tuple(float(x) for x in rng.normal(size=members))
        result.append(Closing("run", group, 0, f"c{group}", members, episodes, advantages=advantages))
    return result


def limited(groups, max_kept=7, seed=0):
    """The same, about two in three sampled tokens drawn from themselves and a few others."""
    rng = np.random.default_rng(seed)

    def some(episode):
        kept = [
            np.union1d(rng.integers(0, CONFIG.vocab_size, rng.integers(0, max_kept)), [token])
            if sampled and rng.random() < 0.7
            else np.zeros(0, np.int32)
            for token, sampled in zip(episode.tokens_T, episode.loss_mask_T, strict=True)
        ]
        return dataclasses.replace(
            episode, kept_counts_T=np.array([len(ids) for ids in kept]), kept_ids_K=np.concatenate(kept)
        )

    return [dataclasses.replace(c, episodes=tuple(some(e) for e in c.episodes)) for c in groups]


def packed_rows(groups, bucket=128):
    """All closings as few rows, members sharing their prompt."""
    return pack(groups, bucket).rows


def unpacked_rows(groups, bucket=64):
    """One episode per row."""
    alone = []
    for closing in groups:
        for episode, advantage in zip(closing.episodes, closing.advantages, strict=True):
            single = dataclasses.replace(closing, episodes=(episode,), advantages=(advantage,))
            alone.extend(pack([single], bucket).rows)
    return alone


def leaves(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def assert_close(left, right, tolerance=2e-5):
    """Equal relative to the largest entry of each array; float32 sums in another order differ by a little over 1e-5."""
    for a, b in zip(leaves(left), leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max() + 1e-12)


def assert_identical(left, right):
    for a, b in zip(leaves(left), leaves(right), strict=True):
        np.testing.assert_array_equal(a, b)


def plain_logprobs(adapter, groups, temperature=1.0, config=CONFIG):
    """log pi [episodes, LENGTH - 1] of every token but the first, by the plainest means.

    One episode per row, the logits of all positions, no packing, no chunks. A token with kept ids is one of those.
    """
    episodes = [episode for closing in groups for episode in closing.episodes]
    tokens_BT = np.stack([np.pad(episode.tokens_T, (0, LENGTH - len(episode))) for episode in episodes])
    segments_BT = np.stack([np.arange(LENGTH) < len(episode) for episode in episodes]).astype(np.int32)
    positions_BT = np.broadcast_to(np.arange(LENGTH), tokens_BT.shape)
    seen_BTT = visible(segments_BT, 0 * segments_BT)
    params = random_params(config=config)
    hidden = hidden_states(config, params, adapter, LORA.scale, tokens_BT, positions_BT, seen_BTT)
    left_out = np.zeros((*tokens_BT.shape, config.vocab_size), bool)
    for b, episode in enumerate(episodes):
        offsets = kept_offsets(episode.kept_counts_T)
        for t in np.flatnonzero(episode.kept_counts_T):
            left_out[b, t] = True
            left_out[b, t, episode.kept_ids_K[offsets[t] : offsets[t + 1]]] = False
    logits = jnp.where(left_out[:, 1:], -jnp.inf, unembed(config, params, hidden)[:, :-1])
    table = jax.nn.log_softmax(logits / temperature)
    return jnp.take_along_axis(table, tokens_BT[:, 1:, None], -1)[..., 0]


def per_token(groups, value):
    """`value(episode, advantage)` arrays of each episode, laid out as `plain_logprobs`."""
    return np.stack(
        [
            np.pad(value(episode, advantage), (0, LENGTH - len(episode)))[1:]
            for closing in groups
            for episode, advantage in zip(closing.episodes, closing.advantages, strict=True)
        ]
    )


def plain_loss(groups, temperature, loss, config):
    """(adapter, log pi_prox or None) -> the step's loss."""
    mask = per_token(groups, lambda episode, _: episode.loss_mask_T)
    behaviour = per_token(groups, lambda episode, _: episode.logprobs_T)
    advantages = per_token(groups, lambda episode, advantage: np.full(len(episode), advantage, np.float32))
    sequences = np.broadcast_to(np.arange(len(mask))[:, None], mask.shape)

    def total(adapter, proximal=None):
        reference = plain_logprobs(None, groups, temperature, config) if loss.kl_coefficient else None
        logprobs = plain_logprobs(adapter, groups, temperature, config)
        more = {"reference_N": reference, "sequences_N": sequences, "proximal_N": proximal}
        value, _ = policy_loss(logprobs, behaviour, advantages, mask, loss, **more)
        return value / loss.denominator(mask.sum(), len(mask))

    return total


def plain_gradient(adapter, groups, temperature, loss, config):
    return jax.jit(jax.value_and_grad(plain_loss(groups, temperature, loss, config)))(adapter)


@pytest.fixture
def trainer():
    return make_trainer()


@pytest.mark.parametrize(("temperature", "kl_coefficient", "tied"), [(1.0, 0.0, True), (0.7, 0.05, False)])
def test_shared_prompt_rows_give_the_gradient_of_the_episodes_alone(temperature, kl_coefficient, tied):
    loss, config = LossSettings(kl_coefficient=kl_coefficient), dataclasses.replace(CONFIG, tie_embeddings=tied)
    trainer = make_trainer(config=config, temperature=temperature, loss=loss)
    groups = closings()
    value, expected = plain_gradient(trainer.adapter, groups, temperature, loss, config)
    prepared = trainer.prepare(packed_rows(groups))
    gradient, sums = trainer.gradient(prepared)
    assert prepared.row_tokens < sum(len(e) for c in groups for e in c.episodes)
    np.testing.assert_allclose(float(sums.loss) / prepared.loss_tokens, value, rtol=1e-5)
    assert_close(gradient, expected)


@pytest.mark.parametrize(("temperature", "kl_coefficient", "tied"), [(0.8, 0.0, True), (1.0, 0.05, False)])
def test_truncated_draws_are_renormalised_over_their_kept_ids(temperature, kl_coefficient, tied):
    """Loss, gradient and the penalty of the base are those of policies on the sampler's support, however packed."""
    loss, config = LossSettings(kl_coefficient=kl_coefficient), dataclasses.replace(CONFIG, tie_embeddings=tied)
    trainer = make_trainer(config=config, temperature=temperature, loss=loss, max_kept=9)
    groups = limited(closings(seed=14))
    value, expected = plain_gradient(trainer.adapter, groups, temperature, loss, config)
    for rows in (packed_rows(groups), unpacked_rows(groups)):
        prepared = trainer.prepare(rows)
        gradient, sums = trainer.gradient(prepared)
        assert sums.invalid == 0
        np.testing.assert_allclose(float(sums.loss) / prepared.loss_tokens, value, rtol=1e-5)
        assert_close(gradient, expected)
    whole, _ = plain_gradient(trainer.adapter, closings(seed=14), temperature, loss, config)
    assert abs(float(whole) - float(value)) > 0.01 * abs(float(value))


def test_where_nothing_is_kept_a_truncating_run_computes_what_another_does(trainer):
    groups = closings(seed=15)
    other = make_trainer(max_kept=9)
    assert trainer.prepare(packed_rows(groups)).calls[0][1].kept_NK is None
    expected, _ = trainer.gradient(trainer.prepare(packed_rows(groups)))
    assert_close(other.gradient(other.prepare(packed_rows(groups)))[0], expected)


def test_a_token_outside_its_kept_ids_is_invalid_and_no_other():
    trainer = make_trainer(max_kept=9)
    groups = limited(closings(seed=16))
    rows = packed_rows(groups)
    _, expected_sums = trainer.gradient(trainer.prepare(rows))
    row = rows[0]
    index = int(np.flatnonzero(row.kept_counts_T)[0])
    ids_K = row.kept_ids_K.copy()
    ids_K[: row.kept_counts_T[index]] = (row.tokens_T[index] + 1) % CONFIG.vocab_size
    spoilt = [dataclasses.replace(row, kept_ids_K=ids_K), *rows[1:]]
    gradient, sums = trainer.gradient(trainer.prepare(spoilt))
    assert (expected_sums.invalid, sums.invalid) == (0, 1)
    silent = row.advantages_T.copy()
    silent[index] = np.nan
    without, _ = trainer.gradient(trainer.prepare([dataclasses.replace(row, advantages_T=silent), *rows[1:]]))
    assert_close(gradient, without)


@pytest.mark.parametrize("max_kept", [0, 3])
def test_more_kept_ids_than_were_compiled_are_refused_with_the_mend(max_kept):
    trainer = make_trainer(max_kept=max_kept, buckets=(128,))
    with pytest.raises(ValueError, match=r"same \[sampling\]"):
        trainer.prepare(packed_rows(limited(closings())))


def test_any_split_into_rows_gives_the_same_gradient(trainer):
    groups = closings(seed=5)
    splits = [
        packed_rows(groups),
        packed_rows(groups[::-1]),
        packed_rows(groups, bucket=64),
        [row for closing in groups for row in pack([closing], 128).rows],
        unpacked_rows(groups),
        [*packed_rows(groups[:2], 64), *unpacked_rows(groups[2:4], 64), *packed_rows(groups[4:], 128)],
    ]
    expected, expected_sums = trainer.gradient(trainer.prepare(splits[0]))
    for rows in splits[1:]:
        prepared = trainer.prepare(rows)
        gradient, sums = trainer.gradient(prepared)
        assert prepared.loss_tokens == sums.tokens == expected_sums.tokens
        np.testing.assert_allclose(sums.loss, expected_sums.loss, rtol=1e-5, atol=1e-4)
        assert_close(gradient, expected)


@pytest.mark.parametrize(
    "loss",
    [
        LossSettings(policy_loss="gspo", correction="none", aggregation=Aggregation.SEQUENCE_MEAN),
        LossSettings(
            correction="sequence_tis",
            aggregation=Aggregation.CONSTANT,
            constant_length=9,
            kl_coefficient=0.2,
            kl_in=KlPlace.REWARD,
        ),
    ],
    ids=lambda loss: f"{loss.policy_loss}-{loss.aggregation}",
)
def test_what_looks_at_whole_episodes_does_not_depend_on_the_split_either(loss):
    """And equals the loss of one episode per row, by the plainest means."""
    trainer = make_trainer(loss=loss)
    groups = closings(seed=5)
    episodes = sum(len(c.episodes) for c in groups)
    expected = None
    for rows in (
        packed_rows(groups),
        packed_rows(groups[::-1], bucket=64),
        unpacked_rows(groups),
        [*packed_rows(groups[:2], 64), *unpacked_rows(groups[2:4], 64), *packed_rows(groups[4:], 128)],
    ):
        prepared = trainer.prepare(rows)
        assert (prepared.sequences, prepared.denominator) == (episodes, loss.denominator(-1, episodes))
        gradient, sums = trainer.gradient(prepared)
        expected = expected or (gradient, sums)
        assert_close(gradient, expected[0])
        np.testing.assert_allclose(sums.loss, expected[1].loss, rtol=1e-5, atol=1e-4)
    value, plain = plain_gradient(trainer.adapter, groups, 1.0, loss, CONFIG)
    np.testing.assert_allclose(expected[1].loss / prepared.denominator, value, rtol=1e-4)
    assert_close(expected[0], plain, tolerance=1e-4)


def test_remat_and_rows_per_call_change_nothing(trainer):
    groups = closings(seed=6)
    expected, _ = trainer.gradient(trainer.prepare(packed_rows(groups)))
    other = make_trainer(remat=True, rows_per_call=3, buckets=(128,))
    assert_close(other.gradient(other.prepare(packed_rows(groups)))[0], expected)


def test_tokens_outside_the_mask_contribute_nothing(trainer):
    rows = packed_rows(closings(seed=7))
    spoilt = [
        dataclasses.replace(
            row,
            logprobs_T=np.where(row.loss_mask_T, row.logprobs_T, np.float32(np.nan)),
            advantages_T=np.where(row.loss_mask_T, row.advantages_T, np.float32(1e6)),
        )
        for row in rows
    ]
    left, left_sums = trainer.gradient(trainer.prepare(rows))
    right, right_sums = trainer.gradient(trainer.prepare(spoilt))
    assert_identical(left, right)
    assert_identical(left_sums, right_sums)


def test_a_token_without_a_predecessor_is_not_predicted_from_itself(trainer):
    """Such a row is malformed; its first token must not leak into the loss."""
    (row,) = packed_rows(closings(prompts=(5,)))
    mask_T = row.loss_mask_T.copy()
    mask_T[0] = True
    assert trainer.prepare([dataclasses.replace(row, loss_mask_T=mask_T)]).loss_tokens == row.loss_mask_T.sum()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_importance_ratio_is_one_for_the_sampler_that_holds_the_same_weights(temperature):
    trainer = make_trainer(temperature=temperature, buckets=(128,))
    groups = closings(seed=8)
    logprobs = iter(np.asarray(plain_logprobs(trainer.adapter, groups, temperature)))

    def as_sampled(episode):
        logprobs_T = np.concatenate([[0], next(logprobs)[: len(episode) - 1]])
        return dataclasses.replace(episode, logprobs_T=np.where(episode.loss_mask_T, logprobs_T, 0))

    groups = [dataclasses.replace(c, episodes=tuple(as_sampled(e) for e in c.episodes)) for c in groups]
    metrics = trainer.run(trainer.prepare(packed_rows(groups)))
    assert metrics.max_abs_log_ratio < 1e-4
    assert metrics.effective_sample_size == pytest.approx(1, abs=1e-5)
    assert metrics.capped_fraction == metrics.clipped_fraction == 0


def test_steps_make_rewarded_tokens_likelier_and_others_less_likely():
    trainer = make_trainer(fresh=True)
    groups = [dataclasses.replace(c, advantages=(1.0, 1.0, -1.0, -1.0)) for c in closings(seed=9)]
    rows, start = packed_rows(groups), trainer.adapter
    steps = [trainer.run(trainer.prepare(rows)) for _ in range(8)]
    assert [metrics.step for metrics in steps] == list(range(1, 9))
    assert all(metrics.updated and metrics.gradient_norm > 0 for metrics in steps)
    weight = per_token(groups, lambda episode, advantage: episode.loss_mask_T * advantage)
    gain = plain_logprobs(trainer.adapter, groups) - plain_logprobs(start, groups)
    assert (weight > 0).any()
    assert gain[weight > 0].sum() > 0.5
    assert gain[weight < 0].sum() < -0.5


def test_nothing_compiles_after_warm_up():
    trainer = make_trainer()
    compiled = trainer.compiles
    for seed in range(12):
        rng = np.random.default_rng(seed)
        groups = closings(seed, members=int(rng.integers(1, 6)), prompts=PROMPTS[: rng.integers(1, 6)])
        rows = [*packed_rows(groups, int(rng.choice(BUCKETS))), *unpacked_rows(groups[:1])]
        trainer.run(trainer.prepare(rows))
        jax.tree.map(np.asarray, trainer.adapter)
        trainer.restore(jax.tree.map(np.asarray, trainer.state()))
    trainer.run(trainer.prepare([]))
    assert trainer.compiles == compiled
    limits = make_trainer(max_kept=9)
    compiled = trainer.compiles
    limits.run(limits.prepare([*packed_rows(limited(closings(seed=17))), *unpacked_rows(closings(seed=18))]))
    assert trainer.compiles == compiled
    jax.jit(lambda x: x * 3.14159)(np.ones(7))
    assert trainer.compiles > compiled  # so the counter does count


def test_an_interrupted_step_leaves_the_state_bit_for_bit():
    rows = unpacked_rows(closings(seed=10))
    trainer = make_trainer()
    trainer.run(trainer.prepare(rows[:5]))
    trainer.run(trainer.prepare(rows))
    undisturbed = jax.tree.map(np.array, trainer.state())

    trainer = make_trainer()
    trainer.run(trainer.prepare(rows[:5]))
    prepared = trainer.prepare(rows)
    assert len(prepared.calls) > 3
    before = jax.tree.map(np.array, trainer.state())
    for stop_at in (0, 1, len(prepared.calls) - 1, len(prepared.calls)):
        answers = iter([False] * stop_at + [True])
        assert trainer.run(prepared, interrupted=lambda answers=answers: next(answers)) is None
        assert_identical(before, trainer.state())
    trainer.run(prepared)
    assert_identical(trainer.state(), undisturbed)


def test_a_restored_trainer_takes_the_same_next_step():
    settings = {"optimizer": OptimizerSettings(warmup_steps=3, weight_decay=0.1), "buckets": (128,)}
    trainer = make_trainer(**settings)
    rows = packed_rows(closings(seed=11))
    trainer.run(trainer.prepare(rows))
    kept = trainer.state()
    saved = jax.tree.map(np.asarray, kept)
    uninterrupted = trainer.run(trainer.prepare(rows))
    assert_identical(kept, saved)  # a checkpoint that is still being written is not overwritten by the next step
    expected = jax.tree.map(np.array, trainer.state())
    other = make_trainer(**settings, fresh=True)
    other.restore(saved)
    assert other.step_number == 1
    assert other.run(other.prepare(rows)) == uninterrupted
    assert_identical(other.state(), expected)


UPDATES = {"epochs": 2, "minibatches": 2, "buckets": (128,)}


def test_several_updates_of_a_step_keep_near_the_policy_that_it_starts_from():
    """Decoupled PPO, by the plainest means: pi_prox is the policy at the start of the step in every update of it."""
    loss = LossSettings(clip_anchor=Anchor.PROXIMAL, clip_low=0.02, clip_high=0.02)
    settings = OptimizerSettings(learning_rate=0.02, warmup_steps=2)
    trainer = make_trainer(loss=loss, optimizer=settings, **UPDATES)
    groups = closings(seed=19)
    parts = groups[0::2], groups[1::2]
    prepared = trainer.prepare(*(packed_rows(part) for part in parts))
    assert [len(update.calls) > 0 for update in prepared.updates] == [True, True]

    adapter = first = jax.tree.map(np.array, trainer.adapter)
    transformation = settings.transformation()
    moments = transformation.init(adapter)
    differentiate = [jax.jit(jax.grad(plain_loss(part, 1.0, loss, CONFIG))) for part in parts]
    proximal = [jax.jit(functools.partial(plain_logprobs, groups=part))(first) for part in parts]
    for part in (0, 1, 0, 1):
        gradient = differentiate[part](adapter, proximal[part])
        change, moments = transformation.update(gradient, moments, adapter)
        adapter = jax.tree.map(lambda x, y: x + y, adapter, change)

    metrics = trainer.run(prepared)
    assert (metrics.updates, metrics.updated, trainer.step_number) == (4, True, 1)
    assert 0 < metrics.clipped_fraction < 1
    for new, old, expected in zip(leaves(trainer.adapter), leaves(first), leaves(adapter), strict=True):
        np.testing.assert_allclose(new - old, expected - old, rtol=0, atol=2e-3 * np.abs(expected - old).max())


def test_a_step_of_several_updates_is_interrupted_and_resumed_whole():
    rows = [packed_rows(part) for part in (closings(seed=20)[:3], closings(seed=20)[3:])]
    trainer = make_trainer(**UPDATES)
    compiled = trainer.compiles
    prepared = trainer.prepare(*rows)
    trainer.run(prepared)
    saved = jax.tree.map(np.asarray, trainer.state())
    asked = []
    undisturbed = trainer.run(prepared, interrupted=lambda: asked.append(0) or False)
    expected = jax.tree.map(np.array, trainer.state())
    assert len(asked) == 3 * len(prepared.calls) + 4  # each call three times, with that of pi_prox, and each update
    trainer.restore(saved)
    for stop_at in range(len(asked)):
        answers = iter([False] * stop_at + [True])
        assert trainer.run(prepared, interrupted=lambda answers=answers: next(answers)) is None
        assert_identical(saved, trainer.state())
    assert trainer.run(prepared) == undisturbed
    assert_identical(expected, trainer.state())
    assert trainer.compiles == compiled


def test_a_step_whitens_its_advantages_whatever_minibatch_they_lie_in():
    trainer = build(advantages=AdvantageSettings("reinforce++"), minibatches=2)
    groups = closings(seed=21)
    calls = trainer.prepare(packed_rows(groups[:2]), unpacked_rows(groups[2:])).calls
    found = np.concatenate([np.asarray(batch.advantages_N)[np.asarray(batch.mask_N())] for _, batch in calls])
    assert len(found) == sum(e.sampled_tokens for c in groups for e in c.episodes)
    assert abs(found.mean()) < 1e-5
    assert abs(found.std() - 1) < 1e-5


def test_state_of_another_adapter_is_refused(trainer):
    other = build(lora=LoraSettings(rank=5))
    with pytest.raises(ValueError, match=r"adapter.*\[lora\]"):
        trainer.restore(other.state())


def test_without_loss_tokens_nothing_moves_and_nothing_is_nan():
    trainer = make_trainer()
    row = packed_rows(closings())[0]
    trainer.run(trainer.prepare([row]))
    before = jax.tree.map(np.array, trainer.state()._replace(step=0))
    for rows in ([], [dataclasses.replace(row, loss_mask_T=np.zeros_like(row.loss_mask_T))]):
        metrics = trainer.run(trainer.prepare(rows))
        assert not metrics.updated
        assert all(np.isfinite(value) for value in dataclasses.astuple(metrics))
    assert_identical(before, trainer.state()._replace(step=0))
    assert trainer.step_number == 3


def test_zero_advantages_still_count_in_the_denominator(trainer):
    groups = closings(seed=12)
    silent = [dataclasses.replace(c, advantages=(0.0,) * len(c.episodes)) for c in closings(seed=13)]
    silent = [dataclasses.replace(c, closing_id=f"silent-{c.closing_id}") for c in silent]
    alone, both = trainer.prepare(packed_rows(groups)), trainer.prepare(packed_rows([*groups, *silent]))
    scale = alone.loss_tokens / both.loss_tokens
    assert scale < 0.7
    expected = jax.tree.map(lambda x: x * scale, trainer.gradient(alone)[0])
    assert_close(trainer.gradient(both)[0], expected)


def test_a_gradient_that_is_not_finite_is_left_out_and_said_so():
    trainer = make_trainer()
    broken = random_adapter(trainer.adapter)
    broken["q_proj"]["a"][0, 0, 0] = np.nan
    trainer.restore(trainer.state()._replace(adapter=broken))
    optimizer = jax.tree.map(np.array, trainer.state().optimizer)
    metrics = trainer.run(trainer.prepare(packed_rows(closings())))
    assert not metrics.updated
    assert metrics.invalid_tokens == metrics.loss_tokens
    assert_identical(optimizer, trainer.state().optimizer)


def test_a_row_of_an_unknown_bucket_is_refused_with_the_mend(trainer):
    with pytest.raises(ValueError, match=r"96 tokens.*packing\.buckets"):
        trainer.prepare(packed_rows(closings(), bucket=96))


def test_a_step_before_compile_is_refused():
    trainer = build()
    with pytest.raises(RuntimeError, match=r"compile\(\)"):
        trainer.run(trainer.prepare([]))


def test_the_base_is_not_differentiated():
    """A frozen base costs two products forward and two backward per weight and token; a trained one would cost six."""
    config = dataclasses.replace(CONFIG, num_layers=1, embed_dim=128, num_heads=8, head_dim=16, mlp_dim=384)
    config = dataclasses.replace(config, vocab_size=16)
    trainer = Trainer(
        config,
        random_params(config=config),
        LoraSettings(rank=1),
        OptimizerSettings(),
        LossSettings(),
        buckets=(64,),
        rows_per_call=4,
        temperature=1.0,
        seed=0,
    )
    trainer.compile()
    weights = sum(np.prod(shape) for shape in config.layer_shapes().values())
    per_token = trainer.flops(64) / (4 * 64)
    assert 4.0 <= per_token / weights < 5.2


@pytest.mark.parametrize(
    ("make", "mend"),
    [
        (lambda: OptimizerSettings(learning_rate=0.0), "usual value"),
        (lambda: OptimizerSettings(b2=1.0), "usual value"),
        (lambda: OptimizerSettings(clip_norm=-1.0), "usual value"),
        (lambda: OptimizerSettings(weight_decay=-1.0), "turns it off"),
        (lambda: OptimizerSettings(warmup_steps=-1), "turns the warm-up off"),
        (lambda: build(temperature=0.0), "usual value is 1.0"),
        (lambda: build(rows_per_call=0), "at least 1"),
    ],
)
def test_impossible_settings_are_refused_with_the_mend(make, mend):
    with pytest.raises(ValueError, match=mend):
        make()
