"""Rewards of named parts, and a judge at a real server."""

import asyncio
import socket
import threading

import numpy as np
import pytest

from environments.environment import EnvironmentSettings, load_environment
from environments.rewards import Judge, JudgeError, Length, Matches, Rewards, Tags
from environments.tools import Score, ToolEnvironment
from policy.chat import Message
from policy.files import CALCULATOR_TINY
from tests.policy.server import serving
from trajectories.schema import Status, Task

SETS = ("sampling.max_context=64", "sampling.slots=4", "sampling.small_batch=0")


def given(function, text="", payload=None):
    return asyncio.run(function(payload or {}, text))


def correct(payload, text):
    return float(text == payload["answer"])


async def counted(payload, text):
    return {"vowels": 2, "words": 3.0}


def test_the_parts_are_weighted_and_add_up_to_the_reward():
    rewards = Rewards({"correct": correct, "count": counted, "short": Length(3)}, {"count": 0.5, "short": 2.0})
    parts = given(rewards, "46", {"answer": "46"})
    assert parts == {"correct": 1.0, "count.vowels": 1.0, "count.words": 1.5, "short": 0.0}
    # It is a reward function itself, so rewards nest.
    nested = Rewards({"task": rewards, "form": Matches("[0-9]+")}, {"task": 0.1})
    assert given(nested, "46", {"answer": "46"})["task.count.words"] == pytest.approx(0.15)


def test_a_blocking_reward_function_runs_beside_the_event_loop():
    release = threading.Event()

    async def main():
        waiting = asyncio.create_task(Rewards({"slow": lambda payload, text: float(release.wait(60))})({}, ""))
        await asyncio.sleep(0.05)
        release.set()
        return await waiting

    assert asyncio.run(main()) == {"slow": 1.0}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1", [1.0]])
def test_a_part_that_is_no_finite_number_is_refused_by_name(value):
    with pytest.raises(ValueError, match="the reward part odd must be a finite number"):
        given(Rewards({"fine": correct, "odd": lambda payload, text: value}), "1", {"answer": "1"})


def test_a_part_may_be_a_number_of_numpy_as_a_reward_may():
    parts = given(Rewards({"a": lambda payload, text: np.float32(0.5), "b": lambda payload, text: np.int64(2)}))
    assert parts == {"a": 0.5, "b": 2.0}
    assert {type(part) for part in parts.values()} == {float}


def test_two_parts_of_one_name_are_refused_as_they_would_not_add_up():
    with pytest.raises(ValueError, match=r"found count\.words twice"):
        given(Rewards({"count": counted, "count.words": Length(3)}))


def test_a_pattern_that_backtracks_without_end_stops_at_its_limit_and_holds_nobody_up():
    stuck = Matches(r"(<think>(\w|\w\w)*</think>)", timeout_s=0.3)
    assert given(stuck, "<think>abc</think>") == 1.0

    async def main():
        waiting = asyncio.create_task(stuck({}, "<think>" + "a" * 5000))
        turns = 0
        while not waiting.done():
            await asyncio.sleep(0.01)
            turns += 1
        return turns, waiting.exception()

    turns, error = asyncio.run(main())
    assert turns >= 3
    assert isinstance(error, TimeoutError)
    assert "took longer than 0.3 s on a text of 5007 characters" in str(error)


def test_rewards_refuse_what_can_never_be_right():
    with pytest.raises(ValueError, match="weights names corect, the parts are correct"):
        Rewards({"correct": correct}, {"corect": 1.0})
    with pytest.raises(ValueError, match="at least one part"):
        Rewards({})
    with pytest.raises(ValueError, match="the weight of correct must be a finite number"):
        Rewards({"correct": correct}, {"correct": float("inf")})


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a\nb</think>\n<answer>4</answer>\n", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("<think>a</think> so <answer>4</answer>", 0.0),
        ("well <think>a</think><answer>4</answer>", 0.0),
        ("<answer>4</answer><think>a</think>", 0.0),
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0.0),
        ("<think>a<answer>4</think></answer>", 0.0),
        ("<think>a</think><answer>4", 0.0),
        ("", 0.0),
    ],
)
def test_tags_stand_once_in_order_and_alone(text, reward):
    assert given(Tags("think", "answer"), text) == reward


def test_format_and_length():
    assert given(Matches(r"\d+ apples\n.*"), "3 apples\nand\nmore") == 1.0
    assert given(Matches(r"\d+"), "3 apples") == 0.0
    lengths = [given(Length(10, 4), "x" * count) for count in (6, 8, 10, 11)]
    assert lengths == [0.0, -0.5, -1.0, -1.0]
    assert given(Length(2, 0, measure=lambda text: len(text.split())), "three words here") == -1.0


@pytest.fixture(scope="module")
def server():
    with serving(CALCULATOR_TINY, "--port", "0", sets=SETS) as server:
        yield server


@pytest.fixture
def judge(server):
    """The tiny model, asked for "<response>+34", repeats the numbers: the first of them is its score."""
    made = []

    def make(**changes):
        settings = {"prompt": "{response}+{other}", "score": r"<calc>(-?\d+)", "highest": 100.0, "max_tokens": 12}
        made.append(Judge(**{"servers": (server.address,), **settings, **changes}))
        return made[-1]

    yield make
    for judge in made:
        judge.close()


