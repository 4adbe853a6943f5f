"""Threads that keep the host out of the device's way: one runs steps, one publishes adapters, one saves checkpoints.

Invariants: each owns what it works on and talks to the learner's loop through events alone; the device thread goes from
one step to the next without waiting for storage or for the loop; every wait on them is bounded.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from learner.buffer import Held
from learner.checkpoints import Checkpoints, Snapshot, load_orbax
from policy.adapters import AdapterStore, Fenced, Lease
from policy.lora import Adapter
from trajectories.schema import Row, Version

logger = logging.getLogger(__name__)

Inbox = Callable[[Any], None]
_RETRY_S = 1.0


class StepRunner(Protocol):
    """What the device thread needs of `learner.step.Trainer`."""

    @property
    def adapter(self) -> Adapter: ...
    @property
    def compiles(self) -> int: ...
    @property
    def step_number(self) -> int: ...
    @property
    def wants_rewards(self) -> bool: ...
    def compile(self) -> float: ...
    def prepare(self, *minibatches: Sequence[Row]) -> Any: ...
    def run(self, prepared: Any, *, interrupted: Callable[[], bool]) -> Any | None: ...
    def state(self) -> Any: ...
    def restore(self, state: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Work:
    """One assembled step."""

    step: int
    """Learner step at which it trains; the policy is `step + 1` after it."""
    chosen: tuple[Held, ...]
    prepared: Any


@dataclass(frozen=True, slots=True)
class Compiled:
    seconds: float
    compiles: int
    """Of the process, so far."""


@dataclass(frozen=True, slots=True)
class StepDone:
    work: Work
    metrics: Any
    adapter: Adapter
    """After the step; valid for good."""
    state: Any
    """After the step; valid for good."""
    began: float
    ended: float
    """By the learner's clock."""
    ended_at: float
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class StepGivenUp:
    """An interrupted step: its closings have not trained."""

    work: Work


@dataclass(frozen=True, slots=True)
class Published:
    version: Version
    at: float
    """By the learner's clock."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint is durable: what it holds may be acknowledged."""

    name: str
    acks: Sequence[Callable[[], None]]


@dataclass(frozen=True, slots=True)
class SaveFailed:
    error: BaseException
    acks: Sequence[Callable[[], None]]


