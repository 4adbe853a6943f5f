"""The examples on SmolLM2: what they reward, that what is held out stays so, and that their run files can be used."""

import asyncio
import json
from pathlib import Path

import pytest

from environments.environment import load_environment
from pipelines.cli import main
from pipelines.config import load_run
from policy.chat import Action
from policy.client import FinishReason
from policy.tool_calls import FORMATS

EXAMPLES = Path(__file__).parents[2] / "examples"
RUNS = {"json_extraction": "smollm2_json.toml", "two_tools": "smollm2_two_tools.toml"}


def spec(name, **options):
    run = load_run(str(EXAMPLES / RUNS[name]))
    return load_environment(run.environment, options.get("seed", run.seed))


@pytest.fixture(scope="module")
def json_extraction():
    return spec("json_extraction")


@pytest.fixture(scope="module")
def two_tools():
    return spec("two_tools")


def play(environments, payload, *turns):
    """(what the policy is shown at last, the answers to its turns)"""

    async def episode():
        environment = environments.make()
        messages = list(await environment.reset(payload, episode_id="0.0/0", seed=0))
        answers = []
        for turn in turns:
            answers.append(await environment.step(Action(turn, FORMATS["pythonic"].parse(turn, ()), FinishReason.STOP)))
            messages += answers[-1].messages
        return messages, answers

    return asyncio.run(episode())


@pytest.mark.parametrize("name", RUNS)
def test_an_example_is_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 60


@pytest.mark.parametrize("name", RUNS)
def test_its_run_file_can_be_used(name, capsys):
    assert main(["run", str(EXAMPLES / RUNS[name]), "--dry-run"]) == 0
    assert "128 held-out questions" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "key"), [("json_extraction", "person"), ("two_tools", "calls")])
def test_what_is_held_out_is_never_trained(name, key):
    def keys(tasks):
        return {json.dumps(task[key], sort_keys=True) for task in tasks}

    def questions(tasks):
        return {task["question"] for task in tasks}

    held_out = spec(name).tasks.eval_tasks(128)
    for seed in (0, 1):
        tasks = spec(name, seed=seed).tasks
        assert tasks.eval_tasks(128) == held_out  # so that runs can be compared
        trained = [tasks.task(group) for group in range(5000)]
        assert len(questions(trained)) > 2000
        assert not keys(trained) & keys(held_out)
        assert not questions(trained) & questions(held_out)
    assert len(keys(held_out)) == 128


def test_the_worked_examples_are_not_held_out(json_extraction, two_tools):
    for environments in (json_extraction, two_tools):
        held_out = environments.tasks.eval_tasks(128)
        shown = {message.content for message in environments.messages(held_out[0])[:-1]}
        assert not shown & {task["question"] for task in held_out}


PERSON = {"question": "Meet Ana from Oslo. Age: 41.", "person": {"name": "Ana", "age": 41, "city": "Oslo"}}


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ('{"name": "Ana", "age": 41, "city": "Oslo"}', 1.0),
        (' {"city":"Oslo", "age":41, "name":"Ana"}\n', 1.0),
        ('{"name": "Ana", "age": "41", "city": "Oslo"}', 0.0),
        ('{"name": "Ana", "age": 41, "city": "Rome"}', 0.0),
        ('{"name": "Ana", "age": 41}', 0.0),
        ('{"name": "Ana", "age": 41, "city": "Oslo", "country": "Norway"}', 0.0),
        ('Here it is: {"name": "Ana", "age": 41, "city": "Oslo"}', 0.0),
        ('{"name": "Ana", "age": 41, "city": "Os', 0.0),
        ("[" * 100_000, 0.0),
        ("", 0.0),
    ],
)
def test_a_json_object_is_right_or_wrong(json_extraction, answer, reward):
    messages, [result] = play(json_extraction, PERSON, answer)
    assert messages[-1].content == PERSON["question"]
    assert (result.reward, result.success, result.done) == (reward, reward == 1.0, True)


@pytest.fixture(scope="module")
def two(two_tools):
    """A held-out task that needs a price and the calculator."""
    return next(task for task in two_tools.tasks.eval_tasks(128) if len(task["calls"]) == 2)


def test_every_task_is_solved_by_its_calls(two_tools):
    kinds = set()
    for payload in two_tools.tasks.eval_tasks(64):
        messages, answers = play(two_tools, payload, *payload["calls"], payload["results"][-1])
        assert [message.content for message in messages[-len(payload["calls"]) :]] == payload["results"]
        end = answers[-1]
        assert (end.reward, end.success) == (pytest.approx(1.0), True)
        assert end.reward_parts == pytest.approx({"tools": 0.2, "calls": 0.2, "answer": 0.6})
        kinds.add(" ".join(call.split("(")[0] for call in payload["calls"]))
    assert kinds == {"[calculator", "[price [calculator"}


def test_two_tools_partial_credit(two_tools, two):
    first, second = two["calls"]
    price, right = two["results"]
    wrong = '[calculator(expression="1+1")]'
    for turns, reward, success in [
        ((first, second, "7"), 0.4, False),
        ((first, wrong, "2"), 0.2 + 0.1, False),
        ((first, price), 0.2, False),
        ((second, "7"), 0.0, False),
        ((first, first, second, "7"), 0.4 / 3, False),
        (("7",), 0.0, False),
        ((right,), 0.0, False),
        ((first, second, f" {right}\n"), 1.0, True),
        ((first, second, f"It is {right}."), 0.4, False),
        ((first, wrong, second, right), 0.2 * 2 / 3 + 0.2 / 3, False),
        ((first, first, second, right), 0.4 / 3, False),
    ]:
        end = play(two_tools, two, *turns)[1][-1]
        assert end.done
        assert (end.reward, end.success) == (pytest.approx(reward), success), turns


def test_two_tools_answer_what_cannot_be_called(two_tools, two):
    item = two["calls"][0].split('"')[1]
    messages, answers = play(
        two_tools,
        two,
        '[price(item="unicorn")]',
        f'[price(things="{item}")]',
        f'[shop(item="{item}")]',
        '[price(item="',
        f"[price({item})]",
        "[calculator(expression=\"__import__('os')\")]",
        '[calculator(expression="1/0")]',
        "I do not know.",
    )
    assert [answer.done for answer in answers] == [False] * 7 + [True]
    said = [message.content for message in messages[-7:]]
    assert said[0] == "there is no unicorn"
    assert all(text.startswith("error: ") for text in said[1:])
    assert answers[-1].reward_parts == pytest.approx({"tools": 0.2 / 7, "calls": 0.0, "answer": 0.0})
    assert not answers[-1].success


def test_the_policy_is_shown_dialogues_and_no_schemas(two_tools, two):
    assert list(two_tools.make().tools) == []
    roles = " ".join(message.role for message in two_tools.messages(two))
    dialogues = [f"user {'assistant tool ' * calls}assistant" for calls in (1, 2, 2, 1, 2, 2)]
    assert roles == " ".join(["system", *dialogues, "user"])
