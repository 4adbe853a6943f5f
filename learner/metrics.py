"""What the learner measures of itself: time by cause, totals that survive a crash, and the files people read.

Invariants: busy time and the stalls add up to the wall time since the first row; totals are part of the checkpoint, so
a resumed run reports the whole of itself; `metrics.jsonl` holds one line per step of the surviving history, because a
restart removes the lines of steps that the crash undid.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from learner.evaluation import EvaluationReport
from trajectories.schema import Closing, End, Episode, Heartbeat, Verdict, Version, end_of


class Stall(StrEnum):
    """Why the device waits."""

    NO_WORKERS = "no_workers"
    """No worker is alive."""
    NO_ROWS = "no_rows"
    """Fewer closings are here than a step needs."""
    STRAGGLER = "straggler"
    """Enough are here, but the staleness bound asks for one that is still out."""
    HOST = "host"
    """The host assembles the step or hands it over."""


WAITED_FOR = {
    Stall.NO_WORKERS: "for workers",
    Stall.NO_ROWS: "for rows",
    Stall.STRAGGLER: "for a slow group",
    Stall.HOST: "for the host",
}
"""For people."""


class StallClock:
    """Splits the time since `start` into busy time and stalls. Times by one monotonic clock, in seconds."""

    def __init__(self, busy_s: float = 0.0, stalls: Mapping[str, float] | None = None) -> None:
        """Begin with the totals of an earlier life."""
        self.busy_s = busy_s
        self.stalls: dict[str, float] = dict(stalls or {})
        self._idle_since: float | None = None
        self._marks: list[tuple[float, Stall]] = [(-math.inf, Stall.NO_ROWS)]
        self._stopped = False

    @property
    def started(self) -> bool:
        return self._idle_since is not None

    def start(self, now: float) -> None:
        """The first row is here; harmless afterwards."""
        if self._idle_since is None:
            self._idle_since = now

    def cause(self, cause: Stall, now: float) -> None:
        """From now on, if the device is idle, this is why."""
        if self._marks[-1][1] is not cause:
            self._marks.append((now, cause))

    def busy(self, began: float, ended: float) -> None:
        """The device computed a step."""
        if self._idle_since is None or self._stopped:
            return
        self._idle(began)
        self.busy_s += ended - began
        self._idle_since = ended

    def stop(self, now: float) -> None:
        """Training is over: nothing counts from here on."""
        if self._idle_since is not None and not self._stopped:
            self._idle(now)
        self._stopped = True

    @property
    def wall_s(self) -> float:
        """Time that was split so far."""
        return self.busy_s + sum(self.stalls.values())

    @property
    def busy_fraction(self) -> float | None:
        """Busy time over wall time; None before the first row."""
        return self.busy_s / self.wall_s if self.wall_s > 0 else None

    def _idle(self, until: float) -> None:
        assert self._idle_since is not None
        ends = [*(at for at, _ in self._marks[1:]), math.inf]
        for (begins, cause), ends_at in zip(self._marks, ends, strict=True):
            seconds = min(until, ends_at) - max(self._idle_since, begins)
            if seconds > 0:
                self.stalls[cause] = self.stalls.get(cause, 0.0) + seconds
        self._marks = [mark for mark, ends_at in zip(self._marks, ends, strict=True) if ends_at > until]
        self._idle_since = until


@dataclass
class Tally:
    """Totals of a run. `to_json` and `from_json` carry them through checkpoints."""

    train_s: float = 0.0
    busy_s: float = 0.0
    stalls: dict[str, float] = field(default_factory=dict)
    episodes: int = 0
    """Episodes of groups that ended, failed ones included."""
    ends: Counter[str] = field(default_factory=Counter)
    """Those by `End`."""
    used_tokens: int = 0
    """Tokens of trained rows without padding."""
    call_tokens: int = 0
    """Tokens that the device computed, padding included."""
    loss_tokens: int = 0
    ages: Counter[int] = field(default_factory=Counter)
    """Staleness of trained closings, in steps."""
    arrived_by_time: Counter[int] = field(default_factory=Counter)
    """Groups by the time of their longest episode: key k counts those of up to 2^k seconds."""
    trained_by_time: Counter[int] = field(default_factory=Counter)
    """The same for groups that trained: where the two differ, slow prompts train less often."""
    dead_letters: Counter[str] = field(default_factory=Counter)
    """By `stage: reason`."""
    curve: list[dict[str, float]] = field(default_factory=list)
    recent: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=4096))
    """Newest groups: (success, whether it was filtered)."""
    before: EvaluationReport | None = None
    evaluations: list[EvaluationReport] = field(default_factory=list)
    """All that ended, oldest first."""
    evaluating: Version | None = None
    """What is being evaluated while training goes on."""

    def to_json(self) -> dict[str, Any]:
        """Of this moment: what is counted later, while a checkpoint is being written, is not in it."""
        return {
            "train_s": self.train_s,
            "busy_s": self.busy_s,
            "stalls": dict(self.stalls),
            "episodes": self.episodes,
            "ends": dict(self.ends),
            "used_tokens": self.used_tokens,
            "call_tokens": self.call_tokens,
            "loss_tokens": self.loss_tokens,
            "ages": sorted(self.ages.items()),
            "arrived_by_time": sorted(self.arrived_by_time.items()),
            "trained_by_time": sorted(self.trained_by_time.items()),
            "dead_letters": dict(self.dead_letters),
            "curve": list(self.curve),
            "recent": list(self.recent),
            "before": self.before.to_json() if self.before else None,
            "evaluations": [report.to_json() for report in self.evaluations],
            "evaluating": str(self.evaluating) if self.evaluating else "",
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Tally:
        tally = cls(
            **{name: content[name] for name in ("train_s", "busy_s", "stalls", "episodes", "used_tokens")},
            **{name: content[name] for name in ("call_tokens", "loss_tokens", "curve")},
            dead_letters=Counter(content["dead_letters"]),
            ends=Counter(content.get("ends", {})),  # checkpoints did not always count them
            before=EvaluationReport.from_json(content["before"]) if content["before"] else None,
            evaluations=[EvaluationReport.from_json(report) for report in content["evaluations"]],
            evaluating=Version.parse(content["evaluating"]) if content["evaluating"] else None,
        )
        for name in ("ages", "arrived_by_time", "trained_by_time"):
            getattr(tally, name).update({int(key): int(value) for key, value in content[name]})
        tally.recent.extend((float(success), bool(filtered)) for success, filtered in content["recent"])
        return tally


def time_bucket(seconds: float) -> int:
    """k such that 2^k seconds is the least power of two that is not below `seconds`; at least -3."""
    return max(-3, math.ceil(math.log2(seconds))) if seconds > 0 else -3


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """What a group's end says about the policy."""

    success: float
    reward: float
    duration_s: float
    """Of the longest member."""
    members: int
    """That ended, failed ones included."""
    ends: Mapping[str, int]
    """`End` -> members that came to it."""
    filtered: bool = False


