"""The learner's loop: events in, tasks, steps, adapters and checkpoints out.

Invariants: one thread owns ledger, buffer, credits and totals, so none of them needs a lock; the device always has the
next step waiting if the closings for it are here; a step that was assembled ahead obeys the staleness bound at the
number at which it trains; whatever ends the run, the books are closed and what has trained is saved.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from learner import background as bg
from learner.acks import Acks
from learner.alarms import Alarm, AlarmSettings
from learner.buffer import Buffer, fault, lay_out_updates
from learner.checkpoints import Snapshot
from learner.difficulty import Pool
from learner.evaluation import Evaluation, EvaluationReport, best_first
from learner.feeder import Feeder, TaskSource
from learner.ledger import Intake, Ledger
from learner.metrics import (
    AdapterLag,
    GroupStatistics,
    Journal,
    Stall,
    StallClock,
    Tally,
    contrast,
    mean,
    means,
    of_closing,
    of_verdict,
    percentile,
    sample_line,
    step_line,
    time_bucket,
)
from learner.results import Results
from learner.settings import CheckpointSettings, EvaluationSettings, LearnerSettings
from learner.subscriber import PAYLOAD_BYTES, Arrival, Outbox, PublishFailed
from learner.summary import Facts, advice, books, evaluation_progress, missing, no_step, scarcity, sizing, summarise
from trajectories.failures import FailurePolicy
from trajectories.schema import DeadLetter, End, Episode, Heartbeat, Outcome, Pack, Task, Verdict, Version

logger = logging.getLogger(__name__)

TURN_S = 0.1
"""Longest that the loop waits for an event."""
EVENTS_PER_TURN = 256
STEPS_AHEAD = 2
"""Steps that the device has: the one that runs and the one behind it."""
PROGRESS_LINE_S = 10.0
ADVICE_S = 60.0
NO_STEP_S = 20.0
"""After which the learner says why it has made no step, though groups end; again after twice the time."""
HUNG = ("abandoned", "hung_threads")
"""Of environments that did not stop when their time was up, as workers count them."""
EVAL_IDS = 10_000_000
"""Ids that each evaluation has for itself."""
EVALUATIONS = 100_000
"""Evaluations that each incarnation has ids for."""
EVAL_SAMPLES = 16
"""Answers of each evaluation that samples.jsonl keeps, the first that come."""


class Ending(StrEnum):
    """Why a run ended."""

    STEPS = "steps"
    TARGET_SUCCESS = "target_success"
    TRAIN_S = "train_s"
    SOLVED = "solved"
    """Groups have no variance any more: nothing is left to learn from them."""
    INTERRUPTED = "interrupted"
    NO_PROGRESS = "no_progress"
    TAKEN_OVER = "taken_over"
    FAILED_FAST = "failed_fast"
    """A group failed and `failures.policy` is `fail_fast`."""
    CRASHED = "crashed"

    @property
    def natural(self) -> bool:
        """Training came to its end; the evaluation after it follows."""
        return self in (Ending.STEPS, Ending.TARGET_SUCCESS, Ending.TRAIN_S, Ending.SOLVED)


class Phase(StrEnum):
    PREPARING = "preparing"
    """Compiling, and evaluating what training starts from."""
    TRAINING = "training"
    DRAINING = "draining"
    """The device finishes or gives up what it has."""
    EVALUATING = "evaluating"
    SAVING = "saving"
    """The last checkpoint is on its way."""
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Somebody asked the run to end."""


@dataclass(frozen=True)
class Parts:
    """What the loop drives; made by `train`."""

    run_id: str
    incarnation: int
    learner: LearnerSettings
    checkpoints: CheckpointSettings
    evaluation: EvaluationSettings
    buckets: tuple[int, ...]
    vocab_size: int
    max_kept: int
    """Most kept ids of a token; 0 if draws are not truncated."""
    trainer: bg.StepRunner
    ledger: Ledger
    tally: Tally
    tasks: TaskSource
    outbox: Outbox
    device: bg.Device
    publisher: bg.AdapterPublisher
    writer: bg.CheckpointWriter
    metrics: Journal
    samples: Journal
    dead_letters: Journal
    inbox: queue.SimpleQueue[Any]
    clock: Callable[[], float]
    say: Callable[[str], None]
    failures: FailurePolicy
    pool: Pool | None = None
    """What is known of the prompts' difficulty; None if it does not matter."""
    adapters_url: str = ""
    """Folder or gs:// prefix of the published adapters, each in a folder named by its version."""
    alarms: AlarmSettings = field(default_factory=AlarmSettings)
    base: str = ""
    """What the adapter is trained on."""
    results: Results | None = None
    """Of a run that only evaluates once, in this life or another: what ended before is not asked again."""


