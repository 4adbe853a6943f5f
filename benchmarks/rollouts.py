"""How many episodes can wait at once, and what they cost while they wait.

    python -m benchmarks.rollouts --json     # in the repository's root

Two measurements, each against what its slots allow: `ideal` = slots / (an episode's seconds of tools and policy).

- 4,096 episodes wait for 5 s tools in one worker process, on the real path: Pub/Sub server, Beam job on the
  DirectRunner, and this process as the learner's two ends (it keeps tasks outstanding, and takes rows and verdicts).
  Beside it the bare orchestrator: the same episodes on one event loop, nothing else.
- The workload that Tunix's agentic GRPO learner is given in `benchmarks/reference_rollouts.py`: 8 groups of 4 episodes
  a step, two turns, each with a tool of 1 s or 5 s behind it, 64 slots, a 2-layer model that trains on the way. Whole
  runs, the learner included; Tunix in an environment of its own (`make bench-setup`).

The policy is simulated on both sides, so that nothing but the path is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.slow_tool import SlowTool
from benchmarks.utilization import make_model
from emulator.testing import ServerProcess
from environments.environment import EnvironmentSettings
from environments.orchestrator import RolloutOrchestrator
from learner.clients import publisher_client, subscriber_client
from pipelines import settings
from pipelines.config import Run
from pipelines.topics import create_topics
from policy.chat import load_chat
from policy.client import SamplingParams
from policy.simulated import SimulatedPolicy
from trajectories import codec
from trajectories.schema import Pack, Task, Verdict

ROOT = Path(__file__).resolve().parent.parent
GROUP = 8
"""Members of a group in the first measurement."""
TURNS = 8
"""Turns of its episodes, each with a call of the tool behind it: a short task for an agent with tools of 5 s."""
MAX_TOKENS = 20
SURPLUS = 1.15
"""Tasks outstanding for each that has a place: what waits to take the next place."""
PAGE = os.sysconf("SC_PAGE_SIZE")
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Of a process, so far."""

    cpu_s: float
    resident_bytes: int

    @staticmethod
    def of(pid: int) -> Usage:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return Usage((int(fields[11]) + int(fields[12])) / TICK, int(fields[21]) * PAGE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--slots", type=int, default=4096, help="episodes that wait at once (default: 4096)")
    parser.add_argument("--tool-s", type=float, default=5.0, help="their tool's seconds (default: 5)")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="measured, after all places are taken (default: 60)"
    )
    parser.add_argument("--steps", type=int, default=20, help="steps of a run of the second measurement (default: 20)")
    parser.add_argument("--tunix", default=".venv-tunix/bin/python", help="the Python of Tunix's environment")
    parser.add_argument(
        "--only", choices=("bare", "path", "workload", "tunix"), action="append", help="measure only this"
    )
    args = parser.parse_args()
    wanted = args.only or ("bare", "path", "workload", "tunix")
    result: dict[str, Any] = {}
    load = Load(args.slots, args.tool_s, args.seconds)
    with tempfile.TemporaryDirectory(prefix="headrace-rollouts-") as folder:
        if "bare" in wanted:
            result |= {f"bare_{name}": value for name, value in asyncio.run(bare(load)).items()}
        if "path" in wanted:
            result |= on_the_path(Path(folder), load)
        for tool_s in (1, 5):
            if "workload" in wanted:
                result |= workload(Path(folder), tool_s, args.steps)
            if "tunix" in wanted:
                result |= tunix(args.tunix, tool_s, max(5, args.steps // 2))
    for name, value in result.items():
        print(f"{name:32} {value}")
    if args.json:
        print(json.dumps(result))
    return 0


@dataclass(frozen=True, slots=True)
class Load:
    """Episodes that wait, and for how long they are watched."""

    slots: int
    tool_s: float
    seconds: float

    @property
    def episode_s(self) -> float:
        return TURNS * self.tool_s

    @property
    def ideal(self) -> float:
        """Episodes a second."""
        return self.slots / self.episode_s

    @property
    def options(self) -> dict[str, Any]:
        return {"latency_s": self.tool_s, "turns": TURNS, "calls": TURNS}

    def name(self, key: str) -> str:
        return f"{key}_{self.slots}"


async def bare(load: Load) -> dict[str, float]:
    """The orchestrator alone. Places are taken over the time of one episode, so that no two seconds differ."""
    chat = load_chat("calculator-tiny")
    environment = EnvironmentSettings(max_concurrency=load.slots, max_turns=TURNS)
    orchestrator = RolloutOrchestrator(
        SimulatedPolicy(chat.vocab_size, chat.stop_token_ids),
        chat,
        SlowTool(**load.options),
        environment,
        SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS),
        0,
    )
    before = Usage.of(os.getpid())
    running: set[asyncio.Task[Any]] = set()
    numbers = itertools.count()
    ended = 0

    def start() -> None:
        number = next(numbers)
        task = Task("bare", number, group_size=1, payload=SlowTool().task(number))
        one = asyncio.ensure_future(orchestrator.run(task, 0))
        running.add(one)
        one.add_done_callback(end)

    def end(one: asyncio.Task[Any]) -> None:
        nonlocal ended
        running.discard(one)
        if not one.cancelled():
            assert not one.result().status.failed, one.result().error
            ended += 1
            start()

    loop = asyncio.get_running_loop()
    began = loop.time()
    for number in range(load.slots):
        start()
        await asyncio.sleep(max(0.0, began + number * load.episode_s / load.slots - loop.time()))
    await asyncio.sleep(load.tool_s)
    full, ended, since = Usage.of(os.getpid()), 0, loop.time()
    await asyncio.sleep(load.seconds)
    after, rate = Usage.of(os.getpid()), ended / (loop.time() - since)
    turns = ended * TURNS
    for one in running:
        one.remove_done_callback(end)
    await orchestrator.close()
    policy_ms = 1e3 * await policy_s(chat)
    return {
        load.name("ideal_fraction"): rate / load.ideal,
        "cpu_ms_per_turn": 1e3 * (after.cpu_s - full.cpu_s) / turns - policy_ms,
        "policy_ms_per_turn": policy_ms,
        "kib_per_waiting_episode": (full.resident_bytes - before.resident_bytes) / load.slots / 1024,
    }


async def policy_s(chat: Any, calls: int = 2000) -> float:
    """CPU seconds of one call of the simulated policy."""
    policy = SimulatedPolicy(chat.vocab_size, chat.stop_token_ids)
    params = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, stop_token_ids=chat.stop_token_ids)
    began = time.process_time()
    for number in range(calls):
        await policy.sample(str(number), [1, 2, 3], params)
    return (time.process_time() - began) / calls


