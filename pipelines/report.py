"""What a person is shown of a run: the closing words, and the curve as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from policy.chat import ChatFormat, load_chat

PROMPT_CHARACTERS = 120
"""Of a prompt's end, which holds the question."""
BARS = "▁▂▃▄▅▆▇█"


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The run's summary, or None if it has not been written."""
    try:
        found = json.loads((folder / "summary.json").read_text())
    except FileNotFoundError:
        return None
    return dict(found)


def bars(values: Sequence[float]) -> str:
    """One character per value between 0 and 1."""
    return "".join(BARS[min(len(BARS) - 1, max(0, int(value * len(BARS))))] for value in values)


def closing_words(summary: Mapping[str, Any], folder: Path) -> str:
    """The end of a run, as text: held-out success before and after, busy fraction, books, and where to look."""
    groups = summary["groups"]
    curve = [float(point["sampled"]) for point in summary["curve"]]
    lines = [
        "",
        f"held-out success   sampled  {_arrow(summary['success_before'], summary['success_after'])}",
        f"                   greedy   {_arrow(summary['greedy_before'], summary['greedy_after'])}",
        f"training           {_seconds(summary['train_s'])}, evaluation {_seconds(summary['eval_s'])} apart; "
        f"{summary['episodes_per_s']:.2f} episodes/s, {summary['tokens_per_s']:.0f} tokens/s",
        f"sampled success    {bars(curve)}  (each step's training groups)",
        f"learner busy       {_percent(summary['learner_busy'])} of the time since its first row",
        "groups             " + ", ".join(f"{groups[name]} {name}" for name in groups),
        f"the run lies in    {folder.resolve()}",
        f"look at it         headrace show {folder}   (curve, steps and sampled dialogues)",
    ]
    return "\n".join(lines)


def steps_table(folder: Path) -> str:
    """metrics.jsonl as a table, one line per step."""
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return "\n".join(
        "  ".join(f"{name} {_short(value)}" for name, value in row.items() if isinstance(value, int | float | str))
        for row in rows
    )


def dialogues(folder: Path, count: int) -> str:
    """The first `count` sampled episodes of each phase (before, train, after), decoded by the run's chat format."""
    path, run_file = folder / "samples.jsonl", folder / "run.json"
    if not (path.is_file() and run_file.is_file()):
        path, run_file = folder / "latest" / path.name, folder / "latest" / run_file.name
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
    title = f"[{sample['phase']}, step {sample['step']}, {sample['episode']}: {verdict}, reward {sample['reward']:g}]"
    return f"{title}\n...{question}{chat.decode(tokens[prompt_length:])}\n"


def _arrow(before: float | None, after: float | None) -> str:
    return f"{_fraction(before)} -> {_fraction(after)}"


def _fraction(value: float | None) -> str:
    return "not evaluated" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "no row came" if value is None else f"{100 * value:.0f} %"


def _seconds(value: float) -> str:
    return f"{int(value // 60)} min {value % 60:.0f} s" if value >= 60 else f"{value:.1f} s"


def _short(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
