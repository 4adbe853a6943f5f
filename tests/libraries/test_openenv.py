"""A real OpenEnv server in a process of its own, on loopback."""

import json
import time
from pathlib import Path

import pytest

from tests.libraries.serving import free_port, start

pytestmark = pytest.mark.libraries

NAME = "openenv:OpenEnv"
SERVER = Path(__file__).parent / "openenv_server.py"


@pytest.fixture(scope="module")
def server():
    port = free_port()
    process = start(SERVER, port)
    yield port
    process.kill()
    process.wait()


def test_an_episode_is_a_session_with_the_tasks_parameters(play, server, tmp_path):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"start": 2, "seed": n}) + "\n" for n in range(40)))
    spec = play.spec(
        NAME, urls=f"http://127.0.0.1:{server}", tasks_file=str(tasks), observation_field="text", system="Count."
    )
    episode = play(spec, ["2", "no", "1"], group=6)
    assert (episode.reward, episode.success, len(episode.turns)) == (1.0, True, 3), episode.error
    (messages, _), second, third = play.chat.shown
    assert [message.role for message in messages] == ["system", "user"]
    assert messages[1].content.startswith("say 2, episode 6.0/0, seed ")
    assert [second[0].content, third[0].content] == ["say 1", "say 1"]


def test_episodes_at_once_have_states_of_their_own(play, server):
    spec = play.spec(NAME, urls=[f"ws://127.0.0.1:{server}"], observation_field="text", action_tag="action")
    says = lambda session, turn, text: f"<action>{text.split('say ')[-1][0]}</action>"  # noqa: E731
    episodes = play(spec, says, members=8)
    assert [episode.reward for episode in episodes] == [1.0] * 8, episodes[0].error
    assert len({len(episode.turns) for episode in episodes}) == 1
    told = play(spec, ["3"], max_turns=1)
    assert told.metrics["invalid_actions"] == 1


def test_a_step_that_takes_too_long_ends_and_the_next_episode_runs(play, server):
    spec = play.spec(NAME, urls=f"http://127.0.0.1:{server}", observation_field="text")
    began = time.monotonic()
    episode = play(spec, ["sleep"], step_timeout_s=2.0)
    assert (episode.status, time.monotonic() - began < 20) == ("timeout", True)
    assert play(spec, ["3", "2", "1"]).success


def test_a_server_that_dies_fails_its_episodes_and_one_that_is_back_is_used(play):
    port = free_port()
    process = start(SERVER, port)
    spec = play.spec(NAME, urls=f"http://127.0.0.1:{port}", observation_field="text")
    dead = play(spec, ["die"], step_timeout_s=20.0)
    assert dead.status == "environment_error"
    process.wait(timeout=20)
    gone = play(spec, ["3"])
    assert gone.status == "environment_error"
    assert "Failed to connect" in gone.error or "connect" in gone.error
    process = start(SERVER, port)
    try:
        assert play(spec, ["3", "2", "1"]).success
    finally:
        process.kill()
        process.wait()


def test_an_address_must_be_one(play):
    with pytest.raises(ValueError, match="urls must be http"):
        play.spec(NAME, urls="localhost:8000")
