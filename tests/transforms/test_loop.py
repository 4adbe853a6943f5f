"""The episodes of a process: results stay until forgotten, orphans are cancelled, a stall orphans nobody."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.transforms.conftest import MakeEpisode
from trajectories.failures import RetryOnFailure
from trajectories.schema import Episode, Status, Task
from transforms.loop import BLOCKED_S, LONGEST_STALL_S, EpisodeLoop, sound
from transforms.pending import Absent, Claimed, Running, arrive, look_round

TASK = Task("run-1", group_id=3, group_size=3)
IDS = [TASK.episode_id(sample) for sample in range(3)]
PATIENCE_S = 30.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Scripted:
    """Episodes that end when they are told to."""

    def __init__(self, make_episode: MakeEpisode) -> None:
        self.make_episode = make_episode
        self.told: set[int] = set()
        self.cancelled: list[int] = []
        self.entered = 0

    async def __call__(self, task: Task, sample: int) -> Episode:
        self.entered += 1
        try:
            while sample not in self.told:
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.cancelled.append(sample)
            raise
        if sample == 2:
            raise RuntimeError("a mistake in the orchestrator")
        return self.make_episode(sample)


@contextmanager
def running(script: Scripted, clock: Callable[[], float] = time.monotonic, room: int = 2) -> Iterator[EpisodeLoop]:
    loop = EpisodeLoop(max_concurrency=room, poll_interval_s=0.1, orphan_intervals=10, clock=clock)
    loop.attach(script)
    try:
        yield loop
    finally:
        loop.close(PATIENCE_S)


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def script(make_episode: MakeEpisode) -> Scripted:
    return Scripted(make_episode)


def test_a_result_stays_until_it_is_forgotten(script: Scripted) -> None:
    with running(script) as loop:
        assert loop.look(IDS[0]) is Absent.ABSENT
        loop.claim(IDS[0], 1)
        assert loop.look(IDS[0]) == Claimed(1)
        loop.submit(TASK, 0)
        loop.submit(TASK, 0)
        assert loop.look(IDS[0]) is Running.RUNNING
        assert loop.occupancy().holding == ("3.0",)
        script.told.add(0)
        until(lambda: isinstance(loop.look(IDS[0]), Episode))
        assert isinstance(loop.look(IDS[0]), Episode)
        assert loop.occupancy().holding == ()
        loop.forget(IDS[0])
        assert loop.look(IDS[0]) is Absent.ABSENT
        assert (loop.occupancy().started, loop.occupancy().finished) == (1, 1)


def test_room_is_what_max_concurrency_leaves_and_one_more_waits_in_the_process(script: Scripted) -> None:
    with running(script, room=2) as loop:
        assert loop.room() == 3
        for sample in range(3):
            loop.submit(TASK, sample)
        assert loop.room() == 0
        assert (loop.occupancy().running, loop.occupancy().waiting) == (2, 1)
        script.told.add(1)
        until(lambda: loop.room() == 1)
        assert (loop.occupancy().running, loop.occupancy().waiting) == (2, 0)


def test_there_is_no_room_before_there_is_a_policy() -> None:
    loop = EpisodeLoop(max_concurrency=2, poll_interval_s=0.1, orphan_intervals=10, clock=time.monotonic)
    assert loop.room() == 0
    loop.close(PATIENCE_S)


def test_a_mistake_of_ours_costs_one_member(script: Scripted) -> None:
    with running(script) as loop:
        script.told.add(2)
        loop.submit(TASK, 2)
        until(lambda: isinstance(loop.look(IDS[2]), Episode))
        episode = loop.look(IDS[2])
        assert isinstance(episode, Episode)
        assert episode.status is Status.POLICY_ERROR
        assert "a mistake in the orchestrator" in episode.error


@pytest.mark.parametrize("odd", [asyncio.CancelledError, GeneratorExit])
def test_an_episode_that_its_own_code_ends_oddly_is_a_failed_one_and_never_runs_for_ever(
    odd: type[BaseException],
) -> None:
    async def ends(task: Task, sample: int) -> Episode:
        raise odd

    loop = EpisodeLoop(max_concurrency=2, poll_interval_s=0.1, orphan_intervals=10, clock=time.monotonic)
    loop.attach(ends)
    try:
        loop.submit(TASK, 0)
        until(lambda: isinstance(loop.look(IDS[0]), Episode))
        episode = loop.look(IDS[0])
        assert isinstance(episode, Episode)
        assert (episode.status, episode.error) == (
            Status.ENVIRONMENT_ERROR,
            f"the episode's code ended it by a {odd.__name__}",
        )
        assert loop.occupancy().holding == ()
    finally:
        loop.close(PATIENCE_S)


def test_an_episode_nobody_asks_for_is_cancelled_and_its_key_may_come_back(script: Scripted) -> None:
    clock = Clock()
    with running(script, clock) as loop:
        loop.submit(TASK, 0)
        loop.submit(TASK, 1)
        until(lambda: script.entered == 2)
        for _ in range(12):
            clock.now += 0.1
            loop.look(IDS[1])
        until(lambda: loop.occupancy().orphaned == 1)
        assert loop.look(IDS[0]) is Absent.ABSENT
        assert loop.look(IDS[1]) is Running.RUNNING
        until(lambda: script.cancelled == [0])
        until(lambda: loop.room() == 2)


def test_a_stall_of_the_job_orphans_nobody_unless_it_lasts(script: Scripted) -> None:
    clock = Clock()
    with running(script, clock) as loop:
        loop.submit(TASK, 0)
        until(lambda: script.entered == 1)
        clock.now += LONGEST_STALL_S - 1
        time.sleep(0.3)
        assert loop.look(IDS[0]) is Running.RUNNING
        time.sleep(0.3)
        assert loop.look(IDS[0]) is Running.RUNNING
        clock.now += LONGEST_STALL_S + 1
        until(lambda: loop.occupancy().orphaned == 1)


def test_closing_lets_every_environment_clean_up(script: Scripted) -> None:
    with running(script) as loop:
        loop.submit(TASK, 0)
        loop.submit(TASK, 1)
        until(lambda: script.entered == 2)
    assert sorted(script.cancelled) == [0, 1]


def test_what_no_message_can_hold_becomes_a_failed_episode(make_episode: MakeEpisode) -> None:
    good = make_episode()
    assert sound(good) is good
    for bad in (
        make_episode(error="\udcff", status=Status.TIMEOUT),
        make_episode(reward=float("nan")),
        make_episode(metrics={"count": object()}),
    ):
        mended = sound(bad)
        assert mended.status is Status.ENVIRONMENT_ERROR
        assert mended.error
        assert (mended.episode_id, mended.group_size) == (good.episode_id, good.group_size)
        assert sound(mended) is mended


def test_a_member_that_failed_is_run_again_in_its_process_and_its_second_end_counts(make_episode: MakeEpisode) -> None:
    """The transitions of `look_round` against a real event loop: what RunEpisodes does at each look."""
    runs: list[str] = []

    async def fails_once(task: Task, sample: int) -> Episode:
        runs.append(task.episode_id(sample))
        status = Status.TIMEOUT if len(runs) == 1 else Status.COMPLETED
        return make_episode(sample, status=status)

    task = Task("run-1", group_id=3, group_size=1)
    entry = arrive((), task)
    assert entry is not None
    state, emitted, failed = (entry,), list[Episode](), list[Episode]()
    loop = EpisodeLoop(max_concurrency=1, poll_interval_s=0.1, orphan_intervals=1000, clock=time.monotonic)
    loop.attach(fails_once)
    loop.claim(task.episode_id(0), 1)
    deadline = time.monotonic() + PATIENCE_S
    try:
        while state:
            assert time.monotonic() < deadline
            now = look_round(state, loop.look, loop.room(), max_attempts=1, policy=RetryOnFailure(1))
            for episode_id in now.forget:
                loop.forget(episode_id)
            for started, sample in now.start:
                loop.submit(started, sample)
            for episode_id, starts in now.claim:
                loop.claim(episode_id, starts)
            state = now.pending
            emitted += now.emit
            failed += now.retried
            time.sleep(0.005)
    finally:
        loop.close(PATIENCE_S)
    assert runs == ["3.0/0", "3.0/0"]
    assert [episode.status for episode in failed] == [Status.TIMEOUT]
    assert [episode.status for episode in emitted] == [Status.COMPLETED]


def test_code_that_blocks_the_event_loop_is_named_in_the_log_once(
    make_episode: MakeEpisode, caplog: pytest.LogCaptureFixture
) -> None:
    clock, entered, release = Clock(), threading.Event(), threading.Event()

    async def thoughtless(task: Task, sample: int) -> Episode:
        entered.set()
        release.wait(PATIENCE_S)
        return make_episode(sample)

    loop = EpisodeLoop(max_concurrency=2, poll_interval_s=0.01, orphan_intervals=10, clock=clock)
    loop.attach(thoughtless)
    try:
        loop.submit(TASK, 0)
        assert entered.wait(PATIENCE_S)
        loop.room()
        assert not caplog.records
        clock.now += BLOCKED_S + 1
        for _ in range(3):
            loop.room()
        (record,) = caplog.records
        assert "release.wait(PATIENCE_S)" in record.getMessage()
        release.set()
        until(lambda: isinstance(loop.look(IDS[0]), Episode))
    finally:
        loop.close(PATIENCE_S)
