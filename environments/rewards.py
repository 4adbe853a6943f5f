"""Rewards put together from named parts.

A reward function takes a task's payload and the policy's text and gives a number, or a mapping of named parts; it may
be async. `Rewards` weights several of them and is one itself, so it goes wherever a reward function goes:

    Rewards(
        {"correct": correct, "format": Tags("think", "answer"), "length": Length(2000, 400), "style": Judge(...)},
        {"format": 0.2, "length": 0.5},
    )

Invariant: the parts add up to the reward. A part that cannot be found out is a failed episode, or a part under another
name where a neutral value was asked for; it is never 0 in silence.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import re
import string
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import regex

from environments.tools import bounded_text, call_either, describe, run_blocking
from environments.verifiable import is_number
from policy.client import PolicyError
from policy.remote import RemotePolicy
from policy.settings import Backend, SamplingSettings
from trajectories.advantages import overlong_punishment
from trajectories.schema import stream_seed

log = logging.getLogger(__name__)

Payload = Mapping[str, Any]
Reward = float | Mapping[str, float]
RewardFunction = Callable[[Payload, str], Reward | Awaitable[Reward]]


@dataclass(frozen=True)
class Rewards:
    """A weighted sum of reward functions, part by part.

    A part that is itself a mapping gives one part for each of its names, `<part>.<name>`. Functions that are not async
    run in threads, so that a slow one holds nobody up.
    """

    parts: Mapping[str, RewardFunction]
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of the parts; 1 where it is not said."""

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("rewards need at least one part")
        if unknown := [name for name in self.weights if name not in self.parts]:
            raise ValueError(f"weights names {', '.join(unknown)}, the parts are {', '.join(self.parts)}")
        for name, weight in self.weights.items():
            if not math.isfinite(weight):
                raise ValueError(f"the weight of {name} must be a finite number, found {weight}")

    async def __call__(self, payload: Payload, text: str) -> dict[str, float]:
        """The weighted parts, whose sum is the reward. Raises what a part raises, and ValueError for a part that is no
        finite number."""
        found = await asyncio.gather(*(call_either(function, payload, text) for function in self.parts.values()))
        weighted: dict[str, float] = {}
        for name, reward in zip(self.parts, found, strict=True):
            weight = float(self.weights.get(name, 1.0))
            inner = {f"{name}.{key}": value for key, value in reward.items()} if isinstance(reward, Mapping) else None
            for key, value in (inner if inner is not None else {name: reward}).items():
                if not is_number(value) or not math.isfinite(value):
                    raise ValueError(f"the reward part {key} must be a finite number, found {value!r:.80}")
                if key in weighted:
                    raise ValueError(f"reward parts must have names of their own, found {key} twice")
                weighted[key] = weight * float(value)
        return weighted


@dataclass(frozen=True)
class Matches:
    """Format: 1 where the whole text matches a regular expression, else 0. A dot matches line breaks too.

    Repetitions inside of repetitions, such as `(\\w+\\s*)*`, may never come to an end on a text, and `re` would hold up
    every thread of the process with it. The package regex, which reads the same patterns, can stop.
    """

    pattern: str
    timeout_s: float = 1.0
    """Most seconds for a text; then its episode fails, as it is not known whether it matches."""

    def __post_init__(self) -> None:
        regex.compile(self.pattern, regex.DOTALL)
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s must be a positive number of seconds, found {self.timeout_s}")

    async def __call__(self, payload: Payload, text: str) -> float:
        """Raises TimeoutError."""

        def matched() -> bool:
            given = {"timeout": self.timeout_s, "concurrent": True}  # concurrent: others run meanwhile
            return regex.fullmatch(self.pattern, text, regex.DOTALL, **given) is not None

        try:
            return float(await run_blocking(matched))
        except TimeoutError as error:
            raise TimeoutError(
                f"matching {self.pattern[:60]!r} took longer than {self.timeout_s:g} s on a text of {len(text)} "
                "characters: write it without repetitions inside of repetitions"
            ) from error


class Tags:
    """Format: 1 where the text is `<a>...</a>`, `<b>...</b>`, each once, in this order, and else only white space."""

    def __init__(self, *names: str) -> None:
        if not names or not all(re.fullmatch(r"\w+", name) for name in names):
            raise ValueError(f"tags are names of letters, digits and underscores, found {names}")
        self.names = names
        self._pieces = re.compile("|".join(rf"</?{name}>" for name in names))

    async def __call__(self, payload: Payload, text: str) -> float:
        wanted = [piece for name in self.names for piece in (f"<{name}>", f"</{name}>")]
        found = list(self._pieces.finditer(text))
        if [piece[0] for piece in found] != wanted:
            return 0.0
        ends = [0, *(piece.end() for piece in found[1::2])]
        starts = [*(piece.start() for piece in found[0::2]), len(text)]
        return float(not any(text[end:start].strip() for end, start in zip(ends, starts, strict=True)))


@dataclass(frozen=True)
class Length:
    """Length: 0 up to `longest - buffer`, then falling linearly, and -1 above `longest`: DAPO's soft overlong
    punishment (arXiv:2503.14476), over characters. Over sampled tokens it is `advantages.overlong_tokens` of the run
    file."""

    longest: int
    buffer: int = 0
    measure: Callable[[str], int] = len
    """The length of a text, such as `lambda text: len(text.split())` for words."""

    def __post_init__(self) -> None:
        if not 0 <= self.buffer <= self.longest:
            raise ValueError(f"buffer must lie between 0 and longest ({self.longest}), found {self.buffer}")

    async def __call__(self, payload: Payload, text: str) -> float:
        return float(overlong_punishment([self.measure(text)], self.longest, self.buffer)[0])


