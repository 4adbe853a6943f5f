"""The tools of an MCP server, over stdio or streamable HTTP, through the official SDK.

Invariant: what a tool answers, errors included, is an observation; a server that is gone is the end of the episode that
notices, as a failure of the environment, and the next episode has another connection (over stdio: another process). A
call that is given up is cancelled at the server; one that shares its connection with other episodes also ends the
sharing: episodes that begin later get a new one, since the server may hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import logging
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from environments.environment import Action, Message, StepResult, TaskSource, find_named
from environments.libraries import own_tasks, require
from environments.tools import Score, Tool, ToolEnvironment, ToolError, call_either, describe
from environments.turns import opening
from environments.user_code import located
from environments.verifiable import columns, judged

_EXTRA = "mcp"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MCP:
    """`environments.libraries.mcp:MCP`: a conversation with a server's tools; the first turn without a call ends it.

    Either `command` or `url` names the server. The tools' schemas are those of its `tools/list`.
    """

    tasks_file: str
    """JSON Lines, one task a line, on disk or at gs://."""
    reward: str
    """`module:function` of (payload, answer), where the answer is the text of the last turn: a number, or named parts
    that add up; sync or async."""
    command: Sequence[str] = ()
    """What starts a server that talks over stdio."""
    url: str = ""
    """Address of a server that talks streamable HTTP, such as http://127.0.0.1:8000/mcp."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the command beside the few that the SDK hands on."""
    cwd: str = "."
    """The command's working folder, in `code.path`'s folder or else from the current one."""
    bearer_env: str = ""
    """Environment variable that holds the token which the address is called with."""
    shared: bool = False
    """Whether the episodes of a worker process share one connection: for servers that keep nothing between calls."""
    allowed: Sequence[str] = ()
    """Tools that the policy is shown; empty for all."""
    prompt: str = "{question}"
    """What the policy is asked: a template over the task's columns, of which each task must have all."""
    system: str = ""
    """The system message."""
    held_out_file: str = ""
    """Tasks for evaluation; "" holds a tenth of the tasks out."""
    call_timeout_s: float = 30.0
    """Most seconds for a call."""
    start_timeout_s: float = 30.0
    """Most seconds until a server has listed its tools."""
    calls_per_episode: int | None = None
    """Most calls of each tool in an episode."""
    success_at: float = 1.0
    """Least reward that is a success."""
    seed: int = 0
    tasks: TaskSource = field(init=False, repr=False, compare=False)
    score: Callable[..., Any] = field(init=False, repr=False, compare=False)
    _pool: _Pool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require("mcp", _EXTRA)
        if bool(self.command) == bool(self.url):
            raise ValueError("environment.options must name one of command and url, and not both")
        for name in ("command", "allowed"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"environment.options.{name} must be a list of texts, found {getattr(self, name)!r}")
        if self.bearer_env and not os.environ.get(self.bearer_env):
            raise ValueError(f"environment.options.bearer_env names {self.bearer_env}, which is not set")
        for name in ("call_timeout_s", "start_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"environment.options.{name} must be above 0 seconds and have an end, found {getattr(self, name)}"
                )
        tasks = own_tasks(self.tasks_file, self.held_out_file, self.seed)
        tasks.require(columns(self.prompt))
        object.__setattr__(self, "tasks", tasks)
        object.__setattr__(self, "score", find_named(self.reward, f"environment.options.reward {self.reward!r}"))
        object.__setattr__(self, "_pool", _Pool(self))

    def make(self) -> MCPEnvironment:
        return MCPEnvironment(self, self._pool)

    def prepare(self) -> None:
        """See `environments.environment.Prepared`: a command that cannot start is told once, not by each episode."""
        self.check_machine()

    def check_machine(self) -> None:
        """See `environments.environment.Checked`."""
        if not self.command:
            return
        cwd, program = located(self.cwd), self.command[0]
        named = f"environment.options.command `{shlex.join(self.command)}`"
        if not os.path.isdir(cwd):
            raise ValueError(f"environment.options.cwd {self.cwd!r}: there is no such folder, {os.path.abspath(cwd)}")
        if os.sep in program:
            found = shutil.which(os.path.abspath(os.path.join(cwd, program)))
        else:
            found = shutil.which(program, path=self.env.get("PATH"))
        if not found:
            where = f"in {os.path.abspath(cwd)}" if os.sep in program else "on PATH"
            raise ValueError(f"{named}: there is no program {program!r} {where}")
        script = _script(self.command)
        if script and not os.path.isfile(os.path.join(cwd, script)):
            raise ValueError(f"{named}: there is no file {script!r} in {os.path.abspath(cwd)}")

    def messages(self, payload: Mapping[str, Any]) -> Sequence[Message]:
        return opening(self.system, self.prompt.format_map(payload))

    @contextlib.asynccontextmanager
    async def client(self) -> Any:
        """A connected client of the server."""
        mcp = require("mcp", _EXTRA)
        async with contextlib.AsyncExitStack() as stack:
            if self.command:
                command, *arguments = _leashed(self.command, cwd := located(self.cwd))
                server: Any = mcp.StdioServerParameters(command=command, args=arguments, env=dict(self.env), cwd=cwd)
            else:
                httpx = require("httpx2", _EXTRA)
                token = {"Authorization": f"Bearer {os.environ[self.bearer_env]}"} if self.bearer_env else {}
                # Reading has no limit of its own: a call has its own, and a server may keep its stream open and silent.
                http = httpx.AsyncClient(headers=token, timeout=httpx.Timeout(self.start_timeout_s, read=None))
                await stack.enter_async_context(http)
                transport = require("mcp.client.streamable_http", _EXTRA).streamable_http_client
                server = transport(self.url, http_client=http)
            yield await stack.enter_async_context(mcp.Client(server))

    @property
    def where(self) -> str:
        """The server, for people: its address, or the command as it was written."""
        command = shlex.join(self.command)
        return self.url or f"`{command[:_SHOWN]}{'…' if len(command) > _SHOWN else ''}`"


