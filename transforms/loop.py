"""The episodes of one worker process: an asyncio loop in its own thread, and a registry of what runs and what ended.

Invariants: no call from outside blocks; a result stays until it is forgotten; an episode that nobody asks for while
others are asked for (its key moved to another worker) is cancelled and counted as orphaned; code that blocks the event
loop, and with it every episode of the process, is named in the log.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from trajectories import codec
from trajectories.schema import Episode, Status, Task, Timings
from transforms.coders import recent
from transforms.pending import Absent, Claimed, Look, Running, failed_episode

AHEAD = 0.25
"""Share of `max_concurrency` that is started beyond it and waits in the process: a place that is free again is taken at
once, and not when the job next looks."""
LONGEST_STALL_S = 60.0
"""An episode is orphaned after this long even if the process was asked for nothing at all."""

BLOCKED_S = 10.0
"""Seconds without a turn after which the event loop counts as blocked."""
log = logging.getLogger(__name__)

RunEpisode = Callable[[Task, int], Awaitable[Episode]]


@dataclass(slots=True)
class _Entry:
    starts: int
    asked_at: float
    """Of the clock that runs only while the process is being asked."""
    asked_wall: float
    task: Task | None = None
    """None until started."""
    running: asyncio.Task[Episode] | None = None
    """Touched by the loop's thread alone."""
    result: Episode | None = None


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What the loop holds at one moment."""

    running: int
    waiting: int
    """Claimed, and without a place."""
    started: int
    """Since the process began."""
    finished: int
    orphaned: int
    holding: tuple[str, ...]
    """Keys of the attempts with a member that was started and has not ended."""


class EpisodeLoop:
    """Starts up to `max_concurrency` episodes, and AHEAD of that to wait for places, once `attach` has told it how.

    What it is attached to bounds those that run. Thread-safe."""

    def __init__(
        self, *, max_concurrency: int, poll_interval_s: float, orphan_intervals: int, clock: Callable[[], float]
    ) -> None:
        """`clock` gives monotonic seconds."""
        self._max_concurrency = max_concurrency
        self._poll_interval_s = poll_interval_s
        self._orphan_after_s = orphan_intervals * poll_interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._running = self._started = self._finished = self._orphaned = 0
        self._asked_clock = 0.0
        self._last_asked = self._turned_at = clock()
        self._named = False
        """Whether the log has said what blocks the event loop."""
        self._run: RunEpisode | None = None
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="episodes", daemon=True)
        self._thread.start()

    def attach(self, run: RunEpisode) -> None:
        """Begin: `run` makes one episode. Until then there is no room."""
        self._run = run

    def claim(self, episode_id: str, starts: int) -> None:
        """Note that start number `starts` is being written to state; an episode that runs is left alone."""
        with self._lock:
            entry = self._entries.get(episode_id)
            if entry is None:
                self._entries[episode_id] = _Entry(starts, self._ask(), self._last_asked)
            elif entry.task is None:
                entry.starts = starts

    def look(self, episode_id: str) -> Look:
        """The episode's result, or where it stands."""
        with self._lock:
            now = self._ask()
            entry = self._entries.get(episode_id)
            if entry is None:
                return Absent.ABSENT
            entry.asked_at, entry.asked_wall = now, self._last_asked
            if entry.result is not None:
                return entry.result
            return Claimed(entry.starts) if entry.task is None else Running.RUNNING

    def room(self) -> int:
        """Episodes that may be started now."""
        self._name_what_blocks()
        with self._lock:
            most = self._max_concurrency + math.ceil(AHEAD * self._max_concurrency)
            return 0 if self._run is None or self._closed else max(0, most - self._running)

    def submit(self, task: Task, sample: int) -> None:
        """Start a member; harmless if it runs or has ended."""
        run = self._run
        if run is None:
            raise RuntimeError("no episode can start before the loop is attached to a policy and an environment")
        episode_id = task.episode_id(sample)
        with self._lock:
            if self._closed:
                return
            entry = self._entries.get(episode_id)
            if entry is None:
                entry = self._entries[episode_id] = _Entry(1, self._ask(), self._last_asked)
            if entry.task is not None:
                return
            entry.task = task
            self._running += 1
            self._started += 1
        self._loop.call_soon_threadsafe(self._begin, run, task, sample, entry)

    def forget(self, episode_id: str) -> None:
        """Drop a result; an episode that still runs is cancelled."""
        with self._lock:
            entry = self._entries.pop(episode_id, None)
        if entry is not None and entry.task is not None and entry.result is None:
            self._loop.call_soon_threadsafe(_cancel, entry)

    cancel = forget

    def occupancy(self) -> Occupancy:
        """Counts for the heartbeat."""
        with self._lock:
            entries = list(self._entries.values())
            running = min(self._running, self._max_concurrency)
            return Occupancy(
                running=running,
                waiting=sum(entry.task is None for entry in entries) + self._running - running,
                started=self._started,
                finished=self._finished,
                orphaned=self._orphaned,
                holding=tuple(
                    sorted({entry.task.key for entry in entries if entry.task is not None and entry.result is None})
                ),
            )

    def close(self, timeout_s: float) -> None:
        """Cancel every episode, let their environments close, and stop; waits at most `timeout_s`."""
        with self._lock:
            self._closed = True
            entries = list(self._entries.values())
        for entry in entries:
            self._loop.call_soon_threadsafe(_cancel, entry)
        deadline = time.monotonic() + timeout_s
        while self._running and time.monotonic() < deadline:
            time.sleep(0.01)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(max(0.1, deadline - time.monotonic()))

    def _sweep(self) -> None:
        """Cancel and forget what nobody asks for any more."""
        with self._lock:
            wall = self._clock()
            stale = [
                episode_id
                for episode_id, entry in self._entries.items()
                if self._asked_clock - entry.asked_at > self._orphan_after_s
                or wall - entry.asked_wall > max(LONGEST_STALL_S, self._orphan_after_s)
            ]
            self._orphaned += sum(self._entries[episode_id].task is not None for episode_id in stale)
        for episode_id in stale:
            self.forget(episode_id)

    def _ask(self) -> float:
        """Advance the clock that runs only while the process is being asked; the lock is held.

        A stall of the whole job (a server that restarts, a machine that sleeps) must not make orphans of all episodes.
        """
        now = self._clock()
        self._asked_clock += min(now - self._last_asked, 2 * self._poll_interval_s)
        self._last_asked = now
        return self._asked_clock

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._sweep_on)
        self._loop.run_forever()
        self._loop.close()

    def _name_what_blocks(self) -> None:
        """Say in the log, once each time, what holds the event loop up. Nothing can stop it."""
        blocked_s = self._clock() - self._turned_at
        if blocked_s <= BLOCKED_S or self._named or self._closed:
            return
        self._named = True
        frame = sys._current_frames().get(self._thread.ident or 0)
        where = "".join(traceback.format_stack(frame, limit=8)) if frame is not None else "its thread has ended"
        log.error(
            "the event loop has been blocked for %.0f s, and every episode of this process with it. An environment "
            "must run what blocks in a thread (environments.tools.run_blocking). It is here:\n%s",
            blocked_s,
            where,
        )

    def _sweep_on(self) -> None:
        self._turned_at, self._named = self._clock(), False
        self._sweep()
        self._loop.call_later(self._poll_interval_s, self._sweep_on)

    def _begin(self, run: RunEpisode, task: Task, sample: int, entry: _Entry) -> None:
        entry.running = self._loop.create_task(_episode(run, task, sample), name=task.episode_id(sample))

        def ended(running: asyncio.Task[Episode]) -> None:
            with self._lock:
                self._running -= 1
                self._finished += 1
                odd = asyncio.CancelledError() if running.cancelled() else running.exception()
                if odd is None:
                    entry.result = running.result()
                elif not self._closed and self._entries.get(task.episode_id(sample)) is entry:
                    # Nobody here has cancelled it.
                    why = f"the episode's code ended it by a {type(odd).__name__}"
                    entry.result = failed_episode(task, sample, Status.ENVIRONMENT_ERROR, why)

        entry.running.add_done_callback(ended)


