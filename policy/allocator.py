"""Memory that a computation has freed stays with the process: the next one of the same shapes takes it again.

XLA allocates a computation's temporaries when it begins and frees them when it ends. On a CPU glibc gives blocks of
that size back to the kernel, and the next computation pays for every page anew: 5 to 15 ms between two calls of a
learner's step, and a tenth of the step itself (`python -m benchmarks.learner --only step_gap_fraction`).
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
"""Of mallopt(3)."""


def keep_freed_memory() -> bool:
    """Let this process's allocator keep what is freed; says whether it can be told so (glibc).

    Call it before threads are there: those that have an arena of their own keep it.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # One heap, no block outside of it, and its end never given back.
    return all([mallopt(_ARENA_MAX, 1), mallopt(_MMAP_MAX, 0), mallopt(_TRIM_THRESHOLD, -1)])
