"""What a stage cannot use leaves it as a dead letter with its reason, and the job goes on.

Invariant: no data, however malformed, makes a stage raise; every DoFn gives its dead letters as the output DEAD.
"""

from __future__ import annotations

from typing import Final, Literal

from trajectories.schema import DeadLetter
from transforms import metrics

DEAD: Final = "dead_letters"
"""Tag of the dead letters among a stage's outputs."""
VERDICTS: Final = "verdicts"
"""Tag of the verdicts."""
EVALUATED: Final = "evaluated"
"""Tag of the episodes of eval tasks."""

MAX_PAYLOAD = 4096
"""Bytes of the offending message that its dead letter keeps."""
MAX_DETAIL = 2000
"""Characters of an error's text that its dead letter keeps."""

Stage = Literal["ReadTasks", "RunEpisodes", "GroupEpisodes", "Advantages", "PackRows", "Publish"]


def dead_letter(run_id: str, stage: Stage, reason: str, detail: str = "", payload: bytes = b"") -> DeadLetter:
    """A counted dead letter; `reason` is a short name, `detail` says what was wrong."""
    metrics.count(f"dead_letters/{stage}")
    # A tool may answer with lone surrogates: JSON on the wire cannot hold those.
    detail = detail[:MAX_DETAIL].encode("utf-8", "replace").decode("utf-8")
    return DeadLetter(run_id, stage, reason, detail, bytes(payload[:MAX_PAYLOAD]))