class JudgeError(RuntimeError):
    """The judge gave no score."""


@dataclass(frozen=True)
class Judge:
    """A language model's score of the text, from 0 (`lowest`) to 1 (`highest`).

    `servers` may be vLLM, SGLang, `headrace serve` or any other with /v1/chat/completions. The judge is asked with the
    same seed for the same payload and text. Nothing is opened before the first call.
    """

    servers: tuple[str, ...]
    """Addresses such as http://10.0.0.5:8000. Several share the load."""
    prompt: str
    """What it is asked: `{response}` stands for the text, `{question}` and the like for keys of the payload."""
    score: str = r"(?i)score\W*(-?\d+(?:\.\d+)?)"
    """Regular expression whose first group is the score; its last match in the answer counts."""
    lowest: float = 0.0
    highest: float = 10.0
    """A score outside of `lowest` to `highest` is none."""
    model: str = ""
    """Its name at the servers; empty: the first that they list."""
    temperature: float = 0.0
    max_tokens: int = 512
    concurrency: int = 16
    """Most questions at once of this worker process; further ones wait."""
    timeout_s: float = 60.0
    """Most seconds for a score, waiting and further tries included. The environment's step, whose limit is
    environment.step_timeout_s, must have the time for it."""
    retries: int = 3
    """Tries after the first where a server cannot be reached or is overloaded."""
    neutral: float | None = None
    """The score (0 to 1) of a text that could not be judged, as the part `unjudged`. None: its episode fails, and
    neither trains nor votes."""
    max_response: int = 20_000
    """Most characters of the text that the judge is shown."""
    api_key_env: str = ""
    """Environment variable that holds the servers' API key."""

    def __post_init__(self) -> None:
        if not (self.servers and isinstance(self.servers, tuple)):
            raise ValueError(f"servers must be a tuple of addresses like http://10.0.0.5:8000, found {self.servers!r}")
        if "response" not in (name for _, name, _, _ in string.Formatter().parse(self.prompt)):
            raise ValueError("the judge's prompt must contain {response}, which stands for the policy's text")
        if re.compile(self.score).groups < 1:
            raise ValueError(f"score must be a regular expression with a group for the number, found {self.score!r}")
        if not self.lowest < self.highest:
            raise ValueError(f"lowest must be below highest, found {self.lowest} and {self.highest}")
        if self.neutral is not None and not 0 <= self.neutral <= 1:
            raise ValueError(f"neutral must lie between 0 and 1, as scores do, found {self.neutral}")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s must be a positive number of seconds, found {self.timeout_s}")

    async def __call__(self, payload: Payload, text: str) -> dict[str, float]:
        """{"judged": score}, or {"unjudged": neutral}. Raises JudgeError."""
        try:
            return {"judged": await self._judge(payload, text)}
        except (JudgeError, PolicyError) as error:
            if self.neutral is None:
                raise JudgeError(f"the judge gave no score: {error}") from error
            log.warning("the judge gave no score, %g is taken: %s", self.neutral, error)
            return {"unjudged": self.neutral}

    def close(self) -> None:
        """End its connections; harmless if there are none."""
        if "_policy" in self.__dict__:
            self._policy.close()

    async def _judge(self, payload: Payload, text: str) -> float:
        shown, _ = bounded_text(text, self.max_response)
        try:
            question = self.prompt.format(**{**payload, "response": shown})
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            raise JudgeError(
                f"the prompt cannot be filled in: {describe(error)}; the payload has {', '.join(payload)}"
            ) from error
        seed = stream_seed("judge", question) % (1 << 31)
        body = {
            "messages": [{"role": "user", "content": question}],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "seed": seed,
        }
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await self._opened().chat(f"judge-{seed}", body)
        except TimeoutError as error:
            raise JudgeError(f"it did not answer within {self.timeout_s:g} s") from error
        found = re.findall(self.score, answer)
        last = found[-1] if found else ""
        number = last[0] if isinstance(last, tuple) else last
        try:
            score = float(number)
        except ValueError as error:
            raise JudgeError(f"its answer has no score: {answer[-500:]!r}") from error
        if not self.lowest <= score <= self.highest:
            raise JudgeError(f"its score {score:g} is not within {self.lowest:g} to {self.highest:g}")
        return (score - self.lowest) / (self.highest - self.lowest)

    def _opened(self) -> RemotePolicy:
        with _OPENING:
            return self._policy

    @functools.cached_property
    def _policy(self) -> RemotePolicy:
        settings = SamplingSettings(
            backend=Backend.REMOTE,
            servers=self.servers,
            served_model=self.model,
            slots=self.concurrency,
            max_context=2,  # of turns by token ids, which a judge is not asked for
            request_timeout_s=self.timeout_s,
            request_retries=self.retries,
        )
        key = os.environ.get(self.api_key_env, "") if self.api_key_env else ""
        if self.api_key_env and not key:
            raise JudgeError(f"the environment variable {self.api_key_env}, which api_key_env names, is not set")
        return RemotePolicy(settings, "judge", 1, api_key=key)


_OPENING = threading.Lock()
