"""Advantages: what an episode did better or worse than was to be expected.

The group estimators give one number per member, from the rewards of the members that ended; `gae` gives one per
token, from rewards and values. Pure functions. A new estimator is one function and one line in `ESTIMATORS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from trajectories.schema import Closing, Row

Rewards = NDArray[np.float64]

EPSILON = 1e-4
"""Added to the standard deviation of GRPO's denominator, and to the mean of MaxRL's."""
WHITEN_EPSILON = 1e-8
"""Added to the variance of a step's advantages."""


@dataclass(frozen=True, slots=True)
class Estimator:
    """One line of the table."""

    function: Callable[[Rewards], Rewards]
    """Rewards of a group's members, shape (N,), N >= 2 and finite -> their advantages, shape (N,)."""
    paper: str
    group_relative: bool = True
    """Equal rewards give a group without gradient, which is filtered: DAPO's dynamic sampling (arXiv:2503.14476)."""
    whiten: bool = False
    """The learner brings the advantages of a step's loss tokens to mean 0 and variance 1, see `whitened`."""
    critic: bool = False
    """The learner has a critic, which estimates advantages token by token from rewards (`gae`) and whitens them."""


def grpo(rewards_N: Rewards) -> Rewards:
    """(r - mean) / (std + 1e-4), the population's std."""
    return np.asarray((rewards_N - rewards_N.mean()) / (rewards_N.std() + EPSILON))


def dr_grpo(rewards_N: Rewards) -> Rewards:
    """r - mean: GRPO without the bias towards groups of low variance."""
    return np.asarray(rewards_N - rewards_N.mean())


def rloo(rewards_N: Rewards) -> Rewards:
    """r - mean of the others: the leave-one-out baseline."""
    n = len(rewards_N)
    return np.asarray((rewards_N - rewards_N.mean()) * (n / (n - 1)))


def reward(rewards_N: Rewards) -> Rewards:
    """r: the learner knows better what was to be expected."""
    return rewards_N


def maxrl(rewards_N: Rewards) -> Rewards:
    """(r - mean) / (mean + 1e-4) for rewards of 0 or more: the gradient of log success, which a hard prompt raises."""
    if rewards_N.min() < 0:
        raise ValueError(f"maxrl takes rewards of 0 or more, found {rewards_N.min():g}")
    return np.asarray((rewards_N - rewards_N.mean()) / (rewards_N.mean() + EPSILON))


ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(grpo, "DeepSeekMath, arXiv:2402.03300"),
    "dr_grpo": Estimator(dr_grpo, "Dr. GRPO, arXiv:2503.20783"),
    "rloo": Estimator(rloo, "Back to Basics, arXiv:2402.14740"),
    "reinforce++": Estimator(reward, "arXiv:2501.03262", group_relative=False, whiten=True),
    "reinforce++_baseline": Estimator(dr_grpo, "arXiv:2501.03262", whiten=True),
    "maxrl": Estimator(maxrl, "arXiv:2602.02710"),
    "gae": Estimator(reward, "Schulman et al. 2016, arXiv:1506.02438", group_relative=False, critic=True),
}
"""Name in the run file -> estimator."""


class Truncated(StrEnum):
    """What becomes of members that a limit on turns, tokens or context ended."""

    TRAIN = "train"
    """They train like others, on the reward that the environment gave them."""
    MASK = "mask"
    """They vote in their group's baseline and do not train: DAPO's overlong filtering (arXiv:2503.14476)."""
    DROP = "drop"
    """They neither vote nor train."""


@dataclass(frozen=True, slots=True)
class AdvantageSettings:
    """Section [advantages] of the run file."""

    estimator: str = "grpo"
    """`grpo`, `dr_grpo`, `rloo`, `reinforce++`, `reinforce++_baseline`, `maxrl` or `gae`; see docs/algorithms.md."""
    truncated: Truncated = Truncated.TRAIN
    """What becomes of members that ended with max_turns, max_tokens or context_overflow. They are not failed; whether
    they are wrong is not known."""
    overlong_tokens: int = 0
    """DAPO's soft overlong punishment: an episode of more sampled tokens than this loses 1 reward. 0 is off."""
    overlong_buffer: int = 0
    """Tokens below `overlong_tokens` over which that loss grows from 0 to 1."""

    def __post_init__(self) -> None:
        if self.estimator not in ESTIMATORS:
            raise ValueError(f"estimator must be one of {', '.join(ESTIMATORS)}; found {self.estimator!r}")
        if self.overlong_tokens < 0 or not 0 <= self.overlong_buffer <= self.overlong_tokens:
            raise ValueError(
                f"overlong_buffer must lie between 0 and overlong_tokens ({self.overlong_tokens}), found "
                f"{self.overlong_buffer}: DAPO takes a fifth of it"
            )
        if self.overlong_tokens and self.estimator == "maxrl":
            raise ValueError("overlong_tokens must be 0 with the estimator maxrl, which takes rewards of 0 or more")

    @property
    def whiten(self) -> bool:
        return ESTIMATORS[self.estimator].whiten

    @property
    def critic(self) -> bool:
        return ESTIMATORS[self.estimator].critic


