from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from learner.acks import Acks
from learner.evaluation import EvaluationReport, Rate
from learner.ledger import Ledger
from learner.metrics import (
    WAITED_FOR,
    AdapterLag,
    GroupStatistics,
    Journal,
    Stall,
    StallClock,
    Tally,
    percentile,
    step_line,
    time_bucket,
)
from learner.settings import CheckpointSettings, EvaluationSettings, LearnerSettings
from learner.summary import Facts, advice, books, evaluation_progress, missing, no_step, scarcity, summarise
from trajectories.schema import Heartbeat, Version


def test_busy_time_and_stalls_add_up_to_the_wall_time() -> None:
    clock = StallClock()
    clock.cause(Stall.NO_WORKERS, 0)
    clock.start(10)
    clock.cause(Stall.STRAGGLER, 12)
    clock.busy(15, 20)
    clock.cause(Stall.HOST, 21)
    clock.cause(Stall.NO_ROWS, 22)
    clock.busy(23, 30)
    clock.stop(31)
    clock.cause(Stall.HOST, 40)
    clock.stop(50)
    assert clock.busy_s == 12
    assert clock.stalls == {"no_workers": 2, "straggler": 4, "host": 1, "no_rows": 2}
    assert clock.wall_s == 21
    assert clock.busy_fraction == pytest.approx(12 / 21)


def test_nothing_counts_before_the_first_row() -> None:
    clock = StallClock()
    clock.busy(0, 5)
    clock.stop(9)
    assert clock.busy_fraction is None


def test_a_resumed_run_goes_on_counting() -> None:
    clock = StallClock(busy_s=30, stalls={"no_rows": 10})
    clock.start(0)
    clock.busy(0, 10)
    assert clock.busy_fraction == pytest.approx(40 / 50)


def test_totals_survive_a_checkpoint() -> None:
    tally = Tally(train_s=3.5, ages=Counter({0: 3, 2: 1}), curve=[{"step": 1.0}], dead_letters=Counter(a=1))
    tally.trained_by_time[time_bucket(3.0)] += 1
    tally.recent.append((0.5, True))
    tally.before = EvaluationReport("0.1", Rate(1, 4, 0), Rate(2, 4, 1), 12.0)
    tally.evaluations.append(tally.before)
    tally.evaluating = Version(2, 1)
    snapshot = tally.to_json()
    assert Tally.from_json(json.loads(json.dumps(snapshot))) == tally
    tally.curve.append({"step": 2.0})
    tally.dead_letters["b"] += 1
    assert (snapshot["curve"], snapshot["dead_letters"]) == ([{"step": 1.0}], {"a": 1})


def test_adapter_lag_counts_each_worker_s_first_token_once_and_only_while_groups_were_out() -> None:
    lag = AdapterLag()
    lag.stepped(Version(1, 1), 100.0, groups_out=3)
    lag.stepped(Version(2, 1), 200.0, groups_out=0)
    for worker in ("a", "a", "b"):
        beat = Heartbeat("r", worker, 0, 5, first_token_at={"1.1": 100.25, "2.1": 230.0, "9.9": 1.0})
        lag.heard(beat)
    assert list(lag.samples) == [0.25, 0.25]


def test_a_journal_drops_undone_steps_and_a_line_that_was_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path)
    for step in (1, 2, 3):
        journal.append({"step": step})
    path.write_text(path.read_text() + '{"step": 4, "tok')
    journal.keep(lambda line: line["step"] <= 2)
    journal.append({"step": 3})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_acks_wait_for_every_closing_of_their_message() -> None:
    ledger, acks, called = Ledger(), Acks(), []
    for group in range(2):
        ledger.issue(0)
        ledger.bind(group, 0, f"c{group}", 0)
    acks.keep(lambda: called.append("both"), [(0, "c0"), (1, "c1")])
    acks.keep(lambda: called.append("duplicate"), [(0, "other")])
    acks.keep(lambda: called.append("verdict"))
    for ack in acks.settled(ledger):
        ack()
    assert called == ["duplicate", "verdict"]
    ledger.train([(0, "c0")])
    assert acks.settled(ledger) == []
    ledger.discard(1, 0, 0)  # past the bound: issued again, its message is needed no more
    for ack in acks.settled(ledger):
        ack()
    assert called[-1] == "both"
    assert len(acks) == 0


def test_advice_follows_little_s_law() -> None:
    settings = LearnerSettings(max_staleness=2, groups_per_step=4)
    assert advice(settings, 1.9, 1.0) is None
    text = advice(settings, 11.5, 1.0)
    assert text is not None
    assert "max_staleness 12 (now 2)" in text
    assert "24 groups (now 4)" in text


