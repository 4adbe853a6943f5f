"""Environments on OpenEnv servers, over the library's WebSocket client.

Invariant: each episode has one connection of its own, and with it one session on the server; closing the episode
closes it, a call that was given up included. A session that is gone fails its episode, since another one would begin
elsewhere; the next episode connects anew. A reply that is not of the protocol's form fails the episode too, and names
the server.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from environments.environment import Action, Message, StepResult, TaskSource
from environments.libraries import SeededTasks, named, own_tasks, require
from environments.tools import describe
from environments.turns import between_tags, opening

_EXTRA = "openenv"


@dataclass(frozen=True)
class OpenEnv:
    """`environments.libraries.openenv:OpenEnv`; the payload is what `reset` is sent, apart from `episode_id`.

    Without functions of your own: an observation is shown as its `observation_field`, or as JSON; the action is
    `{action_field: text}`, where the text is the last <action> of the turn.
    """

    urls: str | Sequence[str]
    """Address of a server, such as http://127.0.0.1:8000, or of several with the same environment: a task's seed
    chooses one of them."""
    tasks_file: str = ""
    """JSON Lines of reset's parameters, one task a line; "" for tasks that differ by their `seed` alone."""
    held_out_file: str = ""
    """The same for evaluation; "" holds a tenth of the tasks out."""
    system: str = ""
    """The system message."""
    action_field: str = "message"
    """The action's field that carries the policy's text."""
    action_tag: str = ""
    """The tag around an action; "" takes the whole turn."""
    observation_field: str = ""
    """The observation's field that the policy is shown; "" for all of it, as JSON."""
    observe: str = ""
    """`module:function` of (observation) that returns the text to show."""
    act: str = ""
    """`module:function` of (text) that returns the action, a mapping; ValueError says that the text is none."""
    success_at: float = 1.0
    """Least sum of rewards that is a success."""
    connect_s: float = 10.0
    """Most seconds to connect; messages have `environment.step_timeout_s`."""
    seed: int = 0
    tasks: TaskSource = field(init=False, repr=False, compare=False)
    addresses: Sequence[str] = field(init=False, repr=False, compare=False)
    _client: Any = field(init=False, repr=False, compare=False)
    _observe: Callable[..., Any] | None = field(init=False, repr=False, compare=False)
    _act: Callable[..., Any] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        addresses = [self.urls] if isinstance(self.urls, str) else list(self.urls)
        if not addresses or not all(url.startswith(("http://", "https://", "ws://", "wss://")) for url in addresses):
            raise ValueError(f"environment.options.urls must be http, https, ws or wss addresses, found {self.urls!r}")
        tasks: TaskSource = SeededTasks(self.seed)
        if self.tasks_file:
            tasks = own_tasks(self.tasks_file, self.held_out_file, self.seed)
        object.__setattr__(self, "tasks", tasks)
        object.__setattr__(self, "addresses", addresses)
        object.__setattr__(self, "_client", _one_session(require("openenv.core", _EXTRA).GenericEnvClient))
        object.__setattr__(self, "_observe", named("observe", self.observe))
        object.__setattr__(self, "_act", named("act", self.act))

    def make(self) -> OpenEnvEnvironment:
        return OpenEnvEnvironment(self)

    def client(self, url: str) -> Any:
        """A client that is not connected yet."""
        return self._client(
            base_url=url,
            connect_timeout_s=self.connect_s,
            message_timeout_s=_PATIENCE_S,
            max_message_size_mb=_MOST_MIB,
        )

    def shown(self, observation: Any) -> str:
        """The text of an observation. Raises ValueError if it lacks `observation_field`."""
        if self._observe is not None:
            return str(self._observe(observation))
        if self.observation_field:
            if not isinstance(observation, Mapping) or self.observation_field not in observation:
                raise ValueError(
                    f"an observation has no field {self.observation_field!r} (environment.options.observation_field), "
                    f"found {json.dumps(observation, ensure_ascii=False)[:200]}"
                )
            observation = observation[self.observation_field]
        return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)

    def action(self, text: str) -> Mapping[str, Any]:
        """Raises ValueError if the text says no action."""
        if self._act is not None:
            found: Mapping[str, Any] = self._act(text)
            return found
        said = between_tags(text, self.action_tag)
        if said is None:
            raise ValueError(f"say what you do as <{self.action_tag}>…</{self.action_tag}>")
        return {self.action_field: said}


_PATIENCE_S = 3600.0
"""The step's limit is the one that counts."""
_MOST_MIB = 16.0
"""Of a reply: a worker process has thousands of episodes."""


def _one_session(library: Any) -> Any:
    """The library's client without two habits: it connects again, to a session that was never reset, where the server
    has closed one between two calls; and it takes a reply without fields for one that says nothing."""

    async def stay(self: Any) -> None:
        if self._ws is None:
            raise ConnectionError("the connection is gone")

    def parsed(self: Any, reply: Any) -> Any:
        if not isinstance(reply, Mapping) or "observation" not in reply:
            raise ValueError(f"a reply must hold an observation, found {json.dumps(reply)[:200]}")
        reward, done = reply.get("reward"), reply.get("done", False)
        if not isinstance(reward, int | float | None):
            raise ValueError(f"a reply's reward must be a number or null, found {json.dumps(reward)[:200]}")
        if not isinstance(done, bool):
            raise ValueError(f"a reply's done must be true or false, found {json.dumps(done)[:200]}")
        return library._parse_result(self, reply)

    return type("Client", (library,), {"_ensure_connected": stay, "_parse_result": parsed})


class OpenEnvEnvironment:
    """One episode."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, spec: OpenEnv) -> None:
        self._spec = spec
        self._url = ""
        self._client: Any = None
        self._total = 0.0

    async def reset(self, payload: Mapping[str, Any], *, episode_id: str, seed: int) -> Sequence[Message]:
        self._url = self._spec.addresses[payload.get("seed", seed) % len(self._spec.addresses)]
        self._client = self._spec.client(self._url)
        with self._named():
            await self._client.connect()
            result = await self._client.reset(**{**payload, "episode_id": episode_id})
        return opening(self._spec.system, self._spec.shown(result.observation))

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """What goes wrong with the server names it."""
        try:
            yield
        except Exception as error:
            raise ConnectionError(f"the OpenEnv server {self._url}: {describe(error)}") from error

    async def step(self, action: Action) -> StepResult:
        if not action.finished:
            return StepResult(done=True)
        try:
            chosen = self._spec.action(action.text)
        except ValueError as error:
            return StepResult((Message("user", f"error: {error}"),), metrics={"invalid_actions": 1})
        with self._named():
            result = await self._client.step(dict(chosen))
        reward, done = float(result.reward or 0.0), result.done
        self._total += reward
        text = "" if done else self._spec.shown(result.observation)
        return StepResult((Message("user", text),), reward, done, success=done and self._total >= self._spec.success_at)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
