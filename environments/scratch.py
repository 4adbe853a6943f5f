"""Temporary folders for what may be large: an index, a database.

Invariant: a folder does not outlive its process for long. A process that ends removes its own; that of one which was
killed is removed by the next that makes a folder of the same kind. A living process's is never removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_LOCK = ".lock"


class Scratch:
    """A folder of this process. Raises OSError if none can be made."""

    def __init__(self, kind: str) -> None:
        prefix = f"headrace-{kind}-"
        for other in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            _remove_if_left(other)
        self._folder = tempfile.TemporaryDirectory(prefix=prefix)
        self.path = Path(self._folder.name)
        # Locked under another name first: nobody finds a lock that its owner has not taken yet.
        self._lock = (self.path / f"{_LOCK}.new").open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(self._lock.name, self.path / _LOCK)

    def remove(self) -> None:
        """Remove it now; harmless if that was done."""
        self._folder.cleanup()
        self._lock.close()


def _remove_if_left(folder: Path) -> None:
    """Remove the folder if it is ours and nobody holds its lock: the kernel frees that when a process dies."""
    with contextlib.suppress(OSError):  # it has just been removed, or is another user's
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return
        with (folder / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
