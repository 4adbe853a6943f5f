"""Code that nobody has read: it is answered, stopped at its limits, and hurts nobody, whatever it tries.

Each attack says BROKE if it got through. None would harm the machine if it did: at most 50 processes, 1 GiB of memory
and 256 MiB of files, loopback only, no deadly signals.
"""

import asyncio
import json
import os
import platform
import re
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from environments.python_tool import PythonSettings, PythonTool
from environments.sandbox import locks
from environments.sandbox.client import ExecutionStatus, Interpreter, Sandbox, SandboxError, SandboxSettings
from environments.sandbox.server import FIRST_USER, Layer

ROOT = Path(__file__).parents[2]
COMPLETED, EXCEPTION, TIMEOUT, MEMORY, OUTPUT, CRASHED = ExecutionStatus
LIMITS = {"timeout_s": 1.0, "memory_mb": 128, "folder_mb": 4, "slots": 2}
TOOLS_OF_ATTACK = ("mmap", "multiprocessing.shared_memory", "urllib.request", "encodings.idna")
"""Loaded beforehand, as not every grade lets a call read the standard library."""
SECRET = "c0ffee-of-the-host"


class Box:
    """A sandbox with an event loop of its own, and what a call takes when nothing is amiss."""

    def __init__(self, settings, withhold=()):
        self.loop = asyncio.new_event_loop()
        self.sandbox = Sandbox(settings, dict.fromkeys(withhold, "withheld by the test"))
        self.protection = self.sandbox.start()
        self.usual_s = statistics.median(self.timed() for _ in range(15))

    def run(self, code, **options):
        return self.loop.run_until_complete(self.sandbox.run(code, **options))

    def timed(self):
        """Seconds of a call that must be right."""
        began = time.perf_counter()
        execution = self.run("print(6 * 7)\n[1, 2]")
        assert (execution.status, execution.output, execution.result) == (COMPLETED, "42\n", "[1, 2]")
        return time.perf_counter() - began

    def close(self):
        self.sandbox.close()
        self.loop.close()


GRADES = {"all layers": (), "without namespaces": (Layer.NAMESPACES,), "without Landlock": (Layer.LANDLOCK,)}
"""Each is what some hosts offer; each must hold alone."""