def test_a_judge_s_score_is_read_from_its_answer(judge):
    found = judge()
    assert given(found, "12", {"other": 34}) == {"judged": 0.12}
    assert given(judge(lowest=10, highest=60), "35", {"other": 34}) == {"judged": 0.5}
    with pytest.raises(JudgeError, match=r"its score 12 is not within 20 to 100"):
        given(judge(lowest=20), "12", {"other": 34})
    with pytest.raises(JudgeError, match="its answer has no score: '<calc>12"):
        given(judge(score=r"score: (\d+)"), "12", {"other": 34})
    with pytest.raises(JudgeError, match="cannot be filled in: KeyError: 'other'; the payload has question"):
        given(found, "12", {"question": "?"})


def test_a_judge_is_asked_by_many_at_once_and_from_any_event_loop(judge):
    rewards = Rewards({"style": judge(concurrency=3)}, {"style": 10.0})

    async def main():
        return await asyncio.gather(*(rewards({"other": 34}, str(number)) for number in range(10, 30)))

    for _ in range(2):
        assert [parts["style.judged"] for parts in asyncio.run(main())] == pytest.approx(
            [n / 10 for n in range(10, 30)]
        )


def silent_address():
    """A server that takes connections and never answers."""
    listening = socket.create_server(("127.0.0.1", 0))
    return listening, f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_judge_that_is_silent_or_away_fails_in_time_or_gives_the_neutral_part(judge):
    listening, address = silent_address()
    with listening:
        silent = judge(servers=(address,), timeout_s=0.3)
        with pytest.raises(JudgeError, match=r"it did not answer within 0\.3 s|did not answer within"):
            given(silent, "12", {"other": 34})
        neutral = judge(servers=(address,), timeout_s=0.3, neutral=0.5)
        assert given(Rewards({"style": neutral}), "12", {"other": 34}) == {"style.unjudged": 0.5}
    with pytest.raises(JudgeError, match="could not be reached"):
        given(judge(servers=(address,), retries=0), "12", {"other": 34})


def test_an_episode_whose_judge_gives_no_score_has_failed_and_is_not_wrong(play, kit, judge):
    def scored_by(rewards):
        async def score(payload, actions):
            parts = await rewards(payload, actions[-1].text)
            return Score(parts, success=sum(parts.values()) > 0)

        return kit.Spec(lambda: ToolEnvironment([], lambda payload: [Message("user", "1+1")], score))

    client = kit.Speaker(lambda session, turn: "12")
    task = Task("run", 0, payload={"other": 34})
    broken = Rewards({"form": Matches("12"), "style": judge(score=r"score: (\d+)")})
    failed = asyncio.run(play(client, scored_by(broken)).run(task, 0))
    assert (failed.status, failed.reward_parts) == (Status.ENVIRONMENT_ERROR, {})
    assert "JudgeError: the judge gave no score" in failed.error
    fine = asyncio.run(play(client, scored_by(Rewards({"form": Matches("12"), "style": judge()}))).run(task, 0))
    assert fine.reward_parts == {"form": 1.0, "style.judged": 0.12}
    assert fine.reward == pytest.approx(1.12)


def test_rewards_are_named_in_the_run_file_like_a_function(play, kit, tmp_path, monkeypatch):
    (tmp_path / "politeness.py").write_text(
        "from environments.rewards import Matches, Rewards\n"
        "def correct(payload, text):\n"
        "    return float(payload['answer'] in text)\n"
        "REWARD = Rewards({'correct': correct, 'digits': Matches('[0-9]+')}, {'digits': 0.25})\n"
    )
    (tmp_path / "sums.jsonl").write_text(
        "".join(f'{{"question": "{n}+1", "answer": "{n + 1}"}}\n' for n in range(10, 40))
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    options = {"tasks": "sums.jsonl", "reward": "politeness:REWARD"}
    spec = load_environment(EnvironmentSettings(name="environments.verifiable:verifiable", options=options), 0)
    payload = spec.tasks.task(0)
    client = kit.Speaker(lambda session, turn: payload["answer"])
    episode = asyncio.run(play(client, spec).run(Task("run", 0, payload=payload), 0))
    assert (episode.reward_parts, episode.success) == ({"correct": 1.0, "digits": 0.25}, True)


def test_a_judge_refuses_settings_that_cannot_work():
    with pytest.raises(ValueError, match=r"must contain \{response\}"):
        Judge(("http://h:1",), "how good is it?")
    with pytest.raises(ValueError, match="with a group for the number"):
        Judge(("http://h:1",), "{response}", score=r"\d+")
    with pytest.raises(ValueError, match="neutral must lie between 0 and 1"):
        Judge(("http://h:1",), "{response}", neutral=5.0)
    with pytest.raises(ValueError, match="tuple of addresses"):
        Judge("http://h:1", "{response}")
    with pytest.raises(JudgeError, match="JUDGE_KEY, which api_key_env names, is not set"):
        given(Judge(("http://h:1",), "{response}", api_key_env="JUDGE_KEY"), "text")
