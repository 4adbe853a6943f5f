"""The tiny twin, end to end: it learns, survives kills, stops on Ctrl-C and goes on, and outlives bad input."""

from __future__ import annotations

import json
import random
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from pipelines.attempts import Attempt
from pipelines.cli import TINY_DEMO
from tests.end_to_end.stack import Stack, audit, gone, headrace, summary
from tests.policy.server import serving
from trajectories.schema import Version

SHORT = (
    "--set",
    "learner.steps=14",
    "--set",
    "evaluation.questions=64",
    "--set",
    "checkpoints.every_s=2.0",
    "--set",
    "checkpoints.every_steps=3",
    "--set",
    "rollouts.heartbeat_interval_s=1.0",
)
PROCESSES = ("learner", "rollouts", "pubsub")


def check_figures(found: dict[str, object]) -> None:
    """Every figure that summary.json promises is there and was measured."""
    for name in (
        "success_before",
        "success_after",
        "greedy_before",
        "greedy_after",
        "train_s",
        "eval_s",
        "learner_busy",
        "padding_fraction",
        "episodes_per_s",
        "tokens_per_s",
    ):
        assert isinstance(found[name], float), name
    assert found["compiles_after_warmup"] == 0
    assert set(found["staleness"]) >= {"mean", "p95", "max"}  # type: ignore[call-overload]
    assert set(found["adapter_lag_s"]) >= {"p50", "p95"}  # type: ignore[call-overload]
    curve = found["curve"]
    assert isinstance(curve, list)
    assert all(set(point) >= {"train_s", "step", "sampled"} for point in curve)


def check_learned(found: dict[str, float]) -> None:
    """The issue's bounds for the tiny twin."""
    assert found["success_before"] <= 0.2
    assert found["greedy_before"] <= 0.6
    assert found["success_after"] >= 0.85
    assert found["greedy_after"] >= 0.9


