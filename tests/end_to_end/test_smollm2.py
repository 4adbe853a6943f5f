"""The demo itself: a real LLM learns to use a real tool. Minutes to hours: `make soak`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.stack import audit, headrace


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", [0, 1])
def test_smollm2_learns_the_calculator_within_twelve_minutes(seed: int, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with headrace(out, "demo", "--seed", str(seed)) as stack:
        found = stack.finish(2900)
    print(json.dumps(found))
    audit(out, found)
    assert found["evaluation_before"]["sampled"][1] >= 128
    assert found["success_before"] <= 0.3
    assert found["success_after"] >= 0.9
    assert found["greedy_after"] >= 0.95
    assert found["train_s"] <= 720
    assert any(point["sampled"] > 0.5 and point["train_s"] <= 360 for point in found["curve"])
    assert found["adapter_lag_s"]["p95"] <= 1.0
