"""Tools, and environments made of them.

Invariant: whatever a tool does (raises, hangs, returns a megabyte or bytes that are no text), `Tool.run` comes back
with a bounded, valid observation for the policy and a count of what went wrong. It raises nothing but CancelledError.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import itertools
import json
import threading
import types
import typing
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from environments.environment import Action, Message, StepResult, ToolCall
from trajectories.schema import stream_seed

R = TypeVar("R")


class ToolError(ValueError):
    """What a tool answers to a call it cannot serve: the policy's mistake, and no fault of the tool."""


class LimitPassed(Exception):
    """Something took longer than it may; `stopped` says whether it ended when it was told to."""

    def __init__(self, stopped: bool) -> None:
        super().__init__("time limit passed")
        self.stopped = stopped


_unfinished: set[asyncio.Task[Any]] = set()
"""Abandoned tasks: asyncio itself holds tasks weakly."""


async def within(limit_s: float, work: Coroutine[Any, Any, R]) -> R:
    """`await work`, for at most `limit_s` seconds. Work that ignores its cancellation is abandoned, never waited for.
    Raises LimitPassed, and what the work raises; its own CancelledError, SystemExit or other exception that is no
    Exception comes as RuntimeError."""
    task = asyncio.ensure_future(_contained(work))
    try:
        await asyncio.wait((task,), timeout=max(0.0, limit_s))
        if not task.done():
            task.cancel()
            await asyncio.wait((task,), timeout=_GRACE_S)
            raise LimitPassed(stopped=task.done())
    finally:
        if not task.done():
            task.cancel()
            _unfinished.add(task)
            task.add_done_callback(_unfinished.discard)
        task.add_done_callback(_retrieve)
    if task.cancelled():
        raise RuntimeError("it cancelled itself")
    return task.result()


_GRACE_S = 0.05


async def _contained(work: Coroutine[Any, Any, R]) -> R:
    try:
        return await work
    except BaseException as error:
        if passes(error):
            raise
        raise RuntimeError(
            f"it called exit({error.code})" if isinstance(error, SystemExit) else describe(error)
        ) from error


def passes(error: BaseException) -> bool:
    """Whether code that is not ours may raise it as it is. The others would pass by every `except Exception`, and
    SystemExit would leave through the event loop and end it: exit(), panics of extension modules, pytest.fail."""
    return isinstance(error, Exception | asyncio.CancelledError | GeneratorExit | KeyboardInterrupt)


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Keeps asyncio from reporting the late exception of abandoned work."""
    if not task.cancelled():
        task.exception()


class BlockingCalls:
    """At most `limit` blocking calls at once, each in a daemon thread of its own.

    A call that is given up keeps its thread, as a thread cannot be stopped, but not its place: others go on. Daemon
    threads, unlike those of concurrent.futures, do not hold the process back when it ends.
    """

    def __init__(self, limit: int, max_abandoned: int = 256) -> None:
        self._places = asyncio.Semaphore(limit)
        self._max_abandoned = max_abandoned
        self.abandoned = 0
        """Threads stuck in calls that were given up."""

    async def run(self, call: Callable[[], R]) -> R:
        """Raises what the call raises, and RuntimeError if too many earlier calls still hang."""
        async with self._places:
            if self.abandoned >= self._max_abandoned:
                raise RuntimeError(f"{self.abandoned} blocking calls hang; give them time limits of their own")
            loop = asyncio.get_running_loop()
            future: asyncio.Future[R] = loop.create_future()
            given_up = threading.Event()

            def settle(error: BaseException | None, value: Any) -> None:
                if given_up.is_set():
                    self.abandoned -= 1
                elif not future.done():
                    future.set_exception(error) if error else future.set_result(value)

            def work() -> None:
                error: BaseException | None = None
                value: Any = None
                try:
                    value = call()
                except BaseException as raised:
                    plain = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
                    error = raised if plain else RuntimeError(describe(raised))  # the others no future can carry
                with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
                    loop.call_soon_threadsafe(settle, error, value)

            threading.Thread(target=work, name="blocking-tool", daemon=True).start()
            try:
                return await future
            except asyncio.CancelledError:
                given_up.set()
                self.abandoned += 1
                raise


blocking_calls: ContextVar[BlockingCalls | None] = ContextVar("blocking_calls", default=None)
"""The orchestrator's, inside the episodes it runs."""


