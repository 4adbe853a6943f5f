"""Group-relative advantages: one number per member, from the rewards of the members that ended.

A new estimator is one function and one line in `ESTIMATORS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rewards = NDArray[np.float64]
Estimator = Callable[[Rewards], Rewards]

EPSILON = 1e-4
"""Added to the standard deviation of GRPO's denominator."""


def grpo(rewards_N: Rewards) -> Rewards:
    """(r - mean) / (std + 1e-4), the population's std (DeepSeekMath, arXiv 2402.03300)."""
    return np.asarray((rewards_N - rewards_N.mean()) / (rewards_N.std() + EPSILON))


def dr_grpo(rewards_N: Rewards) -> Rewards:
    """r - mean: GRPO without the bias towards groups of low variance (Dr.GRPO, arXiv 2503.20783)."""
    return np.asarray(rewards_N - rewards_N.mean())


def rloo(rewards_N: Rewards) -> Rewards:
    """r - mean of the others: the leave-one-out baseline (RLOO, arXiv 2402.14740). Shape (N,), N >= 2."""
    n = len(rewards_N)
    return np.asarray((rewards_N - rewards_N.mean()) * (n / (n - 1)))


ESTIMATORS: dict[str, Estimator] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


@dataclass(frozen=True, slots=True)
class AdvantageSettings:
    """Section [advantages] of the run file."""

    estimator: str = "grpo"
    """One of ESTIMATORS."""

    def __post_init__(self) -> None:
        if self.estimator not in ESTIMATORS:
            raise ValueError(f"estimator must be one of {', '.join(ESTIMATORS)}; found {self.estimator!r}")


def advantages(rewards_N: Sequence[float], settings: AdvantageSettings) -> tuple[float, ...]:
    """Advantages of a group's N >= 2 members; raises ValueError for fewer or for rewards that are not finite."""
    rewards = np.asarray(rewards_N, np.float64)
    if len(rewards) < 2:
        raise ValueError(f"a group needs two members or more for a baseline, found {len(rewards)}")
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite numbers, found {list(rewards_N)}")
    return tuple(float(value) for value in ESTIMATORS[settings.estimator](rewards))


def zero_variance(rewards_N: Sequence[float]) -> bool:
    """Whether all rewards are equal, up to float noise: such a group yields no gradient."""
    return max(rewards_N) - min(rewards_N) <= 1e-9 * max(1.0, max(abs(reward) for reward in rewards_N))
