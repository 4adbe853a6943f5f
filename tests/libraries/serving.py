"""Servers in processes of their own, on a port of loopback that is their only argument."""

import socket
import subprocess
import sys
import time


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(script, port):
    """The server's process, once it listens."""
    process = subprocess.Popen([sys.executable, str(script), str(port)])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server ended"
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                return process
        time.sleep(0.1)
    process.kill()
    raise AssertionError("the server does not listen")