async def run_blocking(call: Callable[[], R]) -> R:
    """Run blocking code of a tool or an environment beside the event loop."""
    calls = blocking_calls.get()
    return await (calls or BlockingCalls(1)).run(call)


def describe(error: BaseException) -> str:
    """Type and words of an error, even of one that cannot say them."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def bounded_text(value: object, limit: int) -> tuple[str, Mapping[str, float]]:
    """`value` as valid text of at most `limit` characters (and the note of what was cut), with counts of what had to be
    mended. Bytes are read as UTF-8; anything else that is no string is shown as JSON."""
    counts: dict[str, float] = {}
    if isinstance(value, bytes | bytearray):
        text = bytes(value).decode("utf-8", "replace")
        if "\ufffd" in text:
            counts["invalid_outputs"] = 1
    elif isinstance(value, str):
        text = value
    else:
        text = json.dumps(value, default=str, ensure_ascii=False)
    if len(text) > limit:
        counts["cut_outputs"] = 1
        text = f"{text[:limit]} [{len(text) - limit} more characters were cut]"
    try:
        text.encode()
    except UnicodeEncodeError:  # lone surrogates
        counts["invalid_outputs"] = 1
        text = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return text, counts


@dataclass(frozen=True, slots=True)
class ToolContext:
    """What a tool may know of the episode that calls it: a function with a parameter of this type is given it."""

    episode_id: str = ""
    """Idempotency key: an episode may run again after a crash."""
    turn: int = 0
    call: int = 0
    """Position of the call within its turn."""
    seed: int = 0
    """Pure function of run, episode, turn and call."""


@dataclass(frozen=True)
class Limits:
    """What a tool may take. The settings of each built-in tool begin with these."""

    section: ClassVar[str] = "limits"
    """What messages call these settings."""
    timeout_s: float = 10.0
    """Most seconds for a call, its wait for a free place included."""
    output_chars: int = 4096
    """Most characters of an answer; the rest is cut and counted."""
    calls_per_episode: int = 32
    """Most calls in one episode; more are refused and counted."""

    def __post_init__(self) -> None:
        self.require(0 < self.timeout_s <= 3600, "timeout_s", "be more than 0 and at most 3600 seconds")
        self.require(self.output_chars >= 1, "output_chars", "be at least 1")
        self.require(self.calls_per_episode >= 1, "calls_per_episode", "be at least 1")

    def require(self, fits: bool, name: str, must: str) -> None:
        """Raises ValueError that says what setting `name` must do, unless it `fits`."""
        if not fits:
            raise ValueError(f"{self.section}.{name} must {must}, found {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class ToolResult:
    text: str
    counts: Mapping[str, float] = field(default_factory=dict)
    """Named as the episode's metrics: tool_calls; malformed_calls and refused_calls, which are the policy's mistakes;
    calls_over_limit, those of the refused that were too many; tool_errors, tool_timeouts, cut_outputs and
    invalid_outputs, which are the tool's."""

    @property
    def failed(self) -> bool:
        return "tool_errors" in self.counts


