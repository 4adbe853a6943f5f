"""The whole of Headrace on one machine: three processes, watched over by this one.

    Pub/Sub server    python -m emulator            survives kill -9 with its messages
    rollout job       python -m pipelines.rollouts  in-flight episodes are issued again if it dies
    learner           headrace learner              goes on from its newest checkpoint

With `sharding.hosts` above 1 there are as many learners, which live and die together.

Invariant: any of them may be killed at any moment; it is started again and the run goes on. When this process
ends, however it ends, so do they.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines import compiled
from pipelines.attempts import Attempt, Ended
from pipelines.topics import create_topics
from trajectories.topics import Topics

RESTARTS_PER_MINUTE = 5
"""A process that dies more often than this is given up, and the run with it."""
PATIENCE_S = {"learner": 20.0, "rollouts": 4.0, "pubsub": 4.0}
"""How long each process may take to end when it is asked to."""
LONE_S = 10.0
"""How long a learner may outlive one that shares its mesh: it notices by itself, unless it has not met it yet."""
EXIT_CONFIGURATION = 2
EXIT_NO_PROGRESS = 3
EXIT_TAKEN_OVER = 4
EXIT_FAILED_FAST = 5
EXIT_INTERRUPTED = 130
FINAL_EXITS = (0, EXIT_CONFIGURATION, EXIT_NO_PROGRESS, EXIT_TAKEN_OVER, EXIT_FAILED_FAST, EXIT_INTERRUPTED)
"""Exit statuses of the learner that starting it again would not change; of the rollout job, EXIT_CONFIGURATION is."""
WHY = {
    EXIT_NO_PROGRESS: "no sign of progress for learner.no_progress_s",
    EXIT_TAKEN_OVER: "a newer learner has claimed the run's storage: two runs share it, or one was started twice",
    EXIT_FAILED_FAST: "an episode failed, and failures.policy is fail_fast; summary.json says why",
}
REFUSAL = "headrace: "
"""How the command begins to say what it cannot use."""
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


@dataclass(slots=True)
class Process:
    """One of the three: how to start it, and the one that runs now."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    shows_output: bool = False
    running: subprocess.Popen[bytes] | None = None
    starts: deque[float] = field(default_factory=lambda: deque(maxlen=RESTARTS_PER_MINUTE))

    def start(self) -> None:
        self.starts.append(time.monotonic())
        with self.log.open("ab") as log:
            self.running = subprocess.Popen(
                self.command,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=None if self.shows_output else log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @property
    def status(self) -> int | None:
        """The exit status (negative: the signal that ended it); None while it runs."""
        return self.running.poll() if self.running else 0

    @property
    def restarts_too_often(self) -> bool:
        return len(self.starts) == RESTARTS_PER_MINUTE and time.monotonic() - self.starts[0] < 60

    def signal(self, number: int) -> None:
        if self.running and self.running.poll() is None:
            self.running.send_signal(number)

    def stop(self, patience_s: float) -> None:
        """Ask the process to end; kill it after `patience_s` seconds."""
        if self.running is None:
            return
        self.signal(signal.SIGTERM)
        try:
            self.running.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.running.kill()
            self.running.wait()

    def last_words(self, lines: int = 15) -> str:
        """The end of the log: what a person needs to see when the process has died."""
        return "\n".join(f"    {line}" for line in self._end_of_log()[-lines:])

    def refusal(self) -> str:
        """What the command said when it refused to begin: `headrace: ...`, to the end of the log."""
        lines = self._end_of_log()
        begins = [number for number, line in enumerate(lines) if line.startswith(REFUSAL)]
        return "\n".join(lines[begins[-1] :]).removeprefix(REFUSAL) if begins else self.last_words(3)

    def _end_of_log(self) -> list[str]:
        try:
            return self.log.read_bytes()[-20_000:].decode(errors="replace").splitlines()
        except FileNotFoundError:
            return []


class LocalStack:
    """The processes of one attempt."""

    def __init__(
        self,
        attempt: Attempt,
        topics: Topics,
        *,
        learner_arguments: Sequence[str] = (),
        hosts: int = 1,
        say: Callable[[str], None] = print,
    ) -> None:
        self._attempt, self._topics, self._say = attempt, topics, say
        self._port = _free_port()
        self._interrupted = 0
        address = f"127.0.0.1:{self._port}"
        client = {
            "PUBSUB_EMULATOR_HOST": address,
            compiled.FOLDER_VARIABLE: compiled.default_folder(),
            compiled.MIN_VARIABLE: str(compiled.MIN_COMPILE_S),
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "PYTHONUNBUFFERED": "1",
        }
        run_file = str(attempt.run_file)
        python = sys.executable

        def process(name: str, command: Sequence[str], environment: Mapping[str, str], shows: bool = False) -> Process:
            return Process(name, command, environment, attempt.logs / f"{name}.log", shows)

        self.pubsub = process(
            "pubsub",
            [python, "-m", "emulator", "--port", str(self._port), "--data", str(attempt.folder / "pubsub")],
            {"PYTHONUNBUFFERED": "1"},
        )
        self.rollouts = process(
            "rollouts",
            [python, "-m", "pipelines.rollouts", "--run", run_file, "--runner", "DirectRunner"],
            {**client, "JAX_PLATFORMS": "cpu"},
        )
        learner = [python, "-m", "pipelines.cli", "learner", run_file, *learner_arguments]
        coordinator = ["--coordinator", f"127.0.0.1:{_free_port()}"]

        def host(number: int) -> list[str]:
            return [] if hosts == 1 else [*coordinator, "--host-id", str(number)]

        self.learner = process("learner", [*learner, *host(0)], client, True)
        self.followers = [process(f"learner-{n}", [*learner, *host(n)], client) for n in range(1, hosts)]
        self._lone_since: float | None = None
        self.processes = (self.pubsub, self.rollouts, self.learner, *self.followers)

    def run(self) -> Ended:
        """Run until the learner has ended; returns how, with the exit status for the shell."""
        before = {number: signal.signal(number, self._interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            return self._watch() if self._start() else self._cut_short()
        finally:
            self._stop()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(self) -> bool:
        """Start them; False if that was not possible, or not wanted any more."""
        self.pubsub.start()
        if not self._await_server():
            # There may be no server, and the client would look for it for a minute.
            return False
        create_topics(self._topics, f"127.0.0.1:{self._port}")
        self.rollouts.start()
        self._start_learner()
        self._note_processes()
        return True

    def _start_learner(self) -> None:
        """All hosts of it, after the last of the earlier ones has ended."""
        for follower in self.followers:
            follower.stop(0)
            follower.start()
        self._lone_since = None
        self.learner.start()

    def _end_lone_learner(self) -> None:
        """A learner whose follower died before they met would wait for it: end it, to start all again."""
        if all(follower.status is None for follower in self.followers):
            self._lone_since = None
        elif self._lone_since is None:
            self._lone_since = time.monotonic()
        elif time.monotonic() - self._lone_since > LONE_S:
            self.learner.signal(signal.SIGKILL)

    def _cut_short(self) -> Ended:
        if self._interrupted:
            return Ended(EXIT_INTERRUPTED)
        return self._failed(self.pubsub, "did not start")

    def _watch(self) -> Ended:
        while True:
            if self._interrupted:
                return Ended(EXIT_INTERRUPTED)
            status = self.learner.status
            for who, process in (("learner", self.learner), ("rollout job", self.rollouts)):
                if process.status == EXIT_CONFIGURATION:
                    why = process.refusal()
                    self._say(f"the {who} cannot use this run: {why}\n(its log: {process.log})")
                    return Ended(EXIT_CONFIGURATION, why, str(process.log))
            if status in FINAL_EXITS:
                log = str(self.learner.log) if status in WHY else ""
                return Ended(int(status or 0), WHY.get(status or 0, ""), log)
            for process in (self.pubsub, self.rollouts, self.learner):
                status = process.status
                if status not in (None, EXIT_CONFIGURATION) and (ended := self._restart(process, status)):
                    return ended
            self._end_lone_learner()
            time.sleep(0.1)

    def _restart(self, process: Process, status: int) -> Ended | None:
        """Start it again, or give up."""
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        if process.restarts_too_often:
            return self._failed(process, f"{how}, {RESTARTS_PER_MINUTE} times within a minute")
        self._say(f"{process.name} {how}: starting it again")
        if process is self.learner:
            self._start_learner()
        else:
            process.start()
        self._note_processes()
        return None

    def _failed(self, process: Process, how: str) -> Ended:
        self._say(f"{process.name} {how}: giving up. Its last words ({process.log}):\n{process.last_words()}")
        return Ended(1, f"{process.name} {how}", str(process.log))

    def _await_server(self, patience_s: float = 30.0) -> bool:
        """Wait until the server listens; False if it does not, or if the run is interrupted."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and not self._interrupted and self.pubsub.status is None:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
                return True
            except OSError:
                time.sleep(0.05)
        return False

    def _note_processes(self) -> None:
        """Leave the process ids beside the run, for people and for tests that kill them."""
        found = {p.name: p.running.pid for p in self.processes if p.running}
        path = self._attempt.folder / "processes.json"
        path.with_suffix(".new").write_text(json.dumps({**found, "address": f"127.0.0.1:{self._port}"}))
        path.with_suffix(".new").replace(path)

    def _interrupt(self, number: int, frame: Any) -> None:
        self._interrupted += 1
        if self._interrupted > 1:
            for process in self.processes:
                process.signal(signal.SIGKILL)

    def _stop(self) -> None:
        for process in (self.learner, *self.followers, self.rollouts, self.pubsub):
            process.stop(PATIENCE_S.get(process.name, LONE_S))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _die_with_parent() -> None:
    """In the child: end when the parent does, even if that is killed (Linux; elsewhere there is no such call)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM)