def of_closing(closing: Closing) -> GroupStatistics:
    episodes = closing.ended
    count = max(1, len(episodes))
    return GroupStatistics(
        success=sum(episode.success for episode in episodes) / count,
        reward=sum(episode.reward for episode in episodes) / count,
        duration_s=max((episode.timings.duration_s for episode in episodes), default=0.0),
        members=len(episodes) + closing.failed_members,
        ends=_ends([end_of(one.status, one.success) for one in episodes], closing.failed_members),
    )


def of_verdict(verdict: Verdict) -> GroupStatistics:
    solved, truncated = round(verdict.success_mean * verdict.members), len(verdict.truncated_members)
    wrong = max(0, verdict.members - solved - truncated)
    ends = [End.SOLVED] * solved + [End.TRUNCATED] * truncated + [End.WRONG] * wrong
    return GroupStatistics(
        success=verdict.success_mean,
        reward=verdict.reward_mean,
        duration_s=verdict.duration_s,
        members=verdict.members + verdict.failed_members,
        ends=_ends(ends, verdict.failed_members),
        filtered=True,
    )


def _ends(ends: Sequence[End], failed: int) -> dict[str, int]:
    counts = Counter(ends)
    return {str(end): failed if end is End.FAILED else counts[end] for end in End}


class AdapterLag:
    """Seconds from the end of an optimizer step to the first token sampled with its adapter, per worker.

    Counted only for versions that appeared while groups were out: without an episode there is no first token.
    """

    def __init__(self) -> None:
        self._ended_at: dict[str, float] = {}
        self._heard: dict[str, set[str]] = {}
        """Version -> the workers that told of it."""
        self.samples: deque[float] = deque(maxlen=10_000)

    def stepped(self, version: Version, ended_at: float, groups_out: int) -> None:
        if groups_out:
            self._ended_at[str(version)] = ended_at
            for old in list(self._ended_at)[:-100]:
                del self._ended_at[old]
                self._heard.pop(old, None)

    def heard(self, heartbeat: Heartbeat) -> None:
        for version, at in heartbeat.first_token_at.items():
            if version not in self._ended_at:
                continue
            told = self._heard.setdefault(version, set())
            if heartbeat.worker_id not in told:
                told.add(heartbeat.worker_id)
                self.samples.append(max(0.0, at - self._ended_at[version]))


