"""Difficulty: prompts that are solved always or never teach nothing; they are asked more rarely.

A prompt is known by its payload. The record of a prompt is how many of its newest visits in a row all members solved,
or none did. Once that reaches the setting, the prompt is retired: of the times that it comes up, all but each
`revisit`-th are skipped, and one visit with another result brings it back.

Invariants: what is decided for a group is a function of the groups whose end is in the ledger, in their order, so a
checkpoint that holds both goes on as it would have; memory is bounded by `max_prompts`, whatever there is of prompts.
Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DifficultySettings:
    """Section [difficulty] of the run file: prompts that are solved always or never are asked more rarely. It pays
    where tasks come from a finite set, so that prompts are visited again, with the same payload each time."""

    solved_visits: int = 0
    """Visits in a row in which every member solved the prompt, after which it is retired. 0: never."""
    unsolved_visits: int = 0
    """The same for visits in which no member did. More than one is wise: what is never solved now may be later."""
    revisit: int = 10
    """A retired prompt is asked again each so-many-th time that it comes up."""
    max_prompts: int = 100_000
    """Most prompts that are remembered; beyond that the one whose visit is longest ago is forgotten."""

    def __post_init__(self) -> None:
        for name, least in (("solved_visits", 0), ("unsolved_visits", 0), ("revisit", 2), ("max_prompts", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"difficulty.{name} must be at least {least}, found {getattr(self, name)}")

    @property
    def on(self) -> bool:
        return self.solved_visits > 0 or self.unsolved_visits > 0


@dataclass(slots=True)
class _Prompt:
    streak: int = 0
    """Visits in a row that all members solved; below 0: that none did."""
    skipped: int = 0
    """Times that it came up and was not asked, since its last visit."""


class Pool:
    """What is known of the prompts."""

    def __init__(self, settings: DifficultySettings) -> None:
        self._settings = settings
        self._prompts: dict[str, _Prompt] = {}
        """By key; the one whose visit is longest ago comes first."""

    def skip(self, payload: Mapping[str, Any]) -> bool:
        """Whether the prompt, which has come up, is not asked now; counts it if so."""
        prompt = self._prompts.get(key_of(payload)) if self._settings.on else None
        if prompt is None or not self._retired(prompt) or prompt.skipped + 1 >= self._settings.revisit:
            return False
        prompt.skipped += 1
        return True

    def visited(self, payload: Mapping[str, Any], success: float) -> None:
        """Its group has ended; `success` is the share of its members that solved it."""
        if not self._settings.on:
            return
        key = key_of(payload)
        streak = self._prompts.pop(key, _Prompt()).streak
        if success >= 1.0:
            streak = max(streak, 0) + 1
        elif success <= 0.0:
            streak = min(streak, 0) - 1
        else:
            streak = 0
        self._prompts[key] = _Prompt(streak)
        if len(self._prompts) > self._settings.max_prompts:
            del self._prompts[next(iter(self._prompts))]

    def counts(self) -> dict[str, int]:
        """{prompts, solved, unsolved}: those remembered, and those retired, by why."""
        retired = [prompt.streak for prompt in self._prompts.values() if self._retired(prompt)]
        solved = sum(streak > 0 for streak in retired)
        return {"prompts": len(self._prompts), "solved": solved, "unsolved": len(retired) - solved}

    def _retired(self, prompt: _Prompt) -> bool:
        settings = self._settings
        return 0 < settings.solved_visits <= prompt.streak or 0 < settings.unsolved_visits <= -prompt.streak

    def to_json(self) -> list[list[Any]]:
        """For the checkpoint's record."""
        return [[key, prompt.streak, prompt.skipped] for key, prompt in self._prompts.items()]

    @classmethod
    def from_json(cls, settings: DifficultySettings, content: list[list[Any]]) -> Pool:
        """The pool that `to_json` wrote; the settings may be others."""
        pool = cls(settings)
        for key, streak, skipped in content[-settings.max_prompts :]:
            pool._prompts[str(key)] = _Prompt(int(streak), int(skipped))
        return pool


def key_of(payload: Mapping[str, Any]) -> str:
    """A prompt's name: 16 hex digits of its payload."""
    text = json.dumps(payload, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