@dataclass(frozen=True)
class Tool:
    """Something the policy may call. `function` takes the arguments by name; blocking functions run in threads."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments: an object."""
    function: Callable[..., Any]
    timeout_s: float = 30.0
    """Most seconds for a call, a blocking one's wait for a free thread included."""
    max_output: int = 4096
    """Most characters of an answer."""
    max_calls: int | None = None
    """Most calls in one episode, malformed ones apart; None: any number."""
    _numbers: Iterator[int] | None = field(default=None, repr=False, compare=False)
    """Numbers the calls of the episode that this is the tool of."""

    def for_episode(self) -> Tool:
        """The tool as one episode has it: it counts that episode's calls."""
        return dataclasses.replace(self, _numbers=itertools.count(1)) if self.max_calls is not None else self

    def limited(self, limits: Limits) -> Tool:
        """The tool within `limits`."""
        return dataclasses.replace(
            self, timeout_s=limits.timeout_s, max_output=limits.output_chars, max_calls=limits.calls_per_episode
        )

    @classmethod
    def of(cls, function: Callable[..., Any], *, timeout_s: float = 30.0, max_output: int = 4096) -> Tool:
        """The tool that a typed function describes: name, docstring, annotations. Raises TypeError for a parameter that
        JSON cannot carry."""
        return cls(
            name=function.__name__,
            description=inspect.getdoc(function) or "",
            parameters=_parameters(function),
            function=function,
            timeout_s=timeout_s,
            max_output=max_output,
        )

    @property
    def schema(self) -> Mapping[str, Any]:
        """OpenAI style."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    @functools.cached_property
    def _context_parameters(self) -> list[str]:
        return [name for name, kind in _hints(self.function).items() if kind is ToolContext]

    async def run(self, arguments: Mapping[str, Any], context: ToolContext = ToolContext()) -> ToolResult:
        """Call the tool; see the module's invariant."""
        if problem := mismatch(arguments, self.parameters):
            return ToolResult(f"error: {self.name}: {problem}", {"malformed_calls": 1})
        if self._numbers is not None and self.max_calls is not None and next(self._numbers) > self.max_calls:
            text = f"error: {self.name} may be called {self.max_calls} times in an episode"
            return ToolResult(text, {"tool_calls": 1, "refused_calls": 1, "calls_over_limit": 1})
        given = dict(arguments) | dict.fromkeys(self._context_parameters, context)
        try:
            value = await within(self.timeout_s, self._call(given))
            text, counts = bounded_text(value, self.max_output)
        except LimitPassed:
            text = f"error: {self.name} did not answer within {self.timeout_s:g} s"
            counts = {"tool_errors": 1, "tool_timeouts": 1}
        except ToolError as error:
            text, counts = bounded_text(f"error: {error}", self.max_output)
            counts = {**counts, "refused_calls": 1}
        except Exception as error:
            text, counts = bounded_text(f"error: {describe(error)}", self.max_output)
            counts = {**counts, "tool_errors": 1}
        return ToolResult(text, {"tool_calls": 1, **counts})

    async def _call(self, arguments: Mapping[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            getattr(self.function, "__call__", None)  # noqa: B004 (an object with an async __call__)
        ):
            return await self.function(**arguments)
        value = await run_blocking(lambda: self.function(**arguments))
        return await value if isinstance(value, Awaitable) else value


@dataclass(frozen=True, slots=True)
class Score:
    reward_parts: Mapping[str, float]
    success: bool


class ToolEnvironment:
    """A conversation with tools that ends at the first turn without a call, which is then scored.

    `prompt` makes the conversation before the first turn, `score` judges the payload and the turns the policy took; it
    is called once, at the end, and may be async. The calls of one turn run at the same time.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        prompt: Callable[[Mapping[str, Any]], Sequence[Message]],
        score: Callable[[Mapping[str, Any], Sequence[Action]], Score | Awaitable[Score]],
    ) -> None:
        self._tools = {tool.name: tool.for_episode() for tool in tools}
        self._prompt = prompt
        self._score = score
        self.payload: Mapping[str, Any] = {}
        self.actions: list[Action] = []

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return [tool.schema for tool in self._tools.values()]

    async def reset(self, payload: Mapping[str, Any], *, episode_id: str, seed: int) -> Sequence[Message]:
        self.payload, self.actions = payload, []
        self._episode_id, self._seed = episode_id, seed
        return self._prompt(payload)

    async def step(self, action: Action) -> StepResult:
        self.actions.append(action)
        if action.tool_calls and action.finished:
            return await self.observe(action.tool_calls)
        score = self._score(self.payload, self.actions)
        if isinstance(score, Awaitable):
            score = await score
        return StepResult(
            reward=sum(score.reward_parts.values()), done=True, reward_parts=score.reward_parts, success=score.success
        )

    async def observe(self, calls: Sequence[ToolCall]) -> StepResult:
        """The tools' answers, in the order of the calls; not done."""
        results = await asyncio.gather(*(self.call(call, index) for index, call in enumerate(calls)))
        metrics: dict[str, float] = {}
        for result in results:
            for name, count in result.counts.items():
                metrics[name] = metrics.get(name, 0) + count
        messages = tuple(
            Message("tool", result.text, name=call.name) for call, result in zip(calls, results, strict=True)
        )
        return StepResult(messages=messages, metrics=metrics)

    async def call(self, call: ToolCall, index: int = 0) -> ToolResult:
        """One call; a malformed one, or one of a tool that does not exist, is answered with what is wrong."""
        if call.arguments is None:
            return ToolResult(bounded_text(f"error: {call.error}", 1024)[0])  # the agent counts it
        tool = self._tools.get(call.name)
        if tool is None:
            text, _ = bounded_text(f"error: there is no tool {call.name!r}; there are {', '.join(self._tools)}", 1024)
            return ToolResult(text, {"malformed_calls": 1})
        turn = len(self.actions) - 1
        context = ToolContext(self._episode_id, turn, index, stream_seed(self._seed, "tool", turn, index))
        return await tool.run(call.arguments, context)

    async def close(self) -> None:
        """Nothing to give back."""


_JSON_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


def mismatch(value: Any, schema: Mapping[str, Any], where: str = "arguments") -> str:
    """What is wrong with `value` under a JSON schema, "" if nothing. Knows type, enum, required, properties, items,
    anyOf and additionalProperties (false unless it says otherwise); other keywords are for the policy to read."""
    if options := schema.get("anyOf"):
        problems = [mismatch(value, option, where) for option in options]
        return "" if "" in problems else problems[0]
    if "enum" in schema and value not in schema["enum"]:
        return f"{where} must be one of {', '.join(map(repr, schema['enum']))}"
    kind = schema.get("type")
    if kind in _JSON_TYPES:
        number_like_bool = isinstance(value, bool) and kind in ("integer", "number")
        if number_like_bool or not isinstance(value, _JSON_TYPES[kind]):
            return f"{where} must be of type {kind}, found {type(value).__name__}"
    if isinstance(value, Mapping):
        properties = schema.get("properties", {})
        if missing := [name for name in schema.get("required", ()) if name not in value]:
            return f"{where} lacks {', '.join(missing)}"
        unknown = [name for name in value if name not in properties]
        if unknown and "properties" in schema and not schema.get("additionalProperties", False):
            return f"{where} has unknown {', '.join(unknown)[:200]}; it may have {', '.join(properties) or 'nothing'}"
        inner = ((f"{where}.{name}", value[name], rule) for name, rule in properties.items() if name in value)
        return next((problem for at, part, rule in inner if (problem := mismatch(part, rule, at))), "")
    if isinstance(value, list) and "items" in schema:
        items = ((f"{where}[{i}]", part) for i, part in enumerate(value))
        return next((problem for at, part in items if (problem := mismatch(part, schema["items"], at))), "")
    return ""


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    while isinstance(function, functools.partial):
        function = function.func
    target = function if inspect.isroutine(function) else type(function).__call__
    hints = typing.get_type_hints(target)
    hints.pop("return", None)
    return hints


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    hints = _hints(function)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if hints.get(name) is ToolContext:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(f"tool {function.__name__}: parameter {name} must be given by name")
        properties[name] = _schema_of(hints.get(name), f"tool {function.__name__}: parameter {name}")
        if parameter.default is parameter.empty:
            required.append(name)
    return {"type": "object", "properties": properties, "required": required}


def _schema_of(kind: Any, where: str) -> dict[str, Any]:
    simple = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind in simple:
        return {"type": simple[kind]}
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema_of(arg, where) for arg in args]}
    if kind is list or origin is list:
        return {"type": "array", **({"items": _schema_of(args[0], where)} if args else {})}
    if kind is dict or origin is dict:
        return {"type": "object"}
    raise TypeError(f"{where} must be annotated str, int, float, bool, list, dict, Literal or a union, found {kind}")
