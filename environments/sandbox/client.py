"""The engine's side of the sandbox: sends code, takes bounded answers.

Invariant: no code runs unless what protects this process from it is in force, or the user has said that it may. A call
ends at its limits whatever the code does, its process is gone before its place is given on, and nothing here blocks the
event loop after the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from environments.sandbox.server import EXCEPTION, NO_MEMORY, NO_RESULT, RESULT, Layer, Order

log = logging.getLogger(__name__)


class SandboxError(RuntimeError):
    """The sandbox cannot run code: it must not start here, or its fork server is gone. Never the code's fault."""


class Interpreter(StrEnum):
    RESTRICTED = "restricted"
    """Monty, a Python subset that was written to have no access to anything: no files, few modules."""
    CPYTHON = "cpython"
    """All of Python with its standard library, and with `packages`."""


@dataclass(frozen=True)
class SandboxSettings:
    """What a call may use."""

    interpreter: Interpreter = Interpreter.RESTRICTED
    """`restricted` or `cpython`."""
    timeout_s: float = 5.0
    """Most seconds for a call, from the fork of its process."""
    memory_mb: int = 256
    """Most MiB of memory that the code may take."""
    folder_mb: int = 16
    """Most MiB of files in its working folder, and so in one file."""
    output_bytes: int = 8192
    """Most bytes that it may print before it is stopped, and that are kept of its result."""
    code_bytes: int = 65_536
    """Most bytes of code; more is refused."""
    slots: int = 0
    """Most calls at once in one process of the engine, the others wait; 0 for one for each core."""
    packages: tuple[str, ...] = ()
    """Installed packages that code in CPython may import, such as numpy, and those that they need in turn."""
    unprotected: bool = False
    """Run code even where nothing keeps it from this process's files, network or memory."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "interpreter", _interpreter(self.interpreter))
        object.__setattr__(self, "packages", tuple(self.packages))
        if not 0 < self.timeout_s <= 3600:
            raise ValueError(f"python.timeout_s must be more than 0 and at most 3600 seconds, found {self.timeout_s}")
        for name, least, most in (
            ("memory_mb", 16, 1 << 20),
            ("folder_mb", 1, 1 << 20),
            ("output_bytes", 64, 1 << 26),
            ("code_bytes", 64, 100_000),  # as an argument to a program it may not be much longer
            ("slots", 0, 128),  # so that the fork server's socket holds a message for each
        ):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"python.{name} must lie between {least} and {most}, found {getattr(self, name)}")
        if self.packages and self.interpreter is not Interpreter.CPYTHON:
            raise ValueError(
                f"python.packages must be empty for the restricted interpreter, found {', '.join(self.packages)}: "
                'set python.interpreter = "cpython"'
            )


def _interpreter(name: str) -> Interpreter:
    try:
        return Interpreter(name)
    except ValueError:
        raise ValueError(f"python.interpreter must be {' or '.join(Interpreter)}, found {name!r}") from None


class ExecutionStatus(StrEnum):
    """How a call ended; all but `completed` and `exception` mean that it was stopped."""

    COMPLETED = "completed"
    EXCEPTION = "exception"
    """The code raised, or is no Python."""
    TIMEOUT = "timeout"
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"
    CRASHED = "crashed"
    """Its process ended in another way than by reaching the end of the code."""


@dataclass(frozen=True, slots=True)
class Execution:
    """What came of a call. Every text is the code's own doing and may be anything."""

    status: ExecutionStatus
    output: str
    """What it printed, standard output and standard error in order."""
    result: str
    """The value of its last line if that is an expression, as Python shows it; "" if there is none."""
    error: str
    """Traceback, or why it was stopped; "" if it completed."""
    wall_s: float
    """From the fork of its process to its end."""
    cpu_s: float
    queued_s: float
    """Waiting for a free slot."""


@dataclass(frozen=True)
class Protection:
    """What is in force, as it was tried out at the start."""

    interpreter: Interpreter
    missing: Mapping[str, str]
    """Layer -> why it is not in force."""

    @property
    def layers(self) -> list[Layer]:
        return [layer for layer in Layer if layer not in self.missing]

    @property
    def gaps(self) -> list[str]:
        """What is missing for code to be kept from this process; [] if it is protected."""
        needed: list[tuple[Layer, ...]] = [(Layer.LIMITS,), (Layer.PRIVILEGES,), (Layer.SYSTEM_CALLS,)]
        needed.append((Layer.NAMESPACES, Layer.LANDLOCK))
        return [
            " or ".join(either) + " (" + "; ".join(self.missing[layer] for layer in either) + ")"
            for either in needed
            if all(layer in self.missing for layer in either)
        ]

    def describe(self) -> str:
        """A line for each layer."""
        lines = [f"python sandbox, {self.interpreter} interpreter: {'UNPROTECTED' if self.gaps else 'protected'}"]
        for layer in Layer:
            state = f"no: {self.missing[layer]}" if layer in self.missing else "in force"
            lines.append(f"  {layer:<13} {state}")
        return "\n".join(lines)


