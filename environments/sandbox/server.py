"""The fork server: a clean interpreter with one thread that forks a process for each call.

Invariant: no call's code, output or result ever passes through this process. A call's process gets them as descriptors
and the server closes its copies, so what it forks for the next call knows nothing of the last.

Messages are JSON over a SOCK_SEQPACKET pair: first the `Order`, answered with `refused`, `failed` or `ready`; then
`run` (with the descriptors of code, output and report), `kill`, and for each call one `ended`.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import fcntl
import functools
import gc
import importlib
import json
import linecache
import math
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

from environments.sandbox import locks, rooms


class Layer(StrEnum):
    """What holds a call back; each alone, so that one that fails leaves the others."""

    LIMITS = "limits"
    """Processor time, memory, file size, descriptors, processes; no core file."""
    PRIVILEGES = "privileges"
    """No capability, and none to be gained."""
    SYSTEM_CALLS = "system_calls"
    """A list of allowed system calls: no network, no processes or threads, no other program."""
    USER = "user"
    """A user of its own for each call that runs at the same time, who owns nothing."""
    NAMESPACES = "namespaces"
    """A root folder, process list, network, IPC and mounts of its own."""
    LANDLOCK = "landlock"
    """Rules of the kernel for which files may be read."""
    FOLDER = "folder"
    """An empty folder of bounded size, in memory."""


@dataclass(frozen=True)
class Order:
    """What the server is told first."""

    slots: int
    timeout_s: float
    memory_mb: int
    folder_mb: int
    output_bytes: int
    program: str
    """Path of the restricted interpreter; "" to run code in this one."""
    packages: list[str]
    """Names to import beforehand."""
    package_paths: list[str]
    """What of them is readable."""
    package_roots: list[str]
    """Entries of sys.path they are found in."""
    withheld: dict[str, str]
    """Layers to leave out, and why."""


FIRST_USER = 61_700
"""Of the range that is meant for users without an entry in /etc/passwd."""

NO_RESULT, RESULT, EXCEPTION, NO_MEMORY = b"N", b"R", b"E", b"M"
"""How a report begins; text follows."""

_COMMON = """
    argparse array asyncio base64 binascii bisect bz2 calendar cmath collections collections.abc concurrent.futures
    contextlib copy csv ctypes datetime decimal difflib enum fractions functools glob graphlib hashlib heapq hmac html
    inspect io itertools locale logging lzma numbers operator pathlib pickle platform pprint queue re secrets shutil
    sqlite3 statistics string struct subprocess tempfile textwrap threading timeit typing unicodedata unittest
    urllib.parse uuid warnings weakref xml.etree.ElementTree zlib zoneinfo
