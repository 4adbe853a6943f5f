"""What XLA compiles outlives the process: the next start of a learner loads it.

Invariant: a start never fails for want of the default folder; it then compiles anew, and says so.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

MIN_COMPILE_S = 0.5
"""What compiled faster is not kept."""
FOLDER_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
MIN_VARIABLE = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"


def default_folder() -> str:
    """Where JAX's own environment variable says, else below the user's cache folder."""
    return os.environ.get(FOLDER_VARIABLE) or str(Path.home() / ".cache" / "headrace" / "xla")


def keep_compiled(folder: str | None = None) -> None:
    """Keep in `folder` (or gs://) what this process compiles from now on, and take from there what others did; None is
    `default_folder()`. Raises ValueError if a folder that was named cannot be made."""
    import jax

    found = folder or default_folder()
    if "://" not in found:
        try:
            Path(found).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if folder is not None:
                raise ValueError(f"--compilation-cache {folder} cannot be made: {error}") from error
            logger.warning("what XLA compiles is not kept, %s cannot be made: %s", found, error)
            return
    jax.config.update("jax_compilation_cache_dir", found)
    if MIN_VARIABLE not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_S)