class Sandbox:
    """Runs code for one event loop at a time. Its fork server starts with the first call, or with `start`."""

    def __init__(self, settings: SandboxSettings, withhold: Mapping[Layer, str] | None = None) -> None:
        """`withhold` leaves layers out, with a reason for each: to see what the others hold back alone."""
        self.settings = settings
        self.restarts = 0
        """How often the fork server had to be started again."""
        self._withhold = dict(withhold or {})
        self._server: _Server | None = None
        self._refusal: SandboxError | None = None
        self._starting: asyncio.Task[_Server] | None = None

    def start(self) -> Protection:
        """Start the fork server if none was; blocks for some tenths of a second. Raises SandboxError."""
        if self._server is None:
            self._adopt(self._launch())
        assert self._server is not None
        return self._server.protection

    async def run(self, code: str, seed: int = 0) -> Execution:
        """Run `code` in a process of its own; `seed` starts the generator of `random`. If the caller is cancelled, so
        is the code. Raises SandboxError if it could not be run."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        encoded = code.encode("utf-8", "replace")
        if len(encoded) > self.settings.code_bytes:
            error = f"the code has {len(encoded)} bytes, more than the {self.settings.code_bytes} that are allowed"
            return Execution(ExecutionStatus.EXCEPTION, "", "", error, 0.0, 0.0, 0.0)
        server = await self._running(loop)
        slot = await server.take()
        queued_s = loop.time() - began
        return await _Call(server, slot, self.settings, queued_s).run(encoded, seed)

    def close(self) -> None:
        """End the fork server and with it every call that runs."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def __aenter__(self) -> Sandbox:
        await self._running(asyncio.get_running_loop())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def _running(self, loop: asyncio.AbstractEventLoop) -> _Server:
        server = self._server
        if server is None or server.lost or server.loop is not loop:
            if self._starting is None or self._starting.done() or self._starting.get_loop() is not loop:
                self._starting = loop.create_task(self._start_beside(loop))
            server = await asyncio.shield(self._starting)
        return server

    async def _start_beside(self, loop: asyncio.AbstractEventLoop) -> _Server:
        server = self._server
        if server is None or server.lost or server.loop not in (None, loop):
            server = await asyncio.to_thread(self._launch)
            self._adopt(server)
        server.listen(loop)
        return server

    def _adopt(self, server: _Server) -> None:
        if self._server is not None:
            self.restarts += self._server.lost
            self._server.close()
        else:
            (log.warning if server.protection.gaps else log.info)("%s", server.protection.describe())
        self._server = server

    def _launch(self) -> _Server:
        if self._refusal is not None:
            raise self._refusal
        withheld = {str(layer): reason for layer, reason in self._withhold.items()}
        while True:
            server, answer = _Server.spawn(self.settings, withheld)
            if "refused" not in answer:
                break
            server.close()
            withheld[answer["refused"]] = answer["reason"]
        server.protection = Protection(self.settings.interpreter, answer["missing"])
        if server.protection.gaps and not self.settings.unprotected:
            server.close()
            self._refusal = SandboxError(
                f"code would run unprotected here: there is no {', no '.join(server.protection.gaps)}. "
                "`python -m environments.sandbox` shows what this host allows; python.unprotected = true runs it all "
                "the same"
            )
            raise self._refusal
        return server


_START_S = 30.0
_GRACE_S = 5.0
"""How much longer than a call's limit the fork server may take to report its end before it is given up."""


