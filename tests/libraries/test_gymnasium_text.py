"""Gymnasium's own toy worlds in words, and a text environment that a user has registered."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

NAME = "gymnasium_text:GymnasiumText"
ACTIONS = ["left", "down", "right", "up"]
LAKE = {"id": "FrozenLake-v1", "kwargs": {"render_mode": "ansi", "is_slippery": False}, "actions": ACTIONS}


class Echo(gymnasium.Env):
    """Says a secret of its seed; saying it back ends the episode."""

    observation_space = spaces.Text(40, charset="abcdefghijklmnopqrstuvwxyz0123456789, ")
    action_space = spaces.Text(40)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.secret = f"word{self.np_random.integers(1000)}{(options or {}).get('suffix', '')}"
        return f"say {self.secret}", {}

    def step(self, action):
        right = action == self.secret
        return "no, listen" if not right else "yes", float(right), right, False, {"is_success": right}


gymnasium.register("Echo-v0", Echo, max_episode_steps=3)


def shout(observation, info):
    return str(observation).upper()


def spell(text):
    if "?" in text:
        raise ValueError("do not ask")
    return text.lower()


def test_a_frozen_lake_is_walked_by_words(play):
    spec = play.spec(NAME, **LAKE, system="Reach G. Say <action>left</action>, down, right or up.")
    walk = ["down", "down", "right", "right", "down", "right"]
    episode = play(spec, [f"I go.\n<action>{where}</action>" for where in walk])
    assert (episode.reward, episode.success, len(episode.turns)) == (1.0, True, 6)
    (messages, _), *after = play.chat.shown
    assert [message.role for message in messages] == ["system", "user"]
    assert "\x1b[41mS\x1b[0mFFF" in messages[1].content
    assert "(Down)" in after[0][0].content
    fallen = play(spec, ["<action>right</action>", "<action>DOWN</action>"])
    assert (fallen.reward, fallen.success, fallen.status) == (0.0, False, "completed")


def test_a_turn_without_an_action_is_told_so_and_moves_nothing(play):
    episode = play(
        play.spec(NAME, **LAKE),
        ["which?", "<action>jump</action>", "<action>9</action>", "<action>1</action>"],
        max_turns=4,
    )
    _, first, second, third = play.chat.shown
    assert first[0].content == "error: say what you do as <action>…</action>"
    assert second[0].content == "error: there is no action 'jump'; there are left, down, right, up"
    assert "is no action of Discrete(4)" in third[0].content
    assert episode.metrics["invalid_actions"] == 3
    assert (episode.status, len(episode.turns)) == ("max_turns", 4)


def test_text_spaces_need_no_functions_and_a_group_starts_from_one_state(play):
    spec = play.spec(NAME, id="Echo-v0", reset_options={"suffix": "rest"})
    says = lambda session, turn, text: f"<action>{text.split('say ')[1].split()[0]}</action>"  # noqa: E731
    episodes = play(spec, says, group=4, members=3)
    assert all(episode.success and episode.reward == 1.0 for episode in episodes)
    assert len({episode.tokens_T[: episode.prompt_length].tobytes() for episode in episodes}) == 1
    assert "rest" in play.chat.decode(episodes[0].tokens_T.tolist())
    other = play(spec, says, group=5)
    assert other.tokens_T[: other.prompt_length].tolist() != episodes[0].tokens_T[: episodes[0].prompt_length].tolist()
    limited = play(spec, ["<action>no</action>"])
    assert (limited.status, limited.success, len(limited.turns)) == ("completed", False, 3)


def test_ones_own_functions_write_and_read(play):
    spec = play.spec(NAME, id="Echo-v0", observe=f"{__name__}:shout", act=f"{__name__}:spell")
    episode = play(spec, lambda session, turn, text: "what?" if not turn else text.split("SAY ")[1].split()[0])
    assert episode.success
    assert episode.metrics["invalid_actions"] == 1
    assert play.chat.shown[0][0][0].content.startswith("SAY WORD")
    assert play.chat.shown[1][0].content == "error: do not ask"


def test_held_out_seeds_are_no_training_seeds(play):
    tasks = play.spec(NAME, **LAKE).tasks
    assert len({task["seed"] for task in tasks.eval_tasks(50)}) == 50
    assert not {task["seed"] for task in tasks.eval_tasks(50)} & {tasks.task(n)["seed"] for n in range(500)}


def test_an_environment_that_is_not_there_is_named(play):
    with pytest.raises(ValueError, match=r"FrozenLaek.*FrozenLake"):
        play.spec(NAME, id="FrozenLaek-v1")


class Odd(gymnasium.Env):
    """Its action space and what its step answers are the test's."""

    observation_space = spaces.Dict({"board": spaces.MultiDiscrete([3, 3]), "note": spaces.Text(9)})

    def __init__(self, space=None, answer=None):
        self.action_space = space or spaces.Discrete(3, start=-1)
        self.answer = answer

    def reset(self, *, seed=None, options=None):
        return {"board": np.array([0, 1]), "note": "x"}, {}

    def step(self, action):
        done = {"board": np.array([2, 2]), "note": str(action)}, 1.0, np.True_, False, {}
        return done if self.answer is None else self.answer(*done)


