from __future__ import annotations

import json
from pathlib import Path

import pytest
from jax.profiler import ProfileData

from benchmarks.learner import PARTS, Workload, executions, gap_fraction, gaps, measure
from policy.transformer import ModelConfig

pytestmark = pytest.mark.usefixtures("compilation_cache")
SMALL = Workload(
    model=ModelConfig(
        vocab_size=31, num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=24, max_context=256
    ),
    episodes=12,
    median=20.0,
    longest=64,
    buckets=(32, 64),
    prompt=48,
    members=4,
    completion=8,
    steps=3,
)
TRACE = """
planes {
  name: "/host:CPU"
  event_metadata { key: 1 value { id: 1 name: "something" } }
  stat_metadata { key: 1 value { id: 1 name: "run_id" } }
  lines { id: 1 timestamp_ns: 1000 %s }
  lines { id: 2 timestamp_ns: 1000 %s }
}
"""


def event(start: int, end: int, run: int | None = None) -> str:
    """An event in nanoseconds; of a run of an executable if it names one."""
    stats = "" if run is None else f"stats {{ metadata_id: 1 int64_value: {run} }}"
    return f"events {{ metadata_id: 1 offset_ps: {1000 * start} duration_ps: {1000 * (end - start)} {stats} }}"


def test_the_gap_is_the_time_in_which_no_executable_runs() -> None:
    first = [event(0, 10, run=1), event(30, 40, run=1), event(60, 100, run=4)]
    other = [event(5, 95), event(35, 50, run=2), event(110, 130, run=3)]
    runs = executions(ProfileData.from_text_proto(TRACE % (" ".join(first), " ".join(other))))
    # Between the operations of one run the executable runs all the same; what the host does does not count.
    assert sorted(runs) == [(1000, 1040), (1035, 1050), (1060, 1100), (1110, 1130)]
    assert gaps(runs) == [10, 10]
    assert gap_fraction(runs) == pytest.approx(20 / 130)
    with pytest.raises(RuntimeError, match="no run of an XLA executable"):
        executions(ProfileData.from_text_proto(TRACE % (event(0, 10), "")))


def test_every_part_measures_and_says_its_figures(tmp_path: Path) -> None:
    result = measure(SMALL, pairs=1, parts=list(PARTS), tunix=tmp_path / "python")
    assert result.keys() >= {*PARTS, "padding_fraction"}
    assert result["packed_vs_padded"] > 0
    assert 0 <= result["padding_fraction"] < result["padded_padding_fraction"] < 1
    assert result["shared_prompt"]["row_tokens"] == [80, 224]
    assert 0 <= result["step_gap_fraction"] < 1
    assert result["step_gap"]["steps"] == 3
    assert result["vs_tunix"] is None
    assert "make bench-setup" in result["tunix"]
    assert json.loads(json.dumps(result)) == result
