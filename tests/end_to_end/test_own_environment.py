"""A whole run of an environment that is named by `code.path`, with a program as its agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.stack import audit, headrace

FILE = Path(__file__).parents[2] / "examples" / "own" / "agent_program.toml"


@pytest.mark.timeout(300)
def test_a_run_trains_on_an_agent_program_of_the_users(tmp_path: Path) -> None:
    short = (
        "--set",
        "learner.steps=2",
        "--set",
        "evaluation.questions=8",
        "--set",
        "rollouts.heartbeat_interval_s=1.0",
    )
    with headrace(tmp_path / "run", "run", str(FILE), *short) as stack:
        found = stack.finish(250)
    audit(tmp_path / "run", found)
    assert found["step"] == 2
    assert found["groups"]["trained"] > 0
    assert found["compiles_after_warmup"] == 0
