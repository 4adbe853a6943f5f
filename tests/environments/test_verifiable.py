"""A reward function and a task file are an environment; what the function does wrong fails the episode by name."""

import asyncio
import re
import sys
import time

import pytest

from environments.environment import EnvironmentSettings, StepResult, load_environment
from environments.tasks import TaskFileError, task_list
from environments.verifiable import Verifiable
from policy.client import FinishReason
from trajectories.schema import Status, Task

TASKS = task_list([{"question": f"{n}+{n}", "answer": 2 * n} for n in range(1, 60)], key="question")


def right(payload, answer):
    return float(answer == f"<answer>{payload['answer']}</answer>")


def calculator(expression: str) -> str:
    """Adds two numbers."""
    return str(sum(map(int, expression.split("+"))))


def episode(play, kit, spec, *lines, payload=None, **settings):
    payload = payload or {"question": "4+4", "answer": 8}
    client = kit.Speaker(lambda session, turn: lines[turn])
    return asyncio.run(play(client, spec, **settings).run(Task("run", 0, payload=payload), 0))


def test_one_turn_is_asked_and_judged(play, kit):
    found = episode(play, kit, Verifiable(TASKS, right), "<answer>8</answer>")
    assert (found.status, found.reward, found.success, found.reward_parts) == (
        Status.COMPLETED,
        1.0,
        True,
        {"reward": 1.0},
    )
    assert kit.CHAT.decode(found.tokens_T) == "<q>4+4</q><answer>8</answer>"
    wrong = episode(play, kit, Verifiable(TASKS, right), "<calc>4+4</calc>")  # it has no tools: this is its answer
    assert (wrong.status, wrong.reward, wrong.success) == (Status.COMPLETED, 0.0, False)


def test_named_parts_async_functions_and_judgements(play, kit):
    async def parts(payload, answer):
        await asyncio.sleep(0)
        return {"answer": right(payload, answer), "length": -0.25}

    found = episode(play, kit, Verifiable(TASKS, parts, success_at=0.7), "<answer>8</answer>")
    assert (found.reward, found.success, found.reward_parts) == (0.75, True, {"answer": 1.0, "length": -0.25})

    def weighted(payload, answer):
        return StepResult(reward=0.3, reward_parts={"answer": 1.0, "style": 0.2}, success=True)

    found = episode(play, kit, Verifiable(TASKS, weighted), "<answer>9</answer>")
    assert (found.reward, found.success, found.reward_parts) == (0.3, True, {"answer": 1.0, "style": 0.2})


def test_tools_are_called_until_the_policy_answers_and_the_function_may_see_every_turn(play, kit):
    def used_it(payload, answer, actions):
        return {"answer": 0.5 * right(payload, answer), "tool": 0.5 * bool(actions[0].tool_calls)}

    spec = Verifiable(TASKS, used_it, tools=[calculator])
    found = episode(play, kit, spec, "<calc>4+4</calc>", "<answer>8</answer>")
    assert kit.CHAT.decode(found.tokens_T) == "<q>4+4</q><calc>4+4</calc><result>8</result><answer>8</answer>"
    assert (found.reward, found.success, found.metrics["tool_calls"]) == (1.0, True, 1)


def test_a_turn_that_was_cut_is_judged_and_is_no_failure(play, kit):
    cut = kit.completion("<answer>8", reason=FinishReason.LENGTH)
    found = episode(play, kit, Verifiable(TASKS, lambda payload, answer: 0.25), cut)
    assert (found.status, found.reward) == (Status.MAX_TOKENS, 0.25)


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (lambda payload, answer: payload["solution"], "KeyError: 'solution'"),
        (lambda payload, answer: None, "a reward must be a number, a mapping .* found None"),
        (lambda payload, answer: {"a": "high"}, "a reward must be a number"),
        (lambda payload, answer: float("nan"), "rewards must be finite"),
    ],
)
def test_a_reward_function_that_fails_is_a_failed_episode_and_no_reward_of_zero(play, kit, reward, says):
    found = episode(play, kit, Verifiable(TASKS, reward), "<answer>8</answer>")
    assert found.status is Status.ENVIRONMENT_ERROR
    assert re.search(says, found.error)


def test_a_reward_function_that_hangs_is_stopped_waiting_for(play, kit):
    spec = Verifiable(TASKS, lambda payload, answer: time.sleep(1.0))
    found = episode(play, kit, spec, "<answer>8</answer>", step_timeout_s=0.1)
    assert found.status is Status.TIMEOUT
    assert "step_timeout_s" in found.error


def test_what_a_spec_cannot_be_made_of_is_said_at_once():
    with pytest.raises(TaskFileError, match="task 1: it lacks 'query'; it has question, answer"):
        Verifiable(TASKS, right, prompt="Answer: {query}")
    with pytest.raises(ValueError, match=r"must name columns"):
        Verifiable(TASKS, right, prompt="Answer {}")
    with pytest.raises(ValueError, match="found calculator more than once"):
        Verifiable(TASKS, right, tools=[calculator, calculator])
    spec = Verifiable(TASKS, right, prompt="{question} {{json}}", system="Be brief.")
    assert [(m.role, m.content) for m in spec.messages({"question": "1+1"})] == [
        ("system", "Be brief."),
        ("user", "1+1 {json}"),
    ]


def test_a_run_file_alone_describes_one(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def right(payload, answer):\n    return 1.0\n")
    (tmp_path / "sums.jsonl").write_text('{"q": "1+1"}\n{"q": "2+2"}\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    options = {"tasks": "sums.jsonl", "reward": "my_rewards:right", "prompt": "{q}", "held_out": 0.0}
    settings = EnvironmentSettings(name="environments.verifiable:verifiable", options=options)
    assert load_environment(settings, 0).tasks.task(0)["q"] in ("1+1", "2+2")
    for change, says in [
        ({"reward": "my_rewards:wrong"}, "no such name in my_rewards; near it: right"),
        ({"tasks": "sum.jsonl"}, r"no such file; its folder holds sums\.jsonl"),
        ({"tools": "my_rewards:right"}, r'tools must be a list, such as \["my_rewards:right"\], found a text'),
        ({"prompt": "{question}"}, r"sums\.jsonl, line .: it lacks 'question'; it has q"),
    ]:
        with pytest.raises(ValueError, match=says):
            load_environment(EnvironmentSettings(name=settings.name, options={**options, **change}), 0)
    sys.modules.pop("my_rewards")
