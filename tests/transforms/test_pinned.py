"""Pinned versions are kept while episodes need them, loaded once, and dropped when others are needed."""

from __future__ import annotations

import asyncio
import threading

from trajectories.schema import Version
from transforms.pinned import PinnedVersions

FIRST, SECOND = Version(1, 1), Version(2, 1)


def test_a_version_is_loaded_once_and_dropped_when_unused_and_another_is_needed() -> None:
    events: list[str] = []
    gate = threading.Event()

    def keep(version: Version) -> None:
        assert gate.wait(10)
        events.append(f"keep {version}")

    pinned = PinnedVersions(keep, lambda version: events.append(f"drop {version}"))

    async def episode(version: Version, leave: asyncio.Event) -> None:
        async with pinned.held(version):
            events.append(f"run {version}")
            await leave.wait()

    async def cases() -> None:
        leave = asyncio.Event()
        cut_short, other = (asyncio.create_task(episode(FIRST, leave)) for _ in range(2))
        await asyncio.sleep(0)
        cut_short.cancel()  # while the adapter is being loaded, for the other too
        gate.set()
        while len(events) < 2:
            await asyncio.sleep(0.001)
        assert events == ["keep 1.1", "run 1.1"]
        leave_second = asyncio.Event()
        second = asyncio.create_task(episode(SECOND, leave_second))
        while len(events) < 4:
            await asyncio.sleep(0.001)
        leave.set()
        await other
        async with pinned.held(FIRST):  # nobody needed anything else meanwhile
            pass
        leave_second.set()
        await second
        assert events[2:] == ["keep 2.1", "run 2.1"]
        async with pinned.held(Version(3, 1)):
            pass
        assert sorted(events[4:]) == ["drop 1.1", "drop 2.1", "keep 3.1"]

    asyncio.run(cases())


def test_an_adapter_that_is_not_there_yet_stops_no_episode_and_is_looked_for_again() -> None:
    tries: list[Version] = []

    def keep(version: Version) -> None:
        tries.append(version)
        raise OSError("not yet")

    pinned = PinnedVersions(keep, lambda version: None)

    async def cases() -> None:
        for _ in range(2):
            async with pinned.held(FIRST):
                pass

    asyncio.run(cases())
    assert tries == [FIRST, FIRST]