def on_the_path(folder: Path, load: Load) -> dict[str, Any]:
    """Server, job, and this process at both ends."""
    run = settings.read(
        Run,
        {
            "name": "rollouts",
            "run_id": f"rollouts-{os.getpid()}",
            "storage": str(folder / "storage"),
            "model": {"path": "calculator-tiny"},
            "sampling": {
                "backend": "simulated",
                "slots": load.slots,
                "max_tokens": MAX_TOKENS,
                "max_context": 512,
            },
            "environment": {
                "name": "benchmarks.slow_tool:SlowTool",
                "options": load.options,
                "max_concurrency": load.slots,
                "max_turns": TURNS,
            },
            "packing": {"buckets": [512, 2048], "flush_s": 1.0},
            "learner": {"group_size": GROUP},
            "code": {"path": str(ROOT)},
        },
    )
    (folder / "run.json").write_text(run.to_json())
    command = [
        sys.executable,
        "-m",
        "pipelines.rollouts",
        "--run",
        str(folder / "run.json"),
        "--runner",
        "DirectRunner",
    ]
    with contextlib.ExitStack() as stack:
        server = ServerProcess(folder / "pubsub")
        server.start()
        stack.callback(server.kill)
        os.environ["PUBSUB_EMULATOR_HOST"] = server.address
        stack.callback(os.environ.pop, "PUBSUB_EMULATOR_HOST")
        create_topics(run.topics, server.address)
        log = stack.enter_context((folder / "job.log").open("w"))
        job = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "JAX_PLATFORMS": "cpu"}
        )
        stack.callback(job.wait)
        stack.callback(job.kill)
        ends = Ends(run)
        stack.callback(ends.close)
        try:
            return _watched(load, ends, job)
        except Exception:
            print((folder / "job.log").read_text()[-3000:], file=sys.stderr)
            raise


