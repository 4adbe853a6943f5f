"""The world an agent acts in, and how a run file names it.

Invariant: an environment sees text and tool calls, never token ids; everything it needs to repeat an episode (payload,
episode id, seed) comes in through `reset`. One `Environment` object serves one episode.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import inspect
import math
import pkgutil
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from policy.chat import Action, Message, ToolCall

__all__ = [
    "Action",
    "Checked",
    "Environment",
    "EnvironmentSettings",
    "EnvironmentSpec",
    "Message",
    "Prepared",
    "Shown",
    "Spec",
    "StepResult",
    "TaskSource",
    "ToolCall",
    "find_named",
    "load_environment",
]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the world answers to one policy turn."""

    messages: tuple[Message, ...] = ()
    """What the policy reads before its next turn; ignored once `done`."""
    reward: float = 0.0
    """For this turn; an episode's reward is the sum."""
    done: bool = False
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Named shares of rewards, for people; an episode's parts are the sums by name."""
    success: bool = False
    """Whether the episode is solved."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Counts, summed over the episode."""


class Environment(Protocol):
    """One episode's world. Its methods run on the orchestrator's event loop: blocking work goes through
    `environments.tools.run_blocking`. Whatever they raise becomes a failed episode and reaches nothing else.

    A class that derives from this one has no tools and nothing to close, unless it says otherwise."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """OpenAI-style JSON schemas, as the chat template is shown them."""
        return ()

    async def reset(self, payload: Mapping[str, Any], *, episode_id: str, seed: int) -> Sequence[Message]:
        """The conversation before the first turn. `payload` is the task's; `episode_id` is the idempotency key for what
        the environment does outside; `seed` is a pure function of run and episode."""
        ...

    async def step(self, action: Action) -> StepResult:
        """Answer one turn. A turn that was cut (`not action.finished`) is scored too; the episode ends after it."""
        ...

    async def close(self) -> None:
        """Called once, whatever happened; nothing follows it."""
        return


class TaskSource(Protocol):
    def task(self, group_id: int) -> Mapping[str, Any]:
        """Payload (JSON) of a training group: a pure function of (seed, group_id)."""
        ...

    def eval_tasks(self, count: int) -> list[Mapping[str, Any]]:
        """`count` distinct held-out payloads, none of which `task` yields for any id. The first `n` do not depend on
        `count`. Raises ValueError if there are not so many."""
        ...


@runtime_checkable
class EnvironmentSpec(Protocol):
    """What `module:Name` yields: it makes environments, one for each episode, and knows the tasks."""

    @property
    def tasks(self) -> TaskSource: ...

    def make(self) -> Environment: ...


@runtime_checkable
class Prepared(Protocol):
    """An EnvironmentSpec may be one."""

    def prepare(self) -> None:
        """Make what takes time, such as an index: called once in each worker process, beside the event loop, before the
        first episode. What it raises ends the process with its reason."""
        ...


@runtime_checkable
class Checked(Protocol):
    """An EnvironmentSpec may be one: then `--dry-run` asks it what its episodes would lack on this machine."""

    def check_machine(self) -> None:
        """Raises ValueError that says what is not there, such as a program. Starts nothing."""
        ...


@runtime_checkable
class Shown(Protocol):
    """An EnvironmentSpec may be one: then `--dry-run` tries its first prompt in the model's chat format."""

    def first_prompt(self, payload: Mapping[str, Any]) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]]]:
        """The conversation before the first turn, and the tools' schemas. Starts nothing."""
        ...


@dataclass(frozen=True)
class Spec:
    """The EnvironmentSpec of an environment class and its tasks."""

    make: Callable[[], Environment]
    tasks: TaskSource


