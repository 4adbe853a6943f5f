"""The loss equals its formula, stays finite, and counts only what is in the mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from learner.losses import (
    CORRECTIONS,
    MAX_LOG_RATIO,
    POLICY_LOSSES,
    Aggregation,
    Anchor,
    KlPlace,
    LossSettings,
    Takes,
    add_sums,
    discounted,
    no_sums,
    policy_loss,
)
from tests.learner import papers

COUNT = 257
LENGTHS = (1, 7, 3, 12, 5, 9)


def variants():
    """Every policy loss under every correction that it takes, aggregations and penalties in turn."""
    lines = [
        {"policy_loss": name, "correction": correction, **extra}
        for name, line in POLICY_LOSSES.items()
        for correction in (("none",) if line.takes is Takes.NOTHING else CORRECTIONS)
        for extra in {
            "ppo": ({}, {"dual_clip": 1.5}),
            "decoupled_ppo": ({}, {"clip_anchor": Anchor.PROXIMAL}),
            "gspo": ({}, {"clip_low": 0.01, "clip_high": 0.02}),
        }.get(name, ({},))
    ]
    penalties = [
        {},
        {"kl_coefficient": 0.3},
        {"kl_coefficient": 0.3, "kl_estimator": "k1", "kl_in": KlPlace.REWARD},
        {"kl_coefficient": 0.3, "kl_estimator": "k2"},
        {"kl_coefficient": 0.3, "kl_estimator": "k1"},
    ]
    aggregations = list(Aggregation)
    bands = {"geometric_mask": {"mask_low": 0.93, "mask_high": 1.07}, "icepop": {"mask_low": 0.8, "mask_high": 1.4}}
    return [
        LossSettings(
            **line,
            **penalties[i % len(penalties)],
            **bands.get(line["correction"], {}),
            aggregation=aggregations[i % len(aggregations)],
            importance_cap=1.3,
            constant_length=11,
        )
        for i, line in enumerate(lines)
    ]


def whole_episodes(seed=0, lengths=LENGTHS):
    """Episodes as `papers` has them, of float32 values, and the same tokens in flat arrays with holes in the mask."""
    rng = np.random.default_rng(seed)
    episodes = []
    for length in lengths:
        pi = -rng.exponential(1.0, length).astype(np.float32)
        near = {name: pi + 0.3 * rng.normal(size=length).astype(np.float32) for name in ("mu", "prox", "ref")}
        advantage = np.full(length, rng.normal(), np.float32)
        episodes.append({"pi": pi, "still": pi, **near, "advantage": advantage})
    holes = 3  # masked entries behind each episode, and at the end
    mask_N = np.concatenate([np.r_[np.ones(length, bool), np.zeros(holes, bool)] for length in lengths])

    def laid(name):
        flat_N = np.full(len(mask_N), np.nan, np.float32)
        flat_N[mask_N] = np.concatenate([e[name] for e in episodes])
        return flat_N

    arrays = {
        "logprobs_N": laid("pi"),
        "behaviour_N": laid("mu"),
        "proximal_N": laid("prox"),
        "reference_N": laid("ref"),
        "advantages_N": laid("advantage"),
        "sequences_N": np.repeat(np.arange(len(lengths)), [length + holes for length in lengths]),
        "mask_N": mask_N,
    }
    return episodes, arrays


def value_and_gradient(arrays, loss):
    rest = {name: x for name, x in arrays.items() if name != "logprobs_N"}
    if not loss.kl_coefficient:
        rest.pop("reference_N", None)
    return jax.value_and_grad(lambda x: policy_loss(x, **rest, settings=loss), has_aux=True)(
        jnp.asarray(arrays["logprobs_N"])
    )


@pytest.mark.parametrize("loss", variants(), ids=lambda loss: f"{loss.policy_loss}-{loss.correction}")
def test_every_loss_equals_its_paper(loss):
    """Value and gradient of a step, against NumPy's; the gradient there is a difference quotient in float64."""
    episodes, arrays = whole_episodes()
    (total, sums), grad_N = value_and_gradient(arrays, loss)
    denominator = loss.denominator(sum(LENGTHS), len(LENGTHS))
    np.testing.assert_allclose(total / denominator, papers.objective(episodes, loss), rtol=1e-5)
    expected_N = np.zeros(len(grad_N))
    expected_N[arrays["mask_N"]] = papers.gradient(episodes, loss)
    np.testing.assert_allclose(grad_N / denominator, expected_N, rtol=2e-4, atol=1e-7)
    assert sums.tokens == sum(LENGTHS)
    assert (sums.masked > 0) == (sums.kept < sums.tokens - sums.clipped)
    assert (sums.masked > 0) == (loss.correction in ("icepop", "geometric_mask"))


