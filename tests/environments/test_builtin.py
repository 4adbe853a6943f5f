"""Built-in tools by name, and questions answered with them."""

import asyncio
import json
import re
import sqlite3
import sys

import pytest

from environments.builtin import ToolQuestions, Toolset, score_answer
from environments.environment import Action, EnvironmentSettings, Prepared, load_environment
from environments.user_code import make_importable, send
from pipelines.cli import main
from policy.chat import FinishReason, ToolCall
from tests.tools_page import write_shop
from trajectories.storage import open_storage


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
        ({"tools": ["sql"]}, "search has settings and is not among the tools: sql"),
        ({"questions": 5}, "questions must be a text, found 5"),
        ({"held_out": "a tenth"}, "held_out must be a number, found 'a tenth'"),
        ({"tools": [], "search": None}, "sql has settings and is not among the tools: none"),
        ({"tools": "search"}, r"tools must be a list of names, such as \["),
        ({"sql": {"databse": "shop.db"}}, "sql has no setting 'databse'; did you mean database?"),
        ({"sql": {"tables": 1}}, "sql has no setting 'tables'; its settings are timeout_s, output_chars, "),
        ({"search": {"corpus": "x", "results": "3"}}, "search.results must be a whole number, found '3'"),
        ({"search": {"corpus": "x", "timeout_s": True}}, "search.timeout_s must be a number, found True"),
        ({"search": {"corpus": ["x"]}}, "search.corpus must be a text, found"),
        ({"search": "corpus.jsonl"}, "search must be a table of settings, such as .*, found 'corpus.jsonl'"),
        (
            {"tools": ["http"], "http": {"allow": "https://a.org/"}, "search": None, "sql": None},
            "must be a list of texts",
        ),
        ({"questions": "nowhere.jsonl"}, "nowhere.jsonl: there is no such file"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options, changes, message):
    with pytest.raises(ValueError, match=message):
        ToolQuestions(**(options | changes))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"question": "a"}, "line 2: it lacks 'answer'; it has question"),
        ({"answer": 1}, "line 2: it lacks 'question', the key; it has answer"),
        ({"question": 3, "answer": 1}, "line 2: question must be a text, found 3"),
        ({"question": "a", "answer": [1]}, r"line 2: answer must be a text, a number, true or false, found \[1\]"),
        ({"question": "a", "answer": None}, "line 2: answer must be .* found None"),
    ],
)
def test_a_question_that_cannot_be_asked_or_be_right_is_named(options, tmp_path, line, message):
    (tmp_path / "questions.jsonl").write_text(json.dumps({"question": "1+1", "answer": 2}) + "\n" + json.dumps(line))
    with pytest.raises(ValueError, match=message):
        ToolQuestions(**options)


def test_what_is_held_out_can_be_chosen(options, tmp_path):
    assert len(ToolQuestions(**options, held_out=0.5).tasks.held_out) > 30
    (tmp_path / "apart.jsonl").write_text('{"question": "What does item 3 cost?", "answer": 1.5}')
    tasks = ToolQuestions(**options, held_out_file=str(tmp_path / "apart.jsonl")).tasks
    assert (len(tasks.training), len(tasks.held_out)) == (99, 1)


def test_what_a_policy_is_shown_is_known_before_anything_is_started(options):
    spec = ToolQuestions(
        **(options | {"tools": ["calculator", "python", "search", "sql", "http"]}), http={"allow": ["https://a.org/"]}
    )
    messages, tools = spec.first_prompt(spec.tasks.task(0))
    assert [message.role for message in messages] == ["system", "user"]
    search, python = (
        next(one for one in spec._toolset._makers if type(one).__name__ == name)
        for name in ("SearchTool", "PythonTool")
    )
    assert search._built is None
    assert python.sandbox._server is None
    spec.prepare()
    assert search.corpus.documents == 1
    assert list(spec.make().tools) == tools
    python.sandbox.close()
    search.close()


def test_files_are_found_in_the_users_folder_before_the_current_one(options, tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    relative = options | {
        "questions": "questions.jsonl",
        "search": {"corpus": "corpus.jsonl"},
        "sql": {"database": "shop.db"},
    }
    with pytest.raises(ValueError, match=rf"questions.jsonl: there is no such file; its folder {here} holds no .jsonl"):
        ToolQuestions("questions.jsonl", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    make_importable(str(tmp_path))
    (here / "questions.jsonl").write_text('{"question": "1+1", "answer": 2}')
    assert len(ToolQuestions(**relative).tasks.training) > 80
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    make_importable(send(tmp_path, open_storage(str(tmp_path / ".bucket"))))  # as on a machine in the cloud
    unpacked = ToolQuestions(**relative)
    assert len(unpacked.tasks.training) > 80
    unpacked.prepare()
    make_importable("")
    assert len(ToolQuestions("questions.jsonl", []).tasks.training) == 1
    with pytest.raises(ValueError, match=r"found 'corpus\.jsonl'"):
        Toolset(["search"], {"search": {"corpus": "corpus.jsonl"}})


@pytest.fixture
def shop(tmp_path):
    return write_shop(tmp_path / "mine")


def test_the_page_shows_a_run_that_works(shop, capsys):
    assert main(["run", str(shop), "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert "2 held-out questions, a first prompt of " in said
    assert 200 < int(said.rsplit(" ", 2)[1]) < 300


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            ["sampling.max_context=20"],
            "sampling.max_context is 20, and the first prompt of environment.name .* tokens",
        ),
        (["environment.options.system=Go."], "first prompt .* cannot be made: calculator-tiny: .* found 'system'"),
        (["environment.options.questons=x"], "unexpected keyword argument 'questons'; environment.options may hold"),
        (["evaluation.questions=3"], "there are 2 held-out tasks, asked for 3"),
    ],
)
def test_a_dry_run_says_what_does_not_fit(shop, settings, says, capsys):
    tiny = ["model.path=calculator-tiny", "sampling.max_tokens=14", "environment.options.system=", *settings]
    assert main(["run", str(shop), "--dry-run", *(f"--set={one}" for one in tiny)]) == 2
    assert re.search(says, capsys.readouterr().err)


def test_the_last_answer_counts_and_a_turn_of_opening_tags_alone_is_no_work():
    def score(text):
        return score_answer({"answer": "Two  Words"}, [Action(text, (), FinishReason.STOP)]).success

    assert score("<answer>one</answer> or <answer>\ntwo words </answer>, </answer><answer>")
    assert score("<answer>two words</answer><answer>one")
    assert not score("<answer><answer>two words</answer>")
    assert not score("</answer>two words<answer>")
    assert not score("<answer>" * 100_000)  # the square of it would take minutes
