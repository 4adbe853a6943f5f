"""What a process may no longer do: system calls, files, resources, privileges.

Invariant: every function here takes rights from the calling process for good, or raises OSError; none gives any.

Numbers and layouts are those of the Linux headers (asm/unistd.h, linux/filter.h, linux/seccomp.h, linux/landlock.h).
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def system_call(number: int, *arguments: object) -> int:
    """Raises OSError. Integers are passed as C longs, bytes and ctypes pointers as they are."""
    converted = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *converted), f"system call {number}")


def prctl(option: int, value: int = 0) -> int:
    zero = ctypes.c_ulong(0)
    return _checked(_libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero), f"prctl {option}")


# --- system calls -----------------------------------------------------------------------------------------------------


class Architecture(NamedTuple):
    audit: int
    """AUDIT_ARCH_*, which the kernel hands the filter with every call."""
    column: int
    """Where its numbers stand in the table below."""
    seccomp: int
    capset: int


ARCHITECTURES = {
    "x86_64": Architecture(0xC000003E, 0, 317, 126),
    "aarch64": Architecture(0xC00000B7, 1, 277, 91),
}


def architecture() -> Architecture:
    """This machine's. Raises OSError where there is no filter for it."""
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(f"there is a system-call filter for {' and '.join(ARCHITECTURES)}, this machine is {machine}")
    return ARCHITECTURES[machine]


_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "access": (21, None),
    "alarm": (37, None),
    "arch_prctl": (158, None),
    "brk": (12, 214),
    "chdir": (80, 49),
    "clock_getres": (229, 114),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "clone3": (435, 435),
    "close": (3, 57),
    "close_range": (436, 436),
    "copy_file_range": (326, 285),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "epoll_create": (213, None),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441),
    "epoll_wait": (232, None),
    "eventfd2": (290, 19),
    "execve": (59, 221),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "fadvise64": (221, 223),
    "fallocate": (285, 47),
    "fchdir": (81, 50),
    "fcntl": (72, 25),
    "fdatasync": (75, 83),
    "fstat": (5, 80),
    "fstatfs": (138, 44),
    "fsync": (74, 82),
    "ftruncate": (77, 46),
    "futex": (202, 98),
    "getcpu": (309, 168),
    "getcwd": (79, 17),
    "getdents64": (217, 61),
    "getegid": (108, 177),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getgroups": (115, 158),
    "getitimer": (36, 102),
    "getpgid": (121, 155),
    "getpgrp": (111, None),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "getrandom": (318, 278),
    "getresgid": (120, 150),
    "getresuid": (118, 148),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "getsid": (124, 156),
    "gettid": (186, 178),
    "gettimeofday": (96, 169),
    "getuid": (102, 174),
    "ioctl": (16, 29),
    "kill": (62, 129),
    "lseek": (8, 62),
    "lstat": (6, None),
    "madvise": (28, 233),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "munmap": (11, 215),
    "nanosleep": (35, 101),
    "newfstatat": (262, 79),
    "open": (2, None),
    "openat": (257, 56),
    "pause": (34, None),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "poll": (7, None),
    "ppoll": (271, 73),
    "pread64": (17, 67),
    "preadv": (295, 69),
    "prlimit64": (302, 261),
    "pselect6": (270, 72),
    "pwrite64": (18, 68),
    "pwritev": (296, 70),
    "read": (0, 63),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "readv": (19, 65),
    "recvfrom": (45, 207),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "restart_syscall": (219, 128),
    "rmdir": (84, None),
    "rseq": (334, 293),
    "rt_sigaction": (13, 134),
    "rt_sigpending": (127, 136),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigsuspend": (130, 133),
    "rt_sigtimedwait": (128, 137),
    "sched_getaffinity": (204, 123),
    "sched_yield": (24, 124),
    "select": (23, None),
    "sendfile": (40, 71),
    "sendto": (44, 206),
    "set_robust_list": (273, 99),
    "set_tid_address": (218, 96),
    "setitimer": (38, 103),
    "sigaltstack": (131, 132),
    "socketpair": (53, 199),
    "stat": (4, None),
    "statfs": (137, 43),
    "statx": (332, 291),
    "sysinfo": (99, 179),
    "tgkill": (234, 131),
    "time": (201, None),
    "times": (100, 153),
    "umask": (95, 166),
    "uname": (63, 160),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "utimensat": (280, 88),
    "write": (1, 64),
    "writev": (20, 66),
}
"""On x86_64 and aarch64; None where an architecture has no such call."""

