"""Several learner processes, on this machine: they take the step that one takes, and end and resume together."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from emulator.testing import ServerProcess
from learner.channel import Frame, Kind, Link, decode_array, encode_array, encode_frame, read_frame
from learner.checkpoints import Checkpoints
from learner.hosts import admit, join
from learner.settings import CheckpointSettings, LearnerSettings
from learner.sharding import ShardingSettings
from learner.train import LearnerSpec
from policy.adapters import AdapterStore
from tests.learner.actors import BUCKETS, CONFIG, LORA, Actors, Habits, tiny_model, topics_for
from tests.learner.test_train import check_books, summary_of
from trajectories.packing import PackingSettings
from trajectories.schema import Version
from trajectories.storage import open_storage

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60
"""Within which all hosts have ended after one has died."""
pytestmark = pytest.mark.usefixtures("compilation_cache")


@dataclass
class Hosts:
    """The processes of one learner, host 0 first."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def log(self, host: int) -> str:
        return (self.folder / f"host-{host}.log").read_text()

    def logs(self) -> str:
        return "\n".join(f"== host {host}\n{self.log(host)}" for host in range(len(self.processes)))

    def await_ends(self, timeout_s: float) -> list[int]:
        """Exit statuses; negative: the signal."""
        deadline = time.monotonic() + timeout_s
        try:
            return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(self.logs()) from None

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """`start(mode, hosts, devices, **settings)`: processes that this test does not outlive."""
    started: list[Hosts] = []

    def begin(mode: str, hosts: int, devices: int = 1, **settings: Any) -> Hosts:
        folder = tmp_path / f"{len(started)}-{mode}-{hosts}"
        folder.mkdir()
        found = Hosts(folder)
        started.append(found)
        with socket.create_server(("127.0.0.1", 0)) as free:
            coordinator = f"127.0.0.1:{free.getsockname()[1]}"
        for host in range(hosts):
            more = {"hosts": hosts, "host": host, "coordinator": coordinator, **settings}
            with (folder / f"host-{host}.log").open("ab") as log:
                found.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.learner.hosted", mode, json.dumps(more)],
                        cwd=ROOT,
                        stdout=log,
                        stderr=log,
                        env={
                            **os.environ,
                            "JAX_PLATFORMS": "cpu",
                            "JAX_NUM_CPU_DEVICES": str(devices),
                            "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
                            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
                        },
                    )
                )
        return found

    yield begin
    for hosts in started:
        hosts.kill()