@pytest.mark.parametrize("loss", variants(), ids=lambda loss: f"{loss.policy_loss}-{loss.correction}")
def test_an_episodes_loss_does_not_depend_on_the_others_in_its_call(loss):
    """The sums over a step do not depend on which call holds which episode."""
    _, whole = whole_episodes(seed=1)
    (total, sums), grad_N = value_and_gradient(whole, loss)
    cut = np.searchsorted(whole["sequences_N"], 3)
    parts = [{name: x[place] for name, x in whole.items()} for place in (slice(cut, None), slice(0, cut))]
    parts[0]["sequences_N"] = parts[0]["sequences_N"] - 3
    (second, second_sums), second_N = value_and_gradient(parts[0], loss)
    (first, first_sums), first_N = value_and_gradient(parts[1], loss)
    np.testing.assert_allclose(first + second, total, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(np.concatenate([first_N, second_N]), grad_N, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(add_sums(first_sums, second_sums), sums, rtol=1e-5)


def test_a_sum_runs_to_the_end_of_its_episode_and_decays():
    x_N, sequences_N = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0]), np.array([0, 0, 0, 1, 2, 2])
    np.testing.assert_allclose(discounted(x_N, sequences_N), [7, 6, 4, 8, 48, 32])
    np.testing.assert_allclose(discounted(x_N, sequences_N, 0.5), [1 + 0.5 * 4, 4, 4, 8, 32, 32])


def tokens(seed, spread=0.3):
    rng = np.random.default_rng(seed)
    logprobs = -rng.exponential(1.0, COUNT)
    return {
        "logprobs_N": logprobs.astype(np.float32),
        "behaviour_N": (logprobs + spread * rng.normal(size=COUNT)).astype(np.float32),
        "advantages_N": rng.normal(size=COUNT).astype(np.float32),
        "mask_N": rng.random(COUNT) < 0.7,
    }


def reference_loss(loss, logprobs_N, behaviour_N, advantages_N, mask_N, proximal_N=None, reference_N=None):
    """The module's formula in NumPy: value, d value / d logprobs, and the sums that people read."""
    value, grad_N = 0.0, np.zeros(COUNT)
    sums = dict.fromkeys(("clipped", "capped", "abs_log_ratio", "behaviour_kl", "weight", "weight_squared"), 0.0)
    for n in np.flatnonzero(mask_N):
        prox = logprobs_N[n] if proximal_N is None else proximal_N[n]
        ratio, importance = np.exp(logprobs_N[n] - prox), np.exp(prox - behaviour_N[n])
        weight = min(importance, loss.importance_cap) if loss.correction == "tis" else 1.0
        bounded = np.clip(ratio, 1 - loss.clip_low, 1 + loss.clip_high)
        if loss.clip_anchor is Anchor.PROXIMAL:  # PPO as its paper writes it
            term = -min(ratio * advantages_N[n], bounded * advantages_N[n])
            clipped = -term < ratio * advantages_N[n]
        else:
            moved = np.exp(logprobs_N[n] - behaviour_N[n])
            clipped = moved > 1 + loss.clip_high if advantages_N[n] > 0 else moved < 1 - loss.clip_low
            term = -(bounded if clipped else ratio) * advantages_N[n]
        slope = 0.0 if clipped else -ratio * advantages_N[n]
        if reference_N is not None:
            x = reference_N[n] - logprobs_N[n]
            term += loss.kl_coefficient * (np.exp(x) - x - 1)
            slope += loss.kl_coefficient * (1 - np.exp(x))
        value, grad_N[n] = value + weight * term, weight * slope
        log_ratio = logprobs_N[n] - behaviour_N[n]
        sums["clipped"] += clipped
        sums["capped"] += loss.correction == "tis" and importance > loss.importance_cap
        sums["abs_log_ratio"] += abs(log_ratio)
        sums["behaviour_kl"] += np.exp(log_ratio) - log_ratio - 1
        sums["weight"] += importance
        sums["weight_squared"] += importance**2
    return value, grad_N, sums