@pytest.fixture(scope="module", params=GRADES)
def cpython(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_TEST_SECRET", SECRET)
        settings = SandboxSettings(interpreter="cpython", packages=TOOLS_OF_ATTACK, **LIMITS)
        box = Box(settings, GRADES[request.param])
    yield box
    box.close()


@pytest.fixture(scope="module")
def restricted():
    box = Box(SandboxSettings(**LIMITS))
    yield box
    box.close()


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """What attacks aim at: a readable file, and listeners on loopback that remember who came."""
    folder = tmp_path_factory.mktemp("outside")
    for parent in (folder, *folder.parents):
        if parent != Path("/tmp") and parent.is_relative_to("/tmp"):
            parent.chmod(0o755)
    (folder / "secret").write_text(SECRET)
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    listeners = {
        "tcp": socket.create_server(("127.0.0.1", 0)),
        "udp": socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
        "unix": socket.socket(socket.AF_UNIX),
        "datagrams": socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
        "abstract": socket.socket(socket.AF_UNIX),
    }
    listeners["udp"].bind(("127.0.0.1", 0))
    listeners["unix"].bind(str(folder / "socket"))
    listeners["datagrams"].bind(str(folder / "datagrams"))
    listeners["abstract"].bind(f"\0headrace-test-{os.getpid()}")
    for name in ("unix", "abstract"):
        listeners[name].listen()
    for path in ("socket", "datagrams"):
        (folder / path).chmod(0o777)
    yield {
        "FOLDER": str(folder),
        "TCP": listeners["tcp"].getsockname()[1],
        "UDP": listeners["udp"].getsockname()[1],
        "HOST_PID": os.getpid(),
        "ABSTRACT": f"\0headrace-test-{os.getpid()}",
        "SECRET": SECRET,
    }
    for name, listener in listeners.items():
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.recv(1) if name in ("udp", "datagrams") else listener.accept()
        listener.close()


PRELUDE = """
def attempt(action, what=""):
    try:
        value = action()
    except (OSError, RuntimeError, ImportError, MemoryError, ValueError, AttributeError, LookupError) as error:
        return error
    print("BROKE", what, repr(value)[:200])
"""

STOPPED = (TIMEOUT, MEMORY, CRASHED, EXCEPTION)
ATTACKS = {
    # --- processes ---
    "fork bomb": """
        import os
        for _ in range(50):
            attempt(lambda: os.fork() or os._exit(0))
    """,
    "daemon by two forks": """
        import os
        def daemon():
            if not os.fork():
                os.setsid()
                if not os.fork():
                    __import__("time").sleep(20)
                os._exit(0)
            return "forked"
        attempt(daemon)
    """,
    "vfork and clone": """
        import ctypes, errno
        libc = ctypes.CDLL(None, use_errno=True)
        numbers = (56, 57, 58, 435) if MACHINE == "x86_64" else (220, 435)
        for number in numbers:
            if libc.syscall(number, 17, 0, 0, 0, 0) == 0:
                libc._exit(0)
            elif ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
                print("BROKE", number, ctypes.get_errno())
    """,
    "other programs": """
        import os, subprocess, sys
        for program in ("/bin/sh", "/usr/bin/env", sys.executable):
            attempt(lambda: os.execv(program, [program, "-c", "echo BROKE"]))
            attempt(lambda: os.posix_spawn(program, [program], {}))
            attempt(lambda: subprocess.run([program, "--version"]))
        attempt(lambda: os.popen("echo BROKE").read() or 1 / (os.system("true") == 0))
    """,
    "multiprocessing": """
        import multiprocessing
        def work():
            process = multiprocessing.get_context("fork").Process(target=print, args=("BROKE",))
            process.start()
            process.join(5)
        attempt(work)
    """,
    "threads": """
        import _thread, threading, time
        for _ in range(50):
            attempt(lambda: _thread.start_new_thread(time.sleep, (0.1,)))
        attempt(lambda: threading.Thread(target=print, args=("BROKE",)).start())
    """,
    "a watchdog thread": """
        import faulthandler
        attempt(lambda: faulthandler.dump_traceback_later(0.1, exit=True))
    """,
    # --- time ---
    "infinite loop": ("while True: pass", (TIMEOUT,)),
    "infinite loop that ignores signals": (
        """
        import signal
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        while True: pass
        """,
        (TIMEOUT,),
    ),
    "sleep": ("import time\ntime.sleep(10 ** 6)", (TIMEOUT,)),
    "stopping itself": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", (TIMEOUT,)),
    "a number that takes for ever": ("9 ** 9 ** 9", (TIMEOUT, MEMORY)),
    "a regular expression that takes for ever": ("import re\nre.match('(a+)+$', 'a' * 60 + 'b')", (TIMEOUT,)),
    "an exception whose words take for ever": (
        """
        class E(Exception):
            def __str__(self):
                while True: pass
        raise E
        """,
        (TIMEOUT,),
    ),
    "a value whose words take for ever": (
        """
        class V:
            def __repr__(self):
                while True: pass
        V()
        """,
        (TIMEOUT,),
    ),
    "an output that takes for ever to flush": (
        """
        import sys, io
        class S(io.StringIO):
            def flush(self):
                while True: pass
        sys.stdout = S()
        """,
        (TIMEOUT,),
    ),
    "an exit that hangs": """
        import atexit, sys, threading
        def hang():
            while True: pass
        atexit.register(hang)
        class D:
            def __del__(self): hang()
        kept = D()
        sys.modules["kept"] = kept
    """,
    "a storm of timers": (
        """
        import signal, itertools
        ticks = itertools.count()
        signal.signal(signal.SIGALRM, lambda *_: next(ticks))
        signal.setitimer(signal.ITIMER_REAL, 1e-6, 1e-6)
        while True: pass
        """,
        (TIMEOUT,),
    ),
    # --- memory ---
    "memory bomb": ("x = bytearray()\nwhile len(x) < 2 ** 30: x += bytes(2 ** 20)\nprint('BROKE')", STOPPED),
    "memory bomb of small things": (
        "x = []\nfor i in range(2 ** 24): x.append([i])\nprint('BROKE')",
        (MEMORY, TIMEOUT),
    ),
    "memory bomb that goes on": (
        """
        kept = []
        for size in [2 ** 24] * 64:
            try:
                kept.append(bytearray(size))
            except MemoryError:
                pass
        if len(kept) > 16:
            print("BROKE", len(kept))
        """,
        (COMPLETED, *STOPPED),
    ),
    "shared mappings": (
        """
        import mmap
        kept = []
        for _ in range(64):
            kept.append(mmap.mmap(-1, 2 ** 24))
            kept[-1].write(bytes(2 ** 24))
        print("BROKE")
        """,
        (EXCEPTION, *STOPPED),
    ),
    "memory in page tables": (
        """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        for number in range(60_000):
            place = libc.mmap(ctypes.c_void_p((1 << 40) + (number << 30)), ctypes.c_size_t(4096), 3, 0x100022, -1, 0)
            if place in (None, 2 ** 64 - 1):
                break
            ctypes.memset(place, 1, 1)
        else:
            print("BROKE")
    """,
        (COMPLETED, TIMEOUT),
    ),
    "memory beside the limits": """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        memfd, shmget, mq_open = (319, 29, 240) if MACHINE == "x86_64" else (279, 194, 180)
        for number, arguments in ((memfd, (b"x", 0)), (shmget, (0, 4096, 0o1600)), (mq_open, (b"x", 0o102, 0o600, 0))):
            if libc.syscall(number, *arguments) >= 0:
                print("BROKE", number)
        import fcntl
        reader, writer = os.pipe()
        attempt(lambda: fcntl.fcntl(writer, 1031, 2 ** 20))  # F_SETPIPE_SZ
        from multiprocessing import shared_memory
        attempt(lambda: shared_memory.SharedMemory(create=True, size=4096))
    """,
    "descriptors without end": (
        """
        import os
        kept = []
        for _ in range(200):
            kept.extend(os.pipe())
        print("BROKE")
        """,
        (EXCEPTION,),
    ),
    "locks without end": (
        """
        import fcntl, os
        file = open("locked", "wb+")
        for place in range(0, 2 * 10 ** 6, 2):
            fcntl.lockf(file, fcntl.LOCK_EX, 1, place)
        """,
        (EXCEPTION, TIMEOUT),
    ),
    "raising its own limits": """
        import resource
        for kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_CPU, resource.RLIMIT_CORE):
            attempt(lambda: resource.setrlimit(kind, (2 ** 30, 2 ** 30)))
            attempt(lambda: resource.prlimit(0, kind, (2 ** 30, 2 ** 30)))
    """,
    "recursion": ("def f(): return f()\nf()", (EXCEPTION,)),
    "recursion without a limit": (
        """
        import sys
        sys.setrecursionlimit(2 ** 30)
        class R:
            def __repr__(self): return repr(self)
        repr(R())
        print("BROKE")
        """,
        STOPPED,
    ),
    "source that is too deep": ("exec('(' * 10 ** 6)", STOPPED),
    "source that is deep in another way": ("eval('-' * 10 ** 6 + '1')", STOPPED),
    # --- files ---
    "one large file": """
        written = 0
        def write():
            global written
            with open("large", "wb", buffering=0) as file:
                for _ in range(256):
                    written += file.write(bytes(2 ** 20))
        attempt(write, "256 MiB")
        if written > 2 ** 22: print("BROKE", written)
    """,
    "many files": """
        written = made = 0
        def write():
            global written, made
            for number in range(5000):
                with open(f"f{number}", "wb", buffering=0) as file:
                    made += 1
                    written += file.write(bytes(2 ** 16))
        attempt(write, "5000 files")
        if written > 2 ** 22 or made > 1100: print("BROKE", written, made)
    """,
    "folders without end": """
        import os
        def descend():
            for _ in range(5000):
                os.mkdir("d")
                os.chdir("d")
        attempt(descend, "5000 folders")
    """,
    "a file that grows without being written": """
        import os
        def grow():
            with open("sparse", "wb") as file:
                os.ftruncate(file.fileno(), 2 ** 28)
        attempt(grow)
        def reserve():
            with open("reserved", "wb") as file:
                os.posix_fallocate(file.fileno(), 0, 2 ** 28)
        attempt(reserve)
    """,
    "reading the host's files": """
        import os
        for path in ("/etc/passwd", "/etc/shadow", "/root/.bashrc", "/var/log/dpkg.log", "/dev/mem", "/dev/kmsg",
                     FOLDER + "/secret", FOLDER, ".." + FOLDER + "/secret", "/work/../" + FOLDER + "/secret"):
            attempt(lambda: os.open(path, os.O_RDONLY), path)
            attempt(lambda: os.listdir(path), path)
    """,
    "the host's folders by a descriptor": """
        import os
        for flags in (os.O_PATH, os.O_PATH | os.O_NOFOLLOW, os.O_RDONLY | os.O_DIRECTORY):
            for path in ("/", "..", "../../.."):
                try:
                    folder = os.open(path, flags)
                except OSError:
                    continue
                attempt(lambda: os.open("etc/passwd", os.O_RDONLY, dir_fd=folder), path)
                attempt(lambda: os.open(FOLDER[1:] + "/secret", os.O_RDONLY, dir_fd=folder), path)
    """,
    "processes of the host": """
        import os
        for pid in ("self", "1", os.getppid(), HOST_PID, "thread-self"):
            for name in ("environ", "maps", "mem", "cmdline", "fd/0", "root/etc/passwd", "status", "cwd"):
                attempt(lambda: os.open(f"/proc/{pid}/{name}", os.O_RDONLY), f"{pid}/{name}")
        attempt(lambda: [name for name in os.listdir("/proc") if name.isdigit()][0])
    """,
    "links": """
        import os
        attempt(lambda: os.symlink("/etc/passwd", "link") or open("link").read())
        attempt(lambda: os.link("/etc/passwd", "hard") or open("hard").read())
        attempt(lambda: os.symlink("..", "up") or os.listdir("up"))
    """,
    "writing elsewhere": """
        import os, sys
        places = ["/", "/tmp", "/var/tmp", "/dev/shm", "/run", "/dev", "..", FOLDER, FOLDER + "/open"]
        for place in [*places, os.path.dirname(os.__file__), *sys.path]:
            attempt(lambda: open(place + "/made", "w"), place)
            attempt(lambda: os.mkdir(place + "/made"), place)
            attempt(lambda: os.open(place, os.O_TMPFILE | os.O_WRONLY), place)
        for path in (os.__file__, FOLDER + "/secret", "/dev/null", "/dev/tty"):
            for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC, os.O_APPEND | os.O_WRONLY):
                attempt(lambda: os.open(path, flags), path)
            attempt(lambda: os.truncate(path, 0), path)
            attempt(lambda: os.chmod(path, 0o777), path)
            attempt(lambda: os.chown(path, os.getuid(), -1), path)
            attempt(lambda: os.utime(path, (0, 0)), path)
            attempt(lambda: os.rename(path, "mine"), path)
            attempt(lambda: os.unlink(path), path)
            attempt(lambda: os.setxattr(path, "user.x", b"1"), path)
    """,
    "its own folder's name": """
        import os
        for path in (os.getcwd(), "."):
            attempt(lambda: os.rmdir(path))
            attempt(lambda: os.chmod(path, 0))
            attempt(lambda: os.setxattr(path, "user.x", b"1"))
    """,
    "devices and pipes with a name": """
        import os, stat
        attempt(lambda: os.mkfifo("pipe"))
        attempt(lambda: os.mknod("device", stat.S_IFBLK | 0o600, os.makedev(254, 0)))
        attempt(lambda: os.mknod("null", stat.S_IFCHR | 0o600, os.makedev(1, 3)))
        attempt(lambda: os.openpty())
    """,
    # --- network ---
    "TCP": """
        import socket, urllib.request
        attempt(lambda: socket.create_connection(("127.0.0.1", TCP), 1))
        attempt(lambda: socket.create_server(("127.0.0.1", 0)))
        attempt(lambda: urllib.request.urlopen(f"http://127.0.0.1:{TCP}", timeout=1))
    """,
    "every kind of socket": """
        import socket
        for family in range(46):
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
                attempt(lambda: socket.socket(family, kind), f"{family}/{kind}")
    """,
    "UDP": """
        import socket
        attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", UDP)))
    """,
    "the host's local sockets": """
        import socket
        for address in (FOLDER + "/socket", ABSTRACT):
            attempt(lambda: socket.socket(socket.AF_UNIX).connect(address))
        for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
            attempt(lambda: socket.socketpair(socket.AF_UNIX, kind)[0].sendto(b"x", FOLDER + "/datagrams"))
        one, two = socket.socketpair()
        attempt(lambda: one.connect(FOLDER + "/socket"))
        attempt(lambda: one.sendto(b"x", FOLDER + "/datagrams"))
        attempt(lambda: socket.send_fds(one, [b"x"], [0]))
    """,
    "names of hosts": """
        import socket
        attempt(lambda: socket.getaddrinfo("example.invalid", 80))
        attempt(lambda: socket.sethostname("mine"))
        attempt(lambda: socket.if_nameindex()[0])
    """,
    # --- others ---
    "signals to the parent": """
        import os, signal
        for pid in (os.getppid(), HOST_PID, 1, 2, 0, -1, -os.getpgrp(), os.getpid() - 1):
            attempt(lambda: os.kill(pid, 0), pid)
            if pid > 0: attempt(lambda: os.kill(pid, signal.SIGCONT), pid)
        attempt(lambda: os.killpg(os.getppid(), 0))
        attempt(lambda: signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 0))
    """,
    "signals by other calls": """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        tkill, tgkill, sigqueue = (200, 234, 129) if MACHINE == "x86_64" else (130, 131, 138)
        parent = os.getppid()
        calls = (tkill, (parent, 0)), (tgkill, (parent, parent, 0)), (sigqueue, (parent, 0, bytes(128)))
        for number, arguments in calls:
            if libc.syscall(number, *arguments) == 0:
                print("BROKE", number)
        import fcntl
        reader, writer = os.pipe()
        attempt(lambda: fcntl.fcntl(reader, fcntl.F_SETOWN, parent))
        attempt(lambda: fcntl.fcntl(reader, fcntl.F_SETSIG, 9))
        attempt(lambda: fcntl.ioctl(reader, 0x8901, parent.to_bytes(4, "little")))  # FIOSETOWN
    """,
    "looking into other processes": """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        ptrace, readv, getfd = (101, 310, 438) if MACHINE == "x86_64" else (117, 270, 438)
        for pid in (os.getppid(), 1, HOST_PID):
            calls = (ptrace, (16, pid)), (ptrace, (0x4206, pid)), (readv, (pid, 0, 0, 0)), (getfd, (pid, 0))
            for number, arguments in calls:
                if libc.syscall(number, *arguments, 0, 0) >= 0:
                    print("BROKE", number, pid)
        if libc.syscall(ptrace, 0, 0, 0, 0) >= 0: print("BROKE traceme")
    """,
    "becoming somebody else": """
        import os, ctypes
        for call in (os.setuid, os.setgid, os.seteuid, os.setegid):
            attempt(lambda: call(0), call.__name__)
        attempt(lambda: os.setgroups([0]))
        attempt(lambda: os.setresuid(0, 0, 0))
        if os.getuid() != os.geteuid(): print("BROKE")
        attempt(lambda: os.setsid())
        attempt(lambda: os.nice(-1))
        attempt(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
        attempt(lambda: os.setpriority(os.PRIO_USER, 0, -5))
    """,
    "another root": """
        import os, ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        attempt(lambda: os.chroot("."))
        for action in (lambda: libc.mount(b"none", b".", b"tmpfs", 0, b""),
                       lambda: libc.mount(b"proc", b".", b"proc", 0, b""), lambda: libc.umount2(b".", 2),
                       lambda: libc.unshare(0x10000000), lambda: libc.unshare(0x20000), lambda: libc.setns(0, 0)):
            if action() == 0: print("BROKE")
    """,
    "code in memory": """
        import ctypes, mmap
        attempt(lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC))
        attempt(lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC))
        libc = ctypes.CDLL(None, use_errno=True)
        plain = mmap.mmap(-1, 4096)
        address = ctypes.addressof(ctypes.c_char.from_buffer(plain))
        for protection in (4, 5, 7):
            if libc.mprotect(ctypes.c_void_p(address), 4096, protection) == 0: print("BROKE", protection)
        def from_file():
            with open("code", "wb+") as file:
                file.write(bytes(4096))
                file.flush()
                return mmap.mmap(file.fileno(), 4096, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC)
        attempt(from_file)
    """,
    "a library of its own": """
        import ctypes, glob, os, shutil, sys
        def load():
            found = glob.glob(sys.path[-1] + "/*.so") + glob.glob(sys.path[-1] + "/lib-dynload/*.so")
            shutil.copyfile(found[0], "mine.so")
            return ctypes.CDLL(os.getcwd() + "/mine.so")
        attempt(load)
    """,
    "a null pointer": ("import ctypes\nctypes.string_at(0)", (CRASHED,)),
    "abort": ("import os\nos.abort()", (CRASHED,)),
    "a core file": ("import os, signal\nos.kill(os.getpid(), signal.SIGQUIT)", (CRASHED,)),
    # --- output ---
    "huge output": ("print('x' * 2 ** 22)", (OUTPUT,)),
    "output without end": ("while True: print('x' * 1000)", (OUTPUT,)),
    "errors without end": ("import sys\nwhile True: sys.stderr.write('x')", (OUTPUT,)),
    "output past the interpreter": ("import os\nwhile True: os.write(1, b'\\xff\\x00\\x1b[2J' * 1000)", (OUTPUT,)),
    "output in crumbs": (
        """
        import os, fcntl
        fcntl.fcntl(1, fcntl.F_SETFL, os.O_DIRECT)  # every write is a packet of its own
        while True: os.write(1, b"x")
        """,
        (OUTPUT,),
    ),
    "reports without end": (
        """
        import os
        for number in range(2, 64):
            try:
                while True: os.write(number, b"x" * 1000)
            except OSError:
                pass
        """,
        (OUTPUT,),
    ),
    "a huge result": ("'x' * 2 ** 22", (COMPLETED,)),
    "a result that fills the memory": ("class V:\n  def __repr__(self): return 'x' * (80 << 20)\nV()", (COMPLETED,)),
    "an exit with words that fill the memory": ("import sys\nsys.exit('x' * (80 << 20))", (EXCEPTION,)),
    "an exit whose words raise": (
        """
        class E:
            def __eq__(self, other): raise ValueError
            __str__ = __repr__ = __eq__
        raise SystemExit(E())
        """,
        (EXCEPTION,),
    ),
    "a huge exception": ("raise ValueError('x' * 2 ** 22)", (EXCEPTION,)),
    "an exception without words": ("class E(Exception):\n  def __str__(self): raise E\nraise E", (EXCEPTION,)),
    "text that is no text": ("print('\\ud800')\n'\\udcff'", (COMPLETED,)),
    "an exit in the middle": ("import os\nos._exit(0)", (CRASHED,)),
    "an exit with its pipes copied": ("import os\nfor _ in range(20): os.dup(1)\nos._exit(0)", (CRASHED,)),
    "closing everything": ("import os\nos.closerange(0, 256)", (CRASHED, COMPLETED, EXCEPTION)),
    "leaving by an exception that is none": ("raise BaseException('x')", (EXCEPTION,)),
    "removing what the runner uses": (
        "import sys, os, builtins\nsys.modules.clear()\ndel sys.stdout, sys.stderr, builtins.repr\nos._exit = print",
        (COMPLETED, EXCEPTION, CRASHED),
    ),
    # --- the host's things ---
    "the environment": """
        import os, ctypes
        if os.environ: print("BROKE", dict(os.environ))
        libc = ctypes.CDLL(None)
        libc.getenv.restype = ctypes.c_char_p
        if libc.getenv(b"HEADRACE_TEST_SECRET") or libc.getenv(b"PATH"): print("BROKE")
    """,
    "descriptors": """
        import os
        for number in range(4, 4096):  # 0 to 2 are the usual ones, 3 takes its report
            attempt(lambda: os.fstat(number), number)
        for number in range(4):
            attempt(lambda: os.listdir(number))
            attempt(lambda: os.open("..", os.O_RDONLY, dir_fd=number))
    """,
    "the host's modules": """
        for name in ("environments", "policy", "trajectories", "environments.sandbox.server", "numpy", "pytest", "pip"):
            attempt(lambda: __import__(name), name)
    """,
    "packages of the host": """
        import os, sys
        for folder in sys.path:
            for name in ("site-packages", "dist-packages"):
                for root, folders, files in os.walk(os.path.join(folder, name)):
                    if files: print("BROKE", root)
    """,
    "objects of the fork server": """
        import gc, socket, sys
        frame, found = sys._getframe(), []
        while frame:
            found.extend(frame.f_locals.values())
            frame = frame.f_back
        found += gc.get_objects()
        for one in list(found):
            if isinstance(one, socket.socket): attempt(lambda: one.send(b"{}"))
            if type(one).__name__ == "_Server": attempt(lambda: one.control.send(b'{"kill": 0}'))
    """,
    "pickles": """
        import pickle
        attempt(lambda: pickle.loads(b"cposix\\nsystem\\n(S'echo BROKE'\\ntR.") == 0 or 1 / 0)
    """.replace("or 1 / 0", "or int('x')"),
    "audit hooks": """
        import sys, os
        sys.addaudithook(lambda *_: None)
        def cut(*_): raise RuntimeError
        attempt(lambda: os.open("/etc/passwd", os.O_RDONLY))
    """,
    "the terminal": """
        import os, fcntl
        for number in range(5):
            attempt(lambda: fcntl.ioctl(number, 0x5412, b"x"), "TIOCSTI")
            attempt(lambda: os.tcgetpgrp(number))
        attempt(lambda: os.open("/dev/tty", os.O_RDWR))
    """,
}


def attack_code(name, outside):
    attack = ATTACKS[name]
    code = attack if isinstance(attack, str) else attack[0]
    names = {**outside, "MACHINE": platform.machine()}
    lines = code.split("\n")
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    given = "\n".join(f"{key} = {value!r}" for key, value in names.items())
    return f"{given}\n{PRELUDE}\n" + "\n".join(line[indent:] for line in lines)


def processes_of_calls(sandbox):
    """Process ids below the fork server's that run as a call's user."""
    parents, users = {}, {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        except OSError:  # it has ended
            continue
        pid = int(status.parent.name)
        parents[pid], users[pid] = int(fields["PPid"]), int(fields["Uid"].split()[0])

    def below(pid):
        while pid in parents:
            if pid == sandbox._server.process.pid:
                return True
            pid = parents[pid]
        return False

    return [pid for pid, user in users.items() if FIRST_USER <= user < FIRST_USER + 128 and below(pid)]


@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_succeeds_and_none_slows_the_next_call(cpython, outside, name):
    attack = ATTACKS[name]
    expected = (COMPLETED,) if isinstance(attack, str) else attack[1]
    began = time.perf_counter()
    execution = cpython.run(attack_code(name, outside))
    took = time.perf_counter() - began
    assert "BROKE" not in execution.output + execution.result, execution
    assert execution.status in expected, execution
    assert len(execution.output) <= cpython.sandbox.settings.output_bytes
    assert len(execution.result) + len(execution.error) <= 2 * cpython.sandbox.settings.output_bytes
    assert SECRET not in execution.result + execution.error.replace(f"SECRET = {SECRET!r}", "")
    assert took < 10 * LIMITS["timeout_s"], "it was stopped at its limit"
    assert processes_of_calls(cpython.sandbox) == []
    assert min(cpython.timed() for _ in range(3)) < 10 * cpython.usual_s
    assert cpython.sandbox.restarts == 0


@pytest.mark.parametrize("name", ATTACKS)
def test_the_restricted_interpreter_withstands_them_too(restricted, outside, name):
    execution = restricted.run(attack_code(name, outside))
    assert "BROKE" not in execution.output + execution.result, execution
    assert len(execution.output) <= restricted.sandbox.settings.output_bytes
    assert processes_of_calls(restricted.sandbox) == []
    assert min(restricted.timed() for _ in range(3)) < 10 * restricted.usual_s
    assert restricted.sandbox.restarts == 0


SYSTEM_CALLS = {
    # name: numbers on x86_64 and aarch64
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "sendmsg": (46, 211),
    "ptrace": (101, 117),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "setuid": (105, 146),
    "capset": (126, 91),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "seccomp": (317, 277),
    "prctl": (157, 167),
    "personality": (135, 92),
    "shmget": (29, 194),
    "mq_open": (240, 180),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "openat2": (437, 437),
    "execveat": (322, 281),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "syslog": (103, 116),
    "acct": (163, 89),
    "symlinkat": (266, 36),
    "linkat": (265, 37),
    "mknodat": (259, 33),
    "fchmodat": (268, 53),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "timer_create": (222, 107),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "landlock_restrict_self": (446, 446),
    "mseal": (462, 462),
    "of the future": (999, 999),
}


def test_system_calls_that_reach_beyond_the_process_are_refused_by_the_kernel(cpython):
    column = list(locks.ARCHITECTURES).index(platform.machine())
    numbers = {name: both[column] for name, both in SYSTEM_CALLS.items()}
    code = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
{{name: ctypes.get_errno() for name, number in {numbers}.items() if libc.syscall(number, -1, 0, 0, 0, 0, 0) == -1}}
"""
    assert cpython.run(code).result == str(dict.fromkeys(SYSTEM_CALLS, 1))  # EPERM


def simulate(program, arch, number, arguments=()):
    """What a classic BPF program answers to a system call (linux/filter.h)."""
    data = struct.pack("=iIQ6Q", number, arch, 0, *(one & (1 << 64) - 1 for one in (*arguments, *[0] * 6)[:6]))
    instructions = list(struct.iter_unpack("=HBBI", program))
    at = value = 0
    while True:
        op, jump, otherwise, constant = instructions[at]
        at += 1
        if op == 0x20:
            (value,) = struct.unpack_from("=I", data, constant)
        elif op == 0x54:
            value &= constant
        elif op == 0x06:
            return constant
        else:
            holds = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[op]
            at += jump if holds else otherwise


ALLOW, REFUSE, KILL, NO_SUCH_CALL = 0x7FFF0000, 0x00050001, 0x80000000, 0x00050026


@pytest.mark.parametrize("machine", locks.ARCHITECTURES)
@pytest.mark.parametrize("folder", [False, True])
def test_the_filter_of_each_architecture(machine, folder):
    column = list(locks.ARCHITECTURES).index(machine)
    architecture = locks.ARCHITECTURES[machine]
    program = locks.SystemCalls(folder=folder, program=False).program_for(architecture)
    mmap, mprotect, kill, openat, mkdirat, clone, clone3, socketpair, sendto, write = (
        both[column]
        for both in [
            (9, 222),
            (10, 226),
            (62, 129),
            (257, 56),
            (258, 34),
            (56, 220),
            (435, 435),
            (53, 199),
            (44, 206),
            (1, 64),
        ]
    )

    def answer(number, *arguments, arch=architecture.audit):
        return simulate(program, arch, number, arguments)

    for numbers in SYSTEM_CALLS.values():
        assert answer(numbers[column]) == REFUSE
    assert answer(write) == ALLOW
    assert answer(write, arch=0x40000003) == KILL  # the same number means something else to another architecture
    assert answer(clone) == REFUSE
    assert answer(clone3) == NO_SUCH_CALL
    assert answer(221 if column else 59) == REFUSE  # execve
    assert [answer(mmap, 0, 4096, protection, 0x22) for protection in (0, 1, 3, 4, 5, 7)] == [ALLOW] * 3 + [REFUSE] * 3
    assert [answer(mmap, 0, 4096, protection, 2) for protection in (1, 3, 5, 7)] == [ALLOW] * 3 + [REFUSE]
    assert [answer(mprotect, 0, 4096, protection) for protection in (0, 3, 4, 5)] == [ALLOW] * 2 + [REFUSE] * 2
    own = 0xFEEDF00D  # stands for the process's own id in the template
    assert [answer(kill, pid, 9) for pid in (own, 1, 0, -1, -own)] == [ALLOW] + [REFUSE] * 4
    change = [ALLOW if folder else REFUSE]
    assert [answer(openat, -100, 0, flags) for flags in (0, 1, 2, 0o100, 0o1000)] == [ALLOW] + change * 4
    assert [answer(mkdirat, -100, 0, 0)] == change
    assert [answer(socketpair, *one) for one in ((1, 0o2000001), (1, 2), (1, 5), (2, 1), (10, 1))] == [ALLOW] + [
        REFUSE
    ] * 4
    assert [answer(sendto, 3, 0, 0, 0, to) for to in (0, 1, 1 << 32)] == [ALLOW] + [REFUSE] * 2
    if machine == "x86_64":
        assert answer(write | 0x40000000) == REFUSE  # x32


def test_the_table_of_system_calls_is_that_of_the_kernel():
    """By the C library's headers where they are installed, for the architecture they are for."""
    headers = [Path("/usr/include/asm-generic/unistd.h"), *Path("/usr/include").glob("*/asm/unistd_64.h")]
    for path in headers:
        if path.exists():
            column = 1 if path.parent.name == "asm-generic" else 0
            told = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)$", path.read_text(), re.MULTILINE))
            known = {name: both[column] for name, both in {**locks._NUMBERS, **SYSTEM_CALLS}.items()}
            other_names = {"newfstatat": "fstatat"} if column else {}
            wrong = {
                name: (number, told[other_names.get(name, name)])
                for name, number in known.items()
                if number is not None and told.get(other_names.get(name, name), str(number)) != str(number)
            }
            assert wrong == {}


def test_nothing_is_kept_from_one_call_to_the_next(cpython):
    leave = """
marker = "left-" + "behind"
import json, builtins, os, sys, random, gc
json.dumps = lambda *_: marker
builtins.left = sys.left = marker
os.environ["LEFT"] = marker
random.seed(1)
sys.path.append(marker)
kept = [marker + str(number) for number in range(1000)]
os.umask(0)
for action in (lambda: open(marker, "w").write(marker), lambda: os.utime(".", ns=(10 ** 18, 10 ** 18 + 7))):
    try:
        action()
    except OSError:
        pass
"""
    look = """
import json, builtins, os, sys, random, gc
names = [one for one in gc.get_objects() if isinstance(one, (list, dict)) and ("left-" + "behind") in str(one)[:9999]]
try:
    found = os.listdir("."), os.stat(".").st_mtime_ns
except OSError:
    found = [], 0
json.dumps(1), hasattr(builtins, "left"), hasattr(sys, "left"), dict(os.environ), len(names), found, os.umask(0)
"""
    for _ in range(3):  # on every slot
        assert cpython.run(leave).status is COMPLETED
    for _ in range(3):
        assert cpython.run(look).result == "('1', False, False, {}, 0, ([], 0), 63)"


def test_calls_at_the_same_time_do_not_see_each_other(cpython):
    hidden = "neighbour-" + "of-the-other"
    holds = f"""
import time
mine = "{hidden}"
try:
    open("{hidden}", "w").write(mine)
except OSError:
    pass
time.sleep(0.8)
mine
"""
    looks = (
        PRELUDE
        + """
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
ptrace, readv = (101, 310) if "x86_64" in os.uname().machine else (117, 270)
time.sleep(0.3)
for pid in {*range(1, 300), *range(os.getpid() - 50, os.getpid() + 50)} - {os.getpid()}:
    attempt(lambda: os.kill(pid, 0), pid)
    for number in (ptrace, readv):
        if libc.syscall(number, 16 if number == ptrace else pid, pid, 0, 0, 0, 0) >= 0: print("BROKE", number, pid)
    attempt(lambda: os.open(f"/proc/{pid}/mem", os.O_RDONLY))
for place in (".", "..", "../work", "/", "/work", "/0/work", "/1/work", "/tmp/0/work", "/tmp/1/work"):
    for root, folders, files in os.walk(place):
        for name in files:
            if name.startswith("neighbour"): print("BROKE", root, name)
"""
    )

    async def main():
        return await asyncio.gather(*(cpython.sandbox.run(code) for code in (holds, looks)))

    held, looked = cpython.loop.run_until_complete(main())
    assert held.result == repr(hidden)
    assert (looked.status, looked.output) == (COMPLETED, "")


def test_the_seed_repeats_what_is_drawn_and_nothing_else_does(cpython):
    code = "import random\nrandom.random(), random.randint(0, 10 ** 9)"
    assert cpython.run(code, seed=3).result == cpython.run(code, seed=3).result
    assert cpython.run(code, seed=3).result != cpython.run(code, seed=4).result


@pytest.mark.parametrize("interpreter", Interpreter)
def test_what_people_write_is_answered(interpreter):
    box = Box(SandboxSettings(interpreter=interpreter, **LIMITS))
    try:
        told = {
            "x = 6\ny = 7\nx * y": (COMPLETED, "", "42"),
            "print('a')\nprint('b')": (COMPLETED, "a\nb\n", ""),
            "None": (COMPLETED, "", ""),
            "-5 + 2": (COMPLETED, "", "-3"),
            "": (COMPLETED, "", ""),
            "def f(n):\n    return 1 if n < 2 else n * f(n - 1)\nf(20)": (COMPLETED, "", "2432902008176640000"),
            "import math\nmath.sqrt(2)": (COMPLETED, "", "1.4142135623730951"),
            "import asyncio\nasync def f():\n    await asyncio.sleep(0.01)\n    return 'é'\nprint(asyncio.run(f()))": (
                COMPLETED,
                "é\n",
                "",
            ),
        }
        for code, expected in told.items():
            execution = box.run(code)
            assert (execution.status, execution.output, execution.result) == expected, code
            assert execution.error == ""
            assert 0 < execution.cpu_s < 1
            assert 0 < execution.wall_s < 1
        for code, words in {
            "print('first')\n1 / 0": "ZeroDivisionError: division by zero",
            "x = = 1": "SyntaxError",
            "undefined": "NameError: name 'undefined' is not defined",
            "a\0b": "SyntaxError: source code",
        }.items():
            execution = box.run(code)
            assert execution.status is EXCEPTION, code
            assert words in execution.error
            assert "server.py" not in execution.error
        assert "line 2" in box.run("print('first')\n1 / 0").error
        assert box.run("print('first')\n1 / 0").output == "first\n"
        endless = box.run("print('before')\nwhile True: pass")
        assert (endless.status, endless.output) == (TIMEOUT, "before\n")
        assert "1 s" in endless.error
        assert box.run("#" * 70_000).error.startswith("the code has 70000 bytes")
    finally:
        box.close()


def test_the_loop_goes_on_and_calls_run_side_by_side():
    async def main():
        async with Sandbox(SandboxSettings(interpreter="cpython", **LIMITS)) as sandbox:
            ticks, work = 0, asyncio.gather(*(sandbox.run("import time\ntime.sleep(0.3)\n1") for _ in range(4)))
            while not work.done():
                ticks += 1
                await asyncio.sleep(0.01)
            return ticks, await work

    ticks, executions = asyncio.run(main())
    assert ticks > 5
    assert [one.status for one in executions] == [COMPLETED] * 4
    assert sorted(one.queued_s > 0.2 for one in executions) == [False, False, True, True]  # two slots


@pytest.mark.parametrize(
    "code", ["while True: pass", "import time\ntime.sleep(60)", "import os\nwhile True: os.write(1, b'')"]
)
def test_a_cancelled_call_is_killed_and_gives_its_slot_back(code):
    async def main():
        async with Sandbox(SandboxSettings(interpreter="cpython", slots=1, timeout_s=60)) as sandbox:
            for _ in range(3):
                task = asyncio.create_task(sandbox.run(code))
                waiting = asyncio.create_task(sandbox.run("'waited'"))
                while os.getuid() == 0 and not processes_of_calls(sandbox):
                    await asyncio.sleep(0.05)
                given_up = asyncio.create_task(sandbox.run("'given up'"))
                await asyncio.sleep(0)
                given_up.cancel()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert (await asyncio.wait_for(waiting, 5)).result == "'waited'"
                assert processes_of_calls(sandbox) == []

    asyncio.run(main())


def test_a_fork_server_that_ends_is_noticed_restarted_and_counted():
    async def main():
        async with Sandbox(SandboxSettings(interpreter="cpython", **LIMITS)) as sandbox:
            running = asyncio.create_task(sandbox.run("import time\ntime.sleep(60)"))
            waiting = [asyncio.create_task(sandbox.run("import time\ntime.sleep(60)")) for _ in range(3)]
            await asyncio.sleep(0.2)
            os.kill(sandbox._server.process.pid, signal.SIGKILL)
            for task in (running, *waiting):
                with pytest.raises(SandboxError, match="lost the call"):
                    await asyncio.wait_for(task, 5)
            both = await asyncio.gather(sandbox.run("1"), sandbox.run("2"))
            assert [one.result for one in both] == ["1", "2"]
            assert sandbox.restarts == 1

    asyncio.run(main())


def test_a_fork_server_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr("environments.sandbox.client._GRACE_S", 0.5)

    async def main():
        async with Sandbox(SandboxSettings(interpreter="cpython", timeout_s=1.0)) as sandbox:
            assert (await sandbox.run("1")).result == "1"
            stopped = [sandbox._server.process.pid]
            children = Path(f"/proc/{stopped[0]}/task/{stopped[0]}/children").read_text().split()
            stopped += map(int, children)
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            with pytest.raises(SandboxError, match="does not answer"):
                await asyncio.wait_for(sandbox.run("1"), 5)
            assert (await sandbox.run("2")).result == "2"
            assert sandbox.restarts == 1

    asyncio.run(main())


def test_nothing_is_left_when_it_is_closed():
    async def main():
        async with Sandbox(SandboxSettings(interpreter="cpython", **LIMITS)) as sandbox:
            task = asyncio.create_task(sandbox.run("import time\ntime.sleep(60)"))
            await asyncio.sleep(0.2)
            server = sandbox._server.process
        with pytest.raises(SandboxError, match="closed"):
            await task
        return server

    before = set(os.listdir("/proc/self/fd"))
    server = asyncio.run(main())
    assert server.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(
        f"\nPPid:\t{server.pid}\n" in status.read_text()
        for status in Path("/proc").glob("[0-9]*/status")
        if status.exists()
    ):
        time.sleep(0.05)
    assert len(set(os.listdir("/proc/self/fd")) - before) == 0
    assert "headrace" not in Path("/proc/self/mountinfo").read_text()
    assert [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if " /tmp/0" in line] == []


def test_one_sandbox_serves_one_loop_after_the_other():
    sandbox = Sandbox(SandboxSettings(interpreter="cpython", **LIMITS))
    try:
        assert [asyncio.run(sandbox.run(str(number))).result for number in range(3)] == ["0", "1", "2"]
        assert sandbox.restarts == 0
    finally:
        sandbox.close()


@pytest.mark.parametrize("withheld", [(Layer.SYSTEM_CALLS,), (Layer.LANDLOCK, Layer.NAMESPACES), (Layer.LIMITS,)])
def test_it_refuses_to_run_unprotected_unless_it_is_told_to(withheld):
    reasons = dict.fromkeys(withheld, "withheld by the test")
    refusing = Sandbox(SandboxSettings(interpreter="cpython", **LIMITS), reasons)
    for _ in range(2):
        with pytest.raises(SandboxError, match=r"unprotected here: there is no .*withheld by the test"):
            asyncio.run(refusing.run("1"))
    with pytest.raises(SandboxError, match="python\\.unprotected"):
        refusing.start()
    obeying = Box(SandboxSettings(interpreter="cpython", unprotected=True, **LIMITS), withheld)
    try:
        assert obeying.run("1 + 1").result == "2"
        assert "UNPROTECTED" in obeying.protection.describe()
        assert all(f"{layer:<13} no: withheld by the test" in obeying.protection.describe() for layer in withheld)
    finally:
        obeying.close()


def test_the_probe_prints_what_is_in_force():
    probe = [sys.executable, "-m", "environments.sandbox", "--probe"]
    told = subprocess.run([*probe, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    lines = [json.loads(line) for line in told.stdout.splitlines()]
    assert [one["interpreter"] for one in lines] == list(Interpreter)
    for one in lines:
        assert one["protected"] == (told.returncode == 0)
        assert {name for name, there in one["layers"].items() if not there} == set(one["missing"])
        assert one["layers"].keys() == set(Layer)
    words = subprocess.run([*probe, "--interpreter", "cpython"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert words.stdout.startswith("python sandbox, cpython interpreter: protected\n")
    assert len(words.stdout.splitlines()) == 1 + len(Layer)


def test_packages_can_be_named():
    box = Box(SandboxSettings(interpreter="cpython", packages=["numpy"], **LIMITS))
    try:
        assert box.run("import numpy\nnumpy.arange(4).sum().item()").result == "6"
        assert box.run("import numpy.polynomial\nnumpy.polynomial.Polynomial([1, 2])(3).item()").result == "7.0"
        assert "ModuleNotFoundError" in box.run("import pytest").error
        first = box.run("import numpy\nnumpy.random.random()", seed=1).result
        assert first == box.run("import numpy\nnumpy.random.random()", seed=1).result
        assert first != box.run("import numpy\nnumpy.random.random()", seed=2).result
    finally:
        box.close()
    with pytest.raises(SandboxError, match="'no_such_package'"):
        Sandbox(SandboxSettings(interpreter="cpython", packages=("no_such_package",))).start()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"interpreter": "ruby"}, "python.interpreter must be restricted or cpython, found 'ruby'"),
        ({"timeout_s": 0}, "python.timeout_s must be more than 0"),
        ({"memory_mb": 1}, "python.memory_mb must lie between 16 and"),
        ({"packages": ("numpy",)}, "python.packages must be empty for the restricted interpreter, found numpy"),
        ({"calls_per_episode": 0}, "python.calls_per_episode must be at least 1, found 0"),
        ({"queue_s": -1}, "python.queue_s must be more than 0"),
    ],
)
def test_settings_say_what_they_must_be(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        PythonSettings(**settings)


def test_the_tool_answers_and_counts():
    python = PythonTool(PythonSettings(interpreter="cpython", calls_per_episode=6, **LIMITS))

    async def episode():
        tool = python.tool()
        codes = [
            "print('a')\n6 * 7",
            "x = 1",
            "print('a')\n1 / 0",
            "print('a')\nwhile True: pass",
            "print('x' * 10 ** 5)",
        ]
        return [await tool.run({"code": code}) for code in [*codes, "1", "1"]]

    try:
        first, second = asyncio.run(episode()), asyncio.run(episode())
    finally:
        python.sandbox.close()
    assert first[0].text == "a\n42"
    assert first[1].text == "(no output)"
    assert first[2].text.startswith("a\nTraceback")
    assert first[2].text.endswith("ZeroDivisionError: division by zero")
    assert first[2].counts == {"tool_calls": 1}
    assert first[3].text == "error: it ran for longer than 1 s; it had printed:\na\n"
    assert first[3].counts == {"tool_calls": 1, "refused_calls": 1}
    assert first[4].text.startswith("error: it wrote more than 8192 bytes; it had printed:\nxxx")
    assert first[5].text == "1"
    assert first[6].text == "error: python may be called 6 times in an episode"
    assert [one.text for one in second[5:]] == [one.text for one in first[5:]]  # each episode has its own count


def test_the_tool_says_when_the_sandbox_is_at_fault():
    python = PythonTool(PythonSettings(interpreter="cpython", **LIMITS))

    async def main():
        tool = python.tool()
        assert (await tool.run({"code": "1"})).text == "1"
        task = asyncio.create_task(tool.run({"code": "import time\ntime.sleep(0.9)"}))
        await asyncio.sleep(0.2)
        os.kill(python.sandbox._server.process.pid, signal.SIGKILL)
        return await task, await tool.run({"code": "2"})

    try:
        lost, after = asyncio.run(main())
    finally:
        python.sandbox.close()
    assert lost.counts == {"tool_calls": 1, "tool_errors": 1}
    assert "lost the call" in lost.text
    assert after.text == "2"


AS_NOBODY = """
import asyncio, json, sys
from environments.sandbox.client import Sandbox, SandboxSettings
given = json.load(sys.stdin)
async def main():
    async with Sandbox(SandboxSettings(interpreter="cpython", **given["settings"])) as sandbox:
        answers = {name: await sandbox.run(code) for name, code in given["codes"].items()}
        right = await sandbox.run("6 * 7")
    return {name: [one.status, one.output, one.error] for name, one in answers.items()}, right.result
json.dump(asyncio.run(main()), sys.stdout)
"""


def interpreter_for_nobody():
    """A Python that a user without rights may run, with the arguments for becoming that user; our own otherwise."""
    for path in (sys.executable, "/usr/local/bin/python3", "/usr/bin/python3"):
        check = [path, "-B", "-c", "import sys, environments.sandbox.client; sys.exit(sys.version_info < (3, 11))"]
        if os.getuid() == 0 and os.path.exists(path):
            try:
                if subprocess.run(check, cwd=ROOT, env={}, user=65534, group=65534, extra_groups=[]).returncode == 0:
                    return path, {"user": 65534, "group": 65534, "extra_groups": []}
            except PermissionError:
                continue
    return sys.executable, {}


def test_it_needs_no_rights_itself(outside):
    codes = {name: attack_code(name, outside) for name, attack in ATTACKS.items() if isinstance(attack, str)}
    given = json.dumps({"codes": codes, "settings": {**LIMITS, "packages": TOOLS_OF_ATTACK}})
    python, nobody = interpreter_for_nobody()
    told = subprocess.run(
        [python, "-B", "-c", AS_NOBODY],
        cwd=ROOT,
        input=given,
        env={},
        capture_output=True,
        text=True,
        timeout=120,
        **nobody,
    )
    assert told.returncode == 0, told.stderr
    answers, right = json.loads(told.stdout)
    assert right == "42"
    wrong = {name: answer for name, answer in answers.items() if answer[:2] != ["completed", ""]}
    assert wrong == {}


def test_signals_that_the_engine_ignores_end_a_call_all_the_same():
    """What a shell starts in the background ignores SIGINT and SIGQUIT, and nohup SIGHUP."""
    numbers = (signal.SIGQUIT, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        box = Box(SandboxSettings(interpreter="cpython", **LIMITS))
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    try:
        for number in numbers:
            assert box.run(f"import os\nos.kill(os.getpid(), {int(number)})").status is CRASHED
    finally:
        box.close()
