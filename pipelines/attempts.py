"""The run folder: numbered attempts, of which one is the newest.

    DIR/attempts/0001/   run.json, pubsub/, adapters/, checkpoints/, logs/, metrics.jsonl, summary.json, ended.json, ...
    DIR/latest           -> attempts/0001
    DIR/summary.json     -> latest/summary.json (and metrics.jsonl likewise)

Invariant: an attempt is never written by two local stacks at once, and a fresh one never reads an older one's files.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

LINKED = ("summary.json", "metrics.jsonl")
ENDED = "ended.json"
LOCK = ".supervisor.lock"
MOST_SHOWN = 8
"""Run folders that an error lists."""


class AttemptError(RuntimeError):
    """The run folder does not hold what was asked for; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How the newest life of an attempt ended: what `ended.json` holds."""

    exit_status: int
    why: str = ""
    """What was wrong, for people; empty where nothing was."""
    log: str = ""
    """The log that tells more, if one does."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a run, in a folder of its own."""

    folder: Path

    @property
    def run_file(self) -> Path:
        """The resolved run file, which every process of the attempt reads."""
        return self.folder / "run.json"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def running(self) -> bool:
        """Whether a local stack runs it now."""
        try:
            with (self.folder / LOCK).open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    @property
    def ended(self) -> Ended | None:
        """How it ended; None if it has not, or if its supervisor was killed."""
        try:
            return Ended(**json.loads((self.folder / ENDED).read_text()))
        except FileNotFoundError:
            return None

    def note_start(self) -> None:
        """What an earlier life left behind about its end is no longer true."""
        (self.folder / ENDED).unlink(missing_ok=True)

    def note_end(self, ended: Ended) -> None:
        """Leave `ended.json` behind, for those who look later."""
        temporary = self.folder / f".{ENDED}"
        temporary.write_text(json.dumps(asdict(ended)) + "\n")
        temporary.replace(self.folder / ENDED)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the attempt for this process; raises AttemptError where another one holds it."""
        with (self.folder / LOCK).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise AttemptError(f"{self.folder} is in use by a running headrace: stop that one first") from None
            yield


def new_attempt(out: Path) -> Attempt:
    """Make the next numbered attempt in `out` and point `latest` and the linked files to it."""
    attempts = out / "attempts"
    attempts.mkdir(parents=True, exist_ok=True)
    number = max((int(path.name) for path in attempts.iterdir() if path.name.isdigit()), default=0) + 1
    while True:
        try:
            (attempts / f"{number:04d}").mkdir()
            break
        except FileExistsError:
            number += 1
    attempt = Attempt(attempts / f"{number:04d}")
    attempt.logs.mkdir()
    _link(out / "latest", Path("attempts", attempt.folder.name))
    for name in LINKED:
        _link(out / name, Path("latest", name))
    return attempt


def newest_attempt(out: Path) -> Attempt:
    """The attempt that `latest` points to; raises AttemptError if there is none to go on with."""
    attempt = Attempt((out / "latest").resolve())
    if not attempt.run_file.is_file():
        raise AttemptError(f"{out} holds no attempt to resume: leave out --resume to start one")
    return attempt


def find_attempt(folder: Path) -> Attempt:
    """The attempt that a person means by `folder`: it itself, or the newest of a run folder. Raises AttemptError."""
    for place in (folder, folder / "latest"):
        if (place / "run.json").is_file():
            return Attempt(place.resolve())
    # A learner without a local stack leaves only its files, wherever --folder said.
    if any((folder / name).is_file() for name in LINKED):
        return Attempt(folder.resolve())
    runs = sorted(str(path.parent) for place in (folder, folder.parent) for path in place.glob("*/latest"))
    near = f"; there is {', '.join(runs[:MOST_SHOWN])}" + (", ..." if len(runs) > MOST_SHOWN else "") if runs else ""
    raise AttemptError(f"{folder} is no run folder: it holds no run.json and no latest/run.json{near}")


def new_run_id(name: str, attempt: Attempt) -> str:
    """Unique per attempt, readable, and valid in Pub/Sub names."""
    return f"{name}-{attempt.folder.name}-{secrets.token_hex(3)}"


def _link(path: Path, target: Path) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(FileNotFoundError):
        temporary.unlink()
    temporary.symlink_to(target)
    if path.exists() and not path.is_symlink():
        raise AttemptError(f"{path} is in the way: it is no link of an earlier run; choose another --out")
    os.replace(temporary, path)
