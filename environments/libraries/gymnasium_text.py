"""Gymnasium environments that a policy can play in words.

Invariant: one gymnasium environment serves one episode and is seeded by the task, so that the members of a group start
from the same state. A turn that says no action is answered, counted and changes nothing in the environment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from environments.environment import Action, Message, StepResult
from environments.libraries import SeededTasks, Threaded, named, require
from environments.turns import between_tags, opening

_EXTRA = "gymnasium"


@dataclass(frozen=True)
class GymnasiumText:
    """`environments.libraries.gymnasium_text:GymnasiumText`; the payload is `seed` and, if given, reset's `options`.

    Without functions of your own: an observation of a Text space is shown as it is, any other as `render` shows it with
    `kwargs.render_mode = "ansi"`, else as Python writes it. A turn's action is its last <action>: the text itself for a
    Text space; a name of `actions`, or a number, for a Discrete one.
    """

    id: str
    """As `gymnasium.make` takes it: `FrozenLake-v1`, or `my_module:MyText-v0`, which imports the module first."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for `gymnasium.make`."""
    reset_options: Mapping[str, Any] | None = None
    """`options` of reset."""
    system: str = ""
    """The system message: what the policy plays, and how it says what it does."""
    actions: Sequence[str] = ()
    """Names of a Discrete space's actions, from its first."""
    action_tag: str = "action"
    """The tag around an action; "" takes the whole turn."""
    observe: str = ""
    """`module:function` of (observation, info) that returns the text to show."""
    act: str = ""
    """`module:function` of (text) that returns an action of the space; ValueError says that it is none."""
    success_at: float = 1.0
    """Least sum of rewards that is a success, where the environment's info says neither `success` nor `is_success`."""
    seed: int = 0
    _spec: Any = field(init=False, repr=False, compare=False)
    _observe: Callable[..., Any] | None = field(init=False, repr=False, compare=False)
    _act: Callable[..., Any] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        gymnasium = require("gymnasium", _EXTRA)
        try:
            spec = gymnasium.spec(self.id)
        except gymnasium.error.Error as error:
            raise ValueError(f"environment.options.id {self.id!r}: {error}") from error
        object.__setattr__(self, "_spec", spec)
        object.__setattr__(self, "_observe", named("observe", self.observe))
        object.__setattr__(self, "_act", named("act", self.act))

    @property
    def tasks(self) -> SeededTasks:
        return SeededTasks(self.seed, {"options": dict(self.reset_options)} if self.reset_options else {})

    def make(self) -> GymnasiumEnvironment:
        return GymnasiumEnvironment(self)

    def open(self) -> Any:
        """A gymnasium environment of its own. Blocks."""
        return require("gymnasium", _EXTRA).make(self._spec, **self.kwargs)

    def shown(self, environment: Any, observation: Any, info: Mapping[str, Any]) -> str:
        """The text of an observation. Blocks."""
        if self._observe is not None:
            return str(self._observe(observation, info))
        if not isinstance(observation, str) and environment.render_mode == "ansi":
            return str(environment.render())
        return str(observation)

    def action(self, space: Any, text: str) -> Any:
        """The action that a turn says. Raises ValueError if it says none of the space."""
        if self._act is not None:
            return self._act(text)
        said = between_tags(text, self.action_tag)
        if said is None:
            raise ValueError(f"say what you do as <{self.action_tag}>…</{self.action_tag}>")
        spaces = require("gymnasium.spaces", _EXTRA)
        action: Any = said
        if isinstance(space, spaces.Discrete):
            names = [name.lower() for name in self.actions]
            if said.lower() in names:
                action = int(space.start) + names.index(said.lower())
            elif re.fullmatch(r"-?\d{1,9}", said):
                action = int(said)
            else:
                listed = ", ".join(self.actions) or f"{int(space.start)} to {int(space.start + space.n) - 1}"
                raise ValueError(f"there is no action {said[:60]!r}; there are {listed}")
        elif not isinstance(space, spaces.Text):
            raise TypeError(
                f"environment.options.act must name a function that makes actions of {space} from text: only Text and "
                "Discrete spaces need none"
            )
        if not space.contains(action):
            raise ValueError(f"{said[:60]!r} is no action of {space}")
        return action


class GymnasiumEnvironment:
    """One episode."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, spec: GymnasiumText) -> None:
        self._spec = spec
        self._thread = Threaded()
        self._environment: Any = None
        self._total = 0.0

    async def reset(self, payload: Mapping[str, Any], *, episode_id: str, seed: int) -> Sequence[Message]:
        def begin() -> str:
            self._environment = self._spec.open()
            observation, info = self._environment.reset(seed=payload["seed"], options=payload.get("options"))
            return self._spec.shown(self._environment, observation, info)

        return opening(self._spec.system, await self._thread.call(begin))

    async def step(self, action: Action) -> StepResult:
        if not action.finished:
            return StepResult(done=True)
        try:
            chosen = self._spec.action(self._environment.action_space, action.text)
        except ValueError as error:
            return StepResult((Message("user", f"error: {error}"),), metrics={"invalid_actions": 1})

        def act() -> tuple[str, float, bool, Mapping[str, Any]]:
            observation, reward, terminated, truncated, info = self._environment.step(chosen)
            done = bool(terminated or truncated)
            return "" if done else self._spec.shown(self._environment, observation, info), float(reward), done, info

        text, reward, done, info = await self._thread.call(act)
        self._total += reward
        said = info.get("success", info.get("is_success"))
        won = self._total >= self._spec.success_at if said is None else bool(said)
        return StepResult((Message("user", text),), reward, done, success=done and won)

    async def close(self) -> None:
        if self._environment is not None:
            await self._thread.call(self._environment.close)
