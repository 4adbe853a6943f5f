"""The learner's process: the run file's sections put together for `learner.train`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from environments.environment import load_environment
from environments.user_code import make_importable
from learner.checkpoints import CheckpointError
from learner.hosts import LOST, UNUSABLE, Crew, Seat, follow, join
from learner.train import LearnerSpec, make_trainer, train
from pipelines.compiled import keep_compiled
from pipelines.config import Run
from pipelines.settings import SettingsError
from policy.allocator import keep_freed_memory
from policy.weights import load_model


def learner_spec(run: Run) -> LearnerSpec:
    """What the learner needs to know of a run."""
    return LearnerSpec(
        run_id=run.run_id,
        topics=run.topics,
        storage_url=run.storage,
        seed=run.seed,
        model=run.model,
        lora=run.lora,
        sharding=run.sharding,
        optimizer=run.optimizer,
        loss=run.loss,
        advantages=run.advantages,
        critic=run.critic,
        packing=run.packing,
        temperature=run.sampling.temperature,
        max_kept=run.sampling.max_kept if run.sampling.truncates else 0,
        learner=run.learner,
        checkpoints=run.checkpoints,
        evaluation=run.evaluation,
        alarms=run.alarms,
        failures=run.failures,
        difficulty=run.difficulty,
    )


def run_learner(
    run: Run,
    folder: Path,
    *,
    adapter: str | None = None,
    results: Path | None = None,
    coordinator: str | None = None,
    host: int | None = None,
    compilation_cache: str | None = None,
) -> int:
    """Train a resolved run; summary.json and metrics.jsonl go to `folder`; `adapter` and `results` are those of
    `learner.train`. Returns the exit status.

    Where several hosts train together (`sharding.hosts`), `coordinator` and `host` say which of them this is (see
    `learner.hosts.join`); those that follow do not return. `compilation_cache` is where compiled steps are
    kept (see `pipelines.compiled`).

    What no restart would mend (a model, an adapter, an environment, checkpoints that cannot be used) becomes a
    SettingsError.
    """
    if not run.run_id:
        raise SettingsError("the learner reads a resolved run: start one with `headrace run` or `headrace launch`")
    keep_freed_memory()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("absl").setLevel(logging.WARNING)
    try:
        keep_compiled(compilation_cache)
        if run.sharding.hosts > 1:
            return _run_host(run, folder, adapter, results, join(run.sharding.hosts, coordinator, host))
        if coordinator is not None or host is not None:
            raise ValueError("--coordinator and --host-id are for several hosts, and sharding.hosts is 1")
        make_importable(run.code.path)
        tasks = load_environment(run.environment, run.seed).tasks
        return train(learner_spec(run), tasks, folder, adapter=adapter, results=results)
    except (ValueError, CheckpointError) as error:
        logging.exception("this run cannot be trained")
        raise SettingsError(str(error)) from error


def _run_host(run: Run, folder: Path, adapter: str | None, results: Path | None, seat: Seat) -> int:
    spec = learner_spec(run)
    if not seat.owns:
        follow(seat, spec, lambda: make_trainer(spec, load_model(spec.model)))
    crew = Crew(seat, spec)
    status = LOST
    try:
        make_importable(run.code.path)
        tasks = load_environment(run.environment, run.seed).tasks
        status = train(spec, tasks, folder, adapter=adapter, results=results, crew=crew, stop=crew.interrupted)
    except (ValueError, CheckpointError):
        status = UNUSABLE
        raise
    finally:
        crew.close(status)
    return status
