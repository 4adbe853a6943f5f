"""The log: topics, subscriptions, snapshots, messages and who has yet to acknowledge them, in one SQLite file.

Invariant: what a caller was told is in the file. One thread writes; it commits everything that has queued up since its
last commit in one transaction and only then reports each operation's result, in the order of submission. Killing the
process loses nothing that was reported. Losing power can lose the last moments under `Durability.PROCESS` (the file
stays sound) and nothing that was reported under `Durability.POWER`.

A message stays while a subscription or a snapshot holds it or its topic retains it, and goes with the last of these.
"""

import fcntl
import os
import queue
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

FORMAT = 1
"""Version of the tables below, in the file's user_version."""

PAGE_BYTES = 16384
"""Large enough that a 1 MB body is few pages, small enough that a small commit writes little."""

WAL_BYTES = 64 * 1024 * 1024
"""Size of the write-ahead log at which it is folded into the main file."""

SPARE_BYTES = 64 * 1024 * 1024
"""Free space that the main file may keep for reuse; the rest goes back to the file system."""

VACUUM_BYTES = 32 * 1024 * 1024
"""Most free space given back at one go, so that a publisher never waits long."""

MAX_GROUP = 1024
"""Most operations in one transaction."""

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE topic (id INTEGER PRIMARY KEY, name TEXT UNIQUE, retention_ns INTEGER, proto BLOB);
CREATE TABLE subscription (id INTEGER PRIMARY KEY, name TEXT UNIQUE, topic INTEGER NOT NULL, proto BLOB);
CREATE TABLE snapshot (id INTEGER PRIMARY KEY, name TEXT UNIQUE, topic INTEGER NOT NULL, cut INTEGER, proto BLOB);
CREATE TABLE message (
    id INTEGER PRIMARY KEY, topic INTEGER, published_ns INTEGER, size INTEGER, ordering_key TEXT, body BLOB
);
CREATE INDEX message_by_time ON message (topic, published_ns);
CREATE TABLE delivery (
    message INTEGER, subscription INTEGER, acknowledged INTEGER, attempts INTEGER, PRIMARY KEY (message, subscription)
) WITHOUT ROWID;
CREATE TABLE captured (message INTEGER, snapshot INTEGER, PRIMARY KEY (message, snapshot)) WITHOUT ROWID;
"""
# message.body comes last: reading the columns before it never touches the pages of a large body.
# topic.name is NULL once the topic is deleted; the row stays while a subscription or snapshot refers to it.


class Durability(StrEnum):
    """What an acknowledged write survives."""

    PROCESS = "process"
    """The death of the process (SQLite `synchronous=NORMAL`: no fsync per commit)."""
    POWER = "power"
    """The loss of power too (`synchronous=FULL`: one fsync per group of commits)."""


class LogError(RuntimeError):
    """The log cannot be opened or written; says where and how to mend it."""


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message row without its body."""

    message: int
    published_ns: int
    size: int
    key: str
    attempts: int


@dataclass(frozen=True, slots=True)
class NewMessage:
    """A message about to be written."""

    message: int
    published_ns: int
    key: str
    body: bytes


@dataclass(frozen=True, slots=True)
class StoredResource:
    """A topic, subscription or snapshot row. `topic` and `cut` are 0 where the kind has none."""

    id: int
    name: str | None
    proto: bytes
    topic: int = 0
    cut: int = 0


@dataclass(frozen=True)
class Contents:
    """Everything but the messages, as the log holds it at the start."""

    instance: str
    """Random name of this log, made with it."""
    next_id: int
    topics: list[StoredResource]
    subscriptions: list[StoredResource]
    snapshots: list[StoredResource]


