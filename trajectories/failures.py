"""Failure policies: what becomes of a group when members fail. Values; pure.

A member fails where the machinery did (`Status.failed`): its environment raised, a time limit passed, or the policy
could not be asked. It then says nothing of how well the policy did, so no policy scores it: it neither trains nor
votes. What the policy itself brought about (a wrong answer, a turn cut at its limit) is no failure and never tried
again.

    FailFast             the first failure ends the group at once, and the run with it
    RetryOnFailure(n)    failed members are started again, n times in all in a group; then the group fails, whole
    MinViableGroup(n)    the group closes with the members that lived, if they are n or more
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum


class Decision(Enum):
    """What happens to a group next."""

    WAIT = "wait"
    """Members are still to come."""
    RETRY = "retry"
    """The member that failed is started again."""
    CLOSE = "close"
    """It is compared and trained with the members that it has."""
    FAIL = "fail"
    """It ends without training; members that still run are cancelled."""


@dataclass(frozen=True, slots=True)
class Standing:
    """The members of one attempt at a group, at one moment."""

    size: int
    """Members asked for."""
    usable: int = 0
    """Members that ended without failing."""
    failed: int = 0
    """Members that failed."""
    retries: int | None = None
    """Starts made again so far because one failed; None where a member cannot be started again any more."""
    over: bool = False
    """Nobody else is waited for: the group's deadline has passed."""

    @property
    def whole(self) -> bool:
        return self.usable >= self.size

    @property
    def complete(self) -> bool:
        """No member is still to come."""
        return self.over or self.usable + self.failed >= self.size


@dataclass(frozen=True, slots=True)
class FailFast:
    """The first failure ends the group at once, and the run with it: for an environment that is being written."""

    @property
    def ends_run(self) -> bool:
        return True

    def decide(self, group: Standing) -> Decision:
        """FAIL with the first failed member or one that is missing at the deadline; CLOSE only a whole group."""
        if group.failed or (group.over and not group.whole):
            return Decision.FAIL
        return Decision.CLOSE if group.whole else Decision.WAIT


@dataclass(frozen=True, slots=True)
class RetryOnFailure:
    """A failed member is started again, with the same id and the same seeds, `n` times in all in a group. Only whole
    groups train: which members fail may depend on what they do, and those that are left would be a biased sample."""

    n: int

    @property
    def ends_run(self) -> bool:
        return False

    def decide(self, group: Standing) -> Decision:
        """RETRY while there is one left; then as FailFast."""
        if group.failed and group.retries is not None and group.retries < self.n:
            return Decision.RETRY
        return FailFast().decide(group)


@dataclass(frozen=True, slots=True)
class MinViableGroup:
    """The group closes with the members that lived, if they are `n` or more; advantages compare those alone."""

    n: int

    @property
    def ends_run(self) -> bool:
        return False

    def decide(self, group: Standing) -> Decision:
        """WAIT until all members have ended or the deadline has passed; then CLOSE with `n` or more, else FAIL."""
        if not group.complete:
            return Decision.WAIT
        return Decision.CLOSE if group.usable >= self.n else Decision.FAIL


FailurePolicy = FailFast | RetryOnFailure | MinViableGroup


class FailureKind(StrEnum):
    """The policies' names in the run file."""

    FAIL_FAST = "fail_fast"
    """The first failure ends its group at once, and the run with it."""
    RETRY = "retry"
    """A failed member is started again; only whole groups train."""
    MIN_VIABLE_GROUP = "min_viable_group"
    """The group trains with the members that lived."""


@dataclass(frozen=True, slots=True)
class FailureSettings:
    """Section [failures] of the run file: what becomes of a training group when members fail. A member fails where its
    environment raised, a time limit passed or the policy could not be asked; it is never scored as reward 0."""

    policy: FailureKind = FailureKind.MIN_VIABLE_GROUP
    """What happens when a member fails."""
    min_members: int = 2
    """Of `min_viable_group`: fewest members that lived of a group that may train."""
    retries: int = 3
    """Of `retry`: how often members of one group are started again, in all, before the group fails."""

    def __post_init__(self) -> None:
        if self.min_members < 2:
            raise ValueError(f"failures.min_members must be at least 2, a baseline needs two; found {self.min_members}")
        if self.retries < 1:
            raise ValueError(f"failures.retries must be at least 1, found {self.retries}; `fail_fast` tries none again")

    def make(self) -> FailurePolicy:
        """The policy as a value."""
        if self.policy is FailureKind.FAIL_FAST:
            return FailFast()
        if self.policy is FailureKind.RETRY:
            return RetryOnFailure(self.retries)
        return MinViableGroup(self.min_members)
