"""Whole runs of environments that lie in a folder of the user's, `code.path`: an agent program, and built-in tools."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from environments.calculator import evaluate, show
from pipelines.attempts import Attempt
from pipelines.cli import main
from policy.chat import load_chat, load_tiny_chat
from tests.end_to_end.stack import audit, gone, headrace, steps
from tests.tools_page import write_shop

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


def servers_of(mark: str) -> list[int]:
    """Processes that run mcp_server.py with `mark` among their arguments."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if {b"mcp_server.py", mark.encode()} <= set((folder / "cmdline").read_bytes().split(b"\0")):
                found.append(int(folder.name))
    return [pid for pid in found if not gone(pid)]


@pytest.mark.timeout(300)
def test_a_run_trains_with_the_tools_of_an_mcp_server_and_leaves_none(tmp_path: Path) -> None:
    """One step, SIGKILL for the worker, two more: each worker's server ends with it."""
    out, mark = tmp_path / "run", str(tmp_path)
    command = f"environment.options.command={json.dumps([sys.executable, 'mcp_server.py', mark])}"
    more = ("--set", command, "--set", "learner.steps=3", "--set", "evaluation.before=false")
    with headrace(out, "run", str(OWN / "mcp_server.toml"), *SHORT, *more) as stack:
        stack.until(lambda: len(stack.steps()) >= 1, 150, "a step")
        first = servers_of(mark)
        stack.kill("rollouts")
        found = stack.finish(150)
    audit(out, found)
    assert (found["outcome"], found["step"], found["groups"]["failed"]) == ("steps", 3, 0)
    assert len(first) == 1
    assert servers_of(mark) == []
    assert all(step["counts"]["tool_calls"] > 0 for step in steps(out))
    dialogues = [json.loads(line)["tokens"] for line in (out / "latest" / "samples.jsonl").read_text().splitlines()]
    calls = re.findall(r"<calc>(.*?)</calc><result>(.*?)</result>", "".join(map(load_tiny_chat().decode, dialogues)))
    for expression, result in calls:
        is_one = re.fullmatch(r"\d{1,5}[-+*]\d{1,5}", expression)
        assert result == (show(evaluate(re.sub(r"\b0+(?=\d)", "", expression))) if is_one else "<error>"), expression
    assert sum(result != "<error>" for _, result in calls) > 5


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
def test_a_run_whose_workers_cannot_index_the_corpus_ends_and_says_why(shop: Path, tmp_path: Path) -> None:
    shop.with_name("corpus.jsonl").write_text('{"text": "Tea"}\n[]\n[]\n')
    with headrace(tmp_path / "run", "run", str(shop), *SHORT) as stack:
        assert stack.process.wait(100) == 2
    assert "the rollout job cannot use this run: search.corpus must hold documents, found 1" in stack.output
    ended = Attempt(stack.attempt).ended
    assert ended is not None
    assert (ended.exit_status, Path(ended.log).name) == (2, "rollouts.log")
    assert ended.why.endswith('line 2 of corpus.jsonl: ValueError: it must be an object with a string "text"')


SERVED = (
    'sampling.backend="remote"',
    'sampling.dialect="sglang"',
    'sampling.served_model="scripted"',
    'environment.options.tools=["search", "sql", "calculator", "python"]',
)


@pytest.mark.timeout(200)
def test_every_tool_answers_in_the_job_that_the_page_begins_with(tmp_path: Path) -> None:
    """docs/tools.md as it stands, with an inference server whose policy knows how to use the tools."""
    file = write_shop(tmp_path / "mine")
    with answering(shop_assistant) as address:
        sets = [f"--set={one}" for one in (*SERVED, f'sampling.servers=["{address}"]')]
        with headrace(tmp_path / "eval", "eval", str(file), "--json", *sets) as stack:
            found = stack.finish(150)
            figures = json.loads(stack.output.splitlines()[-1])["evaluation"]
    for how in ("sampled", "greedy"):
        assert figures[how]["ends"] == {"solved": 2, "wrong": 0, "truncated": 0, "failed": 0}
        assert figures[how]["parts"] == {"answer": 1.0}
        assert figures[how]["turns"]["max"] == 3
    assert found["dead_letters"] == {}
    samples = [json.loads(line) for line in (tmp_path / "eval" / "latest" / "samples.jsonl").read_text().splitlines()]
    assert sorted(sample["counts"]["tool_calls"] for sample in samples) == [1, 1, 3, 3]


def shop_assistant(conversation: str) -> str:
    """The next turn. What it says is made of what the tools have said, so a wrong result makes a wrong answer."""
    _, question, said = conversation.rpartition("What do three cups cost?")
    if not question:
        said = conversation.rpartition("On which shelf are the cups?")[2]
        shelf = re.search(r"1\. \[cups\] Cups\nCups stand on shelf (\w+)", said)
        return f"<answer>{shelf[1]}</answer>" if shelf else call("search", query="shelf of the cups")
    price, costs = re.search(r"price\n(\d+)", said), re.findall(r"^(?:<tool_response>)?(\d\d)\b", said, re.MULTILINE)
    if not price:
        return call("sql", query="SELECT price FROM items WHERE name = 'cup'")
    if not costs:
        return call("calculator", expression=f"3*{price[1]}") + call("python", code=f"print(3 * {price[1]})")
    return f"<answer>{costs[0] if costs == costs[:1] * 2 else costs}</answer>"


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@contextmanager
def answering(policy: Callable[[str], str]) -> Iterator[str]:
    """The address of an inference server in SGLang's dialect, with `policy` in the place of SmolLM2."""
    chat = load_chat("smollm2-135m")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)  # it lists no models

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer: dict[str, Any] = {"success": True}
            if self.path == "/generate":
                ids = [*chat.encode(policy(chat.decode(asked["input_ids"]))), chat.stop_token_ids[0]]
                logprobs = [[-0.1, token, None] for token in ids]
                finish = {"type": "stop", "matched": ids[-1]}
                answer = {"meta_info": {"finish_reason": finish, "output_token_logprobs": logprobs}}
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
