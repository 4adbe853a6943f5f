from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from learner.ledger import MAX_ADOPTED, Intake, Ledger, LedgerError, Reissue
from trajectories.schema import Outcome

MAX_ATTEMPTS = 3


class Books(RuleBasedStateMachine):
    """Drives a ledger against a plain model that keeps one state per group and every closing that trained."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(MAX_ATTEMPTS)
        self.state: dict[int, str] = {}
        self.bound: dict[int, tuple[int, str]] = {}
        self.trained: list[str] = []
        self.trained_groups: list[int] = []
        self.serial = itertools.count()
        self.saved = (self.ledger.to_bytes(), dict(self.state), list(self.trained), list(self.trained_groups))

    def outstanding(self) -> list[int]:
        return [g for g, state in self.state.items() if state == "outstanding"]

    @rule()
    def issue(self) -> None:
        self.state[self.ledger.issue(0)] = "outstanding"

    @rule(group=st.integers(0, 30), attempt=st.integers(0, 3), repeat=st.booleans())
    def show_closing(self, group: int, attempt: int, repeat: bool) -> None:
        closing = self.bound[group][1] if repeat and group in self.bound else f"c{next(self.serial)}"
        intake = self.ledger.bind(group, attempt, closing, 0)
        for other in range(group + 1):
            self.state.setdefault(other, "outstanding")
        if intake is Intake.TAKEN:
            assert self.state[group] == "outstanding"
            assert group not in self.bound
            self.bound[group] = (attempt, closing)
        else:
            assert self.state[group] != "outstanding" or group in self.bound or intake is Intake.OUTDATED

    @rule(group=st.integers(0, 30), attempt=st.integers(0, 3), outcome=st.sampled_from([*Outcome][:2]))
    def show_verdict(self, group: int, attempt: int, outcome: Outcome) -> None:
        intake = self.ledger.verdict(group, attempt, outcome, 0)
        for other in range(group + 1):
            self.state.setdefault(other, "outstanding")
        if intake is Intake.TAKEN:
            assert group not in self.bound
            self.state[group] = outcome

    @precondition(lambda self: self.bound)
    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.bound)), min_size=1, unique=True))
        self.ledger.train((g, self.bound[g][1]) for g in chosen)
        for group in chosen:
            self.trained.append(self.bound.pop(group)[1])
            self.trained_groups.append(group)
            self.state[group] = "trained"

    @precondition(lambda self: self.bound)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(sorted(self.bound)))
        attempt, closing = self.bound.pop(group)
        self.ledger.discard(group, attempt, 0)
        if self.ledger.group(group) is None:
            self.state[group] = "expired"
        elif attempt < 3:
            assert self.ledger.bind(group, attempt, closing, 0) is Intake.OUTDATED  # a stale closing stays out

    @precondition(lambda self: set(self.outstanding()) - set(self.bound))
    @rule(data=st.data(), reason=st.sampled_from([Reissue.WORKER_LOST, Reissue.TASK_DEADLINE, Reissue.UNSTARTED]))
    def reissue(self, data: st.DataObject, reason: Reissue) -> None:
        group = data.draw(st.sampled_from(sorted(set(self.outstanding()) - set(self.bound))))
        if self.ledger.reissue(group, reason, 0) is None:
            self.state[group] = "expired"

    @rule()
    def checkpoint(self) -> None:
        self.saved = (self.ledger.to_bytes(), dict(self.state), list(self.trained), list(self.trained_groups))

    @rule()
    def crash(self) -> None:
        """What was trained since the checkpoint is undone with the weights; its groups are outstanding again."""
        data, self.state, self.trained, self.trained_groups = (
            self.saved[0],
            dict(self.saved[1]),
            list(self.saved[2]),
            list(self.saved[3]),
        )
        self.bound = {}
        self.ledger = Ledger.from_bytes(data, MAX_ATTEMPTS)

    @invariant()
    def balances(self) -> None:
        counts = self.ledger.counts()
        states = list(self.state.values())
        assert counts.pop("issued") == len(states) == sum(counts.values())
        assert counts == {name: states.count(name) for name in counts}

    @invariant()
    def nothing_trains_twice(self) -> None:
        assert len(set(self.trained)) == len(self.trained)
        assert len(set(self.trained_groups)) == len(self.trained_groups)


Books.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_books = Books.TestCase


def test_first_closing_wins() -> None:
    ledger = Ledger()
    group = ledger.issue(0)
    assert ledger.bind(group, 0, "a", 0) is Intake.TAKEN
    assert ledger.bind(group, 0, "a", 0) is Intake.REPEATED
    assert ledger.bind(group, 0, "b", 0) is Intake.DUPLICATE
    assert ledger.verdict(group, 0, Outcome.FILTERED, 0) is Intake.DUPLICATE
    ledger.train([(group, "a")])
    assert ledger.bind(group, 0, "a", 0) is Intake.ENDED
    with pytest.raises(LedgerError, match="not bound"):
        ledger.train([(group, "a")])
    assert ledger.dropped == {"repeated": 1, "duplicate": 2, "ended": 1}


def test_late_failure_of_an_old_attempt_does_not_end_the_new_one() -> None:
    ledger = Ledger()
    group = ledger.issue(0)
    assert ledger.reissue(group, Reissue.WORKER_LOST, 0) == 1
    assert ledger.verdict(group, 0, Outcome.FAILED, 0) is Intake.OUTDATED
    assert ledger.bind(group, 0, "late but first", 0) is Intake.TAKEN


def test_groups_issued_before_a_crash_are_adopted() -> None:
    ledger = Ledger()
    assert ledger.bind(5, 2, "a", 7) is Intake.TAKEN
    assert ledger.counts()["issued"] == 6
    assert ledger.issue(0) == 6
    assert ledger.bind(MAX_ADOPTED + 10, 0, "nonsense", 0) is Intake.FOREIGN
    assert ledger.bind(-1, 0, "nonsense", 0) is Intake.FOREIGN
    assert ledger.counts()["issued"] == 7


def test_attempts_run_out() -> None:
    ledger = Ledger(max_attempts=2)
    group = ledger.issue(0)
    assert ledger.reissue(group, Reissue.UNSTARTED, 0) == 1
    assert ledger.reissue(group, Reissue.UNSTARTED, 0) is None
    assert ledger.counts() == {
        "issued": 1,
        "trained": 0,
        "filtered": 0,
        "failed": 0,
        "expired": 1,
        "retired": 0,
        "outstanding": 0,
    }


def test_a_million_ended_groups_fit_in_a_megabyte() -> None:
    ledger, order = Ledger(), random.Random(0)
    held = []
    for _ in range(1_000_000):
        group = ledger.issue(0)
        if order.random() < 0.001:
            held.append(group)  # a thousand stragglers all over the run
        else:
            ledger.verdict(group, 0, Outcome.FILTERED, 0)
    data = ledger.to_bytes()
    assert len(data) < 1_000_000
    restored = Ledger.from_bytes(data)
    assert restored.counts() == ledger.counts()
    assert [g for g, _ in restored.groups()] == held


@pytest.mark.parametrize("data", [b"", b"{}", Ledger().to_bytes()[:-3]])
def test_damaged_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(LedgerError):
        Ledger.from_bytes(data)
