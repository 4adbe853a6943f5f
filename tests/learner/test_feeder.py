from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.feeder import Feeder, credits, training_key
from learner.ledger import Ledger
from learner.settings import LearnerSettings
from trajectories.schema import Heartbeat, Task

SETTINGS = LearnerSettings(
    groups_per_step=2, max_staleness=1, max_attempts=2, task_deadline_s=100, unstarted_deadline_s=20
)


class Rig:
    def __init__(self, settings: LearnerSettings = SETTINGS, ledger: Ledger | None = None) -> None:
        self.sent: list[Task] = []
        self.ledger = ledger or Ledger(settings.max_attempts)
        self.feeder = Feeder("r", settings, self.ledger, lambda g: {"n": g}, self.sent.append, 0.0)

    def keys(self) -> list[str]:
        found = [task.key for task in self.sent]
        self.sent.clear()
        return found

    def hear(self, at: float, *holding: str, worker: str = "w", sent_at: float | None = None) -> None:
        sent = at if sent_at is None else sent_at
        self.feeder.heartbeat(Heartbeat("r", worker, sent_at=sent, interval_s=5, holding=holding), 0, at)


def test_credits_are_what_can_still_train_within_the_bound() -> None:
    assert credits(SETTINGS, step=0, published_step=0, outstanding=0) == 4
    assert credits(SETTINGS, step=5, published_step=5, outstanding=3) == 1
    assert credits(SETTINGS, step=5, published_step=4, outstanding=0) == 2  # the newest adapter lags by a step
    on_policy = replace(SETTINGS, max_staleness=0)
    assert credits(on_policy, step=1, published_step=0, outstanding=0) == 0  # nothing until it is out
    assert credits(on_policy, step=1, published_step=1, outstanding=0) == 2


def test_synchronous_issues_one_step_at_a_time() -> None:
    settings = replace(SETTINGS, synchronous=True, max_staleness=4)
    assert credits(settings, 0, 0, 0) == 2
    assert credits(settings, 1, 0, 0) == 0
    assert credits(settings, 1, 1, 1) == 1


@given(
    bound=st.integers(0, 5),
    size=st.integers(1, 5),
    step=st.integers(0, 9),
    lag=st.integers(0, 5),
    out=st.integers(0, 40),
)
def test_credits_never_exceed_the_bound(bound: int, size: int, step: int, lag: int, out: int) -> None:
    settings = LearnerSettings(groups_per_step=size, max_staleness=bound)
    published = max(0, step - lag)
    number = credits(settings, step, published, out)
    assert 0 <= number <= max(0, (bound + 1) * size - out)
    if number:  # oldest first, the last of them trains at this step at the latest
        assert step + (out + number - 1) // size <= published + bound


def test_issues_up_to_the_credits() -> None:
    rig = Rig()
    assert rig.feeder.issue(0, 0, 0.0) == 4
    assert rig.keys() == ["0.0", "1.0", "2.0", "3.0"]
    assert rig.feeder.issue(0, 0, 0.0) == 0


def test_a_silent_worker_s_tasks_are_issued_again_and_a_slow_one_s_are_not() -> None:
    rig = Rig()
    rig.feeder.issue(0, 0, 0.0)
    rig.hear(1, "0.0", "1.0", worker="dies")
    rig.hear(1, "2.0", "3.0", worker="slow")
    rig.keys()
    for at in range(5, 90, 5):
        rig.hear(float(at), "2.0", "3.0", worker="slow")
        lost = rig.feeder.overdue(0, float(at), deadlines=True)
        assert bool(lost) == (at == 20)  # three intervals of five seconds after the last word
        assert rig.keys() == (["0.1", "1.1"] if at == 20 else [])
        if at >= 20:
            rig.hear(float(at), "0.1", "1.1", worker="other")


def test_what_two_workers_hold_survives_one_of_them() -> None:
    rig = Rig()
    rig.feeder.issue(0, 0, 0.0)
    rig.hear(1, "0.0", "1.0", "2.0", "3.0", worker="a")
    rig.keys()
    rig.hear(14, "0.0", "1.0", "2.0", "3.0", worker="b")
    assert [lost.keys for lost in rig.feeder.overdue(0, 17.0, deadlines=True)] == [()]
    assert rig.keys() == []


def test_the_deadline_runs_from_the_worker_s_report() -> None:
    rig = Rig()
    rig.feeder.issue(0, 0, 0.0)
    rig.keys()
    for at in range(0, 170, 10):
        rig.hear(float(at), *(("0.0",) if at >= 10 else ()), "1.0", "2.0", "3.0")
        rig.feeder.overdue(3, float(at), deadlines=True)
        assert rig.keys() == (["1.1", "2.1", "3.1"] if at == 110 else []), at
        if at == 110:
            break
    rig.hear(120, "0.0", "1.1", "2.1", "3.1")
    rig.feeder.overdue(3, 120.0, deadlines=True)
    assert rig.keys() == ["0.1"]
    group = rig.ledger.group(0)
    assert group is not None
    assert group.issued_step == 3  # as of the adapter in force now


