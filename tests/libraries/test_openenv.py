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


def answers(play):
    """What the policy was shown after a turn, once."""
    ((message,),) = [shown for shown in play.chat.shown if isinstance(shown, list)]
    return message.content


@pytest.fixture(scope="module")
def odd():
    port = free_port()
    process = start(SERVER.with_name("openenv_odd.py"), port)
    yield f"ws://127.0.0.1:{port}"
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        ("text", "JSONDecodeError"),
        ("list", "'list' object"),
        ("null", "'NoneType' object"),
        ("binary", "UnicodeDecodeError"),
        ("deep", "RecursionError"),
        ("empty", "must hold an observation, found {}"),
        ("nothing", "must hold an observation, found {}"),
        ("other", 'must hold an observation, found {"step_count": 3}'),
        ("refused", "no such move (code: EXECUTION_ERROR)"),
        ("word", "no field 'text' (environment.options.observation_field), found \"heard\""),
        ("fields", 'no field \'text\' (environment.options.observation_field), found {"words": "heard"}'),
        ("nan", "rewards must be finite"),
        ("infinite", "rewards must be finite"),
        ("reward", 'reward must be a number or null, found "much"'),
        ("done", 'done must be true or false, found "no"'),
        ("leave", "1011"),
        ("huge", "1009"),
    ],
)
def test_an_odd_reply_fails_its_episode_and_says_what_it_is(play, odd, reply, says):
    spec = play.spec(NAME, urls=odd, observation_field="text")
    began = time.monotonic()
    failed, won = play(spec, lambda session, turn, text: "won" if session[-1] == "1" else reply, members=2)
    assert time.monotonic() - began < 30
    assert (failed.status, failed.reward) == ("environment_error", 0.0)
    assert says in failed.error
    assert odd in failed.error or "rewards" in says or "field" in says
    assert (won.status, won.reward, won.success) == ("completed", 1.0, True), won.error


def test_a_session_that_ends_between_two_steps_is_not_taken_up_by_another(play, odd):
    spec = play.spec(NAME, urls=odd, observation_field="text")

    def lines(session, turn, text):
        time.sleep(turn)  # the server leaves after its answer to the first turn
        return ["idle", "won"][turn]

    episode = play(spec, lines)
    assert (episode.status, episode.success, episode.reward) == ("environment_error", False, 0.0)
    assert f"the OpenEnv server {odd}: " in episode.error


def test_a_server_that_hangs_or_talks_too_long_ends_the_episode_alone(play, odd):
    spec = play.spec(NAME, urls=odd, observation_field="text")
    lines = lambda session, turn, text: "won" if turn else ["hang", "long", "won"][int(session[-1])]  # noqa: E731
    hung, long, won = play(spec, lines, members=3, step_timeout_s=5.0, max_observation=100)
    assert hung.status == "timeout"
    assert (long.success, won.success) == (True, True), long.error
    assert answers(play) == "x" * 100 + " [2999900 more characters were cut]"


def test_an_address_must_be_one(play):
    with pytest.raises(ValueError, match="urls must be http"):
        play.spec(NAME, urls="localhost:8000")
