"""Heartbeats: what one worker process says of itself, every few seconds and at once when a new version has spoken.

Invariant: a version's first token is reported until a heartbeat that tells of it has been delivered; a server that is
away delays heartbeats and nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from google.cloud import pubsub_v1

from trajectories import codec
from trajectories.schema import Heartbeat, Version
from transforms import metrics
from transforms.loop import Occupancy

log = logging.getLogger(__name__)

TICK_S = 0.05
"""Seconds between two looks for a new version's first token."""
PUBLISH_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class PolicyState:
    """What the process's policy is doing."""

    version: Version | None
    """In use; None before there is one."""
    slots: int
    first_token_at: Mapping[Version, float]
    """Unix seconds of the first token of each version that has sampled here."""


class Heartbeats:
    """A thread that publishes this process's heartbeats until it is closed."""

    def __init__(
        self,
        run_id: str,
        topic: str,
        interval_s: float,
        occupancy: Callable[[], Occupancy],
        policy: Callable[[], PolicyState],
    ) -> None:
        self._run_id = run_id
        self._topic = topic
        self._interval_s = interval_s
        self._occupancy = occupancy
        self._policy = policy
        self._worker_id = uuid.uuid4().hex[:12]
        self._reported: set[Version] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Stop; waits at most `timeout_s`."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        client = pubsub_v1.PublisherClient()
        due = time.monotonic()
        while not self._stop.wait(TICK_S):
            policy = self._policy()
            if time.monotonic() < due and policy.first_token_at.keys() <= self._reported:
                continue
            due = time.monotonic() + self._interval_s
            try:
                self._publish(client, policy)
            except Exception as error:
                # Above all a server that is away. Whatever it is, the process goes on, and so does its heart.
                metrics.count("heartbeats/undelivered")
                log.warning("a heartbeat was not delivered: %s: %s", type(error).__name__, error)

    def _publish(self, client: pubsub_v1.PublisherClient, policy: PolicyState) -> None:
        new = {version: at for version, at in dict(policy.first_token_at).items() if version not in self._reported}
        occupancy = self._occupancy()
        heartbeat = Heartbeat(
            run_id=self._run_id,
            worker_id=self._worker_id,
            sent_at=time.time(),
            interval_s=self._interval_s,
            version=policy.version,
            first_token_at={str(version): at for version, at in new.items()},
            slots=policy.slots,
            running=occupancy.running,
            waiting=occupancy.waiting,
            holding=occupancy.holding,
            started=occupancy.started,
            finished=occupancy.finished,
            metrics={**metrics.PROCESS.snapshot(), "episodes/orphaned": float(occupancy.orphaned)},
        )
        # No retry: the next heartbeat is newer.
        future = client.publish(
            self._topic,
            codec.encode(heartbeat),
            retry=None,
            timeout=PUBLISH_TIMEOUT_S,
            **codec.attributes(heartbeat),
        )
        future.result(timeout=2 * PUBLISH_TIMEOUT_S)
        self._reported.update(new)
