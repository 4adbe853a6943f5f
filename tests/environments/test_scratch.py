"""Temporary folders of killed processes are removed by the next, those of living ones are not."""

import subprocess
import sys
import tempfile
from pathlib import Path

from environments.scratch import Scratch

KILLED = """
import os, signal
from environments.scratch import Scratch
scratch = Scratch("index")
(scratch.path / "index").write_bytes(bytes(1000))
print(scratch.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_goes_and_what_a_living_one_has_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    living, other = Scratch("index"), Scratch("database")
    root = Path(__file__).parents[2]
    left = subprocess.run([sys.executable, "-c", KILLED], cwd=root, capture_output=True, text=True).stdout.strip()
    assert (Path(left) / "index").stat().st_size == 1000
    (tmp_path / "headrace-index-link").symlink_to(living.path)
    second = Scratch("index")
    folders = [living.path, other.path, second.path]
    assert sorted(path for path in tmp_path.iterdir() if not path.is_symlink()) == sorted(folders)
    for scratch in (living, other, second):
        scratch.remove()
        scratch.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["headrace-index-link"]
