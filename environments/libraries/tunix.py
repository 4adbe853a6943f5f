"""Environments in the shape of Tunix's: `reset() -> (observation, info)`, `step(action) -> (observation, reward, done,
info)`, and `close()`.

Invariant: the shape alone counts, nothing is imported from Tunix here. One environment is made for each episode from a
copy of the task, and is called by one thread at a time.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from environments.environment import Action, Message, StepResult, TaskSource, find_named
from environments.libraries import Threaded, named, own_tasks
from environments.turns import opening


@dataclass(frozen=True)
class Tunix:
    """`environments.libraries.tunix:Tunix`; the payload is the task as the file has it.

    The first observation is shown as text: that of `prompt_key` if it is a mapping, else as JSON. A turn with calls is
    handed on as the list of OpenAI-style calls that Tunix's ToolEnvironment takes, any other as its text. An
    observation with `tool_outputs` is answered call by call. Tunix's chat parsers and agents are not used: the
    run's are.
    """

    make_environment: str
    """`module:name` of a class or function of (task) that returns an environment, such as a function that calls
    `ToolEnvironment(task, tool_map=..., reward_fn=..., max_steps=...)`."""
    tasks_file: str
    """JSON Lines, one task a line, on disk or at gs://."""
    held_out_file: str = ""
    """The same for evaluation; "" holds a tenth of the tasks out."""
    prompt_key: str = "question"
    """What of a task the policy is shown."""
    system: str = ""
    """The system message."""
    tool_schemas: str = ""
    """`module:function` that returns a list of OpenAI-style schemas; "" takes those that the environment's
    `tool_manager` describes, if it has one."""
    success_at: float = 1.0
    """Least sum of rewards that is a success."""
    seed: int = 0
    tasks: TaskSource = field(init=False, repr=False, compare=False)
    create: Callable[..., Any] = field(init=False, repr=False, compare=False)
    schemas: Callable[..., Any] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self,
            "create",
            find_named(self.make_environment, f"environment.options.make_environment {self.make_environment!r}"),
        )
        object.__setattr__(self, "schemas", named("tool_schemas", self.tool_schemas))
        tasks = own_tasks(self.tasks_file, self.held_out_file, self.seed)
        object.__setattr__(self, "tasks", tasks)

    def make(self) -> TunixEnvironment:
        return TunixEnvironment(self)


class TunixEnvironment:
    """One episode."""

    def __init__(self, spec: Tunix) -> None:
        self._spec = spec
        self._thread = Threaded()
        self._inner: Any = None
        self._total = 0.0
        self.tools: Sequence[Mapping[str, Any]] = ()

    async def reset(self, payload: Mapping[str, Any], *, episode_id: str, seed: int) -> Sequence[Message]:
        spec = self._spec

        def begin() -> Any:
            self._inner = spec.create(copy.deepcopy(dict(payload)))
            self.tools = _schemas(self._inner) if spec.schemas is None else spec.schemas()
            first = self._inner.reset()
            return first[0] if isinstance(first, tuple) else first

        observation = await self._thread.call(begin)
        if isinstance(observation, Mapping) and spec.prompt_key in observation:
            observation = observation[spec.prompt_key]
        return opening(spec.system, _text(observation))

    async def step(self, action: Action) -> StepResult:
        malformed = [call for call in action.tool_calls if call.arguments is None]
        if malformed and action.finished:  # Tunix's environments raise at these
            return StepResult(tuple(Message("tool", f"error: {call.error}", name=call.name) for call in malformed))
        calls = list(action.tool_calls) if action.finished else []
        ids = [f"call_{number}" for number in range(len(calls))]
        given: Any = action.text
        if calls:
            given = [
                {
                    "id": one,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for one, call in zip(ids, calls, strict=True)
            ]
        answer = await self._thread.call(lambda: self._inner.step(given))
        if not (isinstance(answer, tuple | list) and len(answer) == _ANSWER):
            raise TypeError(f"step must return (observation, reward, done, info), found {answer!r:.200}")
        observation, reward, done, info = answer
        self._total += float(reward)
        outputs = observation.get("tool_outputs") if isinstance(observation, Mapping) else None
        if isinstance(outputs, Mapping) and calls:
            messages = tuple(
                Message("tool", _text(outputs.get(one, "error: no output")), name=call.name)
                for one, call in zip(ids, calls, strict=True)
            )
        else:
            messages = (Message("user", _text(observation)),)
        won = bool(done) and self._won(info)
        return StepResult(messages, float(reward), bool(done), success=won, metrics=_numbers(info))

    def _won(self, info: Any) -> bool:
        said = info.get("success") if isinstance(info, Mapping) else None
        return self._total >= self._spec.success_at if said is None else bool(said)

    async def close(self) -> None:
        if self._inner is not None and hasattr(self._inner, "close"):
            await self._thread.call(self._inner.close)


_ANSWER = 4
"""Members of what `step` returns."""


def _schemas(environment: Any) -> Sequence[Mapping[str, Any]]:
    schemas = getattr(getattr(environment, "tool_manager", None), "get_json_schema", None)
    return list(schemas()) if schemas is not None else ()


def _numbers(info: Any) -> Mapping[str, float]:
    metadata = info.get("metadata") if isinstance(info, Mapping) else None
    if not isinstance(metadata, Mapping):
        return {}
    return {name: float(value) for name, value in metadata.items() if isinstance(value, int | float)}


def _text(observation: Any) -> str:
    return observation if isinstance(observation, str) else json.dumps(observation, default=str, ensure_ascii=False)
