"""How a policy is sampled: the section `sampling` of the run file. Imports neither JAX nor a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from policy.client import check_stop, check_truncation, truncates


class Backend(StrEnum):
    """Who answers `SamplingClient.sample`."""

    ENGINE = "engine"
    """The model, in this process."""
    SIMULATED = "simulated"
    """Random tokens without a model, to measure everything else."""


@dataclass(frozen=True)
class SamplingSettings:
    """Section `sampling` of the run file."""

    backend: Backend = Backend.ENGINE
    """`engine` (the model) or `simulated` (random tokens, for benchmarks of the machinery)."""
    slots: int = 48
    """Episodes whose key/value cache a worker process holds at once; more wait their turn. Memory grows with it."""
    small_batch: int = 16
    """While no more requests than this are decoding, a smaller compiled shape decodes them; 0 for one shape only."""
    temperature: float = 1.0
    """Of training episodes; 0 is greedy."""
    top_k: int = 0
    """Draw from so many of the most likely tokens; 0 is off. Applied before `top_p`, and that before `min_p`."""
    top_p: float = 1.0
    """Draw from the most likely tokens that hold this share of the probability; 1 is off."""
    min_p: float = 0.0
    """Draw from tokens that are at least this share as likely as the most likely one; 0 is off."""
    max_kept: int = 64
    """Most tokens that a truncated draw (`top_k`, `top_p`, `min_p`) chooses from. Their ids travel with each token, so
    that the learner renormalises over the same ones. 0 stores no ids and refuses truncation."""
    stop: tuple[str, ...] = ()
    """Strings that end a turn, beside the model's own end of turn."""
    max_tokens: int = 64
    """Most tokens sampled in one turn."""
    max_context: int = 512
    """Most tokens (prompt and sampled) of one episode. Decoding costs grow with it: no larger than needed."""
    prefill_chunk: int = 64
    """Prompt tokens computed in one call between two decode calls."""
    extend_rows: int = 8
    """Requests whose short extensions (tool results) are computed in one call."""
    extend_chunk: int = 16
    """Tokens of each of them."""
    steps_per_call: int = 1
    """Tokens each request draws between two looks at joins, leaves and new adapters. More of them only pay where a call
    costs more than its arithmetic; a request that ends within a call wastes the rest."""

    def __post_init__(self) -> None:
        for name in ("slots", "max_tokens", "prefill_chunk", "extend_rows", "extend_chunk", "steps_per_call"):
            if getattr(self, name) < 1:
                raise ValueError(f"sampling.{name} must be at least 1, found {getattr(self, name)}")
        if self.small_batch < 0:
            raise ValueError(f"sampling.small_batch must be 0 (one shape) or more, found {self.small_batch}")
        if self.max_context < 2:
            raise ValueError(
                f"sampling.max_context must be at least 2, found {self.max_context}; "
                "it holds the prompt and everything an episode samples and is told"
            )
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"sampling.temperature must be 0 (greedy) or more, found {self.temperature}")
        check_truncation(self.top_k, self.top_p, self.min_p, "sampling.")
        check_stop(self.stop, "sampling.")
        if self.max_kept < 0:
            raise ValueError(f"sampling.max_kept must be 0 (no ids are stored) or more, found {self.max_kept}")
        if self.truncates and not self.max_kept:
            raise ValueError(
                "sampling.max_kept must be above 0 with top_k, top_p or min_p, found 0: without the kept ids the "
                "learner could not renormalise over the tokens that a draw chose from"
            )
        if self.top_k > self.max_kept > 0:
            raise ValueError(
                f"sampling.max_kept must be at least sampling.top_k ({self.top_k}), found {self.max_kept}: raise the "
                "one or lower the other"
            )

    @property
    def truncates(self) -> bool:
        """Whether training episodes draw from less than the whole vocabulary."""
        return truncates(self.top_k, self.top_p, self.min_p)

    @property
    def segments(self) -> tuple[int, ...]:
        """Slots by compiled decode shape: the small batch and the rest."""
        small = min(self.small_batch, self.slots)
        return tuple(size for size in (small, self.slots - small) if size)
