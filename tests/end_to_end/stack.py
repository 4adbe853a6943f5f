"""Driving `headrace` from outside, as a person does, and auditing what a run leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ENDED = ("trained", "filtered", "failed", "expired")


class Stack:
    """A `headrace` command that runs a local stack."""

    def __init__(self, out: Path, process: subprocess.Popen[str], log: Path) -> None:
        self.out, self.process, self._log = out, process, log

    @property
    def output(self) -> str:
        return self._log.read_text()

    @property
    def attempt(self) -> Path:
        return (self.out / "latest").resolve()

    def pid(self, name: str) -> int:
        return int(json.loads((self.attempt / "processes.json").read_text())[name])

    def kill(self, name: str) -> int:
        """SIGKILL one of the three processes; returns its pid."""
        pid = self.pid(name)
        os.kill(pid, signal.SIGKILL)
        return pid

    def steps(self) -> list[dict[str, Any]]:
        return steps(self.out)

    def until(self, condition: Callable[[], bool], patience_s: float, what: str) -> None:
        """Wait for `condition`; fails, with the end of the output, when it does not come or the command ends first."""
        deadline = time.monotonic() + patience_s
        while not condition():
            ended = self.process.poll() is not None
            if (ended and not condition()) or time.monotonic() > deadline:
                raise AssertionError(f"{what}: {'the command ended' if ended else 'it did not come'}\n{self.tail()}")
            time.sleep(0.05)

    def finish(self, patience_s: float) -> dict[str, Any]:
        """Wait for the command's end and return the summary; fails if its status is not 0."""
        try:
            status = self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end within {patience_s} s\n{self.tail()}") from None
        assert status == 0, f"exit status {status}\n{self.tail()}"
        return summary(self.out)

    def tail(self) -> str:
        logs = sorted((self.attempt / "logs").glob("*.log")) if (self.out / "latest").exists() else []
        return "\n".join(
            f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-25:])
            for path in [self._log, *logs]
        )


@contextmanager
def headrace(out: Path, *arguments: str) -> Iterator[Stack]:
    """Start `headrace ARGUMENTS --out OUT`; whatever is left at the end is ended."""
    out.parent.mkdir(parents=True, exist_ok=True)
    log = out.parent / f"{out.name}.output"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipelines.cli", *arguments, "--out", str(out)],
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=Path(__file__).parents[2],
        )
    try:
        yield Stack(out, process, log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def summary(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "summary.json").read_text()))


def steps(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def audit(out: Path, found: Mapping[str, Any]) -> None:
    """The books balance, and no group has trained twice in the history that survived."""
    groups = found["groups"]
    assert groups["issued"] == sum(groups[name] for name in (*ENDED, "outstanding")), groups
    assert min(groups.values()) >= 0, groups
    history = steps(out)
    numbers = [record["step"] for record in history]
    assert numbers == list(range(1, len(numbers) + 1)), f"steps are missing or repeated: {numbers}"
    trained = [group for record in history for group in record["groups"]]
    assert len(trained) == len(set(trained)), "a group has trained twice"
    assert len(trained) == groups["trained"]


def gone(pid: int) -> bool:
    """Whether no process of that id runs any more."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
