"""How a policy is sampled: the section `sampling` of the run file. Imports neither JAX nor a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


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

    @property
    def segments(self) -> tuple[int, ...]:
        """Slots by compiled decode shape: the small batch and the rest."""
        small = min(self.small_batch, self.slots)
        return tuple(size for size in (small, self.slots - small) if size)
