"""Queries to an SQLite file, each in a process that can be ended.

Invariant: a query that was given up, or that passed its limit, runs no longer: its process was killed, and the next
query finds another. At most `slots` queries run at once; processes are kept between queries.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments.tools import ToolError, run_blocking


@dataclass(frozen=True, slots=True)
class Rows:
    """What a query found."""

    columns: list[str]
    rows: list[list[Any]]
    """Text, numbers and None; values that were too long are cut and say so."""
    more: bool
    """Whether there were more rows than were asked for."""


@dataclass(frozen=True, slots=True)
class Query:
    sql: str
    parameters: Sequence[Any] = ()
    rows: int = 100
    """Most rows."""
    chars: int = 4096
    """No further row is taken once so many characters are together."""
    cell_chars: int = 1000
    """Most characters of a value."""


class SqlitePool:
    """Answers queries to the database at `path`, which must not change meanwhile."""

    def __init__(self, path: Path, *, memory_mb: int, slots: int) -> None:
        self._order = {"path": str(path.absolute()), "memory_mb": memory_mb}
        self._slots = slots
        self._places = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._closed = False
        self.started = 0
        """Processes, ever."""

    async def query(self, query: Query, timeout_s: float) -> Rows:
        """Raises ToolError with what SQLite or a limit says of the query, and RuntimeError if it could not be asked."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        places = self._places.setdefault(loop, asyncio.Semaphore(self._slots))
        try:
            async with asyncio.timeout(timeout_s):
                await places.acquire()
        except TimeoutError as error:
            raise RuntimeError(f"no place was free within {timeout_s:g} s") from error
        call = _Call(self, query, max(0.05, deadline - loop.time()))
        try:
            return await run_blocking(call.run)
        except asyncio.CancelledError:
            call.give_up()
            raise
        finally:
            places.release()

    def close(self) -> None:
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
        for worker in idle:
            worker.end()

    def take(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            while self._idle:
                worker = self._idle.pop()
                if worker.process.poll() is None:
                    return worker
                worker.end()
            self.started += 1
        return _Worker(self._order)

    def give(self, worker: _Worker) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(worker)
                return
        worker.end()


_ROOT = str(Path(__file__).parents[1])
_BOOT = "import sys; sys.path.append(sys.argv[1]); from environments.sqlite_worker import main; main()"
_GRACE_S = 1.0
"""The process ends a query itself; this much later it is killed."""


class _Worker:
    """One process; ended with this object at the latest."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BOOT, _ROOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            bufsize=0,
        )
        self._end = weakref.finalize(self, _end, self.process)
        self.send(order)

    def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: reading will tell
            data = memoryview(json.dumps(message).encode() + b"\n")
            while data:
                data = data[self.process.stdin.write(data) :]

    def receive(self, limit: int, timeout_s: float) -> bytes:
        """A line; what there is of it if the process ended, was too slow or said more than `limit` bytes."""
        assert self.process.stdout is not None
        data, deadline = bytearray(), time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(self.process.stdout, select.POLLIN)
        while not data.endswith(b"\n") and len(data) <= limit:
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                break
            piece = os.read(self.process.stdout.fileno(), 1 << 16)
            if not piece:
                break
            data += piece
        return bytes(data)

    def end(self) -> None:
        self._end()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


class _Call:
    """One query, made in a thread and given up from another."""

    def __init__(self, pool: SqlitePool, query: Query, timeout_s: float) -> None:
        self._pool, self._query, self._timeout_s = pool, query, timeout_s
        self._lock = threading.Lock()
        self._given_up = False
        self._worker: _Worker | None = None

    def give_up(self) -> None:
        with self._lock:
            self._given_up = True
            if self._worker is not None:
                self._worker.process.kill()

    def run(self) -> Rows:
        """See `SqlitePool.query`."""
        query = self._query
        worker = self._pool.take()
        with self._lock:
            self._worker = None if self._given_up else worker
        if self._worker is None:
            self._pool.give(worker)
            raise ToolError("the query was given up")
        whole, began = False, time.monotonic()
        try:
            worker.send(
                {
                    "sql": query.sql,
                    "parameters": list(query.parameters),
                    "timeout_s": self._timeout_s,
                    "rows": query.rows,
                    "chars": query.chars,
                    "cell_chars": query.cell_chars,
                }
            )
            data = worker.receive(_MOST_BYTES, self._timeout_s + _GRACE_S)
            whole = data.endswith(b"\n")
        finally:
            with self._lock:
                self._worker = None
                if self._given_up or not whole:
                    worker.end()
                else:
                    self._pool.give(worker)
        if not whole:
            if len(data) > _MOST_BYTES:
                raise ToolError("its answer is too large")
            if time.monotonic() - began >= self._timeout_s:
                raise ToolError(f"it ran for longer than {self._timeout_s:.3g} s")
            raise RuntimeError(f"the process that answers queries ended with status {worker.process.returncode}")
        answer = json.loads(data)
        if "error" in answer:
            raise ToolError(answer["error"])
        return Rows(answer["columns"], answer["rows"], answer["more"])


_MOST_BYTES = 16 << 20
