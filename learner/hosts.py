"""Several learner processes make one step: the owner (host 0) leads, the others follow.

    owner      has the ledger, the subscription, the adapters and the checkpoints, and runs `learner.loop` as ever; its
               trainer is a `HostedTrainer`, which says to the others what it is about to do
    follower   has a trainer over the same mesh and does with it what the owner says, in the same order

The processes find each other through `jax.distributed`, and move what a step computes through its collectives. What the
owner says goes over TCP links of their own (`learner.channel`), because neither a collective nor the coordination
service can tell a process that waits in a collective that another one has died.

Invariants: the owner alone writes to storage and speaks to Pub/Sub; every process launches the same compiled functions
in the same order, or none of them; when one dies, hangs or fails, all end, with a message that names it and an exit
status that says whether another start can help. Nothing is lost by that: the run goes on from its newest checkpoint.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import logging
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn, cast

import jax
import numpy as np
from numpy.typing import NDArray

from learner.channel import (
    PATIENCE_S,
    Frame,
    Kind,
    Link,
    decode_array,
    encode_array,
    encode_frame,
    read_frame,
)
from learner.step import PreparedStep, StepMetrics, Trainer, TrainState
from policy.lora import Adapter
from trajectories import codec
from trajectories.schema import Row

logger = logging.getLogger(__name__)

OWNER = 0
"""The host that leads; JAX's process index 0."""
LOST, UNUSABLE = 1, 2
"""Exit statuses: another start helps, or does not."""
START_S = 300.0
"""How long hosts wait for one another at the start."""
_JAX_PATIENCE_S = int(2 * PATIENCE_S)
"""After which JAX's own watch would abort the process. It knows no names: ours comes first."""
_GRACE_S = 3.0
"""A collective may fail before the link says who is gone."""
_LEAVE_S = 5.0
_HELLO_S = 10.0
_HELLO_BYTES = 4096
_ADDRESS_BYTES = 1024
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

End = Callable[[int], NoReturn]


