"""The `headrace` command up to where it starts processes, and what it shows of runs that are over."""

import json
import shlex
from pathlib import Path

import pytest

from learner.loop import Ending
from learner.settings import LearnerSettings
from pipelines.attempts import Attempt, Ended, new_attempt
from pipelines.check import finished
from pipelines.cli import TINY_DEMO, main
from pipelines.config import Run, load_run
from pipelines.report import ENDINGS
from policy.adapters import AdapterStore
from policy.lora import init_adapter
from policy.weights import load_model
from trajectories.schema import Version
from trajectories.storage import open_storage

Capture = pytest.CaptureFixture[str]


def test_without_arguments_the_command_prints_its_help(capsys: Capture) -> None:
    assert main([]) == 2
    printed = capsys.readouterr().err
    assert all(
        command in printed for command in ("demo", "run", "eval", "show", "learner", "serve", "pubsub", "launch")
    )


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("model.path=/no/such/model", "model.path '/no/such/model' is no file and no folder"),
        ("model.tool_calls=smoke", ""),
        ("environment.name=environments.calculator:Calculater", "near it: Calculator"),
        ("environment.options.latency=1", "environment.options may hold latency_s"),
        ("environment.options.latency_s=-1.0", "latency_s must be 0 or more"),
    ],
)
def test_a_dry_run_tries_model_chat_format_and_environment(setting: str, says: str, capsys: Capture) -> None:
    # The tiny model's chat format is a vocabulary of its own and takes no tool-call format.
    expected = 2 if says else 0
    assert main(["demo", "--tiny", "--dry-run", "--set", setting]) == expected
    captured = capsys.readouterr()
    assert says in captured.err
    assert (captured.out == "") == bool(says)


FEW = """
class Few:
    def __init__(self, seed, latency_s):
        self.tasks = self

    def task(self, group_id):
        return {"number": group_id}

    def eval_tasks(self, count):
        if count > 2:
            raise ValueError("there are only 2 held-out questions")
        return [{"number": -1 - i} for i in range(count)]

    def make(self):
        raise AssertionError("a dry run makes no episode")
"""


def test_a_dry_run_asks_for_the_held_out_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "few_questions.py").write_text(FEW)
    monkeypatch.syspath_prepend(str(tmp_path))
    command = ["demo", "--tiny", "--dry-run", "--set", "environment.name=few_questions:Few", "--set"]
    assert main([*command, "evaluation.questions=3"]) == 2
    assert (
        "evaluation.questions is 3, and environment.name 'few_questions:Few' cannot give as many: there are only 2"
        in (capsys.readouterr().err)
    )
    assert main([*command, "evaluation.questions=2"]) == 0


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def task(self, group_id): return {'question': {1, 2}}", "must return a JSON object"),
        ("def task(self, group_id): return {'question': next(self.numbers)}", "the same at every call"),
    ],
)
def test_a_dry_run_tries_the_tasks(source: str, says: str, tmp_path: Path, capsys: Capture) -> None:
    name = f"tasks_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(
        "import itertools\n"
        "class Tasks:\n"
        "    numbers = itertools.count()\n"
        f"    {source}\n"
        "    def eval_tasks(self, count): return []\n"
        "class Spec:\n"
        "    tasks = Tasks()\n"
        "    def make(self): raise AssertionError('a dry run makes no environment')\n"
    )
    file = tmp_path / "run.toml"
    file.write_text(
        f'name = "a"\n[model]\npath = "calculator-tiny"\n[code]\npath = "."\n[environment]\nname = "{name}:Spec"\n'
    )
    assert main(["run", str(file), "--dry-run"]) == 2
    assert says in capsys.readouterr().err


def test_an_evaluation_of_no_adapter_is_refused_at_once_with_those_that_exist(tmp_path: Path, capsys: Capture) -> None:
    run = load_run(str(TINY_DEMO))
    attempt = new_attempt(tmp_path / "runs" / "x")
    attempt.run_file.write_text(run.to_json())
    config = load_model(run.model).config
    store = AdapterStore(open_storage(str(attempt.folder)), config, run.lora)
    for version in (Version(9, 1), Version(10, 1)):
        store.publish(version, init_adapter(config, run.lora, 0), step_ended_at=0.0)
    adapters = tmp_path / "runs" / "x" / "latest" / "adapters"
    evaluate = ["eval", str(TINY_DEMO), "--out", str(tmp_path / "eval"), "--adapter"]
    for wrong in (adapters / "99.1", adapters, tmp_path / "runs" / "x", adapters.parent / "10.1"):
        assert main([*evaluate, str(wrong)]) == 2
        printed = capsys.readouterr().err
        assert f"--adapter {wrong}: " in printed
        assert "RUN/latest/adapters/<version>" in printed
        assert "holds 9.1, 10.1" in printed
    assert main([*evaluate, str(adapters / "10.1"), "--set", "lora.rank=4"]) == 2
    assert "has rank 8" in capsys.readouterr().err
    assert main([*evaluate[:-1], "--set", "evaluation.questions=0"]) == 2
    assert "evaluation.questions is 0: set it to how many" in capsys.readouterr().err
    assert not (tmp_path / "eval").exists()
    assert main([*evaluate, str(adapters / "10.1"), "--dry-run"]) == 0


