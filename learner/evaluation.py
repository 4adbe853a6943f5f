"""Held-out questions, asked of one pinned version through the same rollout job as training.

Invariants: every question counts once, with the first episode that the pinned version finished; an episode that failed
or was lost is asked for again, a bounded number of times, and then reported as unanswered, never scored as wrong. Pure:
time comes in, the tasks to publish go out.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from learner.estimates import Estimate, estimates
from learner.results import NOTHING_ASKED, Figures, Result, digest, figures, of_episode
from learner.settings import EvaluationSettings
from trajectories.schema import End, Episode, Kind, Task, Version, group_key

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
        text = "nothing answered" if self.unanswered else "nothing asked"
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
    sampled_figures: Figures = NOTHING_ASKED
    greedy_figures: Figures = NOTHING_ASKED

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
            "sampled_figures": dataclasses.asdict(self.sampled_figures),
            "greedy_figures": dataclasses.asdict(self.greedy_figures),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> EvaluationReport:
        return cls(
            str(content["version"]),
            Rate(*(int(number) for number in content["sampled"])),
            Rate(*(int(number) for number in content["greedy"])),
            float(content["seconds"]),
            tuple(Estimate(**estimate) for estimate in content.get("pass_at", ())),
            *(
                Figures.from_json(content[name]) if name in content else NOTHING_ASKED
                for name in ("sampled_figures", "greedy_figures")
            ),
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
    number: int
    """Its place among the held-out questions."""
    sample: int
    """Which of the times that it is asked at this temperature."""
    payload: Mapping[str, Any]
    temperature: float
    attempt: int = -1
    """Newest attempt that was asked for; -1 before the first."""
    asked_at: float = 0.0
    again: bool = True
    """Whether it has to be asked (again)."""
    result: Result | None = None
    given_up: bool = False
    losses: int = 0
    """Times it was asked again without a new attempt."""

    @property
    def open(self) -> bool:
        return self.result is None and not self.given_up


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
        *,
        any_incarnation: bool = False,
    ) -> None:
        """`first_id` and the ids after it must belong to no other evaluation of the run. `any_incarnation`: versions of
        the same step are the same policy, whoever published them."""
        self._run_id, self._settings, self._version = run_id, settings, version
        self._first_id, self._any_incarnation = first_id, any_incarnation
        self._questions = [
            _Question(number, sample, payload, SAMPLED_TEMPERATURE)
            for number, payload in enumerate(payloads)
            for sample in range(settings.samples)
        ]
        self._questions += [
            _Question(number, 0, payload, GREEDY_TEMPERATURE)
            for number, payload in enumerate(payloads[: settings.greedy])
        ]
        self._failures: defaultdict[float, Counter[str]] = defaultdict(Counter)
        self._began_at = self._active_at = now

    @property
    def version(self) -> Version:
        return self._version

    @property
    def done(self) -> bool:
        return not any(question.open for question in self._questions)

    @property
    def answered(self) -> int:
        return sum(question.result is not None for question in self._questions)

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

    def answer(self, episode: Episode, now: float) -> Result | None:
        """Take an eval result; None if it is not of this evaluation, or repeats an answer."""
        question = self._question(episode.group_id)
        if question is None or not question.open:
            return None
        self._active_at = now
        result = of_episode(episode, question.number, question.sample, question.temperature, question.payload)
        foreign = any(self._foreign(span.version) for span in episode.version_spans)
        self._take(question, result, foreign)
        return result

    def go_on(self, ended: Iterable[Result]) -> int:
        """Take what ended in an earlier life that asked the same; returns how many.

        Raises ValueError for a result of another question.
        """
        taken = 0
        for result in ended:
            question = self._question(result.group_id)
            known = None if question is None else (question.number, question.sample, question.temperature)
            if question is None or known != (result.question, result.sample, result.temperature):
                raise ValueError(f"{result.episode_id} is no episode of this evaluation")
            if digest(question.payload) != result.payload:
                raise ValueError(f"held-out question {result.question} was another when {result.episode_id} ended")
            if question.open:
                question.attempt = max(question.attempt, result.attempt)
                self._take(question, result, bool(result.version) and self._foreign(Version.parse(result.version)))
                taken += 1
        return taken

    def _foreign(self, version: Version) -> bool:
        return version.step != self._version.step or (version != self._version and not self._any_incarnation)

    def _take(self, question: _Question, result: Result, foreign: bool) -> None:
        if result.status.failed or foreign:
            # Only the newest attempt's failure asks again: an older one's repeat is under way.
            question.again = question.again or result.attempt >= question.attempt
        else:
            question.result = result
        if result.status.failed:
            self._failures[question.temperature][str(result.status)] += 1

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
            self._figures(SAMPLED_TEMPERATURE),
            self._figures(GREEDY_TEMPERATURE),
        )

    def _pass_at(self) -> tuple[Estimate, ...]:
        asked, samples = self._results(SAMPLED_TEMPERATURE), self._settings.samples
        groups = [asked[start : start + samples] for start in range(0, len(asked), samples)]
        return estimates(
            [sum(one is not None for one in group) for group in groups],
            [sum(one is not None and one.success for one in group) for group in groups],
        )

    def _rate(self, temperature: float) -> Rate:
        asked = self._results(temperature)
        answers = [result for result in asked if result is not None]
        return Rate(
            successes=sum(answer.success for answer in answers),
            answered=len(answers),
            unanswered=len(asked) - len(answers),
            truncated=sum(answer.end is End.TRUNCATED for answer in answers),
        )

    def _figures(self, temperature: float) -> Figures:
        asked = self._results(temperature)
        answers = [result for result in asked if result is not None]
        return figures(answers, len(asked) - len(answers), self._failures[temperature])

    def _results(self, temperature: float) -> list[Result | None]:
        """Of the questions at that temperature, in order."""
        return [question.result for question in self._questions if question.temperature == temperature]

    def _question(self, group_id: int) -> _Question | None:
        index = group_id - self._first_id
        return self._questions[index] if 0 <= index < len(self._questions) else None