class Loop:
    """See the module. `run` returns why the run ended; `summary` is complete then."""

    def __init__(self, parts: Parts) -> None:
        self._p = parts
        self._now = parts.clock()
        self._began_at = self._now
        self._settings = parts.learner
        self._ledger, self._tally = parts.ledger, parts.tally
        self._buffer = Buffer(parts.learner)
        self._acks = Acks()
        self._stalls = StallClock(self._tally.busy_s, self._tally.stalls)
        self._lag = AdapterLag()
        self._alarm = Alarm(parts.alarms)
        self._feeder = Feeder(
            parts.run_id, parts.learner, parts.ledger, parts.tasks.task, parts.outbox.task, self._now, parts.pool
        )
        self._phase = Phase.PREPARING
        self.ending: Ending | None = None
        self.error: BaseException | None = None
        self._why = ""

        self._step = parts.trainer.step_number
        self._state = parts.trainer.state()
        self._in_device = 0
        self._published: Version | None = None
        self._version = Version(self._step, parts.incarnation)

        self._compiles: int | None = None
        self._startup_s: float | None = None
        self._training_since: float | None = None
        self._earlier_train_s = self._tally.train_s
        self._step_ended: float | None = None
        self._step_seconds: deque[float] = deque(maxlen=20)
        self._group_seconds: deque[float] = deque(maxlen=1000)
        self._since_step: list[GroupStatistics] = []
        self._failed_since_step, self._no_step_s = 0, NO_STEP_S
        self._newest_letter = self._newest_failure = ""
        """Of the dead letters since the last step, and of the evaluation's questions."""
        self._ends: Counter[str] = Counter()
        self._stalls_then: dict[str, float] = {}

        self._saving = 0
        """Checkpoints on their way."""
        self._gave_up_saving = False
        self._saved_at = self._now
        self._saved_step = self._step
        self._saved_signature: tuple[int, ...] | None = self._signature()
        self._evaluation: Evaluation | None = None
        self._evaluations_begun = 0
        self._evaluable = self._tally.evaluating is not None
        """Whether what the tally calls evaluating is where the workers find it."""
        self._after: EvaluationReport | None = None
        self._eval_s = self._tally.before.seconds if self._tally.before else 0.0

        self._turned_at = self._now
        self._progress_at = self._now
        self._failing_since: float | None = None
        """When the first group failed since one last ended otherwise, or trained."""
        self._failed_in_a_row, self._newest_reason = 0, ""
        self._heard_at: float | None = None
        self._finished: dict[str, int] = {}
        self._line_at = self._advice_at = self._quiet_since = self._now
        self._deadline = float("inf")

    # The run

    def run(self) -> Ending:
        self._begin()
        while self._phase is not Phase.DONE:
            self._turn()
        assert self.ending is not None
        if self._best and self._settings.steps:
            best = self._best[0]
            self._p.say(
                f"the best adapter, of step {best.step} with held-out success {best.sampled}, lies in "
                f"{self._p.adapters_url}/{best.version}"
            )
        return self.ending

    def _begin(self) -> None:
        p = self._p
        p.publisher.protect(self._kept_versions())
        p.publisher.offer(self._version, p.trainer.adapter, time.time())
        if self._step:
            groups = books(self._ledger.counts())
            p.say(f"going on from step {self._step} as incarnation {p.incarnation}; groups: {groups}")
        if p.evaluation.before and p.evaluation.questions and self._tally.before is None:
            self._evaluation = self._evaluate("before training", self._version)
        elif p.evaluation.after or p.evaluation.every_steps:
            p.tasks.eval_tasks(p.evaluation.questions)  # that there are too few is told now, not after training
        if self._settings.steps:
            p.say(sizing(self._settings))

    def _turn(self) -> None:
        for event in self._events():
            self._now = self._p.clock()
            self._handle(event)
        self._now = self._p.clock()
        # A loop that was away (a suspended machine, a long collection) has not heard its workers meanwhile.
        if self._now - self._turned_at > 1.0:
            self._feeder.roster.excuse(self._now - self._turned_at)
        self._turned_at = self._now
        self._watch_workers()
        self._advance()

    def _watch_workers(self) -> None:
        if self._phase in (Phase.PREPARING, Phase.TRAINING):
            training = self._phase is Phase.TRAINING
            gone = self._feeder.overdue(self._published_step, self._now, deadlines=training)
        else:
            gone = self._feeder.roster.bury(self._now)
        for lost in gone:
            self._finished.pop(lost.worker_id, None)
            self._p.say(f"worker {lost.worker_id} fell silent with {len(lost.keys)} task(s) in hand")
            if self._evaluation is not None:
                self._evaluation.lost(lost.keys, alone=lost.alone)

    def _events(self) -> list[Any]:
        inbox, events = self._p.inbox, []
        try:
            events.append(inbox.get(timeout=TURN_S))
            while len(events) < EVENTS_PER_TURN:
                events.append(inbox.get_nowait())
        except queue.Empty:
            pass
        return events

    def _advance(self) -> None:
        if self._phase is Phase.PREPARING:
            self._drive_evaluation()
            if self._compiles is not None and self._evaluation is None:
                self._start_training()
        elif self._phase is Phase.TRAINING:
            self._evaluate_meanwhile()
            self._train()
        elif self._phase is Phase.DRAINING:
            if self._in_device == 0 or self._now > self._deadline:
                self._close_books()
        elif self._phase is Phase.EVALUATING:
            self._evaluate_last()
        if self._phase in (Phase.TRAINING, Phase.EVALUATING) and self._checkpoint_due():
            self._save()
        if self._phase is Phase.SAVING:
            # What the run still learned (verdicts, duplicates) is worth one more checkpoint; a takeover forbids it.
            if not self._saving and self._dirty() and self.ending is not Ending.TAKEN_OVER and not self._gave_up_saving:
                self._save()
            if not self._saving or self._now > self._deadline:
                self._phase = Phase.DONE
        self._watchdog()

    # Phases

    def _start_training(self) -> None:
        self._phase = Phase.TRAINING
        self._startup_s = self._now - self._began_at
        self._training_since = self._quiet_since = self._now
        self._progress_at = self._now
        self._not_failing()
        self._feeder.watch_anew(self._now)
        if len(self._buffer):
            self._stalls.start(self._now)
        self._save_if_dirty()

    def _train(self) -> None:
        ending = self._reason_to_end()
        if ending is not None:
            self._end(ending)
            return
        if self._published is not None:
            self._feeder.issue(self._step, self._published_step, self._now)
        straggler = self._assemble()
        if self._in_device:
            cause = Stall.HOST
        elif straggler:
            cause = Stall.STRAGGLER
        elif not self._feeder.roster.workers:
            cause = Stall.NO_WORKERS
        else:
            cause = Stall.NO_ROWS
        self._stalls.cause(cause, self._now)
        self._tell_of_no_step()
        self._advise()

    def _reason_to_end(self) -> Ending | None:
        settings, recent = self._settings, self._tally.recent
        if self._step >= settings.steps:
            return Ending.STEPS
        if settings.train_s is not None and self._train_s() >= settings.train_s:
            return Ending.TRAIN_S
        window = settings.target_groups
        if settings.target_success is not None and len(recent) >= window:
            newest = list(recent)[-window:]
            if mean([success for success, _ in newest]) >= settings.target_success:
                return Ending.TARGET_SUCCESS
        window = max(window, 10 * settings.groups_per_step)
        if len(recent) >= window and all(filtered and success == 1.0 for success, filtered in list(recent)[-window:]):
            return Ending.SOLVED
        return None

    def _end(self, ending: Ending, why: str = "") -> None:
        """Stop training, or at once whatever goes on. The first reason stands, but for a natural one."""
        if self.ending is not None and (ending.natural or not self.ending.natural):
            return
        self.ending, self._why = ending, why
        if ending.natural:
            self._p.device.drain()
            self._phase = Phase.DRAINING
            return
        self._p.device.interrupt()
        self._evaluation = None
        self._deadline = self._now + self._settings.stop_within_s
        before_books = (Phase.PREPARING, Phase.TRAINING, Phase.DRAINING)
        self._phase = Phase.DRAINING if self._phase in before_books else Phase.SAVING

    def _close_books(self) -> None:
        """Training is over, for whatever reason: stop the clocks, and save or evaluate."""
        assert self.ending is not None
        self._stalls.stop(self._now)
        self._tally.train_s = self._train_s()
        self._training_since, self._earlier_train_s = None, self._tally.train_s
        self._progress_at = self._now
        if self.ending.natural and (self._tally.evaluating or self._evaluates_after):
            self._phase = Phase.EVALUATING
            self._save_if_dirty()
        else:
            self._phase = Phase.SAVING
            self._deadline = min(self._deadline, self._now + self._settings.stop_within_s)

    def _watchdog(self) -> None:
        idle = self._now - self._progress_at
        failing = 0.0 if self._failing_since is None else self._now - self._failing_since
        busy = self._in_device or (self._compiles is None and self._evaluation is None)
        if busy or self._phase not in (Phase.PREPARING, Phase.TRAINING, Phase.EVALUATING):
            return
        if self._phase is Phase.TRAINING and failing >= self._settings.no_progress_s:
            why = (
                f"no progress for {failing:.0f} s: all {self._failed_in_a_row} groups that ended have failed, "
                f"the newest because {self._newest_reason}"
            )
        elif idle >= self._settings.no_progress_s:
            why = f"no progress for {idle:.0f} s: {self._missing()}"
        else:
            return
        self._end(Ending.NO_PROGRESS, why)
        self._p.say(why)

    def _not_failing(self) -> None:
        """A group ended otherwise, or trained: failures before it were no more than that."""
        self._failing_since, self._failed_in_a_row = None, 0

    def _missing(self) -> str:
        if self._evaluation is not None:
            what = f"the evaluation has {self._evaluation.answered} of {self._evaluation.asked} answers; "
        else:
            what = ""
        return what + missing(
            workers=len(self._feeder.roster.workers),
            last_heartbeat_s=None if self._heard_at is None else self._now - self._heard_at,
            outstanding=self._ledger.outstanding,
            held=self._feeder.held(),
            waiting=len(self._buffer),
            needed=self._settings.groups_per_step,
        )

    # Events

    def _handle(self, event: Any) -> None:
        match event:
            case Arrival(content=Pack() as pack):
                self._on_pack(pack, event)
            case Arrival(content=Verdict() as verdict):
                self._on_verdict(verdict, event)
            case Arrival(content=Episode() as episode):
                self._on_result(episode)
                event.ack()
            case Arrival(content=Heartbeat() as heartbeat):
                self._on_heartbeat(heartbeat, event.at)
                event.ack()
            case Arrival(content=DeadLetter() as letter):
                self._on_dead_letter(letter)
                event.ack()
            case bg.StepDone():
                self._on_step(event)
            case bg.StepGivenUp(work=work):
                self._in_device -= 1
                self._buffer.put_back(work.chosen)
            case bg.Compiled(seconds=seconds, compiles=compiles):
                self._compiles, self._progress_at = compiles, self._now
                if self._settings.steps:
                    self._p.say(f"compiled {len(self._p.buckets)} bucket(s) in {seconds:.1f} s")
            case bg.Published(version=version):
                self._published = version
                self._evaluable = self._evaluable or version == self._tally.evaluating
            case bg.Saved(acks=acks):
                self._saving -= 1
                for ack in acks:
                    ack()
            case bg.SaveFailed(error=error, acks=acks):
                self._saving, self._saved_signature = self._saving - 1, None
                self._gave_up_saving = self._phase is Phase.SAVING
                self._p.say(f"a checkpoint failed and will be tried again: {error}")
                for ack in acks:
                    self._acks.keep(ack)
            case bg.TakenOver(error=error):
                self._p.say(f"stopping: {error}")
                self._saving = 0
                self._end(Ending.TAKEN_OVER, str(error))
            case bg.Crashed(error=error):
                self.error = error
                self._end(Ending.CRASHED, f"{type(error).__name__}: {error}")
            case PublishFailed(content=Task(), error=error):
                self.error = error
                self._end(Ending.CRASHED, f"{type(error).__name__}: {error}")
            case PublishFailed(content=content, error=error):
                logger.warning("a dead letter could not be published: %s (%s)", content, error)
            case Interrupt():
                self._p.say("stopping: saving what has trained" if self._settings.steps else "stopping")
                self._end(Ending.INTERRUPTED)
            case _:
                raise TypeError(f"unknown event {event!r}")

    def _on_pack(self, pack: Pack, arrival: Arrival) -> None:
        reason = fault(pack, self._p.buckets, self._p.vocab_size, self._p.max_kept)
        if reason is not None:
            self._refuse("Unusable", reason, repr(pack.closings)[:PAYLOAD_BYTES].encode(), arrival)
            return
        if self._phase is Phase.TRAINING:
            self._stalls.start(arrival.at)
        kept = []
        for closing in pack.closings:
            waited_s = self._feeder.waited_s(closing.group_id, self._now)
            intake = self._ledger.bind(closing.group_id, closing.attempt, closing.closing_id, self._published_step)
            if intake is not Intake.FOREIGN:
                kept.append((closing.group_id, closing.closing_id))
            if intake is Intake.TAKEN:
                self._buffer.add(closing, pack, self._step)
                self._progress_at = self._now
                self._not_failing()
                self._tally.arrived_by_time[time_bucket(of_closing(closing).duration_s)] += 1
                if waited_s is not None:
                    self._group_seconds.append(waited_s)
        if not kept:
            self._refuse("UnknownGroup", f"no group {pack.closings[0].group_id} was issued", b"", arrival)
            return
        self._acks.keep(arrival.ack, kept)

    def _on_verdict(self, verdict: Verdict, arrival: Arrival) -> None:
        waited_s = self._feeder.waited_s(verdict.group_id, self._now)
        intake = self._ledger.verdict(verdict.group_id, verdict.attempt, verdict.outcome, self._published_step)
        self._acks.keep(arrival.ack)
        if intake is not Intake.TAKEN:
            return
        statistics = of_verdict(verdict)
        self._tally.episodes += statistics.members
        self._tally.ends.update(statistics.ends)
        self._ends.update(statistics.ends)
        self._tally.arrived_by_time[time_bucket(statistics.duration_s)] += 1
        if waited_s is not None:
            self._group_seconds.append(waited_s)
        if verdict.outcome is Outcome.FILTERED:
            self._progress_at = self._now
            self._not_failing()
            self._since_step.append(statistics)
            self._tally.recent.append((statistics.success, True))
            self._feeder.ended(verdict.group_id, statistics.success)
            return
        self._failed_since_step += 1
        self._failed_in_a_row, self._newest_reason = self._failed_in_a_row + 1, verdict.reason
        if self._failing_since is None:
            self._failing_since = self._now
        if self._p.failures.ends_run and self._phase in (Phase.PREPARING, Phase.TRAINING):
            why = f"failures.policy is fail_fast, and group {verdict.group_id} failed: {verdict.reason}"
            self._p.say(f"stopping: {why}")
            self._end(Ending.FAILED_FAST, why)

    def _on_heartbeat(self, heartbeat: Heartbeat, at: float) -> None:
        self._heard_at = at
        self._feeder.heartbeat(heartbeat, self._published_step, at)
        self._lag.heard(heartbeat)
        if heartbeat.finished > self._finished.get(heartbeat.worker_id, 0):
            self._finished[heartbeat.worker_id] = heartbeat.finished
            self._progress_at = self._now

    def _on_result(self, episode: Episode) -> None:
        evaluation = self._evaluation
        result = evaluation.answer(episode, self._now) if evaluation is not None else None
        if evaluation is None or result is None:
            return
        if self._p.results is not None:
            self._p.results.append(result)
        self._progress_at = self._now
        if result.status.failed:
            self._newest_failure = f"{result.status}: {result.error}"
        if evaluation.answered <= EVAL_SAMPLES:
            during = evaluation.version == self._tally.evaluating
            phase = "during" if during else "before" if self._phase is Phase.PREPARING else "after"
            self._p.samples.append(sample_line(evaluation.version.step, phase, episode))

    def _on_dead_letter(self, letter: DeadLetter) -> None:
        self._tally.dead_letters[f"{letter.stage}: {letter.reason}"] += 1
        self._newest_letter = f"{letter.reason}: {letter.detail}"
        self._p.dead_letters.append(
            {
                "stage": letter.stage,
                "reason": letter.reason,
                "detail": letter.detail,
                "payload": letter.payload[:PAYLOAD_BYTES].decode("utf-8", errors="backslashreplace"),
            }
        )

    def _refuse(self, reason: str, detail: str, payload: bytes, arrival: Arrival) -> None:
        logger.warning("rows are refused: %s", detail)
        letter = DeadLetter(self._p.run_id, "learner.rows", reason, detail, payload)
        self._p.outbox.dead_letter(letter, arrival.ack)

    # Steps

    def _assemble(self) -> bool:
        """Give the device what it may have; returns whether only a straggler is missing."""
        while self._in_device < STEPS_AHEAD and (step := self._step + self._in_device) < self._settings.steps:
            in_flight = [group.issued_step for _, group in self._ledger.groups() if group.in_flight]
            choice = self._buffer.take(in_flight, step)
            for held in choice.discarded:
                closing = held.closing
                self._feeder.discard(closing.group_id, closing.attempt, self._published_step, self._now)
            if not choice.chosen:
                return choice.straggler
            trainer, minibatches = self._p.trainer, self._settings.minibatches
            prepared = trainer.prepare(*lay_out_updates(choice.chosen, minibatches, rewards=trainer.wants_rewards))
            self._p.device.submit(bg.Work(step, choice.chosen, prepared))
            self._in_device += 1
        return False

    def _on_step(self, done: bg.StepDone) -> None:
        work, self._in_device = done.work, self._in_device - 1
        self._ledger.train((held.closing.group_id, held.closing.closing_id) for held in work.chosen)
        self._step = work.step + 1
        self._state = done.state
        self._version = Version(self._step, self._p.incarnation)
        self._progress_at = self._now
        self._not_failing()
        out = sum(group.in_flight for _, group in self._ledger.groups())
        self._lag.stepped(self._version, done.ended_at, out)
        evaluated = self._evaluation_due()
        if evaluated:
            self._tally.evaluating, self._evaluable = self._version, False
            self._p.publisher.protect(self._kept_versions())
        self._p.publisher.offer(self._version, done.adapter, done.ended_at, certain=evaluated)
        self._stalls.busy(done.began, done.ended)
        self._step_seconds.append(done.ended - done.began)
        self._failed_since_step, self._newest_letter = 0, ""
        self._quiet_since, self._no_step_s = self._now, NO_STEP_S
        record = self._record(done)
        self._step_ended = done.ended
        self._p.metrics.append(record)
        for episode in contrast(held.closing for held in work.chosen):
            self._p.samples.append(sample_line(self._step, "train", episode))
        self._p.say(step_line(record, self._settings.steps))
        for text in self._alarm.check(record, self._now):
            logger.warning("%s", text)
        if evaluated and self._p.checkpoints.keep_best:
            self._save()

    def _record(self, done: bg.StepDone) -> dict[str, Any]:
        """Count the step into the totals; its line of metrics.jsonl."""
        tally, work, prepared = self._tally, done.work, done.work.prepared
        ages = [held.age(work.step) for held in work.chosen]
        trained = [of_closing(held.closing) for held in work.chosen]
        members = [episode for held in work.chosen for episode in held.closing.episodes]
        groups = [*self._since_step, *trained]
        filtered, self._since_step = len(self._since_step), []
        tally.ages.update(ages)
        tally.trained_by_time.update(time_bucket(one.duration_s) for one in trained)
        tally.recent.extend((one.success, False) for one in trained)
        tally.episodes += sum(one.members for one in trained)
        for held, one in zip(work.chosen, trained, strict=True):
            self._feeder.ended(held.closing.group_id, one.success)
            tally.ends.update(one.ends)
            self._ends.update(one.ends)
        ends, self._ends = {str(end): self._ends[end] for end in End}, Counter()
        beats = [worker.newest.metrics for worker in self._feeder.roster.workers.values()]
        hung = {name: int(sum(beat.get(f"environments/{name}", 0.0) for beat in beats)) for name in HUNG}
        tally.used_tokens += prepared.used_tokens
        tally.call_tokens += prepared.call_tokens
        tally.loss_tokens += prepared.loss_tokens
        tally.busy_s, tally.stalls = self._stalls.busy_s, dict(self._stalls.stalls)
        stalls = {name: s - self._stalls_then.get(name, 0.0) for name, s in tally.stalls.items()}
        self._stalls_then = dict(tally.stalls)
        before = self._step_ended if self._step_ended is not None else self._training_since or done.began
        success = mean([one.success for one in groups])
        tally.curve.append({"train_s": self._train_s(), "step": self._step, "sampled": success})
        return {
            "step": self._step,
            "version": str(self._version),
            "train_s": self._train_s(),
            "success": success,
            "reward": mean([one.reward for one in groups]),
            "reward_parts": means([one.reward_parts for one in members]),
            "counts": means([one.metrics for one in members]),
            "groups": [held.closing.group_id for held in work.chosen],
            "closings": [held.closing.closing_id for held in work.chosen],
            "filtered": filtered,
            "ends": ends,
            **hung,
            **({"difficulty": self._p.pool.counts()} if self._p.pool is not None else {}),
            "step_s": done.ended - done.began,
            "tokens": prepared.used_tokens,
            "tokens_per_s": prepared.used_tokens / max(1e-9, done.ended - before),
            "padding_fraction": 1 - prepared.used_tokens / max(1, prepared.call_tokens),
            "staleness_mean": mean(ages),
            "staleness_max": max(ages),
            "learner_busy": self._stalls.busy_fraction,
            "stall_s": {name: round(seconds, 3) for name, seconds in stalls.items() if seconds > 0},
            "buffered": len(self._buffer),
            **{f"ledger_{name}": number for name, number in self._ledger.counts().items()},
            **{name: value for name, value in asdict(done.metrics).items() if name != "step"},
        }

    def _train_s(self) -> float:
        running = 0.0 if self._training_since is None else self._now - self._training_since
        return self._earlier_train_s + running

    def _tell_of_no_step(self) -> None:
        ended = len(self._since_step) + self._failed_since_step
        quiet_s = self._now - self._quiet_since
        if quiet_s < self._no_step_s or self._in_device or ended < 2 * self._settings.groups_per_step:
            return
        self._no_step_s = 2 * quiet_s
        self._p.say(
            no_step(
                self._since_step,
                self._failed_since_step,
                waiting=len(self._buffer),
                needed=self._settings.groups_per_step,
                seconds=quiet_s,
                newest_letter=self._newest_letter,
            )
        )

    def _advise(self) -> None:
        if self._now - self._advice_at < ADVICE_S or self._stalls.wall_s == 0:
            return
        self._advice_at = self._now
        waiting = self._stalls.stalls.get(Stall.NO_ROWS, 0.0) + self._stalls.stalls.get(Stall.STRAGGLER, 0.0)
        if scarce := scarcity([filtered for _, filtered in self._tally.recent]):
            text: str | None = scarce
        else:
            text = advice(self._settings, percentile(self._group_seconds, 0.99), mean(self._step_seconds))
        if text is not None and waiting > 0.1 * self._stalls.wall_s:
            self._p.say(f"waiting for rows {waiting / self._stalls.wall_s:.0%} of the time: {text}")

    # Checkpoints

    def _signature(self) -> tuple[int, ...]:
        ledger = self._ledger
        return (
            self._step,
            ledger.issued,
            ledger.outstanding,
            sum(ledger.dropped.values()),
            sum(ledger.reissued.values()),
            len(self._tally.evaluations),
        )

    def _dirty(self) -> bool:
        return self._signature() != self._saved_signature

    def _checkpoint_due(self) -> bool:
        if self._saving or not self._dirty():
            return False
        settings = self._p.checkpoints
        return self._step - self._saved_step >= settings.every_steps or self._now - self._saved_at >= settings.every_s

    def _save_if_dirty(self) -> None:
        if not self._saving and self._dirty():
            self._save()

    def _save(self) -> None:
        """Ask for a checkpoint of this moment. State and books agree: both are as of the last `StepDone`."""
        self._saving += 1
        self._saved_at, self._saved_step, self._saved_signature = self._now, self._step, self._signature()
        self._tally.train_s = self._train_s()
        record: dict[str, Any] = {"tally": self._tally.to_json(), "version": str(self._version), "base": self._p.base}
        if self._p.pool is not None:
            record["pool"] = self._p.pool.to_json()
        acks = self._acks.settled(self._ledger)
        snapshot = Snapshot(self._step, self._state, self._ledger.to_bytes(), record)
        kept = {report.step for report in self._best[: self._p.checkpoints.keep_best]}
        if self._tally.evaluating is not None:
            kept.add(self._tally.evaluating.step)
        self._p.writer.save(snapshot, acks, kept)

    # Evaluation

    @property
    def _best(self) -> list[EvaluationReport]:
        return best_first(self._tally.evaluations)

    def _kept_versions(self) -> set[Version]:
        """Adapters that are kept besides the newest."""
        best = self._best[: max(1, self._p.checkpoints.keep_best)]
        kept = {Version.parse(report.version) for report in best}
        return kept | ({self._tally.evaluating} if self._tally.evaluating else set())

    @property
    def _evaluates_after(self) -> bool:
        return self._p.evaluation.after and self._p.evaluation.questions > 0

    def _evaluation_due(self) -> bool:
        """Whether the step that has just ended is evaluated while training goes on."""
        settings = self._p.evaluation
        if not (settings.every_steps and settings.questions) or self._tally.evaluating or self.ending is not None:
            return False
        if self._step >= self._settings.steps and self._evaluates_after:
            return False
        last = max((report.step for report in self._tally.evaluations), default=0)
        return self._step - last >= settings.every_steps

    def _evaluate(self, label: str, version: Version) -> Evaluation:
        p = self._p
        payloads = p.tasks.eval_tasks(p.evaluation.questions)
        when = f" {label}" if self._settings.steps else ""
        often = f" {p.evaluation.samples} times" if p.evaluation.samples > 1 else ""
        p.say(
            f"evaluation{when}: {len(payloads)} held-out questions sampled{often} and {p.evaluation.greedy} greedy, "
            f"with version {version}"
        )
        if p.results is None:
            first_id = (p.incarnation * EVALUATIONS + self._evaluations_begun) * EVAL_IDS
            self._evaluations_begun += 1
            return Evaluation(p.run_id, p.evaluation, payloads, version, first_id, self._now)
        # Seeds follow from ids, so ids are those of every life; nothing trains, so a step has one policy.
        evaluation = Evaluation(p.run_id, p.evaluation, payloads, version, 0, self._now, any_incarnation=True)
        try:
            taken = evaluation.go_on(p.results.ended)
        except ValueError as error:
            raise ValueError(f"{p.results.path} cannot be gone on with: {error}; choose another folder") from error
        if taken:
            p.say(f"{taken} of its episodes ended before and are taken from {p.results.path}")
        return evaluation

    def _evaluate_meanwhile(self) -> None:
        """Begin what is due once its adapter is published, and go on with what has begun."""
        version = self._tally.evaluating
        if version is not None and self._evaluation is None and self._evaluable:
            self._evaluation = self._evaluate(f"of step {version.step}", version)
        self._drive_evaluation()

    def _evaluate_last(self) -> None:
        """Training is over: end the evaluation that still runs, then evaluate what training ended with."""
        if self._tally.evaluating is not None:
            self._evaluate_meanwhile()
            return
        self._drive_evaluation()
        if self._evaluation is not None:
            return
        if self._after is None and self._evaluates_after:
            known = [report for report in self._tally.evaluations if report.version == str(self._version)]
            if known and self._settings.steps:
                self._after = known[-1]
            else:
                self._evaluation = self._evaluate("after training", self._version)
                return
        self._deadline = self._now + self._settings.stop_within_s
        self._phase = Phase.SAVING

    def _drive_evaluation(self) -> None:
        evaluation = self._evaluation
        if evaluation is None:
            return
        for task in evaluation.tasks(self._now):
            self._p.outbox.task(task)
        if not evaluation.done:
            if self._phase is not Phase.TRAINING and self._now - self._line_at > PROGRESS_LINE_S:
                self._line_at = self._now
                beats = [worker.newest for worker in self._feeder.roster.workers.values()]
                self._p.say(evaluation_progress(evaluation.answered, evaluation.asked, beats))
            return
        report = evaluation.report(self._now)
        during = evaluation.version == self._tally.evaluating
        of = f" of step {report.step}" if during else ""
        self._p.say(f"held-out success{of}: sampled {report.sampled}; greedy {report.greedy}; {report.seconds:.0f} s")
        if report.sampled.unanswered + report.greedy.unanswered and self._newest_failure:
            self._p.say(f"the newest failure of a question: {self._newest_failure}")
        self._tally.evaluations.append(report)
        if during:
            self._tally.evaluating = None
        else:
            self._eval_s += report.seconds
            if self._phase is Phase.PREPARING:
                self._tally.before = report
            else:
                self._after = report
        self._p.publisher.protect(self._kept_versions())
        self._evaluation = None

    # The end

    @property
    def _published_step(self) -> int:
        return self._published.step if self._published is not None else self._step

    def summary(self) -> dict[str, Any]:
        """The object for summary.json."""
        self._tally.train_s = self._train_s()
        self._tally.busy_s, self._tally.stalls = self._stalls.busy_s, dict(self._stalls.stalls)
        compiles = None if self._compiles is None else self._p.trainer.compiles - self._compiles
        facts = Facts(
            run_id=self._p.run_id,
            step=self._step,
            version=str(self._version),
            outcome=str(self.ending or Ending.CRASHED),
            eval_s=self._eval_s,
            startup_s=self._startup_s,
            learner_busy=self._stalls.busy_fraction,
            compiles_after_warmup=compiles,
            after=self._after,
            why=self._why,
            lag=self._lag,
            workers=len(self._feeder.roster.workers),
            adapters_url=self._p.adapters_url,
        )
        return summarise(facts, self._tally, self._ledger)
