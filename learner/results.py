"""Ended held-out episodes, one JSON line each: what they came to, and what a later evaluation need not ask again.

Invariants: a line is in the file before the message of its episode is acknowledged; one process at a time writes it; a
line that a crash cut short is dropped, and any other that cannot be read is an error, never skipped.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trajectories.schema import End, Episode, Kind, Status, end_of, group_key, stream_seed

PATIENCE_S = 20.0
"""How long a process that was told to end may still hold the file."""


@dataclass(frozen=True, slots=True)
class Result:
    """One ended episode of an evaluation."""

    group_id: int
    attempt: int
    question: int
    """Its place among the held-out questions, from 0."""
    sample: int
    """Which of the times that the question was asked at this temperature, from 0."""
    temperature: float
    payload: str
    """A digest of what the environment was given: tells whether the question is still the same."""
    status: Status
    success: bool
    reward: float
    parts: Mapping[str, float]
    tokens: int
    """Sampled ones."""
    turns: int
    version: str
    """That sampled it; empty if nothing was sampled."""
    error: str = ""
    """Why, for a failed status."""

    @property
    def end(self) -> End:
        return end_of(self.status, self.success)

    @property
    def episode_id(self) -> str:
        return f"{group_key(Kind.EVAL, self.group_id, self.attempt)}/0"

    def to_json(self) -> dict[str, Any]:
        return {
            **{one.name: getattr(self, one.name) for one in dataclasses.fields(self)},
            "parts": dict(self.parts),
            "end": str(self.end),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Result:
        """Raises KeyError, TypeError or ValueError for what is none."""
        found = {one.name: content[one.name] for one in dataclasses.fields(cls)}
        for name in ("group_id", "attempt", "question", "sample", "tokens", "turns"):
            found[name] = int(found[name])
        found["status"] = Status(found["status"])
        found["parts"] = {str(name): float(part) for name, part in found["parts"].items()}
        return cls(**found)


def of_episode(episode: Episode, question: int, sample: int, temperature: float, payload: Mapping[str, Any]) -> Result:
    """What is kept of an ended eval episode; the rest is what was asked."""
    return Result(
        group_id=episode.group_id,
        attempt=episode.attempt,
        question=question,
        sample=sample,
        temperature=temperature,
        payload=digest(payload),
        status=episode.status,
        success=episode.success,
        reward=episode.reward,
        parts=episode.reward_parts,
        tokens=episode.sampled_tokens,
        turns=len(episode.turns),
        version=str(episode.version_spans[0].version) if episode.version_spans else "",
        error=episode.error,
    )


def digest(payload: Mapping[str, Any]) -> str:
    """16 hexadecimal digits that depend on all of the payload, not on the order of its keys."""
    text = json.dumps(payload, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Spread:
    """Nearest-rank percentiles of whole numbers."""

    p50: int
    p90: int
    max: int


@dataclass(frozen=True, slots=True)
class Figures:
    """What the questions that were asked at one temperature came to; one that is asked several times counts as often.
    Means and spreads are over those that were answered."""

    ends: Mapping[str, int] = field(default_factory=dict)
    """By `End`. Failed are those whose every attempt failed or was lost."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """Ended episodes of a failed status, by status; most were asked again."""
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    """The reward's named parts; an answer without a part counts 0 to it, so parts that add up do so here."""
    tokens: Spread | None = None
    """Sampled, an answer."""
    turns: Spread | None = None

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Figures:
        spreads = {name: Spread(**content[name]) if content[name] else None for name in ("tokens", "turns")}
        return cls(**{**content, **spreads})


NOTHING_ASKED = Figures()


def figures(answers: Sequence[Result], unanswered: int, failures: Mapping[str, int]) -> Figures:
    """Of the answers to the questions of one temperature, in any order."""
    ends = Counter(str(answer.end) for answer in answers)
    ends[str(End.FAILED)] += unanswered
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for answer in answers:
        for name, part in answer.parts.items():
            parts[name].append(part)
    count = len(answers)
    return Figures(
        ends={str(end): ends[str(end)] for end in End},
        failures=dict(sorted(failures.items())),
        reward=math.fsum(answer.reward for answer in answers) / count if count else None,
        parts={name: math.fsum(found) / count for name, found in sorted(parts.items())},
        tokens=_spread([answer.tokens for answer in answers]),
        turns=_spread([answer.turns for answer in answers]),
    )


def _spread(numbers: Iterable[int]) -> Spread | None:
    ordered = sorted(numbers)
    if not ordered:
        return None
    p50, p90 = (ordered[math.ceil(fraction * len(ordered)) - 1] for fraction in (0.5, 0.9))
    return Spread(p50, p90, ordered[-1])


class Results:
    """The file, held by this process until `close`."""

    def __init__(self, path: Path, run_seed: int, say: Callable[[str], None], patience_s: float = PATIENCE_S) -> None:
        """Raises ValueError where another process goes on writing the file, or where it holds something else."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._run_seed = path, run_seed
        self._file = path.open("a+b")
        try:
            self._lock(patience_s)
            self.ended = tuple(self._read(say))
        except BaseException:
            self._file.close()
            raise

    @property
    def path(self) -> Path:
        return self._path

    def append(self, result: Result) -> None:
        """Add a line; it outlives this process from here on."""
        seed = stream_seed(self._run_seed, result.episode_id)
        line = {"episode": result.episode_id, **result.to_json(), "seed": seed}
        self._file.write(json.dumps(line, separators=(",", ":"), ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _lock(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ValueError(f"{self._path} is being written by another evaluation: stop that one") from None
                time.sleep(0.1)

    def _read(self, say: Callable[[str], None]) -> Iterable[Result]:
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            say(f"warning: the last line of {self._path} is cut short; it is dropped, and its question asked again")
            self._file.truncate(whole)
        self._file.seek(0, os.SEEK_END)
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                yield Result.from_json(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(
                    f"{self._path}, line {number}, is no result of an evaluation ({type(error).__name__}: {error}): "
                    "remove the line, or choose another folder"
                ) from error
