"""Saves checkpoints, is killed, looks what is there, again and again: `python -m tests.learner.killed FOLDER TIMES`.

Each process that saves or looks is forked from this one, which has imported everything and has no thread of its own.
Prints the step of the newest checkpoint after each death.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable

import jax
import numpy as np

from learner.checkpoints import Checkpoints, Snapshot, load_orbax
from trajectories.storage import open_storage


def state(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {name: rng.normal(size=(64, 100)).astype(np.float32) for name in ("adapter", "first", "second")}


def snapshot(step: int) -> Snapshot:
    return Snapshot(step, state(step), f"ledger {step}".encode() * 100, {"step": step})


def save(folder: str, incarnation: int) -> None:
    """Go on from the newest until somebody kills us."""
    checkpoints = Checkpoints(open_storage(folder), incarnation, keep=2)
    found = checkpoints.newest(state(0))
    step = found.step if found is not None else 0
    while True:
        step += 1
        checkpoints.save(snapshot(step))
        os.write(1, f"saved {step}\n".encode())


def look(folder: str, at_least: int) -> None:
    """The newest is whole, and no older than what was said to be saved."""
    found = Checkpoints(open_storage(folder), 1_000, keep=2).newest(state(0))
    step = found.step if found is not None else 0
    assert step >= at_least, (step, at_least)
    if found is not None:
        expected = snapshot(step)
        assert (found.ledger, found.record) == (expected.ledger, expected.record)
        for one, other in zip(jax.tree.leaves(found.state), jax.tree.leaves(expected.state), strict=True):
            assert one.tobytes() == other.tobytes()
    os.write(1, f"{step}\n".encode())


def forked(work: Callable[[], None], output: int) -> int:
    """The process id of a copy of this process that does the work; what it prints goes to `output`."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.dup2(output, 1)
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def main() -> None:
    folder, times = sys.argv[1], int(sys.argv[2])
    load_orbax()
    chance = random.Random(int.from_bytes(os.urandom(4), "big"))
    for incarnation in range(1, times + 1):
        reading, writing = os.pipe()
        saver = forked(lambda number=incarnation: save(folder, number), writing)  # type: ignore[misc]
        os.close(writing)
        # Sometimes right at the start, mostly after a save or some.
        said = b"".join(os.read(reading, 100) for _ in range(chance.randint(0, 2)))
        time.sleep(chance.random() * 0.1)
        os.kill(saver, signal.SIGKILL)
        os.waitpid(saver, 0)
        while more := os.read(reading, 10_000):
            said += more
        os.close(reading)
        at_least = int(said.split()[-1]) if said else 0
        looker = forked(lambda least=at_least: look(folder, least), 1)  # type: ignore[misc]
        assert os.waitstatus_to_exitcode(os.waitpid(looker, 0)[1]) == 0


if __name__ == "__main__":
    main()