def end_process(status: int) -> NoReturn:
    """End at once, whatever the other threads wait for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


# Coming together


@dataclass(frozen=True, slots=True)
class Seat:
    """Which host this process is."""

    host: int
    hosts: int
    coordinator: str | None
    """HOST:PORT of the owner; None where the environment knew it."""

    @property
    def owns(self) -> bool:
        return self.host == OWNER


def join(hosts: int, coordinator: str | None = None, host: int | None = None) -> Seat:
    """Meet the other processes, before anything else is done with JAX.

    `coordinator` (HOST:PORT, of the owner) and `host` (from 0) are found out where there is something to find: on Cloud
    TPU, Slurm, Open MPI and Kubernetes. Raises ValueError if they are needed, or if the hosts are not `hosts`.
    """
    if (coordinator is None) != (host is None):
        raise ValueError("--coordinator and --host-id belong together: give both, or neither on a Cloud TPU")
    if host is not None and not 0 <= host < hosts:
        raise ValueError(f"--host-id must lie from 0 to {hosts - 1}, for sharding.hosts is {hosts}; found {host}")
    # Its signal handler would take the place of ours.
    jax.config.update("jax_enable_preemption_service", False)
    options: dict[str, Any] = {"initialization_timeout": int(START_S), "heartbeat_timeout_seconds": _JAX_PATIENCE_S}
    if coordinator is not None:
        options |= {
            "coordinator_address": coordinator,
            "num_processes": hosts,
            "process_id": host,
            "cluster_detection_method": "deactivate",
        }
    try:
        jax.distributed.initialize(**options)
    except ValueError as error:
        raise ValueError(
            f"sharding.hosts is {hosts} and nothing here says which host this is ({error}): give --coordinator and "
            "--host-id"
        ) from error
    if jax.process_count() != hosts:
        raise ValueError(
            f"sharding.hosts must be the number of learner processes, {jax.process_count()}; found {hosts}"
        )
    return Seat(jax.process_index(), hosts, coordinator)


def _share_address(announcement: bytes) -> bytes:
    """What the owner announces, at every host."""
    from jax.experimental.multihost_utils import broadcast_one_to_all

    padded = np.zeros(_ADDRESS_BYTES, np.uint8)
    padded[: len(announcement)] = np.frombuffer(announcement, np.uint8)
    return bytes(np.asarray(broadcast_one_to_all(padded), np.uint8)).rstrip(b"\0")


def _own_addresses(coordinator: str | None) -> list[str]:
    """Under which the others may reach this machine, the likeliest first."""
    found = [] if coordinator is None else [coordinator.rpartition(":")[0].strip("[]")]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Sends nothing: it asks the routing table for the address that packets to the outside would have.
        try:
            probe.connect(("192.0.2.1", 9))
            found.append(probe.getsockname()[0])
        except OSError:
            pass
    return list(dict.fromkeys([*found, socket.gethostname()]))


def _digest(settings: object) -> str:
    return hashlib.sha256(f"{jax.__version__} {settings!r}".encode()).hexdigest()


# The owner


def admit(
    server: socket.socket,
    hosts: int,
    token: str,
    digest: str,
    *,
    patience_s: float = START_S,
    hello_s: float = _HELLO_S,
) -> dict[int, socket.socket]:
    """The connections of all followers that say the token within `hello_s`; whoever does not is turned away.

    Raises ValueError if one has other settings than those of `digest`, TimeoutError if one does not come.
    """
    deadline = time.monotonic() + patience_s
    found: dict[int, socket.socket] = {}
    while len(found) < hosts - 1:
        server.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            connection, address = server.accept()
        except TimeoutError:
            missing = sorted(set(range(1, hosts)) - set(found))
            raise TimeoutError(f"host(s) {missing} did not come within {patience_s:g} s") from None
        try:
            hello = read_frame(
                connection,
                max_head_bytes=_HELLO_BYTES,
                max_parts_bytes=0,
                deadline=time.monotonic() + hello_s,
            )
            if hello is None or hello.kind is not Kind.HELLO:
                raise ValueError("it does not say hello")
            if not hmac.compare_digest(str(hello.fields["token"]).encode(), token.encode()):
                raise ValueError("it does not know the token")
            host = int(hello.fields["host"])
        except (OSError, ValueError, KeyError) as error:
            logger.warning("a connection from %s is refused: %s", address[0], error)
            connection.close()
            continue
        found[host] = connection
        if hello.fields["digest"] != digest:
            text = f"host {host} reads another run file, or has another version of JAX, than the owner"
            for one in found.values():
                one.sendall(encode_frame(Frame(Kind.END, {"status": UNUSABLE, "text": text})))
            raise ValueError(text)
    return found


class Crew:
    """The owner's links to its followers."""

    def __init__(self, seat: Seat, settings: object, *, end: End = end_process) -> None:
        """Waits until all have come; raises as `admit`. `settings`, compared by their repr, must be the same in all."""
        self._hosts, self._end = seat.hosts, end
        self.interrupted = threading.Event()
        """Set when a follower was asked to end."""
        self._lock = threading.Lock()
        self._ended = False
        self._asked = 0
        self._replies: dict[int, queue.SimpleQueue[Frame]] = {}
        self._links: dict[int, Link] = {}
        token = secrets.token_hex(16)
        local = seat.coordinator is not None and seat.coordinator.rpartition(":")[0].strip("[]") in _LOOPBACK
        with socket.create_server(("127.0.0.1" if local else "", 0), backlog=seat.hosts) as server:
            addresses = ["127.0.0.1"] if local else _own_addresses(seat.coordinator)
            announcement = {"addresses": addresses, "port": server.getsockname()[1], "token": token}
            _share_address(json.dumps(announcement).encode())
            connections = admit(server, seat.hosts, token, _digest(settings))
        for host, connection in connections.items():
            self._links[host] = Link(
                connection, functools.partial(self._received, host), functools.partial(self._lost, host)
            )

    # What the owner says

    def tell(self, frame: Frame) -> None:
        """Send to every follower; waits for none."""
        data = encode_frame(frame)
        for link in self._links.values():
            link.send_bytes(data)

    def ask(self, kind: Kind, **content: Any) -> Callable[[], list[Frame]]:
        """Ask every follower; call the result to wait for all their answers."""
        answers: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        with self._lock:
            self._asked += 1
            number = self._asked
            self._replies[number] = answers
        self.tell(Frame(kind, {**content, "question": number}))

        def answered() -> list[Frame]:
            found = [answers.get() for _ in self._links]
            with self._lock:
                del self._replies[number]
            return found

        return answered

    def close(self, status: int) -> None:
        """End the followers with the owner's exit status, and wait a moment until they are gone: JAX would abort a
        follower that outlives the owner."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self._dismiss(f"host {OWNER}, the owner, ended with status {status}", status)

    # What it hears

    def _received(self, host: int, frame: Frame) -> None:
        match frame.kind:
            case Kind.REPLY:
                with self._lock:
                    answers = self._replies[frame.fields["question"]]
                answers.put(frame)
            case Kind.INTERRUPT:
                self.interrupted.set()
            case Kind.FAILED:
                self._lose(host, f"failed: {frame.fields['text']}", int(frame.fields["status"]))
            case _:
                logger.warning("host %d says %s, which means nothing here", host, frame.kind)

    def _lost(self, host: int, why: str) -> None:
        self._lose(host, f"is lost: {why}", LOST)

    def _lose(self, host: int, how: str, status: int) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
        text = f"host {host} of {self._hosts} {how}"
        print(f"headrace: {text}; {_advice(status)}", file=sys.stderr, flush=True)
        self._dismiss(text, status)
        self._end(status)

    def _dismiss(self, text: str, status: int) -> None:
        self.tell(Frame(Kind.END, {"status": status, "text": text}))
        closing = [threading.Thread(target=link.close, args=(_LEAVE_S,), daemon=True) for link in self._links.values()]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(_LEAVE_S)


def _advice(status: int) -> str:
    if status == UNUSABLE:
        return "no other start would mend that"
    return "all hosts end. Start them again: the run goes on from its newest checkpoint"


class HostedTrainer:
    """The owner's trainer, to the loop what `learner.step.Trainer` is. What touches the devices happens on all hosts.

    `adapter` and `state`: from the thread that calls `run`, or while none does.
    """

    def __init__(self, trainer: Trainer, crew: Crew) -> None:
        self._trainer, self._crew = trainer, crew
        self._prepared = 0
        self._serial = 0
        """Of the newest training state. All hosts count alike."""
        self._lock = threading.Lock()
        self._held: weakref.WeakValueDictionary[int, _Held] = weakref.WeakValueDictionary()

    @property
    def adapter(self) -> Adapter:
        """The newest adapter: arrays, or what `np.asarray` makes them of."""
        adapter: Adapter = self.state().adapter
        return adapter

    @property
    def compiles(self) -> int:
        return self._trainer.compiles

    @property
    def step_number(self) -> int:
        return self._trainer.step_number

    @property
    def wants_rewards(self) -> bool:
        return self._trainer.wants_rewards

    def compile(self) -> float:
        """Compile on all hosts; returns the seconds until the slowest was done."""
        began = time.perf_counter()
        others = self._crew.ask(Kind.COMPILE)
        self._trainer.compile()
        others()
        return time.perf_counter() - began

    def prepare(self, *minibatches: Sequence[Row]) -> HostedStep:
        """As `Trainer.prepare`; every host gets the rows and puts its share of them on its devices."""
        prepared = self._trainer.prepare(*minibatches)
        with self._lock:
            self._prepared += 1
            number = self._prepared
        rows = tuple(codec.encode(cast(Any, row), limit=None) for rows in minibatches for row in rows)
        counts = [len(rows) for rows in minibatches]
        self._crew.tell(Frame(Kind.PREPARE, {"number": number, "counts": counts}, rows))
        return HostedStep(**{field.name: getattr(prepared, field.name) for field in fields(prepared)}, number=number)

    def run(self, prepared: HostedStep, *, interrupted: Callable[[], bool]) -> StepMetrics | None:
        """As `Trainer.run`; all hosts give a step up at the same call, or none."""
        with self._lock:
            kept = sorted({self._serial, *self._held.keys()})
        self._crew.tell(Frame(Kind.RUN, {"number": prepared.number, "kept": kept}))

        def decide() -> bool:
            given_up = interrupted()
            self._crew.tell(Frame(Kind.TURN, {"given_up": given_up}))
            return given_up

        try:
            metrics = self._trainer.run(prepared, interrupted=decide)
        except jax.errors.JaxRuntimeError:
            time.sleep(_GRACE_S)
            raise
        if metrics is not None:
            with self._lock:
                self._serial += 1
        return metrics

    def state(self) -> TrainState:
        """As `Trainer.state`; of an array that lies on several hosts, `np.asarray` brings the parts together."""
        with self._lock:
            state, serial = self._trainer.state(), self._serial
            held = self._held.get(serial) or self._held.setdefault(serial, _Held(serial))
        leaves, structure = jax.tree.flatten(state)
        found: TrainState = jax.tree.unflatten(
            structure,
            [
                leaf if leaf.is_fully_replicated else SpreadArray(leaf, number, held, self._crew)
                for number, leaf in enumerate(leaves)
            ],
        )
        return found

    def restore(self, state: Any) -> None:
        """As `Trainer.restore`; the other hosts get the state from here."""
        state = jax.tree.map(np.asarray, state)
        self._trainer.restore(state)
        self._crew.tell(Frame(Kind.RESTORE, parts=tuple(encode_array(leaf) for leaf in jax.tree.leaves(state))))
        with self._lock:
            self._serial += 1


@dataclass(frozen=True)
class HostedStep(PreparedStep):
    number: int
    """By which the other hosts know it."""


class _Held:
    """A training state that the hosts keep as long as somebody may ask for its arrays."""

    def __init__(self, serial: int) -> None:
        self.serial = serial


class SpreadArray:
    """An array of the training state, spread over hosts; `np.asarray` brings its parts here."""

    def __init__(self, array: jax.Array, number: int, held: _Held, crew: Crew) -> None:
        self._array, self._number, self._held, self._crew = array, number, held, crew

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._array.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        dtype: np.dtype[Any] = np.dtype(self._array.dtype)
        return dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        answers = self._crew.ask(Kind.FETCH, state=self._held.serial, leaf=self._number)
        whole = np.empty(self.shape, self.dtype)
        for place, part in _own_parts(self._array):
            whole[_slices(place)] = part
        for answer in answers():
            for place, data in zip(answer.fields["places"], answer.parts, strict=True):
                whole[_slices(place)] = decode_array(data)
        return whole if dtype is None else whole.astype(dtype, copy=False)


Place = list[tuple[int, int]]
"""Of a part in its array: (start, stop) in each dimension."""


def _own_parts(array: jax.Array) -> list[tuple[Place, NDArray[Any]]]:
    """The parts of an array that this process answers for: each part is one process's."""
    return [
        (
            [index.indices(size)[:2] for index, size in zip(shard.index, array.shape, strict=True)],
            np.asarray(shard.data),
        )
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]


