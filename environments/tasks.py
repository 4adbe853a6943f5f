"""Tasks from a file or a list: one JSON object each.

Invariant: which side of the split a task is on follows from its own words (`key`), or from its standing in the
held-out file; no training task equals a held-out one, whatever lines are added, removed or moved.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from trajectories.codec import free_json
from trajectories.schema import stream_seed
from trajectories.storage import NotFound, open_storage

Payload = Mapping[str, Any]

MOST_BYTES = 1 << 20
"""Of one task: it travels in a message, with room for its neighbours."""


class TaskFileError(ValueError):
    """A task file cannot be used; names the file, the line and the mend."""


@dataclass(frozen=True)
class TaskList:
    """A TaskSource over tasks that are all known: `task_file` and `task_list` make it."""

    training: tuple[Payload, ...]
    held_out: tuple[Payload, ...]
    """Distinct, in the order that `eval_tasks` gives them."""
    seed: int = 0
    places: tuple[str, ...] = ()
    """Where each task stands, the training ones first, for errors."""

    def task(self, group_id: int) -> Payload:
        """Each training task once in every `len(training)` groups, each round in an order of its own."""
        if not self.training:
            raise ValueError("there is no training task: all of them are held out, lower held_out")
        epoch, index = divmod(group_id, len(self.training))
        return self.training[_order(len(self.training), self.seed, epoch)[index]]

    def eval_tasks(self, count: int) -> list[Payload]:
        if count > len(self.held_out):
            raise ValueError(
                f"there are {len(self.held_out)} held-out tasks, asked for {count}: lower evaluation.questions, raise "
                "held_out or name a held-out file"
            )
        return list(self.held_out[:count])

    def require(self, columns: Sequence[str]) -> None:
        """Raises TaskFileError with the place of the first task that lacks one of `columns`."""
        for place, payload in zip(self.places, (*self.training, *self.held_out), strict=True):
            for column in columns:
                if column not in payload:
                    raise TaskFileError(f"{place}: it lacks {column!r}; it has {', '.join(payload) or 'nothing'}")


def task_file(
    path: str | Path,
    *,
    seed: int = 0,
    key: str = "",
    held_out: float = 0.1,
    held_out_file: str | Path = "",
) -> TaskList:
    """The tasks in a JSON Lines file, on disk or at gs://: one JSON object a line, which is the task's payload.

    `key` names the column that says which tasks are the same, such as `question` (default: the whole object).
    About `held_out` of all keys are held out for evaluation; with `held_out_file`, the tasks of that file are, and what
    equals one of them is left out of the training. Raises TaskFileError.
    """
    apart = read_jsonl(held_out_file) if held_out_file else None
    return _split(read_jsonl(path), seed, key, held_out, apart)


def task_list(
    payloads: Sequence[Payload],
    *,
    seed: int = 0,
    key: str = "",
    held_out: float = 0.1,
    held_out_tasks: Sequence[Payload] | None = None,
) -> TaskList:
    """As `task_file`, over payloads that the program holds; `held_out_tasks` are those of a held-out set."""

    def placed(what: str, found: Sequence[Payload]) -> list[tuple[str, Payload]]:
        rows = [(f"{what} {number}", payload) for number, payload in enumerate(found, 1)]
        for place, payload in rows:
            _check(payload, place)
        return rows

    apart = None if held_out_tasks is None else placed("held-out task", held_out_tasks)
    return _split(placed("task", payloads), seed, key, held_out, apart)


def read_jsonl(path: str | Path) -> list[tuple[str, Payload]]:
    """(place, object) for each line of a JSON Lines file that is not blank. Raises TaskFileError."""
    url = str(path)
    folder, _, name = url.rpartition("/")
    if name in ("", ".", ".."):
        raise TaskFileError(f"{url!r} names no file: name one of JSON Lines")
    try:
        data = open_storage(folder or ("/" if url.startswith("/") else ".")).read(name)
    except NotFound as error:
        what = "it is a folder, name a file" if "://" not in url and Path(url).is_dir() else "there is no such file"
        raise TaskFileError(f"{url}: {what}{_beside(url)}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TaskFileError(f"{url}: it is no text in UTF-8 ({error}): write JSON Lines, uncompressed") from error
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            place = f"{name}, line {number}"
            rows.append((place, _payload(line, place)))
    if not rows:
        raise TaskFileError(f"{url}: it holds no task: write one JSON object a line")
    return rows


def _payload(line: str, place: str) -> Payload:
    if line.startswith("version https://git-lfs"):
        raise TaskFileError(f"{place}: the file is a Git LFS pointer: fetch it with `git lfs pull`")
    try:
        found = json.loads(line, parse_constant=_no_json)
    except ValueError as error:
        raise TaskFileError(f"{place}: a line must be one JSON object, found {line[:60]!r}: {error}") from error
    except RecursionError as error:
        raise TaskFileError(f"{place}: its JSON is nested too deeply") from error
    if not isinstance(found, dict):
        raise TaskFileError(f"{place}: a line must be one JSON object, found a {type(found).__name__}")
    _check(found, place)
    return found


def _check(payload: Payload, place: str) -> None:
    """Raises TaskFileError for what no message can carry: a worker would refuse it in the middle of a run."""
    if not isinstance(payload, Mapping):
        raise TaskFileError(f"{place}: a task must be an object, found a {type(payload).__name__}")
    try:
        size = len(json.dumps(payload, allow_nan=False, ensure_ascii=False).encode())
        for value in payload.values():
            free_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise TaskFileError(f"{place}: a task must be plain JSON: {error}") from error
    if size > MOST_BYTES:
        raise TaskFileError(f"{place}: a task must have at most {MOST_BYTES} bytes, found {size}")


def _no_json(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def _beside(url: str) -> str:
    folder = Path(url) if Path(url).is_dir() else Path(url).parent
    if url.startswith("gs://") or not folder.is_dir():
        return ""
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".jsonl", ".json", ".ndjson"))
    if Path(url).is_dir():
        return f"; it holds {', '.join(names[:8])}" if names else ""
    holds = f"holds {', '.join(names[:8])}" if names else "holds no .jsonl"
    return f"; its folder {'' if Path(url).is_absolute() else f'{folder.absolute()} '}{holds}"


def _key(payload: Payload, key: str, place: str) -> str:
    if not key:
        return json.dumps(payload, sort_keys=True)
    if key not in payload:
        raise TaskFileError(f"{place}: it lacks {key!r}, the key; it has {', '.join(payload) or 'nothing'}")
    return json.dumps(payload[key], sort_keys=True)


def _place_in_split(key: str) -> bytes:
    """Uniform over all bytes of its length, and a pure function of the key."""
    return hashlib.blake2b(key.encode(), digest_size=8).digest()


def _split(
    rows: Sequence[tuple[str, Payload]],
    seed: int,
    key: str,
    share: float,
    apart: Sequence[tuple[str, Payload]] | None,
) -> TaskList:
    """Hold out `share` of the tasks by their keys, or those that stand `apart`."""
    if not 0 <= share < 1:
        raise ValueError(f"held_out must be a share from 0 to below 1, found {share}")
    if not rows:
        raise TaskFileError("there must be at least one task, found none")
    held: dict[str, tuple[str, Payload]] = {}
    for place, payload in apart or ():
        held.setdefault(_key(payload, key, place), (place, payload))
    bound = 0 if apart is not None else int(share * 2**64)
    keys = {_key(payload, key, place) for place, payload in rows}
    drawn = {one for one in keys if int.from_bytes(_place_in_split(one), "big") < bound}
    training = []
    for place, payload in rows:
        own = _key(payload, key, place)
        if own in drawn:
            held.setdefault(own, (place, payload))
        if own not in held:
            training.append((place, payload))
    ordered = [held[own] for own in sorted(held, key=_place_in_split)]
    if not training:
        raise TaskFileError(f"{rows[0][0]}: every task is held out, none is left to train on")
    return TaskList(
        tuple(payload for _, payload in training),
        tuple(payload for _, payload in ordered),
        seed,
        tuple(place for place, _ in (*training, *ordered)),
    )


@functools.lru_cache(maxsize=4)
def _order(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(stream_seed(seed, "order", epoch)).shuffle(order)
    return tuple(order)
