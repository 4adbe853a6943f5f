"""pass@k against its definition, and its interval against repeated experiments."""

import itertools

import numpy as np
import pytest

from learner.estimates import estimates, pass_at_k


@pytest.mark.parametrize("answers", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_all_draws_of_k_answers_that_hold_a_right_one(answers):
    for successes, k in itertools.product(range(answers + 1), range(1, answers + 1)):
        drawn = list(itertools.combinations([index < successes for index in range(answers)], k))
        assert pass_at_k(answers, successes, k) == pytest.approx(np.mean([any(draw) for draw in drawn]))
    with pytest.raises(ValueError, match="k must lie between 1 and"):
        pass_at_k(answers, 0, answers + 1)


def test_ks_and_questions_that_were_not_answered_often_enough():
    found = estimates([6, 6, 3, 0], [6, 0, 3, 0])
    assert [(one.k, one.questions) for one in found] == [(1, 3), (2, 3), (4, 2), (6, 2)]
    assert [one.value for one in found] == pytest.approx([2 / 3, 2 / 3, 0.5, 0.5])
    assert estimates([], []) == estimates([0, 0], [0, 0]) == ()
    assert found == estimates([6, 6, 3, 0], [6, 0, 3, 0])


def test_the_interval_holds_the_truth_where_answers_to_one_question_are_alike():
    """Each question is always or never solved: 8 answers to it tell no more than one."""
    rng, truth, held = np.random.default_rng(1), 0.5, 0
    for _ in range(40):
        solved = rng.random(50) < truth
        (first, *_) = estimates([8] * 50, [8 * int(one) for one in solved])
        held += first.low <= truth <= first.high
    assert held >= 34
