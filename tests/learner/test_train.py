"""The learner against the real server, fed by stand-in actors (`actors.py`)."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import pytest

from emulator.testing import ServerProcess
from learner.alarms import AlarmSettings
from learner.algorithms import ALGORITHMS
from learner.checkpoints import Checkpoints
from learner.clients import publisher_client
from learner.difficulty import DifficultySettings
from learner.settings import CheckpointSettings, EvaluationSettings, LearnerSettings
from learner.train import LearnerSpec, train
from policy.adapters import AdapterStore, claim_incarnation, load_peft
from tests.gcs import fake_gcs
from tests.learner.actors import BUCKETS, CONFIG, LORA, Actors, Habits, Tasks, episode, tiny_model, topics_for
from trajectories.codec import encode
from trajectories.failures import FailureKind, FailureSettings
from trajectories.packing import PackingSettings, pack
from trajectories.schema import Closing, Kind, Task, Version
from trajectories.storage import open_storage

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("compilation_cache")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path_factory.mktemp("pubsub"))
    process.start()
    before = os.environ.get("PUBSUB_EMULATOR_HOST")
    yield process
    process.stop()
    os.environ.pop("PUBSUB_EMULATOR_HOST")
    if before is not None:
        os.environ["PUBSUB_EMULATOR_HOST"] = before


@pytest.fixture
def spec(server: ServerProcess, tmp_path: Path, request: pytest.FixtureRequest) -> LearnerSpec:
    run_id = "".join(c if c.isalnum() else "-" for c in request.node.name)[-40:].strip("-")
    return LearnerSpec(
        run_id=run_id,
        topics=topics_for(server.address, run_id),
        storage_url=str(tmp_path / "run"),
        model=tiny_model(tmp_path / "model"),
        lora=LORA,
        packing=PackingSettings(buckets=BUCKETS),
        learner=LearnerSettings(
            groups_per_step=3, group_size=4, steps=4, max_staleness=1, no_progress_s=60, stop_within_s=8
        ),
        checkpoints=CheckpointSettings(every_steps=2),
        evaluation=EvaluationSettings(questions=0),
    )


def run(spec: LearnerSpec, folder: Path, habits: Habits | None = None, **options: Any) -> tuple[int, dict[str, Any]]:
    lines: list[str] = []
    with Actors(spec, habits):
        status = train(spec, Tasks(), folder, say=lines.append, **options)
    print("\n".join(lines))
    return status, summary_of(folder)


def summary_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "summary.json").read_text()))


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def balances(groups: dict[str, int]) -> bool:
    return groups["issued"] == sum(groups.values()) - groups["issued"]


def check_books(spec: LearnerSpec, folder: Path) -> None:
    """Invariants 1, 2 and 6, by the record of the steps that made the final weights."""
    summary, steps = summary_of(folder), steps_of(folder)
    assert balances(summary["groups"])
    assert [step["step"] for step in steps] == list(range(1, summary["step"] + 1))
    trained = [group for step in steps for group in step["groups"]]
    closings = [closing for step in steps for closing in step["closings"]]
    assert len(trained) == len(set(trained)) == len(set(closings)) == summary["groups"]["trained"]
    assert all(step["staleness_max"] <= spec.learner.max_staleness for step in steps)
    assert (summary["staleness"]["max"] or 0) <= spec.learner.max_staleness


def test_a_whole_run(spec: LearnerSpec, tmp_path: Path) -> None:
    spec = replace(spec, evaluation=EvaluationSettings(questions=5, greedy_questions=3))
    status, summary = run(spec, tmp_path)
    check_books(spec, tmp_path)
    assert status == 0
    assert (summary["outcome"], summary["step"], summary["version"]) == ("steps", 4, "4.1")
    assert (summary["success_before"], summary["greedy_before"]) == (0.0, 1.0)
    assert (summary["success_after"], summary["greedy_after"]) == (0.0, 1.0)
    assert summary["groups"]["trained"] == 12
    assert summary["groups"]["filtered"] > 0
    assert summary["compiles_after_warmup"] == 0
    assert 0 < summary["learner_busy"] < 1
    assert 0 <= summary["padding_fraction"] < 1
    assert len(summary["curve"]) == 4
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [sample["success"] for sample in samples if sample["phase"] == "train"] == [True, False] * 4
    assert sum(sample["phase"] in ("before", "after") for sample in samples) == 16
    for name in ("train_s", "eval_s", "startup_s", "episodes_per_s", "tokens_per_s"):
        assert summary[name] > 0
    store = AdapterStore(open_storage(spec.storage_url), CONFIG, LORA)
    latest = store.latest()
    assert latest is not None
    assert latest.version == Version(4, 1)
    assert any(part["b"].any() for part in store.load(latest.version).values())


def test_evaluation_while_training_goes_on_and_the_best_is_kept(spec: LearnerSpec, tmp_path: Path) -> None:
    """The version of step 2 is the best by far: its adapter and its checkpoint outlive all the newer ones."""
    spec = replace(
        spec,
        learner=replace(spec.learner, steps=10, keep_adapters=2),
        checkpoints=CheckpointSettings(every_steps=1, keep=1),
        evaluation=EvaluationSettings(questions=4, greedy_questions=2, every_steps=2),
    )
    habits = Habits(solves=lambda task: task.version is not None and task.version.step == 2)
    status, summary = run(spec, tmp_path, habits)
    check_books(spec, tmp_path)
    assert status == 0
    steps = [Version.parse(report["version"]).step for report in summary["evaluations"]]
    assert (steps[:2], steps[-1]) == ([0, 2], 10)
    assert all(later - earlier >= 2 for earlier, later in pairwise(steps[:-1]))
    assert (summary["success_before"], summary["success_after"]) == (0.0, 0.0)
    best = summary["best"]
    assert (best["version"], best["sampled"], best["greedy"]) == ("2.1", [4, 4, 0, 0], [2, 2, 0, 0])
    adapter, found = load_peft(open_storage(best["adapter"]), CONFIG)
    assert found.rank == LORA.rank
    assert any(part["b"].any() for part in adapter.values())
    storage = open_storage(spec.storage_url)
    assert len(AdapterStore(storage, CONFIG, LORA).versions()) <= 4
    kept = Checkpoints(storage.join("checkpoints"), 2, keep=1).names()
    assert [name.rpartition("-")[2] for name in kept] == ["10", "2"]
    phases = [json.loads(line)["phase"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert (phases.count("before"), phases.count("after")) == (6, 6)
    assert phases.count("during") == 6 * (len(steps) - 2)


def test_an_evaluation_that_a_death_cut_short_is_made_again(spec: LearnerSpec, tmp_path: Path) -> None:
    spec = replace(
        spec,
        learner=replace(spec.learner, steps=8),
        evaluation=EvaluationSettings(questions=3, before=False, after=False, every_steps=2),
    )
    stop = threading.Event()
    lines: list[str] = []
    with Actors(spec, Habits(swallow=lambda task: task.kind is Kind.EVAL, latency_s=lambda task: 0.1)):
        runner = threading.Thread(
            target=train, args=(spec, Tasks(), tmp_path), kwargs={"say": lines.append, "stop": stop}
        )
        runner.start()
        await_steps(tmp_path, 3, runner)
        stop.set()
        runner.join(60)
    assert (summary_of(tmp_path)["outcome"], summary_of(tmp_path)["best"]) == ("interrupted", None)
    status, summary = run(spec, tmp_path)
    check_books(spec, tmp_path)
    assert status == 0
    assert summary["evaluations"][0]["version"] == "2.1"
    assert summary["evaluations"][0]["sampled"] == [0, 3, 0, 0]
    assert all(report["version"].endswith(".2") for report in summary["evaluations"][1:])


def test_several_updates_a_step_and_an_alarm_about_what_they_trained_on(
    spec: LearnerSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One step is one version and one line, whatever number of updates it made."""
    learner = replace(spec.learner, steps=2, epochs=2, minibatches=3)
    spec = replace(spec, learner=learner, alarms=AlarmSettings(effective_sample_size=1.0, every_s=1e6))
    status, summary = run(spec, tmp_path)
    check_books(spec, tmp_path)
    assert (status, summary["version"], summary["compiles_after_warmup"]) == (0, "2.1", 0)
    assert [step["updates"] for step in steps_of(tmp_path)] == [6, 6]
    (warning,) = [text for text in caplog.messages if "effective_sample_size is" in text]
    assert "below alarms.effective_sample_size = 1" in warning