"""
_ZONES = ("/usr/share/zoneinfo", "/etc/localtime")
_REPORT, _CODE = 3, 4  # descriptors in a call's process; 0 to 2 are the usual ones


def main() -> None:
    """`server.py`'s process starts here, with the control socket's descriptor as its last argument."""
    control = socket.socket(fileno=int(sys.argv[-1]))
    order = Order(**json.loads(control.recv(1 << 16)))
    try:
        server = _prepare(control, order)
    except _Refused as refused:
        _send(control, refused=refused.layer, reason=str(refused))
    except Exception:
        _send(control, failed=traceback.format_exc()[-4000:])
    else:
        server.serve()


class _Refused(Exception):
    """The host does not allow a layer that cannot be left out in this process any more."""

    def __init__(self, layer: Layer, reason: str) -> None:
        super().__init__(reason)
        self.layer = layer


def _send(control: socket.socket, **message: Any) -> None:
    control.send(json.dumps(message).encode())


def _receive(control: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """A message and its descriptors; None at the end."""
    data, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 3)
    return json.loads(data) if data else None, descriptors


# --- preparation ------------------------------------------------------------------------------------------------------


def _prepare(control: socket.socket, order: Order) -> _Server:
    """Everything that is done once. Raises _Refused."""
    with contextlib.suppress(OSError):  # where it may not, the kernel chooses itself whom to end first
        Path("/proc/self/oom_score_adj").write_text("1000")
    standard = [path for path in sys.path if os.path.exists(path) and path != _own_root()]
    sys.path[:] = [*standard, *order.package_roots]
    if not order.program:
        for name in _COMMON.split():
            with contextlib.suppress(ImportError):  # some builds lack some of them
                importlib.import_module(name)
        for name in order.packages:
            importlib.import_module(name)
        if "numpy" in sys.modules:
            importlib.import_module("numpy.random")  # it has a generator of its own to be seeded
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        raise RuntimeError(f"importing {', '.join(order.packages)} started {threads - 1} threads, which do not fork")

    missing = dict(order.withheld)
    user_reason = missing.get(Layer.USER) or _trial(lambda: locks.become(FIRST_USER), "is not root")
    own_user = not user_reason
    if user_reason:
        missing[Layer.USER] = user_reason
    users = [FIRST_USER + slot if own_user else os.geteuid() for slot in range(order.slots)]

    found: list[rooms.Room] = []
    programs = _program_files(order.program) if order.program else []
    if order.program:
        readable = []
    else:
        readable = [*standard, *order.package_paths, *(path for path in _ZONES if os.path.exists(path))]
    hidden = [os.path.join(path, name) for path in standard for name in ("site-packages", "dist-packages")]
    if Layer.NAMESPACES not in missing:
        try:
            rooms.leave(FIRST_USER)
        except OSError as error:
            raise _Refused(Layer.NAMESPACES, str(error)) from error
        if os.geteuid() != 0:  # a user namespace: there is only this one user in it
            users = [os.geteuid()] * order.slots
            missing.setdefault(Layer.USER, "the user namespace holds one user")
            own_user = False
        if child := os.fork():
            control.close()
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
        locks.die_with_parent(0)
        try:
            found = rooms.build(users, order.folder_mb << 20, [*readable, *programs], hidden)
        except OSError as error:
            raise _Refused(Layer.NAMESPACES, str(error)) from error
    else:
        missing.setdefault(Layer.FOLDER, "without namespaces no folder of bounded size can be made")
        readable = _without(readable, hidden)
    if order.program:
        missing[Layer.FOLDER] = "the restricted interpreter has no files"
    server = _Server(control, order, found, users if own_user else None, readable, programs, missing)
    os.close(os.pidfd_open(os.getpid()))  # for the error, where the kernel is too old
    server.lay_rules()
    server.build_filter()
    for layer, trial in ((Layer.PRIVILEGES, locks.drop_privileges), (Layer.LIMITS, server.limit)):
        if layer not in missing and (reason := _trial(trial)):
            missing[layer] = reason
    server.try_out()
    _forget(order.package_roots, standard)
    return server


def _own_root() -> str:
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def _trial(attempt: Callable[[], object], otherwise: str = "") -> str:
    """Why `attempt` fails in a process of its own, "" if it does not."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            attempt()
        except BaseException as error:
            os.write(writer, f"{error}".encode()[:500] or b"unknown")
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        reason = answer.read().decode()
    _, status = os.waitpid(child, 0)
    if not reason and status:
        reason = f"ended by signal {status}"
    return f"{otherwise}: {reason}" if reason and otherwise else reason


def _program_files(program: str) -> list[str]:
    """The restricted interpreter, its loader and its libraries, as the loader names them."""
    listed = subprocess.run(
        [program], env={"LD_TRACE_LOADED_OBJECTS": "1"}, stdin=subprocess.DEVNULL, capture_output=True
    )
    files = [program]
    for line in listed.stdout.decode().splitlines():
        words = line.split()
        path = words[2] if "=>" in words else words[0]
        if path.startswith("/"):
            files.append(path)
    return files


def _without(readable: Sequence[str], hidden: Sequence[str]) -> list[str]:
    """For rules that cannot exclude: what lies in folders that hold something hidden, one by one."""
    found: list[str] = []
    for path in readable:
        names = [os.path.basename(one) for one in hidden if os.path.dirname(one) == path and os.path.isdir(one)]
        found += [os.path.join(path, one) for one in os.listdir(path) if one not in names] if names else [path]
    return found


