"""What can be found out about a run before anything is started: model, chat format, environment, tasks, adapter.

Invariant: nothing is started, nothing is written, no address is called but that of an adapter on gs://.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from environments.environment import Checked, Shown, load_environment
from environments.user_code import make_importable
from learner.checkpoints import Checkpoints
from learner.loop import Ending
from learner.train import starting_adapter
from pipelines.cloud import LaunchError, google_errors
from pipelines.config import Run
from pipelines.settings import SettingsError
from policy.chat import load_chat
from policy.files import SMOLLM2, ModelError, find_model
from policy.presets import PRESETS, published
from policy.settings import Backend
from policy.weights import load_model
from trajectories.schema import Version
from trajectories.storage import NotFound, open_storage

_CONFIG = "adapter_config.json"


def check(run: Run) -> str:
    """Build all of the run that starts no process; returns lines that say what was checked, and what was not.

    Raises SettingsError with what cannot be used, where it stands and how to mend it. Paths are tried on this machine.
    Where the model is not here, and is called after a published one, the run is meant for another machine: then its
    shapes are checked, and files that the environment lacks here are no error either.
    """
    model, elsewhere = _model(run)
    where = f"environment.name {run.environment.name!r}"
    try:
        make_importable(run.code.path)
        spec = load_environment(run.environment, run.seed)
        tasks = spec.tasks
    except ValueError as error:
        if not (elsewhere and _lacks_a_file(error)):
            raise SettingsError(str(error)) from error
        return f"checked: {model}\n{elsewhere}\nNOT CHECKED: environment and tasks: {error}"
    try:
        payload = tasks.task(0)
        json.dumps(payload)
        again = tasks.task(0)
    except Exception as error:
        raise SettingsError(f"{where}: tasks.task(0) must return a JSON object, it raised {error!r}") from error
    if again != payload:
        raise SettingsError(
            f"{where}: tasks.task(0) must be the same at every call, it is drawn anew: draw from the seed and the id"
        )
    questions = run.evaluation.questions if run.evaluation.before or run.evaluation.after else 0
    try:
        tasks.eval_tasks(questions)
    except Exception as error:
        raise SettingsError(f"evaluation.questions is {questions}, and {where} cannot give as many: {error}") from error
    if isinstance(spec, Checked) and not elsewhere:
        try:
            spec.check_machine()
        except ValueError as error:
            raise SettingsError(f"{where}: {error}") from error
    key = run.sampling.api_key_env
    if run.sampling.backend is Backend.REMOTE and key and not os.environ.get(key):
        raise SettingsError(f"sampling.api_key_env names {key}, which is not set: set it to the servers' API key")
    checked = f"checked: {model}, environment {run.environment.name}, {questions} held-out questions"
    if isinstance(spec, Shown) and not elsewhere:
        checked += f", a first prompt of {_first_prompt(run, spec, payload)} tokens"
    return f"{checked}\n{elsewhere}" if elsewhere else checked


def _model(run: Run) -> tuple[str, str]:
    """What was checked of the model, and what was not; the second is empty where the model is here."""
    path = run.model.path
    name = published(path)
    try:
        find_model(path)
    except ModelError as error:
        if name is None or Path(path).expanduser().exists() or path == SMOLLM2:
            raise SettingsError(str(error)) from error
        config = PRESETS[name]
        if run.sampling.max_context > config.max_context:
            raise SettingsError(
                f"sampling.max_context is {run.sampling.max_context}, and {name} is made for at most "
                f"{config.max_context} tokens"
            ) from error
        return f"the shapes of {name} ({config.family})", (
            f"NOT CHECKED: weights, tokenizer and chat format: model.path {path!r} is not on this machine"
        )
    try:
        model = load_model(run.model)
        load_chat(path, variables=run.model.template_variables, tool_calls=run.model.tool_calls)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    return f"model {model.name} ({model.config.family}) and its chat format", ""


def _first_prompt(run: Run, spec: Shown, payload: Mapping[str, Any]) -> int:
    """Tokens of a task's first prompt. Raises SettingsError for one that the policy could not be given."""
    where, model = f"environment.name {run.environment.name!r}", run.model
    try:
        messages, tools = spec.first_prompt(payload)
        chat = load_chat(model.path, variables=model.template_variables, tool_calls=model.tool_calls)
        length = len(chat.prompt(messages, tools))
    except Exception as error:
        raise SettingsError(f"{where}: the first prompt of tasks.task(0) cannot be made: {error}") from error
    if length >= run.sampling.max_context:
        raise SettingsError(
            f"sampling.max_context is {run.sampling.max_context}, and the first prompt of {where} has {length} tokens, "
            "its tools' descriptions included: raise it, and packing.buckets with it, or shorten the prompt"
        )
    return length


