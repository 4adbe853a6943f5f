from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from learner.evaluation import Evaluation, EvaluationReport, Rate, best_first
from learner.results import Result
from learner.settings import EvaluationSettings
from pipelines.report import evaluation_words
from trajectories.schema import Episode, Kind, Status, Task, Version, VersionSpan

VERSION = Version(3, 2)


def begun(questions: int = 2, **options: object) -> tuple[Evaluation, list[Task]]:
    settings = EvaluationSettings(questions=questions, **options)  # type: ignore[arg-type]
    payloads = [{"q": index} for index in range(questions)]
    evaluation = Evaluation("r", settings, payloads, VERSION, first_id=1000, now=0.0)
    return evaluation, list(evaluation.tasks(0.0))


def answer(task: Task, success: bool = True, status: Status = Status.COMPLETED, version: Version = VERSION) -> Episode:
    return Episode(
        "r",
        task.group_id,
        task.attempt,
        0,
        1,
        np.arange(3),
        np.array([False, True, True]),
        np.zeros(3),
        1,
        version_spans=(VersionSpan(1, version),),
        success=success,
        status=status,
        kind=Kind.EVAL,
    )


def test_every_question_is_asked_sampled_and_greedy_of_the_pinned_version() -> None:
    evaluation, tasks = begun()
    assert [(task.kind, task.temperature, task.version, task.group_size) for task in tasks] == [
        *[(Kind.EVAL, 1.0, VERSION, 1)] * 2,
        *[(Kind.EVAL, 0.0, VERSION, 1)] * 2,
    ]
    assert len({task.key for task in tasks}) == 4
    assert list(evaluation.tasks(1.0)) == []
    for task, success in zip(tasks, (True, False, True, True), strict=True):
        assert evaluation.answer(answer(task, success), 1.0)
    assert evaluation.done
    report = evaluation.report(5.0)
    assert (report.sampled.value, report.greedy.value, report.seconds) == (0.5, 1.0, 5.0)
    assert EvaluationReport.from_json(report.to_json()) == report


def test_samples_of_a_question_are_tasks_of_their_own_and_give_pass_at_k() -> None:
    evaluation, tasks = begun(samples=3, greedy_questions=1)
    assert [(task.payload["q"], task.temperature) for task in tasks] == [*[(0, 1.0)] * 3, *[(1, 1.0)] * 3, (0, 0.0)]
    assert len({task.key for task in tasks}) == 7
    for task, success in zip(tasks, (True, False, False, False, False, False, True), strict=True):
        evaluation.answer(answer(task, success), 1.0)
    report = evaluation.report(5.0)
    assert (report.sampled, report.greedy) == (Rate(1, 6, 0), Rate(1, 1, 0))
    assert [(one.k, round(one.value, 6), one.questions) for one in report.pass_at] == [
        (1, round(1 / 6, 6), 2),
        (2, round(1 / 3, 6), 2),
        (3, 0.5, 2),
    ]
    assert EvaluationReport.from_json(report.to_json()) == report
    assert "pass@2   0.333  (95 %: 0.000 to 0.667, over 2 questions)" in evaluation_words(
        {"evaluation_before": report.to_json()}, "it"
    )


def test_what_ended_before_is_not_asked_again_and_the_figures_are_the_same() -> None:
    def outcome(task: Task) -> Episode:
        failed = task.attempt == 0 and task.group_id % 3 == 0
        status = Status.TIMEOUT if failed else Status.MAX_TURNS if task.group_id % 3 == 1 else Status.COMPLETED
        return answer(task, task.group_id % 2 == 0, status)

    def finish(evaluation: Evaluation, tasks: list[Task], results: list[Result]) -> EvaluationReport:
        while tasks:
            found = [evaluation.answer(outcome(task), 1.0) for task in tasks]
            results += [result for result in found if result is not None]
            tasks = list(evaluation.tasks(1.0))
        assert evaluation.done
        return evaluation.report(1.0)

    options = {"samples": 2, "greedy_questions": 2}
    whole: list[Result] = []
    report = finish(*begun(4, **options), whole)
    assert report.sampled_figures.failures == {"timeout": sum(result.status.failed for result in whole[:8])}
    for cut in range(len(whole) + 1):
        settings = EvaluationSettings(questions=4, **options)  # type: ignore[arg-type]
        evaluation = Evaluation("r", settings, [{"q": index} for index in range(4)], VERSION, 1000, 0.0)
        assert evaluation.go_on(whole[:cut]) == cut
        rest: list[Result] = []
        assert finish(evaluation, list(evaluation.tasks(0.0)), rest) == report
        assert sorted(str(one) for one in rest) == sorted(str(one) for one in whole[cut:])

    evaluation = Evaluation("r", settings, [{"q": index + 1} for index in range(4)], VERSION, 1000, 0.0)
    with pytest.raises(ValueError, match=r"held-out question \d was another when"):
        evaluation.go_on(whole)
    with pytest.raises(ValueError, match="is no episode of this evaluation"):
        begun(1)[0].go_on(whole)


