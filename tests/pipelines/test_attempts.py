from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.attempts import AttemptError, new_attempt, new_run_id, newest_attempt
from pipelines.cli import TINY_DEMO, main
from pipelines.config import load_run


def test_attempts_are_numbered_and_the_newest_is_linked(tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = new_attempt(out)
    first.run_file.write_text("{}")
    (first.folder / "summary.json").write_text("first")
    assert (out / "summary.json").read_text() == "first"
    second = new_attempt(out)
    assert second.folder.name == "0002"
    assert not (out / "summary.json").exists()
    second.run_file.write_text("{}")
    assert newest_attempt(out).folder == second.folder.resolve()
    assert new_run_id("demo", second) != new_run_id("demo", second)


def test_resuming_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(AttemptError, match="leave out --resume"):
        newest_attempt(tmp_path)


def test_files_of_others_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("mine")
    with pytest.raises(AttemptError, match="in the way"):
        new_attempt(tmp_path)
    assert (tmp_path / "summary.json").read_text() == "mine"


def test_one_attempt_is_never_run_twice_at_once(tmp_path: Path) -> None:
    attempt = new_attempt(tmp_path)
    with attempt.locked(), pytest.raises(AttemptError, match="in use"), attempt.locked():
        pass
    with attempt.locked():
        pass


def test_resume_leaves_the_run_file_of_an_attempt_that_runs_alone(tmp_path: Path) -> None:
    attempt = new_attempt(tmp_path)
    attempt.run_file.write_text(load_run(str(TINY_DEMO)).to_json())
    before = attempt.run_file.read_text()
    resume = ["demo", "--tiny", "--resume", "--out", str(tmp_path), "--set", "learner.steps=3"]
    with attempt.locked():
        assert main(resume) == 2
    assert attempt.run_file.read_text() == before


def test_settings_that_the_learner_refuses_are_not_what_the_next_resume_goes_on_with(tmp_path: Path) -> None:
    attempt = new_attempt(tmp_path)
    run = load_run(str(TINY_DEMO))
    attempt.run_file.write_text(replace(run, run_id="refused", storage=str(attempt.folder)).to_json())
    before = load_run(str(attempt.run_file))
    resume = ["demo", "--tiny", "--resume", "--out", str(tmp_path)]
    assert main([*resume, "--set", 'model.path="/nowhere"']) == 2
    assert "/nowhere" in (attempt.logs / "learner.log").read_text()
    assert load_run(str(attempt.run_file)) == before