def test_a_run_with_a_critic_goes_on_where_it_was(spec: LearnerSpec, tmp_path: Path) -> None:
    """PPO: the critic's state is in the checkpoint, and the adapters that go out are the actor's alone."""
    estimate, loss = ALGORITHMS["ppo"].settings()
    learner = replace(spec.learner, steps=2, epochs=2, minibatches=3)
    spec = replace(spec, advantages=estimate, loss=loss, learner=learner)
    assert run(spec, tmp_path)[0] == 0
    spec = replace(spec, learner=replace(spec.learner, steps=3))
    status, summary = run(spec, tmp_path)
    check_books(spec, tmp_path)
    assert (status, summary["version"], summary["compiles_after_warmup"]) == (0, "3.2", 0)
    assert all(step["value_loss"] > 0 and step["updates"] == 6 for step in steps_of(tmp_path))
    latest = AdapterStore(open_storage(spec.storage_url), CONFIG, LORA).latest()
    assert latest is not None
    assert latest.version == Version(3, 2)


def test_going_on_with_another_base_is_said(
    spec: LearnerSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the same shapes: nothing else would tell."""
    for steps, base in ((1, "model"), (2, "other")):
        model = tiny_model(tmp_path / base)
        run(replace(spec, model=model, learner=replace(spec.learner, steps=steps)), tmp_path)
        warned = (
            "warning: the adapter of step 1 was trained on model; from here on it is other" in capsys.readouterr().out
        )
        assert warned == (base == "other")


def test_one_group_a_step_on_policy_with_a_failing_member_in_each(spec: LearnerSpec, tmp_path: Path) -> None:
    """Invariant 10."""
    spec = replace(spec, learner=replace(spec.learner, groups_per_step=1, max_staleness=0))
    status, summary = run(spec, tmp_path, Habits(failing_members=1))
    check_books(spec, tmp_path)
    assert (status, summary["groups"]["trained"], summary["staleness"]["max"]) == (0, 4, 0)


def test_fail_fast_ends_the_run_with_the_reason_and_what_has_trained_is_saved(
    spec: LearnerSpec, tmp_path: Path
) -> None:
    fast = replace(spec, failures=FailureSettings(FailureKind.FAIL_FAST))
    broken = Habits(failed=lambda task: task.group_id == 7, latency_s=lambda task: 0.02 + 0.5 * (task.group_id == 7))
    status, summary = run(fast, tmp_path, broken)
    assert (status, summary["outcome"]) == (5, "failed_fast")
    assert "group 7 failed: 7.0/1: the browser is gone" in summary["why"]
    check_books(spec, tmp_path)
    assert summary["groups"]["failed"] == 1
    # The same failure does not stop the run again when it goes on with another policy.
    status, summary = run(spec, tmp_path, Habits())
    assert (status, summary["step"]) == (0, 4)
    assert summary["groups"]["failed"] == 1


class FivePrompts(Tasks):
    """Of which the stand-in solves the last one always."""

    def task(self, group_id: int) -> dict[str, Any]:
        return super().task(group_id % 5)


def test_prompts_that_are_always_solved_are_passed_over_and_a_resumed_run_knows_them(
    spec: LearnerSpec, tmp_path: Path
) -> None:
    spec = replace(spec, difficulty=DifficultySettings(solved_visits=1, revisit=100))
    for steps in (4, 8):
        with Actors(spec) as actors:
            train(replace(spec, learner=replace(spec.learner, steps=steps)), FivePrompts(), tmp_path, say=print)
        check_books(spec, tmp_path)
        assert all(step["difficulty"]["solved"] <= 1 for step in steps_of(tmp_path))
        assert summary_of(tmp_path)["groups"]["retired"] >= steps // 4
    assert steps_of(tmp_path)[-1]["difficulty"] == {"prompts": 5, "solved": 1, "unsolved": 0}
    # What the second run asked for: none of it is the solved prompt, but what was out or issued before it knew.
    assert sum(int(key.split(".")[0]) % 5 == 4 for key in actors.started) <= 1


def test_two_closings_of_a_group_train_once(spec: LearnerSpec, tmp_path: Path) -> None:
    _, summary = run(spec, tmp_path, Habits(twice=lambda task: True))
    check_books(spec, tmp_path)
    assert summary["discards"]["closings"]


def test_swallowed_tasks_are_issued_again_and_expire(spec: LearnerSpec, tmp_path: Path) -> None:
    settings = replace(spec.learner, task_deadline_s=0.6, max_attempts=2)
    habits = Habits(swallow=lambda task: task.group_id in (1, 2) and (task.attempt == 0 or task.group_id == 2))
    status, summary = run(replace(spec, learner=settings), tmp_path, habits)
    check_books(spec, tmp_path)
    assert status == 0
    assert summary["discards"]["reissued"]["task_deadline"] >= 2
    assert summary["groups"]["expired"] == 1


def test_a_stale_actor_is_discarded_and_never_trained(spec: LearnerSpec, tmp_path: Path) -> None:
    """An actor that never loads a new adapter: the bound holds, and what it breaks is counted."""
    settings = replace(spec.learner, steps=2, no_progress_s=8, max_staleness=0, max_attempts=1)
    spec = replace(spec, learner=settings)
    lines: list[str] = []
    stop = threading.Event()
    with Actors(spec, Habits(follows=False)):
        runner = threading.Thread(
            target=train, args=(spec, Tasks(), tmp_path), kwargs={"say": lines.append, "stop": stop}
        )
        runner.start()
        await_steps(tmp_path, 1, runner)
        time.sleep(1)
        stop.set()
        runner.join(30)
    check_books(spec, tmp_path)
    summary = summary_of(tmp_path)
    assert (summary["outcome"], summary["step"]) == ("interrupted", 1)
    assert summary["groups"]["expired"] > 0


def test_stragglers_pace_the_steps(spec: LearnerSpec, tmp_path: Path) -> None:
    slow = Habits(latency_s=lambda task: 0.7 if task.group_id % 4 == 0 else 0.02, filtered=lambda task: False)
    _, summary = run(replace(spec, learner=replace(spec.learner, steps=6)), tmp_path, slow)
    check_books(spec, tmp_path)
    trained = {group for step in steps_of(tmp_path) for group in step["groups"]}
    assert {0, 4, 8} <= trained  # slow prompts train, in their turn
    assert summary["stall_s"]["straggler"] > 0
    assert not summary["discards"]["reissued"]


def test_a_silent_job_is_given_up_with_the_reason(spec: LearnerSpec, tmp_path: Path) -> None:
    lines: list[str] = []
    spec = replace(spec, learner=replace(spec.learner, no_progress_s=1.0))
    status = train(spec, Tasks(), tmp_path, say=lines.append)
    assert status == 3
    assert "no heartbeat has ever come" in "\n".join(lines)
    assert balances(summary_of(tmp_path)["groups"])


@pytest.mark.parametrize("now_and_then", [False, True])
def test_a_run_whose_groups_all_fail_ends_with_the_reason_and_one_with_a_group_now_and_then_does_not(
    spec: LearnerSpec, tmp_path: Path, now_and_then: bool
) -> None:
    spec = replace(spec, learner=replace(spec.learner, steps=3, no_progress_s=2.0))
    habits = Habits(
        latency_s=lambda task: 0.25 if now_and_then else 0.05,
        failed=lambda task: task.group_id % 8 > 0 if now_and_then else task.group_id >= 3,
        filtered=lambda task: False,
    )
    status, summary = run(spec, tmp_path, habits)
    check_books(spec, tmp_path)
    if now_and_then:  # it took longer than no_progress_s
        assert (status, summary["step"]) == (0, 3)
        assert summary["groups"]["failed"] > 50
        return
    assert (status, summary["outcome"], summary["step"]) == (3, "no_progress", 1)
    assert "groups that ended have failed, the newest because" in summary["why"]
    assert summary["why"].endswith("the browser is gone")
    count = int(summary["why"].split("all ")[1].split()[0])
    assert 9 < count <= summary["groups"]["failed"]


def test_too_few_held_out_questions_are_told_before_training_and_not_after_it(
    spec: LearnerSpec, tmp_path: Path
) -> None:
    class Few(Tasks):
        def eval_tasks(self, count: int) -> list[dict[str, Any]]:
            raise ValueError(f"there are 2 held-out tasks, asked for {count}")

    spec = replace(spec, evaluation=EvaluationSettings(questions=3, before=False))
    with Actors(spec), pytest.raises(ValueError, match="there are 2 held-out tasks, asked for 3"):
        train(spec, Few(), tmp_path)
    assert summary_of(tmp_path)["step"] == 0


def test_broken_messages_are_dead_letters_and_the_run_goes_on(spec: LearnerSpec, tmp_path: Path) -> None:
    publisher = publisher_client()
    for name in ("rows", "verdicts", "results", "heartbeats"):
        publisher.publish(spec.topics.topic(name), b"no message of ours").result(30)
    strange = [
        pack([closing_of(spec, 0)], 32),  # a bucket that the learner did not compile
        pack([closing_of(spec, 10**12)], 64),  # a group that was never issued
        pack([replace(closing_of(spec, 0), advantages=())], 64),
    ]
    for one in strange:
        publisher.publish(spec.topics.rows, encode(one)).result(30)
    status, summary = run(spec, tmp_path)
    check_books(spec, tmp_path)
    assert status == 0
    letters = [json.loads(line) for line in (tmp_path / "dead_letters.jsonl").read_text().splitlines()]
    assert {letter["stage"] for letter in letters} == {
        f"learner.{n}" for n in ("rows", "verdicts", "results", "heartbeats")
    }
    assert summary["dead_letters"]["learner.rows: Foreign"] == 1
    assert summary["dead_letters"]["learner.rows: Unusable"] == 2
    assert summary["dead_letters"]["learner.rows: UnknownGroup"] == 1


def closing_of(spec: LearnerSpec, group: int) -> Closing:
    task = Task(spec.run_id, group, group_size=2)
    members = tuple(episode(task, sample, Version(0, 1)) for sample in range(2))
    return Closing(spec.run_id, group, 0, f"strange-{group}", 2, members, advantages=(-1.0, 1.0))


@pytest.mark.parametrize("rule", ["target_success", "train_s", "solved"])
def test_stop_rules(spec: LearnerSpec, tmp_path: Path, rule: str) -> None:
    settings = replace(spec.learner, steps=10_000, target_groups=6)
    if rule == "target_success":
        settings = replace(settings, target_success=0.5)
    if rule == "train_s":
        settings = replace(settings, train_s=0.5)
    habits = Habits(filtered=lambda task: rule == "solved")
    status, summary = run(replace(spec, learner=settings), tmp_path, habits)
    check_books(spec, tmp_path)
    assert (status, summary["outcome"]) == (0, rule)
    assert (summary["step"] == 0) == (rule == "solved")


def test_a_newer_incarnation_fences_the_older(spec: LearnerSpec, tmp_path: Path) -> None:
    """Invariant 7, the second half: the older writes nothing more, summary.json included."""
    spec = replace(spec, learner=replace(spec.learner, steps=10_000))
    statuses: list[int] = []
    said: list[str] = []
    with Actors(spec):
        older = threading.Thread(
            target=lambda: statuses.append(train(spec, Tasks(), tmp_path / "older", say=said.append))
        )
        older.start()
        await_steps(tmp_path / "older", 1, older)
        assert claim_incarnation(open_storage(spec.storage_url)) == 2
        older.join(60)
    assert statuses == [4]
    assert any(line.startswith("stopping: ") and "incarnation" in line for line in said), said
    assert not (tmp_path / "older" / "summary.json").exists()


def test_a_run_on_cloud_storage(spec: LearnerSpec, tmp_path: Path) -> None:
    """Adapters and checkpoints on gs://; a second start goes on where the first ended."""
    with fake_gcs("headrace-learner"):
        spec = replace(spec, storage_url=f"gs://headrace-learner/{spec.run_id}")
        quick = replace(spec, learner=replace(spec.learner, steps=2, publish_interval_s=0.0))
        assert run(quick, tmp_path)[0] == 0
        status, summary = run(replace(quick, learner=replace(quick.learner, steps=3)), tmp_path)
        check_books(spec, tmp_path)
        assert (status, summary["version"]) == (0, "3.2")
        latest = AdapterStore(open_storage(spec.storage_url), CONFIG, LORA).latest()
        assert latest is not None
        assert latest.version == Version(3, 2)


def start_learner(spec: LearnerSpec, folder: Path) -> subprocess.Popen[bytes]:
    """The learner as a process of its own."""
    folder.mkdir(exist_ok=True)
    settings = {
        "run_id": spec.run_id,
        "storage_url": spec.storage_url,
        "model": spec.model.path,
        "steps": spec.learner.steps,
        "every_steps": spec.checkpoints.every_steps,
    }
    with (folder / "learner.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.learner.process", str(folder), json.dumps(settings)],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            },
        )