def advantages(
    rewards_N: Sequence[float], settings: AdvantageSettings, lengths_N: Sequence[int] = ()
) -> tuple[float, ...]:
    """Advantages of a group's N >= 2 members; raises ValueError for fewer or for rewards that are not finite.

    `lengths_N` are the members' sampled tokens, which the overlong punishment needs.
    """
    rewards = np.asarray(rewards_N, np.float64)
    if len(rewards) < 2:
        raise ValueError(f"a group needs two members or more for a baseline, found {len(rewards)}")
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite numbers, found {list(rewards_N)}")
    if settings.overlong_tokens:
        rewards = rewards + overlong_punishment(lengths_N, settings.overlong_tokens, settings.overlong_buffer)
    return tuple(float(value) for value in ESTIMATORS[settings.estimator].function(rewards))


def overlong_punishment(lengths_N: Sequence[int], longest: int, buffer: int) -> Rewards:
    """What an episode of so many sampled tokens loses, 0 to -1 (DAPO, arXiv:2503.14476, equation 13).

    0 up to `longest - buffer`, then linear, and -1 above `longest`.
    """
    lengths = np.asarray(lengths_N, np.float64)
    soft = np.clip((longest - buffer - lengths) / max(buffer, 1), -1.0, 0.0)
    return np.where(lengths > longest, -1.0, np.where(lengths <= longest - buffer, 0.0, soft))


def zero_variance(rewards_N: Sequence[float]) -> bool:
    """Whether all rewards are equal, up to float noise: such a group yields no gradient."""
    return max(rewards_N) - min(rewards_N) <= 1e-9 * max(1.0, max(abs(reward) for reward in rewards_N))


def filtered(rewards_N: Sequence[float], settings: AdvantageSettings) -> bool:
    """Whether a group with these rewards (before any punishment) is left out: it would teach nothing."""
    return ESTIMATORS[settings.estimator].group_relative and zero_variance(rewards_N)


def whitened(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows of one step with (A - mean) / sqrt(var + 1e-8) over their loss tokens (REINFORCE++, arXiv:2501.03262).

    Mean and variance are of all rows together, so they do not depend on how closings were packed. Advantages that are
    not finite stay as they are and do not count.
    """
    masks = [row.loss_mask_T & np.isfinite(row.advantages_T) for row in rows]
    found = [row.advantages_T[mask_T].astype(np.float64) for row, mask_T in zip(rows, masks, strict=True)]
    every = np.concatenate([np.zeros(0), *found])
    if not len(every):
        return tuple(rows)
    mean, scale = every.mean(), 1 / np.sqrt(every.var() + WHITEN_EPSILON)
    return tuple(
        dataclasses.replace(
            row,
            advantages_T=np.where(mask_T, (row.advantages_T - mean) * scale, row.advantages_T).astype(np.float32),
        )
        for row, mask_T in zip(rows, masks, strict=True)
    )


def token_rewards(rows: Sequence[Row], closings: Sequence[Closing]) -> tuple[Row, ...]:
    """The rows of `closings` with rewards in place of advantages, which are each episode's whole reward.

    What the environment gave for a turn lies at the last token sampled in it; what no turn accounts for, such as a
    punishment of length, at the episode's last.
    """
    episodes = {(closing.closing_id, episode.sample): episode for closing in closings for episode in closing.episodes}
    found = []
    for row in rows:
        rewards_T = np.zeros_like(row.advantages_T)
        for segment in row.segments:
            part = slice(segment.start, segment.start + segment.length)
            sampled = segment.start + np.flatnonzero(row.loss_mask_T[part])
            if not len(sampled):
                continue
            rest = float(row.advantages_T[sampled[-1]])
            for turn in episodes[segment.closing_id, segment.sample].turns:
                last = int(np.searchsorted(row.positions_T[sampled], turn.end)) - 1
                if last >= 0:
                    rewards_T[sampled[last]] += turn.reward
                    rest -= turn.reward
            rewards_T[sampled[-1]] += rest
        found.append(dataclasses.replace(row, advantages_T=rewards_T))
    return tuple(found)


def gae(
    rewards_T: Sequence[float] | Rewards, values_T: Sequence[float] | Rewards, gamma: float, lam: float
) -> tuple[Rewards, Rewards]:
    """Generalised advantage estimation of one ended sequence -> (advantages_T, returns_T).

        delta_t = r_t + gamma V_{t+1} - V_t        V behind the last token is 0
        A_t     = delta_t + gamma lam A_{t+1}      G_t = A_t + V_t

    Schulman et al. 2016, arXiv:1506.02438. `values_T[t]` is the value before token t was drawn.
    """
    rewards, values = np.asarray(rewards_T, np.float64), np.asarray(values_T, np.float64)
    if rewards.shape != values.shape:
        raise ValueError(f"rewards and values must have one shape, found {rewards.shape} and {values.shape}")
    deltas = rewards + gamma * np.append(values[1:], 0.0)[: len(values)] - values
    advantages_T = np.zeros_like(deltas)
    ahead = 0.0
    for t in range(len(deltas) - 1, -1, -1):
        ahead = advantages_T[t] = deltas[t] + gamma * lam * ahead
    return advantages_T, advantages_T + values
