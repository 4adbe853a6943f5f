"""A taskset of verifiers, loaded, asked and scored by the library itself."""

import time

import pytest

pytestmark = pytest.mark.libraries

NAME = "verifiers:Verifiers"
TASKSET = "a_taskset"


@pytest.fixture
def spec(play, monkeypatch):
    monkeypatch.syspath_prepend("tests/libraries")
    return play.spec(NAME, taskset=TASKSET, success_at=1.0)


def test_rewards_metrics_and_prompt_are_the_tasks(play, spec):
    spec.prepare()  # as a worker does before its first episode
    payload = spec.tasks.task(0)
    answer = payload["data"]["answer"]
    right = play(spec, [f"It is \\boxed{{{answer}}}."], payload=payload)
    assert (right.reward, right.success) == (1.5, True), right.error
    assert right.reward_parts == {"right": 1.0, "short": 0.5}
    assert right.metrics["letters"] == len(f"It is \\boxed{{{answer}}}.")
    (messages, _), *_ = play.chat.shown
    assert [(one.role, one.content) for one in messages] == [
        ("system", "Be brief."),
        ("user", payload["data"]["prompt"]),
    ]
    wrong = play(spec, ["\\boxed{-1}"], payload=payload)
    assert (wrong.reward, wrong.success, wrong.status) == (0.5, False, "completed")


def test_the_library_splits_into_training_and_held_out_tasks(spec):
    held_out = {task["key"] for task in spec.tasks.eval_tasks(3)}
    assert len(held_out) == 3
    assert not held_out & {spec.tasks.task(n)["key"] for n in range(120)}
    assert spec.tasks.task(0) == spec.tasks.task(0) != spec.tasks.task(1)


def test_a_scoring_that_hangs_is_killed_or_raises_fails_its_episode_and_no_other(play, spec):
    payload = spec.tasks.task(1)
    began = time.monotonic()
    hung = play(spec, ["hang"], payload=payload, step_timeout_s=15.0)
    assert (hung.status, time.monotonic() - began < 60) == ("timeout", True)
    killed = play(spec, ["killed"], payload=payload)
    assert (killed.status, "the scoring process ended with status -9" in killed.error) == ("environment_error", True)
    raised = play(spec, ["raise"], payload=payload)
    assert raised.status == "environment_error"
    assert "told to" in raised.error
    group = play(spec, [f"\\boxed{{{payload['data']['answer']}}}"], payload=payload, members=5)
    assert [episode.reward for episode in group] == [1.5] * 5


def test_what_is_not_there_or_cannot_run_is_named(play, monkeypatch):
    monkeypatch.syspath_prepend("tests/libraries")
    with pytest.raises(ValueError, match="no_such_taskset"):
        play.spec(NAME, taskset="no_such_taskset")
    with pytest.raises(ValueError, match="scoring_processes must be at least 1"):
        play.spec(NAME, taskset=TASKSET, scoring_processes=0)
    with pytest.raises(ValueError, match="nonsense"):
        play.spec(NAME, taskset=TASKSET, config={"nonsense": 1})
