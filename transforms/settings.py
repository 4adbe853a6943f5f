"""What the rollout job is told: its own section of the run file, and the whole that its workers are sent.

Plain frozen values, importable without Beam and without JAX: they travel in the job graph, weights never do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trajectories.advantages import AdvantageSettings
from trajectories.failures import FailureSettings
from trajectories.packing import PackingSettings
from trajectories.topics import Topics

if TYPE_CHECKING:
    from environments.environment import EnvironmentSettings
    from policy.lora import LoraSettings
    from policy.settings import SamplingSettings
    from policy.weights import ModelSettings


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """Section [rollouts] of the run file."""

    shards: int = 16
    """Keys that hold tasks in flight: 16 times the most workers. Fixed for the life of a job."""
    poll_interval_s: float = 0.1
    """Seconds between two looks at the episodes in flight: what an episode waits, at most, after its end."""
    max_attempts: int = 3
    """Starts of one episode that vanished with their process before it is given up as failed. Failures that were seen
    are [failures]' to try again."""
    group_deadline_s: float = 120.0
    """Seconds after its first member ended at which a group closes with the members it has, or fails: [failures]
    decides."""
    closed_mark_s: float = 600.0
    """Seconds for which a closed group is remembered, to drop its late members and duplicates."""
    heartbeat_interval_s: float = 5.0
    """Seconds between two heartbeats of a worker process."""
    adapter_poll_s: float = 0.1
    """Seconds between two looks at `latest.json`. On Cloud Storage one second is enough."""
    orphan_intervals: int = 10
    """Poll intervals after which an episode that nobody asks for is cancelled."""

    def __post_init__(self) -> None:
        for name in ("shards", "max_attempts", "orphan_intervals"):
            if getattr(self, name) < 1:
                raise ValueError(f"rollouts.{name} must be at least 1, found {getattr(self, name)}")
        for name in (
            "poll_interval_s",
            "group_deadline_s",
            "closed_mark_s",
            "heartbeat_interval_s",
            "adapter_poll_s",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"rollouts.{name} must be more than 0 seconds, found {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """Everything a worker process needs to make itself: settings only, so that it travels in the job graph."""

    run_id: str
    project: str
    """Google Cloud project of the topics; any name of six characters or more with the embedded server."""
    seed: int
    storage_url: str
    """Folder or gs:// prefix of the run; the adapter store lies in it."""
    model: ModelSettings
    lora: LoraSettings
    sampling: SamplingSettings
    environment: EnvironmentSettings
    packing: PackingSettings = field(default_factory=PackingSettings)
    advantages: AdvantageSettings = field(default_factory=AdvantageSettings)
    rollouts: RolloutSettings = field(default_factory=RolloutSettings)
    failures: FailureSettings = field(default_factory=FailureSettings)
    code_path: str = ""
    """Folder, or archive of one, that a worker makes importable before it looks for the environment."""

    @property
    def topics(self) -> Topics:
        return Topics(self.project, self.run_id)
