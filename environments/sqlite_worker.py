"""The process in which SQLite answers queries, one after the other, for `environments.sqlite_pool`.

Invariant: a query reads the one database and nothing else, and it ends: at its time limit by SQLite's own means, and
where SQLite does not look at the clock (one call of instr() may take a minute) with the process, by an alarm.

Lines of JSON: first the order on standard input, then queries there and their answers on standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import sys
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any

from environments.sandbox import locks

LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 1 << 20,  # bytes of one value or row
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 1 << 16,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1000,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 100,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 1_000_000,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
_PRAGMAS = {"data_version", "foreign_key_list", "index_info", "index_list", "index_xinfo", "table_info", "table_xinfo"}
"""Those that describe tables; `data_version` is what FTS5 asks for itself."""
FUNCTIONS = frozenset(
    """
    -> ->> abs acos acosh asin asinh atan atan2 atanh avg bm25 ceil ceiling changes char coalesce concat concat_ws cos
    cosh count cume_dist current_date current_time current_timestamp date datetime degrees dense_rank exp first_value
    floor format glob group_concat hex highlight if ifnull iif instr json json_array json_array_length json_each
    json_error_position json_extract json_group_array json_group_object json_insert json_object json_patch json_pretty
    json_quote json_remove json_replace json_set json_tree json_type json_valid julianday lag last_value lead length
    like likelihood likely ln log log10 log2 lower ltrim match max median min mod nth_value ntile nullif octet_length
    percent_rank percentile percentile_cont percentile_disc pi pow power printf quote radians random randomblob rank
    regexp replace round row_number rtrim sign sin sinh snippet soundex sqlite_version sqrt strftime string_agg substr
    substring subtype sum tan tanh time timediff total total_changes trim trunc typeof unhex unicode unistr unixepoch
    unlikely upper zeroblob
    """.split()  # noqa: SIM905 (a list of 130 strings reads worse)
)
"""All that may be called. Others load code (load_extension), take addresses (fts3_tokenizer) or tell of the host."""


def authorize(action: int, first: str | None, second: str | None, *_: object) -> int:
    """SQLite asks before it compiles a statement: reading is allowed, all else is not."""
    match action:
        case sqlite3.SQLITE_SELECT | sqlite3.SQLITE_READ | sqlite3.SQLITE_RECURSIVE:
            return sqlite3.SQLITE_OK
        case sqlite3.SQLITE_FUNCTION if (second or "").lower() in FUNCTIONS:
            return sqlite3.SQLITE_OK
        case sqlite3.SQLITE_PRAGMA if (first or "").lower() in _PRAGMAS:
            return sqlite3.SQLITE_OK
        case sqlite3.SQLITE_UPDATE if first == "sqlite_master":
            # SQLite asks so where a virtual table is opened. A real update fails: read-only, without writable_schema.
            return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def main() -> None:
    order = json.loads(sys.stdin.buffer.readline())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the end of standard input ends this
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _lock(order["path"], order["memory_mb"] << 20)
    while line := sys.stdin.buffer.readline():
        query = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, query["timeout_s"] + 0.2)
        try:
            answer = _answer(order["path"], query)
            text = json.dumps(answer)
        except MemoryError:
            text = json.dumps({"error": f"it needed more than {order['memory_mb']} MiB"})
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(text.encode() + b"\n")
        sys.stdout.buffer.flush()


def _lock(path: str, memory_bytes: int) -> None:
    """No memory beyond `memory_bytes` more, no writing to files, no new process, no file but the database."""
    "".encode("idna")  # loads what may otherwise be looked for later
    with open("/proc/self/statm") as file:
        own = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    locks.limit_resources(cpu_s=1 << 30, memory_bytes=own + memory_bytes, file_bytes=0)
    locks.prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
    # On top of it all, where the kernel has it: nothing that SQL may say opens another file.
    with contextlib.suppress(OSError):
        locks.restrict_files(locks.landlock_rules([path, "/dev/urandom"], [], None))


def _answer(path: str, query: Mapping[str, Any]) -> dict[str, Any]:
    deadline = time.monotonic() + query["timeout_s"]
    rows: list[list[Any]] = []
    room, more = query["chars"], False
    try:
        connection = sqlite3.connect(f"file:{urllib.parse.quote(path)}?mode=ro&immutable=1", uri=True)
        with contextlib.closing(connection):
            connection.text_factory = lambda data: data.decode("utf-8", "replace")
            connection.executescript(
                "PRAGMA query_only = 1; PRAGMA trusted_schema = 0; PRAGMA temp_store = MEMORY; PRAGMA mmap_size = 0;"
            )
            for limit, value in LIMITS.items():
                connection.setlimit(limit, value)
            connection.set_authorizer(authorize)
            connection.set_progress_handler(lambda: time.monotonic() > deadline, 2000)
            cursor = connection.execute(query["sql"], query["parameters"])
            if cursor.description is None:
                return {"error": "there is no query in it"}
            columns = [str(column[0])[:200] for column in cursor.description]
            for row in cursor:
                if len(rows) == query["rows"] or room < 0:
                    more = True
                    break
                shown = [_shown(value, query["cell_chars"]) for value in row]
                room -= sum(len(str(value)) + 1 for value in shown)
                rows.append(shown)
    except sqlite3.OperationalError as error:
        if str(error) == "interrupted":
            return {"error": f"it ran for longer than {query['timeout_s']:.3g} s"}
        return {"error": str(error)}
    except (sqlite3.Error, sqlite3.Warning, OverflowError, ValueError) as error:
        return {"error": str(error)}
    return {"columns": columns, "rows": rows, "more": more}


def _shown(value: Any, limit: int) -> Any:
    if isinstance(value, bytes):
        cut = f"… ({len(value)} bytes)" if len(value) > limit else ""
        return f"x'{value[:limit].hex()}'{cut}"
    if isinstance(value, str) and len(value) > limit:
        return f"{value[:limit]}… ({len(value)} characters)"
    return value