def _cancel(entry: _Entry) -> None:
    if entry.running is not None:
        entry.running.cancel()


async def _episode(run: RunEpisode, task: Task, sample: int) -> Episode:
    began = time.time()
    try:
        return sound(await run(task, sample))
    except Exception as error:
        # `run` never raises: this one is a mistake of ours, and still only one member's.
        return failed_episode(
            task,
            sample,
            Status.POLICY_ERROR,
            _printable(f"{type(error).__name__}: {error}"),
            Timings(started_at=began, ended_at=time.time()),
        )


def _printable(text: str) -> str:
    """Text that JSON on the wire can hold, cut."""
    return text[:2000].encode("utf-8", "replace").decode("utf-8")


def sound(episode: Episode) -> Episode:
    """The episode if a message can hold it; else the failed episode that says why."""
    try:
        encoded = codec.encode(episode)
        codec.decode(encoded, Episode)
        recent.note(episode, encoded)
        if not abs(episode.reward) < float("inf"):
            raise ValueError(f"the environment's reward must be a finite number, found {episode.reward}")
        return episode
    except (ValueError, TypeError) as error:
        return dataclasses.replace(
            failed_episode(
                Task(episode.run_id, episode.group_id, episode.attempt, episode.kind, episode.group_size),
                episode.sample,
                Status.ENVIRONMENT_ERROR,
                _printable(f"{type(error).__name__}: {error}"),
                episode.timings,
            ),
            temperature=episode.temperature,
        )
