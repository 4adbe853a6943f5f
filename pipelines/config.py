"""The run file: one TOML file that describes a run, read by the rollout job and the learner alike.

Each room owns the dataclass of its section; `Run` composes them and checks what no section can check alone. A resolved
run (JSON, with its run id and storage) is what the processes of a run are given.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from environments.environment import EnvironmentSettings
from learner.alarms import AlarmSettings
from learner.algorithms import ALGORITHMS, DEFAULT
from learner.critic import CriticSettings
from learner.difficulty import DifficultySettings
from learner.losses import KlPlace, LossSettings
from learner.settings import CheckpointSettings, EvaluationSettings, LearnerSettings
from learner.sharding import ShardingSettings
from learner.step import OptimizerSettings
from pipelines import settings
from pipelines.cloud import CloudSettings
from pipelines.settings import SettingsError
from policy.lora import LoraSettings
from policy.settings import SamplingSettings
from policy.weights import ModelSettings
from trajectories.advantages import AdvantageSettings
from trajectories.failures import FailureKind, FailureSettings
from trajectories.packing import PackingSettings
from trajectories.storage import NotFound, open_storage
from trajectories.topics import Topics
from transforms.settings import RolloutSettings, RolloutSpec

LOCAL_PROJECT = "headrace-local"
_NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")


@dataclass(frozen=True)
class CodeSettings:
    """Section [code]: the user's own environments."""

    path: str = ""
    """A folder, from the run file's own, that every process puts on its import path. What its requirements.txt, or else
    its pyproject.toml, asks for must be installed here; `headrace launch` sends the folder with the run, and each
    process in the cloud installs what it lacks."""


