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
import logging
import math
import sysconfig
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar, overload

from environments.environment import Action, Message, StepResult, ToolCall
from environments.signatures import coerced, hints_of, mismatch, signature_of
from trajectories.schema import stream_seed

log = logging.getLogger(__name__)

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
    task = asyncio.ensure_future(contained(work))
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


async def contained(work: Awaitable[R]) -> R:
    """`await work`, where what must not leave through the event loop (see `passes`) comes as RuntimeError."""
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
    SystemExit and KeyboardInterrupt would leave through the event loop and end it: exit(), panics of extension modules,
    pytest.fail. Ctrl-C reaches the main thread alone; elsewhere KeyboardInterrupt is what some code has raised."""
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread()
    return isinstance(error, Exception | asyncio.CancelledError | GeneratorExit)


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
            ended = given_up = False  # both are the event loop's alone

            def settle(error: BaseException | None, value: Any) -> None:
                nonlocal ended
                ended = True
                if given_up:
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
                if not ended:  # it may have, after the cancellation and before it arrived here
                    given_up = True
                    self.abandoned += 1
                raise


blocking_calls: ContextVar[BlockingCalls | None] = ContextVar("blocking_calls", default=None)
"""The orchestrator's, inside the episodes it runs."""


async def run_blocking(call: Callable[[], R]) -> R:
    """Run blocking code of a tool or an environment beside the event loop."""
    calls = blocking_calls.get()
    return await (calls or BlockingCalls(1)).run(call)


