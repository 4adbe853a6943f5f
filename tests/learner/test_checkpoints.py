from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from learner.checkpoints import CheckpointError, Checkpoints, Snapshot
from tests.gcs import fake_gcs
from trajectories.storage import Storage, open_storage


class State(NamedTuple):
    adapter: dict[str, dict[str, np.ndarray]]
    optimizer: tuple[object, ...]
    step: np.ndarray


def state(step: int) -> State:
    adapter = {"q_proj": {"a": np.full((2, 3), step, np.float32), "b": np.zeros((3, 2), np.float32)}}
    return State(adapter, ((), (np.int32(step), adapter)), np.array(step, np.int32))


def snapshot(step: int) -> Snapshot:
    return Snapshot(step, state(step), f"ledger {step}".encode(), {"curve": [{"step": step}]})


@pytest.fixture(params=["folder", "gs"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "folder":
        yield open_storage(str(tmp_path / "checkpoints"))
        return
    with fake_gcs("headrace-checkpoints"):
        yield open_storage(f"gs://headrace-checkpoints/{secrets.token_hex(4)}/checkpoints")


def test_round_trip_prune_and_order_of_incarnations(storage: Storage) -> None:
    first = Checkpoints(storage, 1, keep=2)
    assert first.newest(state(0)) is None
    for step in (1, 2, 3):
        first.save(snapshot(step))
    assert first.names() == ["000001-000003-step-3", "000001-000002-step-2"]
    second = Checkpoints(storage, 2, keep=2)
    second.save(snapshot(2))  # restored from step 2: newer all the same
    found = second.newest(state(0))
    assert found is not None
    assert (found.step, found.ledger, found.record) == (2, b"ledger 2", {"curve": [{"step": 2}]})
    np.testing.assert_array_equal(found.state.adapter["q_proj"]["a"], state(2).adapter["q_proj"]["a"])
    assert found.state.optimizer[1][0] == 2
    assert not [path for path in storage.list() if path.startswith("000001-000002")]


def test_half_written_is_not_there_and_damaged_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = open_storage(str(tmp_path))
    checkpoints = Checkpoints(storage, 1, keep=9)
    for step in (1, 2, 3, 4):
        checkpoints.save(snapshot(step))
    fourth, third, second, _ = checkpoints.names()
    storage.delete(f"{fourth}/COMMITTED.json")
    largest = max((tmp_path / third / "state").rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-20])
    storage.write(f"{second}/ledger", b"tampered")
    with caplog.at_level(logging.WARNING):
        found = checkpoints.newest(state(0))
    assert found is not None
    assert found.step == 1
    assert fourth not in caplog.text
    assert third in caplog.text
    assert second in caplog.text


def test_all_damaged_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    checkpoints = Checkpoints(storage, 1, keep=3)
    name = checkpoints.save(snapshot(1))
    storage.write(f"{name}/record.json", b"{}")
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoints.newest(state(0))


def test_another_model_is_named(tmp_path: Path) -> None:
    checkpoints = Checkpoints(open_storage(str(tmp_path)), 1, keep=3)
    checkpoints.save(snapshot(1))
    with pytest.raises(ValueError, match="another run"):
        checkpoints.newest({"adapter": np.zeros(1)})
