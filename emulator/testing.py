"""A server as its own process, for tests: `with running_server() as address: ...`.

Invariant: when the context ends, the process has ended and a temporary folder is gone.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

START_S = 60.0
"""How long a start may take; generous, machines under test are busy."""


class ServerProcess:
    """A running server. `kill` it at any moment and `start` it again on the same folder and port."""

    def __init__(self, data: Path, options: Sequence[str] = ()) -> None:
        self.data = data
        self.port = 0
        self._options = list(options)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """host:port, for PUBSUB_EMULATOR_HOST; the same after every restart."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None, "the server has not been started"
        return self._process.pid

    def start(self) -> None:
        """Start the server and wait until it listens. Raises RuntimeError if it does not."""
        self.data.mkdir(parents=True, exist_ok=True)
        port_file = self.data / "port"
        port_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "emulator", "--data", str(self.data), "--port", str(self.port)]
        command += ["--port-file", str(port_file), *self._options]
        root = Path(__file__).resolve().parent.parent
        self._process = subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while not port_file.exists():
            status = self._process.poll()
            if status is not None:
                raise RuntimeError(
                    f"the Pub/Sub server ended with status {status} instead of listening; see its stderr"
                )
            if time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"the Pub/Sub server did not listen within {START_S:g} s")
            time.sleep(0.02)
        self.port = int(port_file.read_text())

    def kill(self) -> None:
        """SIGKILL; returns once the process is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self, timeout_s: float = 10.0) -> int:
        """SIGTERM; returns the exit status."""
        assert self._process is not None, "the server has not been started"
        self._process.terminate()
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


@contextmanager
def running_server(data_dir: Path | None = None, options: Sequence[str] = ()) -> Iterator[str]:
    """Start a server on a free port and yield its address (host:port); on a temporary folder by default."""
    with tempfile.TemporaryDirectory(prefix="pubsub-") as temporary:
        server = ServerProcess(data_dir or Path(temporary), options)
        server.start()
        try:
            yield server.address
        finally:
            server.stop()
