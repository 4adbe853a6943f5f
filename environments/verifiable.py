"""Tasks whose answers a function can check: a prompt, tools or none, and a reward function.

Invariant: the reward function is asked once an episode, at its end, with the task's payload and the text of the last
turn. What it raises or returns amiss fails the episode and is never a reward of 0.
"""

from __future__ import annotations

import inspect
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from environments.environment import Message, StepResult, TaskSource, find_named
from environments.tasks import TaskList, task_file
from environments.tools import Score, Tool, ToolEnvironment, call_either
from environments.turns import opening

Prompt = str | Callable[[Mapping[str, Any]], str | Sequence[Message]]
"""A template over the payload's columns, such as "{question}", or a function of the payload."""


@runtime_checkable
class Judgement(Protocol):
    """What a reward function may return besides numbers, where its parts do not simply add up. A StepResult is one."""

    @property
    def reward(self) -> float: ...

    @property
    def reward_parts(self) -> Mapping[str, float]: ...

    @property
    def success(self) -> bool: ...


def judged(value: object, success_at: float) -> StepResult:
    """The end of an episode, from what its reward function returned: a number, named parts that add up to the reward,
    or a Judgement. Numbers and parts are a success from `success_at` on. Raises TypeError."""
    if isinstance(value, Judgement):
        metrics = getattr(value, "metrics", {})
        return StepResult((), float(value.reward), True, dict(value.reward_parts), bool(value.success), metrics)
    if isinstance(value, Mapping) and all(isinstance(name, str) and is_number(part) for name, part in value.items()):
        parts = {name: float(part) for name, part in value.items()}
    elif is_number(value):
        parts = {"reward": float(value)}  # type: ignore[arg-type]
    else:
        raise TypeError(
            "a reward must be a number, a mapping of names to numbers, or an object with reward, reward_parts and "
            f"success; found {value!r:.80}"
        )
    reward = sum(parts.values())
    return StepResult((), reward, True, parts, reward >= success_at)


def is_number(value: object) -> bool:
    """Whether it is a number, one of numpy's included, and no text that spells one."""
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False
    return not isinstance(value, str | bytes)


@dataclass(frozen=True)
class Verifiable:
    """The environment of a reward function: one turn, or with `tools` as many as the policy takes to answer."""

    tasks: TaskSource
    reward: Callable[..., Any]
    """`(payload, answer) -> number | named parts | Judgement`, plain or async; a plain one runs in a thread. With a
    parameter `actions` it is given every turn of the episode."""
    prompt: Prompt = "{question}"
    """What the policy is asked; of a template's columns each task must have all."""
    system: str = ""
    """System text before a prompt that is a text."""
    tools: Sequence[Tool | Callable[..., Any]] = ()
    """Typed functions, or tools."""
    show_tools: bool = True
    """Whether the policy is shown the tools' schemas; a small one may do better by worked dialogues alone."""
    success_at: float = 1.0
    """Least reward that counts as success."""
    wants_actions: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        tools = tuple(Tool.of(one) for one in self.tools)
        names = [one.name for one in tools]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"tools must have names of their own, found {', '.join(sorted(twice))} more than once")
        object.__setattr__(self, "tools", tools)
        object.__setattr__(self, "wants_actions", "actions" in inspect.signature(self.reward).parameters)
        if isinstance(self.tasks, TaskList):
            self.tasks.require(columns(self.prompt))

    def make(self) -> ToolEnvironment:
        return _Verified(self)

    def first_prompt(self, payload: Mapping[str, Any]) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]]]:
        """See `environments.environment.Shown`."""
        shown = self.tools if self.show_tools else ()
        return self.messages(payload), [Tool.of(one).schema for one in shown]

    def messages(self, payload: Mapping[str, Any]) -> Sequence[Message]:
        """The conversation before the first turn."""
        asked = self.prompt.format_map(payload) if isinstance(self.prompt, str) else self.prompt(payload)
        if not isinstance(asked, str):
            return asked
        return opening(self.system, asked)


class _Verified(ToolEnvironment):
    """One episode of a Verifiable."""

    def __init__(self, spec: Verifiable) -> None:
        super().__init__([Tool.of(one) for one in spec.tools], spec.messages, _never)
        self._spec = spec

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return super().tools if self._spec.show_tools else ()

    async def judge(self) -> StepResult:
        reward, spec = self._spec.reward, self._spec
        given = {"actions": tuple(self.actions)} if spec.wants_actions else {}
        return judged(await call_either(reward, self.payload, self.actions[-1].text, **given), spec.success_at)


def _never(payload: Mapping[str, Any], actions: Sequence[Any]) -> Score:
    raise AssertionError("a Verifiable judges by its own reward function")


def columns(prompt: Prompt) -> list[str]:
    """The payload's columns that a template names. Raises ValueError for one that is no template."""
    if not isinstance(prompt, str):
        return []
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(prompt) if field is not None]
    except ValueError as error:
        raise ValueError(f"prompt {prompt[:60]!r} is no template ({error}): write {{{{ and }}}} for braces") from error
    found = [field.split(".")[0].split("[")[0] for field in fields]
    if any(not column or column.isdigit() for column in found):
        raise ValueError(f"prompt {prompt[:60]!r} must name columns, as {{question}} does; {{{{ and }}}} are braces")
    return list(dict.fromkeys(found))


def verifiable(
    tasks: str,
    reward: str,
    *,
    prompt: str = "{question}",
    system: str = "",
    tools: Sequence[str] = (),
    key: str = "",
    held_out: float = 0.1,
    held_out_file: str = "",
    success_at: float = 1.0,
    seed: int = 0,
) -> Verifiable:
    """A Verifiable that the run file describes alone: `environment.name = "verifiable"`.

    `tasks` and `held_out_file` are JSON Lines files, at gs:// or in the folder of the reward function's module;
    `reward` and `tools` are `module:name` of functions, `reward` also of a `Rewards`. The rest is as in `task_file` and
    `Verifiable`.
    """
    if isinstance(tools, str):
        raise ValueError(f'environment.options.tools must be a list, such as ["{tools}"], found a text')
    function = find_named(reward, f"environment.options.reward {reward!r}")
    # An object, such as Rewards, lies in the module that the name says, and not in that of its class.
    module = sys.modules.get(reward.partition(":")[0]) or function
    source = inspect.unwrap(function) if inspect.isroutine(function) else module
    folder = Path(inspect.getsourcefile(source) or ".").parent

    def at(path: str) -> str:
        return path if not path or path.startswith("gs://") else str(folder / path)

    return Verifiable(
        task_file(at(tasks), seed=seed, key=key, held_out=held_out, held_out_file=at(held_out_file)),
        function,
        prompt=prompt,
        system=system,
        tools=tuple(find_named(name, f"environment.options.tools {name!r}") for name in tools),
        success_at=success_at,
    )
