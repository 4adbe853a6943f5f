"""The versions that episodes are pinned to, served beside the one in force for as long as such episodes run.

Invariants: a version is kept from before the first turn of the first episode that needs it until none runs any more and
another is needed; an episode waits for its own version's adapter and for no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from trajectories.schema import Version

log = logging.getLogger(__name__)


class PinnedVersions:
    """Counts who needs which version. Used on one event loop."""

    def __init__(self, keep: Callable[[Version], None], drop: Callable[[Version], None]) -> None:
        """`keep` loads a version's adapter and has the policy serve it until `drop`. It may take long and raise
        anything; then the episode goes on all the same: it waits until the version is in force, or fails."""
        self._keep, self._drop = keep, drop
        self._users: Counter[Version] = Counter()
        self._kept: dict[Version, asyncio.Task[bool]] = {}

    @asynccontextmanager
    async def held(self, version: Version) -> AsyncIterator[None]:
        """Within it the policy serves `version`."""
        self._users[version] += 1
        try:
            loading = self._kept.get(version)
            if loading is None:
                self._drop_unused()
                loading = self._kept[version] = asyncio.create_task(self._load(version))
            # Who is cancelled must not take the adapter away from the others.
            if not await asyncio.shield(loading) and self._kept.get(version) is loading:
                del self._kept[version]
            yield
        finally:
            self._users[version] -= 1

    def _drop_unused(self) -> None:
        for version, loading in list(self._kept.items()):
            if loading.done() and not self._users[version]:
                del self._kept[version], self._users[version]
                self._drop(version)

    async def _load(self, version: Version) -> bool:
        try:
            await asyncio.to_thread(self._keep, version)
        except Exception as error:
            log.warning("pinned version %s cannot be kept: %s", version, error)
            return False
        return True