async def call_either(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """What a function says, whether it is async or not; one that is not runs beside the event loop."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 (an object with an async __call__)
    ):
        return await function(*args, **kwargs)
    value = await run_blocking(lambda: function(*args, **kwargs))
    return await value if isinstance(value, Awaitable) else value


def describe(error: BaseException) -> str:
    """Type and words of an error, even of one that cannot say them."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:
        return type(error).__name__


def raised_at(error: BaseException) -> str:
    """Where the user's code raised it, such as ` (my_task.py, line 12)`; empty if none of it took part."""
    walked = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    foreign = [(file, line) for file, line in walked if not Path(file).is_relative_to(_OURS)]
    own = [(file, line) for file, line in foreign if not file.startswith(_STANDARD) and "site-packages" not in file]
    return "".join(f" ({Path(file).name}, line {line})" for file, line in (own or foreign)[-1:])


_OURS = Path(__file__).resolve().parent
_STANDARD = sysconfig.get_path("stdlib")

_logged: set[tuple[str, str, str]] = set()
_MOST_LOGGED = 100


def _log_once(tool: str, error: Exception) -> None:
    """The traceback of what a tool raised, once for each place: the policy reads only its words."""
    key = (tool, type(error).__name__, raised_at(error))
    if key not in _logged and len(_logged) < _MOST_LOGGED:
        _logged.add(key)
        log.warning("tool %s raised %s%s; more from there are not logged", *key, exc_info=error)


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
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")  # one character for each
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
    payload: Mapping[str, Any] = field(default_factory=dict)
    """The task's."""


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
    calls_over_limit, those of the refused that were too many; mended_calls, whose arguments were what was asked for,
    written another way; tool_errors, tool_timeouts, cut_outputs and invalid_outputs, which are the tool's."""

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
    read: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    """Python values of arguments that fit the schema; what it raises is told to the policy, whose mistake it is."""
    max_calls: int | None = None
    """Most calls in one episode, malformed ones apart; None: any number."""
    _numbers: Iterator[int] | None = field(default=None, repr=False, compare=False)
    """Numbers the calls of the episode that this is the tool of."""

    def __post_init__(self) -> None:
        seconds = self.timeout_s
        if not (isinstance(seconds, int | float) and 0 < seconds < math.inf):
            raise ValueError(
                f"tool {self.name}: timeout_s must be more than 0 seconds and not without end, found {seconds!r}"
            )
        if self.max_output < 1:
            raise ValueError(f"tool {self.name}: max_output must be at least 1 character, found {self.max_output!r}")

    def for_episode(self) -> Tool:
        """The tool as one episode has it: it counts that episode's calls."""
        return dataclasses.replace(self, _numbers=itertools.count(1)) if self.max_calls is not None else self

    def limited(self, limits: Limits) -> Tool:
        """The tool within `limits`."""
        return dataclasses.replace(
            self, timeout_s=limits.timeout_s, max_output=limits.output_chars, max_calls=limits.calls_per_episode
        )

    @classmethod
    def of(
        cls, function: Callable[..., Any] | Tool, *, timeout_s: float = 30.0, max_output: int = 4096, name: str = ""
    ) -> Tool:
        """The tool that a typed function describes: its name, docstring (with Google's `Args:`) and annotations; a tool
        is itself. Raises TypeError for a parameter that JSON cannot carry or that has no annotation, and for a function
        without a name; ValueError for limits that let no call through."""
        if isinstance(function, Tool):
            return function
        name = name or getattr(function, "__name__", "")
        if not name:
            raise TypeError(f"a tool must have a name, which {function!r:.80} has not: Tool.of(..., name=...)")
        signature = signature_of(function, given=(ToolContext,))
        return cls(
            name=name,
            description=signature.description,
            parameters=signature.parameters,
            function=function,
            timeout_s=timeout_s,
            max_output=max_output,
            read=signature.read,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself, for people and tests."""
        return self.function(*args, **kwargs)

    @property
    def schema(self) -> Mapping[str, Any]:
        """OpenAI style."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    @functools.cached_property
    def _context_parameters(self) -> list[str]:
        return [name for name, kind in hints_of(self.function).items() if kind is ToolContext]

    async def run(self, arguments: Mapping[str, Any], context: ToolContext = ToolContext()) -> ToolResult:
        """Call the tool; see the module's invariant."""
        try:
            written = coerced(arguments, self.parameters)
            problem = mismatch(written, self.parameters)
            given = {} if problem else dict(self.read(written)) | dict.fromkeys(self._context_parameters, context)
            mended = {} if written == arguments else {"mended_calls": 1}
        except Exception as error:  # nested too deeply, too large for a float, or refused by a dataclass's own checks
            problem = describe(error)
        if problem:
            return ToolResult(bounded_text(f"error: {self.name}: {problem}", 1024)[0], {"malformed_calls": 1})
        if self._numbers is not None and self.max_calls is not None and next(self._numbers) > self.max_calls:
            text = f"error: {self.name} may be called {self.max_calls} times in an episode"
            return ToolResult(text, {"tool_calls": 1, "refused_calls": 1, "calls_over_limit": 1})
        try:
            value = await within(self.timeout_s, call_either(self.function, **given))
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
            _log_once(self.name, error)
        return ToolResult(text, {"tool_calls": 1, **mended, **counts})


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...


@overload
def tool(
    *, timeout_s: float = 30.0, max_output: int = 4096, name: str = ""
) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(
    function: Callable[..., Any] | None = None, /, *, timeout_s: float = 30.0, max_output: int = 4096, name: str = ""
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Decorator that makes a typed function a tool: `@tool`, or `@tool(timeout_s=5)`. See `Tool.of`."""
    made = functools.partial(Tool.of, timeout_s=timeout_s, max_output=max_output, name=name)
    return made if function is None else made(function)


@dataclass(frozen=True, slots=True)
class Score:
    reward_parts: Mapping[str, float]
    success: bool


class ToolEnvironment:
    """A conversation with tools that ends at the first turn without a call, which is then judged. Without tools that is
    the first turn, whatever it says.

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
        if self._tools and action.tool_calls and action.finished:
            return await self.observe(action.tool_calls)
        return await self.judge()

    async def judge(self) -> StepResult:
        """What the end of the conversation is worth; done."""
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
        seed = stream_seed(self._seed, "tool", turn, index)
        context = ToolContext(self._episode_id, turn, index, seed, self.payload)
        return await tool.run(call.arguments, context)

    async def close(self) -> None:
        """Nothing to give back."""
