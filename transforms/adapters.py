"""Following the learner: a worker process loads each new adapter beside the one in use and swaps it in.

Invariants: no episode waits for an adapter; one that is damaged is counted, reported and skipped, and the old one
stays; versions are followed when `latest.json` changes, never by comparing numbers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from policy.adapters import BadAdapter, LatestAdapter
from policy.lora import Adapter
from trajectories.schema import Version
from transforms import metrics

log = logging.getLogger(__name__)


class AdapterFollower:
    """Polls `latest` every `poll_s`, in a thread, until it is closed."""

    def __init__(
        self,
        latest: Callable[[], LatestAdapter | None],
        load: Callable[[LatestAdapter], Adapter | None],
        swap: Callable[[Adapter | None, Version], None],
        poll_s: float,
    ) -> None:
        """`load` gives the verified adapter that `latest` names (None for a policy without weights); `swap` puts it in
        use between two decode steps. Both may raise anything."""
        self._latest = latest
        self._load = load
        self._swap = swap
        self._poll_s = poll_s
        self._seen: LatestAdapter | None = None
        self._complained = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="adapters", daemon=True)

    def start(self) -> None:
        """Follow from now on."""
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Stop; waits at most `timeout_s`."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def poll(self) -> Version | None:
        """Look once; the version that was swapped in, if one was."""
        try:
            latest = self._latest()
            if latest is None or latest == self._seen:
                return None
            age_s, began = time.time() - latest.step_ended_at, time.monotonic()
            adapter = self._load(latest)
            self._swap(adapter, latest.version)
        except BadAdapter as error:
            self._complain("adapters/bad", str(error))
            return None
        except Exception as error:
            # Storage that is away, above all: looked at again at the next poll.
            self._complain("adapters/unreadable", f"{type(error).__name__}: {error}")
            return None
        self._seen, self._complained = latest, ""
        metrics.count("adapters/swapped")
        log.info(
            "adapter %s: seen %.2f s after its step, loaded in %.2f s", latest.version, age_s, time.monotonic() - began
        )
        return latest.version

    def _complain(self, name: str, text: str) -> None:
        """Count and report a trouble once, however often the poll meets it."""
        if text != self._complained:
            metrics.count(name)
            log.warning("the adapter in use stays: %s", text)
            self._complained = text

    def _follow(self) -> None:
        while not self._stop.wait(self._poll_s):
            self.poll()
