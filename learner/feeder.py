"""Credits and deadlines: which tasks are issued, and which are issued again.

Invariants: no task is issued that could not train within the staleness bound (see `credits`); a group that is out is
issued again when the worker that held it falls silent, when a worker holds it for too long, or when nobody takes it;
every change goes through the ledger. Pure apart from `publish`: time comes in as an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from learner.difficulty import Pool
from learner.ledger import Ledger, Reissue
from learner.settings import LearnerSettings
from trajectories.schema import Heartbeat, Kind, Task, group_key

MOST_SKIPS = 1000
"""Retired prompts that are passed over in one call: making payloads takes time, and the learner has other work."""
SILENT_INTERVALS = 3
"""Heartbeat intervals without a heartbeat after which a worker counts as dead."""


class TaskSource(Protocol):
    """Where tasks come from."""

    def task(self, group_id: int) -> Mapping[str, Any]:
        """The payload of a training task: a pure function of the run and the id."""
        ...

    def eval_tasks(self, count: int) -> list[Mapping[str, Any]]:
        """`count` distinct payloads, none of which occurs in training; the same ones at every call."""
        ...


def credits(settings: LearnerSettings, step: int, published_step: int, outstanding: int) -> int:
    """How many groups may be issued at learner step `step`, with the adapter of `published_step` the newest there is.

    A group issued now may be sampled by that adapter and so is due at step published_step + max_staleness. The steps up
    to that one train `groups_per_step` groups each, the oldest first; what is out already comes before it.
    """
    if settings.synchronous:
        return max(0, settings.groups_per_step - outstanding) if published_step >= step else 0
    steps = published_step + settings.max_staleness - step + 1
    return max(0, min(settings.max_outstanding, steps * settings.groups_per_step) - outstanding)


@dataclass
class Worker:
    """A worker process, as its heartbeats show it."""

    since: float
    """Arrival of its first heartbeat, by the learner's clock."""
    heard_at: float
    """Arrival of its newest."""
    newest: Heartbeat
    holding: frozenset[str] = frozenset()

    @property
    def patience_s(self) -> float:
        return SILENT_INTERVALS * max(self.newest.interval_s, 0.1)


@dataclass
class _Watch:
    """What is known of the newest attempt of a group that is out."""

    issued_at: float
    held_at: float | None = None
    """First report that a worker holds it."""
    seen_at: float | None = None
    """Newest such report."""
    suspect: bool = False
    """It was out when the learner began or when a worker died `alone`: it may be lost, and nobody will say so."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker that fell silent, and the keys it held."""

    worker_id: str
    keys: tuple[str, ...]
    alone: bool = True
    """No worker of its time is left: what it had read and not started is gone, and nobody will say so."""


@dataclass
class Roster:
    """The workers that are alive."""

    workers: dict[str, Worker] = field(default_factory=dict)
    alive_since: float | None = None
    """Since when there has been at least one; of the present generation, if one followed another."""

    def hear(self, heartbeat: Heartbeat, now: float) -> bool:
        """Note a heartbeat; False if a newer one of its worker came before it."""
        known = self.workers.get(heartbeat.worker_id)
        if known is not None and heartbeat.sent_at < known.newest.sent_at:
            return False
        if self.alive_since is None:
            self.alive_since = now
        since = now if known is None else known.since
        self.workers[heartbeat.worker_id] = Worker(since, now, heartbeat, frozenset(heartbeat.holding))
        return True

    def bury(self, now: float) -> list[Lost]:
        """Forget the workers that are silent; returns them with the keys that nobody else holds."""
        silent = [name for name, worker in self.workers.items() if now - worker.heard_at > worker.patience_s]
        dead = {name: self.workers.pop(name) for name in silent}
        first = min((worker.since for worker in self.workers.values()), default=None)
        held = frozenset[str]().union(*(worker.holding for worker in self.workers.values()))
        lost = [
            Lost(name, tuple(sorted(worker.holding - held)), alone=first is None or first > worker.heard_at)
            for name, worker in dead.items()
        ]
        # A process that is started again may speak before its predecessor counts as dead.
        if any(one.alone for one in lost):
            self.alive_since = first
        return lost

    def excuse(self, seconds: float) -> None:
        """The learner itself was away for so long: nobody was silent meanwhile."""
        for worker in self.workers.values():
            worker.heard_at += seconds