@dataclass(frozen=True, slots=True)
class TakenOver:
    """A newer incarnation has claimed the run."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Crashed:
    """A background thread met an error that it cannot mend."""

    error: BaseException


class Device:
    """Compiles once, then runs the steps it is given, one after another."""

    def __init__(
        self, trainer: StepRunner, inbox: Inbox, clock: Callable[[], float], *, will_train: bool = True
    ) -> None:
        """Without steps to come (`will_train`) nothing is compiled."""
        self._trainer, self._inbox, self._clock, self._will_train = trainer, inbox, clock, will_train
        self._works: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._interrupted = threading.Event()
        self._drained = threading.Event()
        self._done: StepDone | None = None
        """Of the step before, not told yet."""
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, work: Work) -> None:
        self._works.put(work)

    def drain(self) -> None:
        """Finish the step that runs; give up those behind it."""
        self._drained.set()

    def interrupt(self) -> None:
        """Give up all steps, the one that runs too."""
        self._drained.set()
        self._interrupted.set()

    def close(self, timeout_s: float) -> None:
        self.interrupt()
        self._works.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            seconds = self._trainer.compile() if self._will_train else 0.0
            self._inbox(Compiled(seconds, self._trainer.compiles))
            while (work := self._next()) is not None:
                self._step(work)
            self._tell()
        except Exception as error:
            logger.exception("the device thread failed")
            self._tell()
            self._inbox(Crashed(error))

    def _next(self) -> Work | None:
        try:
            return self._works.get_nowait()
        except queue.Empty:
            self._tell()
            return self._works.get()

    def _tell(self) -> None:
        if self._done is not None:
            done, self._done = self._done, None
            self._inbox(done)

    def _step(self, work: Work) -> None:
        if self._drained.is_set():
            self._tell()
            self._inbox(StepGivenUp(work))
            return
        started = False

        def interrupted() -> bool:
            """What follows the step before is the loop's work, and needs the interpreter: it waits until this step's
            first call, before which the trainer asks for the first time, is on the device."""
            nonlocal started
            if started:
                self._tell()
            started = True
            return self._interrupted.is_set()

        began = self._clock()
        metrics = self._trainer.run(work.prepared, interrupted=interrupted)
        self._tell()
        if metrics is None:
            self._inbox(StepGivenUp(work))
            return
        ended, ended_at = self._clock(), time.time()
        self._done = StepDone(work, metrics, self._trainer.adapter, self._trainer.state(), began, ended, ended_at)


@dataclass(frozen=True, slots=True)
class _Offer:
    version: Version
    adapter: Adapter
    step_ended_at: float
    certain: bool
    """It is published even if a newer one is offered meanwhile."""


class AdapterPublisher:
    """Publishes the newest adapter it was offered, at most once per interval. What is overtaken is never written, but
    for what was offered as certain."""

    def __init__(
        self, store: AdapterStore, keep: int, interval_s: float, inbox: Inbox, clock: Callable[[], float]
    ) -> None:
        self._store, self._keep, self._interval_s = store, keep, interval_s
        self._inbox, self._clock = inbox, clock
        self._changed = threading.Condition()
        self._offers: deque[_Offer] = deque()
        """Certain ones, and at most one behind them that may be overtaken."""
        self._protected: frozenset[Version] = frozenset()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="adapter-publisher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def offer(self, version: Version, adapter: Adapter, step_ended_at: float, *, certain: bool = False) -> None:
        with self._changed:
            if self._offers and not self._offers[-1].certain:
                self._offers.pop()
            self._offers.append(_Offer(version, adapter, step_ended_at, certain))
            self._changed.notify_all()

    def protect(self, versions: Collection[Version]) -> None:
        """From now on keep these, however old, and no others but the newest."""
        with self._changed:
            self._protected = frozenset(versions)

    def close(self, timeout_s: float) -> None:
        """Publish what was offered last, then stop."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        written = -self._interval_s
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._offers or self._closing)
                wait = written + self._interval_s - self._clock()
                if wait > 0 and not self._closing:
                    self._changed.wait(wait)
                    continue
                if not self._offers:
                    return
                offer = self._offers.popleft()
                version = offer.version
            try:
                self._store.publish(version, offer.adapter, step_ended_at=offer.step_ended_at)
                written = self._clock()
                self._inbox(Published(version, written))
                with self._changed:
                    protected = self._protected
                self._store.prune(self._keep, protect=protected)
            except Fenced as error:
                self._inbox(TakenOver(error))
                return
            except OSError as error:
                logger.warning("adapter %s could not be published, trying again: %s", version, error)
                self._offer_again(offer)
            except Exception as error:
                logger.exception("adapter %s could not be published", version)
                self._inbox(Crashed(error))
                return

    def _offer_again(self, offer: _Offer) -> None:
        with self._changed:
            if (offer.certain or not self._offers) and not self._closing:
                self._offers.appendleft(offer)
                self._changed.wait(_RETRY_S)


@dataclass(frozen=True, slots=True)
class _Request:
    snapshot: Snapshot
    acks: Sequence[Callable[[], None]]
    protect: frozenset[int]


class CheckpointWriter:
    """Saves snapshots in the background, one at a time, and says when one is durable."""

    def __init__(self, checkpoints: Checkpoints, lease: Lease, inbox: Inbox) -> None:
        self._checkpoints, self._lease, self._inbox = checkpoints, lease, inbox
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def save(self, snapshot: Snapshot, acks: Sequence[Callable[[], None]], protect: Collection[int] = ()) -> None:
        """Save; then an event `Saved` or `SaveFailed` brings `acks` back. Checkpoints of the steps `protect` stay."""
        self._requests.put(_Request(snapshot, acks, frozenset(protect)))

    def close(self, timeout_s: float) -> None:
        """Finish what was asked for, then stop."""
        self._requests.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        load_orbax()
        while (request := self._requests.get()) is not None:
            snapshot, acks = request.snapshot, request.acks
            try:
                if not self._lease.still_mine():
                    self._inbox(TakenOver(Fenced("a newer incarnation of the learner has claimed the run")))
                    return
                self._inbox(Saved(self._checkpoints.save(snapshot, protect=request.protect), acks))
            except Exception as error:
                # The run goes on: its messages stay unacknowledged until a later checkpoint holds them.
                logger.exception("a checkpoint of step %d failed", snapshot.step)
                self._inbox(SaveFailed(error, acks))
