"""reasoning-gym's own data sets, played and scored."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.libraries

NAME = "reasoning_gym:ReasoningGym"
ORACLE_IS_NO_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Data sets whose items carry no answer: only their scorers know one when they see it."""

SCORE_ALL = """
import json, sys
from environments.libraries.reasoning_gym import ReasoningGym
spec = ReasoningGym("all", size=50)
for line in sys.stdin:
    payload = json.loads(line)
    item = payload.get("item") or spec.sources[payload["dataset"]][payload["index"]]
    right = spec.score(payload, f"<answer>{item['answer']}</answer>")
    wrong, nothing = spec.score(payload, "<answer>zebra</answer>"), spec.score(payload, "x")
    print("\\n" + json.dumps([payload["dataset"], right, wrong, nothing]))  # scorers print too
"""


def test_the_stand_in_for_gsm8k_rewards_the_right_number_and_nothing_else(play):
    spec = play.spec(NAME)
    payload = spec.tasks.task(5)
    answer = spec.sources["gsm_symbolic"][payload["index"]]["answer"]
    right = play(spec, [f"I add.\n<answer> {answer} </answer>"], payload=payload)
    assert (right.reward, right.success, right.reward_parts) == (1.0, True, {"answer": 1.0})
    (messages, _), *_ = play.chat.shown
    assert [message.role for message in messages] == ["system", "user"]
    assert messages[1].content == payload["question"]
    for said in (f"<answer>{int(answer) + 1}</answer>", answer, "<answer></answer>"):
        episode = play(spec, [said], payload=payload)
        assert (episode.reward, episode.success, episode.status) == (0.0, False, "completed")


def test_every_data_set_is_scored_in_another_process_with_another_order_of_sets(play):
    spec = play.spec(NAME, datasets="all", size=50)
    assert len(spec.sources) == 105
    payloads = [{**next(spec.tasks._drawn(_one(name)))} for name in spec.sources]
    assert {payload["dataset"] for payload in payloads} == set(spec.sources)
    lines = "".join(json.dumps(payload) + "\n" for payload in payloads)
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", SCORE_ALL], input=lines, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    scored = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    assert [name for name, *_ in scored] == list(spec.sources)
    unsolved = {name for name, (right, _), *_ in scored if right != 1.0}
    assert unsolved <= ORACLE_IS_NO_ANSWER
    lenient = {name for name, _, (wrong, _), _ in scored if wrong}
    assert lenient <= {"game_of_life_halting", "spell_backward"}  # as the library's scorers have it
    assert not any(nothing for *_, (nothing, _) in scored)
    assert ["prime_factorization", [1.0, True], [0.0, False], [0.0, True]] in scored


class _one:
    """A generator that draws one name and the item 7."""

    def __init__(self, name):
        self.name = name

    def choice(self, names):
        return self.name

    def randrange(self, size):
        return 7


def test_held_out_questions_are_never_trained_on_and_the_same_for_every_seed(play):
    spec = play.spec(NAME, datasets=["gcd", "basic_arithmetic"], configs={"gcd": {"max_value": 99}})
    held_out = spec.tasks.eval_tasks(40)
    assert held_out[:10] == spec.tasks.eval_tasks(10) == play.spec(NAME, **_two(), seed=9).tasks.eval_tasks(10)
    asked = {task["question"] for task in map(spec.tasks.task, range(300))}
    assert not asked & {task["question"] for task in held_out}
    assert {spec.tasks.task(n)["dataset"] for n in range(20)} == {"gcd", "basic_arithmetic"}
    with pytest.raises(ValueError, match=r"only about \d+ held-out"):
        play.spec(NAME, datasets="coin_flip", size=20).tasks.eval_tasks(1000)


def _two():
    return {"datasets": ["gcd", "basic_arithmetic"], "configs": {"gcd": {"max_value": 99}}}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"datasets": "gsm"}, "no data set 'gsm'; it has .*gsm_symbolic"),
        ({"datasets": []}, "at least one data set"),
        ({"datasets": "gcd", "configs": {"lcm": {}}}, "configs has lcm"),
        ({"datasets": "gcd", "configs": {"gcd": {"nonsense": 1}}}, "nonsense"),
        ({"size": 0}, "size must be at least 1"),
    ],
)
def test_what_cannot_be_is_said(play, options, says):
    with pytest.raises(ValueError, match=says):
        play.spec(NAME, **options)


def test_another_release_of_a_data_set_fails_the_episode(play):
    spec = play.spec(NAME, datasets="gcd")
    payload = {**spec.tasks.task(0), "question": "What was the question of an older release?"}
    episode = play(spec, ["<answer>1</answer>"], payload=payload)
    assert episode.status == "environment_error"
    assert "the same release" in episode.error
