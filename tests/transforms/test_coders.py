"""Messages that were encoded or decoded lately stand for their bytes, and for nothing else."""

import dataclasses

import pytest

from trajectories import codec
from trajectories.schema import Task, Verdict
from transforms.coders import Recent

TASKS = [Task("run", number, group_size=8, payload={"question": "x" * 100}) for number in range(20)]


def test_what_was_encoded_is_not_decoded_again() -> None:
    recent = Recent()
    data = recent.encode(TASKS[0])
    assert data == codec.encode(TASKS[0])
    assert recent.encode(TASKS[0]) is data
    assert recent.decode(bytes(data), Task) is TASKS[0]


def test_equal_bytes_from_elsewhere_are_decoded_once() -> None:
    recent = Recent()
    data = codec.encode(TASKS[0])
    found = recent.decode(data, Task)
    assert found == TASKS[0]
    assert recent.decode(bytes(data), Task) is found
    assert recent.encode(found) == data
    with pytest.raises(codec.Foreign):
        recent.decode(data, Verdict)


def test_only_the_latest_bytes_are_remembered_and_an_old_value_is_encoded_as_what_it_is() -> None:
    size = len(codec.encode(TASKS[0]))
    recent = Recent(limit=5 * size + size // 2)
    for task in TASKS:
        recent.encode(task)
    kept = [task.group_id for task in reversed(TASKS) if recent.decode(codec.encode(task), Task) is task]
    assert kept == [19, 18, 17, 16, 15]
    # Identities are used again by other objects once the old ones are gone.
    for number in range(1000):
        fresh = dataclasses.replace(TASKS[0], group_id=number)
        assert codec.decode(recent.encode(fresh), Task) == fresh
        del fresh
