"""The tool with which the policy searches a corpus: BM25 by SQLite's FTS5.

Invariant: each process indexes the corpus once, in a file of bounded size and with little memory; all episodes share
it. A document that cannot be read is left out and counted, a corpus of such documents is refused.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import io
import json
import logging
import re
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO, ClassVar

from environments.scratch import Scratch
from environments.sqlite_pool import Query, SqlitePool
from environments.tools import Limits, Tool, ToolError, describe
from trajectories.storage import FolderStorage, Storage, open_storage

log = logging.getLogger(__name__)


class Tokenizer(StrEnum):
    """How text becomes terms; see https://sqlite.org/fts5.html#tokenizers."""

    ENGLISH = "porter unicode61"
    """Words without their English endings."""
    WORDS = "unicode61"
    """Words, without case and accents."""
    TRIGRAMS = "trigram"
    """Three letters each, for languages that do not part words; shorter terms find nothing."""


@dataclass(frozen=True)
class SearchSettings(Limits):
    section: ClassVar[str] = "search"
    corpus: str = ""
    """A file, or a folder of files, by path or on gs://. A line of `.jsonl` is a document, an object with `text` and,
    if it likes, `id` and `title`; so is a paragraph of `.txt` or `.md`."""
    results: int = 5
    """Most documents of an answer."""
    snippet_chars: int = 400
    """Most characters that are shown of a document, around what was found."""
    tokenizer: Tokenizer = Tokenizer.ENGLISH
    """How text becomes terms."""
    document_chars: int = 100_000
    """Most characters of a document; the rest is not indexed."""
    index_mb: int = 4096
    """Most MiB of the index, which holds the documents too: a file in the temporary folder of each process."""
    slots: int = 2
    """Searches at once in one worker process; the others wait."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer not in list(Tokenizer):
            raise ValueError(f"search.tokenizer must be one of {', '.join(Tokenizer)}, found {self.tokenizer!r}")
        self.require(bool(self.corpus), "corpus", "name a file or a folder")
        self.require(1 <= self.results <= 100, "results", "lie between 1 and 100")
        self.require(1 <= self.snippet_chars <= 100_000, "snippet_chars", "lie between 1 and 100000")
        self.require(1 <= self.document_chars <= 200_000, "document_chars", "lie between 1 and 200000")
        self.require(self.index_mb >= 1, "index_mb", "be at least 1")
        self.require(1 <= self.slots <= 64, "slots", "lie between 1 and 64")


@dataclass(frozen=True, slots=True)
class Corpus:
    """What was indexed."""

    documents: int
    left_out: int
    """Lines that are no document."""
    why: str
    """The first of them, and what is wrong with it."""


class SearchTool:
    """Makes the tool. Raises ValueError if a local corpus is not there or begins with anything but documents."""

    def __init__(self, settings: SearchSettings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._folder: Scratch | None = None
        self._built: concurrent.futures.Future[SqlitePool] | None = None
        self.corpus: Corpus | None = None
        if not settings.corpus.startswith("gs://"):
            if not Path(settings.corpus).exists():
                raise ValueError(f"search.corpus must name a file or a folder that is there, found {settings.corpus!r}")
            _look_into(settings)

    def prepare(self) -> None:
        """Index the corpus, once in each process. Blocks until that is done; raises ValueError and StorageError."""
        self._start().result()

    def tool(self) -> Tool:
        """For any number of episodes. Without `prepare`, a thread begins to index and the first calls wait for it.
        Raises what `prepare` does if that has failed, so that the episode fails before the policy has said anything."""
        built = self._start()
        if built.done():
            built.result()
        return self.described()

    def described(self) -> Tool:
        """The tool as the policy is shown it; starts nothing before it is called."""
        settings = self.settings

        async def search(query: str) -> str:
            asked = _query(query, settings)
            loop = asyncio.get_running_loop()
            deadline = loop.time() + settings.timeout_s
            pool = await asyncio.shield(asyncio.wrap_future(self._start()))
            found = await pool.query(asked, max(0.05, deadline - loop.time()))
            return shown(found.rows, settings)

        tool = Tool(
            name="search",
            description=f"Finds the {settings.results} documents that fit the words of a query best.",
            parameters={"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
            function=search,
        ).limited(settings)
        return dataclasses.replace(tool, timeout_s=settings.timeout_s + 2.0)  # the pool's own limit comes first

    def close(self) -> None:
        """End the processes and remove the index."""
        with self._lock:
            built, folder = self._built, self._folder
        if built is not None and built.exception() is None:
            built.result().close()
        if folder is not None:
            folder.remove()

    def _start(self) -> concurrent.futures.Future[SqlitePool]:
        with self._lock:
            if self._built is None:
                self._built = concurrent.futures.Future()
                threading.Thread(target=self._build, args=(self._built,), name="search-index", daemon=True).start()
            return self._built

    def _build(self, built: concurrent.futures.Future[SqlitePool]) -> None:
        try:
            self._folder = Scratch("search")
            path = self._folder.path / "index"
            began = time.monotonic()
            self.corpus = index(self.settings, path)
            seconds = time.monotonic() - began
            log.info(
                "search: indexed %d documents of %s in %.1f s", self.corpus.documents, self.settings.corpus, seconds
            )
            built.set_result(SqlitePool(path, memory_mb=256, slots=self.settings.slots))
        except BaseException as error:
            built.set_exception(error)


# --- asking -----------------------------------------------------------------------------------------------------------

_MOST_TERMS = 32
_SNIPPET_TOKENS = 64
"""As many as FTS5 shows at the most."""


def _query(text: str, settings: SearchSettings) -> Query:
    """Any of the words, the best first. Words are quoted: the query language of FTS5 is not for the policy."""
    words = list(dict.fromkeys(re.findall(r"\w+", text[:10_000].lower())))[:_MOST_TERMS]
    if not words:
        raise ToolError("the query has no words")
    return Query(
        f"SELECT id, title, snippet(documents, 2, char(2), char(3), '', {_SNIPPET_TOKENS}), text "
        "FROM documents WHERE documents MATCH ? ORDER BY rank LIMIT ?",
        (" OR ".join(f'"{word}"' for word in words), settings.results),
        rows=settings.results,
        chars=settings.results * (settings.document_chars + 1000),
        cell_chars=settings.document_chars,
    )


def shown(rows: list[list[str]], settings: SearchSettings) -> str:
    """Number, id and title of each document on a line, and the part of it that was found on the next."""
    if not rows:
        return "nothing was found"
    lines = []
    for number, (name, title, marked, text) in enumerate(rows, 1):
        lines += [f"{number}. [{name}] {title}".rstrip(), _around(marked, text, settings.snippet_chars)]
    return "\n".join(lines)


def _around(marked: str, text: str, limit: int) -> str:
    """At most `limit` characters of `text`, on one line, about the first word that was found: FTS5 has marked it in a
    part of the text."""
    part = marked.replace("\2", "").replace("\3", "")
    word = max(0, text.find(part)) + max(0, marked.find("\2"))
    start = max(0, min(word - limit // 3, len(text) - limit))
    cut = text[start : start + limit]
    return " ".join(f"{'…' * (start > 0)}{cut}{'…' * (start + limit < len(text))}".split())


# --- indexing ---------------------------------------------------------------------------------------------------------

_KINDS = (".jsonl", ".txt", ".md")
_MOST_LINE = 4 << 20
"""Bytes; a longer line is no document."""
_MOST_LEFT_OUT = 0.1
"""Share of lines that are no documents."""
_FIRST_LINES = 100
"""Of a local corpus, looked at before a run begins."""


@dataclass(frozen=True, slots=True)
class Document:
    id: str
    title: str
    text: str


def index(settings: SearchSettings, path: Path) -> Corpus:
    """Write the index of the settings' corpus to `path`. Raises ValueError and StorageError."""
    documents = left_out = 0
    why = ""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.executescript(
            "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -16384; "
            f"PRAGMA max_page_count = {settings.index_mb << 8}; "
            "CREATE VIRTUAL TABLE documents "
            f"USING fts5(id UNINDEXED, title, text, tokenize = '{settings.tokenizer}'); BEGIN;"
        )
        try:
            for found in _documents(settings):
                if isinstance(found, str):
                    left_out, why = left_out + 1, why or found
                    continue
                documents += 1
                text = found.text[: settings.document_chars]
                connection.execute("INSERT INTO documents VALUES (?, ?, ?)", (found.id, found.title, text))
            connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if "full" not in str(error):
                raise
            raise ValueError(
                f"search.index_mb must hold the corpus: {settings.index_mb} MiB were full after {documents} documents"
            ) from error
    if not documents or left_out > _MOST_LEFT_OUT * (documents + left_out):
        raise _no_corpus(settings, documents, left_out, why)
    if left_out:
        log.warning("search: %d lines of %s are no documents; the first: %s", left_out, settings.corpus, why)
    return Corpus(documents, left_out, why)


