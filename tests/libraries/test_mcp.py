"""Real MCP servers, each a process of its own: over stdio and over streamable HTTP."""

import http.server
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pipelines.check import check
from pipelines.config import load_run
from pipelines.settings import SettingsError
from tests.end_to_end.stack import gone
from tests.libraries.serving import free_port, start

NAME = "mcp:MCP"
SERVER = Path(__file__).parent / "mcp_server.py"


def reward(payload, answer):
    return {"sum": float(answer.strip() == str(payload["answer"]))}


@pytest.fixture
def tasks(tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps({"question": f"{n}+1", "answer": n + 1}) + "\n" for n in range(30)))
    return {"tasks_file": str(file), "reward": f"{__name__}:reward"}


def over_stdio(play, tasks, **more):
    return play.spec(NAME, **tasks, command=[sys.executable, str(SERVER)], **more)


@pytest.fixture(scope="module")
def address():
    port = free_port()
    process = start(SERVER, port)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


@pytest.fixture
def by_hand(play, tasks):
    return play.spec(NAME, **tasks, command=[sys.executable, str(SERVER.with_name("mcp_by_hand.py"))])


def call(name, **arguments):
    return f"call {name} {json.dumps(arguments)}"


def answers(play):
    """What the policy was shown after its turns."""
    return [[message.content for message in shown] for shown in play.chat.shown if isinstance(shown, list)]


def pids(play):
    return re.findall(r"(\d+): ", json.dumps(answers(play)))


def is_alive(pid):
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return True


def test_over_stdio_tools_are_listed_called_and_their_errors_told(play, tasks):
    spec = over_stdio(play, tasks, prompt="What is {question}?", system="Use the tools.", calls_per_episode=2)
    payload = spec.tasks.task(0)
    number = payload["answer"] - 1
    lines = [
        call("add", a=number, b=1) + "\n" + call("note", text="x"),
        call("divide", a=1, b=0),
        call("add", a="many", b=1),
        call("subtract", a=1),
        str(payload["answer"]),
    ]
    episode = play(spec, lines, payload=payload)
    assert (episode.reward, episode.success, episode.reward_parts) == (1.0, True, {"sum": 1.0}), episode.error
    messages, schemas = play.chat.shown[0]
    assert [message.content for message in messages] == ["Use the tools.", f"What is {payload['question']}?"]
    shown = {schema["function"]["name"]: schema["function"] for schema in schemas}
    assert set(shown) == {"add", "note", "divide", "wait", "hang", "die"}
    assert shown["add"]["description"] == "Adds two whole numbers."
    assert shown["add"]["parameters"]["properties"]["a"]["type"] == "integer"
    (added, noted), (divided,), (malformed,), (unknown,) = answers(play)
    assert added == str(number + 1)
    assert noted.endswith(": x")
    assert divided == "error: Error executing tool divide"
    assert "must be of type integer" in malformed
    assert "no tool 'subtract'" in unknown
    assert episode.metrics["tool_calls"] == 3
    assert episode.metrics["refused_calls"] == 1
    assert episode.metrics["malformed_calls"] == 2
    assert not is_alive(*pids(play))


def test_each_episode_has_a_server_of_its_own_or_all_share_one(play, tasks, address):
    lines = [call("note", text="mine"), "2"]
    play(over_stdio(play, tasks, allowed=["note"]), lines, members=3)
    assert len(set(pids(play))) == 3
    assert all(text.endswith(": mine") for texts in answers(play) for text in texts)
    assert [schema["function"]["name"] for schema in play.chat.shown[0][1]] == ["note"]
    play.chat.shown.clear()
    play(over_stdio(play, tasks, shared=True), lines, members=3)
    assert len(set(pids(play))) == 1
    play.chat.shown.clear()
    for shared in (False, True):
        episodes = play(play.spec(NAME, **tasks, url=address, shared=shared), lines, members=3)
        assert [episode.status for episode in episodes] == ["completed"] * 3, episodes[0].error
    assert len(set(pids(play))) == 1
    assert answers(play)[-1][0].count("mine") == 6


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_a_call_that_takes_too_long_is_told_and_stops(play, tasks, address, transport):
    limits = {"call_timeout_s": 1.0}
    spec = (
        over_stdio(play, tasks, **limits) if transport == "stdio" else play.spec(NAME, **tasks, url=address, **limits)
    )
    began = time.monotonic()
    lines = [call("wait", seconds=30), call("add", a=1, b=1), "2"]
    episode = play(spec, lines)
    assert time.monotonic() - began < 20
    assert answers(play) == [["error: wait did not answer within 1 s"], ["2"]]
    assert (episode.status, episode.metrics["tool_timeouts"]) == ("completed", 1)


