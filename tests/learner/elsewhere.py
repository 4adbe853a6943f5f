"""Python in a process of its own, on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_elsewhere(*arguments: str, timeout_s: float, devices: int | None = None) -> str:
    """What `python ARGUMENTS` prints, in the repository's root; `devices` are as many as JAX is to find. It must end
    with status 0."""
    flags = {} if devices is None else {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **flags},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