def _watched(load: Load, ends: Ends, job: subprocess.Popen[bytes]) -> dict[str, Any]:
    ends.issue()
    ends.await_ended(GROUP, load.episode_s * 2 + 120.0)
    before = Usage.of(job.pid)
    groups = round(load.slots * SURPLUS / GROUP)
    began = time.monotonic()
    for number in range(groups):
        ends.issue()
        time.sleep(max(0.0, began + (number + 1) * load.episode_s / groups * SURPLUS - time.monotonic()))
    ends.keep = True
    # One more length of an episode, in which those that waited take their places.
    time.sleep(load.episode_s)
    full, ended, since = Usage.of(job.pid), ends.ended, time.monotonic()
    while time.monotonic() < since + load.seconds:
        time.sleep(1.0)
        passed = time.monotonic() - since
        rate = (ends.ended - ended) / passed
        print(f"path: {passed:3.0f} s, {rate:.1f} episodes/s of {load.ideal:.1f}", file=sys.stderr, flush=True)
        if job.poll() is not None:
            raise RuntimeError("the job ended")
    after, episodes, seconds = Usage.of(job.pid), ends.ended - ended, time.monotonic() - since
    policy_ms = 1e3 * asyncio.run(policy_s(load_chat("calculator-tiny")))
    return {
        load.name("ideal_fraction"): episodes / seconds / load.ideal,
        "cpu_ms_per_turn": 1e3 * (after.cpu_s - full.cpu_s) / (episodes * TURNS) - policy_ms,
        "policy_ms_per_turn": policy_ms,
        "job_cores": (after.cpu_s - full.cpu_s) / seconds,
        "kib_per_waiting_episode": (full.resident_bytes - before.resident_bytes) / load.slots / 1024,
        "kib_per_waiting_episode_at_the_end": (after.resident_bytes - before.resident_bytes) / load.slots / 1024,
        "episodes_failed": ends.failed,
    }


