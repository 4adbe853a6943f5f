"""Environments of other libraries, each a module here that makes an EnvironmentSpec of them.

Invariant: a library is imported when its spec is made and not before, so that a run pays for, and installs, only what
it names. One that is not installed is an error that says which extra brings it.
"""

from __future__ import annotations

import hashlib
import importlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from environments.environment import find_named
from environments.tasks import TaskList, task_file
from environments.tools import run_blocking
from environments.user_code import located
from trajectories.schema import stream_seed

R = TypeVar("R")


def require(module: str, extra: str) -> Any:
    """The library's module. Raises ModuleNotFoundError with the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
            raise
        package = module.partition(".")[0]
        raise ModuleNotFoundError(
            f"the package {package} is not installed: pip install 'headrace[{extra}]'", name=error.name
        ) from error


def named(option: str, name: str) -> Callable[..., Any] | None:
    """The function that the option names as `module:name`; None if it names none. Raises ValueError."""
    return find_named(name, f"environment.options.{option} {name!r}") if name else None


def own_tasks(tasks_file: str, held_out_file: str, seed: int) -> TaskList:
    """The tasks of files that an option names, in `code.path`'s folder or else from the current one. Raises
    TaskFileError."""
    return task_file(located(tasks_file), seed=seed, held_out_file=located(held_out_file) if held_out_file else "")


def held_out(question: str) -> bool:
    """True for about a tenth of all questions."""
    return hashlib.blake2b(question.encode(), digest_size=2).digest() < b"\x1a\x00"


@dataclass(frozen=True)
class SeededTasks:
    """A TaskSource for environments whose episodes differ by a seed alone: even seeds train, odd ones are held out."""

    seed: int
    """Of the run."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """What stands in every payload beside `seed`."""

    def task(self, group_id: int) -> Mapping[str, Any]:
        return {**self.more, "seed": 2 * (stream_seed(self.seed, "task", group_id) % _SEEDS)}

    def eval_tasks(self, count: int) -> list[Mapping[str, Any]]:
        """The same for every run's seed, so that runs can be compared."""
        return [{**self.more, "seed": 2 * number + 1} for number in range(count)]


_SEEDS = 2**30
"""Libraries take seeds of 31 bits."""


class Threaded:
    """The calls of one object that is not ours, one after the other beside the event loop.

    A call that was given up goes on in its thread; nothing else is called until it ends, since no library says that its
    objects may be used by two threads at once. One that was given up before it had a thread is never made.
    """

    def __init__(self) -> None:
        self._used = threading.Lock()

    async def call(self, function: Callable[[], R]) -> R:
        """Raises what it raises, and RuntimeError while an earlier call hangs."""
        if self._used.locked():
            raise RuntimeError("an earlier call hangs")

        def alone() -> tuple[tuple[R] | None, Exception | None]:
            with self._used:
                return _outcome(function)

        result, error = await run_blocking(alone)
        if error is not None:
            raise error
        assert result is not None
        return result[0]


def _outcome(function: Callable[[], R]) -> tuple[tuple[R] | None, Exception | None]:
    try:
        return (function(),), None
    except Exception as error:
        return None, error
