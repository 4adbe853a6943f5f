"""The learner's own sections of the run file. Plain frozen values, importable without JAX."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from policy.settings import Remat


class StalenessPolicy(StrEnum):
    """What the learner does about groups that would train past the staleness bound."""

    PACE = "pace"
    """A step that would push an outstanding group past the bound waits for it: slow prompts train as often as fast."""
    DROP = "drop"
    """No step waits; what comes too late is discarded and issued again."""


def _at_least(settings: object, minimum: int, mend: str, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value < minimum:
            raise ValueError(f"{name} must be at least {minimum}, found {value}: {mend}")


def _positive_seconds(settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be more than 0 seconds, found {value}: give a number such as 30.0")


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """Section [learner] of the run file: what a step is, how far it may lag, when to stop."""

    groups_per_step: int = 6
    """Closings that one optimizer step trains, whatever number of members each closed with."""
    epochs: int = 1
    """Passes that a step makes over them. A step of several updates costs one more forward pass, for the log-probs of
    the policy that it starts from."""
    minibatches: int = 1
    """Parts of them, each of which makes an update of its own in every pass."""
    group_size: int = 8
    """Episodes tried for each task."""
    steps: int = 12
    """Optimizer steps after which training ends."""
    train_s: float | None = None
    """Seconds of training (evaluations apart) after which it ends earlier. Left out: no limit."""
    target_success: float | None = None
    """Sampled success, over the newest `target_groups` groups, at which training ends earlier. Left out: none does."""
    target_groups: int = 24
    """Groups in that window; groups without a gradient count too."""
    max_staleness: int = 1
    """Most optimizer steps that may lie between the oldest token of a closing and the step that trains it."""
    staleness: StalenessPolicy = StalenessPolicy.PACE
    """Whether a step waits for groups that it would push past the bound."""
    synchronous: bool = False
    """Issue one step's groups, wait for all of them, train, and only then issue the next: for comparisons."""
    max_attempts: int = 3
    """Times a group is issued before it is given up as expired."""
    task_deadline_s: float = 600.0
    """Seconds after a worker's report that it holds a task, at which the group is issued again."""
    unstarted_deadline_s: float = 120.0
    """Seconds after which a task that no worker holds is issued again; they count only while some worker lives. A task
    may wait this long for a free place in the job; after a death of all workers the learner is quicker by itself."""
    no_progress_s: float = 900.0
    """Seconds without any sign of progress after which the learner gives up and says what is missing: no episode ends,
    or no group ends but by failing."""
    rows_per_call: int = 2
    """Rows of one bucket that one compiled call computes."""
    remat: Remat = Remat.ATTENTION
    """What the backward pass computes again instead of keeping it in memory."""
    publish_interval_s: float | None = None
    """Least seconds between two published adapters. Left out: 0 for a folder and 1 for gs://, which allows no more."""
    keep_adapters: int = 4
    """Newest adapter folders that are kept."""
    stop_within_s: float = 10.0
    """Bound on every wait of an orderly shutdown."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "a step needs one group", "groups_per_step", "target_groups", "rows_per_call")
        _at_least(self, 1, "1 and 1 make one update a step", "epochs", "minibatches")
        if self.minibatches > self.groups_per_step:
            raise ValueError(
                f"minibatches must be at most groups_per_step ({self.groups_per_step}), found {self.minibatches}: each "
                "takes whole groups"
            )
        _at_least(self, 2, "advantages compare the members of a group", "group_size")
        _at_least(self, 0, "0 trains nothing and only evaluates", "steps")
        _at_least(self, 0, "0 is on-policy; Little's law asks for p99 group time / step time", "max_staleness")
        _at_least(self, 1, "1 gives a group no second try", "max_attempts")
        _at_least(self, 2, "workers read one adapter while the next is written", "keep_adapters")
        _positive_seconds(self, "train_s", "task_deadline_s", "unstarted_deadline_s", "no_progress_s", "stop_within_s")
        if self.publish_interval_s is not None and not 0 <= self.publish_interval_s < math.inf:
            raise ValueError(
                f"publish_interval_s must be 0 seconds or more, found {self.publish_interval_s}: leave it out for the "
                "default of the storage"
            )
        if self.target_success is not None and not 0 < self.target_success <= 1:
            raise ValueError(
                f"target_success must be a fraction above 0 and up to 1, found {self.target_success}: leave it out to "
                "train all steps"
            )

    @property
    def max_outstanding(self) -> int:
        """Most groups that may be issued and not ended."""
        return self.groups_per_step * (1 if self.synchronous else self.max_staleness + 1)


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """Section [checkpoints] of the run file. Messages are acknowledged when a durable checkpoint holds their effect."""

    every_steps: int = 10
    """Optimizer steps between two checkpoints."""
    every_s: float = 60.0
    """Seconds after which a checkpoint is made all the same, if anything changed."""
    keep: int = 3
    """Newest checkpoints that are kept."""
    keep_best: int = 1
    """Checkpoints kept besides: of the steps with the best held-out success. Their adapters stay too, and whatever this
    says the best one's; summary.json names it."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "every step is the most often there is", "every_steps")
        _at_least(self, 1, "a run cannot go on without its newest checkpoint", "keep")
        _at_least(self, 0, "0 keeps the newest alone", "keep_best")
        _positive_seconds(self, "every_s")


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """Section [evaluation] of the run file: held-out questions, asked before, during and after training."""

    questions: int = 128
    """Held-out questions, asked at temperature 1; 0 turns evaluation off."""
    samples: int = 1
    """Times each of them is asked so; pass@k is told for k up to it."""
    greedy_questions: int | None = None
    """The first so many of them are also asked at temperature 0. Left out: all."""
    before: bool = True
    """Evaluate the policy that training starts from."""
    after: bool = True
    """Evaluate the policy that training ends with."""
    every_steps: int = 0
    """Optimizer steps between two evaluations during training, which goes on meanwhile: workers serve the evaluated
    version beside the newest. One that takes longer delays the next. 0: none."""
    attempts: int = 3
    """Times a question is asked when its episode fails or is lost."""
    deadline_s: float = 300.0
    """Seconds without an answer after which a question is asked again."""

    def __post_init__(self) -> None:
        _at_least(self, 0, "0 turns evaluation off", "questions")
        _at_least(self, 0, "0 evaluates before and after training alone", "every_steps")
        _at_least(self, 1, "a question is asked at least once", "attempts", "samples")
        _positive_seconds(self, "deadline_s")
        if self.greedy_questions is not None and not 0 <= self.greedy_questions <= self.questions:
            raise ValueError(
                f"greedy_questions must lie between 0 and questions ({self.questions}), found "
                f"{self.greedy_questions}: leave it out to ask all"
            )

    @property
    def greedy(self) -> int:
        return self.questions if self.greedy_questions is None else self.greedy_questions