def _slices(place: Any) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in place)


# The followers


def follow(seat: Seat, settings: object, make_trainer: Callable[[], Trainer], *, end: End = end_process) -> NoReturn:
    """Do what the owner says, until it ends this process; SIGINT and SIGTERM ask it to end the run in good order."""
    Follower(seat, settings, end).work(make_trainer)


class Follower:
    """A host that is not the owner."""

    def __init__(self, seat: Seat, settings: object, end: End) -> None:
        self._seat, self._end = seat, end
        self._orders: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._device_orders: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._turns: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._prepared: dict[int, PreparedStep] = {}
        self._changed = threading.Condition()
        self._states: dict[int, TrainState] = {}
        self._serial = 0
        announcement = json.loads(_share_address(b""))
        connection = _connect(announcement["addresses"], announcement["port"])
        self._link = Link(connection, self._received, self._lost)
        hello = {"token": announcement["token"], "host": seat.host, "digest": _digest(settings)}
        self._link.send(Frame(Kind.HELLO, hello))

    def work(self, make_trainer: Callable[[], Trainer]) -> NoReturn:
        """See `follow`."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)
        threading.Thread(target=self._obey, args=(make_trainer,), name="follower", daemon=True).start()
        while True:  # in this thread, signals are heard whatever the others wait for
            time.sleep(3600)

    def _interrupt(self, number: int, frame: Any) -> None:
        self._link.send(Frame(Kind.INTERRUPT))
        signal.signal(number, signal.SIG_DFL)

    # In the link's thread

    def _received(self, frame: Frame) -> None:
        if frame.kind is Kind.END:
            status = int(frame.fields["status"])
            print(f"headrace: {frame.fields['text']}: host {self._seat.host} ends too", file=sys.stderr, flush=True)
            self._end(status)
        if frame.kind is Kind.TURN:
            self._turns.put(bool(frame.fields["given_up"]))
        else:
            self._orders.put(frame)

    def _lost(self, why: str) -> None:
        text = f"host {OWNER} of {self._seat.hosts}, the owner, is lost: {why}"
        print(f"headrace: {text}; {_advice(LOST)}", file=sys.stderr, flush=True)
        self._end(LOST)

    # In threads of its own: one runs what the devices do, one all else, so that neither waits for the other.

    def _obey(self, make_trainer: Callable[[], Trainer]) -> None:
        try:
            trainer = make_trainer()
            self._states = {0: trainer.state()}
        except Exception as error:
            self._fail(error, UNUSABLE if isinstance(error, ValueError) else LOST)
        threading.Thread(target=self._drive, args=(trainer,), name="device", daemon=True).start()
        try:
            while True:
                frame = self._orders.get()
                if frame.kind is Kind.PREPARE:
                    rows = iter([codec.decode(part, Row, limit=None) for part in frame.parts])
                    minibatches = [[next(rows) for _ in range(count)] for count in frame.fields["counts"]]
                    self._prepared[frame.fields["number"]] = trainer.prepare(*minibatches)
                elif frame.kind is Kind.FETCH:
                    self._link.send(self._fetched(frame))
                else:
                    self._device_orders.put(frame)
        except Exception as error:
            self._fail(error, LOST)

    def _fetched(self, frame: Frame) -> Frame:
        with self._changed:
            # The owner may be done with a step a moment before this host is.
            self._changed.wait_for(lambda: frame.fields["state"] in self._states)
            state = self._states[frame.fields["state"]]
        parts = _own_parts(jax.tree.leaves(state)[frame.fields["leaf"]])
        answer = {"question": frame.fields["question"], "places": [place for place, _ in parts]}
        return Frame(Kind.REPLY, answer, tuple(encode_array(part) for _, part in parts))

    def _drive(self, trainer: Trainer) -> None:
        try:
            while True:
                frame = self._device_orders.get()
                match frame.kind:
                    case Kind.COMPILE:
                        trainer.compile()
                        self._link.send(Frame(Kind.REPLY, {"question": frame.fields["question"]}))
                    case Kind.RESTORE:
                        structure = jax.tree.structure(trainer.state())
                        trainer.restore(jax.tree.unflatten(structure, [decode_array(part) for part in frame.parts]))
                        self._hold(trainer)
                    case Kind.RUN:
                        self._run(trainer, frame.fields["number"], frame.fields["kept"])
                    case _:
                        raise ValueError(f"the owner says {frame.kind}, which means nothing here")
        except Exception as error:
            self._fail(error, LOST)

    def _run(self, trainer: Trainer, number: int, kept: list[int]) -> None:
        with self._changed:
            self._states = {serial: state for serial, state in self._states.items() if serial in kept}
        for older in [one for one in list(self._prepared) if one < number]:
            del self._prepared[older]
        if trainer.run(self._prepared.pop(number), interrupted=self._turns.get) is not None:
            self._hold(trainer)

    def _hold(self, trainer: Trainer) -> None:
        with self._changed:
            self._serial += 1
            self._states[self._serial] = trainer.state()
            self._changed.notify_all()

    def _fail(self, error: Exception, status: int) -> NoReturn:
        logger.exception("host %d cannot go on", self._seat.host)
        if isinstance(error, jax.errors.JaxRuntimeError):
            time.sleep(_GRACE_S)
        text = f"{type(error).__name__}: {error}" if status == LOST else str(error)
        self._link.send(Frame(Kind.FAILED, {"status": status, "text": text}))
        time.sleep(_LEAVE_S)  # the owner names this host to the others, then ends it
        self._end(status)


def _connect(addresses: Sequence[str], port: int) -> socket.socket:
    errors = []
    for address in addresses:
        try:
            return socket.create_connection((address, port), timeout=10)
        except OSError as error:
            errors.append(f"{address}: {error}")
    raise ConnectionError(f"the owner's port {port} cannot be reached ({'; '.join(errors)}): open it between the hosts")
