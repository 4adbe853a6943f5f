"""Built-in tools by name, and questions answered with them."""

import asyncio
import json
import sqlite3

import pytest

from environments.builtin import ToolQuestions, score_answer
from environments.environment import Action, EnvironmentSettings, Prepared, load_environment
from policy.chat import FinishReason, ToolCall


@pytest.fixture
def options(tmp_path):
    questions = [{"question": f"What does item {n} cost?", "answer": n / 2} for n in range(100)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (tmp_path / "corpus.jsonl").write_text('{"id": "a", "text": "Prices are in the table items."}\n')
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute("CREATE TABLE items (id INTEGER PRIMARY KEY, price REAL)")
        connection.executemany("INSERT INTO items VALUES (?, ?)", [(n, n / 2) for n in range(100)])
    connection.close()
    return {
        "questions": str(tmp_path / "questions.jsonl"),
        "tools": ["calculator", "search", "sql"],
        "search": {"corpus": str(tmp_path / "corpus.jsonl")},
        "sql": {"database": str(tmp_path / "shop.db"), "calls_per_episode": 1},
    }


def called(**calls):
    parts = [ToolCall(name, arguments) for name, arguments in calls.items()]
    return Action("", tuple(parts), FinishReason.STOP)


def test_a_run_file_combines_tools(options):
    spec = load_environment(EnvironmentSettings("environments.builtin:ToolQuestions", options), seed=3)
    assert isinstance(spec, Prepared)
    spec.prepare()
    payload = spec.tasks.task(5)
    assert payload == spec.tasks.task(5)
    held = spec.tasks.eval_tasks(4)
    assert all(spec.tasks.task(n) not in held for n in range(200))

    async def episode():
        environment = spec.make()
        assert [tool["function"]["name"] for tool in environment.tools] == ["calculator", "search", "sql"]
        await environment.reset(payload, episode_id="1.0/0", seed=1)
        seen = await environment.step(
            called(calculator={"expression": "6*7"}, search={"query": "price"}, sql={"query": "SELECT 1"})
        )
        again = await environment.step(called(sql={"query": "SELECT 1"}))
        text = f"So: <answer>1</answer> no, <answer> {payload['answer']}\n</answer>"
        return seen, again, await environment.step(Action(text, (), FinishReason.STOP))

    for _ in range(2):
        seen, again, end = asyncio.run(episode())
        assert [one.content for one in seen.messages] == ["42", "1. [a]\nPrices are in the table items.", "1\n1"]
        assert again.metrics["calls_over_limit"] == 1
        assert (end.reward, end.done, end.success) == (1.0, True, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tools": ["abacus"]}, "there is no built-in tool 'abacus'; there are calculator, python, search, sql, http"),
        ({"tools": ["sql"]}, "search has settings and is not among the tools sql"),
        ({"sql": {"tables": 1}}, "sql: .*unexpected keyword argument 'tables'"),
        ({"questions": "nowhere.jsonl"}, "nowhere.jsonl: there is no such file"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options, changes, message):
    with pytest.raises(ValueError, match=message):
        ToolQuestions(**(options | changes))


def test_the_last_answer_counts_and_a_turn_of_opening_tags_alone_is_no_work():
    def score(text):
        return score_answer({"answer": "Two  Words"}, [Action(text, (), FinishReason.STOP)]).success

    assert score("<answer>one</answer> or <answer>\ntwo words </answer>, </answer><answer>")
    assert score("<answer>two words</answer><answer>one")
    assert not score("<answer><answer>two words</answer>")
    assert not score("</answer>two words<answer>")
    assert not score("<answer>" * 100_000)  # the square of it would take minutes
