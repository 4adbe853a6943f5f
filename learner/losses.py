"""The policy losses, their off-policy corrections and the KL penalty: tables of functions of a step's loss tokens.

Invariants: the value and the gradient are finite whatever the inputs are; a token that is masked out contributes
nothing, not even a NaN; sums over tokens are taken here and divided by one global denominator outside, so that the
gradient does not depend on how closings were split into rows.

With mu the behaviour policy (the sampler's), pi the learner's and pi_prox the learner's at the start of the update, the
loss of token n is

    loss_n = scale_n * weight_n * (policy_n + beta * kl_n)

`policy_n` is a line of `POLICY_LOSSES`. Some take pi / mu themselves: they have no second weight. The others measure pi
against pi_prox, or use log pi alone; `weight_n`, a line of `CORRECTIONS`, then makes up for the rest without gradient.
While a batch makes one update, pi_prox is pi and the weight is one of pi / mu. `kl_n` is a line of `KL_ESTIMATORS`, and
`scale_n` is 1, or 1 / |o| of the token's sequence for the mean over sequences (see `Aggregation`). docs/algorithms.md
has the formulas and the papers, and shows how to add a line.

Where a token was drawn from less than the whole vocabulary (top-k, top-p, min-p), mu, pi, pi_prox and pi_ref are all
renormalised over the tokens that mu kept for it. So ratios compare policies on one support, equal weights give 1, and
k3 estimates the KL of pi to pi_ref on that support; against a pi_ref of the whole vocabulary, the mass that mu cut off
would count as divergence.

Axes: N loss tokens, those of a sequence (one episode) side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this magnitude before they are exponentiated: exp(20)^2 and its sums fit in float32."""
MAX_NATS = 1e6
"""Log-probs that a loss multiplies are clamped to this magnitude, for the same reason."""


class Anchor(StrEnum):
    """The policy that the clip of `decoupled_ppo` keeps the learner near."""

    PROXIMAL = "proximal"
    """The learner's own at the start of the update. With one update per batch it never clips."""
    BEHAVIOUR = "behaviour"
    """The sampler's: a token that has left the band since it was sampled gives no gradient that would take it further,
    so that stale rows cannot push the policy away."""


class Aggregation(StrEnum):
    """How a step's loss tokens become one number. Each has one denominator over the whole step."""

    TOKEN_MEAN = "token_mean"
    """The mean over all loss tokens (DAPO, arXiv:2503.14476): long episodes weigh more."""
    SEQUENCE_MEAN = "sequence_mean"
    """The mean over episodes of their means over tokens (GRPO, arXiv:2402.03300): every episode weighs the same."""
    CONSTANT = "constant"
    """The mean over episodes of their sums over tokens, divided by a constant length (Dr. GRPO, arXiv:2503.20783)."""


class KlPlace(StrEnum):
    """Where the penalty on the KL to the reference goes."""

    LOSS = "loss"
    """Into the loss, with the gradient of the estimate."""
    REWARD = "reward"
    """Into the advantage: each token loses the sum of the estimates from it to its episode's end, without gradient."""


