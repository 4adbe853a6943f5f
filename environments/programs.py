"""Agent programs: code that owns its own loop and asks the policy through a chat client.

Invariant: token in, token out. An episode is one sequence of tokens, so the calls of one program are one conversation:
each begins with all messages of the call before it and the policy's reply, and goes on from there. A call that does
not is refused by name; nothing is rendered again.

A program is an environment turned inside out. `reset` runs it up to its first call, whose messages are the prompt;
`step` hands it the policy's turn and runs it up to its next call, whose new messages are what the policy reads next, or
to its end, which is the reward. So the agent loop, its limits, statuses and clean-up are those of every environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from environments.environment import Action, Message, StepResult, TaskSource, ToolCall
from environments.tools import Score, Tool, ToolEnvironment, contained
from environments.verifiable import judged

Program = Callable[[Mapping[str, Any], "Chat"], Awaitable[object]]
"""`async def program(payload, chat)`; what it returns is what a reward function may return."""


class ConversationError(ValueError):
    """A call that does not go on from the calls before it; says which message differs."""


@dataclass(frozen=True)
class Reply:
    """The policy's turn, as a message that later calls may hold."""

    content: str
    """The whole turn as it was written, reasoning and calls included, without its end-of-turn token."""
    tool_calls: tuple[ToolCall, ...] = ()
    """One that could not be read has no `arguments`, and says why in `error`. Each has an `id`."""
    finish_reason: str = "stop"
    """`stop`, `tool_calls`, or `length` where the turn was cut: no call follows such a turn."""
    role: str = "assistant"


_REFUSAL_S = 0.05


@dataclass
class _Asked:
    """A call that waits for the policy."""

    messages: Sequence[Message]
    """Those that the policy has not seen yet."""
    answer: asyncio.Future[Action]


