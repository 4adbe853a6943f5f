from __future__ import annotations

import logging
import resource
import secrets
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest

from learner.checkpoints import CheckpointError, Checkpoints, Snapshot
from tests.gcs import fake_gcs
from tests.learner.elsewhere import run_elsewhere
from trajectories.storage import Storage, StorageError, open_storage


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


def test_the_protected_stay_beside_the_newest(tmp_path: Path) -> None:
    checkpoints = Checkpoints(open_storage(str(tmp_path)), 1, keep=1)
    for step, protect in ((0, ()), (2, {2}), (4, {2}), (4, {2, 4}), (6, {4})):
        checkpoints.save(snapshot(step), protect=protect)
    assert checkpoints.names() == ["000001-000005-step-6", "000001-000004-step-4"]


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    checkpoints = Checkpoints(open_storage(str(folder)), 1, keep=2)
    for step in (1, 2):
        checkpoints.save(snapshot(step))
    return folder


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_damage_to_any_file_is_noticed(
    damage: str, two_checkpoints: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the newest checkpoint's file damaged it is passed over, named, for the one before it; or it is whole still,
    where the file says nothing of the state (the hour at which Orbax wrote)."""
    newest = "000001-000002-step-2"
    files = [path.relative_to(two_checkpoints) for path in (two_checkpoints / newest).rglob("*") if path.is_file()]
    assert len(files) >= 7
    passed_over = set()
    for number, file in enumerate(files):
        folder = tmp_path / str(number)
        shutil.copytree(two_checkpoints, folder)
        data = bytearray((folder / file).read_bytes())
        if damage == "flipped" and data:
            data[len(data) // 2] ^= 0xFF
            (folder / file).write_bytes(data)
        elif damage == "cut":
            (folder / file).write_bytes(data[: len(data) // 2])
        else:
            (folder / file).unlink()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = Checkpoints(open_storage(str(folder)), 2, keep=2).newest(state(0))
        assert found is not None
        assert (found.step == 1) == (newest in caplog.text)
        assert (found.ledger, found.record) == (f"ledger {found.step}".encode(), {"curve": [{"step": found.step}]})
        assert_same(found.state, state(found.step))
        if found.step == 1:
            passed_over.add(file.name)
    assert {"COMMITTED.json", "ledger", "record.json", "manifest.ocdbt"} <= passed_over
    data_files = {file.name for file in files if file.parent.name == "d"}
    assert data_files & passed_over


def assert_same(left: State, right: State) -> None:
    pairs = list(zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True))
    assert all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


def test_killed_at_any_moment_the_newest_is_one_that_was_saved(tmp_path: Path) -> None:
    printed = run_elsewhere("-m", "tests.learner.killed", str(tmp_path), "8", timeout_s=120)
    *_, last = printed.splitlines()
    print(printed)
    assert int(last) > 0


def test_all_damaged_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    checkpoints = Checkpoints(storage, 1, keep=3)
    name = checkpoints.save(snapshot(1))
    storage.write(f"{name}/record.json", b"{}")
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoints.newest(state(0))


def test_another_checkpoints_name_is_damage(tmp_path: Path) -> None:
    checkpoints = Checkpoints(open_storage(str(tmp_path)), 1, keep=3)
    first, second = (checkpoints.save(snapshot(step)) for step in (1, 2))
    shutil.rmtree(tmp_path / second)
    (tmp_path / first).rename(tmp_path / second)
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoints.newest(state(0))


@pytest.mark.parametrize("how", ["storage", "tensorstore"])
def test_what_cannot_be_read_at_the_moment_is_not_passed_over(how: str, two_checkpoints: Path, tmp_path: Path) -> None:
    """An outage must not throw the run back to the checkpoint before, nor end it for good."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(two_checkpoints, folder)
    checkpoints = Checkpoints(open_storage(str(folder)), 2, keep=2)
    newest = folder / "000001-000002-step-2"
    files = [newest / "ledger"] if how == "storage" else [*newest.glob("state/d/*"), *newest.glob("state/ocdbt*/d/*")]
    for file in files:
        file.rename(file.with_name(f"whole-{file.name}"))
        file.symlink_to(file.name)  # opening it fails, whoever asks
    with pytest.raises(StorageError, match=r"000001-000002-step-2 .* cannot be read: .* Start again when it can"):
        checkpoints.newest(state(0))
    for file in files:
        file.with_name(f"whole-{file.name}").replace(file)
    found = checkpoints.newest(state(0))
    assert found is not None
    assert found.step == 2


def test_a_save_that_fails_leaves_its_room_to_the_next(tmp_path: Path) -> None:
    """Storage that is full, as a limit on the size of files."""
    checkpoints = Checkpoints(open_storage(str(tmp_path)), 1, keep=2)
    checkpoints.save(snapshot(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        with pytest.raises(OSError, match="too large"):
            checkpoints.save(Snapshot(2, state(2), bytes(200_000), {}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.glob("0*")] == checkpoints.names() == ["000001-000001-step-1"]
    assert checkpoints.save(snapshot(3)) == "000001-000003-step-3"


def test_another_model_is_named(tmp_path: Path) -> None:
    checkpoints = Checkpoints(open_storage(str(tmp_path)), 1, keep=3)
    checkpoints.save(snapshot(1))
    with pytest.raises(ValueError, match=r"lacks adapter and has adapter\..*, .* and 3 more besides"):
        checkpoints.newest({"adapter": np.zeros(1)})