@dataclass(frozen=True)
class LossSettings:
    """The `[loss]` section of the run file. Defaults are those of the algorithm `dapo`."""

    policy_loss: str = "decoupled_ppo"
    """`decoupled_ppo`, `ppo`, `gspo`, `gspo_token`, `cispo` or `reinforce`; see docs/algorithms.md."""
    clip_anchor: Anchor = Anchor.BEHAVIOUR
    """What the clip of `decoupled_ppo` measures the policy against: `behaviour` or `proximal`."""
    clip_low: float = 0.2
    """The ratio is clipped at 1 - clip_low; 1 is no bound."""
    clip_high: float = 0.28
    """The ratio is clipped at 1 + clip_high."""
    dual_clip: float | None = None
    """Of `ppo`: a token of negative advantage costs no more than this many times its size. The usual value is 3."""
    correction: str = "tis"
    """Of pi_prox / pi_behaviour, where the policy loss does not use it already: `tis`, `sequence_tis`, `icepop`,
    `geometric_mask` or `none`. `none` treats stale rows as fresh."""
    importance_cap: float = 2.0
    """The most that a token weighs (all corrections but `icepop`). Tokens count less without bound, never more."""
    mask_low: float = 0.5
    """Of `icepop` and `geometric_mask`: what lies below this ratio does not train."""
    mask_high: float = 5.0
    """Of the same: what lies above this ratio does not train."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    """`token_mean`, `sequence_mean` or `constant`, each over the whole step."""
    constant_length: int = 512
    """Tokens that `constant` divides an episode's sum by. Left out of a run file: sampling.max_context."""
    kl_coefficient: float = 0.0
    """Of the penalty on KL(pi || base without the adapter). Above 0 it costs one more forward pass a step."""
    kl_estimator: str = "k3"
    """`k1`, `k2` or `k3`. The gradient of `k1` in the loss is 0 in the mean: it belongs into the reward."""
    kl_in: KlPlace = KlPlace.LOSS
    """`loss` or `reward`."""

    def __post_init__(self) -> None:
        for name, table in (
            ("policy_loss", POLICY_LOSSES),
            ("correction", CORRECTIONS),
            ("kl_estimator", KL_ESTIMATORS),
        ):
            if getattr(self, name) not in table:
                raise ValueError(f"{name} must be one of {', '.join(table)}; found {getattr(self, name)!r}")
        if not 0 < self.clip_low <= 1:
            raise ValueError(f"clip_low must lie between 0 and 1, found {self.clip_low}; the usual value is 0.2")
        if not 0 < self.clip_high < math.inf:
            raise ValueError(f"clip_high must be above 0, found {self.clip_high}; the usual value is 0.28")
        if self.dual_clip is not None and (self.policy_loss != "ppo" or not 1 < self.dual_clip < math.inf):
            raise ValueError(
                f"dual_clip must be above 1 and is of the policy loss ppo, found {self.dual_clip} with "
                f"{self.policy_loss}; the usual value is 3.0, and leaving it out turns it off"
            )
        if self.correction != "none" and self.takes is Takes.NOTHING:
            raise ValueError(
                f"correction must be 'none' with policy_loss = {self.policy_loss!r}, found {self.correction!r}: that "
                "loss uses pi / pi_behaviour already, a second weight would count it twice. Set correction = 'none', "
                "or choose the loss by `algorithm`, which sets both"
            )
        if not 0 < self.importance_cap < math.exp(MAX_LOG_RATIO):
            raise ValueError(
                f"importance_cap must be above 0 and below e^{MAX_LOG_RATIO:.0f}, found {self.importance_cap}; "
                "the usual value is 2.0, and correction = 'none' turns the weights off"
            )
        if not 0 <= self.mask_low < 1 < self.mask_high < math.exp(MAX_LOG_RATIO):
            raise ValueError(
                f"mask_low and mask_high must lie on both sides of 1, found {self.mask_low} and {self.mask_high}; "
                "icepop's are 0.5 and 5.0"
            )
        if self.constant_length < 1:
            raise ValueError(
                f"constant_length must be at least 1 token, found {self.constant_length}; 1 sums an episode's tokens"
            )
        if not 0 <= self.kl_coefficient < math.inf:
            raise ValueError(f"kl_coefficient must be 0 or more, found {self.kl_coefficient}; 0 turns the penalty off")

    @property
    def takes(self) -> Takes:
        """What the correction weighs under this policy loss."""
        return POLICY_LOSSES[self.policy_loss].takes

    @property
    def ignores_staleness(self) -> bool:
        """Whether tokens of an older policy train as if they were fresh."""
        return self.takes is not Takes.NOTHING and self.correction == "none"

    @property
    def needs_sequences(self) -> bool:
        """Whether a token's loss depends on the other tokens of its episode."""
        return (
            POLICY_LOSSES[self.policy_loss].sequences
            or CORRECTIONS[self.correction].sequences
            or self.aggregation is Aggregation.SEQUENCE_MEAN
            or (self.kl_coefficient > 0 and self.kl_in is KlPlace.REWARD)
        )

    def denominator(self, tokens: int, sequences: int) -> float:
        """What the step's sum is divided by, from its loss tokens and the episodes that have any."""
        match self.aggregation:
            case Aggregation.TOKEN_MEAN:
                return float(tokens)
            case Aggregation.SEQUENCE_MEAN:
                return float(sequences)
            case Aggregation.CONSTANT:
                return float(sequences * self.constant_length)


# What the tables' functions are given, and what they give back