class Chat:
    """What a program speaks to the policy through; one for each episode."""

    def __init__(self, payload: Mapping[str, Any], episode_id: str, seed: int) -> None:
        self.payload, self.episode_id, self.seed = payload, episode_id, seed
        self.metrics: dict[str, float] = {}
        """Counts that the program keeps: they join the episode's."""
        self._seen: list[Message | Reply] = []
        self._schemas: tuple[Mapping[str, Any], ...] = ()
        self._functions: frozenset[str] = frozenset()
        self._desk = _desk(())
        self._calls: asyncio.Queue[_Asked] = asyncio.Queue()
        self._waiting = self._given_up = False
        self._numbered = 0

    async def create(
        self,
        messages: Sequence[Message | Reply | Mapping[str, Any]],
        tools: Sequence[Tool | Callable[..., Any] | Mapping[str, Any]] | None = None,
    ) -> Reply:
        """The policy's next turn.

        `messages` is the whole conversation, as dicts in OpenAI's style, Messages and Replies; `tools` are functions,
        Tools or OpenAI-style schemas, the same at every call (None: those of the first). How the policy samples is the
        run's. Raises ConversationError.
        """
        try:
            if self._waiting or self._given_up:
                other = "was given up" if self._given_up else "waits"
                raise ConversationError(
                    f"chat.create was called while another call {other}: an episode is one conversation. For several "
                    "answers to one question there is learner.group_size"
                )
            whole = [self._message(message, place) for place, message in enumerate(messages)]
            new = self._new(whole)
            await self._settle_tools(tools)
        except Exception:
            # A program that asks again whatever is raised must not keep the event loop, and its limits, from a turn.
            await asyncio.sleep(_REFUSAL_S)
            raise
        asked = _Asked(new, asyncio.get_running_loop().create_future())
        self._waiting = True
        try:
            self._calls.put_nowait(asked)
            action = await asked.answer
        except asyncio.CancelledError:
            self._given_up = True
            raise
        finally:
            self._waiting = False
        self._desk.actions.append(action)
        calls = tuple(dataclasses.replace(call, id=call.id or self._new_id()) for call in action.tool_calls)
        reason = ("tool_calls" if calls else "stop") if action.finished else "length"
        reply = Reply(action.text, calls, reason)
        self._seen = [*whole, reply]
        return reply

    async def call_tools(self, reply: Reply) -> list[Message]:
        """Run the calls of a reply with the functions that `create` was given, within their limits and at the same
        time; the messages that answer them. What went wrong is told to the policy and counted. Raises
        ConversationError for a tool of which `create` was given no function."""
        bare = {name for one in self._schemas if (name := _name(one)) not in self._functions}
        if lacking := sorted({call.name for call in reply.tool_calls} & bare):
            raise ConversationError(
                f"chat.call_tools: create was given no function for {', '.join(lacking)}, only a schema: run such a "
                "call in the program, or give create the function"
            )
        answer = await self._desk.observe(reply.tool_calls)
        for name, count in answer.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + count
        return list(answer.messages)

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Schemas that the policy was shown."""
        return self._schemas

    async def _settle_tools(self, tools: Sequence[Any] | None) -> None:
        if tools is None and self._seen:
            return
        made = [one if isinstance(one, Mapping) else Tool.of(one) for one in tools or ()]
        schemas = tuple(one.schema if isinstance(one, Tool) else one for one in made)
        if self._seen and schemas != self._schemas:
            raise ConversationError(
                f"chat.create: the tools must be those of the first call ({_names(self._schemas)}), found "
                f"{_names(schemas)}: the prompt that describes them has been read"
            )
        if not self._seen:
            self._schemas = schemas
            own = [one for one in made if isinstance(one, Tool)]
            self._functions, self._desk = frozenset(one.name for one in own), _desk(own)
            await self._desk.reset(self.payload, episode_id=self.episode_id, seed=self.seed)

    def _new(self, whole: Sequence[Message | Reply]) -> list[Message]:
        """The messages after those that the policy has seen. Raises ConversationError."""
        for place, before in enumerate(self._seen):
            now = whole[place] if place < len(whole) else None
            if now is None or not _same(before, now):
                found = "nothing" if now is None else f"{now.role} {now.content[:80]!r}"
                raise ConversationError(
                    f"chat.create: messages[{place}] must still be {before.role} {before.content[:80]!r}, found "
                    f"{found}: an episode is one sequence of tokens, so a call keeps what was said and adds to it"
                )
        new = whole[len(self._seen) :]
        if not new:
            what = "must end with what the policy is to answer, found its own reply" if whole else "must not be empty"
            raise ConversationError(f"chat.create: messages {what}")
        return [Message(m.role, m.content, m.tool_calls) if isinstance(m, Reply) else m for m in new]

    def _message(self, message: Message | Reply | Mapping[str, Any], place: int) -> Message | Reply:
        where = f"chat.create: messages[{place}]"
        if isinstance(message, Message | Reply):
            return message
        if not isinstance(message, Mapping):
            raise ConversationError(f"{where} must be a dict, a Message or a Reply, found {message!r:.80}")
        role = message.get("role")
        if not isinstance(role, str):
            raise ConversationError(f"{where} must have a role, found {list(message)}")
        calls = tuple(_call(one, where) for one in message.get("tool_calls") or ())
        name = str(message.get("name") or "")
        if role == "tool" and not name:
            spoken = [call for one in self._seen for call in one.tool_calls]
            name = next((call.name for call in spoken if call.id and call.id == message.get("tool_call_id")), "")
        return Message(role, _text(message.get("content"), where), calls, name)

    def _new_id(self) -> str:
        self._numbered += 1
        return f"call_{self._numbered}"


def _same(before: Message | Reply, now: Message | Reply) -> bool:
    """Whether `now` stands for what was there before: a reply may come back as a message of its content, or, as
    frameworks write it, of its calls alone."""
    if not isinstance(before, Reply):
        return before == now
    if now.role != "assistant":
        return False
    return now.content == before.content or (not now.content and bool(now.tool_calls))


def _text(content: object, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Sequence) and all(isinstance(one, Mapping) and one.get("type") == "text" for one in content):
        return "".join(str(one.get("text", "")) for one in content)
    raise ConversationError(f"{where} must have text as its content, found {content!r:.80}")


def _call(found: Any, where: str) -> ToolCall:
    """A call in OpenAI's style, or one of ours."""
    if isinstance(found, ToolCall):
        return found
    try:
        function = found["function"]
        arguments = function["arguments"]
        parsed = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
        return ToolCall(str(function["name"]), parsed, id=str(found.get("id") or ""))
    except (KeyError, TypeError, ValueError) as error:
        raise ConversationError(f"{where} has a tool call that cannot be read: {found!r:.80} ({error!r})") from error


