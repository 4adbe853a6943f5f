"""The place where a call runs: namespaces of its own, and a root folder with nothing in it but what it may read.

Invariant: no mount made here is seen outside, every one but a call's own folder is read-only, and all of them are gone
when the fork server is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from environments.sandbox import locks

_libc = ctypes.CDLL(None, use_errno=True)

_NEW_USER = 0x10000000
_NEW_OTHERS = 0x20000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000  # mounts, host name, IPC, processes, network
_NOSUID, _NODEV, _NOEXEC, _RDONLY, _BIND, _REC, _PRIVATE = 2, 4, 8, 1, 0x1000, 0x4000, 1 << 18
_SET_RDONLY, _RECURSIVE, _EMPTY_PATH = 1, 0x8000, 0x1000
_DETACH = 2
_BASE = "/tmp"  # exists everywhere; only the fork server's own view of it is covered
FOLDER = "/work"
"""Where a call starts: the only folder it can write to."""


def _call(name: str, *arguments: object) -> int:
    result: int = getattr(_libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    encoded = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    try:
        _call("mount", *encoded)
    except OSError as error:
        raise OSError(error.errno, f"mounting {kind or source} on {target}: {os.strerror(error.errno or 0)}") from None


def _read_only(target: str, recursive: bool) -> None:
    attributes = struct.pack("=QQQQ", _SET_RDONLY | _NOSUID | _NODEV, 0, 0, 0)
    locks.system_call(442, -100, target.encode(), _RECURSIVE if recursive else 0, attributes, 32)  # mount_setattr


def leave(user: int) -> None:
    """Namespaces of one's own for everything; the next child is the first process of the new one. Raises OSError.

    Where that takes a privilege that is not there, a user namespace of one's own lends it. Root first becomes `user`,
    so that what it maps is not root.
    """
    try:
        _call("unshare", _NEW_OTHERS)
        return
    except PermissionError:
        if os.geteuid() == 0:
            locks.become(user)
            locks.prctl(4, 1)  # PR_SET_DUMPABLE: or else the files below would still be root's
    inside, outside_user, outside_group = user, os.geteuid(), os.getegid()
    _call("unshare", _NEW_OTHERS | _NEW_USER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{inside} {outside_user} 1")
    Path("/proc/self/gid_map").write_text(f"{inside} {outside_group} 1")


@dataclass(frozen=True)
class Room:
    """One call's root folder; a call after the other lives in it."""

    root: str
    user: int
    """Owner of its folder."""
    folder_bytes: int

    def build(self, sources: Mapping[str, int], hidden: Sequence[str]) -> None:
        """Bind `sources` (path -> descriptor), read-only and at the same path; of `hidden` folders below them nothing
        shows but what is a source itself; make the folder."""
        inside = [path for path in sources if any(path.startswith(cover + "/") for cover in hidden)]
        for path in sources:
            if path not in inside:
                self._bind(path, sources[path])
        covers = [self.root + path for path in hidden if os.path.isdir(self.root + path)]
        for cover in covers:
            _mount("none", cover, "tmpfs", _NOSUID | _NODEV | _NOEXEC, "size=1m,mode=0755")
        for path in inside:
            self._bind(path, sources[path])
        for cover in covers:
            _read_only(cover, recursive=False)
        os.makedirs(self.root + FOLDER)
        self._mount_folder()

    def _bind(self, path: str, descriptor: int) -> None:
        target, source = self.root + path, f"/proc/self/fd/{descriptor}"
        if not os.path.exists(target):  # or else a folder above is bound already
            if os.path.isdir(source):
                os.makedirs(target)
            else:
                os.makedirs(os.path.dirname(target), exist_ok=True)
                Path(target).touch()
        _mount(source, target, "", _BIND | _REC)
        _read_only(target, recursive=True)

    def _mount_folder(self) -> None:
        options = f"size={self.folder_bytes},nr_inodes=1024,mode=0700,uid={self.user},gid={self.user}"
        _mount("none", self.root + FOLDER, "tmpfs", _NOSUID | _NODEV | _NOEXEC, options)

    def used(self) -> bool:
        """Whether the last call left anything in the folder."""
        return bool(os.listdir(self.root + FOLDER))

    def renew(self) -> None:
        """A fresh folder in place of what a call left behind, however much that is."""
        _call("umount2", (self.root + FOLDER).encode(), _DETACH)
        self._mount_folder()

    def enter(self) -> None:
        os.chroot(self.root)
        os.chdir(FOLDER)


def build(users: Sequence[int], folder_bytes: int, sources: Sequence[str], hidden: Sequence[str]) -> list[Room]:
    """A room for each of `users`. For the first process of namespaces that `leave` made. Raises OSError."""
    _mount("none", "/", "", _REC | _PRIVATE)
    rooms = [Room(f"{_BASE}/{index}", user, folder_bytes) for index, user in enumerate(users)]
    with contextlib.ExitStack() as opened:
        held: dict[str, int] = {}
        for path in sources:  # before `_BASE` covers some of them
            held[path] = os.open(path, os.O_PATH | os.O_CLOEXEC)
            opened.callback(os.close, held[path])
        _mount("none", _BASE, "tmpfs", _NOSUID | _NODEV | _NOEXEC, "size=4m,mode=0755")
        for room in rooms:
            room.build(held, hidden)
    _read_only(_BASE, recursive=False)
    return rooms