class Tokens(NamedTuple):
    """The loss tokens of one call; every array is finite, and 0 where `valid_N` is false."""

    logprobs_N: Any
    """log pi. The only one that is differentiated."""
    behaviour_N: Any
    """log mu."""
    proximal_N: Any
    """log pi_prox."""
    advantages_N: Any
    valid_N: Any
    sequences_N: Any
    """Which episode a token belongs to, from 0; None unless the table's line says `sequences`."""

    def total(self, x_N: Any) -> Any:
        """The sum of `x_N` over the valid tokens of each token's episode."""
        return _total(jnp.where(self.valid_N, x_N, 0.0), self.sequences_N)

    def mean(self, x_N: Any) -> Any:
        """The mean of `x_N` over the valid tokens of each token's episode."""
        return self.total(x_N) / jnp.maximum(self.total(jnp.ones_like(self.logprobs_N)), 1.0)


class Terms(NamedTuple):
    """A policy loss, token by token."""

    loss_N: Any
    clipped_N: Any
    """Tokens whose clip is active: they have no gradient."""
    capped_N: Any = False
    """Tokens whose ratio was truncated and that have a gradient all the same."""


class Takes(StrEnum):
    """Which importance ratio a correction weighs a policy loss by."""

    NOTHING = "nothing"
    """The loss uses pi / mu itself."""
    PROXIMAL = "pi_prox / mu"
    CURRENT = "pi / mu"


@dataclass(frozen=True)
class PolicyLoss:
    """One line of `POLICY_LOSSES`."""

    function: Callable[[Tokens, LossSettings], Terms]
    paper: str
    takes: Takes
    sequences: bool = False
    """Whether it needs `Tokens.sequences_N`."""


@dataclass(frozen=True)
class Correction:
    """One line of `CORRECTIONS`."""

    function: Callable[[Any, Tokens, LossSettings], Any]
    """(clamped log ratio per token, tokens, settings) -> weight per token. What does not train weighs 0."""
    paper: str
    sequences: bool = False


# Policy losses