_SHOWN = 200
"""Most characters of a command in a message."""
_INTERPRETERS = re.compile(r"(python|pypy)[\d.]*|node|deno|bun|uv")
_ELSEWHERE = ("-c", "-m", "-e", "--directory")
"""Options after which a word that looks like a script need not be one, or lies in another folder."""


def _script(command: Sequence[str]) -> str:
    """The file that the command has an interpreter run; "" if that cannot be told from its words."""
    if not _INTERPRETERS.fullmatch(os.path.basename(command[0])):
        return ""
    words = itertools.takewhile(lambda word: word not in _ELSEWHERE, command[1:])
    return next((word for word in words if word.endswith((".py", ".js")) and not re.match(r"-|\w+:", word)), "")


_LEASH = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def _leashed(command: Sequence[str], cwd: str) -> Sequence[str]:
    """The command, such that it ends when this process is killed, even where it hangs and does not see that its input
    ends (Linux). One that cannot be found stays as it is: the SDK says so.

    The kernel sends the signal when the thread that started the command ends: that is the event loop's, as old as the
    episodes.
    """
    found = os.path.isfile(os.path.join(cwd, command[0])) if os.sep in command[0] else shutil.which(command[0])
    if sys.platform != "linux" or not found:
        return command
    return [sys.executable, "-ISc", _LEASH, str(os.getpid()), *command]


class Connection:
    """A client that one task holds open: the SDK wants to be entered and left by the same."""

    def __init__(self, spec: MCP) -> None:
        self._spec = spec
        self._stop = asyncio.Event()
        self._holder: asyncio.Task[None] | None = None
        self._scope: Any = None
        self._client: Any = None
        self.listed: Sequence[Any] = ()
        """The server's tools."""
        self.users = 0
        self.gone = ""
        """Why the server cannot be used any more."""
        self.suspect = False
        """Whether a call was given up: the server may hang."""

    async def open(self) -> None:
        """Connect and list the tools. Raises ConnectionError."""
        where, limit_s = self._spec.where, self._spec.start_timeout_s
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._holder = asyncio.create_task(self._hold(ready))
        _held.add(self._holder)
        self._holder.add_done_callback(_held.discard)
        try:
            await asyncio.wait((ready,), timeout=limit_s)
        except asyncio.CancelledError:
            self._give_up()
            raise
        if not ready.done():
            self._give_up()
            await asyncio.wait((self._holder,))
            raise ConnectionError(f"the MCP server {where} listed no tools within {limit_s:g} s")
        if (error := ready.exception()) is not None:
            raise ConnectionError(f"the MCP server {where} cannot be reached: {_words(error)}") from error

    def _give_up(self) -> None:
        """Leaves the client in the SDK's own way: a task's cancellation would cut its shutdown short, and a server's
        process would live on."""
        if self._scope is not None:
            self._scope.cancel()
        elif self._holder is not None:
            self._holder.cancel()  # it has not begun

    async def _hold(self, ready: asyncio.Future[None]) -> None:
        try:
            with require("anyio", _EXTRA).CancelScope() as self._scope:
                async with self._spec.client() as client:
                    self._client = client
                    self.listed = await _every_tool(client)
                    if not ready.done():
                        ready.set_result(None)
                    await self._stop.wait()
        except Exception as error:
            self.gone = self.gone or _words(error)
            if not ready.done():
                ready.set_exception(error)
                ready.exception()  # whoever waited may have left
            elif not self._stop.is_set():
                log.warning("the MCP server %s: %s", self._spec.where, self.gone)
        finally:
            self.gone = self.gone or "the connection was closed"

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text that a tool answers. Raises ToolError with the tool's own error, ConnectionError if the server is
        gone."""
        mcp = require("mcp", _EXTRA)
        if self.gone:
            raise ConnectionError(self.gone)
        try:
            result = await self._client.call_tool(name, dict(arguments))
        except asyncio.CancelledError:
            self.suspect = True
            raise
        except Exception as error:
            if not await self.answers():
                self.gone = self.gone or _words(error)
                raise ConnectionError(self.gone) from error
            if isinstance(error, mcp.MCPError):
                raise ToolError(error.message) from error
            raise
        text = "\n".join(_shown(part) for part in result.content)
        if not result.content and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            raise ToolError(text)
        return text

    async def answers(self) -> bool:
        """Whether the server still does."""
        try:
            await asyncio.wait_for(self._client.session.list_tools(), _PROBE_S)
        except Exception:
            return False
        return True

    async def close(self) -> None:
        """Leaves nothing behind: over stdio the server's process ends."""
        self._stop.set()
        if self._holder is not None:
            await asyncio.wait((self._holder,))