_RUN = """
    brk clock_getres clock_gettime clock_nanosleep close exit exit_group fstat futex getpid getrandom getrusage gettid
    gettimeofday lseek madvise mremap munmap nanosleep newfstatat poll ppoll pread64 read readv restart_syscall rseq
    rt_sigaction rt_sigprocmask rt_sigreturn sched_getaffinity sched_yield set_robust_list set_tid_address sigaltstack
    stat lstat statx time uname write writev access faccessat faccessat2 readlink readlinkat getcwd getdents64
"""
"""What any program needs: its own memory, its own descriptors, clocks, a look at files."""

_INTERPRETER = """
    alarm chdir close_range dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait
    eventfd2 fadvise64 fchdir fdatasync fstatfs fsync ftruncate getcpu getegid geteuid getgid getgroups getitimer
    getpgid getpgrp getppid getresgid getresuid getrlimit getsid getuid pause pipe pipe2 preadv pselect6 pwrite64
    pwritev recvfrom rt_sigpending rt_sigsuspend rt_sigtimedwait select sendfile setitimer statfs sysinfo times umask
"""
"""What code in CPython may ask for besides: pipes, timers and signals of its own, polling."""

_FOLDER = """
    copy_file_range fallocate mkdir mkdirat rename renameat renameat2 rmdir unlink unlinkat utimensat
"""
"""Changing files by name: only where the folder that a call can reach is its own."""

_PROGRAM = "execve arch_prctl"
"""To become another program, which the rules for files choose."""

_PROT_EXEC, _MAP_ANONYMOUS = 0x4, 0x20
_OPEN_FOR_CHANGE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | 0o20000000  # the last bit is O_TMPFILE's own
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)  # F_DUPFD to F_SETLKW, F_DUPFD_CLOEXEC, F_GETPIPE_SZ; never F_SETOWN
_IOCTL = (0x5401, 0x5421, 0x541B, 0x5450, 0x5451)  # TCGETS, FIONBIO, FIONREAD, FIONCLEX, FIOCLEX
_AF_UNIX, _SOCK_STREAM, _SOCK_FLAGS = 1, 1, 0o2004000
_SELF = 0xFEEDF00D  # stands for the process id in the finished program

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _REFUSE, _KILL, _NO_SUCH_CALL = 0x7FFF0000, 0x00050000 | 1, 0x80000000, 0x00050000 | 38


class _Is(NamedTuple):
    """Low 32 bits of an argument, without those of `ignoring`, equal `value`."""

    argument: int
    value: int
    ignoring: int = 0


class _Lacks(NamedTuple):
    """None of these bits is set in the low 32 of an argument."""

    argument: int
    bits: int


class _Null(NamedTuple):
    """All 64 bits of an argument are 0."""

    argument: int


_Condition = _Is | _Lacks | _Null
_Instruction = tuple[int, int, int, int]