def _look_into(settings: SearchSettings) -> None:
    """Raises ValueError where the first lines hold no document: an index would only find that out later."""
    bad: list[str] = []
    for found in _documents(settings):
        if not isinstance(found, str):
            return
        bad.append(found)
        if len(bad) == _FIRST_LINES:
            break
    raise _no_corpus(settings, 0, len(bad), bad[0] if bad else "")


def _no_corpus(settings: SearchSettings, documents: int, left_out: int, why: str) -> ValueError:
    return ValueError(
        f"search.corpus must hold documents, found {documents} in {settings.corpus!r}"
        + (f" and {left_out} lines that are none; the first: {why}" if left_out else "")
    )


def _documents(settings: SearchSettings) -> Iterator[Document | str]:
    """The corpus's documents, and what is wrong with those that are none."""
    for storage, name in _files(settings.corpus):
        read = _lines if name.endswith(".jsonl") else _paragraphs
        with _opened(storage, name) as file:
            yield from read(file, name)


def _files(corpus: str) -> list[tuple[Storage, str]]:
    if corpus.endswith(_KINDS):
        folder, _, name = corpus.rpartition("/")
        return [(open_storage(folder or ("/" if corpus.startswith("/") else ".")), name)]
    storage = open_storage(corpus)
    names = [name for name in storage.list() if name.endswith(_KINDS)]
    if not names:
        raise ValueError(f"search.corpus must hold files {', '.join(_KINDS)}, found none in {corpus!r}")
    return [(storage, name) for name in names]


