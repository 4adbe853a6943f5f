"""The examples of docs/environments.md, as they stand there: real episodes with the tiny model, of whatever worth."""

import asyncio
import textwrap
from pathlib import Path

import pytest

from environments.environment import load_environment
from environments.orchestrator import RolloutOrchestrator
from pipelines.check import check
from pipelines.config import load_run
from policy.chat import load_chat
from policy.client import SamplingParams
from policy.engine import Engine
from policy.settings import SamplingSettings
from policy.weights import load_model
from trajectories.schema import Status, Task, Version

ROOT = Path(__file__).parents[2]
OWN = ROOT / "examples" / "own"
RUN_FILES = sorted(file for file in OWN.glob("*.toml") if file.stem != "mcp_server")  # that one: tests/end_to_end
TURNS = {"single_turn": 1, "function_tool": 3, "multi_turn": 3, "agent_program": 3}


@pytest.fixture(scope="module")
def engine():
    run = load_run(str(OWN / "single_turn.toml"))
    model = load_model(run.model)
    settings = SamplingSettings(
        slots=8, small_batch=0, max_context=64, max_tokens=14, prefill_chunk=16, extend_rows=4, extend_chunk=16
    )
    engine = Engine(model.config, model.weights, None, Version(0, 1), settings, 1.0)
    yield engine
    engine.close()


@pytest.mark.parametrize("file", RUN_FILES, ids=lambda file: file.stem)
def test_an_example_runs_for_real(file, engine):
    run = load_run(str(file))
    prompt = "" if file.stem in ("multi_turn", "agent_program") else ", a first prompt of 7 tokens"
    assert check(run).endswith(f"environment {run.environment.name}, 32 held-out questions{prompt}")
    spec = load_environment(run.environment, run.seed)
    chat, sampling = load_chat(run.model.path), SamplingParams(max_tokens=14)
    orchestrator = RolloutOrchestrator(engine, chat, spec, run.environment, sampling, run_seed=0)

    async def play():
        tasks = [Task("run", group, payload=spec.tasks.task(group)) for group in range(16)]
        return await asyncio.gather(*(orchestrator.run(task, 0) for task in tasks))

    episodes = asyncio.run(play())
    assert [episode.error for episode in episodes] == [""] * 16
    assert {episode.status for episode in episodes} <= {Status.COMPLETED, Status.MAX_TURNS, Status.MAX_TOKENS}
    assert max(len(episode.turns) for episode in episodes) == TURNS[file.stem]
    assert any(episode.reward > 0 for episode in episodes)
    assert (orchestrator.gauges.abandoned, orchestrator.gauges.hung_threads) == (0, 0)


def test_the_page_shows_the_examples_as_they_are():
    page = (ROOT / "docs" / "environments.md").read_text()
    assert {file.stem for file in RUN_FILES} == set(TURNS)
    for name in TURNS:
        source = (OWN / f"{name}.py").read_text()
        assert len(source.splitlines()) <= 40
        body = source.partition('"""\n\n')[2]
        assert textwrap.indent(body, "    ", bool).strip() in page, name
