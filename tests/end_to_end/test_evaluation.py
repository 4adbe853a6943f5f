"""An evaluation that is interrupted or killed half-way and begun again tells what an uninterrupted one does."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from pipelines.cli import TINY_DEMO, main
from tests.end_to_end.stack import Stack, gone, headrace

COMMAND = (
    "eval",
    str(TINY_DEMO),
    "--json",
    "--samples=2",
    "--set=evaluation.questions=16",
    "--set=evaluation.greedy_questions=8",
    "--set=environment.options.latency_s=0.1",
    "--set=environment.max_concurrency=4",
    "--set=sampling.slots=4",
    "--set=rollouts.heartbeat_interval_s=5.0",
)
EPISODES = 16 * 2 + 8


def lines(out: Path) -> list[dict[str, Any]]:
    path = out / "results.jsonl"
    return [json.loads(line) for line in path.read_bytes().splitlines(True) if line.endswith(b"\n")]


def measured(text: str) -> dict[str, Any]:
    """The figures at the end of what `--json` prints, without what differs from start to start."""
    found = dict(json.loads(text.splitlines()[-1])["evaluation"])
    return {name: value for name, value in found.items() if name not in ("seconds", "results")}


def interrupt(stack: Stack) -> None:
    """Ctrl-C: SIGINT for the command and all that it has started."""
    pids = [stack.pid(name) for name in ("learner", "rollouts", "pubsub")]
    for pid in (stack.process.pid, *pids):
        os.kill(pid, signal.SIGINT)
    assert stack.process.wait(60) == 130, stack.tail()
    assert all(map(gone, pids))


def kill_all(stack: Stack) -> None:
    pids = [stack.pid(name) for name in ("learner", "rollouts", "pubsub")]
    stack.process.kill()
    stack.process.wait()
    for pid in pids:
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(300)
def test_an_evaluation_goes_on_where_it_was_interrupted_or_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with headrace(whole, *COMMAND) as stack:
        stack.finish(200)
        uninterrupted = measured(stack.output)
        assert "compiled" not in stack.output  # nothing trains
    assert uninterrupted["sampled"]["answered"] == 32
    assert sum(uninterrupted["greedy"]["ends"].values()) == 8
    assert [one["k"] for one in uninterrupted["pass_at"]] == [1, 2]
    assert len(lines(whole)) == EPISODES

    with headrace(cut, *COMMAND) as stack:
        stack.until(lambda: (cut / "results.jsonl").exists() and len(lines(cut)) >= EPISODES // 5, 100, "a fifth")
        interrupt(stack)
        begun = lines(cut)
        assert f"{len(begun)} episodes have ended; the same command goes on with it" in stack.output
    with headrace(cut, *COMMAND) as stack:
        stack.until(lambda: len(lines(cut)) >= len(begun) + EPISODES // 8, 100, "more")
        kill_all(stack)
    before = lines(cut)
    assert before[: len(begun)] == begun
    assert len(before) < EPISODES
    with (cut / "results.jsonl").open("ab") as file:
        file.write(b'{"episode":"eval-5')
    with headrace(cut, *COMMAND) as stack:
        stack.finish(200)
        assert f"{len(before)} of its episodes ended before" in stack.output
        assert measured(stack.output) == uninterrupted
    after = lines(cut)
    assert after[: len(before)] == before
    assert sorted(after, key=lambda one: one["group_id"]) == sorted(lines(whole), key=lambda one: one["group_id"])

    assert main([*COMMAND, "--out", str(cut)]) == 0
    printed = capsys.readouterr().out
    assert "nothing was started" in printed
    assert measured(printed) == uninterrupted
    assert main([*COMMAND, "--samples=3", "--seed=9", "--out", str(cut)]) == 2
    assert "evaluation.samples was 2 and is 3; seed was 0 and is 9" in capsys.readouterr().err
