"""Tasks in flight: what RunEpisodes keeps in state, and how it changes when tasks arrive and when it looks at them.

Invariants, for any order of deliveries, commits, crashes and moves between processes:
- A member is held once, whatever the number of its deliveries.
- A start is written down before it happens: it follows a bundle that committed its number. Each start that left no
  trace counts, so that a member whose process dies under it is given up after `max_attempts`.
- A result is dropped from the runtime only after a bundle that emitted it has committed, or that decided to start the
  member again.
- A member of a training group that failed is started again only if the failure policy says so, under its own id and so
  with its own seeds; where the policy gives the group up, its other members are cancelled.

Pure functions over frozen values; state, timers and the runtime are `episodes.py`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from trajectories.failures import Decision, FailurePolicy, Standing
from trajectories.schema import Episode, Kind, Status, Task, Timings


class Phase(Enum):
    """Where a member is, as far as committed bundles know."""

    HELD = 0
    """Not ended."""
    EMITTED = 1
    """Emitted by the bundle that wrote this; the runtime still has the result."""
    DONE = 2
    """Emitted, and forgotten by the runtime."""
    FAILED = 3
    """Failed, and to be started again; the runtime still has the result."""


@dataclass(frozen=True, slots=True)
class Member:
    """One member of a group in flight."""

    starts: int = 1
    """Starts written down so far, the coming one included."""
    phase: Phase = Phase.HELD
    retries: int = 0
    """Those of them that followed a failure."""


@dataclass(frozen=True, slots=True)
class Pending:
    """One task in flight and its members, by sample."""

    task: Task
    members: tuple[Member, ...]


class Absent(Enum):
    """The runtime does not know the episode: it never ran here, or its process died, or it was orphaned."""

    ABSENT = "absent"


class Running(Enum):
    """The episode runs in this process."""

    RUNNING = "running"


@dataclass(frozen=True, slots=True)
class Claimed:
    """This process wrote down start number `starts`, and has not started the episode yet."""

    starts: int


Look = Absent | Running | Claimed | Episode
"""What a runtime answers when asked for an episode."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one look at the members of a key decides."""

    pending: tuple[Pending, ...]
    """The new state."""
    changed: bool
    """Whether it differs from the old one."""
    emit: tuple[Episode, ...] = ()
    claim: tuple[tuple[str, int], ...] = ()
    """(episode id, start number) that the new state holds."""
    start: tuple[tuple[Task, int], ...] = ()
    """(task, sample) whose start number the old, committed state holds."""
    forget: tuple[str, ...] = ()
    """Episode ids whose emission is committed."""
    vanished: int = 0
    """Members whose started episode left no trace."""
    given_up: tuple[Episode, ...] = ()
    """Of `emit`, those that failed because every start vanished."""
    retried: tuple[Episode, ...] = ()
    """Failed, and not emitted: their members are started again."""


def arrive(pending: Sequence[Pending], task: Task) -> Pending | None:
    """The entry to add for a delivered task; None if the task is in flight already."""
    if any(entry.task.key == task.key for entry in pending):
        return None
    return Pending(task, (Member(),) * task.group_size)