@dataclass(frozen=True)
class Run:
    """One run: everything that its processes need to know."""

    name: str
    """Up to 40 lower-case letters, digits and hyphens; names the run's folder, topics and Dataflow job."""
    seed: int = 0
    """Of tasks, sampling and the adapter's initial weights."""
    run_id: str = ""
    """Set when the run starts, and unique to the attempt: leave it out."""
    storage: str = ""
    """Folder or gs:// prefix for adapters and checkpoints. Left out: the attempt's own folder; in the cloud
    `cloud.bucket`/`name`. Where an earlier attempt's checkpoints lie, `headrace run` begins no fresh one."""
    algorithm: str = DEFAULT
    """Fills in what [advantages] and [loss] leave out: `dapo`, `grpo`, `dr_grpo`, `rloo`, `reinforce++`,
    `reinforce++_baseline`, `maxrl`, `gspo`, `gspo_token`, `cispo`, `ppo` or `icepop`; see docs/algorithms.md."""
    model: ModelSettings = field(default_factory=ModelSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    environment: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    rollouts: RolloutSettings = field(default_factory=RolloutSettings)
    failures: FailureSettings = field(default_factory=FailureSettings)
    advantages: AdvantageSettings = field(default_factory=AdvantageSettings)
    packing: PackingSettings = field(default_factory=PackingSettings)
    learner: LearnerSettings = field(default_factory=LearnerSettings)
    difficulty: DifficultySettings = field(default_factory=DifficultySettings)
    sharding: ShardingSettings = field(default_factory=ShardingSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    critic: CriticSettings = field(default_factory=CriticSettings)
    alarms: AlarmSettings = field(default_factory=AlarmSettings)
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    cloud: CloudSettings = field(default_factory=CloudSettings)
    code: CodeSettings = field(default_factory=CodeSettings)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise SettingsError(
                f"name must be up to 40 lower-case letters, digits and hyphens and begin with a letter, "
                f"found {self.name!r}"
            )
        if self.algorithm not in ALGORITHMS:
            raise SettingsError(f"algorithm must be one of {', '.join(ALGORITHMS)}; found {self.algorithm!r}")
        largest = self.packing.buckets[-1]
        if self.sampling.max_context > largest:
            raise SettingsError(
                f"sampling.max_context is {self.sampling.max_context} and the largest bucket holds {largest} tokens: "
                "an episode could fit no row. Lower the one or add a bucket in packing.buckets"
            )
        if self.sampling.max_tokens >= self.sampling.max_context:
            raise SettingsError(
                f"sampling.max_tokens ({self.sampling.max_tokens}) must be below sampling.max_context "
                f"({self.sampling.max_context}): a turn needs a prompt before it"
            )
        if self.learner.rows_per_call % (shares := self.sharding.data * self.sharding.fsdp):
            raise SettingsError(
                f"learner.rows_per_call ({self.learner.rows_per_call}) must be a multiple of sharding.data × "
                f"sharding.fsdp ({shares}), over which a call's rows are spread: set it to {shares}, or lower those"
            )
        if self.failures.policy is FailureKind.MIN_VIABLE_GROUP and self.learner.group_size < self.failures.min_members:
            raise SettingsError(
                f"learner.group_size ({self.learner.group_size}) must be at least failures.min_members "
                f"({self.failures.min_members}), else every group fails"
            )
        if (
            self.failures.policy is not FailureKind.MIN_VIABLE_GROUP
            and self.rollouts.group_deadline_s < self.environment.episode_timeout_s
        ):
            raise SettingsError(
                f"rollouts.group_deadline_s ({self.rollouts.group_deadline_s}) must be at least "
                f"environment.episode_timeout_s ({self.environment.episode_timeout_s}) with failures.policy "
                f"'{self.failures.policy}', which trains whole groups: a slow member would fail its group. Raise the "
                "one or lower the other"
            )
        if not self.sampling.temperature > 0:
            raise SettingsError("sampling.temperature must be above 0 in training: greedy groups have no variance")
        if self.advantages.critic and self.loss.kl_coefficient > 0 and self.loss.kl_in is KlPlace.REWARD:
            raise SettingsError(
                "loss.kl_in must be 'loss' with the estimator gae: the critic's advantages come from the environment's "
                "rewards alone"
            )
        if self.learner.max_staleness > 0 and self.loss.ignores_staleness:
            raise SettingsError(
                f"learner.max_staleness is {self.learner.max_staleness} and loss.correction is 'none': stale tokens "
                "would train as if they were fresh. Set a correction such as 'tis', or max_staleness = 0"
            )
        if self.environment.episode_timeout_s > self.learner.task_deadline_s:
            raise SettingsError(
                f"environment.episode_timeout_s ({self.environment.episode_timeout_s}) must not exceed "
                f"learner.task_deadline_s ({self.learner.task_deadline_s}), else slow groups are issued twice"
            )
        if self.learner.no_progress_s <= self.learner.task_deadline_s:
            raise SettingsError(
                f"learner.no_progress_s ({self.learner.no_progress_s}) must exceed learner.task_deadline_s "
                f"({self.learner.task_deadline_s}), else one slow group ends the run"
            )
        if self.storage.startswith("gs://") and not self.cloud.project and not self.run_id:
            raise SettingsError("storage is on gs://: set cloud.project as well")

    @property
    def project(self) -> str:
        """The project whose Pub/Sub carries the run."""
        return self.cloud.project or LOCAL_PROJECT

    @property
    def topics(self) -> Topics:
        return Topics(self.project, self.run_id)

    def rollout_spec(self) -> RolloutSpec:
        """What the rollout job needs."""
        return RolloutSpec(
            run_id=self.run_id,
            project=self.project,
            seed=self.seed,
            storage_url=self.storage,
            model=self.model,
            lora=self.lora,
            sampling=self.sampling,
            environment=self.environment,
            packing=self.packing,
            advantages=self.advantages,
            rollouts=self.rollouts,
            failures=self.failures,
            code_path=self.code.path,
        )

    def to_json(self) -> str:
        """The resolved run, readable by `load_run`."""
        return json.dumps(settings.write(self), indent=2) + "\n"


def load_run(url: str, overrides: Sequence[str] = ()) -> Run:
    """The run in a TOML or JSON file, at a path or a gs:// address, with `section.key=value` overrides.

    Raises SettingsError with the file, the key and the mend. Puts `code.path` on the import path.
    """
    try:
        run = settings.read(Run, _with_algorithm(_parsed(url), overrides))
    except SettingsError as error:
        raise SettingsError(f"{url}: {error}") from error
    if run.code.path and "://" not in run.code.path:
        folder = _beside(url, run.code.path)
        run = dataclasses.replace(run, code=CodeSettings(folder))
        if folder not in sys.path:
            sys.path.insert(0, folder)
    return run


def _with_algorithm(parsed: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The run's values with overrides, and with its algorithm's settings where it says nothing.

    A run that was resolved says everything: its algorithm is only a name.
    """
    values = settings.override(parsed, overrides)
    name = values.get("algorithm", DEFAULT)
    if parsed.get("run_id") and name != parsed.get("algorithm", DEFAULT):
        raise SettingsError(
            "algorithm cannot be set on a run that has started, which names every setting: set the keys of "
            "[advantages] and [loss] themselves"
        )
    preset = ALGORITHMS.get(name) if isinstance(name, str) else None
    if preset is None:
        return values
    sampling = values.get("sampling")
    max_context = sampling.get("max_context") if isinstance(sampling, Mapping) else None
    length = {"constant_length": max_context} if isinstance(max_context, int) else {}
    for section, chosen in (("advantages", preset.advantages), ("loss", {**length, **preset.loss})):
        given = values.get(section, {})
        if isinstance(given, Mapping):
            values[section] = {**chosen, **given}
    return values


def _beside(url: str, path: str) -> str:
    """`path` from the run file's folder on, where it is not absolute."""
    return path if url.startswith("gs://") else os.path.normpath(Path(url).absolute().parent / path)


def _parsed(url: str) -> dict[str, Any]:
    folder, _, name = url.rpartition("/")
    if not url.startswith("gs://") and Path(url).is_dir():
        raise SettingsError("it is a folder: give the run file in it, such as run.toml, or run.json of an attempt")
    try:
        text = open_storage(folder or ("/" if url.startswith("/") else ".")).read(name).decode()
    except NotFound as error:
        raise SettingsError("there is no such file; examples/ in the repository holds some") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"it is no text ({error}): a run file is TOML in UTF-8") from error
    if not name.endswith(".json"):
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise SettingsError(_how_to_mend(str(error), text)) from error
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise SettingsError(f"it is no JSON: {error}; write run files in TOML") from error
    if not isinstance(found, dict):
        raise SettingsError(f"it must hold one JSON object, found a {type(found).__name__}")
    return found


_TOML_MENDS = {
    "Invalid value": 'texts stand in double quotes ("like this"), booleans are true or false, lists stand in [ ]',
    "Unterminated string": "close the quotes in the same line",
    "Expected '='": "a line is key = value; a section is [name] in a line of its own",
    "Invalid statement": "a line is key = value, a section is [name] in a line of its own, a comment begins with #",
    "Expected newline": "one key = value in a line; a text with spaces stands in double quotes",
    "Unclosed array": "close the list with ]",
    "Expected ']'": "a section is [name] in a line of its own",
    "Cannot declare": "the section stands in the file twice: put its keys under one of them",
    "Cannot overwrite": "the key stands in its section twice: remove one",
    "Illegal character": "close the quotes in the same line, or write \\n for a new line",
    "Unescaped": "write \\\\ for a backslash, or put the text in single quotes",
}
"""How tomllib's errors begin, and what to do."""


def _how_to_mend(error: str, text: str) -> str:
    """tomllib's error with the line it is about and the mend."""
    mend = next((mend for begins, mend in _TOML_MENDS.items() if error.startswith(begins)), "see https://toml.io")
    lines = text.splitlines()
    place = re.search(r"at line (\d+), column (\d+)", error)
    number = int(place[1]) if place else len(lines)
    if not 1 <= number <= len(lines):
        return f"it is no TOML: {error}: {mend}"
    caret = f"\n    {' ' * (int(place[2]) - 1)}^" if place else ""
    return f"it is no TOML: {error}: {mend}\n    {lines[number - 1]}{caret}"