def test_tasks_that_nobody_takes_count_only_the_time_in_which_a_worker_lived() -> None:
    rig = Rig()
    rig.feeder.issue(0, 0, 0.0)
    rig.keys()
    rig.feeder.overdue(0, 500.0, deadlines=True)
    assert rig.keys() == []  # the job has not started yet
    for at in (500, 510, 520):
        rig.hear(float(at))
        rig.feeder.overdue(0, float(at), deadlines=True)
    assert rig.keys() == []
    rig.hear(521)
    rig.feeder.overdue(0, 521.0, deadlines=True)
    assert rig.keys() == ["0.1", "1.1", "2.1", "3.1"]


def test_what_was_out_when_all_workers_died_is_not_waited_for_long() -> None:
    settings = replace(SETTINGS, unstarted_deadline_s=1000)
    rig = Rig(settings)
    rig.feeder.issue(0, 0, 0.0)
    rig.hear(1, "0.0", worker="dies")
    rig.keys()
    rig.feeder.overdue(0, 17.0, deadlines=True)
    assert rig.keys() == ["0.1"]  # what it held, at once
    for at in range(20, 60, 5):
        rig.hear(float(at), "0.1", "1.0", worker="new")
        rig.feeder.overdue(0, float(at), deadlines=True)
        assert rig.keys() == (["2.1", "3.1"] if at == 40 else []), at


def test_a_job_that_comes_back_before_its_death_is_noticed_is_not_trusted_with_what_it_lost() -> None:
    rig = Rig(replace(SETTINGS, unstarted_deadline_s=1000))
    rig.feeder.issue(0, 0, 0.0)
    rig.hear(1, worker="dies")  # it has read all of it and started nothing
    rig.keys()
    for at in range(10, 60, 5):
        rig.hear(float(at), "1.0", worker="new")
        rig.feeder.overdue(0, float(at), deadlines=True)
        assert rig.keys() == (["0.1", "2.1", "3.1"] if at == 30 else []), at


def test_a_worker_that_others_outlive_costs_only_what_it_held() -> None:
    rig = Rig(replace(SETTINGS, unstarted_deadline_s=1000))
    rig.feeder.issue(0, 0, 0.0)
    rig.hear(1, "0.0", worker="dies")
    rig.keys()
    for at in range(1, 60, 5):
        rig.hear(float(at), "1.0", worker="stays")
        lost = rig.feeder.overdue(0, float(at), deadlines=True)
        assert rig.keys() == (["0.1"] if lost else []), at
        assert not any(one.alone for one in lost)


def test_what_a_restored_ledger_has_out_is_not_waited_for_long() -> None:
    ledger = Ledger()
    for _ in range(2):
        ledger.issue(0)
    rig = Rig(replace(SETTINGS, unstarted_deadline_s=1000), Ledger.from_bytes(ledger.to_bytes()))
    rig.feeder.watch_anew(100.0)
    for at in range(100, 130, 5):
        rig.hear(float(at), "0.0")
        rig.feeder.overdue(0, float(at), deadlines=True)
        assert rig.keys() == (["1.1"] if at == 120 else []), at


def test_attempts_run_out() -> None:
    rig = Rig()
    rig.feeder.issue(0, 0, 0.0)
    for at in range(0, 60, 5):
        rig.hear(float(at))
        rig.feeder.overdue(0, float(at), deadlines=True)
    assert rig.ledger.counts()["expired"] == 4
    assert rig.feeder.issue(0, 0, 60.0) == 4  # the credits are back


def test_held_groups_that_a_restored_ledger_does_not_know_are_adopted() -> None:
    rig = Rig()
    rig.hear(0, "6.0", "eval-3.0", "nonsense")
    assert rig.ledger.counts()["issued"] == 7
    assert rig.feeder.issue(0, 0, 0.0) == 0


def test_heartbeats_that_overtake_one_another_do_not_go_back_in_time() -> None:
    rig = Rig()
    rig.hear(2, "0.0", sent_at=2)
    rig.hear(3, sent_at=1)
    assert rig.feeder.roster.workers["w"].holding == {"0.0"}


def test_a_learner_that_was_away_blames_no_worker() -> None:
    rig = Rig()
    rig.hear(0, "0.0")
    rig.feeder.roster.excuse(100)
    assert rig.feeder.overdue(0, 110.0, deadlines=True) == []


@pytest.mark.parametrize("key", ["", "1", "1.", ".1", "eval-1.0", "-1.0", "1.0.0", "01.0", "a.b", "²2.0"])
def test_other_text_is_no_training_key(key: str) -> None:
    assert training_key(key) is None
