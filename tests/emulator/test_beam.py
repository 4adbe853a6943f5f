"""Beam's own Pub/Sub source and sink on our server, through PUBSUB_EMULATOR_HOST."""

import os
import subprocess
import sys
from pathlib import Path

from emulator.testing import running_server
from tests.emulator.clients import connect


def test_read_and_write(tmp_path: Path) -> None:
    with running_server(tmp_path) as address:
        clients = connect(address)
        source, sink = clients.topic(), clients.topic()
        reading, written = clients.subscription(source), clients.subscription(sink)
        job = Path(__file__).parent / "beam_process.py"
        environment = {**os.environ, "PUBSUB_EMULATOR_HOST": address}
        with subprocess.Popen([sys.executable, str(job), reading, sink], env=environment) as process:
            try:
                bodies = {b"%d" % number for number in range(50)}
                clients.publish(source, *bodies, colour="green")
                received = clients.pull(written, 50, within_s=120)
            finally:
                process.kill()
        assert {m.message.data for m in received} == bodies
        assert all(dict(m.message.attributes) == {"colour": "green", "seen": "yes"} for m in received)
        # Beam acknowledges what it reads.
        assert clients.nothing_left(reading)
