"""What an agent asks of a policy: token ids in, token ids out, with the behaviour log-probabilities.

Every backend (the engine in this process, a simulated policy, a remote server) stands behind `SamplingClient`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from trajectories.schema import FloatArray, IntArray, Version, VersionSpan

LEAST_TEMPERATURE = 1e-4
"""Above 0. Far below it logits / temperature is no float32 any more."""
MOST_STOPS, LONGEST_STOP = 16, 256
"""Stop strings of a request, and characters of one: all are looked for after every token."""
MOST_STOP_IDS = 256


class PolicyError(RuntimeError):
    """The policy could not answer: a failure of the machinery, never of the agent."""


class FinishReason(StrEnum):
    STOP = "stop"
    """A stop token, or the token that completes a stop string, was sampled; it is the completion's last token."""
    LENGTH = "length"
    """`max_tokens` were sampled."""
    CONTEXT = "context"
    """The context is full."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one turn is sampled. What is drawn from, for each token:

        p = softmax(logits / temperature); tokens are ranked by their logits, equal ones by id, the smaller first
        top-k keeps the first `top_k` tokens, then
        top-p keeps those before which the kept tokens' renormalised mass is below `top_p`, then
        min-p keeps those with p >= min_p * max p, and
        of what is left, the backend's `max_kept` first ones; p is renormalised over them.

    The order is that of Hugging Face's generation and of vLLM, except that equal tokens are told apart by their ids.
    """

    temperature: float = 1.0
    """0 is greedy: nothing truncates, and log-probs are those at temperature 1 over the whole vocabulary. Else at least
    `LEAST_TEMPERATURE`."""
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    """At most `MOST_STOP_IDS`."""
    seed: int = 0
    """Of this request's own random stream."""
    top_k: int = 0
    """Most likely tokens to draw from; 0 is off."""
    top_p: float = 1.0
    """Probability mass to draw from (nucleus); 1 is off."""
    min_p: float = 0.0
    """Least probability, as a share of the most likely token's; 0 is off."""
    stop: tuple[str, ...] = ()
    """Strings that end the turn where the decoded completion first contains one of them; at most `MOST_STOPS` of at
    most `LONGEST_STOP` characters."""
    stop_set: frozenset[int] = field(init=False, repr=False, compare=False)
    """`stop_token_ids`, for the look at every token."""

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        if len(self.stop_token_ids) > MOST_STOP_IDS:
            raise ValueError(f"stop_token_ids must hold at most {MOST_STOP_IDS} ids, found {len(self.stop_token_ids)}")
        object.__setattr__(self, "stop_set", frozenset(self.stop_token_ids))
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, found {self.max_tokens}")
        check_truncation(self.top_k, self.top_p, self.min_p)
        check_stop(self.stop)

    @property
    def truncates(self) -> bool:
        """Whether tokens may be left out of the distribution."""
        return self.temperature > 0 and truncates(self.top_k, self.top_p, self.min_p)


def truncates(top_k: int, top_p: float, min_p: float) -> bool:
    """Whether these values leave any token out."""
    return top_k > 0 or top_p < 1 or min_p > 0


def check_truncation(top_k: int, top_p: float, min_p: float, section: str = "") -> None:
    """Raises ValueError, with `section` before the field's name, for values that define no distribution."""
    if top_k < 0:
        raise ValueError(f"{section}top_k must be 0 (off) or more, found {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"{section}top_p must be above 0 and at most 1 (off), found {top_p}")
    if not 0 <= min_p <= 1:
        raise ValueError(f"{section}min_p must lie between 0 (off) and 1, found {min_p}")


def check_temperature(temperature: float, section: str = "") -> None:
    """Raises ValueError, with `section` before the field's name, for a temperature that cannot be sampled at."""
    if not (temperature == 0 or LEAST_TEMPERATURE <= temperature < math.inf):
        raise ValueError(
            f"{section}temperature must be 0 (greedy) or at least {LEAST_TEMPERATURE:g}, found {temperature:g}"
        )


def check_stop(stop: tuple[str, ...], section: str = "") -> None:
    """Raises ValueError for too many or too long stop strings, and for those that every text or none contains."""
    if len(stop) > MOST_STOPS:
        raise ValueError(f"{section}stop must hold at most {MOST_STOPS} strings, found {len(stop)}")
    for text in stop:
        if not (isinstance(text, str) and text):
            raise ValueError(f"{section}stop must hold strings of at least one character, found {text!r:.80}")
        if len(text) > LONGEST_STOP:
            raise ValueError(
                f"{section}stop must hold strings of at most {LONGEST_STOP} characters, found one of {len(text)}"
            )
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError(f"{section}stop must hold text, found lone surrogates in {text!a:.80}")


@dataclass(frozen=True, slots=True)
class Completion:
    """N sampled tokens, the stop token included."""

    token_ids_N: IntArray
    logprobs_N: FloatArray
    """Of the distribution drawn from: renormalised over the kept ids where there are any."""
    version_spans: tuple[VersionSpan, ...]
    """`first_token` counts from the completion's first token; the first span begins at 0."""
    finish_reason: FinishReason
    kept_ids: tuple[IntArray, ...] = ()
    """Empty if the whole vocabulary was drawn from; else for each token the ids it was drawn from, ascending."""


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
