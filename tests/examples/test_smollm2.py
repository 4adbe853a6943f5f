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

EXAMPLES = Path(__file__).parents[2] / "examples"
RUNS = {"json_extraction": "smollm2_json.toml"}


def spec(name, **options):
    run = load_run(str(EXAMPLES / RUNS[name]))
    return load_environment(run.environment, options.get("seed", run.seed))


@pytest.fixture(scope="module")
def json_extraction():
    return spec("json_extraction")


def play(environments, payload, *turns):
    """(what the policy is shown at last, the answers to its turns)"""

    async def episode():
        environment = environments.make()
        messages = list(await environment.reset(payload, episode_id="0.0/0", seed=0))
        answers = []
        for turn in turns:
            answers.append(await environment.step(Action(turn, (), FinishReason.STOP)))
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


@pytest.mark.parametrize(("name", "key"), [("json_extraction", "person")])
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
        assert len(questions(trained)) > 2500
        assert not keys(trained) & keys(held_out)
        assert not questions(trained) & questions(held_out)
    assert len(keys(held_out)) == 128


@pytest.mark.parametrize("name", RUNS)
def test_the_worked_examples_are_not_held_out(name):
    environments = spec(name)
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