gymnasium.register("Odd-v0", Odd, disable_env_checker=True)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda seen, reward, done, cut, info: (seen, float("nan"), done, cut, info), "rewards must be finite"),
        (lambda seen, reward, done, cut, info: (seen, "much", done, cut, info), "could not convert string to float"),
        (lambda seen, reward, done, cut, info: (seen, None, done, cut, info), "TypeError"),
        (lambda seen, reward, done, cut, info: (seen, reward, done, info), "not enough values to unpack"),
        (lambda seen, reward, done, cut, info: (seen, reward, done, cut, None), "NoneType"),
        (lambda seen, reward, done, cut, info: (seen, reward, np.array([1, 0]), cut, info), "ambiguous"),
        (lambda seen, reward, done, cut, info: (seen, reward, done, cut, {"success": np.array([1, 0])}), "ambiguous"),
        (lambda seen, reward, done, cut, info: None, "NoneType"),
    ],
)
def test_an_odd_answer_fails_its_episode_and_says_what_it_is(play, answer, says):
    spec = play.spec(NAME, id="Odd-v0", kwargs={"answer": answer})
    episode = play(spec, ["<action>1</action>"])
    assert (episode.status, episode.reward, episode.success) == ("environment_error", 0.0, False)
    assert says in episode.error


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (2,)),
        spaces.MultiDiscrete([2, 2]),
        spaces.MultiBinary(2),
        spaces.Dict({"move": spaces.Discrete(2)}),
        spaces.Tuple((spaces.Discrete(2), spaces.Text(3))),
        spaces.Sequence(spaces.Discrete(2)),
    ],
    ids=lambda space: type(space).__name__,
)
def test_a_space_that_has_no_words_needs_a_function(play, space):
    spec = play.spec(NAME, id="Odd-v0", kwargs={"space": space})
    episode = play(spec, ["<action>1</action>"])
    assert episode.status == "environment_error"
    assert f"environment.options.act must name a function that makes actions of {space} from text" in episode.error


def test_observations_of_any_space_are_shown_and_numbers_may_be_below_0(play):
    spec = play.spec(NAME, id="Odd-v0", actions=["back", "stay", "forth"])
    episode = play(spec, ["<action>2</action>", "<action>Back</action>"])
    assert (episode.status, episode.success, episode.metrics["invalid_actions"]) == ("completed", True, 1)
    (messages, _), (refused,) = play.chat.shown
    assert messages[0].content == "{'board': array([0, 1]), 'note': 'x'}"
    assert refused.content == "error: '2' is no action of Discrete(3, start=-1)"
    assert play(spec, ["<action>-1</action>"]).success
