"""What a computation frees is there for the next one."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading
from pathlib import Path
import numpy as np
from policy.allocator import keep_freed_memory

def pages():
    return int(Path("/proc/self/statm").read_text().split()[1])

if sys.argv[1] == "kept":
    assert keep_freed_memory()

def compute():
    global held, left
    before = pages()
    array = np.ones(32 << 20)
    held = pages() - before
    del array
    left = pages() - before

thread = threading.Thread(target=compute)
thread.start()
thread.join()
print(left / held)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_what_is_freed_stays_with_the_process():
    left = {}
    for how in ("as_ever", "kept"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        left[how] = float(done.stdout)
    assert left["as_ever"] < 0.1
    assert left["kept"] > 0.9
