"""The folder of an evaluation: what it measures, and the episodes that have ended.

    DIR/evaluated.json   the model, adapter and settings that results.jsonl is about
    DIR/results.jsonl    one line for each ended episode (`learner.results`)
    DIR/attempts/...     each start, as of any run

Invariant: results of different models, adapters or settings never lie in one file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipelines import settings
from pipelines.attempts import AttemptError
from pipelines.config import Run
from pipelines.settings import SettingsError
from policy.adapters import ADAPTER_FILES
from policy.files import ModelError, find_model
from trajectories.storage import open_storage

RESULTS = "results.jsonl"
EVALUATED = "evaluated.json"
SECTIONS = ("model", "lora", "sampling", "environment", "code")
"""Sections of the run file that an episode may depend on, but for what follows."""
NOT_OF_EPISODES = {
    "sampling": ("servers", "server_storage", "api_key_env", "connect_timeout_s", "request_timeout_s"),
    "environment": ("max_concurrency", "blocking_threads", "close_timeout_s"),
}
OF_EVALUATION = ("questions", "samples", "greedy_questions", "attempts")
MOST_SHOWN = 8
"""Differences that an error lists."""
END_BYTES = 1 << 20
"""Of each end of a model's file, which tell it from another."""


def default_folder(name: str, adapter: str | None) -> Path:
    """Where the evaluation of a run goes if nobody says."""
    what = Path(adapter if "://" in adapter else Path(adapter).resolve()).name if adapter else ""
    return Path("runs") / (f"{name}-eval-{what}" if what else f"{name}-eval")


def subject(run: Run, adapter: str | None) -> dict[str, Any]:
    """What is measured, as plain JSON: equal for two commands whose episodes are the same."""
    written = settings.write(run)
    found: dict[str, Any] = {"seed": run.seed}
    for name in SECTIONS:
        ignored = NOT_OF_EPISODES.get(name, ())
        found[name] = {key: value for key, value in written[name].items() if key not in ignored}
    found["evaluation"] = {key: written["evaluation"][key] for key in OF_EVALUATION if key in written["evaluation"]}
    found["model"]["files"] = _model_digest(run.model.path)
    found["adapter"] = _adapter_digest(adapter) if adapter else None
    return dict(json.loads(json.dumps(found)))


def claim(out: Path, what: Mapping[str, Any]) -> Path:
    """The results file of `out`, for an evaluation of `what`; raises AttemptError if it holds another's results."""
    results, evaluated = out / RESULTS, out / EVALUATED
    if results.is_file() and results.stat().st_size:
        try:
            before = json.loads(evaluated.read_text())
        except (FileNotFoundError, ValueError) as error:
            raise AttemptError(
                f"{results} is there and {evaluated} does not say of what: choose another --out, or remove {results}"
            ) from error
        if differences := list(_differences(before, what)):
            more = f" and {len(differences) - MOST_SHOWN} more" if len(differences) > MOST_SHOWN else ""
            raise AttemptError(
                f"{results} is of another evaluation: {'; '.join(differences[:MOST_SHOWN])}{more}. Choose another "
                f"--out, or remove {results} to begin anew there"
            )
        return results
    out.mkdir(parents=True, exist_ok=True)
    temporary = evaluated.with_name(f".{EVALUATED}")
    temporary.write_text(json.dumps(what, indent=2) + "\n")
    temporary.replace(evaluated)
    return results


def ended(results: Path) -> int:
    """Episodes that have ended so far."""
    return results.read_bytes().count(b"\n") if results.is_file() else 0


def finished(out: Path) -> dict[str, Any] | None:
    """The summary of an evaluation that has all its answers; None if one is still to be made."""
    from pipelines.report import read_summary

    results = out / RESULTS
    if not (results.is_file() and results.stat().st_size):
        return None
    summary = read_summary(out)
    return summary if summary is not None and summary["evaluation_before"] is not None else None


def figures(summary: Mapping[str, Any] | None, adapter: str | None, results: Path) -> dict[str, Any]:
    """What `headrace eval --json` prints: the summary, and the evaluation's figures by name."""
    found = summary["evaluation_before"] if summary is not None else None
    evaluation: dict[str, Any] = {"adapter": adapter, "results": str(results), "done": found is not None}
    if found is not None:
        evaluation |= {"version": found["version"], "seconds": found["seconds"], "pass_at": found["pass_at"]}
        for name in ("sampled", "greedy"):
            successes, answered, unanswered, truncated = found[name]
            evaluation[name] = {
                "success": successes / answered if answered else None,
                "successes": successes,
                "answered": answered,
                "unanswered": unanswered,
                "truncated": truncated,
                **found[f"{name}_figures"],
            }
    return {**(summary or {}), "evaluation": evaluation}


def _differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in sorted(before.keys() | now.keys()):
            yield from _differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif before != now:
        yield f"{name} was {_shown(before)} and is {_shown(now)}"


def _shown(value: Any) -> str:
    return "unset" if value is None else json.dumps(value, ensure_ascii=False)


def _model_digest(path: str) -> str:
    """Of the names, sizes and both ends of the model's files: cheap for the largest model."""
    try:
        found = find_model(path)
    except ModelError as error:
        raise SettingsError(str(error)) from error
    files = [found.gguf] if found.gguf else sorted(one for one in Path(found.folder or "").iterdir() if one.is_file())
    state = hashlib.blake2b(digest_size=8)
    for file in files:
        size = file.stat().st_size
        state.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            state.update(opened.read(END_BYTES))
            opened.seek(max(END_BYTES, size - END_BYTES))
            state.update(opened.read(END_BYTES))
    return state.hexdigest()


def _adapter_digest(url: str) -> str:
    storage, state = open_storage(url), hashlib.blake2b(digest_size=8)
    for name in ADAPTER_FILES:
        state.update(storage.read(name))
    return state.hexdigest()