def _opened(storage: Storage, name: str) -> BinaryIO:
    """A local file is read as it goes, an object on gs:// whole."""
    if isinstance(storage, FolderStorage):
        return (Path(storage.url) / name).open("rb")
    return io.BytesIO(storage.read(name))


def _numbered(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers; of one that is too long only what shows that it is."""
    number, long = 0, False
    while line := file.readline(_MOST_LINE + 1):
        ended = line.endswith(b"\n")
        if not long:
            number += 1
            yield number, line
        long = not ended


def _lines(file: BinaryIO, name: str) -> Iterator[Document | str]:
    for number, line in _numbered(file):
        if line.strip():
            try:
                yield _document(line, f"{name}:{number}")
            except (ValueError, RecursionError) as error:
                yield f"line {number} of {name}: {describe(error)[:200]}"


def _document(line: bytes, name: str) -> Document:
    """Raises ValueError."""
    if len(line) > _MOST_LINE:
        raise ValueError(f"it is longer than {_MOST_LINE} bytes")
    found = json.loads(line.decode())
    if not isinstance(found, dict) or not isinstance(found.get("text"), str):
        raise ValueError('it must be an object with a string "text"')
    title, given = found.get("title") or "", found.get("id")
    parts = (name if given is None else str(given), str(title), found["text"])
    for part in parts:
        part.encode()  # lone surrogates: UnicodeEncodeError
    return Document(parts[0][:200], " ".join(parts[1].split())[:200], parts[2])


def _paragraphs(file: BinaryIO, name: str) -> Iterator[Document | str]:
    gathered, size, start = list[bytes](), 0, 1
    for number, line in _numbered(file):
        if line.strip() and size < _MOST_LINE:
            start = start if gathered else number
            gathered.append(line)
            size += len(line)
        elif gathered:
            yield _paragraph(gathered, name, start)
            gathered, size = [], 0
    if gathered:
        yield _paragraph(gathered, name, start)


def _paragraph(lines: list[bytes], name: str, start: int) -> Document:
    return Document(f"{name}:{start}", "", b"".join(lines).decode("utf-8", "replace").strip())
