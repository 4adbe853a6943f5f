"""summary.json: what a run came to, every figure measured in it; and the advice that follows from Little's law."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from learner.evaluation import EvaluationReport, best_first
from learner.ledger import Ledger
from learner.metrics import AdapterLag, GroupStatistics, Tally, percentile
from learner.settings import LearnerSettings
from trajectories.schema import End, Heartbeat


@dataclass(frozen=True)
class Facts:
    """What the summary needs besides the tally and the books."""

    run_id: str
    step: int
    version: str
    outcome: str
    """Why the run ended: `steps`, `target_success`, `train_s`, `solved`, `interrupted`, `no_progress`, ..."""
    eval_s: float
    startup_s: float | None
    learner_busy: float | None
    compiles_after_warmup: int | None
    """None before everything was compiled."""
    after: EvaluationReport | None
    why: str = ""
    """What was wrong, where something was: for people."""
    lag: AdapterLag = field(default_factory=AdapterLag)
    workers: int = 0
    adapters_url: str = ""


def summarise(facts: Facts, tally: Tally, ledger: Ledger) -> dict[str, Any]:
    """The object in summary.json. What was not measured is None."""
    ages = sorted(tally.ages.elements())
    train_s = tally.train_s
    best = best_first(tally.evaluations)[:1]
    return {
        "run_id": facts.run_id,
        "outcome": facts.outcome,
        "why": facts.why,
        "step": facts.step,
        "version": facts.version,
        "success_before": tally.before.sampled.value if tally.before else None,
        "success_after": facts.after.sampled.value if facts.after else None,
        "greedy_before": tally.before.greedy.value if tally.before else None,
        "greedy_after": facts.after.greedy.value if facts.after else None,
        "evaluation_before": tally.before.to_json() if tally.before else None,
        "evaluation_after": facts.after.to_json() if facts.after else None,
        "evaluations": [report.to_json() for report in tally.evaluations],
        "best": {**best[0].to_json(), "adapter": f"{facts.adapters_url}/{best[0].version}"} if best else None,
        "train_s": train_s,
        "eval_s": facts.eval_s,
        "startup_s": facts.startup_s,
        "curve": tally.curve,
        "learner_busy": facts.learner_busy,
        "stall_s": dict(tally.stalls),
        "groups": ledger.counts(),
        "discards": {
            "closings": dict(ledger.dropped),
            "reissued": dict(ledger.reissued),
        },
        "dead_letters": dict(tally.dead_letters),
        "compiles_after_warmup": facts.compiles_after_warmup,
        "padding_fraction": 1 - tally.used_tokens / tally.call_tokens if tally.call_tokens else None,
        "staleness": {
            "mean": sum(ages) / len(ages) if ages else None,
            "p95": percentile(ages, 0.95),
            "max": ages[-1] if ages else None,
        },
        "adapter_lag_s": {
            "p50": percentile(facts.lag.samples, 0.5),
            "p95": percentile(facts.lag.samples, 0.95),
            "count": len(facts.lag.samples),
        },
        "episodes": tally.episodes,
        "episodes_by_end": {str(end): tally.ends[end] for end in End},
        "episodes_per_s": tally.episodes / train_s if train_s else 0.0,
        "tokens": tally.used_tokens,
        "tokens_per_s": tally.used_tokens / train_s if train_s else 0.0,
        "loss_tokens": tally.loss_tokens,
        "groups_by_episode_time": by_time(tally.arrived_by_time, tally.trained_by_time),
        "workers": facts.workers,
    }


def by_time(arrived: Counter[int], trained: Counter[int]) -> dict[str, dict[str, int]]:
    """{"<= 4 s": {"arrived": n, "trained": m}}, by the time of a group's longest episode."""
    return {
        f"<= {2.0**bucket:g} s": {"arrived": arrived[bucket], "trained": trained[bucket]} for bucket in sorted(arrived)
    }


def books(counts: Mapping[str, int]) -> str:
    """`Ledger.counts` as a sentence."""
    return (
        f"{counts['issued']} issued: {counts['trained']} trained, {counts['filtered']} without a gradient, "
        f"{counts['failed']} failed, {counts['expired']} expired, {counts['outstanding']} still out"
        + (f", {counts['retired']} passed over (solved always or never)" if counts.get("retired") else "")
    )