class Feeder:
    """Issues tasks for the credits there are and watches over those that are out."""

    def __init__(
        self,
        run_id: str,
        settings: LearnerSettings,
        ledger: Ledger,
        task: Callable[[int], Mapping[str, Any]],
        publish: Callable[[Task], None],
        now: float,
        pool: Pool | None = None,
    ) -> None:
        """Groups that are outstanding in `ledger` (restored) are watched from `now` on. `pool` knows which prompts are
        passed over."""
        self._pool = pool
        self._run_id, self._settings, self._ledger = run_id, settings, ledger
        self._task, self._publish = task, publish
        self._watches = {group_id: _Watch(now, suspect=True) for group_id, _ in ledger.groups()}
        self.roster = Roster()

    def issue(self, step: int, published_step: int, now: float) -> int:
        """Issue what the credits allow; returns how many."""
        number = credits(self._settings, step, published_step, self._ledger.outstanding)
        issued = skipped = 0
        while issued < number and skipped < MOST_SKIPS:
            if self._pool is not None and self._pool.skip(self._task(self._ledger.issued)):
                self._ledger.retire(published_step)
                skipped += 1
            else:
                self._send(self._ledger.issue(published_step), 0, now)
                issued += 1
        return issued

    def ended(self, group_id: int, success: float) -> None:
        """A group's members were compared, and this share of them had solved its prompt: the pool learns of it."""
        if self._pool is not None:
            self._pool.visited(self._task(group_id), success)

    def discard(self, group_id: int, attempt: int, published_step: int, now: float) -> None:
        """Give up a bound closing of `attempt` that is past the staleness bound, and issue its group again."""
        again = self._ledger.discard(group_id, attempt, published_step)
        if again is not None:
            self._send(group_id, again, now)

    def heartbeat(self, heartbeat: Heartbeat, step: int, now: float) -> None:
        """Learn what its worker holds."""
        if not self.roster.hear(heartbeat, now):
            return
        for key in heartbeat.holding:
            held = training_key(key)
            if held is None or not self._ledger.adopt(held[0], step):
                continue
            group = self._ledger.group(held[0])
            if group is not None and group.attempt == held[1]:
                watch = self._watch(held[0], now)
                watch.held_at = now if watch.held_at is None else watch.held_at
                watch.seen_at = now
                watch.suspect = False

    def overdue(self, published_step: int, now: float, *, deadlines: bool) -> list[Lost]:
        """Issue again what dead workers held and, with `deadlines`, what is overdue.

        Returns the workers that fell silent since the last call.
        """
        lost = self.roster.bury(now)
        if any(one.alone for one in lost):
            for watch in self._watches.values():
                watch.suspect = True
        orphaned = {training_key(key) for worker in lost for key in worker.keys}
        for group_id, group in list(self._ledger.groups()):
            if not group.in_flight:
                continue
            reason = self._fault(self._watch(group_id, now), now) if deadlines else None
            if (group_id, group.attempt) in orphaned:
                reason = Reissue.WORKER_LOST
            if reason is not None:
                again = self._ledger.reissue(group_id, reason, published_step)
                if again is not None:
                    self._send(group_id, again, now)
        # Ended groups need no watch.
        self._watches = {g: watch for g, watch in self._watches.items() if self._ledger.group(g) is not None}
        return lost

    def watch_anew(self, now: float) -> None:
        """Start every deadline from `now`: until then nobody could work on the tasks."""
        for watch in self._watches.values():
            watch.issued_at = now
            watch.held_at = now if watch.held_at is not None else None
            watch.seen_at = now if watch.seen_at is not None else None

    def waited_s(self, group_id: int, now: float) -> float | None:
        """Seconds since the group's newest attempt was issued; None if it is not out."""
        watch = self._watches.get(group_id)
        return None if watch is None else now - watch.issued_at

    def held(self) -> int:
        """Groups that are out and were seen at a worker."""
        return sum(
            1
            for group_id, group in self._ledger.groups()
            if group.in_flight and (watch := self._watches.get(group_id)) and watch.held_at is not None
        )

    def _fault(self, watch: _Watch, now: float) -> Reissue | None:
        settings, alive_since = self._settings, self.roster.alive_since
        if watch.held_at is not None and now - watch.held_at > settings.task_deadline_s:
            return Reissue.TASK_DEADLINE
        if alive_since is None:
            return None
        missed_since = max(watch.issued_at if watch.seen_at is None else watch.seen_at, alive_since)
        patience_s = settings.unstarted_deadline_s
        if watch.suspect:
            # Workers that live report what they hold within an interval, so this is the time of a few reports.
            patience_s = min(patience_s, max(worker.patience_s for worker in self.roster.workers.values()))
        return Reissue.UNSTARTED if now - missed_since > patience_s else None

    def _watch(self, group_id: int, now: float) -> _Watch:
        # A group without a watch was issued by an earlier life of the learner and adopted.
        return self._watches.setdefault(group_id, _Watch(now, suspect=True))

    def _send(self, group_id: int, attempt: int, now: float) -> None:
        self._watches[group_id] = _Watch(now)
        self._publish(
            Task(
                run_id=self._run_id,
                group_id=group_id,
                attempt=attempt,
                kind=Kind.TRAIN,
                group_size=self._settings.group_size,
                payload=self._task(group_id),
            )
        )


def training_key(key: str) -> tuple[int, int] | None:
    """(group_id, attempt) of a training task's key; None for any other text."""
    group, _, attempt = key.partition(".")
    if group.isascii() and group.isdigit() and attempt.isascii() and attempt.isdigit():
        parts = int(group), int(attempt)
        return parts if group_key(Kind.TRAIN, *parts) == key else None
    return None