@pytest.mark.timeout(900)
def test_the_tiny_model_learns_to_use_the_calculator(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with headrace(out, "demo", "--tiny", "--seed", "0", "--json") as stack:
        found = stack.finish(850)
    audit(out, found)
    check_figures(found)
    check_learned(found)
    assert found["staleness"]["max"] <= 2
    assert json.loads(stack.output.splitlines()[-1])["run_id"] == found["run_id"]
    assert "held-out success" in stack.output

    adapter = stack.attempt / "adapters" / str(found["version"])
    with headrace(
        tmp_path / "eval", "eval", str(TINY_DEMO), "--adapter", str(adapter), "--set", "evaluation.questions=256"
    ) as stack:
        measured = stack.finish(200)
    assert measured["greedy_before"] >= 0.88
    assert measured["success_before"] == pytest.approx(found["success_after"], abs=0.08)
    assert measured["groups"]["issued"] == 0
    lines = stack.output.splitlines()
    sampled, greedy, *_ = lines[lines.index(f"held-out success of adapter {adapter}") + 1 :]
    assert sampled.split()[:2] == ["sampled", f"{measured['success_before']:.3f}"]
    assert greedy.split()[:2] == ["greedy", f"{measured['greedy_before']:.3f}"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", PROCESSES)
def test_a_run_survives_the_kill_of_any_process(victim: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    moment = random.Random(f"{victim} {time.time_ns()}")
    steps = 10 if victim == "rollouts" else 14
    meanwhile = ("--set", "evaluation.every_steps=5") if victim != "pubsub" else ()
    more = ("--set", f"learner.steps={steps}", *meanwhile)
    with sampling(victim, out) as where, headrace(out, "demo", "--tiny", *SHORT, *more, *where) as stack:
        for at in sorted(moment.sample(range(1, steps - 4), 2)):
            stack.until(lambda at=at: len(stack.steps()) >= at, 200, f"step {at}")  # type: ignore[misc]
            time.sleep(moment.uniform(0, 1))
            pid = stack.kill(victim)
            stack.until(lambda pid=pid: stack.pid(victim) != pid, 30, f"{victim} starts again")  # type: ignore[misc]
        found = stack.finish(400)
    audit(out, found)
    check_figures(found)
    assert found["step"] == steps
    assert f"{victim} was ended by SIGKILL: starting it again" in stack.output
    if meanwhile:
        check_best(found, steps)


@contextmanager
def sampling(victim: str, out: Path) -> Iterator[tuple[str, ...]]:
    """Where the run samples: a worker whose job is killed at `headrace serve`, which outlives it; others themselves."""
    if victim != "rollouts":
        yield ()
        return
    sets = ("sampling.small_batch=0", "sampling.max_kept=0")  # less to compile
    with serving(str(TINY_DEMO), "--port", "0", "--adapters", str(out), sets=sets) as server:
        yield "--set", "sampling.backend=remote", "--set", f'sampling.servers=["{server.address}"]'
        with urlopen(f"{server.address}/metrics") as response:
            metrics = json.load(response)
        assert metrics["tokens_sampled"]
        assert metrics["failures"] == 0


def check_best(found: dict[str, Any], last: int) -> None:
    """Every question of every evaluation was answered by its version, served beside newer ones; the best is kept."""
    reports = found["evaluations"]
    steps = [Version.parse(report["version"]).step for report in reports]
    assert (steps[:2], steps[-1]) == ([0, 5], last)
    assert all(report[name][1:3] == [64, 0] for report in reports for name in ("sampled", "greedy"))
    best = found["best"]
    assert best["sampled"][0] == max(report["sampled"][0] for report in reports)
    assert (Path(best["adapter"]) / "adapter_model.safetensors").is_file()


@pytest.mark.timeout(600)
def test_ctrl_c_stops_everything_and_resume_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with headrace(out, "demo", "--tiny", *SHORT) as stack:
        stack.until(lambda: len(stack.steps()) >= 4, 200, "the first steps")
        pids = [stack.pid(name) for name in PROCESSES]
        stack.process.send_signal(signal.SIGINT)
        assert stack.process.wait(30) == 130
    assert all(gone(pid) for pid in pids)
    interrupted = summary(out)
    audit(out, interrupted)
    assert interrupted["outcome"] == "interrupted"
    assert interrupted["success_after"] is None
    # What it says in the end is a whole command.
    words = shlex.split(stack.output.splitlines()[-1].removeprefix("go on with it"))
    assert words[-2:] == ["--out", str(out)]
    with headrace(out, *words[words.index("demo") : -2]) as stack:
        found = stack.finish(400)
    audit(out, found)
    assert found["run_id"] == interrupted["run_id"]
    assert found["step"] == 14
    assert found["success_before"] == interrupted["success_before"]

    with headrace(out, "demo", "--tiny", *SHORT, "--set", "learner.steps=1") as stack:
        fresh = stack.finish(300)
    assert fresh["run_id"] != found["run_id"]
    assert fresh["step"] == 1
    assert fresh["groups"]["issued"] < found["groups"]["issued"]


@pytest.mark.timeout(120)
def test_the_stack_dies_with_its_supervisor(tmp_path: Path) -> None:
    with headrace(tmp_path / "run", "demo", "--tiny", *SHORT) as stack:
        stack.until(lambda: (stack.attempt / "processes.json").exists(), 60, "the processes")
        pids = [stack.pid(name) for name in PROCESSES]
        stack.process.kill()
        deadline = time.monotonic() + 30
        while not all(gone(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert all(gone(pid) for pid in pids)


def kill_often(stack: Stack, seconds: float, moment: random.Random) -> int:
    """Kill a random process every 10 to 30 s until the run ends; returns how often."""
    kills, deadline = 0, time.monotonic() + seconds
    while stack.process.poll() is None and time.monotonic() < deadline:
        pause = time.monotonic() + moment.uniform(15, 40)
        while time.monotonic() < pause and stack.process.poll() is None:
            time.sleep(0.2)
        if stack.process.poll() is None:
            try:
                stack.kill(moment.choice(PROCESSES))
            except ProcessLookupError:
                continue
            kills += 1
    return kills


def test_a_run_that_cannot_begin_says_why_where_it_was_started(tmp_path: Path) -> None:
    with headrace(
        tmp_path / "run", "demo", "--tiny", "--set", "environment.name=environments.calculator:Calculater"
    ) as stack:
        assert stack.process.wait(120) == 2
    assert "the learner cannot use this run: environment.name" in stack.output
    assert "near it: Calculator" in stack.output
    ended = Attempt(stack.attempt).ended
    assert ended is not None
    assert (ended.exit_status, Path(ended.log).name) == (2, "learner.log")
    assert ended.why.startswith("environment.name")


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_seed_learns_in_four_minutes(seed: int, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with headrace(out, "demo", "--tiny", "--seed", str(seed)) as stack:
        found = stack.finish(1100)
    print(json.dumps({name: found[name] for name in found if name != "curve"}))
    audit(out, found)
    check_learned(found)
    assert found["train_s"] <= 240
    assert found["adapter_lag_s"]["p95"] <= 1.0


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_a_run_that_is_killed_again_and_again_learns_as_well(tmp_path: Path) -> None:
    out = tmp_path / "run"
    moment = random.Random(time.time_ns())
    with headrace(
        out, "demo", "--tiny", "--set", "learner.train_s=900.0", "--set", "rollouts.heartbeat_interval_s=1.0"
    ) as stack:
        kills = kill_often(stack, 1500, moment)
        found = stack.finish(600)
    print(json.dumps({"kills": kills} | {name: found[name] for name in found if name != "curve"}))
    assert kills >= 3
    audit(out, found)
    check_learned(found)
