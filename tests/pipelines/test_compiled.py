"""A learner that is started again loads what the one before it compiled."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from pipelines.compiled import keep_compiled

ROOT = Path(__file__).resolve().parents[2]
START = """
import json
import jax
from pipelines.compiled import keep_compiled
seen = []
jax.monitoring.register_event_listener(lambda name, **_: seen.append(name.rpartition("/")[2]))
keep_compiled()
jax.jit(lambda x: jax.numpy.sin(x) @ x)(jax.numpy.ones((8, 8))).block_until_ready()
print(json.dumps([jax.config.jax_compilation_cache_dir, seen.count("cache_hits"), seen.count("cache_misses")]))
"""


def start(home: Path) -> tuple[str, int, int]:
    """(folder, what was loaded, what was compiled) of a process that compiles one thing."""
    done = subprocess.run(
        [sys.executable, "-c", START],
        cwd=ROOT,
        env={
            **{name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"},
            "JAX_PLATFORMS": "cpu",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "HOME": str(home),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    folder, loaded, compiled = json.loads(done.stdout)
    return folder, loaded, compiled


def test_a_restart_compiles_nothing_anew(tmp_path: Path) -> None:
    folder, loaded, compiled = start(tmp_path)
    assert (folder, loaded, compiled > 0) == (str(tmp_path / ".cache" / "headrace" / "xla"), 0, True)
    assert start(tmp_path) == (folder, compiled, 0)


def test_a_folder_that_cannot_be_made_is_refused_only_if_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(file / "xla"))
    before = jax.config.jax_compilation_cache_dir
    with pytest.raises(ValueError, match=r"--compilation-cache .*file/other cannot be made"):
        keep_compiled(str(file / "other"))
    keep_compiled()
    assert f"{file}/xla cannot be made" in caplog.text
    assert jax.config.jax_compilation_cache_dir == before