@dataclass(frozen=True)
class EnvironmentSettings:
    """Section `[environment]` of the run file."""

    name: str = "environments.calculator:Calculator"
    """`module:Name` of a class or function that is called with the options and returns an EnvironmentSpec; or the name
    under which a package has installed one (entry point group `headrace.environments`), such as `calculator`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for it. `seed` is the run's unless it is given here."""
    max_turns: int = 4
    """An episode that is not done after so many policy turns ends with status max_turns."""
    max_concurrency: int = 64
    """Episodes at once in one worker process; the others wait."""
    step_timeout_s: float = 60.0
    """Most seconds for one reset or step of the environment, its tools included and the policy not."""
    episode_timeout_s: float = 600.0
    """Most seconds for an episode from its start, waiting for the policy included."""
    close_timeout_s: float = 5.0
    """Most seconds for an environment to close before it is abandoned."""
    max_observation: int = 8192
    """Most characters of one message that the policy is shown; the rest is cut and counted."""
    blocking_threads: int = 32
    """Most threads for blocking tools in one worker process."""

    def __post_init__(self) -> None:
        module, separator, attribute = self.name.partition(":")
        if not module or (separator and not attribute):
            raise ValueError(
                "environment.name must be module:Name, such as environments.calculator:Calculator, or an installed "
                f"name, such as calculator; found {self.name!r}"
            )
        for name in ("max_turns", "max_concurrency", "max_observation", "blocking_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"environment.{name} must be at least 1, found {getattr(self, name)}")
        for name in ("step_timeout_s", "episode_timeout_s", "close_timeout_s"):
            if not (0 < getattr(self, name) < math.inf):
                raise ValueError(
                    f"environment.{name} must be a positive number of seconds, found {getattr(self, name)}"
                )


def load_environment(settings: EnvironmentSettings, seed: int) -> EnvironmentSpec:
    """The environment that the run file names.

    Raises ValueError with what was found instead and near names, or with what the code that was named has raised.
    """
    where = f"environment.name {settings.name!r}"
    name = settings.name if ":" in settings.name else _installed(settings.name, where)
    found = find_named(name, where)
    signature = inspect.signature(found)
    options = dict(settings.options)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    if "seed" in signature.parameters or takes_any:
        options.setdefault("seed", seed)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ValueError(f"{where}: {error}; environment.options may hold {', '.join(signature.parameters)}") from error
    try:
        spec = found(**options)
    except Exception as error:
        raise ValueError(f"{where}: {_refused(error)}") from error
    if not isinstance(spec, EnvironmentSpec):
        raise ValueError(f"{where}: it must return an object with `make` and `tasks`, found a {type(spec).__name__}")
    return spec


def find_named(name: str, where: str) -> Callable[..., Any]:
    """The class or function that `module:Name` stands for; raises ValueError that begins with `where`."""
    module_name, separator, attribute = name.partition(":")
    if not (module_name and separator and attribute):
        raise ValueError(f"{where}: it must be module:Name, found {name!r}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ValueError(f"{where}: importing {module_name} failed: {error}; install what it needs") from error
        raise ValueError(
            f"{where}: there is no module {error.name}{_near(module_name, _module_names(module_name))}; "
            "is its folder on the path (code.path)?"
        ) from error
    except Exception as error:
        raise ValueError(f"{where}: importing {module_name} failed: {_raised(error)}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        kind = "no such name" if found is None else f"a {type(found).__name__}, which cannot be called,"
        raise ValueError(f"{where}: found {kind} in {module_name}{_near(attribute, names)}")
    return found  # type: ignore[no-any-return]


ENTRY_POINTS = "headrace.environments"
"""Group of the entry points under which packages install environments."""


def _installed(name: str, where: str) -> str:
    """`module:Name` of an installed name."""
    points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    values = sorted({f"{point.module}:{point.attr}" for point in points if point.name == name})
    if len(values) > 1:
        raise ValueError(f"{where}: several packages have installed it: name one of {' and '.join(values)}")
    if not values:
        names = sorted({point.name for point in points})
        near = difflib.get_close_matches(name, names, n=3)
        meant = f"; is it {' or '.join(near)}?" if near else ""
        have = f"; installed are {', '.join(names)}" if names else "; none is installed"
        raise ValueError(f"{where}: no package has installed it{meant}{have}. Else write module:Name")
    return values[0]


def _raised(error: Exception) -> str:
    """What code that is not ours has raised, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {error} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"


def _refused(error: Exception) -> str:
    """Why the environment was not made. What an environment of ours says of its options needs no line of code."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = all(Path(frame.filename).is_relative_to(_OURS) or frame.filename == "<string>" for frame in frames)
    return str(error) if ours and isinstance(error, ValueError) else _raised(error)


_OURS = Path(__file__).parent


def _near(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=5, cutoff=0.5) or sorted(names)[:8]
    return f"; near it: {', '.join(near)}" if near else ""


def _module_names(module_name: str) -> list[str]:
    """Full names of the modules beside the one that is not there."""
    parent, _, _ = module_name.rpartition(".")
    if not parent:
        return [info.name for info in pkgutil.iter_modules()]
    try:
        path = importlib.import_module(parent).__path__
    except (ImportError, AttributeError):
        return _module_names(parent)
    return [f"{parent}.{info.name}" for info in pkgutil.iter_modules(path)]
