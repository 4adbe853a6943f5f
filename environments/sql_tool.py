"""The tool with which the policy queries an SQLite database.

Invariant: no call changes the database, opens another file or outlives its limits. What SQLite or a limit says of a
query is an observation; only a database that could not be asked is the tool's fault.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from environments.scratch import Scratch
from environments.sqlite_pool import Query, Rows, SqlitePool
from environments.tools import Limits, Tool
from trajectories.storage import open_storage


@dataclass(frozen=True)
class SqlSettings(Limits):
    section: ClassVar[str] = "sql"
    database: str = ""
    """An SQLite file, by path or on gs://, from where each process fetches it. It must not change during the run."""
    rows: int = 50
    """Most rows of an answer."""
    cell_chars: int = 200
    """Most characters of a value."""
    memory_mb: int = 128
    """Most MiB that a query may take."""
    slots: int = 2
    """Queries at once in one worker process; the others wait."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(bool(self.database), "database", "name an SQLite file")
        self.require(self.rows >= 1, "rows", "be at least 1")
        self.require(self.cell_chars >= 1, "cell_chars", "be at least 1")
        self.require(8 <= self.memory_mb <= 1 << 16, "memory_mb", "lie between 8 and 65536")
        self.require(1 <= self.slots <= 64, "slots", "lie between 1 and 64")


class SqlTool:
    """Makes the tool; all episodes share the processes that answer. Raises ValueError if a local file is no database
    that can be read as it is."""

    def __init__(self, settings: SqlSettings) -> None:
        self.settings = settings
        self._fetched: Scratch | None = None
        self._pool: SqlitePool | None = None
        if not settings.database.startswith("gs://"):
            _check(Path(settings.database), settings.database)

    def prepare(self) -> None:
        """Fetch the database if it lies on gs://; once in each process, before the first call. May block. Raises
        ValueError and StorageError."""
        if self._pool is not None:
            return
        path = Path(self.settings.database)
        if self.settings.database.startswith("gs://"):
            folder, _, name = self.settings.database.rpartition("/")
            self._fetched = Scratch("sql")
            path = self._fetched.path / "database"
            path.write_bytes(open_storage(folder).read(name))
            _check(path, self.settings.database)
        self._pool = SqlitePool(path, memory_mb=self.settings.memory_mb, slots=self.settings.slots)

    def tool(self) -> Tool:
        """For any number of episodes."""
        self.prepare()
        return self.described()

    def described(self) -> Tool:
        """The tool as the policy is shown it; `prepare` must come before its first call."""
        settings = self.settings

        async def sql(query: str) -> str:
            pool = self._pool
            assert pool is not None
            asked = Query(query, (), settings.rows, settings.output_chars, settings.cell_chars)
            return shown(await pool.query(asked, settings.timeout_s), settings.output_chars)

        tool = Tool(
            name="sql",
            description="Runs one SQLite query, which can only read, and answers with CSV. "
            "`SELECT name, sql FROM sqlite_master` shows the tables.",
            parameters={
                "type": "object",
                "properties": {"query": {"type": "string", "description": "a SELECT in SQLite's dialect"}},
                "required": ["query"],
            },
            function=sql,
        ).limited(settings)
        return dataclasses.replace(tool, timeout_s=settings.timeout_s + 2.0)  # the pool's own limit comes first

    def close(self) -> None:
        """End the processes and remove what was fetched."""
        if self._pool is not None:
            self._pool.close()
        if self._fetched is not None:
            self._fetched.remove()


def shown(found: Rows, limit: int) -> str:
    """As CSV, NULL written out, in about `limit` characters."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(found.columns)
    fitting = 0
    for row in found.rows:
        before = text.tell()
        writer.writerow(["NULL" if value is None else value for value in row])
        if text.tell() > limit - len(_MORE) and fitting:
            text.seek(before)
            text.truncate()
            break
        fitting += 1
    if not found.rows:
        text.write("(no rows)\n")
    elif found.more or fitting < len(found.rows):
        text.write(_MORE.format(fitting))
    return text.getvalue().removesuffix("\n")


_MORE = "(only the first {} rows)\n"


def _check(path: Path, named: str) -> None:
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise ValueError(f"sql.database must name a readable file, found {named!r}: {error.strerror}") from error
    if head != b"SQLite format 3\0":
        raise ValueError(f"sql.database must name an SQLite database, found {named!r}, which is none")
    log = path.with_name(path.name + "-wal")
    if log.exists() and os.path.getsize(log):
        raise ValueError(
            f"sql.database must hold all its content in one file, found {log.name} beside {named!r}: close the "
            "programs that write to it, or run `PRAGMA wal_checkpoint(TRUNCATE)`"
        )