def attempt_of(out: Path, **learner: object) -> tuple[Attempt, Run]:
    assignments = [f"learner.{name}={value}" for name, value in learner.items()]
    run = load_run(str(TINY_DEMO), ["run_id=tiny-0001-abc", f"storage={out}", *assignments])
    attempt = new_attempt(out)
    attempt.run_file.write_text(run.to_json())
    return attempt, run


def summary(**changes: object) -> dict[str, object]:
    plain = {"stall_s": {"no_rows": 4.0}, "dead_letters": {}, "learner_busy": 0.5, "tokens_per_s": 900.0, "why": ""}
    books = {"issued": 9, "trained": 4, "filtered": 5, "failed": 0, "expired": 0, "outstanding": 0}
    before_after = dict.fromkeys(("success_before", "success_after", "greedy_before", "greedy_after"))
    return {
        "run_id": "tiny-0001-abc",
        "outcome": "steps",
        "step": 80,
        "train_s": 74.2,
        "eval_s": 20.0,
        "episodes_per_s": 3.0,
        "groups": books,
        "curve": [{"train_s": 1.0, "step": 1, "sampled": 0.5}],
        "evaluation_before": None,
        "evaluation_after": None,
        **plain,
        **before_after,
        **changes,
    }


def test_resuming_a_finished_run_starts_nothing_and_says_what_to_do(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "run"
    attempt, _ = attempt_of(out, steps=80)
    before = attempt.run_file.read_text()
    (attempt.folder / "summary.json").write_text(json.dumps(summary()))
    assert main(["demo", "--tiny", "--resume", "--out", str(out), "--json"]) == 0
    printed = capsys.readouterr().out
    assert "The run is finished and nothing was started" in printed
    command = next(line for line in printed.splitlines() if "learner.steps=160" in line)
    assert shlex.split(command)[-7:] == ["demo", "--tiny", "--resume", "--out", str(out), "--set", "learner.steps=160"]
    assert json.loads(printed.splitlines()[-1])["step"] == 80
    assert not (attempt.folder / "processes.json").exists()
    assert attempt.run_file.read_text() == before


@pytest.mark.parametrize(
    ("outcome", "changes", "lifts"),
    [
        ("steps", {}, "--set learner.steps=160"),
        ("steps", {"steps": 100}, ""),
        ("steps", {"steps": 100, "train_s": 60.0}, "--set learner.train_s=150.0"),
        ("train_s", {"train_s": 500.0, "steps": 100}, ""),
        ("target_success", {"steps": 100}, "--set learner.target_success=1.0"),
        ("target_success", {"steps": 100, "target_success": 0.99}, ""),
        ("solved", {"steps": 100}, ""),
        ("interrupted", {}, ""),
        ("no_progress", {}, ""),
    ],
)
def test_a_run_goes_on_once_what_ended_it_is_lifted(outcome: str, changes: dict[str, float], lifts: str) -> None:
    before = Run("a", learner=LearnerSettings(steps=80, target_success=0.95))
    now = Run("a", learner=LearnerSettings(**({"steps": 80, "target_success": 0.95} | changes)))  # type: ignore[arg-type]
    instead = finished(before, now, summary(outcome=outcome), "headrace demo --resume")
    assert (f"headrace demo --resume {lifts}" in instead) if lifts else instead == ""


def test_a_storage_of_one_s_own_begins_no_fresh_attempt_where_checkpoints_lie(tmp_path: Path, capsys: Capture) -> None:
    storage = tmp_path / "mine"
    checkpoint = storage / "checkpoints" / "000001-000003-step-30"
    begin = ["demo", "--tiny", "--out", str(tmp_path / "run"), "--set", f"storage={storage}"]
    assert main([*begin, "--dry-run"]) == 0
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMMITTED.json").write_text("{}")
    capsys.readouterr()
    for more in ([], ["--dry-run"]):
        assert main([*begin, *more]) == 2
        printed = capsys.readouterr().err
        assert "step-30" in printed
        assert "--resume" in printed
        assert "leave storage out" in printed
    assert not (tmp_path / "run").exists()


def test_a_storage_that_cannot_be_written_starts_nothing(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("")
    assert main(["demo", "--tiny", "--out", str(tmp_path / "run"), "--set", f"storage={tmp_path}/file/mine"]) == 2
    assert f"storage '{tmp_path}/file/mine' cannot be written" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_moved_run_goes_on_with_its_own_checkpoints(tmp_path: Path, capsys: Capture) -> None:
    attempt = new_attempt(tmp_path / "old")
    run = load_run(str(TINY_DEMO), ["run_id=tiny-0001-abc", f"storage={attempt.folder}"])
    attempt.run_file.write_text(run.to_json())
    (tmp_path / "old").rename(tmp_path / "new")
    assert main(["demo", "--tiny", "--resume", "--dry-run", "--out", str(tmp_path / "new")]) == 0
    assert json.loads(capsys.readouterr().out)["storage"] == str(tmp_path / "new" / "attempts" / "0001")


def test_a_run_that_failed_is_shown_with_its_end_and_its_log(tmp_path: Path, capsys: Capture) -> None:
    attempt, _ = attempt_of(tmp_path / "run")
    log = attempt.logs / "learner.log"
    log.write_text("first line\nheadrace: there is no such model\n")
    attempt.note_end(Ended(2, "there is no such model", str(log)))
    assert main(["show", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("0001: failed with exit status 2: there is no such model\n")
    assert str(log) in printed
    assert "    headrace: there is no such model" in printed
    assert main(["show", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ended"]["exit_status"] == 2

    # A later life that failed is told before what an earlier one came to.
    (attempt.folder / "summary.json").write_text(json.dumps(summary(outcome="interrupted")))
    assert main(["show", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.startswith("tiny-0001-abc, step 80: failed with exit status 2")


def test_every_end_of_a_run_has_words_of_its_own() -> None:
    assert ENDINGS.keys() == set(Ending)


def test_a_killed_and_a_running_run_are_told_apart(tmp_path: Path, capsys: Capture) -> None:
    attempt, _ = attempt_of(tmp_path / "run")
    assert main(["show", str(tmp_path / "run")]) == 0
    assert "it was killed before it could say how it ended" in capsys.readouterr().out
    with attempt.locked():
        assert main(["show", str(tmp_path / "run")]) == 0
    assert "running now" in capsys.readouterr().out


def test_what_is_no_run_folder_is_said_with_those_that_are(tmp_path: Path, capsys: Capture) -> None:
    attempt_of(tmp_path / "runs" / "x")
    for wrong in (tmp_path / "runs", tmp_path / "runs" / "y"):
        assert main(["show", str(wrong)]) == 2
        assert str(tmp_path / "runs" / "x") in capsys.readouterr().err


def test_a_run_is_shown_by_its_summary_and_one_line_for_each_step(tmp_path: Path, capsys: Capture) -> None:
    attempt, _ = attempt_of(tmp_path / "run")
    best = {
        "version": "40.1",
        "sampled": [6, 8, 0, 0],
        "greedy": [0, 0, 0, 0],
        "adapter": "gs://mine/run/adapters/40.1",
    }
    nobody = {"sampled": [0, 0, 8, 0], "greedy": [0, 0, 0, 0]}
    found = summary(best=best, evaluations=[best, best], evaluation_before=nobody, evaluation_after=best)
    (attempt.folder / "summary.json").write_text(json.dumps(found))
    step = {
        "success": 0.5,
        "reward": 0.6,
        "tokens_per_s": 740.0,
        "staleness_mean": 0.8,
        "staleness_max": 1,
        "learner_busy": 0.72,
        "stall_s": {"no_workers": 12.3},
        "filtered": 1,
        "groups": [1, 2],
        "closings": ["a", "b"],
    }
    lines = [json.dumps(step | {"step": number, "train_s": 61.0 * number}) for number in range(1, 81)]
    (attempt.folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 81, "tok')
    assert main(["show", str(tmp_path / "run"), "--steps", "3"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "tiny-0001-abc, step 80: all its steps are trained"
    assert "held-out success   sampled  none of 8 questions answered -> 0.750" in printed
    assert "                   greedy   not asked -> not asked" in printed
    said = "best adapter       40.1 with 0.750, of 2 that were evaluated: gs://mine/run/adapters/40.1"
    assert said in printed
    head = next(number for number, line in enumerate(printed) if line.lstrip().startswith("step "))
    assert [line.split()[:2] for line in printed[head + 1 : head + 4]] == [
        ["78", "79:18"],
        ["79", "80:19"],
        ["80", "81:20"],
    ]
    assert "12.3 s for workers" in printed[head + 1]
    assert all(len(line) <= 120 for line in printed[head : head + 4])
    assert printed.index(next(line for line in printed if line.startswith("held-out success"))) < head
    assert "newest 3 of 80 steps" in printed[head + 4]