class _Server:
    """One fork server process and its free slots."""

    protection: Protection

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, settings: SandboxSettings) -> None:
        self.process, self.control = process, control
        self.lost = False
        self.loop: asyncio.AbstractEventLoop | None = None
        """The one it serves; none before its first call."""
        self._free = list(range(_slots(settings)))
        self._waiting: deque[asyncio.Future[int]] = deque()
        self.calls: dict[int, _Call] = {}

    @classmethod
    def spawn(cls, settings: SandboxSettings, withheld: Mapping[str, str]) -> tuple[_Server, dict[str, Any]]:
        """The process and its first answer. Raises SandboxError."""
        if not sys.platform.startswith("linux"):
            raise SandboxError(f"the Python sandbox needs Linux, this is {sys.platform}; run it in a container")
        order = _order(settings, withheld)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-c", _BOOT, root, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        server = cls(process, ours, settings)
        try:
            ours.settimeout(_START_S)
            ours.send(json.dumps(dataclasses.asdict(order)).encode())
            answer = json.loads(ours.recv(1 << 16) or b'{"failed": "it ended without a word"}')
            if "failed" in answer:
                raise SandboxError(f"the sandbox's fork server did not start: {answer['failed']}")
            if "ready" in answer:
                server.try_call(settings)
            ours.setblocking(False)
        except BaseException as error:
            server.close()
            if isinstance(error, OSError | ValueError):
                raise SandboxError(f"the sandbox's fork server did not start: {error}") from error
            raise
        return server, answer

    def try_call(self, settings: SandboxSettings) -> None:
        """A first call, before there is an event loop. Raises SandboxError unless it is answered rightly."""
        with contextlib.ExitStack() as opened:
            source, output, printed, report, told = _descriptors(b"print(6 * 7)\n'right'", opened)
            self.send({"run": 0, "seed": 0}, source, printed, told)
            ended = json.loads(self.control.recv(1 << 16) or b"{}")
            for descriptor in (output, report):
                os.set_blocking(descriptor, False)  # what there is when the process has ended is all
            said, reported = _Gathered(output, 1 << 10), _Gathered(report, 1 << 12)
            said.read(), reported.read()
        outcome = _outcome(settings, ended, bytes(reported.data), said.data.decode(errors="replace"), False)
        if (outcome.status, outcome.output.strip()) != (ExecutionStatus.COMPLETED, "42"):
            raise SandboxError(f"a first call went wrong: {outcome}")

    def send(self, message: Mapping[str, Any], *descriptors: int) -> None:
        socket.send_fds(self.control, [json.dumps(message).encode()], descriptors)

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.loop is None and not self.lost:
            self.loop = loop
            loop.add_reader(self.control, self._hear)

    async def take(self) -> int:
        """A free slot, first come first served. Raises SandboxError if the server is lost meanwhile."""
        if self._free and not self._waiting:
            return self._free.pop()
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and not waiter.exception():
                self.give(waiter.result())
            raise

    def give(self, slot: int) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(slot)
                return
        self._free.append(slot)

    def _hear(self) -> None:
        while not self.lost:
            try:
                data = self.control.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.lose("its fork server ended")
                return
            message = json.loads(data)
            slot = message["ended"]
            self.calls.pop(slot).ended(message)
            self.give(slot)

    def lose(self, why: str) -> None:
        """The server is of no more use; every call that waits for it ends in an error."""
        if not self.lost:
            log.warning("python sandbox: %s; it is started again with the next call", why)
            self._end(f"the sandbox lost the call: {why}")

    def close(self) -> None:
        if not self.lost:
            self._end("the sandbox was closed")

    def _end(self, why: str) -> None:
        self.lost = True
        calls, self.calls = list(self.calls.values()), {}
        waiting, self._waiting = list(self._waiting), deque()
        if self.loop is not None and not self.loop.is_closed():
            self.loop.remove_reader(self.control)
            for call in calls:
                call.fail(SandboxError(why))
            for waiter in waiting:
                if not waiter.done():
                    waiter.set_exception(SandboxError(why))
        self.control.close()
        self.process.kill()
        self.process.wait()


