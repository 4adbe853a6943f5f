"""A real `headrace serve` process, and adapters for it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from policy.adapters import AdapterStore
from policy.files import CALCULATOR_TINY, find_model
from policy.lora import Adapter, LoraSettings, adapter_shapes
from policy.transformer import ModelConfig
from trajectories.schema import Version
from trajectories.storage import open_storage

ROOT = Path(__file__).parents[2]
LORA = LoraSettings(rank=4, alpha=8.0)
MAX_CONTEXT = 1024
SETS = ("lora.rank=4", "lora.alpha=8.0", "sampling.max_context=1024", "sampling.slots=8", "sampling.small_batch=0")
START_S = 240.0


class Server:
    """The process; `address` once it answers."""

    def __init__(
        self,
        model: str,
        *arguments: str,
        sets: tuple[str, ...] = SETS,
        stderr: IO[str] | None = None,
        **environment: str,
    ) -> None:
        options = [part for assignment in sets for part in ("--set", assignment)]
        command = [sys.executable, "-m", "pipelines.cli", "serve", model, *options, *arguments]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True, env={**os.environ, **environment}
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        line = self._lines.get(timeout=START_S)
        assert " at http://" in line, f"the server ended with {self.process.wait()}"
        self.address = line.split(" at ")[1].strip()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    @property
    def port(self) -> str:
        return self.address.rpartition(":")[2]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self, timeout_s: float = 60.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


@contextlib.contextmanager
def serving(
    model: str, *arguments: str, sets: tuple[str, ...] = SETS, stderr: IO[str] | None = None, **environment: str
) -> Iterator[Server]:
    server = Server(model, *arguments, sets=sets, stderr=stderr, **environment)
    try:
        yield server
    finally:
        server.kill()


def roomy_model(folder: Path) -> str:
    """calculator-tiny, allowed a context in which a request takes long enough to interfere with; its path."""
    found = find_model(CALCULATOR_TINY).folder
    assert found is not None
    shutil.copytree(found, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_context": MAX_CONTEXT}))
    return str(folder)


def make_adapter(config: ModelConfig, seed: int, lora: LoraSettings = LORA) -> Adapter:
    """One that changes what is sampled."""
    rng = np.random.default_rng(seed)
    return {
        target: {part: rng.normal(0, 0.3, shape).astype(np.float32) for part, shape in parts.items()}
        for target, parts in adapter_shapes(config, lora).items()
    }


def publish(folder: Path, config: ModelConfig, version: Version, seed: int, lora: LoraSettings = LORA) -> str:
    """Publish an adapter to a run storage of its own below `folder`; where it lies."""
    run = folder / f"run-{version}"
    AdapterStore(open_storage(str(run)), config, lora).publish(
        version, make_adapter(config, seed, lora), step_ended_at=0.0
    )
    return str(run / "adapters" / str(version))