_PROBE_S = 5.0

_held: set[asyncio.Task[None]] = set()
"""Tasks that hold connections, until they have closed them: asyncio itself holds tasks weakly."""


class _Pool:
    """The connection that episodes share, where they do."""

    def __init__(self, spec: MCP) -> None:
        self._spec = spec
        self._shared: Connection | None = None
        self._opening = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        """Whose the two are."""

    async def take(self) -> Connection:
        if not self._spec.shared:
            connection = Connection(self._spec)
            connection.users = 1
            await connection.open()
            return connection
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._shared, self._opening = loop, None, asyncio.Lock()
        async with self._opening:
            current = self._shared
            if current is None or current.gone or current.suspect or not await current.answers():
                if current is not None:
                    why = current.gone or ("a call was given up" if current.suspect else "it does not answer")
                    log.warning("the MCP server %s is connected to anew: %s", self._spec.where, why)
                    if not current.users:
                        await current.close()
                self._shared = current = Connection(self._spec)
                await current.open()
            current.users += 1
            return current

    async def give_back(self, connection: Connection) -> None:
        """Closes it unless others use it, or may."""
        connection.users -= 1
        keep = self._spec.shared and connection is self._shared and not (connection.gone or connection.suspect)
        if not connection.users and not keep:
            await connection.close()


class MCPEnvironment(ToolEnvironment):
    """One episode."""

    def __init__(self, spec: MCP, pool: _Pool) -> None:
        super().__init__((), spec.messages, _never)
        self._spec = spec
        self._pool = pool
        self._connection: Connection | None = None

    async def reset(self, payload: Mapping[str, Any], *, episode_id: str, seed: int) -> Sequence[Message]:
        self._connection = connection = await self._pool.take()
        spec = self._spec
        listed = [tool for tool in connection.listed if not spec.allowed or tool.name in spec.allowed]
        if missing := set(spec.allowed) - {tool.name for tool in listed}:
            have = ", ".join(tool.name for tool in connection.listed)
            raise ValueError(f"the MCP server {spec.where} has no tool {', '.join(sorted(missing))}; it has {have}")
        self._tools = {tool.name: self._tool(connection, tool).for_episode() for tool in listed}
        return await super().reset(payload, episode_id=episode_id, seed=seed)

    def _tool(self, connection: Connection, listed: Any) -> Tool:
        async def call(**arguments: Any) -> str:
            return await connection.call(listed.name, arguments)

        return Tool(
            name=listed.name,
            description=listed.description or "",
            parameters=listed.input_schema,
            function=call,
            timeout_s=self._spec.call_timeout_s,
            max_calls=self._spec.calls_per_episode,
        )

    async def step(self, action: Action) -> StepResult:
        result = await super().step(action)
        assert self._connection is not None
        if self._connection.gone and not result.done:
            raise ConnectionError(f"the MCP server {self._spec.where} is gone: {self._connection.gone}")
        return result

    async def judge(self) -> StepResult:
        value = await call_either(self._spec.score, self.payload, self.actions[-1].text)
        return judged(value, self._spec.success_at)

    async def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await self._pool.give_back(connection)


def _never(payload: Mapping[str, Any], actions: Sequence[Action]) -> Score:
    raise AssertionError("an MCP environment is judged by its reward function")


async def _every_tool(client: Any) -> list[Any]:
    listing = await client.list_tools()
    tools = list(listing.tools)
    while listing.next_cursor and len(tools) < _MOST_TOOLS:
        listing = await client.list_tools(cursor=listing.next_cursor)
        tools += listing.tools
    return tools


_MOST_TOOLS = 1000


def _shown(part: Any) -> str:
    """A part of an answer as text: of a link its address; pictures and sounds are named and left out."""
    if part.type == "text":
        return str(part.text)
    if part.type == "resource" and hasattr(part.resource, "text"):
        return str(part.resource.text)
    if part.type == "resource_link":
        return str(part.uri)
    return f"[{part.type}]"


def _words(error: BaseException) -> str:
    """Those of the first error in a group: the SDK's task groups wrap what happened."""
    inner = functools.reduce(lambda one, _: getattr(one, "exceptions", (one,))[0], range(10), error)
    return describe(inner)