def evaluation_progress(answered: int, asked: int, heartbeats: Sequence[Heartbeat]) -> str:
    """How far an evaluation is; `heartbeats` are the newest of the workers that live."""
    if not heartbeats:
        return f"evaluation: {answered} of {asked} questions answered; no worker has reported yet"
    if all(beat.version is None for beat in heartbeats):
        return f"evaluation: {answered} of {asked} questions answered; the workers are loading the model"
    running = sum(beat.running for beat in heartbeats)
    return f"evaluation: {answered} of {asked} questions answered; {running} were running at the last report"


def sizing(settings: LearnerSettings) -> str:
    """Little's law, before anything is measured."""
    if settings.synchronous:
        return "synchronous: the learner waits for each step's groups"
    steps = settings.max_staleness
    if steps == 0:
        return "max_staleness 0 is on-policy: the learner waits for each step's groups"
    return (
        f"up to {settings.max_outstanding} groups are out at once; the learner never waits if p99 group time is below "
        f"{steps} step{'s' if steps > 1 else ''} (max_staleness)"
    )


def advice(settings: LearnerSettings, group_p99_s: float | None, step_s: float | None) -> str | None:
    """What Little's law asks for beyond the settings; None if they are enough or nothing is known yet."""
    if group_p99_s is None or not step_s or settings.synchronous:
        return None
    needed = math.ceil(group_p99_s / step_s)
    if needed <= settings.max_staleness:
        return None
    factor = math.ceil(group_p99_s / (step_s * max(1, settings.max_staleness)))
    return (
        f"a group takes up to {group_p99_s:.1f} s (p99) and a step {step_s:.2f} s: a learner that never waits needs "
        f"max_staleness {needed} (now {settings.max_staleness}); if that is too stale, steps of "
        f"{factor * settings.groups_per_step} groups (now {settings.groups_per_step})"
    )


SCARCE = 0.75
"""Share of groups without a gradient above which more groups at once help less than other prompts or rewards."""
NEWEST = 64
_MORE_ROWS = (
    "what tells a group's members apart gives more rows: prompts neither too easy nor too hard, rewards in parts, a "
    "larger learner.group_size"
)


def scarcity(filtered: Sequence[bool]) -> str | None:
    """What to do about groups without a gradient, if they are why rows are rare; `filtered` tells the newest last."""
    newest = filtered[-NEWEST:]
    if not newest or sum(newest) <= SCARCE * len(newest):
        return None
    return f"{sum(newest)} of the newest {len(newest)} groups had no gradient; {_MORE_ROWS}"


def no_step(
    ended: Sequence[GroupStatistics], failed: int, *, waiting: int, needed: int, seconds: float, newest_letter: str
) -> str:
    """Why no step came for a while, though groups end: `ended` had no gradient and `failed` have failed since the last
    one; `waiting` closings are here and a step takes `needed`."""
    parts = []
    if ended:
        reward, success = (sum(getattr(one, name) for one in ended) / len(ended) for name in ("reward", "success"))
        parts.append(
            f"{len(ended)} groups ended without a gradient (each one's members got the same reward: mean {reward:.3f}, "
            f"success {success:.3f})"
        )
    if failed:
        parts.append(f"{failed} groups failed")
    text = f"no step for {seconds:.0f} s: {' and '.join(parts)}, {waiting} of {needed} that can train are here"
    if ended and not failed:
        text += f"; {_MORE_ROWS}"
    return text + (f"; the newest dead letter: {newest_letter}" if newest_letter else "")


def missing(
    *, workers: int, last_heartbeat_s: float | None, outstanding: int, held: int, waiting: int, needed: int
) -> str:
    """What a learner without progress lacks, for people. `waiting` closings are here and a step takes `needed`."""
    if workers == 0 and last_heartbeat_s is None:
        return "no heartbeat has ever come from a worker: is the rollout job running, and on this run's topics?"
    if workers == 0:
        return f"the last heartbeat came {last_heartbeat_s:.0f} s ago: the rollout job has died or is cut off"
    return (
        f"{workers} worker(s) live, {outstanding} group(s) are out, {held} of them at a worker, and {waiting} of "
        f"{needed} closings wait for a step: no episode ends. A tool or an environment hangs beyond its time limit, or "
        "tasks are not read"
    )
