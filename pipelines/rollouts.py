"""The rollout job: `python -m pipelines.rollouts --run RUN.json [Beam options]`, and the main of the Flex Template.

    tasks ─▶ ReadTasks ─▶ RunEpisodes ─▶ GroupEpisodes ─▶ Advantages ─▶ PackRows ─▶ PublishRows
                              └─▶ PublishResults    └──────────┴────────────┴─▶ PublishVerdicts
    dead letters of every stage ─▶ PublishDeadLetters

Locally the process is the job and lives until it is told to stop, or finds that it cannot run episodes; on Dataflow it
submits the job and ends.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions, SetupOptions, StandardOptions

from pipelines.config import load_run
from pipelines.direct_runner import ease
from pipelines.local import EXIT_CONFIGURATION, REFUSAL
from policy.allocator import keep_freed_memory
from transforms.advantages import Advantages
from transforms.dead_letters import DEAD, EVALUATED, VERDICTS
from transforms.episodes import RunEpisodes, RuntimeFactory
from transforms.groups import GroupEpisodes
from transforms.publish import PublishDeadLetters, PublishResults, PublishRows, PublishVerdicts
from transforms.rows import PackRows
from transforms.runtime import ProcessRuntime, RolloutRuntime, close_runtimes
from transforms.settings import RolloutSpec
from transforms.tasks import ReadTasks

LOCAL_RUNNERS = (None, "", "DirectRunner", "BundleBasedDirectRunner", "SwitchingDirectRunner")
STOP_S = 1.0
"""Seconds that each part of a local job is given to stop when the job is told to."""


def build(pipeline: beam.Pipeline, spec: RolloutSpec, factory: RuntimeFactory | None = None) -> None:
    """Add the job's graph to `pipeline`; `factory` makes each worker process's runtime (default: that of the spec)."""
    topics, settings, policy = spec.topics, spec.rollouts, spec.failures.make()
    read = pipeline | "ReadTasks" >> ReadTasks(spec)
    ended = read.tasks | "RunEpisodes" >> RunEpisodes(
        spec.run_id,
        factory or ProcessRuntime(spec),
        poll_interval_s=settings.poll_interval_s,
        max_attempts=settings.max_attempts,
        policy=policy,
    )
    grouped = ended.episodes | "GroupEpisodes" >> GroupEpisodes(settings, policy)
    estimated = grouped.closings | "Advantages" >> Advantages(spec.advantages)
    packs, refused, unpackable = estimated.closings | "PackRows" >> PackRows(spec.packing)

    packs | "PublishRows" >> PublishRows(topics.rows)
    ended[EVALUATED] | "PublishResults" >> PublishResults(topics.results)
    verdicts = (grouped[VERDICTS], estimated[VERDICTS], refused) | "Verdicts" >> beam.Flatten()
    verdicts | "PublishVerdicts" >> PublishVerdicts(topics.verdicts)
    dead_letters = (read[DEAD], ended[DEAD], estimated[DEAD], unpackable) | "DeadLetters" >> beam.Flatten()
    dead_letters | "PublishDeadLetters" >> PublishDeadLetters(topics.dead_letters)


def options_of(arguments: Sequence[str]) -> PipelineOptions:
    """Beam's options: always streaming, and never the pickled session of the main module."""
    options = PipelineOptions(list(arguments))
    options.view_as(StandardOptions).streaming = True
    options.view_as(SetupOptions).save_main_session = False
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job that the arguments describe; the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.rollouts", description="The rollout job of a run.")
    parser.add_argument("--run", required=True, help="path or gs:// address of the resolved run file")
    known, arguments = parser.parse_known_args(argv)
    keep_freed_memory()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Every annotation that is a string, as all of ours are, is worth a line to Beam; the stages declare their types.
    logging.getLogger("apache_beam.typehints").setLevel(logging.WARNING)
    run = load_run(known.run)
    options = options_of(arguments)
    pipeline = beam.Pipeline(options=options)
    runtime = ProcessRuntime(run.rollout_spec())
    build(pipeline, runtime.spec, runtime)
    if options.view_as(StandardOptions).runner in LOCAL_RUNNERS:
        # Beam would make it at the first task. But a job that was killed with all tasks in hand and started again gets
        # none before the learner has heard from it.
        return _serve(pipeline, runtime.start())
    # A template's launcher must not wait: the job outlives it.
    result = pipeline.run()
    job_id = result.job_id() if hasattr(result, "job_id") else "-"
    logging.info("submitted the rollout job of run %s: job %s", run.run_id, job_id)
    return 0


def _serve(pipeline: beam.Pipeline, runtime: RolloutRuntime) -> int:
    """Run a local job until SIGTERM, SIGINT (0), its failure (1), or one that no restart would mend (2)."""
    over = threading.Event()
    failures: list[BaseException] = []

    def stop(number: int, _: Any) -> None:
        logging.info("stopping on %s", signal.Signals(number).name)
        over.set()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
    ease()
    result = pipeline.run()

    def wait() -> None:
        try:
            result.wait_until_finish()
        except BaseException as error:
            failures.append(error)
        over.set()

    threading.Thread(target=wait, name="job", daemon=True).start()
    while not over.wait(1.0) and runtime.failure is None:
        pass
    if failures:
        logging.error("the rollout job failed", exc_info=failures[0])
    # Beam's thread may hang in a pull from a server that is gone: nobody waits longer than STOP_S for it.
    cancel = threading.Thread(target=result.cancel, name="cancel", daemon=True)
    cancel.start()
    cancel.join(STOP_S)
    close_runtimes(STOP_S)
    if isinstance(runtime.failure, ValueError):  # a model, an environment or the user's code that cannot be used
        print(f"{REFUSAL}{runtime.failure}", file=sys.stderr, flush=True)
        return EXIT_CONFIGURATION
    return 1 if failures or runtime.failure is not None else 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    # Threads of gRPC and JAX may keep a finished interpreter from ending.
    os._exit(code)