def test_a_server_that_hangs_ends_with_its_episode_and_the_sharing(play, tasks):
    lines = [call("note", text="before"), call("hang"), "2"]
    spec = over_stdio(play, tasks, call_timeout_s=1.0, shared=True)
    one_after_the_other = play(spec, lines, members=2, max_concurrency=1)
    assert [one.metrics["tool_timeouts"] for one in one_after_the_other] == [1, 1]
    assert len(set(pids(play))) == 2
    assert not any(is_alive(pid) for pid in pids(play))


def test_a_server_that_dies_fails_its_episode_and_the_next_has_another(play, tasks):
    spec = over_stdio(play, tasks, shared=True)
    lines = {"0": [call("note", text="a"), call("die")], "1": [call("note", text="b"), "2"]}
    first, second = play(spec, lambda session, turn, text: lines[session[-1]][turn], members=2, max_concurrency=1)
    assert first.status == "environment_error"
    assert "is gone" in first.error
    assert second.status == "completed"
    assert len(set(pids(play))) == 2


def test_over_http_a_server_that_died_is_used_again_when_it_is_back(play, tasks):
    port = free_port()
    process = start(SERVER, port)
    spec = play.spec(NAME, **tasks, url=f"http://127.0.0.1:{port}/mcp", start_timeout_s=10.0)
    dead = play(spec, [call("die")])
    assert (dead.status, process.wait(timeout=20)) == ("environment_error", 3), dead.error
    away = play(spec, [call("add", a=1, b=1)])
    assert away.status == "environment_error"
    assert "cannot be reached" in away.error
    process = start(SERVER, port)
    try:
        assert play(spec, [call("add", a=1, b=1), "2"]).status == "completed"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "one of command and url"),
        ({"command": ["x"], "url": "http://127.0.0.1:1/mcp"}, "one of command and url"),
        ({"url": "http://127.0.0.1:1/mcp", "bearer_env": "NO_SUCH_TOKEN"}, "NO_SUCH_TOKEN, which is not set"),
        ({"url": "http://127.0.0.1:1/mcp", "call_timeout_s": 0}, "call_timeout_s must be above 0"),
        ({"url": "http://127.0.0.1:1/mcp", "call_timeout_s": math.inf}, "call_timeout_s must be above 0"),
        ({"command": "python server.py"}, "command must be a list of texts, found 'python server.py'"),
        ({"command": ["x"], "allowed": "add"}, "allowed must be a list of texts, found 'add'"),
        ({"command": ["x"], "prompt": "{problem}"}, "it lacks 'problem'; it has question, answer"),
        ({"command": ["x"], "reward": ""}, "reward '': it must be module:Name"),
    ],
)
def test_what_cannot_be_is_said(play, tasks, options, says):
    with pytest.raises(ValueError, match=says):
        play.spec(NAME, **{**tasks, **options})


def test_a_server_that_does_not_start_fails_the_episode(play, tasks):
    spec = play.spec(NAME, **tasks, command=["no-such-command", "--port", "1"])
    episode = play(spec, ["2"])
    assert episode.status == "environment_error"
    assert "no-such-command --port 1" in episode.error
    silent = play.spec(
        NAME, **tasks, command=[sys.executable, "-c", "import time; time.sleep(60)"], start_timeout_s=1.0
    )
    assert "listed no tools within 1 s" in play(silent, ["2"]).error
    lacking = over_stdio(play, tasks, allowed=["subtract"])
    assert "has no tool subtract; it has add" in play(lacking, ["2"]).error


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["pyhton", "server.py"], r"command `pyhton server\.py`: there is no program 'pyhton' on PATH"),
        (["./serve", "x"], r"no program '\./serve' in .*/mine"),
        ([sys.executable, "servr.py", "--log", "log.js"], r"no file 'servr\.py' in .*/mine"),
        ([sys.executable, "/nowhere/server.py"], r"no file '/nowhere/server\.py'"),
        ([sys.executable, "server.py", "--out", "written.py"], ""),
        ([sys.executable, "-m", "server", "written.py"], ""),
        ([sys.executable, "https://example.org/server.js"], ""),
        (["env", "x.py"], ""),  # what it is to `env` is not known here
    ],
)
def test_a_command_that_cannot_start_is_found_without_starting_it(play, tasks, tmp_path, monkeypatch, command, says):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "server.py").write_text("raise SystemExit('started')\n")
    monkeypatch.setattr("environments.user_code._folder", tmp_path / "mine")
    spec = play.spec(NAME, **tasks, command=command)
    for look in (spec.check_machine, spec.prepare):
        if says:
            with pytest.raises(ValueError, match=says):
                look()
        else:
            look()