class _Call:
    """One process that runs code, seen from here: two pipes and the news of its end."""

    def __init__(self, server: _Server, slot: int, settings: SandboxSettings, queued_s: float) -> None:
        self._server, self._slot, self._settings, self._queued_s = server, slot, settings, queued_s
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._guard: asyncio.TimerHandle | None = None
        self._output = self._report = _Gathered(-1, 0)

    async def run(self, code: bytes, seed: int) -> Execution:
        """Raises SandboxError if the server is lost."""
        self._send(code, seed)
        try:
            ended = await self._done
        except asyncio.CancelledError:
            self._kill()  # its slot comes back when the server says that the process has ended
            raise
        else:
            for pipe in (self._output, self._report):
                pipe.read(sys.maxsize)  # what was written last; more cannot come
        finally:
            for pipe in (self._output, self._report):
                self._loop.remove_reader(pipe.descriptor)
                os.close(pipe.descriptor)
        over = self._output.over or self._report.over
        printed = self._output.data[: self._settings.output_bytes].decode("utf-8", "replace")
        outcome = _outcome(self._settings, ended, bytes(self._report.data), printed, over)
        return dataclasses.replace(outcome, queued_s=self._queued_s)

    def _send(self, code: bytes, seed: int) -> None:
        """Raises SandboxError, the slot given back, if there are no more descriptors."""
        with contextlib.ExitStack() as opened:
            try:
                source, output, printed, report, told = _descriptors(code, opened)
            except OSError as error:
                self._server.give(self._slot)
                raise SandboxError(f"the sandbox could not run the call: {error}") from error
            opened.pop_all()
        self._output = _Gathered(output, self._settings.output_bytes)
        self._report = _Gathered(report, self._settings.output_bytes + _REPORT_BYTES)
        for pipe in (self._output, self._report):
            os.set_blocking(pipe.descriptor, False)
            self._loop.add_reader(pipe.descriptor, self._gather, pipe)
        self._server.calls[self._slot] = self
        self._guard = self._loop.call_later(
            self._settings.timeout_s + _GRACE_S, self._server.lose, "its fork server does not answer"
        )
        try:
            self._server.send({"run": self._slot, "seed": seed}, source, printed, told)
        except OSError as error:
            self._server.lose(f"its fork server takes no calls: {error}")
            self.fail(SandboxError(f"the sandbox lost the call: {error}"))
        finally:
            for descriptor in (source, printed, told):
                os.close(descriptor)

    def _gather(self, pipe: _Gathered) -> None:
        if not pipe.read():
            self._loop.remove_reader(pipe.descriptor)
        if pipe.over:
            self._kill()

    def _kill(self) -> None:
        if self._server.calls.get(self._slot) is self:
            try:
                self._server.send({"kill": self._slot})
            except OSError as error:
                self._server.lose(f"its fork server takes no calls: {error}")

    def ended(self, message: dict[str, Any]) -> None:
        self._settle()
        if not self._done.done():
            self._done.set_result(message)

    def fail(self, error: SandboxError) -> None:
        self._settle()
        if not self._done.done():
            self._done.set_exception(error)

    def _settle(self) -> None:
        if self._guard is not None:
            self._guard.cancel()


_REPORT_BYTES = 1024


@dataclass
class _Gathered:
    """What has come out of a pipe, and never more than was asked for and one byte."""

    descriptor: int
    limit: int
    data: bytearray = field(default_factory=bytearray)

    @property
    def over(self) -> bool:
        return len(self.data) > self.limit

    def read(self, pieces: int = 16) -> bool:
        """Take what is there, however small its pieces were made; False if no more will come or is wanted."""
        for _ in range(pieces):
            if self.over:
                return False
            try:
                piece = os.read(self.descriptor, min(1 << 16, self.limit + 1 - len(self.data)))
            except BlockingIOError:
                return True
            if not piece:
                return False
            self.data += piece
        return True


def _slots(settings: SandboxSettings) -> int:
    return settings.slots or min(os.cpu_count() or 1, 128)


def _descriptors(code: bytes, opened: contextlib.ExitStack) -> tuple[int, int, int, int, int]:
    """A file in memory with the code, and both ends of the pipes for output and report. `opened` closes them."""
    source = os.memfd_create("code", os.MFD_CLOEXEC)
    opened.callback(os.close, source)
    ends = []
    for _ in range(2):
        reader, writer = os.pipe()
        opened.callback(os.close, reader)
        opened.callback(os.close, writer)
        ends += [reader, writer]
    os.writev(source, [code])
    output, printed, report, told = ends
    return source, output, printed, report, told


_BOOT = "import sys; sys.path.append(sys.argv[1]); from environments.sandbox import server; server.main()"


