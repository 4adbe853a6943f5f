"""What a person is shown of a run: how it ended, its summary, the curve as text, a line per step, dialogues."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from learner.metrics import WAITED_FOR, Stall, longest_wait, no_gradient
from learner.summary import books
from pipelines.attempts import Attempt
from policy.chat import ChatFormat, load_chat

PROMPT_CHARACTERS = 120
"""Of a prompt's end, which holds the question."""
BARS = "▁▂▃▄▅▆▇█"
MOST_BARS = 60
ENDINGS = {
    "steps": "all its steps are trained",
    "target_success": "it reached learner.target_success",
    "train_s": "its learner.train_s were over",
    "solved": "solved: every group of late had full success and no gradient",
    "interrupted": "it was interrupted",
    "no_progress": "it made no progress",
    "taken_over": "a newer learner took over",
    "failed_fast": "an episode failed, and failures.policy is fail_fast",
    "crashed": "the learner crashed",
}
"""`outcome` of summary.json, for people."""


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The run's summary, or None if it has not been written."""
    try:
        found = json.loads((folder / "summary.json").read_text())
    except FileNotFoundError:
        return None
    return dict(found)


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, oldest first; one that is still being written is left out."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def bars(values: Sequence[float]) -> str:
    """One character per value between 0 and 1; of many values, one per mean of neighbours."""
    count = min(len(values), MOST_BARS)
    bounds = [len(values) * i // count for i in range(count + 1)] if count else [0]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    return "".join(BARS[min(len(BARS) - 1, max(0, int(mean * len(BARS))))] for mean in means)


def how_it_ended(attempt: Attempt, summary: Mapping[str, Any] | None) -> str:
    """The first line about a run: whether it runs, has ended well, or failed, why, and which log tells more."""
    ended, name = attempt.ended, attempt.folder.name
    if summary is not None:
        name = f"{summary['run_id']}, step {summary['step']}"
    if attempt.running:
        return f"{name}: running now"
    if ended is not None and ended.exit_status not in (0, 130):
        why = f": {ended.why}" if ended.why else ""
        text = f"{name}: failed with exit status {ended.exit_status}{why}"
        if summary is not None and summary.get("why"):
            text += f"\n{summary['why']}"
        return f"{text}\nits log            {ended.log}" if ended.log else text
    if summary is not None:
        why = f": {summary['why']}" if summary.get("why") else ""
        return f"{name}: {ENDINGS.get(summary['outcome'], summary['outcome'])}{why}"
    if ended is not None and ended.exit_status == 130:
        return f"{name}: interrupted before its first step"
    return f"{name}: it was killed before it could say how it ended, or runs elsewhere; its logs: {attempt.logs}"


def end_of_log(attempt: Attempt, lines: int = 12) -> str:
    """The last lines of the log of a run that failed; empty for others."""
    ended = attempt.ended
    if attempt.running or ended is None or not ended.log:
        return ""
    # The run folder may have been moved since.
    path = attempt.logs / Path(ended.log).name
    text = path.read_bytes()[-20_000:].decode(errors="replace") if path.is_file() else ""
    return f"the end of {path}:\n" + "\n".join(f"    {line}" for line in text.splitlines()[-lines:])


def summary_words(summary: Mapping[str, Any]) -> str:
    """A run's figures, as text: held-out success before and after, the curve, busy fraction, books."""
    curve = [float(point["sampled"]) for point in summary["curve"]]
    waits = ", ".join(
        f"{_seconds(seconds)} {WAITED_FOR[Stall(cause)]}"
        for cause, seconds in sorted(summary["stall_s"].items(), key=lambda item: -item[1])
        if seconds >= 0.5
    )
    busy = "no row came"
    if summary["learner_busy"] is not None:
        busy = f"{100 * summary['learner_busy']:.0f} % of the time since its first row"
    lines = [
        f"held-out success   sampled  {_before_after(summary, 'sampled')}",
        f"                   greedy   {_before_after(summary, 'greedy')}",
        *_best(summary),
        f"training           {_seconds(summary['train_s'])}, evaluation {_seconds(summary['eval_s'])} apart; "
        f"{summary['episodes_per_s']:.2f} episodes/s, {summary['tokens_per_s']:.0f} tokens/s",
        *([f"sampled success    {bars(curve)}  (of the training groups)"] if curve else []),
        f"learner busy       {busy}" + (f"; waited {waits}" if waits else ""),
        f"groups             {books(summary['groups'])}",
    ]
    letters = sum(summary["dead_letters"].values())
    if letters:
        most = sorted(summary["dead_letters"].items(), key=lambda item: -item[1])[:3]
        what = ", ".join(f"{count} {reason}" for reason, count in most)
        lines.append(f"dead letters       {letters}, in dead_letters.jsonl; most: {what}")
    return "\n".join(lines)


def _best(summary: Mapping[str, Any]) -> list[str]:
    """Which of several evaluated versions is the best, and where it lies."""
    best = summary.get("best")
    if best is None or not summary["step"]:
        return []
    successes, answered, *_ = best["sampled"] if best["sampled"][1] else best["greedy"]
    return [
        f"best adapter       {best['version']} with {successes / answered:.3f}, of {len(summary['evaluations'])} that "
        f"were evaluated: {best['adapter']}"
    ]


def evaluation_words(summary: Mapping[str, Any], what: str) -> str:
    """What `headrace eval` was asked for: held-out success of `what`."""
    found = summary["evaluation_before"]
    if found is None:
        return f"{what} was not evaluated"
    lines = [f"held-out success of {what}"]
    for name in ("sampled", "greedy"):
        successes, answered, unanswered, *rest = found[name]
        rate = f"{successes / answered:.3f}  ({successes} of {answered})" if answered else "nothing answered"
        more = f"; {rest[0]} truncated" if any(rest) else ""
        more += f"; {unanswered} questions without an answer are not counted" if unanswered else ""
        lines.append(f"    {name:8} {rate}{more}" if answered or unanswered else f"    {name:8} not asked")
    for one in found.get("pass_at", ()):
        bounds = f"95 %: {one['low']:.3f} to {one['high']:.3f}"
        lines.append(f"    pass@{one['k']:<3} {one['value']:.3f}  ({bounds}, over {one['questions']} questions)")
    for name in ("sampled", "greedy"):
        figures = found.get(f"{name}_figures", {})
        if sum(figures.get("ends", {}).values()):
            lines += [f"    {name}", *(f"        {line}" for line in _figures(figures))]
    return "\n".join(lines)


def _figures(figures: Mapping[str, Any]) -> list[str]:
    """Ends, reward, lengths: `learner.results.Figures`, for people."""
    lines = ["ends     " + ", ".join(f"{number} {end}" for end, number in figures["ends"].items())]
    if figures["failures"]:
        failed = ", ".join(f"{number} {status}" for status, number in figures["failures"].items())
        lines.append(f"failures {failed}; each was asked again while attempts were left")
    if figures["reward"] is not None:
        parts = ", ".join(f"{name} {part:.3f}" for name, part in figures["parts"].items())
        lines.append(f"reward   {figures['reward']:.3f}" + (f"  ({parts})" if parts else ""))
    for name, label in (("tokens", "sampled tokens"), ("turns", "")):
        if spread := figures[name]:
            bounds = f"p50 {spread['p50']}, p90 {spread['p90']}, max {spread['max']}"
            lines.append(f"{name:8} {bounds}" + (f"  ({label})" if label else ""))
    return lines


def steps_table(steps: Sequence[Mapping[str, Any]], count: int) -> str:
    """The newest `count` steps, one line each."""
    if not steps or count < 1:
        return ""
    shown = steps[-count:]
    lines = [
        f"{'step':>5}  {'time':>7}  {'success':>7}  {'reward':>7}  {'tokens/s':>8}  {'staleness':>9}  {'busy':>5}  "
        f"{'no gradient':>11}  waited"
    ]
    for step in shown:
        minutes, seconds = divmod(int(step["train_s"]), 60)
        busy = step["learner_busy"]
        lines.append(
            f"{step['step']:>5}  {minutes:>4}:{seconds:02}  {step['success']:>7.3f}  {step['reward']:>7.3f}  "
            f"{step['tokens_per_s']:>8.0f}  {step['staleness_mean']:>5.1f} /{step['staleness_max']:>2}  "
            f"{'-' if busy is None else f'{100 * busy:.0f} %':>5}  {no_gradient(step):>11}  "
            f"{longest_wait(step['stall_s'])}".rstrip()
        )
    if len(shown) < len(steps):
        lines.append(f"(the newest {len(shown)} of {len(steps)} steps; --steps {len(steps)} shows all)")
    return "\n".join(lines)


def dialogues(folder: Path, count: int) -> str:
    """The first `count` sampled episodes of each phase (before, train, after), decoded by the run's chat format."""
    path, run_file = folder / "samples.jsonl", folder / "run.json"
    if not (path.is_file() and run_file.is_file()) or count < 1:
        return ""
    model = json.loads(run_file.read_text())["model"]
    chat = load_chat(model["path"], variables=model.get("template_variables"), tool_calls=model.get("tool_calls", ""))
    phases: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        sample = json.loads(line)
        if sample["phase"] == "train" or sample["temperature"] > 0:
            phases.setdefault(sample["phase"], []).append(_dialogue(sample, chat))
    # Of training the newest tell most, of evaluations the first are as good as any.
    shown = {phase: lines[-count:] if phase == "train" else lines[:count] for phase, lines in phases.items()}
    return "\n".join(line for lines in shown.values() for line in lines)


def _dialogue(sample: Mapping[str, Any], chat: ChatFormat) -> str:
    tokens, prompt_length = sample["tokens"], sample["prompt_length"]
    question = chat.decode(tokens[:prompt_length])[-PROMPT_CHARACTERS:]
    verdict = "solved" if sample["success"] else "not solved"
    parts = sample["reward_parts"]
    shares = f" ({', '.join(f'{name} {part:g}' for name, part in parts.items())})" if len(parts) > 1 else ""
    counts = "".join(f", {name} {count:g}" for name, count in sample.get("counts", {}).items())
    title = f"[{sample['phase']}, step {sample['step']}, {sample['episode']}: {verdict}, reward {sample['reward']:g}"
    return f"{title}{shares}{counts}]\n...{question}{chat.decode(tokens[prompt_length:])}\n"


def _before_after(summary: Mapping[str, Any], name: str) -> str:
    return " -> ".join(_fraction(summary[f"evaluation_{when}"], name) for when in ("before", "after"))


def _fraction(evaluation: Mapping[str, Any] | None, name: str) -> str:
    """Of the answered questions; what was asked and not answered is told from what was not asked."""
    if evaluation is None:
        return "not evaluated"
    successes, answered, unanswered, *_ = evaluation[name]
    if answered:
        return f"{successes / answered:.3f}"
    return f"none of {unanswered} questions answered" if unanswered else "not asked"


def _seconds(value: float) -> str:
    minutes, seconds = divmod(round(value), 60)
    return f"{minutes} min {seconds} s" if value >= 60 else f"{value:.1f} s"
