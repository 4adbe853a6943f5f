"""Names of the Pub/Sub topics and subscriptions of a run: one set per run, so that runs never mix."""

from __future__ import annotations

from dataclasses import dataclass

NAMES = ("tasks", "rows", "verdicts", "results", "heartbeats", "dead-letters")
"""Every topic has one subscription of the same short name."""


@dataclass(frozen=True, slots=True)
class Topics:
    """Full resource names, e.g. `projects/<project>/topics/headrace-<run_id>-tasks`."""

    project: str
    run_id: str

    def topic(self, name: str) -> str:
        """The topic called `name`; raises ValueError for a name that is none of NAMES."""
        return f"projects/{self.project}/topics/{self._id(name)}"

    def subscription(self, name: str) -> str:
        """The one subscription of the topic called `name`."""
        return f"projects/{self.project}/subscriptions/{self._id(name)}"

    def _id(self, name: str) -> str:
        if name not in NAMES:
            raise ValueError(f"no topic is called {name!r}; the topics are {', '.join(NAMES)}")
        return f"headrace-{self.run_id}-{name}"

    @property
    def tasks(self) -> str:
        """Tasks, from the learner to the rollout job."""
        return self.topic("tasks")

    @property
    def rows(self) -> str:
        """Packs, from the rollout job to the learner."""
        return self.topic("rows")

    @property
    def verdicts(self) -> str:
        """How groups without rows ended."""
        return self.topic("verdicts")

    @property
    def results(self) -> str:
        """Episodes of eval tasks."""
        return self.topic("results")

    @property
    def heartbeats(self) -> str:
        """What actor processes say of themselves."""
        return self.topic("heartbeats")

    @property
    def dead_letters(self) -> str:
        """What no stage could use, each with its reason."""
        return self.topic("dead-letters")
