"""The servers under test.

Every test that takes `clients` runs against our server and, where it is installed, against Google's emulator. What the
latter is known to do wrong is in OFFICIAL_FAULTS: there the same test must fail, so that the list stays true.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from emulator.testing import ServerProcess
from tests.emulator.clients import Clients, connect

OFFICIAL_FAULTS = {
    "test_update_topic": "calls a topic's labels an unknown field",
    "test_ack_deadline_range[5]": "takes an ack deadline below the service's 10 s",
    "test_detach": "has no DetachSubscription",
    "test_publish_is_refused[over 10 MB]": "takes publish requests above 10 MB",
    "test_publish_is_refused[long attribute key]": "has no limits on attributes",
    "test_publish_is_refused[long attribute value]": "has no limits on attributes",
    "test_publish_is_refused[too many attributes]": "has no limits on attributes",
    "test_publish_is_refused[long ordering key]": "has no limit on ordering keys",
    "test_modify_range": "takes ack deadlines outside of 0 to 600 s",
    "test_flow_control": "lets what a full stream has no room for reach nobody else",
    "test_a_dead_subscribers_messages_go_to_the_living": "goes on handing messages to streams that have died",
    "test_nack_brings_a_keys_later_messages_again": "redelivers a key out of order",
    "test_retry_policy_delays_redelivery": "ignores retry policies",
    "test_filter": "ignores filters",
    "test_bad_filter": "takes any text for a filter",
    "test_topic_retention_serves_a_later_subscription": "gives a new subscription what the topic retained, unasked",
}
"""Test → what Google's emulator 0.8.20 does wrong, and why it must fail there."""


def official_jar() -> Path | None:
    """The newest jar of Google's emulator under an installed Cloud SDK."""
    roots = [Path(value) for name in ("CLOUDSDK_ROOT_DIR", "CLOUDSDK_ROOT") if (value := os.environ.get(name))]
    gcloud = shutil.which("gcloud")
    if gcloud:
        roots.append(Path(gcloud).resolve().parent.parent)
    roots += [Path("/usr/lib/google-cloud-sdk"), Path("/opt/google-cloud-sdk"), Path.home() / "google-cloud-sdk"]
    for root in roots:
        jars = sorted((root / "platform" / "pubsub-emulator" / "lib").glob("cloud-pubsub-emulator-*-all.jar"))
        if jars:
            return jars[-1]
    return None


def _servers() -> list[Any]:
    servers = [pytest.param("headrace", id="headrace")]
    if official_jar() and shutil.which("java"):
        servers.append(pytest.param("official", id="official", marks=pytest.mark.emulator_official))
    return servers


@pytest.fixture(scope="session")
def _ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = ServerProcess(tmp_path_factory.mktemp("pubsub"))
    server.start()
    yield server.address
    server.stop()


@pytest.fixture(scope="session")
def _official(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # The jar itself: `gcloud beta emulators pubsub start` leaves its java child behind.
    command = ["java", "-jar", str(official_jar()), "--host=127.0.0.1", f"--port={port}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, "Google's emulator ended instead of listening"
                assert time.monotonic() < deadline, "Google's emulator did not listen within 60 s"
                time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(params=_servers())
def clients(request: pytest.FixtureRequest) -> Iterator[Clients]:
    """Clients of the server under test."""
    if request.param == "official":
        name = request.node.name.replace("[official]", "").replace("[official-", "[")
        if name in OFFICIAL_FAULTS:
            request.node.add_marker(pytest.mark.xfail(reason=OFFICIAL_FAULTS[name], strict=True))
        address = request.getfixturevalue("_official")
    else:
        address = request.getfixturevalue("_ours")
    # Where a failure is expected, it need not be awaited for long.
    found = connect(address, patience_s=10.0 if request.param == "headrace" else 4.0)
    yield found
    found.subscriber.close()
