"""The transitions of tasks in flight, played against a runtime that may lose its memory and bundles that may fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from trajectories.failures import FailFast, FailurePolicy, MinViableGroup, RetryOnFailure
from trajectories.schema import Episode, Kind, Status, Task
from transforms.coders import PendingCoder
from transforms.pending import (
    Absent,
    Claimed,
    Look,
    Member,
    Pending,
    Phase,
    Round,
    Running,
    arrive,
    failed_episode,
    look_round,
)

TASK = Task("run-1", group_id=7, attempt=1, group_size=3, payload={"q": "1+1"})
IDS = tuple(TASK.episode_id(sample) for sample in range(3))
LENIENT = MinViableGroup(2)


def ended(task: Task, sample: int) -> Episode:
    return failed_episode(task, sample, Status.ENVIRONMENT_ERROR, "scripted")


def fine(task: Task, sample: int) -> Episode:
    return dataclasses.replace(ended(task, sample), status=Status.COMPLETED, error="")


def entered(task: Task = TASK) -> Pending:
    entry = arrive((), task)
    assert entry is not None
    return entry


def test_a_start_follows_the_bundle_that_wrote_it_down() -> None:
    entry = entered()
    assert [member.starts for member in entry.members] == [1, 1, 1]
    now = look_round([entry], lambda _: Claimed(1), room=8, max_attempts=3, policy=LENIENT)
    assert now.start == ((TASK, 0), (TASK, 1), (TASK, 2))
    assert not now.changed


def test_a_claim_whose_bundle_failed_is_written_down_again_and_not_started() -> None:
    now = look_round([entered()], lambda _: Claimed(2), room=8, max_attempts=3, policy=LENIENT)
    assert now.start == ()
    assert now.claim == tuple((episode_id, 2) for episode_id in IDS)
    assert now.changed


def test_what_does_not_fit_waits_in_state() -> None:
    now = look_round([entered()], lambda _: Claimed(1), room=2, max_attempts=3, policy=LENIENT)
    assert now.start == ((TASK, 0), (TASK, 1))
    assert now.pending == (entered(),)


def test_a_task_delivered_twice_is_held_once() -> None:
    assert arrive([entered()], TASK) is None
    assert arrive([entered()], dataclasses.replace(TASK, attempt=2)) is not None
    assert arrive([entered()], dataclasses.replace(TASK, group_id=8)) is not None


def test_a_result_is_forgotten_only_after_its_emission_was_committed() -> None:
    looks: dict[str, Look] = {
        IDS[0]: ended(TASK, 0),
        IDS[1]: Running.RUNNING,
        IDS[2]: Running.RUNNING,
    }
    first = look_round([entered()], looks.__getitem__, room=8, max_attempts=3, policy=LENIENT)
    assert [episode.sample for episode in first.emit] == [0]
    assert first.forget == ()
    # The bundle failed: the same state is read again, and the result is still there.
    again = look_round([entered()], looks.__getitem__, room=8, max_attempts=3, policy=LENIENT)
    assert [episode.sample for episode in again.emit] == [0]
    # It committed: now it may go, and is not emitted again.
    second = look_round(first.pending, looks.__getitem__, room=8, max_attempts=3, policy=LENIENT)
    assert second.emit == ()
    assert second.forget == (IDS[0],)
    third = look_round(second.pending, looks.__getitem__, room=8, max_attempts=3, policy=LENIENT)
    assert third.emit == third.forget == ()


def test_a_task_that_kills_its_process_is_given_up_after_three_starts() -> None:
    """Each process starts the members and dies with all it knew; only committed state survives."""
    state: tuple[Pending, ...] = (entered(),)
    started = 0
    emitted: list[Episode] = []
    for _ in range(10):
        memory: dict[str, int] = {}
        for _ in range(3):
            now = look_round(
                state,
                looker({episode_id: Claimed(starts) for episode_id, starts in memory.items()}),
                room=8,
                max_attempts=3,
                policy=LENIENT,
            )
            state = now.pending
            emitted += now.emit
            memory.update(now.claim)
            if now.start:
                started += 1
                break
    assert state == ()
    # The first start was lost before it happened (a claim that died with its process counts too).
    assert 1 <= started <= 3
    assert [episode.sample for episode in emitted] == [0, 1, 2]
    assert all(episode.status is Status.ENVIRONMENT_ERROR and "3 starts" in episode.error for episode in emitted)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_member_is_emitted_once_and_started_at_most_so_often(data: st.DataObject) -> None:
    """Any mix of redelivery, failing bundles, lost processes and ends, under any failure policy: once per member, at
    most max_attempts starts and what the policy adds."""
    max_attempts = data.draw(st.integers(1, 4))
    policy: FailurePolicy = data.draw(st.sampled_from([LENIENT, RetryOnFailure(1), RetryOnFailure(3), FailFast()]))
    retries = policy.n if isinstance(policy, RetryOnFailure) else 0
    task = dataclasses.replace(TASK, group_size=data.draw(st.integers(1, 4)))
    state: tuple[Pending, ...] = (entered(task),)
    memory: dict[str, Look] = {task.episode_id(sample): Claimed(1) for sample in range(task.group_size)}
    starts: dict[int, int] = dict.fromkeys(range(task.group_size), 0)
    emitted: list[int] = []
    for _ in range(200):
        event = data.draw(st.sampled_from(["look", "look", "look", "failing bundle", "lost", "redelivered", "end"]))
        if event == "lost":
            memory = {}
        elif event == "redelivered":
            entry = arrive(state, task)
            assert entry is None
        elif event == "end":
            for sample in range(task.group_size):
                if memory.get(task.episode_id(sample)) is Running.RUNNING and data.draw(st.booleans()):
                    fails = data.draw(st.booleans())
                    memory[task.episode_id(sample)] = ended(task, sample) if fails else fine(task, sample)
        else:
            now = look_round(
                state,
                looker(memory),
                data.draw(st.integers(0, 4)),
                max_attempts,
                policy,
            )
            apply(now, memory, starts)
            if event == "look":
                state = now.pending
                emitted += [episode.sample for episode in now.emit]
        if not state:
            break
    assert len(emitted) == len(set(emitted))
    assert all(count <= max_attempts + retries for count in starts.values())
    if not state:
        assert emitted
    if not state and policy is LENIENT:
        assert sorted(emitted) == list(range(task.group_size))


def test_a_failed_member_is_started_again_as_itself_until_its_group_s_retries_are_used_up() -> None:
    policy = RetryOnFailure(2)
    memory: dict[str, Look] = dict.fromkeys(IDS, Running.RUNNING)
    starts = dict.fromkeys(range(3), 0)
    memory[IDS[0]], memory[IDS[1]] = ended(TASK, 0), fine(TASK, 1)
    first = look_round([entered()], looker(memory), room=8, max_attempts=1, policy=policy)
    assert [episode.sample for episode in first.emit] == [1]
    assert [episode.sample for episode in first.retried] == [0]
    # Its bundle failed: nothing was forgotten, and nothing counts twice.
    assert look_round([entered()], looker(memory), room=8, max_attempts=1, policy=policy) == first
    second = look_round(first.pending, looker(memory), room=8, max_attempts=1, policy=policy)
    assert IDS[0] in second.forget
    assert second.claim == ((IDS[0], 2),)
    apply(second, memory, starts)
    third = look_round(second.pending, looker(memory), room=8, max_attempts=1, policy=policy)
    assert third.start == ((TASK, 0),)
    # Two members fail at the same look, and one retry is left.
    memory[IDS[0]], memory[IDS[2]] = ended(TASK, 0), ended(TASK, 2)
    last = look_round(third.pending, looker(memory), room=8, max_attempts=1, policy=policy)
    assert [episode.sample for episode in last.retried] == [0]
    assert [episode.sample for episode in last.emit] == [2]
    # The group is given up: the member that was to start again is not.
    assert IDS[0] in last.forget
    after = look_round(last.pending, looker(memory), room=8, max_attempts=1, policy=policy)
    assert (after.pending, after.start, after.claim) == ((), (), ())


def test_fail_fast_cancels_the_siblings_of_a_failed_member() -> None:
    memory: dict[str, Look] = {IDS[0]: Running.RUNNING, IDS[1]: ended(TASK, 1), IDS[2]: Claimed(1)}
    now = look_round([entered()], looker(memory), room=8, max_attempts=3, policy=FailFast())
    assert [episode.sample for episode in now.emit] == [1]
    assert now.forget == (IDS[0], IDS[2])
    assert now.start == ()
    assert look_round(now.pending, looker(memory), room=8, max_attempts=3, policy=FailFast()).pending == ()


def test_an_eval_task_s_failure_is_not_the_policy_s_to_try_again() -> None:
    task = dataclasses.replace(TASK, kind=Kind.EVAL, group_size=1)
    now = look_round([entered(task)], lambda _: ended(task, 0), room=8, max_attempts=3, policy=RetryOnFailure(3))
    assert len(now.emit) == 1


def looker(memory: Mapping[str, Look]) -> Callable[[str], Look]:
    return lambda episode_id: memory.get(episode_id, Absent.ABSENT)


def apply(now: Round, memory: dict[str, Look], starts: dict[int, int]) -> None:
    for episode_id in now.forget:
        memory.pop(episode_id, None)
    for task, sample in now.start:
        memory[task.episode_id(sample)] = Running.RUNNING
        starts[sample] += 1
    for episode_id, number in now.claim:
        memory[episode_id] = Claimed(number)


def test_state_survives_its_coder() -> None:
    pending = Pending(TASK, (Member(1), Member(2, Phase.EMITTED), Member(70000, Phase.FAILED, 3)))
    assert PendingCoder().decode(PendingCoder().encode(pending)) == pending
