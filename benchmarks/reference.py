"""The other side of a comparison: a script beside this one that runs with the Python of another environment.

Invariant: the script writes one JSON line when it is ready, and then one for each that it reads.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Reference:
    """Its process."""

    def __init__(
        self, python: Path, script: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        """Returns when it is ready. `environment` is added to this process's."""
        self._script = script
        self._process = subprocess.Popen(
            # -P: modules beside the script must not take the place of those that its libraries look for.
            [str(python), "-P", str(Path(__file__).with_name(script)), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self._answer()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """What it answers. Raises RuntimeError if it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the other side ended; run benchmarks/{self._script} by hand to see why")
        answer: dict[str, Any] = json.loads(line)
        return answer
