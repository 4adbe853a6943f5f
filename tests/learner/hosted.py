"""One of several learner processes, for `test_hosts`: `python -m tests.learner.hosted steps|run SETTINGS`.

`steps` takes steps on rows that are the same every time and leaves what came of them in a file; several hosts then take
more until somebody ends them. `run` is a run of `learner.train`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from learner.hosts import Crew, HostedTrainer, Seat, follow, join
from learner.sharding import ShardingSettings
from learner.step import Trainer
from learner.train import leave, make_trainer, train
from policy.weights import load_model
from tests.learner.actors import Tasks
from tests.learner.process import spec_of
from tests.learner.test_step import build, closings, packed_rows, random_adapter


def rows(number: int) -> Any:
    return packed_rows(closings(seed=number, members=2, prompts=(12, 7, 9, 5)), 64)


def steps(settings: dict[str, Any], seat: Seat) -> None:
    """Two steps of two updates each, and one between them that is given up halfway."""
    sharding = ShardingSettings(fsdp=2, tensor=2, hosts=seat.hosts)

    def make() -> Trainer:
        made: Trainer = build(buckets=(64,), epochs=2, sharding=sharding)
        return made

    if not seat.owns:
        follow(seat, sharding, make)
    crew = Crew(seat, sharding) if seat.hosts > 1 else None
    trainer: Any = make() if crew is None else HostedTrainer(make(), crew)
    trainer.restore(trainer.state()._replace(adapter=random_adapter(trainer.adapter)))
    trainer.compile()
    compiles, first = trainer.compiles, trainer.state()
    metrics = [trainer.run(trainer.prepare(rows(1)), interrupted=lambda: False)]
    turns = itertools.count()
    assert trainer.run(trainer.prepare(rows(2)), interrupted=lambda: next(turns) == 3) is None
    metrics.append(trainer.run(trainer.prepare(rows(2)), interrupted=lambda: False))
    found = {f"{name}{i}": np.asarray(leaf) for name, state in (("first", first), ("last", trainer.state()))
             for i, leaf in enumerate(jax.tree.leaves(state))}  # fmt: skip
    assert trainer.compiles == compiles
    numbers = np.array([[one.loss, one.gradient_norm] for one in metrics])
    out = Path(settings["out"])
    np.savez(out.with_suffix(".new.npz"), numbers=numbers, **found)
    out.with_suffix(".new.npz").rename(out)
    while crew is not None and not crew.interrupted.is_set():
        trainer.run(trainer.prepare(rows(3)), interrupted=lambda: False)
    if crew is not None:
        crew.close(0)


def run(settings: dict[str, Any], seat: Seat) -> int:
    settings["every_steps"] = 2
    spec = dataclasses.replace(spec_of(settings), sharding=ShardingSettings(fsdp=2, hosts=seat.hosts))
    if not seat.owns:
        follow(seat, spec, lambda: make_trainer(spec, load_model(spec.model)))
    crew = Crew(seat, spec)
    status = train(spec, Tasks(), Path(settings["folder"]), crew=crew, stop=crew.interrupted)
    crew.close(status)
    return status


def main() -> None:
    mode, settings = sys.argv[1], json.loads(sys.argv[2])
    logging.basicConfig(level=logging.INFO)
    hosts = settings["hosts"]
    seat = Seat(0, 1, None) if hosts == 1 else join(hosts, settings["coordinator"], settings["host"])
    status = 0
    if mode == "steps":
        steps(settings, seat)
    else:
        status = run(settings, seat)
    leave(status)


if __name__ == "__main__":
    main()