def clamped(log_ratio_N: Any) -> Any:
    """A log ratio within MAX_LOG_RATIO: what is summed or exponentiated."""
    return jnp.clip(log_ratio_N, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio_of(log_ratio_N: Any) -> Any:
    """exp of a log ratio, bounded."""
    return jnp.exp(clamped(log_ratio_N))


def clipped_surrogate(ratio_N: Any, moved_N: Any, tokens: Tokens, settings: LossSettings) -> Terms:
    """-ratio A, with the ratio held at the band's edge where `moved_N` has left the band in the direction of A.

    With `moved_N` the ratio itself this is -min(ratio A, clip(ratio) A), PPO's surrogate.
    """
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    up_N = tokens.advantages_N > 0
    outside_N = (up_N & (moved_N > high)) | ((tokens.advantages_N < 0) & (moved_N < low))
    kept_N = jnp.where(outside_N, jax.lax.stop_gradient(jnp.clip(ratio_N, low, high)), ratio_N)
    return Terms(-kept_N * tokens.advantages_N, outside_N)


def ppo(tokens: Tokens, settings: LossSettings) -> Terms:
    """-min(r A, clip(r) A) with r = pi / mu, and at most -c A where A < 0 (dual clip c, arXiv:1912.09729)."""
    ratio_N = ratio_of(tokens.logprobs_N - tokens.behaviour_N)
    terms = clipped_surrogate(ratio_N, ratio_N, tokens, settings)
    if settings.dual_clip is None:
        return terms
    over_N = (tokens.advantages_N < 0) & (ratio_N > settings.dual_clip)
    loss_N = jnp.where(over_N, -settings.dual_clip * tokens.advantages_N, terms.loss_N)
    return Terms(loss_N, terms.clipped_N | over_N)


def decoupled_ppo(tokens: Tokens, settings: LossSettings) -> Terms:
    """PPO's surrogate with r = pi / pi_prox, clipped where pi / anchor has left the band."""
    anchor_N = tokens.behaviour_N if settings.clip_anchor is Anchor.BEHAVIOUR else tokens.proximal_N
    moved_N = ratio_of(jax.lax.stop_gradient(tokens.logprobs_N) - anchor_N)
    return clipped_surrogate(ratio_of(tokens.logprobs_N - tokens.proximal_N), moved_N, tokens, settings)


def gspo(tokens: Tokens, settings: LossSettings) -> Terms:
    """-min(s A, clip(s) A) with s = (pi(o) / mu(o))^(1/|o|), the geometric mean of the episode's ratios."""
    ratio_N = ratio_of(tokens.mean(clamped(tokens.logprobs_N - tokens.behaviour_N)))
    return clipped_surrogate(ratio_N, ratio_N, tokens, settings)


def gspo_token(tokens: Tokens, settings: LossSettings) -> Terms:
    """GSPO with s_n = stop_gradient(s) pi_n / stop_gradient(pi_n), so that advantages may differ within an episode."""
    still_N = jax.lax.stop_gradient(tokens.logprobs_N)
    ratio_N = ratio_of(tokens.mean(clamped(still_N - tokens.behaviour_N))) * ratio_of(tokens.logprobs_N - still_N)
    return clipped_surrogate(ratio_N, ratio_N, tokens, settings)


def cispo(tokens: Tokens, settings: LossSettings) -> Terms:
    """-stop_gradient(clip(r)) A log pi with r = pi / mu: no token loses its gradient."""
    ratio_N = ratio_of(jax.lax.stop_gradient(tokens.logprobs_N) - tokens.behaviour_N)
    kept_N = jnp.clip(ratio_N, 1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return Terms(-kept_N * tokens.advantages_N * _nats(tokens), jnp.zeros_like(tokens.valid_N), kept_N != ratio_N)


def reinforce(tokens: Tokens, settings: LossSettings) -> Terms:
    """-A log pi."""
    return Terms(-tokens.advantages_N * _nats(tokens), jnp.zeros_like(tokens.valid_N))


def _nats(tokens: Tokens) -> Any:
    return jnp.clip(tokens.logprobs_N, -MAX_NATS, MAX_NATS)


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "decoupled_ppo": PolicyLoss(decoupled_ppo, "Hilton et al. 2021, arXiv:2110.00641", Takes.PROXIMAL),
    "ppo": PolicyLoss(ppo, "Schulman et al. 2017, arXiv:1707.06347", Takes.NOTHING),
    "gspo": PolicyLoss(gspo, "Zheng et al. 2025, arXiv:2507.18071", Takes.NOTHING, sequences=True),
    "gspo_token": PolicyLoss(gspo_token, "Zheng et al. 2025, arXiv:2507.18071", Takes.NOTHING, sequences=True),
    "cispo": PolicyLoss(cispo, "MiniMax-M1, arXiv:2506.13585", Takes.NOTHING),
    "reinforce": PolicyLoss(reinforce, "Williams 1992", Takes.CURRENT),
}
"""Name in the run file -> policy loss."""


# Off-policy corrections


def no_correction(log_ratio_N: Any, tokens: Tokens, settings: LossSettings) -> Any:
    """1."""
    return jnp.ones_like(log_ratio_N)


def tis(log_ratio_N: Any, tokens: Tokens, settings: LossSettings) -> Any:
    """min(r, cap): truncated importance sampling, token by token."""
    return jnp.minimum(ratio_of(log_ratio_N), settings.importance_cap)


def sequence_tis(log_ratio_N: Any, tokens: Tokens, settings: LossSettings) -> Any:
    """min(product of the episode's r, cap), the same for all its tokens."""
    return jnp.minimum(ratio_of(tokens.total(log_ratio_N)), settings.importance_cap)


def icepop(log_ratio_N: Any, tokens: Tokens, settings: LossSettings) -> Any:
    """r where low <= r <= high, else 0."""
    ratio_N = ratio_of(log_ratio_N)
    return jnp.where((ratio_N >= settings.mask_low) & (ratio_N <= settings.mask_high), ratio_N, 0.0)


def geometric_mask(log_ratio_N: Any, tokens: Tokens, settings: LossSettings) -> Any:
    """min(r, cap) where the geometric mean of the episode's r lies within [low, high], else 0 for all its tokens."""
    mean_N = ratio_of(tokens.mean(log_ratio_N))
    inside_N = (mean_N >= settings.mask_low) & (mean_N <= settings.mask_high)
    return jnp.where(inside_N, tis(log_ratio_N, tokens, settings), 0.0)


CORRECTIONS: dict[str, Correction] = {
    "tis": Correction(tis, "Ionides 2008; IMPALA, arXiv:1802.01561"),
    "sequence_tis": Correction(sequence_tis, "Ionides 2008, over episodes", sequences=True),
    "icepop": Correction(icepop, "IcePop: Ring-1T, arXiv:2510.18855"),
    "geometric_mask": Correction(geometric_mask, "Liu et al. 2025, When Speed Kills Stability", sequences=True),
    "none": Correction(no_correction, ""),
}
"""Name in the run file -> correction."""


# The KL to the reference


def k1(log_ratio_N: Any) -> Any:
    """-x: unbiased, of high variance and either sign."""
    return -log_ratio_N


def k2(log_ratio_N: Any) -> Any:
    """x^2 / 2: its gradient is that of the KL in the mean."""
    return 0.5 * log_ratio_N**2


def k3(log_ratio_N: Any) -> Any:
    """exp(x) - x - 1 >= 0: an unbiased, low-variance estimate of a KL from x = log(q / p) at samples of p."""
    return jnp.exp(log_ratio_N) - log_ratio_N - 1.0


KL_ESTIMATORS: dict[str, Callable[[Any], Any]] = {"k1": k1, "k2": k2, "k3": k3}
"""Name in the run file -> estimate of KL(p || q) from x = log(q / p) at samples of p (Schulman 2020, "Approximating KL
divergence")."""


# The whole


class LossSums(NamedTuple):
    """Sums over loss tokens (float32 scalars). `+` joins two calls; `step.py` turns the total into means."""

    tokens: jax.Array
    """Loss tokens, the invalid ones included."""
    invalid: jax.Array
    """Tokens with a non-finite log-prob or advantage: they contribute no loss and enter no other sum."""
    loss: jax.Array
    """Divided by the global denominator, it is the step's loss."""
    clipped: jax.Array
    """Tokens whose clip is active: their gradient is zero."""
    capped: jax.Array
    """Tokens whose importance weight was truncated."""
    masked: jax.Array
    """Tokens that the correction weighs 0."""
    kept: jax.Array
    """Tokens that train: valid, not clipped and not masked."""
    abs_log_ratio: jax.Array
    """Sum of |log pi - log mu|."""
    max_abs_log_ratio: jax.Array
    """A maximum, not a sum."""
    behaviour_kl: jax.Array
    """k3 estimate of KL(mu || pi)."""
    weight: jax.Array
    """Sum of pi_prox / mu before truncation, and ..."""
    weight_squared: jax.Array
    """... of its square: effective sample size = weight^2 / weight_squared."""
    reference_kl: jax.Array
    """k3 estimate of KL(pi || base); 0 while `kl_coefficient` is 0."""


def no_sums() -> LossSums:
    """The sums over no token."""
    return LossSums(*(jnp.zeros((), jnp.float32) for _ in LossSums._fields))


def add_sums(left: LossSums, right: LossSums) -> LossSums:
    """The sums over both sets of tokens."""
    joined = LossSums(*(a + b for a, b in zip(left, right, strict=True)))
    return joined._replace(max_abs_log_ratio=jnp.maximum(left.max_abs_log_ratio, right.max_abs_log_ratio))


def policy_loss(
    logprobs_N: jax.Array,
    behaviour_N: jax.Array,
    advantages_N: jax.Array,
    mask_N: jax.Array,
    settings: LossSettings,
    *,
    proximal_N: jax.Array | None = None,
    reference_N: jax.Array | None = None,
    sequences_N: jax.Array | None = None,
) -> tuple[jax.Array, LossSums]:
    """The loss summed over the tokens where `mask_N`, in nats, and the sums to report.

    `logprobs_N` is log pi (differentiated), `behaviour_N` is log mu, `proximal_N` is log pi_prox; without it pi_prox
    is pi with its gradient stopped, which is exact when a batch makes one update. `reference_N` is log pi_ref, needed
    if and only if `settings.kl_coefficient` is above 0. `sequences_N` numbers the episodes from 0, their tokens side
    by side; it is needed if `settings.needs_sequences`. Nothing here divides by a count of the step: that is the
    step's global denominator.
    """
    if (reference_N is None) != (settings.kl_coefficient == 0):
        raise ValueError("reference_N must be given exactly when kl_coefficient is above 0")
    if sequences_N is None and settings.needs_sequences:
        raise ValueError("sequences_N must be given: these settings look at whole episodes")
    proximal_N = jax.lax.stop_gradient(logprobs_N if proximal_N is None else proximal_N)
    behaviour_N = jax.lax.stop_gradient(behaviour_N)
    # The inputs are replaced before any arithmetic: a `where` behind it would let NaN into the gradient.
    valid_N = mask_N & jnp.isfinite(logprobs_N) & jnp.isfinite(behaviour_N) & jnp.isfinite(advantages_N)
    valid_N = valid_N & jnp.isfinite(proximal_N)
    if reference_N is not None:
        reference_N = jax.lax.stop_gradient(reference_N)
        valid_N = valid_N & jnp.isfinite(reference_N)
        reference_N = jnp.where(valid_N, reference_N, 0.0)
    logprobs_N, proximal_N, behaviour_N, advantages_N = (
        jnp.where(valid_N, x_N, 0.0) for x_N in (logprobs_N, proximal_N, behaviour_N, advantages_N)
    )
    still_N = jax.lax.stop_gradient(logprobs_N)

    penalty_N = None
    reference_kl = jnp.zeros((), jnp.float32)
    if reference_N is not None:
        estimate = KL_ESTIMATORS[settings.kl_estimator]
        if settings.kl_in is KlPlace.REWARD:
            to_go_N = discounted(estimate(clamped(reference_N - still_N)), sequences_N)
            advantages_N = jnp.where(valid_N, advantages_N - settings.kl_coefficient * to_go_N, 0.0)
        else:
            penalty_N = settings.kl_coefficient * estimate(clamped(reference_N - logprobs_N))
        reference_kl = _sum(k3(clamped(reference_N - still_N)), valid_N)

    tokens = Tokens(logprobs_N, behaviour_N, proximal_N, advantages_N, valid_N, sequences_N)
    loss_N, clipped_N, capped_N = POLICY_LOSSES[settings.policy_loss].function(tokens, settings)
    if penalty_N is not None:
        loss_N = loss_N + penalty_N
    masked_N = jnp.zeros_like(valid_N)
    if settings.correction != "none":
        log_ratio_N = clamped((proximal_N if settings.takes is Takes.PROXIMAL else still_N) - behaviour_N)
        weight_N = CORRECTIONS[settings.correction].function(log_ratio_N, tokens, settings)
        loss_N = weight_N * loss_N
        masked_N = weight_N == 0
        capped_N = capped_N | (~masked_N & (weight_N == settings.importance_cap))
    if settings.aggregation is Aggregation.SEQUENCE_MEAN:
        loss_N = loss_N / jnp.maximum(_total(jnp.where(mask_N, 1.0, 0.0), sequences_N), 1.0)
    loss = _sum(loss_N, valid_N)

    importance_N = ratio_of(proximal_N - behaviour_N)
    log_ratio_N = clamped(still_N - behaviour_N)
    sums = LossSums(
        tokens=_sum(1.0, mask_N),
        invalid=_sum(1.0, mask_N & ~valid_N),
        loss=loss,
        clipped=_sum(1.0, valid_N & clipped_N),
        capped=_sum(1.0, valid_N & capped_N),
        masked=_sum(1.0, valid_N & masked_N),
        kept=_sum(1.0, valid_N & ~clipped_N & ~masked_N),
        abs_log_ratio=_sum(jnp.abs(log_ratio_N), valid_N),
        max_abs_log_ratio=jnp.max(jnp.where(valid_N, jnp.abs(log_ratio_N), 0.0), initial=0.0),
        behaviour_kl=_sum(k3(log_ratio_N), valid_N),
        weight=_sum(importance_N, valid_N),
        weight_squared=_sum(importance_N**2, valid_N),
        reference_kl=reference_kl,
    )
    return loss, jax.lax.stop_gradient(sums)


def discounted(x_N: Any, sequences_N: Any, decay: float = 1.0) -> Any:
    """y_n = x_n + decay * y_(n+1) within each episode, whose last token has y_n = x_n."""
    flat, sequences = jnp.ravel(x_N), jnp.ravel(sequences_N)
    goes_on = jnp.append(sequences[1:] == sequences[:-1], False)
    factor = jnp.where(goes_on, decay, 0.0).astype(flat.dtype)

    def join(later: tuple[Any, Any], earlier: tuple[Any, Any]) -> tuple[Any, Any]:
        return later[0] * earlier[0], earlier[1] + earlier[0] * later[1]

    _, found = jax.lax.associative_scan(join, (factor, flat), reverse=True)
    return found.reshape(x_N.shape)


def _total(x_N: Any, sequences_N: Any) -> Any:
    """The sum of `x_N` over each entry's episode. As many episodes as entries have room: each has at least one."""
    sums = jax.ops.segment_sum(jnp.ravel(x_N), jnp.ravel(sequences_N), num_segments=x_N.size)
    return sums[sequences_N]


def _sum(x_N: Any, mask_N: Any) -> Any:
    return jnp.sum(jnp.where(mask_N, x_N, 0.0), dtype=jnp.float32)
