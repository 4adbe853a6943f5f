"""The policy-gradient loss of one token, and the sums by which a step reports it.

Invariants: the value and the gradient are finite whatever the inputs are; a token that is masked out contributes
nothing, not even a NaN; sums over tokens are taken here and divided by one global denominator outside, so that the
gradient does not depend on how closings were split into rows.

With mu the behaviour policy (the sampler's), pi the learner's and pi_prox the learner's at the start of the update:

    ratio_n  = pi / pi_prox
    weight_n = stop_gradient(min(pi_prox / mu, cap))
    moved_n  = stop_gradient(pi / anchor), the anchor being mu or pi_prox
    kept_n   = clip(ratio_n, 1 - clip_low, 1 + clip_high) without gradient where moved_n has left that band in the
               direction of A_n, else ratio_n
    loss_n   = weight_n * (-kept_n A_n + beta k3_n)
    k3_n     = pi_ref / pi - log(pi_ref / pi) - 1

With the anchor pi_prox, -kept_n A_n is PPO's clipped surrogate -min(ratio A, clip(ratio) A) (Schulman et al. 2017,
arXiv:1707.06347) and the whole is decoupled PPO (Hilton et al. 2021, arXiv:2110.00641); its clip cannot act while there
is one update per batch, when ratio is 1. With the anchor mu it clips what PPO clips when the sampler is its old policy.
Bands need not be symmetric (DAPO, Yu et al. 2025, arXiv:2503.14476). The weights are truncated importance weights
(Ionides 2008; IMPALA, Espeholt et al. 2018, arXiv:1802.01561). The penalty is GRPO's (Shao et al. 2024,
arXiv:2402.03300) with k3 (Schulman 2020, "Approximating KL divergence").

Where a token was drawn from less than the whole vocabulary (top-k, top-p, min-p), mu, pi, pi_prox and pi_ref are all
renormalised over the tokens that mu kept for it. So ratios compare policies on one support, equal weights give 1, and
k3 estimates the KL of pi to pi_ref on that support; against a pi_ref of the whole vocabulary, the mass that mu cut off
would count as divergence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import jax
import jax.numpy as jnp

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this magnitude before they are exponentiated: exp(20)^2 and its sums fit in float32."""


class Anchor(StrEnum):
    """The policy that the clip keeps the learner near."""

    PROXIMAL = "proximal"
    """The learner's own at the start of the update. With one update per batch it never clips."""
    BEHAVIOUR = "behaviour"
    """The sampler's: a token that has left the band since it was sampled gives no gradient that would take it further,
    so that stale rows cannot push the policy away."""


@dataclass(frozen=True)
class LossSettings:
    """The `[loss]` section of the run file."""

    clip_anchor: Anchor = Anchor.BEHAVIOUR
    """What the clip measures the policy against: `behaviour` or `proximal`."""
    clip_low: float = 0.2
    """pi / anchor is clipped at 1 - clip_low."""
    clip_high: float = 0.28
    """pi / anchor is clipped at 1 + clip_high."""
    importance_weights: bool = True
    """Weigh each token by min(pi_prox / pi_behaviour, importance_cap). Off treats stale rows as fresh."""
    importance_cap: float = 2.0
    """The most that a token weighs. Tokens count less without bound, never more than this."""
    kl_coefficient: float = 0.0
    """Of the penalty on KL(pi || base without the adapter). Above 0 it costs one more forward pass a step."""

    def __post_init__(self) -> None:
        if not 0 < self.clip_low < 1:
            raise ValueError(f"clip_low must lie between 0 and 1, found {self.clip_low}; the usual value is 0.2")
        if not 0 < self.clip_high < math.inf:
            raise ValueError(f"clip_high must be above 0, found {self.clip_high}; the usual value is 0.28")
        if not 0 < self.importance_cap < math.exp(MAX_LOG_RATIO):
            raise ValueError(
                f"importance_cap must be above 0 and below e^{MAX_LOG_RATIO:.0f}, found {self.importance_cap}; "
                "the usual value is 2.0, and importance_weights=false turns the weights off"
            )
        if not 0 <= self.kl_coefficient < math.inf:
            raise ValueError(f"kl_coefficient must be 0 or more, found {self.kl_coefficient}; 0 turns the penalty off")