def percentile(values: Iterable[float], fraction: float) -> float | None:
    """Nearest-rank percentile; None of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)] if ordered else None


class Journal:
    """A file of JSON lines that is only appended to."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self._path = path

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line; it outlives this process from here on."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, separators=(",", ":"), ensure_ascii=False, default=str) + "\n")

    def keep(self, wanted: Callable[[Mapping[str, Any]], bool]) -> None:
        """Remove the lines that are not wanted, and one that a crash cut short."""
        kept = []
        for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if wanted(record):
                kept.append(line + "\n")
        replacement = self._path.with_name(self._path.name + ".new")
        replacement.write_text("".join(kept), encoding="utf-8")
        os.replace(replacement, self._path)


def contrast(closings: Iterable[Closing]) -> list[Episode]:
    """A solved and an unsolved episode, where there are such."""
    found: dict[bool, Episode] = {}
    for closing in closings:
        for episode in closing.episodes:
            found.setdefault(episode.success, episode)
    return [found[success] for success in sorted(found, reverse=True)]


def sample_line(step: int, phase: str, episode: Episode) -> dict[str, Any]:
    """An episode as a line of samples.jsonl; `phase` is `train`, `before`, `during` or `after`."""
    return {
        "step": step,
        "phase": phase,
        "episode": episode.episode_id,
        "versions": [str(span.version) for span in episode.version_spans],
        "temperature": episode.temperature,
        "success": episode.success,
        "reward": episode.reward,
        "reward_parts": dict(episode.reward_parts),
        "counts": dict(episode.metrics),
        "status": str(episode.status),
        "prompt_length": episode.prompt_length,
        "tokens": episode.tokens_T.tolist(),
        "turns": [[turn.start, turn.end] for turn in episode.turns],
        "duration_s": episode.timings.duration_s,
    }


def step_line(record: Mapping[str, Any], steps: int) -> str:
    """One readable line for one step: a line of metrics.jsonl, of a run of `steps` steps."""
    parts = [
        f"step {record['step']:>{len(str(steps))}}/{steps}",
        f"success {record['success']:.3f}",
        f"reward {record['reward']:.3f}",
        f"{record['tokens_per_s']:.0f} tokens/s",
        f"staleness {record['staleness_mean']:.1f} (max {record['staleness_max']})",
    ]
    if record["learner_busy"] is not None:
        parts.append(f"busy {100 * record['learner_busy']:.0f} %")
    if waited := longest_wait(record["stall_s"]):
        parts.append(f"waited {waited}")
    if record["filtered"]:
        parts.append(f"no gradient {no_gradient(record)}")
    ends = record.get("ends", {})
    parts += [f"{end} {ends[end]}/{sum(ends.values())}" for end in (End.TRUNCATED, End.FAILED) if ends.get(end)]
    return "  ".join(parts)


def longest_wait(stall_s: Mapping[str, float]) -> str:
    """What the device waited for longest, and how long; empty if it hardly waited."""
    cause = max(stall_s, key=lambda name: stall_s[name], default=None)
    return f"{stall_s[cause]:.1f} s {WAITED_FOR[Stall(cause)]}" if cause and stall_s[cause] >= 0.05 else ""


def no_gradient(record: Mapping[str, Any]) -> str:
    """Of the groups that ended since the step before, those whose members all had the same reward."""
    return f"{record['filtered']}/{record['filtered'] + len(record['groups'])}"


def means(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each name over all of `found`; one without a name counts 0 to it."""
    return {
        name: mean([one.get(name, 0.0) for one in found]) for name in sorted({name for one in found for name in one})
    }


def mean(values: Sequence[float]) -> float:
    """The mean; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0
