"""Games of TextArena: against a scripted player, against oneself, and alone."""

import random
import re

import pytest

pytestmark = pytest.mark.libraries

NAME = "textarena:TextArena"
OPPONENT = f"{__name__}:first_free"
TICTACTOE = {"id": "TicTacToe-v0", "opponent": OPPONENT}


def free_cells(text):
    return re.findall(r"'\[(\d)\]'", text.rsplit("Available Moves:", 1)[1])


def first_free(text, generator):
    return f"[{free_cells(text)[0]}]"


def any_free(text, generator):
    return f"[{generator.choice(free_cells(text))}]"


async def last_free(text, generator):
    return f"[{free_cells(text)[-1]}]"


def raises(text, generator):
    raise LookupError("no move left")


def test_the_policy_plays_one_side_against_a_scripted_player(play):
    spec = play.spec(NAME, **TICTACTOE, side=0, system="Win.")
    won = play(spec, ["[8]", "I take [5].", "[2]"])
    assert (won.reward, won.success, won.reward_parts, len(won.turns)) == (1.0, True, {"game": 1.0}, 3), won.error
    (messages, _), second, _ = play.chat.shown
    assert [message.role for message in messages] == ["system", "user"]
    assert "You are Player 0 in Tic Tac Toe" in messages[1].content
    assert "Available Moves:" in messages[1].content
    assert "[Player 1]" in second[0].content  # the other's move, and only what is new
    assert "You are Player 0" not in second[0].content
    assert "[8]\n" not in second[0].content
    lost = play(spec, ["[8]", "[7]", "[5]"])
    assert (lost.reward, lost.success, lost.status) == (-1.0, False, "completed")


def test_on_the_second_side_the_other_moves_first(play):
    spec = play.spec(NAME, id="TicTacToe-v0", opponent=f"{__name__}:last_free", side=1)
    episode = play(spec, ["[0]", "[1]"])
    assert "You are Player 1" in play.chat.shown[0][0][0].content
    assert "[Player 0]" in play.chat.shown[0][0][0].content
    assert (episode.reward, len(episode.turns)) == (-1.0, 2)


def test_sides_take_turns_by_the_seed_and_a_group_has_one(play):
    spec = play.spec(NAME, **TICTACTOE)
    assert {spec.side_of(spec.tasks.task(n)) for n in range(20)} == {0, 1}
    assert {spec.side_of(task) for task in spec.tasks.eval_tasks(4)} == {0, 1}


def test_an_illegal_move_is_answered_and_the_second_loses(play):
    spec = play.spec(NAME, **TICTACTOE, side=0)
    episode = play(spec, ["I pass", "I pass again"])
    assert "invalid move" in play.chat.shown[1][0].content
    assert (episode.status, episode.success) == ("completed", False)
    assert episode.reward <= 0


def test_on_both_sides_two_members_of_a_group_play_each_other(play):
    spec = play.spec(NAME, **TICTACTOE, both_sides=True)
    moves = {"0": ["[0]", "[1]", "[2]"], "1": ["[3]", "[4]"]}
    pairs = lambda session, turn, text: moves[str(int(session[-1]) % 2)][turn]  # noqa: E731
    first, second, third, fourth = play(spec, pairs, members=4)
    assert [episode.reward for episode in (first, second, third, fourth)] == [1.0, -1.0, 1.0, -1.0], first.error
    assert [len(episode.turns) for episode in (first, second)] == [3, 2]
    told = play.chat.decode(second.tokens_T.tolist())
    assert "You are Player 1" in told
    assert "You are Player 0" not in told  # each side sees its own game alone
    assert sum(first.loss_mask_T) == sum(len(move) + 1 for move in moves["0"])
    held_out = spec.tasks.eval_tasks(1)[0]
    against = play(spec, ["[8]", "[5]", "[2]"], payload={**held_out, "seed": 1})
    assert (against.reward, against.status) == (1.0, "completed")


def test_a_side_whose_other_has_left_fails_and_does_not_wait(play):
    spec = play.spec(NAME, **TICTACTOE, both_sides=True)
    says = lambda session, turn, text: 1 / 0 if session.endswith("0") else "[4]"  # noqa: E731
    first, second = play(spec, says, members=2)
    assert first.status == "policy_error"
    assert second.status == "environment_error"
    assert "the other side's episode ended" in second.error


def test_an_opponent_that_raises_fails_the_episode_with_its_words(play):
    spec = play.spec(NAME, id="TicTacToe-v0", opponent=f"{__name__}:raises", side=0)
    episode = play(spec, ["[0]"])
    assert episode.status == "environment_error"
    assert "LookupError: no move left" in episode.error


def test_a_game_for_one_draws_from_its_seed_whatever_else_draws(play):
    spec = play.spec(NAME, id="GuessTheNumber-v0", players=1)
    payload = spec.tasks.task(0)

    def guess(session, turn, text):
        random.random()
        low, high = 1, 20
        for tried, hint in re.findall(r"\[(\d+)\]\n?.*?(higher|lower)", text, re.DOTALL):
            low, high = (int(tried) + 1, high) if hint == "higher" else (low, int(tried) - 1)
        return f"[{(low + high) // 2}]"

    random.seed(1)
    before = random.getstate()
    one = play(spec, guess, payload=payload)
    random.seed(2)
    other = play(spec, guess, payload=payload)
    random.setstate(before)
    assert one.success, one.error
    assert one.tokens_T.tolist() == other.tokens_T.tolist()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"id": "TicTacTo-v0", "opponent": OPPONENT}, "no game 'TicTacTo-v0'; near it: .*TicTacToe-v0"),
        ({"id": "TicTacToe-v0"}, "opponent must name a function"),
        ({**TICTACTOE, "side": 2}, "side must be from 0 to 1"),
        ({"id": "GuessTheNumber-v0", "players": 1, "both_sides": True}, "games for two"),
    ],
)
def test_what_cannot_be_is_said(play, options, says):
    with pytest.raises(ValueError, match=says):
        play.spec(NAME, **options)