@dataclass(frozen=True)
class SystemCalls:
    """Which system calls stay allowed; every other answers EPERM (clone3 ENOSYS, so that libraries try clone)."""

    folder: bool
    """Whether files may be changed: right only if the process can reach no file but its own."""
    program: bool
    """Whether the process goes on as another program, instead of running code in this interpreter."""

    def rules(self) -> dict[str, list[list[_Condition]]]:
        """For every call its alternatives; one of them must hold, and all conditions of it. [[]] always holds."""
        always = [*_RUN.split(), *(_PROGRAM if self.program else _INTERPRETER).split()]
        always += _FOLDER.split() if self.folder else []
        rules: dict[str, list[list[_Condition]]] = {name: [[]] for name in always}
        opened_flags = {"open": 1, "openat": 2}
        for name, flags in opened_flags.items():
            rules[name] = [[] if self.folder else [_Lacks(flags, _OPEN_FOR_CHANGE)]]
        # memory is never writable and then executable: code comes from files only, and those cannot be changed
        rules["mmap"] = [[_Lacks(2, _PROT_EXEC)], [_Lacks(3, _MAP_ANONYMOUS), _Lacks(2, 0x2)]]
        rules["mprotect"] = [[_Lacks(2, _PROT_EXEC)]]
        rules["prlimit64"] = [[_Is(0, 0), _Null(2)]]
        rules["tgkill"] = [[_Is(0, _SELF)]]
        if not self.program:
            rules["kill"] = [[_Is(0, _SELF)]]
            rules["fcntl"] = [[_Is(1, command)] for command in _FCNTL]
            rules["socketpair"] = [[_Is(0, _AF_UNIX), _Is(1, _SOCK_STREAM, ignoring=_SOCK_FLAGS)]]  # for asyncio
            rules["sendto"] = [[_Null(4)]]
        rules["ioctl"] = [[_Is(1, command)] for command in _IOCTL]
        return rules

    def program_for(self, machine: Architecture) -> bytes:
        """The filter as `struct sock_filter[]`; `_SELF` stands where the process id belongs."""
        code: list[_Instruction] = [
            (_LOAD, 0, 0, 4),  # seccomp_data.arch
            (_EQUAL, 1, 0, machine.audit),
            (_RETURN, 0, 0, _KILL),
            (_LOAD, 0, 0, 0),  # seccomp_data.nr
        ]
        if machine.column == 0:  # the x32 calls share the architecture and have a bit of their own
            code += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _REFUSE)]
        for name, alternatives in sorted(self.rules().items()):
            number = _NUMBERS[name][machine.column]
            if number is not None:
                body = _body(alternatives)
                code += [(_EQUAL, 0, len(body), number), *body]
        no_clone3 = _NUMBERS["clone3"][machine.column]
        assert no_clone3 is not None
        code += [(_EQUAL, 0, 1, no_clone3), (_RETURN, 0, 0, _NO_SUCH_CALL), (_RETURN, 0, 0, _REFUSE)]
        return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _body(alternatives: list[list[_Condition]]) -> list[_Instruction]:
    """Ends in a return whatever the arguments are."""
    body: list[_Instruction] = []
    for conditions in alternatives:
        checks: list[_Instruction] = []
        for condition in conditions:
            at = 16 + 8 * condition.argument
            match condition:
                case _Is(_, value, ignoring):
                    checks.append((_LOAD, 0, 0, at))
                    if ignoring:
                        checks.append((_AND, 0, 0, 0xFFFFFFFF & ~ignoring))
                    checks.append((_EQUAL, 0, 1, value))
                case _Lacks(_, bits):
                    checks += [(_LOAD, 0, 0, at), (_ANY_BIT, 1, 0, bits)]
                case _Null():
                    for half in (at, at + 4):
                        checks += [(_LOAD, 0, 0, half), (_EQUAL, 0, 1, 0)]
        end = len(checks)
        aimed = [
            (op, jt and end - index, jf and end - index, k) if op in (_EQUAL, _ANY_BIT) else (op, jt, jf, k)
            for index, (op, jt, jf, k) in enumerate(checks)
        ]
        body += [*aimed, (_RETURN, 0, 0, _ALLOW)]
        if not conditions:
            return body
    return [*body, (_RETURN, 0, 0, _REFUSE)]


