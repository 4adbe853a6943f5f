"""Held-out questions, asked of one pinned version through the same rollout job as training.

Invariants: every question counts once, with the first episode that the pinned version finished; an episode that failed
or was lost is asked for again, a bounded number of times, and then reported as unanswered, never scored as wrong. Pure:
time comes in, the tasks to publish go out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from learner.estimates import Estimate, estimates
from learner.settings import EvaluationSettings
from trajectories.schema import End, Episode, Kind, Task, Version, end_of, group_key

SAMPLED_TEMPERATURE = 1.0
GREEDY_TEMPERATURE = 0.0


@dataclass(frozen=True, slots=True)
class Rate:
    """Successes among answered questions; one that is asked several times counts as often."""

    successes: int
    answered: int
    unanswered: int
    """Questions whose every attempt failed or was lost."""
    truncated: int = 0
    """Of the answered: those that a limit ended before they were solved. What else was answered is wrong."""

    @property
    def value(self) -> float | None:
        """The fraction; None if nothing was answered."""
        return self.successes / self.answered if self.answered else None

    def __str__(self) -> str:
        text = "nothing asked"
        if self.value is not None:
            text = f"{self.value:.3f} ({self.successes}/{self.answered})"
        counts = {"truncated": self.truncated, "unanswered": self.unanswered}
        return ", ".join([text, *(f"{count} {name}" for name, count in counts.items() if count)])


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    version: str
    sampled: Rate
    """At temperature 1."""
    greedy: Rate
    """At temperature 0."""
    seconds: float
    pass_at: tuple[Estimate, ...] = ()
    """pass@k of the sampled answers, by k."""

    @property
    def step(self) -> int:
        """Optimizer steps that the version has behind it."""
        return Version.parse(self.version).step

    def to_json(self) -> dict[str, Any]:
        def rate(one: Rate) -> list[int]:
            return [one.successes, one.answered, one.unanswered, one.truncated]

        return {
            "version": self.version,
            "sampled": rate(self.sampled),
            "greedy": rate(self.greedy),
            "seconds": self.seconds,
            "pass_at": [dataclasses.asdict(estimate) for estimate in self.pass_at],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> EvaluationReport:
        return cls(
            str(content["version"]),
            Rate(*(int(number) for number in content["sampled"])),
            Rate(*(int(number) for number in content["greedy"])),
            float(content["seconds"]),
            tuple(Estimate(**estimate) for estimate in content.get("pass_at", ())),
        )


def best_first(reports: Iterable[EvaluationReport]) -> list[EvaluationReport]:
    """By sampled success, then by greedy success, then the newer first; without those that nobody answered.

    `reports` come oldest first.
    """

    def score(report: EvaluationReport) -> tuple[float, float]:
        sampled, greedy = report.sampled.value, report.greedy.value
        return -1.0 if sampled is None else sampled, -1.0 if greedy is None else greedy

    newest_first = [report for report in reports if max(score(report)) >= 0][::-1]
    return sorted(newest_first, key=score, reverse=True)


@dataclass
class _Question:
    payload: Mapping[str, Any]
    temperature: float
    attempt: int = -1
    """Newest attempt that was asked for; -1 before the first."""
    asked_at: float = 0.0
    again: bool = True
    """Whether it has to be asked (again)."""
    success: bool | None = None
    truncated: bool = False
    given_up: bool = False
    losses: int = 0
    """Times it was asked again without a new attempt."""

    @property
    def open(self) -> bool:
        return self.success is None and not self.given_up


class Evaluation:
    """One evaluation of one version. `tasks` and `answer` are called until `done`."""

    def __init__(
        self,
        run_id: str,
        settings: EvaluationSettings,
        payloads: Sequence[Mapping[str, Any]],
        version: Version,
        first_id: int,
        now: float,
    ) -> None:
        """`first_id` and the ids after it must belong to no other evaluation of the run."""
        self._run_id, self._settings, self._version = run_id, settings, version
        self._first_id = first_id
        self._questions = [
            *(_Question(payload, SAMPLED_TEMPERATURE) for payload in payloads for _ in range(settings.samples)),
            *(_Question(payload, GREEDY_TEMPERATURE) for payload in payloads[: settings.greedy]),
        ]
        self._began_at = self._active_at = now

    @property
    def version(self) -> Version:
        return self._version

    @property
    def done(self) -> bool:
        return not any(question.open for question in self._questions)

    @property
    def answered(self) -> int:
        return sum(question.success is not None for question in self._questions)

    @property
    def asked(self) -> int:
        """Questions, sampled and greedy ones."""
        return len(self._questions)

    def tasks(self, now: float) -> Iterator[Task]:
        """Tasks to publish now: what was never asked, failed, was lost or is overdue."""
        for index, question in enumerate(self._questions):
            overdue = now - max(question.asked_at, self._active_at) > self._settings.deadline_s
            if not question.open or not (question.again or overdue):
                continue
            if question.attempt + 1 >= self._settings.attempts:
                question.given_up = True
                continue
            question.attempt += 1
            question.asked_at, question.again = now, False
            yield Task(
                run_id=self._run_id,
                group_id=self._first_id + index,
                attempt=question.attempt,
                kind=Kind.EVAL,
                group_size=1,
                payload=question.payload,
                version=self._version,
                temperature=question.temperature,
            )

    def answer(self, episode: Episode, now: float) -> bool:
        """Take an eval result; False if it is not of this evaluation, or repeats an answer."""
        question = self._question(episode.group_id)
        if question is None or not question.open:
            return False
        self._active_at = now
        foreign = any(span.version != self._version for span in episode.version_spans)
        if episode.status.failed or foreign:
            # Only the newest attempt's failure asks again: an older one's repeat is under way.
            question.again = question.again or episode.attempt >= question.attempt
        else:
            question.success = episode.success
            question.truncated = end_of(episode.status, episode.success) is End.TRUNCATED
        return True

    def lost(self, keys: Iterable[str], *, alone: bool = False) -> None:
        """Ask again what a dead worker held; if it was `alone`, also the rest: it may have read any of it.

        The rest is asked under its old name, which a worker that lives after all knows it has.
        """
        gone = set(keys)
        for index, question in enumerate(self._questions):
            if group_key(Kind.EVAL, self._first_id + index, question.attempt) in gone:
                question.again = True
            elif alone and not question.again and question.losses < self._settings.attempts:
                question.losses += 1
                question.attempt -= 1
                question.again = True

    def report(self, now: float) -> EvaluationReport:
        return EvaluationReport(
            str(self._version),
            self._rate(SAMPLED_TEMPERATURE),
            self._rate(GREEDY_TEMPERATURE),
            now - self._began_at,
            self._pass_at(),
        )

    def _pass_at(self) -> tuple[Estimate, ...]:
        asked = [question for question in self._questions if question.temperature == SAMPLED_TEMPERATURE]
        samples = self._settings.samples
        groups = [asked[start : start + samples] for start in range(0, len(asked), samples)]
        return estimates(
            [sum(one.success is not None for one in group) for group in groups],
            [sum(one.success is True for one in group) for group in groups],
        )

    def _rate(self, temperature: float) -> Rate:
        asked = [question for question in self._questions if question.temperature == temperature]
        return Rate(
            successes=sum(question.success is True for question in asked),
            answered=sum(question.success is not None for question in asked),
            unanswered=sum(question.success is None for question in asked),
            truncated=sum(question.truncated for question in asked),
        )

    def _question(self, group_id: int) -> _Question | None:
        index = group_id - self._first_id
        return self._questions[index] if 0 <= index < len(self._questions) else None
