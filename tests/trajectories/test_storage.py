import multiprocessing
import threading
from pathlib import Path

import pytest

from trajectories.storage import FolderStorage, NotFound, PreconditionFailed, open_storage


def race(
    url: str, barrier: "multiprocessing.synchronize.Barrier", wins: "multiprocessing.Queue[int]", number: int
) -> None:
    storage = open_storage(url)
    barrier.wait(30)
    try:
        storage.write("lease.json", str(number).encode(), if_generation=0)
        wins.put(number)
    except PreconditionFailed:
        wins.put(-1)


def test_round_trip_list_and_delete(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "new" / "run"))
    assert storage.list() == []
    assert not storage.exists("a/b")
    storage.write("a/b", b"1")
    storage.write("c", b"2")
    assert storage.list() == ["a/b", "c"]
    assert storage.list("a/") == ["a/b"]
    assert storage.join("a").read("b") == b"1"
    storage.delete("a/b")
    storage.delete("a/b")
    with pytest.raises(NotFound, match="a/b"):
        storage.read("a/b")


def test_a_precondition_lets_one_of_many_processes_win(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, wins = context.Barrier(4), context.Queue()
    racers = [context.Process(target=race, args=(str(tmp_path), barrier, wins, n)) for n in range(4)]
    for racer in racers:
        racer.start()
    found = [wins.get(timeout=60) for _ in racers]
    for racer in racers:
        racer.join(10)
    winner = [number for number in found if number >= 0]
    assert len(winner) == 1
    assert open_storage(str(tmp_path)).read("lease.json") == str(winner[0]).encode()


def test_files_are_as_readable_as_any_that_the_user_writes(tmp_path: Path) -> None:
    FolderStorage(tmp_path).write("ours", b"x")
    (tmp_path / "theirs").write_bytes(b"x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "theirs").stat().st_mode


def test_generations_grow_even_within_one_tick_of_the_clock(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    generations = [storage.write("latest.json", b"x") for _ in range(50)]
    assert generations == sorted(set(generations))
    assert storage.read_with_generation("latest.json") == (b"x", generations[-1])
    with pytest.raises(PreconditionFailed):
        storage.write("latest.json", b"y", if_generation=generations[-2])
    storage.write("latest.json", b"y", if_generation=generations[-1])


def test_a_reader_never_sees_half_an_object(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    storage.write("data", b"\0" * 200_000)
    done = threading.Event()

    def rewrite() -> None:
        for value in range(1, 60):
            storage.write("data", bytes([value]) * 200_000)
        done.set()

    writer = threading.Thread(target=rewrite)
    writer.start()
    while not done.is_set():
        data = storage.read("data")
        assert len(data) == 200_000
        assert len(set(data)) == 1
    writer.join()
    assert storage.list() == ["data"]


def test_names_cannot_leave_the_storage(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    for name in ("../x", "/etc/passwd", "a//b", "", "a/../b"):
        with pytest.raises(ValueError, match="relative"):
            storage.read(name)
    with pytest.raises(ValueError, match="gs://bucket"):
        open_storage("s3://bucket")
    with pytest.raises(ValueError, match="gs://bucket"):
        open_storage("gs://")