@dataclass(frozen=True)
class Filter:
    """A finished program, ready to be installed by a process that has just been forked."""

    template: bytes
    number: int
    """Of seccomp(2)."""
    holes: tuple[int, ...]

    @classmethod
    def of(cls, calls: SystemCalls) -> Filter:
        """Raises OSError where there is no filter for this machine or the kernel has none."""
        machine = architecture()
        prctl(21)  # PR_GET_SECCOMP: fails where the kernel knows no seccomp
        template = calls.program_for(machine)
        mark = struct.pack("=I", _SELF)
        holes = tuple(at for at in range(4, len(template), 8) if template[at : at + 4] == mark)
        return cls(template, machine.seccomp, holes)

    def install(self) -> None:
        """From here on. The process must have given up new privileges."""
        program = bytearray(self.template)
        for hole in self.holes:
            struct.pack_into("=I", program, hole, os.getpid())
        array = (ctypes.c_char * len(program)).from_buffer(program)
        header = struct.pack("@HP", len(program) // 8, ctypes.addressof(array))
        system_call(self.number, 1, 0, header)  # SECCOMP_SET_MODE_FILTER


# --- files ------------------------------------------------------------------------------------------------------------

_READ_FILE, _READ_DIR, _EXECUTE = 1 << 2, 1 << 3, 1 << 0
_OWN = (1 << 1) | _READ_FILE | _READ_DIR | (1 << 4) | (1 << 5) | (1 << 7) | (1 << 8) | (1 << 13) | (1 << 14)
"""write, read, remove and make files and folders, rename between folders, truncate; no links, devices or sockets."""
_ON_FILES = _READ_FILE | _EXECUTE | (1 << 1) | (1 << 14)


def landlock_version() -> int:
    """Raises OSError where the kernel has no Landlock or does not use it."""
    return system_call(444, None, 0, 1)


def landlock_rules(readable: Iterable[str], programs: Iterable[str], folder: str | None) -> int:
    """Descriptor of a Landlock ruleset: no file, no TCP, no abstract socket, no signal to others, but read below
    `readable`, execute `programs` and own `folder`. Raises OSError."""
    version = landlock_version()
    rights = (1 << 13) - 1
    for since, bit in ((2, 13), (3, 14), (5, 15)):
        rights |= (version >= since) << bit
    attributes = struct.pack("=QQQ", rights, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = system_call(444, attributes, size, 0)
    try:
        granted = [(path, _READ_FILE | _READ_DIR) for path in readable]
        granted += [(path, _READ_FILE | _EXECUTE) for path in programs]
        if folder is not None:
            granted.append((folder, _OWN))
        for path, wanted in granted:
            beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                allowed = wanted & rights & (-1 if os.path.isdir(path) else _ON_FILES)
                system_call(445, ruleset, 1, struct.pack("=Qi", allowed, beneath), 0)
            finally:
                os.close(beneath)
    except BaseException:
        os.close(ruleset)
        raise
    return ruleset


def restrict_files(ruleset: int) -> None:
    """The process must have given up new privileges."""
    system_call(446, ruleset, 0)


# --- resources and privileges -----------------------------------------------------------------------------------------


def limit_resources(cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    """`memory_bytes` is all address space, that of the interpreter included."""
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NPROC: 1,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 1,  # none: 0 would still start a program that takes cores from a pipe (core(5))
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 64,
    }
    for kind, wanted in limits.items():
        _, ceiling = resource.getrlimit(kind)
        value = wanted if ceiling == resource.RLIM_INFINITY else min(wanted, ceiling)
        resource.setrlimit(kind, (value, value))


def become(user: int) -> None:
    """User and group of that number and no other group, for good."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def drop_privileges() -> None:
    """No capabilities, and none to be had by running a program."""
    prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
    system_call(architecture().capset, struct.pack("=Ii", 0x20080522, 0), bytes(24))


def die_with_parent(parent: int) -> None:
    """SIGKILL when the parent, which is or was `parent`, ends. Forgotten when the user changes, so after `become`."""
    prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def usual_signals() -> None:
    """Signals as Python has them at its start. A shell starts what runs in the background, and nohup what it runs, with
    some ignored, and a process inherits that."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def hide_memory() -> None:
    """No other process of the same user may look into this one (until it becomes another program)."""
    prctl(4, 0)  # PR_SET_DUMPABLE


def close_all_but(kept: Sequence[int]) -> None:
    """Descriptors beyond the highest of `kept`, and those between, are closed."""
    start = 0
    for descriptor in [*sorted(kept), 1 << 20]:
        if start < descriptor:  # an empty range would close everything
            os.closerange(start, descriptor)
        start = descriptor + 1