def await_that(condition: Any, hosts: Hosts, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert all(process.poll() is None for process in hosts.processes), hosts.logs()
        assert time.monotonic() < deadline, hosts.logs()
        time.sleep(0.02)


@pytest.mark.timeout(300)
def test_2_and_4_processes_take_the_steps_of_one_and_end_together(start: Any, tmp_path: Path) -> None:
    """On a mesh of four devices, with parameters and optimizer spread over all of them."""
    four = start("steps", 4, out=str(tmp_path / "four.npz"))
    two = start("steps", 2, 2, out=str(tmp_path / "two.npz"))
    one = start("steps", 1, 4, out=str(tmp_path / "one.npz"))
    assert one.await_ends(200) == [0], one.logs()
    expected = np.load(tmp_path / "one.npz")
    for name, hosts in (("four", four), ("two", two)):
        path = tmp_path / f"{name}.npz"
        await_that(path.exists, hosts)
        found = np.load(path)
        assert sorted(found) == sorted(expected)
        for key in expected:
            apart = np.abs(found[key].astype(float) - expected[key]).max()
            assert apart <= 1e-6 * max(1e-3, float(np.linalg.norm(expected[key]))), (name, key, apart)

    # Both go on with steps, so they wait for each other in collectives when one dies.
    four.processes[2].send_signal(signal.SIGKILL)
    two.processes[1].send_signal(signal.SIGTERM)
    assert two.await_ends(PATIENCE_S) == [0, 0], two.logs()
    assert four.await_ends(PATIENCE_S) == [1, 1, -signal.SIGKILL, 1], four.logs()
    for host in (0, 1, 3):
        assert "headrace: host 2 of 4 is lost: " in four.log(host)
    assert "Start them again" in four.log(0)


@pytest.fixture
def spec(tmp_path: Path) -> Iterator[LearnerSpec]:
    server = ServerProcess(tmp_path / "pubsub")
    server.start()
    before = os.environ.get("PUBSUB_EMULATOR_HOST")
    yield LearnerSpec(
        run_id="hosts",
        topics=topics_for(server.address, "hosts"),
        storage_url=str(tmp_path / "run"),
        model=tiny_model(tmp_path / "model"),
        lora=LORA,
        packing=PackingSettings(buckets=BUCKETS),
        learner=LearnerSettings(groups_per_step=3, group_size=4, steps=12),
        checkpoints=CheckpointSettings(every_steps=2),
    )
    server.stop()
    os.environ.pop("PUBSUB_EMULATOR_HOST")
    if before is not None:
        os.environ["PUBSUB_EMULATOR_HOST"] = before


@pytest.mark.timeout(300)
def test_a_run_outlives_the_death_of_any_host(spec: LearnerSpec, start: Any, tmp_path: Path) -> None:
    """Nothing is lost, nothing trains twice, and the owner alone writes."""
    folder = tmp_path / "out"
    settings = {
        "run_id": spec.run_id,
        "storage_url": spec.storage_url,
        "model": spec.model.path,
        "steps": spec.learner.steps,
        "folder": str(folder),
    }

    def steps_taken(number: int, incarnation: int) -> bool:
        path = folder / "metrics.jsonl"
        return path.exists() and path.read_text().count(f'.{incarnation}","train_s"') >= number

    with Actors(spec, Habits(latency_s=lambda task: 0.05)):
        for incarnation, victim in ((1, 1), (2, 0)):
            hosts = start("run", 2, **settings)
            await_that(lambda: steps_taken(3, incarnation), hosts)  # noqa: B023
            hosts.processes[victim].send_signal(signal.SIGKILL)
            statuses = hosts.await_ends(PATIENCE_S)
            assert statuses[victim] == -signal.SIGKILL
            # JAX aborts a follower whose coordinator is gone, if its own watch comes to it first.
            assert statuses[1 - victim] in ((1,) if victim else (1, -signal.SIGABRT)), hosts.logs()
            assert f"headrace: host {victim} of 2" in hosts.log(1 - victim)
        hosts = start("run", 2, **settings)
        assert hosts.await_ends(120) == [0, 0], hosts.logs()
    check_books(spec, folder)
    summary = summary_of(folder)
    assert (summary["step"], summary["version"], summary["groups"]["trained"]) == (12, "12.3", 36)
    assert summary["compiles_after_warmup"] == 0

    storage = open_storage(spec.storage_url)
    # Each start claimed one incarnation, not one for each host, and each checkpoint is one folder.
    newest, *older = Checkpoints(storage.join("checkpoints"), 4, 3).names()
    assert (newest[:7], newest.partition("-step-")[2], len(older)) == ("000003-", "12", 2)
    latest = AdapterStore(storage, CONFIG, LORA).latest()
    assert latest is not None
    assert latest.version == Version(12, 3)


def linked(**patience: float) -> tuple[Link, socket.socket, list[Frame], list[str]]:
    """A link, the bare other end, what it received and why it was lost."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    frames: list[Frame] = []
    lost: list[str] = []
    return Link(ours, frames.append, lost.append, **patience), theirs, frames, lost


def eventually(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_frame_arrives_as_it_was_sent() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    frame = Frame(Kind.RESTORE, {"number": 3, "names": ["a"]}, (encode_array(array), b""))
    link, theirs, _, lost = linked()
    for _ in range(2):
        link.send(frame)
    assert read_frame(theirs) == read_frame(theirs) == frame
    np.testing.assert_array_equal(decode_array(frame.parts[0]), array)
    closing = threading.Thread(target=link.close, args=(10,))
    closing.start()
    assert read_frame(theirs) is None
    theirs.close()
    closing.join()
    assert lost == []


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x02{}", b'\x00\x00\x00\x11["nothing",{},[]'])
def test_what_is_no_frame_ends_the_link(data: bytes) -> None:
    link, theirs, frames, lost = linked()
    theirs.sendall(data.ljust(40, b" "))
    eventually(lambda: lost)
    assert "its connection failed: a frame's head" in lost[0]
    assert not frames
    link.close(0.1)
    theirs.close()


def test_a_pickle_is_no_array() -> None:
    file = io.BytesIO()
    np.save(file, np.array([{}], object), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        decode_array(file.getvalue())


def hello(server: socket.socket, token: str, host: int, digest: str) -> socket.socket:
    connection = socket.create_connection(server.getsockname())
    connection.settimeout(20)
    connection.sendall(encode_frame(Frame(Kind.HELLO, {"token": token, "host": host, "digest": digest})))
    return connection


def test_a_stranger_is_turned_away() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        stranger, scanner = hello(server, "guess", 1, "same"), socket.create_connection(server.getsockname())
        scanner.sendall(b"GET / HTTP/1.1\r\n\r\n")
        own = hello(server, "token", 1, "same")
        found = admit(server, 2, "token", "same")
        assert found[1].getpeername() == own.getsockname()
        assert read_frame(stranger) is None
        for connection in (stranger, scanner, own, *found.values()):
            connection.close()


NO_HELLO = {
    "a part of 2^63 bytes": b'["hello",{},[9223372036854775808]]',
    "a part of 1 GB": b'["hello",{},[1000000000]]',
    "a part of less than none": b'["hello",{},[-1]]',
    "nested without end": b"[" * 4000,
    "a token outside ASCII": '["hello",{"token":"ü","host":1},[]]'.encode(),
    "half a surrogate pair": rb'["hello",{"token":"\ud800","host":1},[]]',
    "no fields": b'["hello",7,[]]',
}


@pytest.mark.parametrize("head", NO_HELLO.values(), ids=NO_HELLO)
def test_nothing_that_a_stranger_says_ends_the_owner(head: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        stranger = socket.create_connection(server.getsockname())
        stranger.sendall(struct.pack("!I", len(head)) + head)
        own = hello(server, "token", 1, "same")
        found = admit(server, 2, "token", "same")
        assert found[1].getpeername() == own.getsockname()
        for connection in (stranger, own, *found.values()):
            connection.close()


def test_a_stranger_that_never_comes_to_an_end_is_turned_away_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent, slow = (socket.create_connection(server.getsockname()) for _ in range(2))
        own = hello(server, "token", 1, "same")
        ended = threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                for byte in b"\x00\x00\x0f\x00" + b" " * 3000:
                    slow.sendall(bytes([byte]))
                    if ended.wait(0.05):
                        return

        dripping = threading.Thread(target=drip)
        dripping.start()
        found = admit(server, 2, "token", "same", hello_s=0.5)
        ended.set()
        dripping.join()
        assert found[1].getpeername() == own.getsockname()
        for connection in (silent, slow, own, *found.values()):
            connection.close()


def test_a_host_with_another_run_file_ends_all_for_good() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        follower, other = hello(server, "token", 1, "same"), hello(server, "token", 2, "other")
        with pytest.raises(ValueError, match="host 2 reads another run file"):
            admit(server, 3, "token", "same")
        for connection in (follower, other):
            end = read_frame(connection)
            assert end is not None
            assert (end.kind, end.fields["status"]) == (Kind.END, 2)
            connection.close()


def test_a_host_that_does_not_come_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        follower = hello(server, "token", 2, "same")
        with pytest.raises(TimeoutError, match=r"host\(s\) \[1, 3\] did not come"):
            admit(server, 4, "token", "same", patience_s=0.3)
        follower.close()


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ({"coordinator": "10.0.0.2:8476"}, "--coordinator and --host-id belong together"),
        ({"host": 1}, "belong together"),
        ({"coordinator": "10.0.0.2:8476", "host": 4}, "--host-id must lie from 0 to 3"),
    ],
)
def test_what_does_not_say_which_host_this_is(place: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        join(4, **place)


def test_hosts_share_the_devices_evenly() -> None:
    assert ShardingSettings(data=2, fsdp=4, hosts=4).devices == 8
    with pytest.raises(
        ValueError, match=r"sharding.hosts must divide data × fsdp × tensor = 6 devices evenly, found 4"
    ):
        ShardingSettings(data=6, hosts=4)


def test_a_silent_host_is_lost_and_a_busy_one_is_not() -> None:
    """The one that is frozen sends no beats, however its connection stands."""
    link, theirs, _, lost = linked(beat_s=0.05, patience_s=0.5)
    theirs.settimeout(10)
    for _ in range(20):  # a second: beats alone keep the link
        theirs.sendall(b"\x00\x00\x00\x0e" + b'["beat",{},[]]')
        beat = read_frame(theirs)
        assert beat is not None
        assert beat.kind is Kind.BEAT
    assert lost == []
    eventually(lambda: lost)
    assert lost == ["it said nothing for 0.5 s"]
    link.close(0.1)
    theirs.close()


BEAT = b"\x00\x00\x00\x0e" + b'["beat",{},[]]'


def test_a_frame_may_take_longer_than_the_silence_that_ends_a_link() -> None:
    """A training state of gigabytes, to many hosts at once."""
    link, theirs, _, lost = linked(beat_s=0.1, patience_s=1.0)
    frame = Frame(Kind.RESTORE, {}, (bytes(48_000_000),))
    link.send(frame)
    expected, data = encode_frame(frame), bytearray()
    while len(data) < len(expected):
        theirs.sendall(BEAT)
        time.sleep(0.04)
        data += theirs.recv(min(1_000_000, len(expected) - len(data)), socket.MSG_WAITALL)
        assert not lost
    assert data == expected
    theirs.close()
    link.close(0.1)


def test_a_host_that_says_something_and_takes_nothing_is_lost() -> None:
    link, theirs, _, lost = linked(beat_s=0.05, patience_s=0.3)
    link.send(Frame(Kind.RESTORE, {}, (bytes(64_000_000),)))

    def beat_on() -> list[str]:
        with contextlib.suppress(OSError):
            theirs.sendall(BEAT)
        return lost

    eventually(beat_on)
    assert lost == ["it took nothing for 0.3 s"]
    link.close(0.1)
    theirs.close()