def _order(settings: SandboxSettings, withheld: Mapping[str, str]) -> Order:
    """Raises SandboxError."""
    paths: list[str] = []
    roots: list[str] = []
    for name in settings.packages:
        spec = importlib.util.find_spec(name)
        if spec is None or (spec.origin is None and not spec.submodule_search_locations):
            raise SandboxError(f"python.packages must name installed packages, found {name!r}, which is not")
        found = list(spec.submodule_search_locations or [str(spec.origin)])
        found += [libraries for one in found if os.path.isdir(libraries := f"{one}.libs")]
        paths += found
        roots += [root for one in found if (root := os.path.dirname(one)) not in roots]
    return Order(
        slots=_slots(settings),
        timeout_s=settings.timeout_s,
        memory_mb=settings.memory_mb,
        folder_mb=settings.folder_mb,
        output_bytes=settings.output_bytes,
        program=_restricted_program() if settings.interpreter is Interpreter.RESTRICTED else "",
        packages=list(settings.packages),
        package_paths=paths,
        package_roots=roots,
        withheld=dict(withheld),
    )


def _restricted_program() -> str:
    """The `monty` of the package pydantic-monty-runtime. Raises SandboxError."""
    beside = os.path.join(sysconfig.get_path("scripts"), "monty")
    found = beside if os.path.isfile(beside) else shutil.which("monty")
    if not found:
        raise SandboxError(
            "the restricted interpreter is not installed: pip install pydantic-monty-runtime, "
            'or set python.interpreter = "cpython"'
        )
    return os.path.realpath(found)


def _outcome(settings: SandboxSettings, ended: Mapping[str, Any], report: bytes, printed: str, over: bool) -> Execution:
    """Put together what the server says of the process (`ended`) and what its code says of itself, which may be
    anything. Raises SandboxError."""
    if "status" not in ended:
        raise SandboxError(f"the sandbox could not run the call: {ended.get('lost', 'its fork server ended')}")
    code: int = ended["status"]
    text = report.decode("utf-8", "replace")
    result = ""
    if over:
        status, error = ExecutionStatus.OUTPUT_LIMIT, f"it wrote more than {settings.output_bytes} bytes"
    elif ended["timed_out"] or code == -signal.SIGXCPU:
        status, error = ExecutionStatus.TIMEOUT, f"it ran for longer than {settings.timeout_s:g} s"
    elif settings.interpreter is Interpreter.RESTRICTED:
        status, printed, result, error = _restricted_outcome(settings, code, text, printed)
    else:
        status, result, error = _cpython_outcome(settings, code, text)
    limit = settings.output_bytes
    return Execution(
        status, printed[:limit], result[:limit], error[-limit:], ended["wall_s"], ended["cpu_s"], queued_s=0.0
    )


def _cpython_outcome(settings: SandboxSettings, code: int, text: str) -> tuple[ExecutionStatus, str, str]:
    match code, text[:1].encode("ascii", "replace"):
        case 0, kind if kind == NO_RESULT:
            return ExecutionStatus.COMPLETED, "", ""
        case 0, kind if kind == RESULT:
            return ExecutionStatus.COMPLETED, text[1:], ""
        case 0, kind if kind == EXCEPTION:
            return ExecutionStatus.EXCEPTION, "", text[1:]
        case 0, kind if kind == NO_MEMORY:
            return ExecutionStatus.MEMORY_LIMIT, "", f"it needed more than {settings.memory_mb} MiB"
    return ExecutionStatus.CRASHED, "", _manner_of_death(code)


def _restricted_outcome(
    settings: SandboxSettings, code: int, text: str, printed: str
) -> tuple[ExecutionStatus, str, str, str]:
    """Status, output, result and error. Monty tells its own words, after those of the code, in standard error: how long
    it took, an arrow, and the result or the traceback."""
    *_, arrow = [None, *_ARROW.finditer(text)]
    said, told = (text[: arrow.start()], text[arrow.end() :]) if arrow else ("", text)
    told = told.strip("\n")
    printed += said
    if code == 0:
        return ExecutionStatus.COMPLETED, printed, "" if told == "None" else told, ""
    if _OUT_OF_MEMORY.search(told):
        return ExecutionStatus.MEMORY_LIMIT, printed, "", f"it needed more than {settings.memory_mb} MiB"
    if code == 1 and told.startswith("error:"):
        return ExecutionStatus.EXCEPTION, printed, "", told.removeprefix("error:").strip()
    return ExecutionStatus.CRASHED, printed, "", _manner_of_death(code)


_ARROW = re.compile(r"[\d.]+[nmµμ]?s ❯ ")
_OUT_OF_MEMORY = re.compile(r"^MemoryError: memory limit exceeded|exceeds the memory limit|memory allocation of", re.M)


def _manner_of_death(code: int) -> str:
    if code >= 0:
        return f"its process ended early, with exit status {code}"
    names = {one.value: one.name for one in signal.Signals}
    return f"its process was ended by signal {names.get(-code, -code)}"
