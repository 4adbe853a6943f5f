"""What an agent asks of a policy: token ids in, token ids out, with the behaviour log-probabilities.

Every backend (the engine in this process, a simulated policy, a remote server) stands behind `SamplingClient`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from trajectories.schema import FloatArray, IntArray, Version, VersionSpan


class PolicyError(RuntimeError):
    """The policy could not answer: a failure of the machinery, never of the agent."""


class FinishReason(StrEnum):
    STOP = "stop"
    """A stop token was sampled; it is the completion's last token."""
    LENGTH = "length"
    """`max_tokens` were sampled."""
    CONTEXT = "context"
    """The context is full."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    temperature: float = 1.0
    """0 is greedy; log-probs are then those at temperature 1."""
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    """Of this request's own random stream."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be 0 (greedy) or more, found {self.temperature}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, found {self.max_tokens}")


@dataclass(frozen=True, slots=True)
class Completion:
    """N sampled tokens, the stop token included."""

    token_ids_N: IntArray
    logprobs_N: FloatArray
    version_spans: tuple[VersionSpan, ...]
    """`first_token` counts from the completion's first token; the first span begins at 0."""
    finish_reason: FinishReason


class SamplingClient(Protocol):
    @property
    def max_context(self) -> int:
        """Most tokens (prompt and completion) that one session may hold."""
        ...

    async def sample(
        self,
        session_id: str,
        token_ids: Sequence[int] | IntArray,
        params: SamplingParams,
        *,
        version: Version | None = None,
    ) -> Completion:
        """Continue `token_ids`, the whole sequence so far.

        `session_id` (an episode id) lets the backend keep its cache between an episode's turns: the ids of a later call
        extend those of the earlier one and its completion. Sessions that begin with the same ids share the
        prefill. With `version`, only that version may answer: the call waits for it. Cancelling the awaiting task
        frees the slot. Raises PolicyError.
        """
        ...

    def close_session(self, session_id: str) -> None:
        """Forget the session's cache; harmless if there is none."""
        ...