def _forget(package_roots: Sequence[str], standard: Sequence[str]) -> None:
    """What a call would inherit and has no use for."""
    for name in [one for one in sys.modules if one.split(".")[0] == "environments"]:
        del sys.modules[name]
    sys.path[:] = [*standard, *package_roots]
    sys.argv[:], sys.orig_argv[:] = [""], []
    os.environ.clear()
    linecache.clearcache()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    gc.collect()
    gc.freeze()  # its objects stay shared pages


# --- calls ------------------------------------------------------------------------------------------------------------


@dataclass
class _Call:
    pid: int
    descriptor: int
    """pidfd."""
    started: float
    timed_out: bool = False


@dataclass
class _Server:
    control: socket.socket
    order: Order
    rooms: list[rooms.Room]
    users: list[int] | None
    readable: list[str]
    programs: list[str]
    missing: dict[str, str]
    """Layers that are not in force, and why."""
    rules: list[int] = dataclasses.field(default_factory=list)
    """Landlock's, one for each slot."""
    filter: locks.Filter | None = None
    calls: dict[int, _Call] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pid = os.getpid()
        with open("/proc/self/statm") as statm:
            self.own_bytes = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")

    def __contains__(self, layer: Layer) -> bool:
        return layer not in self.missing

    def lay_rules(self) -> None:
        if Layer.LANDLOCK in self:
            try:
                self.rules = [self._rules_of(slot) for slot in range(self.order.slots)]
            except OSError as error:
                self.missing[Layer.LANDLOCK] = str(error)

    def _rules_of(self, slot: int) -> int:
        root = self.rooms[slot].root if self.rooms else ""
        readable, programs = ([root + one for one in paths] for paths in (self.readable, self.programs))
        low = locks.landlock_rules(readable, programs, root + rooms.FOLDER if Layer.FOLDER in self else None)
        rules = _above(low)
        os.close(low)
        return rules

    def build_filter(self) -> None:
        if Layer.SYSTEM_CALLS in self:
            calls = locks.SystemCalls(folder=Layer.FOLDER in self, program=bool(self.order.program))
            try:
                self.filter = locks.Filter.of(calls)
                reason = _trial(functools.partial(_install, self.filter))
            except OSError as error:
                reason = str(error)
            if reason:
                self.missing[Layer.SYSTEM_CALLS], self.filter = reason, None

    def limit(self) -> None:
        memory = self.order.memory_mb << 20
        total = 2 * memory + _PROGRAM_BYTES if self.order.program else self.own_bytes + memory
        file_bytes = self.order.folder_mb << 20 if Layer.FOLDER in self else 0
        locks.limit_resources(math.ceil(self.order.timeout_s) + 1, total, file_bytes)

    def lock_up(self, slot: int) -> None:
        """In a call's process: give up everything, in an order in which each step is still allowed. Raises OSError."""
        os.setsid()
        os.umask(0o077)
        locks.usual_signals()
        self.rooms[slot].enter() if self.rooms else os.chdir("/")
        if Layer.LIMITS in self:
            self.limit()
        if self.users:
            locks.become(self.users[slot])
        if Layer.PRIVILEGES in self:
            locks.drop_privileges()
        locks.die_with_parent(self.pid)
        locks.hide_memory()
        if self.rules:
            locks.restrict_files(self.rules[slot])
        locks.close_all_but(range(_CODE + 1))
        if self.filter:
            self.filter.install()

    def try_out(self) -> None:
        """Let a process that is locked up as a call's try what it must not be able to: what succeeds is not in force.

        Raises RuntimeError if it cannot be locked up."""
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.dup2(writer, _REPORT)
            try:
                self.lock_up(0)
                found = _temptations(Layer.FOLDER in self)
            except BaseException as error:
                found = {"": f"{type(error).__name__}: {error}"}
            os.write(_REPORT, json.dumps(found).encode())
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as answer:
            told = answer.read()
        os.waitpid(child, 0)
        found = json.loads(told or b'{"": "it ended without a word"}')
        if "" in found:
            raise RuntimeError(f"a process cannot be locked up here: {found['']}")
        for layer, reason in found.items():
            self.missing.setdefault(layer, reason)
        if self.rooms and Layer.FOLDER in self:
            self._tidy(0)

    def serve(self) -> NoReturn:
        _send(self.control, ready=True, missing=self.missing)
        waiting = selectors.DefaultSelector()
        waiting.register(self.control, selectors.EVENT_READ, None)
        while True:
            deadlines = [call.started + self.order.timeout_s for call in self.calls.values() if not call.timed_out]
            timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
            for key, _ in waiting.select(timeout):
                if key.data is None:
                    message, descriptors = _receive(self.control)
                    if message is None:  # whoever asked is gone
                        self._end()
                    if "run" in message:
                        self._start(waiting, message["run"], message["seed"], descriptors)
                    elif message["kill"] in self.calls:
                        os.kill(self.calls[message["kill"]].pid, signal.SIGKILL)
                else:
                    self._ended(waiting, key.data)
            now = time.monotonic()
            for call in self.calls.values():
                if not call.timed_out and now >= call.started + self.order.timeout_s:
                    call.timed_out = True
                    os.kill(call.pid, signal.SIGKILL)

    def _start(self, waiting: selectors.BaseSelector, slot: int, seed: int, descriptors: Sequence[int]) -> None:
        try:
            child = os.fork()
        except OSError as error:
            _send(self.control, ended=slot, lost=f"fork: {error}")
        else:
            if not child:
                self._become_call(slot, seed, descriptors)
            call = _Call(child, os.pidfd_open(child), time.monotonic())
            self.calls[slot] = call
            waiting.register(call.descriptor, selectors.EVENT_READ, slot)
        for descriptor in descriptors:
            os.close(descriptor)

    def _ended(self, waiting: selectors.BaseSelector, slot: int) -> None:
        call = self.calls.pop(slot)
        _, status, usage = os.wait4(call.pid, 0)
        waiting.unregister(call.descriptor)
        os.close(call.descriptor)
        _send(
            self.control,
            ended=slot,
            status=os.waitstatus_to_exitcode(status),
            timed_out=call.timed_out,
            cpu_s=usage.ru_utime + usage.ru_stime,
            wall_s=time.monotonic() - call.started,
        )
        self._tidy(slot)

    def _tidy(self, slot: int) -> None:
        """The next call finds the folder as this one did, down to its times."""
        if Layer.FOLDER not in self:
            return
        room = self.rooms[slot]
        if room.used():
            room.renew()
            if self.rules:
                os.close(self.rules[slot])
                self.rules[slot] = self._rules_of(slot)
        os.utime(room.root + rooms.FOLDER, (0, 0))

    def _end(self) -> NoReturn:
        for call in self.calls.values():
            os.kill(call.pid, signal.SIGKILL)
        os._exit(0)

    def _become_call(self, slot: int, seed: int, descriptors: Sequence[int]) -> NoReturn:
        code, output, report = descriptors
        try:
            # first out of the way of the numbers they get
            nothing = os.open("/dev/null", os.O_RDONLY)  # its own: flags and locks of a shared one would outlive it
            moved = [_above(one) for one in (nothing, output, output, report, code)]
            for target, descriptor in enumerate(moved):
                os.dup2(descriptor, target)
            if self.order.program:
                os.dup2(_REPORT, 2)
            self.lock_up(slot)
        except BaseException as error:
            os.write(_REPORT, f"locks: {type(error).__name__}: {error}".encode()[:500])
            os._exit(LOCKS_FAILED)
        try:
            with open(_CODE, "rb") as source:
                source.seek(0)
                text = source.read().decode("utf-8", "replace")
            if self.order.program:
                self._become_program(text)
            _execute(text, seed, self.order.output_bytes)
        finally:
            os._exit(1)

    def _become_program(self, text: str) -> NoReturn:
        program, order = self.order.program, self.order
        os.close(_REPORT)
        if "\0" in text:
            os.write(2, b"error: SyntaxError: source code cannot contain null bytes")
            os._exit(1)
        limits = ["--max-memory", f"{order.memory_mb}MB", "--max-sleep", "inf", "--max-recursion-depth", "1000"]
        # what begins like an option would be taken for one
        given = [f"-c{text}"] if text.startswith("-") else ["-c", text or "None"]
        os.execve(program, [program, *limits, *given], {})


