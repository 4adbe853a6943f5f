"""The one facade through which the job counts.

A count made here reaches Beam's own metrics (when a bundle runs) and this process's registry, whose snapshot travels in
the heartbeats: on the DirectRunner Beam's metrics cover only the first bundle of a step, so they cannot be the source.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping

from apache_beam.metrics import Metrics

NAMESPACE = "headrace"
WINDOW = 512
"""Latest observations of a distribution that its quantiles are taken from."""


class Registry:
    """Counters, gauges and distributions of one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        self._windows: dict[str, deque[float]] = {}

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self._values[name] = self._values.get(name, 0.0) + amount

    def gauge(self, name: str, value: float) -> None:
        """Set a gauge."""
        with self._lock:
            self._values[name] = value

    def observe(self, name: str, value: float) -> None:
        """Add an observation to a distribution."""
        with self._lock:
            window = self._windows.setdefault(name, deque(maxlen=WINDOW))
            window.append(value)

    def snapshot(self) -> Mapping[str, float]:
        """All values by name; a distribution shows as `<name>/p50`, `/p95` and `/max` of its latest observations."""
        with self._lock:
            values = dict(self._values)
            windows = {name: sorted(window) for name, window in self._windows.items()}
        for name, ordered in windows.items():
            values[f"{name}/p50"] = ordered[len(ordered) // 2]
            values[f"{name}/p95"] = ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))]
            values[f"{name}/max"] = ordered[-1]
        return values


PROCESS = Registry()
"""Of this worker process."""


def count(name: str, amount: int = 1) -> None:
    """Count in this process and, inside a bundle, in Beam."""
    PROCESS.count(name, amount)
    Metrics.counter(NAMESPACE, name).inc(amount)


def observe(name: str, value: float) -> None:
    """Observe seconds or tokens in this process and, inside a bundle, in Beam (there in thousandths)."""
    PROCESS.observe(name, value)
    Metrics.distribution(NAMESPACE, name).update(int(value * 1000))