class Ends:
    """What a learner is to the job: tasks in, rows and verdicts out."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._publisher, self._subscriber = publisher_client(), subscriber_client()
        self._number = 0
        self._lock = threading.Lock()
        self.ended = self.failed = 0
        """Episodes."""
        self.keep = False
        """Whether each group that ends is followed by a new one."""
        topics = run.topics
        receive: Callable[[str, Callable[[Any], None]], Any] = self._subscriber.subscribe
        self._pulls = [
            receive(topics.subscription("rows"), self._rows),
            receive(topics.subscription("verdicts"), self._verdict),
            receive(topics.subscription("heartbeats"), lambda message: message.ack()),
        ]

    def issue(self) -> None:
        with self._lock:
            self._number += 1
            number = self._number
        task = Task(self._run.run_id, number, group_size=GROUP, payload=SlowTool().task(number))
        self._publisher.publish(self._run.topics.tasks, codec.encode(task))

    def await_ended(self, episodes: int, patience_s: float) -> None:
        """Wait for the first ones; raises TimeoutError."""
        deadline = time.monotonic() + patience_s
        while self.ended < episodes:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.ended} of {episodes} episodes ended within {patience_s:g} s")
            time.sleep(0.05)

    def close(self) -> None:
        for pull in self._pulls:
            pull.cancel()
        for pull in self._pulls:
            pull.result(timeout=10.0)

    def _rows(self, message: Any) -> None:
        closings = codec.decode(message.data, Pack).closings
        self._count(sum(len(closing.episodes) for closing in closings), 0, len(closings))
        message.ack()

    def _verdict(self, message: Any) -> None:
        verdict = codec.decode(message.data, Verdict)
        self._count(verdict.members, verdict.failed_members, 1)
        message.ack()

    def _count(self, ended: int, failed: int, groups: int) -> None:
        with self._lock:
            self.ended += ended
            self.failed += failed
        for _ in range(groups if self.keep else 0):
            self.issue()


WARM_UP_STEPS = 4
WORKLOAD_SLOTS, WORKLOAD_GROUPS, WORKLOAD_MEMBERS, POLICY_S = 64, 8, 4, 0.05


def workload(folder: Path, tool_s: int, steps: int) -> dict[str, Any]:
    """A whole run of Headrace: the episodes that its learner trained, a second, from the first step to the last.

    The simulated policy answers at once; its share of 0.05 s a turn is waited for in the tool.
    """
    file = folder / f"workload-{tool_s}.json"
    model = make_model(folder / f"workload-model-{tool_s}", 2)
    run = settings.read(
        Run,
        {
            "name": "workload",
            "model": {"path": model},
            "lora": {"rank": 8, "alpha": 16.0},
            "sampling": {"backend": "simulated", "slots": WORKLOAD_SLOTS, "max_tokens": 16, "max_context": 128},
            "environment": {
                "name": "benchmarks.slow_tool:SlowTool",
                "options": {"latency_s": tool_s + POLICY_S, "turns": 2, "calls": 2},
                "max_concurrency": WORKLOAD_SLOTS,
            },
            "packing": {"buckets": [256], "closings_per_pack": 1},
            "learner": {
                "groups_per_step": WORKLOAD_GROUPS,
                "group_size": WORKLOAD_MEMBERS,
                "steps": steps,
                "max_staleness": 3,
                "rows_per_call": WORKLOAD_GROUPS,
            },
            "evaluation": {"questions": 0},
            "code": {"path": str(ROOT)},
        },
    )
    file.write_text(run.to_json())
    out = folder / f"workload-{tool_s}"
    print(f"workload of {tool_s} s tools: {steps} steps", file=sys.stderr, flush=True)
    subprocess.run(
        [sys.executable, "-m", "pipelines.cli", "run", str(file), "--out", str(out)],
        check=True,
        cwd=ROOT,
        stdout=sys.stderr,
    )
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    ended = np.cumsum([WORKLOAD_MEMBERS * (line["filtered"] + len(line["groups"])) for line in lines])
    # The first steps find the places empty. Episodes that begin together end together, so that steps come in bursts:
    # the rate is the slope of the line through all of them, not what lies between two.
    seconds = np.array([line["train_s"] for line in lines])
    rate = float(np.polyfit(seconds[WARM_UP_STEPS:], ended[WARM_UP_STEPS:], 1)[0])
    return {
        f"episodes_per_s_{tool_s}s": rate,
        f"ideal_fraction_{tool_s}s": rate / ideal_of_workload(tool_s),
        f"staleness_max_{tool_s}s": max(line["staleness_max"] for line in lines),
    }


def ideal_of_workload(tool_s: float) -> float:
    """Episodes a second of 64 slots that are never empty."""
    return WORKLOAD_SLOTS / (2 * (tool_s + POLICY_S))


def tunix(python: str, tool_s: int, steps: int) -> dict[str, Any]:
    """The same from Tunix, if its environment is there."""
    rate, fraction = f"tunix_episodes_per_s_{tool_s}s", f"tunix_ideal_fraction_{tool_s}s"
    if not Path(python).exists():
        print(f"there is no {python}: `make bench-setup` makes it", file=sys.stderr)
        return {rate: None, fraction: None}
    print(f"tunix with {tool_s} s tools: {steps} steps", file=sys.stderr, flush=True)
    sizes = {"tool-s": tool_s, "slots": WORKLOAD_SLOTS, "groups": WORKLOAD_GROUPS, "members": WORKLOAD_MEMBERS}
    options = [f"--{name}={value}" for name, value in (sizes | {"steps": steps}).items()]
    command = [python, str(ROOT / "benchmarks" / "reference_rollouts.py"), *options]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=900).stdout
    found = float(json.loads(output.splitlines()[-1])["episodes_per_s"])
    return {rate: found, fraction: found / ideal_of_workload(tool_s)}


if __name__ == "__main__":
    sys.exit(main())
