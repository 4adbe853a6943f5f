"""Where runs keep their files: a folder, or a bucket on Google Cloud Storage, behind one small interface.

Invariants: a reader sees a whole object or none; a write with a precondition happens only if the object still has that
generation, however many processes race for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


_UMASK = _umask()
"""Read once: asking for it sets it, which is no business of a thread."""


class StorageError(OSError):
    """A storage operation failed."""


class NotFound(StorageError):
    """There is no object of that name."""


class PreconditionFailed(StorageError):
    """The object has another generation than the writer expected: somebody else wrote it."""


class Storage(Protocol):
    """Named bytes. Names are relative, with '/' between their parts; generations are positive and never repeat."""

    @property
    def url(self) -> str:
        """The folder path or gs:// address that names are relative to."""
        ...

    def read(self, name: str) -> bytes:
        """The object's bytes; raises NotFound."""
        ...

    def read_with_generation(self, name: str) -> tuple[bytes, int]:
        """The object's bytes and generation, of one moment; raises NotFound."""
        ...

    def write(self, name: str, data: bytes, *, if_generation: int | None = None) -> int:
        """Write the whole object and return its generation.

        With `if_generation`, only if the object now has that generation (0: if there is none); else raises
        PreconditionFailed.
        """
        ...

    def exists(self, name: str) -> bool:
        """Whether there is an object of that name."""
        ...

    def list(self, prefix: str = "") -> list[str]:
        """Sorted names of all objects that begin with `prefix`, at any depth."""
        ...

    def delete(self, name: str) -> None:
        """Remove the object; harmless if there is none."""
        ...

    def join(self, prefix: str) -> Storage:
        """The storage whose names are relative to `prefix` within this one."""
        ...


def open_storage(url: str) -> Storage:
    """`gs://bucket/prefix` or the path of a folder, which is made when the first object is written."""
    if url.startswith("gs://"):
        bucket, _, prefix = url.removeprefix("gs://").partition("/")
        if not bucket:
            raise ValueError(f"a storage address is 'gs://bucket/prefix' or a folder, found {url!r}")
        return GoogleStorage(bucket, prefix)
    if "://" in url:
        raise ValueError(f"a storage address is 'gs://bucket/prefix' or a folder, found {url!r}")
    return FolderStorage(Path(url))