class LossSums(NamedTuple):
    """Sums over loss tokens (float32 scalars). `+` joins two calls; `step.py` turns the total into means."""

    tokens: jax.Array
    """Loss tokens, the invalid ones included."""
    invalid: jax.Array
    """Tokens with a non-finite log-prob or advantage: they contribute no loss and enter no other sum."""
    loss: jax.Array
    clipped: jax.Array
    """Tokens whose clip is active: their gradient is zero."""
    capped: jax.Array
    """Tokens whose importance weight was truncated."""
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


def k3(log_ratio_N: jax.Array) -> jax.Array:
    """exp(x) - x - 1 >= 0: an unbiased, low-variance estimate of a KL from x = log(q / p) at samples of p."""
    return jnp.exp(log_ratio_N) - log_ratio_N - 1.0


def policy_loss(
    logprobs_N: jax.Array,
    behaviour_N: jax.Array,
    advantages_N: jax.Array,
    mask_N: jax.Array,
    settings: LossSettings,
    *,
    proximal_N: jax.Array | None = None,
    reference_N: jax.Array | None = None,
) -> tuple[jax.Array, LossSums]:
    """The loss summed over the tokens where `mask_N`, in nats, and the sums to report.

    `logprobs_N` is log pi (differentiated), `behaviour_N` is log mu, `proximal_N` is log pi_prox; without it pi_prox
    is pi with its gradient stopped, which is exact when a batch makes one update. `reference_N` is log pi_ref, needed
    if and only if `settings.kl_coefficient` is above 0. Nothing here divides: that is the step's global denominator.
    """
    if (reference_N is None) != (settings.kl_coefficient == 0):
        raise ValueError("reference_N must be given exactly when kl_coefficient is above 0")
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

    ratio_N = jnp.exp(_clamp(logprobs_N - proximal_N))
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    anchor_N = behaviour_N if settings.clip_anchor is Anchor.BEHAVIOUR else proximal_N
    moved_N = jnp.exp(_clamp(jax.lax.stop_gradient(logprobs_N) - anchor_N))
    outside_N = ((advantages_N > 0) & (moved_N > high)) | ((advantages_N < 0) & (moved_N < low))
    kept_N = jnp.where(outside_N, jax.lax.stop_gradient(jnp.clip(ratio_N, low, high)), ratio_N)
    importance_N = jnp.exp(_clamp(proximal_N - behaviour_N))
    loss_N = -kept_N * advantages_N
    reference_kl = jnp.zeros((), jnp.float32)
    if reference_N is not None:
        divergence_N = k3(_clamp(reference_N - logprobs_N))
        loss_N = loss_N + settings.kl_coefficient * divergence_N
        reference_kl = _sum(divergence_N, valid_N)
    if settings.importance_weights:
        loss_N = jnp.minimum(importance_N, settings.importance_cap) * loss_N
    loss = _sum(loss_N, valid_N)

    log_ratio_N = _clamp(jax.lax.stop_gradient(logprobs_N) - behaviour_N)
    sums = LossSums(
        tokens=_sum(1.0, mask_N),
        invalid=_sum(1.0, mask_N & ~valid_N),
        loss=loss,
        clipped=_sum(1.0, valid_N & outside_N),
        capped=_sum(1.0, valid_N & settings.importance_weights & (importance_N > settings.importance_cap)),
        abs_log_ratio=_sum(jnp.abs(log_ratio_N), valid_N),
        max_abs_log_ratio=jnp.max(jnp.where(valid_N, jnp.abs(log_ratio_N), 0.0), initial=0.0),
        behaviour_kl=_sum(k3(log_ratio_N), valid_N),
        weight=_sum(importance_N, valid_N),
        weight_squared=_sum(importance_N**2, valid_N),
        reference_kl=reference_kl,
    )
    return loss, jax.lax.stop_gradient(sums)


def _clamp(log_ratio_N: jax.Array) -> jax.Array:
    return jnp.clip(log_ratio_N, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _sum(x_N: jax.Array | float, mask_N: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(mask_N, x_N, 0.0), dtype=jnp.float32)