def _lacks_a_file(error: BaseException) -> bool:
    """Whether a file or object that is not there is what an error began with."""
    while error.__cause__ is not None:
        error = error.__cause__
    return isinstance(error, NotFound | FileNotFoundError)


def check_adapter(run: Run, url: str) -> None:
    """Read the adapter that `headrace eval` is given; raises SettingsError, with the versions that there are."""
    try:
        if not open_storage(url).exists(_CONFIG):
            raise SettingsError(f"--adapter {url}: it lacks {_CONFIG}, so it is no adapter; {_those_there(url, run)}")
        starting_adapter(url, load_model(run.model).config, run.lora)
    except SettingsError:
        raise
    except ValueError as error:
        raise SettingsError(f"--adapter {url}: {error}") from error


def check_unused(run: Run) -> None:
    """A fresh attempt must not begin with another's checkpoints: raises SettingsError if `storage` holds some."""
    if not run.storage:
        return
    try:
        with google_errors():
            found = Checkpoints(open_storage(run.storage).join("checkpoints"), 0, 1).names()
    except (LaunchError, ValueError, OSError) as error:
        raise SettingsError(f"storage {run.storage!r} cannot be read: {error}") from error
    if found:
        raise SettingsError(
            f"storage {run.storage!r} holds checkpoints of an earlier attempt, the newest {found[0]}: a fresh attempt "
            "would go on from there. To go on, add --resume. To begin anew, leave storage out of the run file, and "
            "each attempt has its own; or name another one; or remove that one"
        )


def finished(before: Run, now: Run, summary: Mapping[str, Any] | None, again: str) -> str:
    """What to do instead of going on, if the resumed run would end at once; empty if it would train.

    `before` and `summary` are the run and the outcome of the attempt so far, `again` is the command that resumes it.
    """
    if summary is None or not Ending(summary["outcome"]).natural:
        return ""
    old, new = before.learner, now.learner
    changes = []
    if summary["step"] >= new.steps:
        changes.append(f"learner.steps={2 * max(1, summary['step'])}")
    if new.train_s is not None and summary["train_s"] >= new.train_s:
        changes.append(f"learner.train_s={2 * math.ceil(summary['train_s'])}.0")
    if summary["outcome"] == Ending.TARGET_SUCCESS and new.target_success is not None:
        lower = old.target_success is None or new.target_success <= old.target_success
        if lower and new.target_groups == old.target_groups:
            changes.append("learner.target_success=1.0")
    if changes:
        return f"to train on, lift what ended it, for example\n    {again} " + " ".join(f"--set {c}" for c in changes)
    if summary["outcome"] == Ending.SOLVED and now == before:
        return "nothing is left to learn from its tasks; change [environment] or [learner] by --set to go on"
    return ""


def _those_there(url: str, run: Run) -> str:
    form = "give RUN/latest/adapters/<version>"
    if url.startswith("gs://"):
        return f"{form}, or gs://BUCKET/NAME/adapters/<version>"
    near = Path(url)
    tops = (near, near.parent, Path("runs") / run.name)
    places = [top / below for top in tops for below in ("latest/adapters", "adapters", ".")]
    for place in places:
        versions = sorted(
            (Version.parse(path.parent.name) for path in place.glob(f"*/{_CONFIG}") if _named(path.parent)),
            key=lambda version: (version.incarnation, version.step),
        )
        if versions:
            return f"{form}: {place} holds {', '.join(map(str, versions))}"
    return f"{form}, where RUN is a run's folder, such as runs/{run.name}"


def _named(folder: Path) -> bool:
    return re.fullmatch(r"\d+\.\d+", folder.name) is not None
