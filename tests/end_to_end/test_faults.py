"""A run that is fed the worst: broken tools, malformed tasks, rows from the future. It ends well and keeps count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import zstandard
from google.cloud import pubsub_v1
from safetensors.numpy import save

from tests.end_to_end.stack import Stack, audit, headrace
from trajectories import codec
from trajectories.topics import Topics

RUN = """
name = "faults"
[code]
path = "{code}"
[model]
path = "calculator-tiny"
[lora]
rank = 8
alpha = 16.0
[sampling]
slots = 64
max_tokens = 14
max_context = 64
[environment]
name = "faulty_calculator:FaultyCalculator"
step_timeout_s = 1.5
[packing]
buckets = [512]
[rollouts]
heartbeat_interval_s = 1.0
[learner]
groups_per_step = 4
group_size = 8
steps = 5
max_staleness = 2
rows_per_call = 4
[evaluation]
questions = 0
"""


def publish(stack: Stack, topic: str, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    run = json.loads((stack.attempt / "run.json").read_text())
    address = json.loads((stack.attempt / "processes.json").read_text())["address"]
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", address)
    publisher = pubsub_v1.PublisherClient()
    publisher.publish(Topics("headrace-local", run["run_id"]).topic(topic), data).result(30)
    publisher.stop()


def from_the_future() -> bytes:
    envelope = {"schema": codec.SCHEMA_VERSION + 1, "type": "Pack", "body": []}
    return codec.MAGIC + zstandard.compress(save({}, {codec.METADATA_KEY: json.dumps(envelope)}))


@pytest.mark.timeout(400)
def test_every_fault_is_counted_and_dead_lettered_and_the_run_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "faults.toml"
    file.write_text(RUN.format(code=Path(__file__).parent / "faulty"))
    out = tmp_path / "run"
    with headrace(out, "run", str(file)) as stack:
        stack.until(lambda: len(stack.steps()) >= 1, 250, "the first step")
        publish(stack, "tasks", b"no task at all", monkeypatch)
        publish(stack, "rows", from_the_future(), monkeypatch)
        found = stack.finish(300)
    audit(out, found)
    assert found["step"] == 5
    letters = found["dead_letters"]
    for reason in ("tool_errors", "timeout", "cut_outputs", "invalid_outputs"):
        assert letters.get(f"RunEpisodes: {reason}", 0) > 0, (reason, letters)
    assert any(name.startswith("ReadTasks: ") for name in letters), letters
    assert any(name.endswith("FutureVersion") for name in letters), letters
    kept = [json.loads(line) for line in (stack.attempt / "dead_letters.jsonl").read_text().splitlines()]
    assert any("on fire" in json.dumps(letter) or "tool_errors" in json.dumps(letter) for letter in kept)
    assert len(kept) >= sum(letters.values())