@pytest.mark.parametrize("proximal", [False, True])
@pytest.mark.parametrize(
    "loss",
    [
        LossSettings(),
        LossSettings(clip_anchor=Anchor.PROXIMAL),
        LossSettings(correction="none"),
        LossSettings(clip_anchor=Anchor.PROXIMAL, clip_low=0.1, clip_high=0.1, importance_cap=1.1),
        LossSettings(kl_coefficient=0.1),
    ],
)
def test_value_gradient_and_sums_equal_the_formula(loss, proximal):
    data = tokens(0)
    rng = np.random.default_rng(1)
    extra = {}
    if proximal:
        extra["proximal_N"] = (data["logprobs_N"] + 0.3 * rng.normal(size=COUNT)).astype(np.float32)
    if loss.kl_coefficient:
        extra["reference_N"] = (data["logprobs_N"] + 0.3 * rng.normal(size=COUNT)).astype(np.float32)
    rest = {name: data[name] for name in ("behaviour_N", "advantages_N", "mask_N")}
    (value, sums), grad_N = jax.value_and_grad(lambda x: policy_loss(x, **rest, settings=loss, **extra), has_aux=True)(
        jnp.asarray(data["logprobs_N"])
    )
    expected, expected_grad_N, expected_sums = reference_loss(loss, **data, **extra)
    np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(grad_N, expected_grad_N, rtol=1e-4, atol=1e-5)
    assert sums.tokens == data["mask_N"].sum()
    assert sums.invalid == 0
    for name, number in expected_sums.items():
        np.testing.assert_allclose(getattr(sums, name), number, rtol=1e-4, err_msg=name)
    assert (sums.clipped > 0) == (proximal or loss.clip_anchor is Anchor.BEHAVIOUR)


def test_one_update_on_fresh_rows_is_plain_policy_gradient():
    """Ratio and weight are both 1: the gradient with respect to log pi is minus the advantage."""
    data = tokens(2)
    data["behaviour_N"] = data["logprobs_N"]
    logprobs_N = jnp.asarray(data.pop("logprobs_N"))
    grad_N, sums = jax.grad(lambda x: policy_loss(x, **data, settings=LossSettings()), has_aux=True)(logprobs_N)
    np.testing.assert_allclose(grad_N, np.where(data["mask_N"], -data["advantages_N"], 0), rtol=1e-6)
    assert sums.max_abs_log_ratio == sums.clipped == sums.capped == 0
    assert sums.weight**2 / sums.weight_squared == pytest.approx(float(sums.tokens))


def test_masked_tokens_contribute_nothing_even_when_they_are_rubbish():
    data = tokens(3)
    out_N = ~data["mask_N"]
    spoilt = {name: data[name].copy() for name in data}
    spoilt["logprobs_N"][out_N] = -np.inf
    spoilt["behaviour_N"][out_N] = np.nan
    spoilt["advantages_N"][out_N] = 1e30

    def of(data):
        rest = {name: data[name] for name in ("behaviour_N", "advantages_N", "mask_N")}
        return jax.value_and_grad(lambda x: policy_loss(x, **rest, settings=LossSettings()), has_aux=True)(
            jnp.asarray(data["logprobs_N"])
        )

    (clean, clean_sums), clean_grad_N = of(data)
    (value, sums), grad_N = of(spoilt)
    assert value == clean
    assert sums == clean_sums
    np.testing.assert_array_equal(grad_N, clean_grad_N)


ANY = st.floats(width=32, allow_nan=True, allow_infinity=True)