class Operations:
    """What can be done to the log within one transaction. Only the writer thread has one."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def note_id(self, last: int) -> None:
        """Ids up to `last` are used up for ever, also after every message that bore one has gone."""
        self._connection.execute("UPDATE meta SET value = max(value, ?) WHERE key = 'next_id'", (last + 1,))

    def put_topic(self, topic: int, name: str, retention_ns: int | None, proto: bytes) -> None:
        self._connection.execute("REPLACE INTO topic VALUES (?, ?, ?, ?)", (topic, name, retention_ns, proto))
        self.note_id(topic)

    def delete_topic(self, topic: int) -> None:
        self._connection.execute("UPDATE topic SET name = NULL, retention_ns = NULL WHERE id = ?", (topic,))
        self.sweep(topic)

    def put_subscription(self, subscription: int, name: str, topic: int, proto: bytes) -> None:
        self._connection.execute("REPLACE INTO subscription VALUES (?, ?, ?, ?)", (subscription, name, topic, proto))
        self.note_id(subscription)

    def delete_subscription(self, subscription: int, topic: int) -> None:
        self._connection.execute("DELETE FROM subscription WHERE id = ?", (subscription,))
        self.drop_backlog(subscription, topic)

    def drop_backlog(self, subscription: int, topic: int) -> None:
        """The subscription holds no message any more."""
        self._connection.execute("DELETE FROM delivery WHERE subscription = ?", (subscription,))
        self.sweep(topic)

    def drop_acknowledged(self, subscription: int, topic: int) -> None:
        """The subscription retains nothing after its acknowledgement any more."""
        self._connection.execute("DELETE FROM delivery WHERE subscription = ? AND acknowledged", (subscription,))
        self.sweep(topic)

    def put_snapshot(self, snapshot: int, name: str, topic: int, cut: int, proto: bytes) -> None:
        self._connection.execute("REPLACE INTO snapshot VALUES (?, ?, ?, ?, ?)", (snapshot, name, topic, cut, proto))
        self.note_id(snapshot)

    def capture(self, snapshot: int, subscription: int) -> None:
        """The snapshot holds what the subscription has not acknowledged."""
        self._connection.execute(
            "INSERT INTO captured SELECT message, ? FROM delivery WHERE subscription = ? AND NOT acknowledged",
            (snapshot, subscription),
        )

    def delete_snapshot(self, snapshot: int, topic: int) -> None:
        self._connection.execute("DELETE FROM snapshot WHERE id = ?", (snapshot,))
        self._connection.execute("DELETE FROM captured WHERE snapshot = ?", (snapshot,))
        self.sweep(topic)

    def append(self, topic: int, messages: Sequence[NewMessage], deliveries: Iterable[tuple[int, int]]) -> None:
        """Write messages of one topic, and a (message, subscription) pair for each that is to be delivered."""
        self._connection.executemany(
            "INSERT INTO message VALUES (?, ?, ?, ?, ?, ?)",
            [(m.message, topic, m.published_ns, len(m.body), m.key, m.body) for m in messages],
        )
        self._connection.executemany("INSERT INTO delivery VALUES (?, ?, 0, 0)", deliveries)
        self.note_id(messages[-1].message)

    def acknowledge(self, subscription: int, messages: Sequence[int], *, retain: bool = False) -> None:
        """The subscription is done with these; `retain` keeps them for a later seek."""
        pairs = [(message, subscription) for message in messages]
        if retain:
            self._connection.executemany(
                "UPDATE delivery SET acknowledged = 1 WHERE message = ? AND subscription = ?", pairs
            )
            return
        self._connection.executemany("DELETE FROM delivery WHERE message = ? AND subscription = ?", pairs)
        self._connection.executemany(f"DELETE FROM message WHERE id = ? {_UNHELD}", [(m,) for m in messages])

    def note_attempts(self, subscription: int, attempts: Sequence[tuple[int, int]]) -> None:
        """Write down (message, deliveries so far)."""
        self._connection.executemany(
            "UPDATE delivery SET attempts = ? WHERE message = ? AND subscription = ?",
            [(count, message, subscription) for message, count in attempts],
        )

    def sweep(self, topic: int) -> None:
        """Delete the topic's messages that nothing holds."""
        self._connection.execute(f"DELETE FROM message WHERE topic = ? {_UNHELD}", (topic,))

    def expire_retained(self, topic: int, before_ns: int) -> None:
        """Delete what only the topic's own retention holds and is older than it."""
        self._connection.execute(
            f"DELETE FROM message WHERE topic = ? AND published_ns < ? {_UNHELD_BY_OTHERS}",
            (topic, before_ns),
        )

    def expire_acknowledged(self, subscription: int, topic: int, before_ns: int) -> None:
        """Delete what the subscription retained after its acknowledgement and is older than its retention."""
        gone = self._connection.execute(
            "DELETE FROM delivery WHERE subscription = ? AND acknowledged AND message IN "
            "(SELECT id FROM message WHERE topic = ? AND published_ns < ?) RETURNING message",
            (subscription, topic, before_ns),
        ).fetchall()
        self._connection.executemany(f"DELETE FROM message WHERE id = ? {_UNHELD}", gone)

    def backlog(self, subscription: int) -> list[StoredMessage]:
        """What the subscription has not acknowledged, oldest first."""
        rows = self._connection.execute(
            "SELECT m.id, m.published_ns, m.size, m.ordering_key, d.attempts FROM delivery d "
            "JOIN message m ON m.id = d.message WHERE d.subscription = ? AND NOT d.acknowledged ORDER BY m.id",
            (subscription,),
        )
        return [StoredMessage(*row) for row in rows]

    def seek(
        self,
        subscription: int,
        topic: int,
        *,
        since_ns: int | None,
        snapshot: tuple[int, int] | None,
        wanted: Callable[[bytes], bool] | None,
        retain: bool,
    ) -> list[StoredMessage]:
        """Set the backlog to what was published since a time, or to a snapshot (id, cut); returns it.

        Takes in what the topic still has and the subscription's filter (`wanted`, given a body) lets through.
        """
        db = self._connection
        if snapshot is None:
            candidates = "topic = ? AND published_ns >= ?"
            arguments: tuple[int, ...] = (topic, since_ns or 0)
            known = "SELECT message FROM delivery WHERE subscription = ?"
            if not db.execute("SELECT retention_ns FROM topic WHERE id = ?", (topic,)).fetchone()[0]:
                # Only what this subscription itself holds can come back.
                candidates += f" AND id IN ({known})"
                arguments += (subscription,)
        else:
            candidates = "topic = ? AND (id > ? OR id IN (SELECT message FROM captured WHERE snapshot = ?))"
            arguments = (topic, snapshot[1], snapshot[0])
        if wanted is None:
            chosen = [row[0] for row in db.execute(f"SELECT id FROM message WHERE {candidates} ORDER BY id", arguments)]
        else:
            rows = db.execute(f"SELECT id, body FROM message WHERE {candidates} ORDER BY id", arguments)
            chosen = [message for message, body in rows if wanted(body)]
        if retain:
            db.execute("UPDATE delivery SET acknowledged = 1 WHERE subscription = ?", (subscription,))
        else:
            db.execute("DELETE FROM delivery WHERE subscription = ?", (subscription,))
        db.executemany("REPLACE INTO delivery VALUES (?, ?, 0, 0)", [(message, subscription) for message in chosen])
        self.sweep(topic)
        return self.backlog(subscription)

    def forget_deleted_topics(self) -> None:
        """Drop the rows of deleted topics that nothing refers to any more."""
        self._connection.execute(
            "DELETE FROM topic WHERE name IS NULL AND id NOT IN (SELECT topic FROM subscription) "
            "AND id NOT IN (SELECT topic FROM snapshot)"
        )