def test_the_dry_run_finds_a_misspelt_program(monkeypatch):
    monkeypatch.setattr("environments.user_code._folder", None)  # and what the run file names ends with the test
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = Path(__file__).parents[2] / "examples" / "own" / "mcp_server.toml"
    run = load_run(str(file), ['environment.options.command=["pyhton", "mcp_server.py"]'])
    with pytest.raises(SettingsError, match="there is no program 'pyhton' on PATH"):
        check(run)


def test_whatever_a_tool_answers_is_a_bounded_observation(play, by_hand):
    shown = {
        "megabytes": "ä" * 4096 + " [995904 more characters were cut]",
        "picture": "[image]\na",
        "link": "file:///notes.txt",
        "structured": '{"sum": 3}',
        "nothing": "",
        "babbles": "after all",
        "refuses": "error: no such file",
        "samples": "error: .*not supported",
        "elicits": "error: .*not supported",
        "hologram": "error: ValidationError: ",
    }
    episode = play(by_hand, [*(call(tool) for tool in shown), "2"])
    assert (episode.status, episode.error) == ("completed", "")
    for (answer,), (tool, expected) in zip(answers(play), shown.items(), strict=True):
        assert re.match(expected, answer) if expected.startswith("error") else answer == expected, tool
    assert episode.metrics == {"tool_calls": 10, "cut_outputs": 1, "refused_calls": 3, "tool_errors": 1}


HANGING = """
import asyncio, sys
from environments.environment import EnvironmentSettings, load_environment
from policy.chat import Action, ToolCall

async def main():
    options = {"tasks_file": sys.argv[1], "reward": "math:floor", "command": [sys.executable, sys.argv[2]]}
    spec = load_environment(EnvironmentSettings("environments.libraries.mcp:MCP", options=options), seed=3)
    environment = spec.make()
    await environment.reset({"question": "1+1"}, episode_id="a", seed=0)
    told = await environment.step(Action("", (ToolCall("note", {"text": "x"}),)))
    print(told.messages[0].content, flush=True)
    await environment.step(Action("", (ToolCall("hang", {}),)))

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a hanging process when its parent is killed")
def test_a_server_that_hangs_ends_when_its_worker_is_killed(tasks):
    worker = subprocess.Popen([sys.executable, "-c", HANGING, tasks["tasks_file"], str(SERVER)], stdout=subprocess.PIPE)
    try:
        assert worker.stdout is not None
        pid = int(worker.stdout.readline().partition(b":")[0])
        time.sleep(0.5)  # the call has reached it
        assert not gone(pid)
    finally:
        worker.kill()
        worker.communicate()
    deadline = time.monotonic() + 20
    while not gone(pid):
        assert time.monotonic() < deadline, "the server lives on"
        time.sleep(0.05)


def test_a_server_that_leaves_in_a_call_fails_the_episode(play, by_hand):
    episode = play(by_hand, [call("leaves"), "2"])
    assert episode.status == "environment_error"
    assert "is gone" in episode.error


def test_an_idle_server_that_hangs_is_ended_when_the_next_episode_comes(play, tasks, monkeypatch, caplog):
    monkeypatch.setattr("environments.libraries.mcp._PROBE_S", 0.5)

    def lines(session, turn, text):
        if turn and session.endswith("0"):
            os.kill(int(re.findall(r"(\d+): ", text)[-1]), signal.SIGSTOP)
        return "2" if turn else call("note", text="x")

    episodes = play(over_stdio(play, tasks, shared=True), lines, members=2, max_concurrency=1)
    assert [episode.status for episode in episodes] == ["completed"] * 2, episodes[1].error
    stopped, other = pids(play)
    assert stopped != other
    assert not is_alive(stopped)
    assert "is connected to anew: it does not answer" in caplog.text


def test_the_token_is_sent(play, tasks, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "secret")
    sent = []

    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            sent.append(self.headers["Authorization"])
            self.send_error(401)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/mcp"
        episode = play(play.spec(NAME, **tasks, url=url, bearer_env="MY_TOKEN"), ["2"])
        server.shutdown()
    assert episode.status == "environment_error"
    assert set(sent) == {"Bearer secret"}
