"""Checkpoints: the training state (Orbax), the ledger and the record of the run, of one moment.

    checkpoints/<incarnation>-<serial>-step-<step>/state/         Orbax
                                                   ledger         bytes of `Ledger`
                                                   record.json    counters, curve, evaluation before
                                                   COMMITTED.json  SHA-256 of all of it, written last

Invariants: a checkpoint is used only if it has its marker and everything in it is what the marker says; one that is not
used is named in a warning, and none is passed over because it cannot be read at the moment; what a failed save leaves
takes up no room; incarnations never write to one another's folders. What is saved is whole arrays, so it does not
matter how the mesh of a run spread them. Never pickle.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from trajectories.storage import NotFound, Storage, StorageError

logger = logging.getLogger(__name__)

_FORMAT = 1
_MARKER = "COMMITTED.json"
_LEDGER = "ledger"
_RECORD = "record.json"
_STATE = "state"
_UNREAD = re.compile(
    "UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|PERMISSION_DENIED|UNAUTHENTICATED|ABORTED"
    "|(?!NOT_FOUND).*os_error_code",
    re.DOTALL,
)
"""How tensorstore's messages look where it could not read; others say what it read."""
_NAME = re.compile(r"(\d{6,})-(\d{6,})-step-(\d+)")


class CheckpointError(RuntimeError):
    """No checkpoint of the run can be used."""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """What one checkpoint holds."""

    step: int
    state: Any
    """Pytree of arrays (numpy or JAX)."""
    ledger: bytes
    record: Mapping[str, Any]
    """JSON."""


class Checkpoints:
    """The checkpoints of a run. One thread at a time."""

    def __init__(self, storage: Storage, incarnation: int, keep: int) -> None:
        """`storage` holds nothing but checkpoints; new ones are written as `incarnation`'s."""
        self._storage, self._incarnation, self._keep = storage, incarnation, keep
        self._serial = 0

    def save(self, snapshot: Snapshot, *, protect: Collection[int] = ()) -> str:
        """Write a checkpoint, wait until it is durable, and remove those that are too many; returns its name.

        The newest of each step in `protect` stay. Raises whatever made it impossible.
        """
        self._serial += 1
        name = f"{self._incarnation:06d}-{self._serial:06d}-step-{snapshot.step}"
        try:
            self._write(name, snapshot)
        except BaseException:
            # Where storage is full, half of a checkpoint would leave no room for the next one.
            try:
                _remove(f"{self._storage.url}/{name}")
            except Exception as error:
                logger.warning("what there is of checkpoint %s in %s stays: %s", name, self._storage.url, error)
            raise
        self._prune(protect)
        return name

    def _write(self, name: str, snapshot: Snapshot) -> None:
        leaves = _leaves(snapshot.state)
        record = json.dumps(snapshot.record).encode()
        _checkpointer_save(f"{self._storage.url}/{name}/{_STATE}", leaves)
        self._storage.write(f"{name}/{_LEDGER}", snapshot.ledger)
        self._storage.write(f"{name}/{_RECORD}", record)
        marker = {
            "format": _FORMAT,
            "step": snapshot.step,
            "state": _digest(leaves),
            "ledger": hashlib.sha256(snapshot.ledger).hexdigest(),
            "record": hashlib.sha256(record).hexdigest(),
        }
        self._storage.write(f"{name}/{_MARKER}", json.dumps(marker).encode())

    def names(self) -> list[str]:
        """Committed checkpoints, newest first."""
        found = (path.removesuffix(f"/{_MARKER}") for path in self._storage.list() if path.endswith(f"/{_MARKER}"))
        return sorted((name for name in found if _NAME.fullmatch(name)), key=_age, reverse=True)

    def newest(self, like: Any) -> Snapshot | None:
        """The newest whole checkpoint, its state with the structure of `like`; None if there never was one.

        Half-written and damaged ones are passed over with a warning. Raises CheckpointError if all that were whole once
        are damaged, StorageError if one cannot be read at the moment, ValueError if the newest whole one is of another
        model, adapter or optimizer.
        """
        names = self.names()
        for name in sorted(self._folders(), key=_age, reverse=True):
            if name not in names:
                logger.warning("checkpoint %s in %s is half-written and passed over", name, self._storage.url)
                continue
            try:
                step, leaves, ledger, record = self._read(name)
            except Exception as error:
                if _is_unread(error):
                    raise StorageError(
                        f"checkpoint {name} in {self._storage.url} cannot be read: {error}. Start again when it can; "
                        "to go on from the one before it, remove it"
                    ) from error
                # Whatever the bytes on a disk have become, Orbax, tensorstore and JSON each raise their own.
                logger.warning("checkpoint %s in %s is damaged and passed over: %s", name, self._storage.url, error)
                continue
            return Snapshot(step, _unflatten(leaves, like, name), ledger, record)
        if names:
            raise CheckpointError(
                f"all {len(names)} checkpoints in {self._storage.url} are damaged; to begin anew, start a fresh run"
            )
        return None

    def _read(self, name: str) -> tuple[int, dict[str, Any], bytes, dict[str, Any]]:
        marker = json.loads(self._storage.read(f"{name}/{_MARKER}"))
        if marker["format"] != _FORMAT:
            raise ValueError(f"it has format {marker['format']}, this process reads {_FORMAT}")
        if marker["step"] != _step(name):
            raise ValueError(f"it is of step {marker['step']}, and has another's name")
        ledger = self._storage.read(f"{name}/{_LEDGER}")
        record = self._storage.read(f"{name}/{_RECORD}")
        for what, data in (("ledger", ledger), ("record", record)):
            if hashlib.sha256(data).hexdigest() != marker[what]:
                raise ValueError(f"its {what} is not what the marker says")
        leaves = _checkpointer_restore(f"{self._storage.url}/{name}/{_STATE}")
        if _digest(leaves) != marker["state"]:
            raise ValueError("its training state is not what the marker says")
        return int(marker["step"]), leaves, ledger, json.loads(record)

    def _folders(self) -> set[str]:
        """Committed checkpoints, and what is being written or was left behind."""
        return {name for name in (path.split("/", 1)[0] for path in self._storage.list()) if _NAME.fullmatch(name)}

    def _prune(self, protect: Collection[int]) -> None:
        """Remove all but the newest and the protected, and what crashes left behind without a marker."""
        names = self.names()
        kept = set(names[: self._keep])
        kept |= {name for step in protect for name in [one for one in names if _step(one) == step][:1]}
        own = f"{self._incarnation:06d}-"
        for folder in sorted(self._folders() - kept):
            if _age(folder) > _age(f"{own}{self._serial:06d}-step-0"):
                continue  # a newer incarnation may be writing it
            self._storage.delete(f"{folder}/{_MARKER}")
            _remove(f"{self._storage.url}/{folder}")