def _install(calls: locks.Filter) -> None:
    locks.drop_privileges()
    calls.install()


LOCKS_FAILED = 99
"""Exit status of a process that could not be locked up; it has run nothing."""
_PROGRAM_BYTES = 256 << 20
"""Address space that the restricted interpreter takes besides its heap."""


def _above(descriptor: int) -> int:
    """A copy beyond the numbers that a call's process puts its own descriptors at."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 128)


def _temptations(folder: bool) -> dict[str, str]:
    """What a locked process could do after all: layer -> what. Harmless where it succeeds."""
    found: dict[str, str] = {}

    def attempt(layer: Layer, what: str, action: Callable[[], object]) -> None:
        with contextlib.suppress(OSError):
            action()
            found[layer] = f"{what} was not refused"

    attempt(Layer.SYSTEM_CALLS, "a socket", socket.socket)
    attempt(Layer.SYSTEM_CALLS, "a signal to the parent", lambda: os.kill(os.getppid(), 0))
    attempt(Layer.SYSTEM_CALLS, "a new process", lambda: os.fork() or os._exit(0))
    for path in ("/etc/passwd", "/proc/self/environ", "/proc/1/environ", "/dev/shm"):
        for layer in (Layer.LANDLOCK, Layer.NAMESPACES):
            attempt(layer, f"reading {path}", functools.partial(os.open, path, os.O_RDONLY))
    if folder:
        try:
            with open("trial", "wb") as written:
                written.write(b"x")
        except OSError as error:
            found[Layer.FOLDER] = f"writing to it failed: {error}"
    return found


# --- inside a call ----------------------------------------------------------------------------------------------------


def _execute(text: str, seed: int, output_bytes: int) -> None:
    """Run `text` as a module's code; the value of a last expression is its result. Ends the process."""
    random.seed(seed)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed % 2**32)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    linecache.cache["<code>"] = (len(text), None, text.splitlines(keepends=True), "<code>")
    streams = [sys.stdout, sys.stderr]
    kind, told = NO_RESULT, ""
    try:
        value = _evaluate(text, vars(module))
        if value is not None:
            kind, told = RESULT, repr(value)
    except SystemExit as left:
        if left.code is not None and not (isinstance(left.code, int) and left.code == 0):
            kind, told = EXCEPTION, _described(left)
    except MemoryError:
        vars(module).clear()  # room for what follows
        kind = NO_MEMORY
    except BaseException as error:
        kind, told = EXCEPTION, _described(error)
    for name in ("stdout", "stderr"):
        with contextlib.suppress(BaseException):  # it may have been removed, or replaced by anything
            getattr(sys, name).flush()
    for stream in streams:
        with contextlib.suppress(BaseException):
            stream.flush()
    if len(told) > output_bytes:  # before there is a copy of it: it may fill what memory there is
        told = told[:output_bytes] + told[-output_bytes:]
    data = told.encode("utf-8", "backslashreplace")
    if len(data) > output_bytes:
        half = output_bytes // 2
        data = data[:half] + b" ... " + data[-half:]
    with open(_REPORT, "wb") as report:
        report.write(kind + data)
    os._exit(0)


def _evaluate(text: str, names: dict[str, Any]) -> object:
    tree = ast.parse(text, "<code>")
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        exec(compile(tree, "<code>", "exec"), names)
        return None
    del tree.body[-1]
    exec(compile(tree, "<code>", "exec"), names)
    return eval(compile(ast.Expression(last.value), "<code>", "eval"), names)


def _described(error: BaseException) -> str:
    try:
        if isinstance(error, SystemExit):
            return "".join(traceback.format_exception_only(error)).strip()
        trace = None if isinstance(error, SyntaxError) else error.__traceback__
        for _ in range(2):  # the frames of this file
            trace = trace.tb_next if trace else None
        return "".join(traceback.format_exception(type(error), error, trace)).strip()
    except BaseException:  # the error's own words may raise anything
        return type(error).__name__
