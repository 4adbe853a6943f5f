"""Whole runs of environments that lie in a folder of the user's, `code.path`: an agent program, and built-in tools."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from environments.calculator import evaluate, show
from pipelines.cli import main
from policy.chat import load_tiny_chat
from tests.end_to_end.stack import audit, headrace, steps

OWN = Path(__file__).parents[2] / "examples" / "own"
SHORT = ("--set", "learner.steps=2", "--set", "evaluation.questions=8", "--set", "rollouts.heartbeat_interval_s=1.0")
ENVIRONMENT = """
[environment]
name = "environments.builtin:ToolQuestions"
max_turns = 3

[environment.options]
questions = "sums.jsonl"
tools = ["calculator", "python", "search", "sql"]
system = ""
calculator = { calls_per_episode = 1 }
search = { corpus = "corpus.jsonl" }
sql = { database = "shop.db" }
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A run file, and beside it the questions and what the tools look into."""
    folder = tmp_path / "shop"
    folder.mkdir()
    shutil.copy(OWN / "sums.jsonl", folder)
    (folder / "corpus.jsonl").write_text('{"text": "Tea stands on shelf B4."}\n{"text": "Cups stand on A2."}\n')
    with sqlite3.connect(folder / "shop.db") as connection:
        connection.execute("CREATE TABLE items (name TEXT, stock INTEGER)")
    connection.close()
    example = (OWN / "function_tool.toml").read_text()
    before, _, after = example.partition("[environment]")
    file = folder / "run.toml"
    file.write_text(before + ENVIRONMENT + after[after.index("\n[code]") :])
    return file


@pytest.mark.timeout(300)
def test_a_run_trains_on_an_agent_program_of_the_users(tmp_path: Path) -> None:
    with headrace(tmp_path / "run", "run", str(OWN / "agent_program.toml"), *SHORT) as stack:
        found = stack.finish(250)
    check_run(tmp_path / "run", found)


@pytest.mark.timeout(300)
def test_a_run_trains_with_built_in_tools_and_no_code(shop: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "run"
    with headrace(out, "run", str(shop), *SHORT) as stack:
        found = stack.finish(250)
        log, learner = ((stack.attempt / "logs" / f"{name}.log").read_text() for name in ("rollouts", "learner"))
        adapter = str(stack.attempt / "adapters" / found["version"])
    check_run(out, found)
    assert found["dead_letters"] == {}
    for once in ("search: indexed 2 documents", "python sandbox, restricted interpreter: protected"):
        assert log.count(once) == 1, log
        assert log.index(once) < log.index("ready to run episodes")
        assert once not in learner

    for step in steps(out):
        assert set(step["reward_parts"]) == {"answer"}
        assert 0 < step["reward_parts"]["answer"] < 1  # every group that trains has variance
        assert 0 < step["counts"]["tool_calls"] <= 3
    check_calls([json.loads(line) for line in (out / "latest" / "samples.jsonl").read_text().splitlines()])
    capsys.readouterr()
    assert main(["show", str(out), "--dialogues", "8"]) == 0
    shown = capsys.readouterr().out
    assert ", tool_calls 1" in shown
    assert "</calc><result>" in shown

    with headrace(tmp_path / "eval", "eval", str(shop), "--adapter", adapter, "--json", *SHORT) as stack:
        stack.finish(100)
        figures = json.loads(stack.output.splitlines()[-1])["evaluation"]["sampled"]
    assert figures["answered"] == 8
    assert figures["parts"] == {"answer": figures["reward"]}
    assert figures["success"] == figures["reward"]


def check_run(out: Path, found: dict[str, Any]) -> None:
    audit(out, found)
    assert (found["outcome"], found["step"]) == ("steps", 2)
    assert found["groups"]["trained"] > 0
    assert found["compiles_after_warmup"] == 0


def check_calls(samples: list[dict[str, Any]]) -> None:
    """What the policy read is what its expression is worth; one call too many, and one without a value, are refused."""
    chat, right = load_tiny_chat(), 0
    for sample in samples:
        calls = re.findall(r"<calc>(.*?)</calc><result>(.*?)</result>", chat.decode(sample["tokens"]))
        for number, (expression, result) in enumerate(calls):
            try:
                value = show(evaluate(expression)) if number == 0 else "<error>"
            except ValueError:
                value = "<error>"
            assert result == value, (expression, result)
            right += value != "<error>"
        assert sample["counts"].get("tool_calls", 0) >= len(calls)
        assert sample["counts"].get("calls_over_limit", 0) >= max(0, len(calls) - 1)
    assert right > 5
    assert {sample["phase"] for sample in samples} == {"before", "train", "after"}


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("corpus.jsonl", b"Tea stands on shelf B4.\n", "found 0 in .* and 1 lines that are none; the first: line 1 of"),
        ("corpus.jsonl", None, "search.corpus must name a file or a folder that is there, found 'corpus.jsonl'"),
        ("shop.db", b"name,stock\n", "sql.database must name an SQLite database, found .*shop.db', which is none"),
        ("shop.db", None, "sql.database must name a readable file, found 'shop.db'"),
        ("sums.jsonl", b'{"question": "1+1", "answer": 2}\n{"question": "1+2"}\n', "line 2: it lacks 'answer'"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_a_dry_run(
    file: str, content: bytes | None, says: str, shop: Path, capsys: Any
) -> None:
    path = shop.with_name(file)
    path.unlink() if content is None else path.write_bytes(content)
    assert main(["run", str(shop), "--dry-run"]) == 2
    assert re.search(says, capsys.readouterr().err)


@pytest.mark.timeout(120)
def test_a_run_with_a_broken_corpus_begins_no_episode_and_says_why(shop: Path, tmp_path: Path) -> None:
    shop.with_name("corpus.jsonl").write_text("[]\n")
    with headrace(tmp_path / "run", "run", str(shop)) as stack:
        assert stack.process.wait(100) == 2
    assert "the learner cannot use this run" in stack.output
    assert "search.corpus must hold documents, found 0" in stack.output