def _name(schema: Mapping[str, Any]) -> str:
    return str(schema.get("function", schema).get("name"))


def _names(schemas: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(map(_name, schemas)) or "none"


def _desk(tools: Sequence[Tool]) -> ToolEnvironment:
    """Where the calls of one episode are run: of an environment only its tools are used."""
    return ToolEnvironment(tools, lambda payload: (), lambda payload, actions: Score({}, False))


@dataclass(frozen=True)
class AgentProgram:
    """The environment of a program."""

    program: Program
    tasks: TaskSource
    success_at: float = 1.0
    """Least reward that counts as success."""

    def __post_init__(self) -> None:
        called = getattr(self.program, "__call__", None)  # noqa: B004 (an object with an async __call__)
        if not (inspect.iscoroutinefunction(self.program) or inspect.iscoroutinefunction(called)):
            raise TypeError(f"an agent program must be `async def program(payload, chat)`, found {self.program!r}")

    def make(self) -> ProgramEnvironment:
        return ProgramEnvironment(self.program, self.success_at)


@dataclass
class ProgramEnvironment:
    """One run of a program."""

    program: Program
    success_at: float = 1.0
    _chat: Chat | None = field(default=None, init=False)
    _running: asyncio.Task[object] | None = field(default=None, init=False)
    _asked: _Asked | None = field(default=None, init=False)

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return self._chat.tools if self._chat else ()

    async def reset(self, payload: Mapping[str, Any], *, episode_id: str, seed: int) -> Sequence[Message]:
        self._chat = Chat(payload, episode_id, seed)
        self._running = asyncio.create_task(contained(self.program(payload, self._chat)))
        result = await self._until_it_asks()
        if self._asked is None:
            raise ConversationError(f"the program ended without a call of chat.create; it returned {result!r:.80}")
        return self._asked.messages

    async def step(self, action: Action) -> StepResult:
        assert self._chat is not None
        if self._asked is not None and not self._asked.answer.done():
            self._asked.answer.set_result(action)
        result = await self._until_it_asks()
        metrics, self._chat.metrics = self._chat.metrics, {}
        if self._asked is not None:
            return StepResult(tuple(self._asked.messages), metrics=metrics)
        end = judged(result, self.success_at)
        return dataclasses.replace(end, metrics={**end.metrics, **metrics})

    async def close(self) -> None:
        """Cancels the program, if it has not ended, and waits for its clean-up. Raises what that does."""
        if self._running is None or self._running.done():
            return
        self._running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._running

    async def _until_it_asks(self) -> object:
        """Until the program's next call, which is then `_asked`, or its end: what it returned. Raises what it did."""
        assert self._chat is not None
        assert self._running is not None
        self._asked = None
        asking = asyncio.ensure_future(self._chat._calls.get())
        try:
            await asyncio.wait({self._running, asking}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not asking.done():
                asking.cancel()
        if self._running.done():
            if self._running.cancelled():
                raise RuntimeError("the program cancelled itself")
            return self._running.result()
        self._asked = asking.result()
        return None
