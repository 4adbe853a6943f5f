"""The same learner fed from a list of closings in memory: what a run's throughput is held against.

Row layout, preparation ahead of the device and the device thread are those of a run; the network, the ledger, the
buffer and the actors are left out.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from learner.background import Compiled, Crashed, Device, StepDone, StepRunner, Work
from learner.buffer import Held, lay_out_updates
from learner.loop import STEPS_AHEAD
from learner.settings import LearnerSettings
from trajectories.schema import Pack


@dataclass(frozen=True, slots=True)
class MemoryFed:
    """What the device does when rows are always there."""

    steps: int
    wall_s: float
    """From the first step's begin to the last one's end; without compilation."""
    busy: float
    """Fraction of it in which the device computed a step."""
    step_s: float
    """Mean seconds of a step."""
    tokens_per_s: float
    """Tokens of trained rows, padding left out."""
    compiles_after_warmup: int
    """XLA compilations of the process while it trained: 0, whatever the lengths were."""


def train_from_memory(trainer: StepRunner, packs: Sequence[Pack], settings: LearnerSettings, steps: int) -> MemoryFed:
    """Compile and take `steps` steps over `packs`, again and again from the first. Changes the trainer's state.

    Raises ValueError if the packs hold fewer closings than one step takes.
    """
    held = [(closing, pack) for pack in packs for closing in pack.closings]
    if len(held) < settings.groups_per_step or steps < 1:
        raise ValueError(
            f"{steps} steps of {settings.groups_per_step} closings cannot be taken from {len(held)}: give at least one "
            "step and as many closings as it takes"
        )
    closings = cycle(held)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    device = Device(trainer, inbox.put, time.monotonic)
    device.start()
    done: list[StepDone] = []
    submitted = compiled = 0
    try:
        event = inbox.get()
        while True:
            if isinstance(event, Crashed):
                raise event.error
            if isinstance(event, StepDone):
                done.append(event)
            elif isinstance(event, Compiled):
                compiled = event.compiles
            else:
                raise TypeError(f"unknown event {event!r}")
            if len(done) == steps:
                break
            while submitted < steps and submitted - len(done) < STEPS_AHEAD:
                chosen = tuple(
                    Held(closing, pack, version_step=submitted, order=order)
                    for order, (closing, pack) in enumerate(islice(closings, settings.groups_per_step))
                )
                rows = lay_out_updates(chosen, settings.minibatches, rewards=trainer.wants_rewards)
                prepared = trainer.prepare(*rows)
                device.submit(Work(submitted, chosen, prepared))
                submitted += 1
            event = inbox.get()
    finally:
        device.close(settings.stop_within_s)
    wall_s = done[-1].ended - done[0].began
    busy_s = sum(step.ended - step.began for step in done)
    tokens = sum(step.work.prepared.used_tokens for step in done)
    return MemoryFed(steps, wall_s, busy_s / wall_s, busy_s / steps, tokens / wall_s, trainer.compiles - compiled)