class FolderStorage:
    """A folder. The generation is the file's modification time in nanoseconds, made to grow with every write."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    @property
    def url(self) -> str:
        return str(self._root)

    def read(self, name: str) -> bytes:
        return self.read_with_generation(name)[0]

    def read_with_generation(self, name: str) -> tuple[bytes, int]:
        try:
            with self._path(name).open("rb") as file:
                return file.read(), os.fstat(file.fileno()).st_mtime_ns
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise NotFound(f"{name} is not in {self.url}") from error

    def write(self, name: str, data: bytes, *, if_generation: int | None = None) -> int:
        path = self._path(name)
        descriptor, temporary = _temporary(path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            with self._lock():
                current = self._generation(path)
                if if_generation is not None and current != if_generation:
                    raise PreconditionFailed(
                        f"{name} in {self.url} has generation {current}, not {if_generation}: another process wrote it"
                    )
                generation = max(time.time_ns(), current + 1)
                os.utime(temporary, ns=(generation, generation))
                os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        return generation

    def exists(self, name: str) -> bool:
        return self._path(name).is_file()

    def list(self, prefix: str = "") -> list[str]:
        found = []
        for folder, _, files in os.walk(self._root):
            for file in files:
                if not file.startswith("."):
                    found.append(Path(folder, file).relative_to(self._root).as_posix())
        return sorted(name for name in found if name.startswith(prefix))

    def delete(self, name: str) -> None:
        path = self._path(name)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
        with contextlib.suppress(OSError):
            if path.parent != self._root:
                path.parent.rmdir()

    def join(self, prefix: str) -> Storage:
        return FolderStorage(self._root / _checked(prefix))

    def _path(self, name: str) -> Path:
        return self._root / _checked(name)

    @staticmethod
    def _generation(path: Path) -> int:
        try:
            return path.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Serialises the writers of all processes; freed by the kernel when a process dies."""
        with (self._root / ".storage.lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


@contextlib.contextmanager
def _as_storage_error(what: str) -> Iterator[None]:
    """What the Google clients raise, once their own retries are over, as StorageError: callers know no other."""
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import TransportError
    from requests.exceptions import RequestException

    try:
        yield
    except (GoogleAPIError, TransportError, RequestException) as error:
        raise StorageError(f"{what}: {error}") from error


class GoogleStorage:
    """A prefix of a bucket, through google-cloud-storage. Honours STORAGE_EMULATOR_HOST."""

    TIMEOUT_S = 60.0

    def __init__(self, bucket: str, prefix: str, client: Any = None) -> None:
        self._prefix = prefix.strip("/")
        self._bucket_name = bucket
        self._client = client or _google_client()
        self._bucket = self._client.bucket(bucket)

    @property
    def url(self) -> str:
        return f"gs://{self._bucket_name}/{self._prefix}".rstrip("/")

    def read(self, name: str) -> bytes:
        return self.read_with_generation(name)[0]

    def read_with_generation(self, name: str) -> tuple[bytes, int]:
        from google.api_core.exceptions import NotFound as Missing

        blob = self._bucket.blob(self._key(name))
        with _as_storage_error(f"reading {name} in {self.url}"):
            try:
                data: bytes = blob.download_as_bytes(timeout=self.TIMEOUT_S)
            except Missing as error:
                raise NotFound(f"{name} is not in {self.url}") from error
        return data, int(blob.generation)

    def write(self, name: str, data: bytes, *, if_generation: int | None = None) -> int:
        from google.api_core.exceptions import PreconditionFailed as Refused

        blob = self._bucket.blob(self._key(name))
        with _as_storage_error(f"writing {name} in {self.url}"):
            try:
                blob.upload_from_string(
                    data,
                    content_type="application/octet-stream",
                    if_generation_match=if_generation,
                    timeout=self.TIMEOUT_S,
                )
            except Refused as error:
                raise PreconditionFailed(
                    f"{name} in {self.url} does not have generation {if_generation}: another process wrote it"
                ) from error
        return int(blob.generation)

    def exists(self, name: str) -> bool:
        with _as_storage_error(f"looking for {name} in {self.url}"):
            return bool(self._bucket.blob(self._key(name)).exists(timeout=self.TIMEOUT_S))

    def list(self, prefix: str = "") -> list[str]:
        base = f"{self._prefix}/" if self._prefix else ""
        with _as_storage_error(f"listing {self.url}"):
            blobs = self._client.list_blobs(self._bucket, prefix=base + prefix, timeout=self.TIMEOUT_S)
            return sorted(blob.name.removeprefix(base) for blob in blobs)

    def delete(self, name: str) -> None:
        from google.api_core.exceptions import NotFound as Missing

        with _as_storage_error(f"deleting {name} in {self.url}"), contextlib.suppress(Missing):
            self._bucket.blob(self._key(name)).delete(timeout=self.TIMEOUT_S)

    def join(self, prefix: str) -> Storage:
        return GoogleStorage(self._bucket_name, self._key(prefix), self._client)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{_checked(name)}".lstrip("/")


def _temporary(folder: Path) -> tuple[int, str]:
    """A new file in `folder`, which is made first; `delete` in another process may remove it in between."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            descriptor, path = tempfile.mkstemp(prefix=".writing-", dir=folder)
            # mkstemp's files are their owner's alone; these are as readable as any file that the user writes.
            os.fchmod(descriptor, 0o666 & ~_UMASK)
            return descriptor, path


def _google_client() -> Any:
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage

    if os.environ.get("STORAGE_EMULATOR_HOST"):
        return storage.Client(project="local-project", credentials=AnonymousCredentials())
    return storage.Client()


def _checked(name: str) -> str:
    parts = name.split("/")
    if not name or name.startswith("/") or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"an object's name is relative, like 'adapters/3.1/manifest.json'; found {name!r}")
    return name