def test_groups_without_a_gradient_are_why_rows_are_rare() -> None:
    assert scarcity([]) is None
    assert scarcity([True, False] * 100) is None
    text = scarcity([False] * 100 + [True] * 64)
    assert text is not None
    assert "64 of the newest 64 groups had no gradient" in text


def test_a_run_without_steps_says_what_became_of_its_groups() -> None:
    alike = GroupStatistics(success=0.0, reward=0.25, duration_s=1.0, members=8, ends={}, filtered=True)
    state: dict[str, Any] = {"waiting": 3, "needed": 6, "seconds": 20.4}
    text = no_step([alike] * 40, 0, newest_letter="", **state)
    assert text.startswith("no step for 20 s: 40 groups ended without a gradient")
    assert "mean 0.250, success 0.000" in text
    assert "3 of 6 that can train are here" in text
    text = no_step([], 12, newest_letter="environment_error: 7.0/1: no such key (mine.py, line 3)", **state)
    assert "12 groups failed" in text
    assert text.endswith("the newest dead letter: environment_error: 7.0/1: no such key (mine.py, line 3)")


def test_what_is_missing_is_named() -> None:
    state = {"outstanding": 4, "held": 2, "waiting": 1, "needed": 3}
    assert "no heartbeat has ever come" in missing(workers=0, last_heartbeat_s=None, **state)
    assert "42 s ago" in missing(workers=0, last_heartbeat_s=42, **state)
    assert "1 of 3 closings" in missing(workers=2, last_heartbeat_s=1, **state)


def test_a_step_s_line_says_what_was_waited_for_and_where_no_gradient_came_from() -> None:
    record = {
        "step": 3,
        "success": 0.5,
        "reward": 0.625,
        "tokens_per_s": 740.4,
        "staleness_mean": 0.75,
        "staleness_max": 1,
        "learner_busy": 0.721,
        "stall_s": {"straggler": 4.25, "host": 0.02},
        "filtered": 7,
        "groups": [1, 2, 3, 4],
    }
    assert step_line(record, 30) == (
        "step  3/30  success 0.500  reward 0.625  740 tokens/s  staleness 0.8 (max 1)  busy 72 %  "
        "waited 4.2 s for a slow group  no gradient 7/11"
    )
    quiet = record | {"stall_s": {}, "filtered": 0, "learner_busy": None}
    assert step_line(quiet, 30).endswith("staleness 0.8 (max 1)")
    assert set(WAITED_FOR) == set(Stall)


def test_the_books_are_a_sentence() -> None:
    ledger = Ledger()
    ledger.issue(0)
    assert books(ledger.counts()) == ("1 issued: 0 trained, 0 without a gradient, 0 failed, 0 expired, 1 still out")


def test_an_evaluation_without_answers_says_what_it_waits_for() -> None:
    loading = Heartbeat("r", "a", 0, 5)
    ready = Heartbeat("r", "b", 0, 5, version=Version(0, 1), running=12)
    assert "no worker has reported" in evaluation_progress(0, 64, [])
    assert "loading the model" in evaluation_progress(0, 64, [loading])
    assert evaluation_progress(3, 64, [loading, ready]).endswith(
        "3 of 64 questions answered; 12 were running at the last report"
    )


def test_the_summary_of_a_run_without_a_step_invents_nothing() -> None:
    facts = Facts("r", 0, "0.1", "interrupted", 0.0, None, None, None, None)
    summary = summarise(facts, Tally(), Ledger())
    assert summary["success_before"] is None
    assert summary["learner_busy"] is None
    assert summary["padding_fraction"] is None
    assert summary["staleness"] == {"mean": None, "p95": None, "max": None}
    json.dumps(summary)


def test_percentiles_are_of_the_nearest_rank() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3, 1, 2], 0.5) == 2
    assert percentile(range(1, 101), 0.95) == 95


@pytest.mark.parametrize(
    ("settings", "values", "field"),
    [
        (LearnerSettings, {"groups_per_step": 0}, "groups_per_step"),
        (LearnerSettings, {"group_size": 1}, "group_size"),
        (LearnerSettings, {"target_success": 1.5}, "target_success"),
        (LearnerSettings, {"task_deadline_s": 0}, "task_deadline_s"),
        (LearnerSettings, {"train_s": float("nan")}, "train_s"),
        (LearnerSettings, {"publish_interval_s": -1}, "publish_interval_s"),
        (CheckpointSettings, {"every_steps": 0}, "every_steps"),
        (EvaluationSettings, {"greedy_questions": 500}, "greedy_questions"),
    ],
)
def test_impossible_settings_are_refused_by_name(settings: type, values: dict[str, object], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        settings(**values)
