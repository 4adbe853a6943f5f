"""Which messages may be acknowledged with the next checkpoint.

Invariant: a message is acknowledged only when a durable checkpoint holds its effect: every closing in it has trained in
that checkpoint's weights, or never will by that checkpoint's books.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from learner.ledger import Ledger

Ack = Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Kept:
    closings: tuple[tuple[int, str], ...]
    """(group_id, closing_id) of each closing in the message."""
    ack: Ack


class Acks:
    """Messages that were handled and not acknowledged."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, ack: Ack, closings: Sequence[tuple[int, str]] = ()) -> None:
        """Note a message with its (group_id, closing_id)s; none for one whose effect is in the ledger already."""
        self._kept.append(_Kept(tuple(closings), ack))

    def settled(self, ledger: Ledger) -> list[Ack]:
        """Let go of the messages that `ledger`, as it is now, needs no more. Call them once it is durable."""
        ready, self._kept = (
            [kept.ack for kept in self._kept if self._settled(kept, ledger)],
            [kept for kept in self._kept if not self._settled(kept, ledger)],
        )
        return ready

    @staticmethod
    def _settled(kept: _Kept, ledger: Ledger) -> bool:
        return all(ledger.settled(group_id, closing_id) for group_id, closing_id in kept.closings)
