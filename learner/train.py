"""A run of the learner, from the claim on its storage to summary.json.

    claim the incarnation -> restore -> publish what was restored -> compile beside the evaluation before
    -> train -> evaluation after -> summary.json

Invariants: an incarnation writes nothing once a newer one has claimed the run; `summary.json` is written however the
run ends otherwise; every wait of the way out is bounded.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from learner.alarms import AlarmSettings
from learner.background import AdapterPublisher, CheckpointWriter, Device, StepRunner
from learner.checkpoints import Checkpoints
from learner.clients import publisher_client
from learner.critic import CriticSettings
from learner.difficulty import DifficultySettings, Pool
from learner.feeder import TaskSource
from learner.hosts import Crew, HostedTrainer
from learner.ledger import Ledger
from learner.loop import Ending, Interrupt, Loop, Parts
from learner.losses import LossSettings
from learner.metrics import Journal, Tally
from learner.results import Results
from learner.settings import CheckpointSettings, EvaluationSettings, LearnerSettings
from learner.sharding import ShardingSettings
from learner.step import OptimizerSettings, Trainer
from learner.subscriber import Outbox, Subscriber
from policy.adapters import AdapterStore, BadAdapter, Lease, claim_incarnation, load_peft
from policy.lora import Adapter, LoraSettings
from policy.settings import Quantization
from policy.transformer import ModelConfig
from policy.weights import LoadedModel, ModelSettings, load_model
from trajectories.advantages import AdvantageSettings
from trajectories.failures import FailureSettings
from trajectories.packing import PackingSettings
from trajectories.storage import FolderStorage, Storage, open_storage
from trajectories.topics import Topics

logger = logging.getLogger(__name__)

EXIT_STATUS = {
    Ending.STEPS: 0,
    Ending.TARGET_SUCCESS: 0,
    Ending.TRAIN_S: 0,
    Ending.SOLVED: 0,
    Ending.CRASHED: 1,
    Ending.NO_PROGRESS: 3,
    Ending.TAKEN_OVER: 4,
    Ending.FAILED_FAST: 5,
    Ending.INTERRUPTED: 130,
}
"""What `train` returns. 3 to 5 would end the same way if they were started again."""
_GOOGLE_PUBLISH_INTERVAL_S = 1.0


@dataclass(frozen=True)
class LearnerSpec:
    """Everything that one run of the learner needs to know: settings only."""

    run_id: str
    topics: Topics
    storage_url: str
    """Folder or gs:// prefix of the run, for adapters and checkpoints."""
    seed: int = 0
    model: ModelSettings = field(default_factory=ModelSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    sharding: ShardingSettings = field(default_factory=ShardingSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    advantages: AdvantageSettings = field(default_factory=AdvantageSettings)
    critic: CriticSettings = field(default_factory=CriticSettings)
    packing: PackingSettings = field(default_factory=PackingSettings)
    temperature: float = 1.0
    """Of the sampler in training."""
    max_kept: int = 0
    """Most ids that a truncated draw (top-k, top-p, min-p) keeps; 0 if the sampler draws from the whole vocabulary."""
    learner: LearnerSettings = field(default_factory=LearnerSettings)
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    alarms: AlarmSettings = field(default_factory=AlarmSettings)
    failures: FailureSettings = field(default_factory=FailureSettings)
    difficulty: DifficultySettings = field(default_factory=DifficultySettings)


def say_aloud(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def make_trainer(spec: LearnerSpec, model: LoadedModel) -> Trainer:
    """The trainer of a run, at step 0 with a fresh adapter, nothing compiled."""
    return Trainer(
        model.config,
        model.weights,
        spec.lora,
        spec.optimizer,
        spec.loss,
        buckets=spec.packing.buckets,
        rows_per_call=spec.learner.rows_per_call,
        temperature=spec.temperature,
        max_kept=spec.max_kept,
        seed=spec.seed,
        remat=spec.learner.remat,
        quantize=spec.model.quantize,
        sharding=spec.sharding,
        advantages=spec.advantages,
        epochs=spec.learner.epochs,
        minibatches=spec.learner.minibatches,
        critic=spec.critic,
    )


def train(
    spec: LearnerSpec,
    tasks: TaskSource,
    folder: Path,
    *,
    adapter: str | None = None,
    results: Path | None = None,
    stop: threading.Event | None = None,
    crew: Crew | None = None,
    say: Callable[[str], None] = say_aloud,
) -> int:
    """Train until a stop rule holds; returns the exit status (see `EXIT_STATUS`).

    `folder` gets summary.json, metrics.jsonl, samples.jsonl and dead_letters.jsonl. `adapter` (folder or gs://, PEFT
    layout) replaces the fresh adapter of a run without checkpoints. `results` is where a run that only evaluates, once,
    writes each ended episode, and from where it takes those that ended in an earlier life. `crew` are the hosts that
    follow this one, if there are several. The run ends early when `stop` is set, on SIGINT and on SIGTERM.

    Raises what made it impossible to begin or to go on: ModelError, CheckpointError, ... (ValueError: no restart would
    mend it).
    """
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with _interrupts(inbox, stop):
        if results is None:
            return _train(spec, tasks, folder, adapter, None, crew, inbox, say)
        if spec.learner.steps or not spec.evaluation.before or spec.evaluation.after:
            raise ValueError(
                "results are kept of a run that evaluates once and does not train: learner.steps must be 0, "
                "evaluation.before true and evaluation.after false"
            )
        with closing(Results(results, spec.seed, say)) as file:
            return _train(spec, tasks, folder, adapter, file, crew, inbox, say)


def leave(status: int) -> NoReturn:
    """End the process with what `train` returned.

    A run that is interrupted while XLA compiles leaves a thread behind, on which an orderly interpreter exit aborts.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _train(
    spec: LearnerSpec,
    tasks: TaskSource,
    folder: Path,
    adapter: str | None,
    results: Results | None,
    crew: Crew | None,
    inbox: queue.SimpleQueue[Any],
    say: Callable[[str], None],
) -> int:
    clock = time.monotonic
    storage = open_storage(spec.storage_url)
    lease = Lease(storage, claim_incarnation(storage))
    model = load_model(spec.model)
    own = make_trainer(spec, model)
    trainer: StepRunner = own if crew is None else HostedTrainer(own, crew)
    checkpoints = Checkpoints(storage.join("checkpoints"), lease.incarnation, spec.checkpoints.keep)
    snapshot = checkpoints.newest(trainer.state())
    base = model.name if spec.model.quantize is Quantization.NONE else f"{model.name} in {spec.model.quantize}"
    ledger, tally = Ledger(spec.learner.max_attempts), Tally()
    pool = Pool(spec.difficulty) if spec.difficulty.on else None
    if snapshot is not None:
        trainer.restore(snapshot.state)
        trained_on = snapshot.record.get("base", base)
        if trained_on != base:
            say(f"warning: the adapter of step {snapshot.step} was trained on {trained_on}; from here on it is {base}")
        ledger = Ledger.from_bytes(snapshot.ledger, spec.learner.max_attempts)
        tally = Tally.from_json(snapshot.record["tally"])
        pool = Pool.from_json(spec.difficulty, snapshot.record.get("pool", [])) if pool is not None else None
    elif adapter is not None:
        trainer.restore(trainer.state()._replace(adapter=starting_adapter(adapter, model.config, spec.lora)))

    outbox = Outbox(spec.topics, publisher_client(), inbox.put)
    lease_s = 10 * spec.checkpoints.every_s
    subscriber = Subscriber(spec.topics, outbox, inbox.put, clock, max_lease_s=lease_s)
    device = Device(trainer, inbox.put, clock, will_train=spec.learner.steps > 0)
    store = AdapterStore(storage, model.config, spec.lora, base_model=model.base_model)
    if tally.evaluating is not None and tally.evaluating not in store.versions():
        tally.evaluating = None  # the crash came before it was published: the next step is evaluated instead
    publisher = AdapterPublisher(
        store, spec.learner.keep_adapters, _publish_interval_s(spec.learner, storage), inbox.put, clock
    )
    writer = CheckpointWriter(checkpoints, lease, inbox.put)
    metrics, samples = Journal(folder / "metrics.jsonl"), Journal(folder / "samples.jsonl")
    for journal in (metrics, samples):
        journal.keep(lambda line: snapshot is not None and line["step"] <= snapshot.step)
    loop = Loop(
        Parts(
            run_id=spec.run_id,
            incarnation=lease.incarnation,
            learner=spec.learner,
            checkpoints=spec.checkpoints,
            evaluation=spec.evaluation,
            buckets=spec.packing.buckets,
            vocab_size=model.config.vocab_size,
            max_kept=spec.max_kept,
            trainer=trainer,
            ledger=ledger,
            tally=tally,
            tasks=tasks,
            outbox=outbox,
            device=device,
            publisher=publisher,
            writer=writer,
            metrics=metrics,
            samples=samples,
            dead_letters=Journal(folder / "dead_letters.jsonl"),
            inbox=inbox,
            clock=clock,
            say=say,
            adapters_url=storage.join("adapters").url,
            alarms=spec.alarms,
            failures=spec.failures.make(),
            pool=pool,
            base=base,
            results=results,
        )
    )
    try:
        for thread in (writer, publisher, device):
            thread.start()
        subscriber.start()
        ending = loop.run()
    finally:
        if loop.ending is not Ending.TAKEN_OVER:
            _write_summary(folder, loop.summary())
        patience_s = spec.learner.stop_within_s / 4
        device.close(patience_s)
        writer.close(patience_s)
        publisher.close(patience_s)
        subscriber.close(patience_s)
        outbox.close(patience_s)
    if loop.error is not None:
        raise loop.error
    return EXIT_STATUS[ending]


def starting_adapter(url: str, config: ModelConfig, lora: LoraSettings) -> Adapter:
    """The adapter that a run begins with; raises ValueError if it cannot be read or is not of the run's shape."""
    try:
        adapter, found = load_peft(open_storage(url), config)
    except BadAdapter as error:
        raise ValueError(str(error)) from error
    if (found.rank, found.alpha, found.projections) != (lora.rank, lora.alpha, lora.projections):
        raise ValueError(
            f"the adapter in {url} has rank {found.rank}, alpha {found.alpha} on {', '.join(found.projections)}: set "
            "lora.rank, lora.alpha and lora.targets of the run to the same"
        )
    return adapter


def _publish_interval_s(settings: LearnerSettings, storage: Storage) -> float:
    if settings.publish_interval_s is not None:
        return settings.publish_interval_s
    return 0.0 if isinstance(storage, FolderStorage) else _GOOGLE_PUBLISH_INTERVAL_S


def _write_summary(folder: Path, summary: dict[str, Any]) -> None:
    FolderStorage(folder).write("summary.json", (json.dumps(summary, indent=2) + "\n").encode())


@contextmanager
def _interrupts(inbox: queue.SimpleQueue[Any], stop: threading.Event | None) -> Iterator[None]:
    """Turn SIGINT, SIGTERM and `stop` into an event. A second signal ends the process at once."""
    before: dict[int, Any] = {}

    def on_signal(number: int, frame: Any) -> None:
        inbox.put(Interrupt())
        signal.signal(number, before[number])

    ended = threading.Event()

    def await_stop() -> None:
        assert stop is not None
        while not ended.is_set():
            if stop.wait(0.2):
                inbox.put(Interrupt())
                return

    if threading.current_thread() is threading.main_thread():
        before = {int(number): signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    if stop is not None:
        threading.Thread(target=await_stop, name="await-stop", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        for number, handler in before.items():
            with suppress(ValueError, TypeError):
                signal.signal(number, handler)