@settings(max_examples=60, deadline=None)
@given(
    loss=st.sampled_from([LossSettings(), *variants()]),
    logprobs_N=hnp.arrays(np.float32, 8, elements=ANY),
    behaviour_N=hnp.arrays(np.float32, 8, elements=ANY),
    advantages_N=hnp.arrays(np.float32, 8, elements=st.floats(-1e6, 1e6, width=32) | st.just(float("nan"))),
    mask_N=hnp.arrays(np.bool_, 8),
)
def test_finite_for_any_log_probs(loss, logprobs_N, behaviour_N, advantages_N, mask_N):
    sequences_N = np.repeat(np.arange(4), 2)
    reference_N = np.where(np.isfinite(behaviour_N), behaviour_N, 0)[::-1].copy() if loss.kl_coefficient else None
    (value, sums), grad_N = jax.value_and_grad(
        lambda x: policy_loss(
            x, behaviour_N, advantages_N, mask_N, loss, reference_N=reference_N, sequences_N=sequences_N
        ),
        has_aux=True,
    )(jnp.asarray(logprobs_N))
    assert np.isfinite(value)
    assert np.isfinite(grad_N).all()
    assert np.isfinite(np.array(sums)).all()
    broken_N = ~(np.isfinite(logprobs_N) & np.isfinite(behaviour_N) & np.isfinite(advantages_N))
    assert sums.invalid == (broken_N & mask_N).sum()
    assert not np.asarray(grad_N)[~mask_N | broken_N].any()


@pytest.mark.parametrize(("anchor", "advantage"), [("behaviour", 1.0), ("behaviour", -1.0), ("proximal", 1.0)])
def test_stale_rows_push_no_token_further_than_the_band(anchor, advantage):
    """Anchored at the sampler, a token that already moved the way its advantage points is left alone; the way back is
    open. Anchored at the update's start, one update per batch has no such bound."""
    moved_N = jnp.log(jnp.array([0.5, 0.9, 1.0, 1.2, 2.0]))
    advantages_N = jnp.full(5, advantage)
    settings = LossSettings(clip_anchor=Anchor(anchor))
    grad_N, sums = jax.grad(
        lambda x: policy_loss(x, jnp.full(5, -3.0), advantages_N, jnp.ones(5, bool), settings), has_aux=True
    )(moved_N - 3.0)
    expected = {("behaviour", 1.0): [1, 1, 1, 1, 0], ("behaviour", -1.0): [0, 1, 1, 1, 1]}
    np.testing.assert_array_equal(grad_N != 0, np.array(expected.get((anchor, advantage), [1] * 5), bool))
    assert sums.clipped == (anchor == "behaviour")


def test_a_stale_token_never_weighs_more_than_the_cap():
    logprobs_N, behaviour_N = jnp.array([0.0, -50.0]), jnp.array([-50.0, 0.0])
    settings = LossSettings(importance_cap=2.0, clip_anchor=Anchor.PROXIMAL)
    grad_N, sums = jax.grad(
        lambda x: policy_loss(x, behaviour_N, jnp.ones(2), jnp.ones(2, bool), settings),
        has_aux=True,
    )(logprobs_N)
    np.testing.assert_allclose(grad_N, [-2.0, -np.exp(-MAX_LOG_RATIO)], rtol=1e-5)
    assert sums.capped == 1


def test_sums_of_two_halves_are_the_sums_of_the_whole():
    data = tokens(4)
    half = {name: x[: COUNT // 2] for name, x in data.items()}
    rest = {name: x[COUNT // 2 :] for name, x in data.items()}
    _, whole = policy_loss(**data, settings=LossSettings())
    joined = add_sums(no_sums(), add_sums(*(policy_loss(**part, settings=LossSettings())[1] for part in (half, rest))))
    np.testing.assert_allclose(joined, whole, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "mend"),
    [
        ({"clip_low": 0.0}, "usual value is 0.2"),
        ({"clip_high": -1.0}, "usual value is 0.28"),
        ({"importance_cap": 0.0}, "correction = 'none'"),
        ({"kl_coefficient": -0.1}, "0 turns the penalty off"),
        ({"policy_loss": "pppo"}, "must be one of decoupled_ppo, ppo"),
        ({"correction": "tiss"}, "must be one of tis"),
        ({"kl_estimator": "k4"}, "must be one of k1"),
        ({"policy_loss": "gspo"}, "would count it twice"),
        ({"dual_clip": 3.0}, "is of the policy loss ppo"),
        ({"policy_loss": "ppo", "correction": "none", "dual_clip": 0.5}, "usual value is 3.0"),
        ({"mask_low": 1.5}, "both sides of 1"),
        ({"constant_length": 0}, "sums an episode's tokens"),
    ],
)
def test_impossible_settings_are_refused_with_the_mend(change, mend):
    with pytest.raises(ValueError, match=mend):
        LossSettings(**change)