def look_round(
    pending: Sequence[Pending], look: Callable[[str], Look], room: int, max_attempts: int, policy: FailurePolicy
) -> Round:
    """Decide about every member of one key; at most `room` starts. `max_attempts` bounds starts that vanish."""
    kept: list[Pending] = []
    emit: list[Episode] = []
    claim: list[tuple[str, int]] = []
    start: list[tuple[Task, int]] = []
    forget: list[str] = []
    given_up: list[Episode] = []
    retried: list[Episode] = []
    vanished = 0
    for entry in pending:
        members: list[Member] = []
        claimed: dict[str, int] = {}
        started: list[int] = []
        retries = sum(member.retries for member in entry.members)
        doomed = False
        for sample, member in enumerate(entry.members):
            episode_id = entry.task.episode_id(sample)
            if member.phase is Phase.EMITTED:
                forget.append(episode_id)
                member = dataclasses.replace(member, phase=Phase.DONE)
            elif member.phase is Phase.FAILED:
                forget.append(episode_id)
                claimed[episode_id] = member.starts
                member = dataclasses.replace(member, phase=Phase.HELD)
            elif member.phase is Phase.HELD:
                found = look(episode_id)
                if isinstance(found, Episode):
                    decision = _after(found, entry.task, retries, policy)
                    if decision is Decision.RETRY:
                        retried.append(found)
                        retries += 1
                        member = Member(member.starts + 1, Phase.FAILED, member.retries + 1)
                    else:
                        doomed = doomed or decision is Decision.FAIL
                        emit.append(found)
                        member = dataclasses.replace(member, phase=Phase.EMITTED)
                elif isinstance(found, Claimed) and found.starts == member.starts:
                    if len(start) + len(started) < room:
                        started.append(sample)
                elif isinstance(found, Claimed):
                    # The bundle that claimed it failed: claim again.
                    member = dataclasses.replace(member, starts=member.starts + 1)
                    claimed[episode_id] = member.starts
                elif isinstance(found, Absent):
                    vanished += 1
                    if member.starts - member.retries >= max_attempts:
                        lost = vanished_episode(entry.task, sample, member.starts)
                        given_up.append(lost)
                        doomed = doomed or _after(lost, entry.task, None, policy) is Decision.FAIL
                        member = dataclasses.replace(member, phase=Phase.DONE)
                    else:
                        member = dataclasses.replace(member, starts=member.starts + 1)
                        claimed[episode_id] = member.starts
            members.append(member)
        if doomed:
            for sample, member in enumerate(members):
                if member.phase in (Phase.HELD, Phase.FAILED):
                    forget.append(entry.task.episode_id(sample))
                    members[sample] = dataclasses.replace(member, phase=Phase.DONE)
        else:
            claim += claimed.items()
            start += ((entry.task, sample) for sample in started)
        if any(member.phase is not Phase.DONE for member in members):
            kept.append(Pending(entry.task, tuple(members)))
    return Round(
        pending=tuple(kept),
        changed=tuple(kept) != tuple(pending),
        emit=(*emit, *given_up),
        claim=tuple(claim),
        start=tuple(start),
        forget=tuple(forget),
        vanished=vanished,
        given_up=tuple(given_up),
        retried=tuple(retried),
    )


def _after(ended: Episode, task: Task, retries: int | None, policy: FailurePolicy) -> Decision:
    """What follows from one member's end, whatever its siblings did. An eval task's failure is the learner's to ask
    again."""
    if task.kind is not Kind.TRAIN or not ended.status.failed:
        return Decision.WAIT
    return policy.decide(Standing(task.group_size, failed=1, retries=retries))


def vanished_episode(task: Task, sample: int, starts: int) -> Episode:
    """The failed episode of a member whose every start vanished: its group learns of it."""
    return failed_episode(
        task,
        sample,
        Status.ENVIRONMENT_ERROR,
        f"all {starts} starts of {task.episode_id(sample)} vanished with their process: the task may kill it",
    )


def failed_episode(task: Task, sample: int, status: Status, error: str, timings: Timings | None = None) -> Episode:
    """A member without tokens that neither trains nor votes."""
    return Episode(
        run_id=task.run_id,
        group_id=task.group_id,
        attempt=task.attempt,
        sample=sample,
        group_size=task.group_size,
        tokens_T=np.zeros(0, np.int32),
        loss_mask_T=np.zeros(0, np.bool_),
        logprobs_T=np.zeros(0, np.float32),
        prompt_length=0,
        status=status,
        kind=task.kind,
        temperature=1.0 if task.temperature is None else task.temperature,
        error=error,
        timings=timings or Timings(),
    )