def await_steps(
    folder: Path, number: int, learner: subprocess.Popen[bytes] | threading.Thread, incarnation: int = 1
) -> None:
    """Wait until that incarnation has taken `number` steps."""
    path, log = folder / "metrics.jsonl", folder / "learner.log"
    deadline = time.monotonic() + 90
    while not path.exists() or path.read_text().count(f'.{incarnation}","train_s"') < number:
        alive = learner.is_alive() if isinstance(learner, threading.Thread) else learner.poll() is None
        assert alive, log.exists() and log.read_text()
        assert time.monotonic() < deadline, log.exists() and log.read_text()
        time.sleep(0.02)


@pytest.mark.timeout(200)
def test_kill_9_at_random_moments(spec: LearnerSpec, server: ServerProcess, tmp_path: Path) -> None:
    """Invariants 1, 2 and 6 across SIGKILL of the learner, once also of the server; then an orderly SIGTERM."""
    spec = replace(spec, learner=replace(spec.learner, steps=24), checkpoints=CheckpointSettings(every_steps=3))
    chance = random.Random(int.from_bytes(os.urandom(4), "big"))
    folder, log = tmp_path / "out", tmp_path / "out" / "learner.log"
    with Actors(spec, Habits(latency_s=lambda task: 0.05, twice=lambda task: task.group_id % 7 == 0)) as actors:
        for incarnation in (1, 2):
            process = start_learner(spec, folder)
            await_steps(folder, chance.randint(1, 6), process, incarnation)
            time.sleep(chance.random() * 0.3)
            process.kill()
            process.wait()
        process = start_learner(spec, folder)
        await_steps(folder, 1, process, 3)
        server.kill()
        server.start()
        await_steps(folder, 3, process, 3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130, log.read_text()
        check_books(spec, folder)
        assert summary_of(folder)["outcome"] == "interrupted"
        process = start_learner(spec, folder)
        assert process.wait(120) == 0, log.read_text()
    check_books(spec, folder)
    summary = summary_of(folder)
    assert (summary["step"], summary["version"], summary["groups"]["trained"]) == (24, "24.4", 72)
    assert summary["compiles_after_warmup"] == 0
    assert max(Counter(key.split(".")[0] for key in actors.started).values()) <= spec.learner.max_attempts