_UNHELD_BY_OTHERS = (
    "AND NOT EXISTS (SELECT 1 FROM delivery WHERE delivery.message = message.id) "
    "AND NOT EXISTS (SELECT 1 FROM captured WHERE captured.message = message.id) "
    "AND NOT EXISTS (SELECT 1 FROM snapshot WHERE snapshot.topic = message.topic AND snapshot.cut < message.id)"
)
_UNHELD = _UNHELD_BY_OTHERS + (
    " AND NOT EXISTS (SELECT 1 FROM topic WHERE topic.id = message.topic AND topic.retention_ns IS NOT NULL)"
)

Operation = Callable[[Operations], T]


class _Signal(Enum):
    """To the writer thread, in the place of an operation."""

    TIDY = "tidy"
    STOP = "stop"


class Log:
    """The open file: one writer thread and one reading connection.

    `post` runs a callable on the owner's thread (an event loop's `call_soon_threadsafe`); `failed` is called there once
    if the disk refuses a write, after which nothing more is written: what was reported stands, the rest is unreported.
    """

    def __init__(
        self,
        folder: Path,
        *,
        durability: Durability,
        post: Callable[[Callable[[], None]], object],
        failed: Callable[[LogError], None],
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "pubsub.sqlite"
        self._post = post
        self._failed = failed
        self._lock = _lock_folder(folder)
        self._durability = durability
        self._writing = self._connect()
        self._prepare()
        self._reading = self._connect()
        self._queue: queue.SimpleQueue[tuple[Operation[Any], Callable[[Any], None]] | _Signal] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="log-writer", daemon=True)

    def contents(self) -> Contents:
        """What the log holds. Call before `start`."""
        meta = dict(self._writing.execute("SELECT key, value FROM meta").fetchall())
        return Contents(
            instance=meta["instance"],
            next_id=meta["next_id"],
            topics=[StoredResource(*row) for row in self._writing.execute("SELECT id, name, proto FROM topic")],
            subscriptions=[
                StoredResource(*row) for row in self._writing.execute("SELECT id, name, proto, topic FROM subscription")
            ],
            snapshots=[
                StoredResource(*row)
                for row in self._writing.execute("SELECT id, name, proto, topic, cut FROM snapshot")
            ],
        )

    def backlog(self, subscription: int) -> list[StoredMessage]:
        """What the subscription has not acknowledged, oldest first. Call before `start`."""
        return Operations(self._writing).backlog(subscription)

    def start(self) -> None:
        """Start writing."""
        self._writer.start()

    def submit(self, operation: Operation[T], done: Callable[[T], None]) -> None:
        """Have `operation` committed; `done` gets its result on the owner's thread, after those submitted before it."""
        self._queue.put((operation, done))

    def tidy(self) -> None:
        """Have spare space given back to the file system. The writer also does so on its own while it is busy."""
        self._queue.put(_Signal.TIDY)

    def bodies(self, messages: Sequence[int]) -> dict[int, bytes]:
        """The bodies of those of `messages` that are still there. Blocks; one caller at a time, on any thread."""
        found: dict[int, bytes] = {}
        for message in messages:
            row = self._reading.execute("SELECT body FROM message WHERE id = ?", (message,)).fetchone()
            if row is not None:
                found[message] = row[0]
        return found

    def close(self) -> None:
        """Commit what is queued, fold the write-ahead log into the file and close it."""
        self._queue.put(_Signal.STOP)
        if self._writer.is_alive():
            self._writer.join()
        self._reading.close()
        self._writing.close()
        os.close(self._lock)

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=30)
        connection.execute("PRAGMA busy_timeout = 30000")
        return connection

    def _prepare(self) -> None:
        db = self._writing
        try:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, FORMAT):
                raise LogError(
                    f"{self.path} has format {version}, this server reads {FORMAT}: start it on another folder, or "
                    "with the version that wrote it"
                )
            db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA wal_autocheckpoint = 0")
            db.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
            db.execute(f"PRAGMA synchronous = {'FULL' if self._durability is Durability.POWER else 'NORMAL'}")
            if version == 0:
                db.executescript(
                    f"BEGIN; {_SCHEMA} INSERT INTO meta VALUES ('next_id', 1), ('instance', '{secrets.token_hex(4)}'); "
                    f"PRAGMA user_version = {FORMAT}; COMMIT;"
                )
        except sqlite3.Error as error:
            raise LogError(f"{self.path} cannot be opened ({error}): move it away to start afresh") from error

    def _write(self) -> None:
        operations = Operations(self._writing)
        running = True
        while running:
            batch = [self._queue.get()]
            while len(batch) < MAX_GROUP:
                try:
                    batch.append(self._queue.get_nowait())
                except queue.Empty:
                    break
            running = _Signal.STOP not in batch
            work = [item for item in batch if not isinstance(item, _Signal)]
            try:
                if work:
                    self._writing.execute("BEGIN IMMEDIATE")
                    results = [(done, operation(operations)) for operation, done in work]
                    self._writing.execute("COMMIT")
                    self._post(partial(_report, results))
                if len(work) < len(batch) or self._wal_bytes() > WAL_BYTES:
                    self._tidy(last=not running)
            except sqlite3.Error as error:
                failure = LogError(f"cannot write {self.path} ({error}): free some disk space and start again")
                self._post(partial(self._failed, failure))
                return

    def _wal_bytes(self) -> int:
        try:
            return os.stat(f"{self.path}-wal").st_size
        except FileNotFoundError:
            return 0

    def _tidy(self, *, last: bool) -> None:
        """Give spare space back and fold the write-ahead log into the file. Runs between transactions."""
        db = self._writing
        while True:
            spare = db.execute("PRAGMA freelist_count").fetchone()[0] * PAGE_BYTES - SPARE_BYTES
            if spare > 0:
                # As a script: it gives back one page per step, and `execute` takes one step only.
                db.executescript(f"PRAGMA incremental_vacuum({min(spare, VACUUM_BYTES) // PAGE_BYTES + 1})")
            if self._wal_bytes():
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            if spare <= 0 or last or not self._queue.empty():
                return


def _report(results: list[tuple[Callable[[Any], None], Any]]) -> None:
    for done, result in results:
        done(result)


def _lock_folder(folder: Path) -> int:
    """Hold the folder against a second server, until the process ends however it ends."""
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise LogError(f"another server has {folder} open: stop it, or choose another --data folder") from error
    return handle
