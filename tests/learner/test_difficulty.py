"""Prompts that are solved always or never are passed over, and come back."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.difficulty import DifficultySettings, Pool, key_of
from learner.feeder import MOST_SKIPS, Feeder
from learner.ledger import Ledger
from learner.settings import LearnerSettings
from trajectories.schema import Outcome, Task

SETTINGS = DifficultySettings(solved_visits=2, unsolved_visits=3, revisit=4)
EASY, HARD, FAIR = {"question": "1+1"}, {"question": "2^64"}, {"question": "12*12"}


def test_a_prompt_is_retired_after_so_many_visits_in_a_row_and_another_result_brings_it_back() -> None:
    pool = Pool(SETTINGS)
    for visit in range(3):
        assert [pool.skip(prompt) for prompt in (EASY, HARD, FAIR)] == [visit >= 2, False, False]
        pool.visited(EASY, 1.0)
        pool.visited(HARD, 0.0)
        pool.visited(FAIR, 0.5)
    assert pool.counts() == {"prompts": 3, "solved": 1, "unsolved": 1}
    assert [pool.skip(HARD) for _ in range(4)] == [True, True, True, False]  # each fourth time it is asked
    pool.visited(HARD, 0.25)
    assert not pool.skip(HARD)
    pool.visited(HARD, 0.0)
    assert not pool.skip(HARD)  # the row begins anew


def test_either_rule_may_be_off_and_a_pool_that_is_off_knows_nothing() -> None:
    only_easy = Pool(dataclasses.replace(SETTINGS, unsolved_visits=0))
    off = Pool(DifficultySettings())
    for _ in range(9):
        for pool in (only_easy, off):
            pool.visited(EASY, 1.0)
            pool.visited(HARD, 0.0)
    assert (only_easy.skip(EASY), only_easy.skip(HARD)) == (True, False)
    assert off.counts() == {"prompts": 0, "solved": 0, "unsolved": 0}


def test_memory_is_bounded_and_the_prompt_seen_longest_ago_is_forgotten() -> None:
    pool = Pool(DifficultySettings(solved_visits=1, max_prompts=3))
    for number in (0, 1, 2, 0, 3):
        pool.visited({"n": number}, 1.0)
    assert [pool.skip({"n": number}) for number in range(4)] == [True, False, True, True]


def test_payloads_are_told_apart_by_what_is_in_them() -> None:
    assert key_of({"a": 1, "b": [1.5, "ü"]}) == key_of({"b": [1.5, "ü"], "a": 1})
    assert key_of({"a": 1}) != key_of({"a": "1"})


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"difficulty\.revisit must be at least 2, found 1"):
        DifficultySettings(revisit=1)


class Rig:
    """A feeder over five prompts that are visited again and again; prompt 0 is always solved, prompt 1 never."""

    def __init__(self, ledger: bytes = b"", pool: str = "[]") -> None:
        self.ledger = Ledger.from_bytes(ledger) if ledger else Ledger()
        self.pool = Pool.from_json(SETTINGS, json.loads(pool))
        self.sent: list[Task] = []
        learner = LearnerSettings(groups_per_step=2, max_staleness=0)
        self.feeder = Feeder("r", learner, self.ledger, self.payload, self.sent.append, 0.0, self.pool)

    @staticmethod
    def payload(group_id: int) -> dict[str, int]:
        return {"prompt": group_id % 5}

    def step(self, number: int) -> list[int]:
        """Issue, end what was issued, and give the prompts that were asked."""
        self.sent.clear()
        self.feeder.issue(number, number, 0.0)
        for task in self.sent:
            success = {0: 1.0, 1: 0.0}.get(task.payload["prompt"], 0.5)
            self.ledger.verdict(task.group_id, 0, Outcome.FILTERED, number)
            self.feeder.ended(task.group_id, success)
        return [task.payload["prompt"] for task in self.sent]

    def saved(self) -> tuple[bytes, str]:
        return self.ledger.to_bytes(), json.dumps(self.pool.to_json())


@given(crash=st.integers(0, 39))
def test_the_books_balance_and_a_restored_learner_asks_what_it_would_have_asked(crash: int) -> None:
    rig, asked, expected = Rig(), [], []
    whole = Rig()
    for number in range(40):
        if number == crash:
            rig = Rig(*rig.saved())
        asked += rig.step(number)
        expected += whole.step(number)
        counts = rig.ledger.counts()
        assert counts["issued"] == counts["filtered"] + counts["retired"]
    assert asked == expected
    assert counts["retired"] > 0
    assert all(2 < asked.count(prompt) < asked.count(2) // 2 for prompt in (0, 1))  # rare, and not forgotten


def test_a_set_of_which_every_prompt_is_retired_is_still_asked_now_and_then_and_never_holds_the_learner_up() -> None:
    ledger, pool = Ledger(), Pool(DifficultySettings(solved_visits=1, revisit=5000))
    pool.visited({}, 1.0)
    sent: list[Task] = []
    feeder = Feeder("r", LearnerSettings(), ledger, lambda group_id: {}, sent.append, 0.0, pool)
    calls = 0
    while not sent:
        feeder.issue(0, 0, 0.0)
        calls += 1
    assert calls == -(-5000 // MOST_SKIPS)
    assert ledger.counts()["retired"] == 4999