def test_a_version_of_another_incarnation_is_the_same_policy_only_where_that_is_known() -> None:
    settings, other = (
        EvaluationSettings(questions=1, greedy_questions=0),
        Version(VERSION.step, VERSION.incarnation + 1),
    )
    for any_incarnation in (False, True):
        evaluation = Evaluation("r", settings, [{}], VERSION, 0, 0.0, any_incarnation=any_incarnation)
        (task,) = evaluation.tasks(0.0)
        evaluation.answer(answer(task, version=other), 1.0)
        assert evaluation.done is any_incarnation


def test_the_best_by_sampled_then_greedy_success_then_the_newest() -> None:
    def report(step: int, sampled: Rate, greedy: Rate) -> EvaluationReport:
        return EvaluationReport(f"{step}.1", sampled, greedy, 1.0)

    none = Rate(0, 0, 0)
    reports = [
        report(0, Rate(2, 4, 0), Rate(1, 4, 0)),
        report(1, Rate(3, 4, 0), Rate(1, 4, 0)),
        report(2, Rate(3, 4, 0), Rate(2, 4, 0)),
        report(3, Rate(6, 8, 0), Rate(2, 4, 0)),
        report(4, Rate(0, 0, 4), none),
        report(5, Rate(3, 4, 0), none),
    ]
    assert [one.step for one in best_first(reports)] == [3, 2, 1, 5, 0]


def test_repeated_answers_and_foreign_ids_count_nothing() -> None:
    evaluation, tasks = begun()
    assert evaluation.answer(answer(tasks[0], True), 1.0)
    assert not evaluation.answer(answer(tasks[0], False), 2.0)
    assert not evaluation.answer(answer(replace(tasks[0], group_id=5)), 2.0)
    assert evaluation.report(2.0).sampled.successes == 1


def test_failed_episodes_are_asked_again_and_then_reported_as_unanswered() -> None:
    evaluation, tasks = begun(1, greedy_questions=0, attempts=3)
    for attempt in range(3):
        assert [task.attempt for task in tasks] == [attempt]
        evaluation.answer(answer(tasks[0], status=Status.TIMEOUT), 1.0)
        tasks = list(evaluation.tasks(1.0))
    assert tasks == []
    assert evaluation.done
    rate = evaluation.report(1.0).sampled
    assert (rate.value, rate.answered, rate.unanswered) == (None, 0, 1)


def test_answers_of_another_version_do_not_count() -> None:
    evaluation, tasks = begun(1, greedy_questions=0)
    evaluation.answer(answer(tasks[0], version=Version(2, 2)), 1.0)
    assert not evaluation.done
    assert [task.attempt for task in evaluation.tasks(1.0)] == [1]


def test_lost_and_overdue_questions_are_asked_again() -> None:
    evaluation, tasks = begun(2, greedy_questions=0, deadline_s=10)
    evaluation.lost([tasks[1].key, "eval-77.0"])
    again = list(evaluation.tasks(1.0))
    assert [(task.group_id, task.attempt) for task in again] == [(1001, 1)]
    assert list(evaluation.tasks(9.0)) == []
    assert {(task.group_id, task.attempt) for task in evaluation.tasks(12.0)} == {(1000, 1), (1001, 2)}
    assert evaluation.answer(answer(tasks[0]), 13.0)  # a late answer of an old attempt is an answer
    assert evaluation.answered == 1


def test_when_all_workers_died_whatever_has_no_answer_is_asked_again() -> None:
    evaluation, tasks = begun(3, greedy_questions=0)
    evaluation.answer(answer(tasks[0]), 1.0)
    evaluation.lost([tasks[1].key], alone=True)
    assert [(task.group_id, task.attempt) for task in evaluation.tasks(2.0)] == [(1001, 1), (1002, 0)]
    for _ in range(20):  # a question that kills its worker before it is seen there does so a bounded number of times
        evaluation.lost([], alone=True)
        list(evaluation.tasks(3.0))
    assert list(evaluation.tasks(4.0)) == []
