"""pass@k with its confidence interval, from several answers to each question.

Invariant: the figures are a pure function of the counts. Answers to one question resemble each other, so intervals come
from drawing questions anew, never from counting answers as if they were independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
AT_ONCE = 100
"""Of them in one array of indices, which bounds its size."""
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """pass@k: the chance that at least one of k answers to a question is right."""

    k: int
    value: float
    low: float
    high: float
    """The middle 95 % of the bootstrap over questions."""
    questions: int
    """Those with at least k answers, which it is the mean over."""


def pass_at_k(answers: int, successes: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k) for n answers of which c are right: unbiased (Chen et al. 2021, arXiv:2107.03374)."""
    if not 1 <= k <= answers:
        raise ValueError(f"k must lie between 1 and the {answers} answers, found {k}")
    return 1.0 - math.comb(answers - successes, k) / math.comb(answers, k)


def estimates(answers_Q: Sequence[int], successes_Q: Sequence[int]) -> tuple[Estimate, ...]:
    """pass@1, 2, 4, ... and of as many as most questions were answered; questions with fewer than k answers are left
    out of pass@k."""
    most = max(answers_Q, default=0)
    ks = sorted({1 << power for power in range(most.bit_length())} | ({most} if most else set()))
    return tuple(_estimate(k, answers_Q, successes_Q) for k in ks)


def _estimate(k: int, answers_Q: Sequence[int], successes_Q: Sequence[int]) -> Estimate:
    chances_Q = np.array([pass_at_k(n, c, k) for n, c in zip(answers_Q, successes_Q, strict=True) if n >= k])
    rng, count = np.random.default_rng(0), len(chances_Q)
    drawn = (chances_Q[rng.integers(count, size=(AT_ONCE, count))] for _ in range(RESAMPLES // AT_ONCE))
    means = np.concatenate([some.mean(axis=1) for some in drawn])
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(k, float(chances_Q.mean()), float(low), float(high), count)
