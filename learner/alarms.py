"""Warnings about steps whose rows lie too far from the policy that learns from them: what it means and what to do.

Invariant: a cause is named at most once in `every_s` seconds, with the number of steps that it held meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class AlarmSettings:
    """Section [alarms] of the run file: when the learner warns that its rows are too far off its policy."""

    effective_sample_size: float = 0.5
    """Warn below this fraction of the loss tokens; 0 never warns."""
    kept_fraction: float = 0.5
    """Warn where less of the loss tokens train (the others are clipped, masked or invalid); 0 never warns."""
    mean_abs_log_ratio: float = 0.3
    """Warn above this mean of |log pi - log pi_behaviour|, nats per token."""
    behaviour_kl: float = 0.2
    """Warn above this estimate of KL(sampler || learner), nats per token."""
    every_s: float = 60.0
    """Least seconds between two warnings of the same kind."""

    def __post_init__(self) -> None:
        for name in ("effective_sample_size", "kept_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be a fraction from 0 to 1, found {getattr(self, name)}; 0 never warns")
        for name in ("mean_abs_log_ratio", "behaviour_kl"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"{name} must be above 0, found {getattr(self, name)}; a large one such as 1e9 never warns"
                )
        if not 0 <= self.every_s < math.inf:
            raise ValueError(f"every_s must be 0 seconds or more, found {self.every_s}")


_MEANINGS = {
    "effective_sample_size": "a few tokens carry the gradient of all",
    "kept_fraction": "most of what was sampled teaches nothing",
    "mean_abs_log_ratio": "sampler and learner disagree about the same tokens",
    "behaviour_kl": "the policy has moved away from the one that sampled",
}
_LOW = ("effective_sample_size", "kept_fraction")


class Alarm:
    """Watches the steps of one run."""

    def __init__(self, settings: AlarmSettings) -> None:
        self._settings = settings
        self._held: dict[str, int] = {}
        self._warned_at: dict[str, float] = {}

    def check(self, record: Mapping[str, Any], now: float) -> list[str]:
        """The warnings about a step, by its line of metrics.jsonl; `now` is any clock in seconds."""
        found = []
        for name, meaning in _MEANINGS.items():
            value, threshold = float(record[name]), float(getattr(self._settings, name))
            if not record["loss_tokens"] or not (value < threshold if name in _LOW else value > threshold):
                continue
            self._held[name] = self._held.get(name, 0) + 1
            if now - self._warned_at.get(name, -math.inf) < self._settings.every_s:
                continue
            side = "below" if name in _LOW else "above"
            found.append(
                f"step {record['step']}: {name} is {value:.3g}, {side} alarms.{name} = {threshold:g} (in "
                f"{self._held.pop(name)} step(s) since the last warning): {meaning}. {_mend(record)}"
            )
            self._warned_at[name] = now
        return found


def _mend(record: Mapping[str, Any]) -> str:
    if record["invalid_tokens"] > 0.1 * record["loss_tokens"]:
        return (
            f"{record['invalid_tokens']} of {record['loss_tokens']} tokens have no usable log-prob or advantage: both "
            "sides must read the same [model] and [sampling]"
        )
    if record["staleness_mean"] > 0:
        return (
            f"The rows were {record['staleness_mean']:.1f} steps old: lower learner.max_staleness or "
            "optimizer.learning_rate, or let a correction mask them (loss.correction = 'icepop')"
        )
    return (
        "The rows were fresh, so both sides compute different probabilities: compare model.dtype, [sampling] and the "
        "server's version; where a step makes several updates, lower learner.epochs or learner.minibatches"
    )