def load_orbax() -> None:
    """Import Orbax, which takes seconds, before the first checkpoint waits for it."""
    import orbax.checkpoint  # noqa: F401


def _age(name: str) -> tuple[int, int]:
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2])


def _step(name: str) -> int:
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[3])


def _is_unread(error: Exception) -> bool:
    """Whether an error says that bytes could not be read, and nothing of what they are."""
    if isinstance(error, OSError):
        return not isinstance(error, NotFound | FileNotFoundError | NotADirectoryError | IsADirectoryError)
    return isinstance(error, MemoryError) or _UNREAD.match(str(error)) is not None


def _leaves(state: Any) -> dict[str, Any]:
    """{path: numpy array}: names that stay readable without the program that wrote them."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(state)
    }


def _unflatten(leaves: Mapping[str, Any], like: Any, name: str) -> Any:
    paths = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(like)]
    if set(paths) != set(leaves):
        lacks, besides = set(paths) - set(leaves), set(leaves) - set(paths)
        raise ValueError(
            f"checkpoint {name} is of other settings or another model: it lacks {_some(lacks)} and "
            f"has {_some(besides)} besides. Start a fresh run, or restore the run's settings"
        )
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[path] for path in paths])


def _some(names: set[str]) -> str:
    """The first few, and how many more there are."""
    first, more = sorted(names)[:3], len(names) - 3
    return (", ".join(first) + (f" and {more} more" if more > 0 else "")) or "nothing"


def _digest(leaves: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    for path in sorted(leaves):
        array = np.ascontiguousarray(leaves[path])
        digest.update(f"{path} {array.dtype.str} {list(array.shape)}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _checkpointer_save(url: str, leaves: Mapping[str, Any]) -> None:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer(multiprocessing_options=_alone()) as checkpointer:
        checkpointer.save(url, dict(leaves), force=True)
        checkpointer.wait_until_finished()


def _checkpointer_restore(url: str) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer(multiprocessing_options=_alone()) as checkpointer:
        return dict(checkpointer.restore(url))


def _alone() -> Any:
    """Of several processes the caller alone saves and restores: Orbax must not wait for the others."""
    import orbax.checkpoint as ocp

    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    host = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=host, active_processes={host}, barrier_sync_key_prefix=f"host{host}"
    )


def _remove(url: str) -> None:
    from etils import epath  # type: ignore[import-untyped]

    folder = epath.Path(url)
    if folder.exists():
        folder.rmtree()
