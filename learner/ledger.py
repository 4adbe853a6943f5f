"""The books of a run: every group ever issued is in exactly one state.

Invariants: `issued == trained + filtered + failed + expired + retired + outstanding` at every moment and across every
crash; a group is bound to the first closing it is shown and trains at most once, from that one; ended groups cost no
memory (all ids below `issued` that are not outstanding have ended), so a million of them fit in a few bytes.

Pure: no clock, no thread, no I/O. The ledger is part of the checkpoint; bindings are not, because the messages of
bound closings stay unacknowledged until they have trained and come back after a crash.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import zstandard

from trajectories.schema import Outcome

_SCHEMA = 1
MAX_ADOPTED = 100_000
"""Most groups that one unknown id may add: beyond it the id is nonsense, not a group issued before a crash."""


class LedgerError(ValueError):
    """Bytes that are no ledger, or a transition that the books forbid."""


class Intake(StrEnum):
    """What became of a closing or verdict that was shown to the ledger."""

    TAKEN = "taken"
    """It is the group's first: it counts."""
    REPEATED = "repeated"
    """The very closing that the group is bound to, delivered again."""
    DUPLICATE = "duplicate"
    """Another closing of a bound group."""
    ENDED = "ended"
    """The group has ended."""
    OUTDATED = "outdated"
    """Of an attempt that the ledger has given up for good."""
    FOREIGN = "foreign"
    """Its group id cannot have been issued by this run."""


class Reissue(StrEnum):
    """Why a group is issued again."""

    STALE = "stale"
    """Its closing was past the staleness bound."""
    WORKER_LOST = "worker_lost"
    """The worker that held it fell silent."""
    TASK_DEADLINE = "task_deadline"
    """A worker held it for too long."""
    UNSTARTED = "unstarted"
    """No worker took it, or the one that had it let go of it without a word."""


@dataclass(frozen=True, slots=True)
class Group:
    """One outstanding group."""

    attempt: int = 0
    """The newest attempt that was issued, from 0."""
    floor: int = 0
    """Closings of an older attempt are not taken any more."""
    issued_step: int = 0
    """Step of the newest adapter there was when the attempt was issued: its members cannot be older."""
    closing_id: str = ""
    """The closing it is bound to, if any."""

    @property
    def in_flight(self) -> bool:
        return not self.closing_id


class Ledger:
    """See the module. `run` state only: one ledger per run, carried from checkpoint to checkpoint."""

    def __init__(self, max_attempts: int = 3) -> None:
        self._max_attempts = max_attempts
        self._next = 0
        self._groups: dict[int, Group] = {}
        self._ended: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        """Closings and verdicts that were not taken, by `Intake`."""
        self.reissued: Counter[str] = Counter()
        """Attempts issued again, by `Reissue`."""

    # Reading

    @property
    def issued(self) -> int:
        """Groups ever issued; also the next group's id."""
        return self._next

    @property
    def outstanding(self) -> int:
        return len(self._groups)

    def group(self, group_id: int) -> Group | None:
        """The group if it is outstanding."""
        return self._groups.get(group_id)

    def groups(self) -> Iterator[tuple[int, Group]]:
        """Outstanding groups, oldest first."""
        return iter(sorted(self._groups.items()))

    def counts(self) -> dict[str, int]:
        """issued, trained, every `Outcome`, outstanding; raises LedgerError if they do not balance."""
        counts = {"issued": self._next}
        counts |= {str(name): self._ended[name] for name in ("trained", *Outcome)}
        counts["outstanding"] = len(self._groups)
        if counts["issued"] != sum(counts.values()) - counts["issued"]:
            raise LedgerError(f"the ledger does not balance: {counts}")
        return counts

    # Transitions

    def issue(self, step: int) -> int:
        """Issue the next group with the newest adapter at `step`; returns its id."""
        group_id = self._next
        self._next += 1
        self._groups[group_id] = Group(issued_step=step)
        return group_id

    def retire(self, step: int) -> None:
        """Pass over the next group: its prompt is not asked now."""
        self._end(self.issue(step), Outcome.RETIRED)

    def adopt(self, group_id: int, step: int) -> bool:
        """Take `group_id` and all before it as issued, as they were before a crash; False if that cannot be."""
        if not 0 <= group_id < self._next + MAX_ADOPTED:
            return False
        while self._next <= group_id:
            self.issue(step)
        return True

    def bind(self, group_id: int, attempt: int, closing_id: str, step: int) -> Intake:
        """Show the group a closing. Only on TAKEN may it train."""
        intake = self._intake(group_id, attempt, closing_id, step)
        if intake is Intake.TAKEN:
            group = self._groups[group_id]
            # An attempt that an earlier life of the learner issued is news to a restored ledger.
            self._groups[group_id] = replace(group, closing_id=closing_id, attempt=max(group.attempt, attempt))
        else:
            self.dropped[intake] += 1
        return intake

    def verdict(self, group_id: int, attempt: int, outcome: Outcome, step: int) -> Intake:
        """End the group without training, if it is not bound to a closing.

        A failure of an attempt older than the newest is OUTDATED: the newest may still succeed.
        """
        intake = self._intake(group_id, attempt, "", step)
        if intake is Intake.TAKEN and outcome is not Outcome.FILTERED and attempt < self._groups[group_id].attempt:
            intake = Intake.OUTDATED
        if intake is Intake.TAKEN:
            self._end(group_id, outcome)
        else:
            self.dropped[intake] += 1
        return intake

    def train(self, closings: Iterable[tuple[int, str]]) -> None:
        """End (group_id, closing_id)s as trained; raises LedgerError if one is not bound to that closing."""
        pairs = list(closings)
        for group_id, closing_id in pairs:
            group = self._groups.get(group_id)
            if not closing_id or group is None or group.closing_id != closing_id:
                raise LedgerError(f"group {group_id} is not bound to closing {closing_id}: it must not train")
        if len({group_id for group_id, _ in pairs}) != len(pairs):
            raise LedgerError("a step holds a group twice")
        for group_id, _ in pairs:
            self._end(group_id, "trained")

    def reissue(self, group_id: int, reason: Reissue, step: int) -> int | None:
        """Give up the group's attempt; returns the next attempt's number, or None if it has expired instead.

        A late closing of the old attempt is still taken if it comes first, unless the reason is that it was stale.
        """
        group = self._groups[group_id]
        attempt = group.attempt + 1
        if attempt >= self._max_attempts:
            self._end(group_id, Outcome.EXPIRED)
            return None
        floor = attempt if reason is Reissue.STALE else group.floor
        self._groups[group_id] = Group(attempt, floor, step)
        self.reissued[reason] += 1
        return attempt

    def discard(self, group_id: int, attempt: int, step: int) -> int | None:
        """Unbind the group from its closing, of `attempt`, which is past the staleness bound.

        Returns the next attempt's number if one must be issued; None if a newer attempt is out already or the group has
        expired.
        """
        group = self._groups[group_id]
        if group.in_flight:
            raise LedgerError(f"group {group_id} is not bound to a closing that could be discarded")
        self._groups[group_id] = replace(group, closing_id="")
        if attempt < group.attempt:
            self._groups[group_id] = replace(group, closing_id="", floor=max(group.floor, attempt + 1))
            return None
        return self.reissue(group_id, Reissue.STALE, step)

    def settled(self, group_id: int, closing_id: str) -> bool:
        """Whether the books need that closing's message no more: it trained, or it never will."""
        group = self._groups.get(group_id)
        return group_id < self._next and (group is None or group.closing_id != closing_id)

    def _intake(self, group_id: int, attempt: int, closing_id: str, step: int) -> Intake:
        if attempt < 0 or not self.adopt(group_id, step):
            return Intake.FOREIGN
        group = self._groups.get(group_id)
        if group is None:
            return Intake.ENDED
        if group.closing_id:
            return Intake.REPEATED if group.closing_id == closing_id else Intake.DUPLICATE
        if attempt < group.floor:
            return Intake.OUTDATED
        return Intake.TAKEN

    def _end(self, group_id: int, state: str) -> None:
        del self._groups[group_id]
        self._ended[state] += 1

    # The checkpoint

    def to_bytes(self) -> bytes:
        """JSON behind zstd; without bindings (see the module)."""
        self.counts()
        content = {
            "schema": _SCHEMA,
            "issued": self._next,
            "ended": dict(self._ended),
            "outstanding": [[i, g.attempt, g.floor, g.issued_step] for i, g in sorted(self._groups.items())],
            "dropped": dict(self.dropped),
            "reissued": dict(self.reissued),
        }
        return zstandard.ZstdCompressor(level=3).compress(json.dumps(content, separators=(",", ":")).encode())

    @classmethod
    def from_bytes(cls, data: bytes, max_attempts: int = 3) -> Ledger:
        """The ledger that `to_bytes` wrote; raises LedgerError if it is damaged, foreign or does not balance."""
        try:
            content = json.loads(zstandard.ZstdDecompressor().decompress(data, max_output_size=1 << 28))
            if content["schema"] != _SCHEMA:
                raise LedgerError(f"the ledger has schema {content['schema']}, this process reads {_SCHEMA}")
            ledger = cls(max_attempts)
            ledger._next = int(content["issued"])
            ledger._ended.update({str(k): int(v) for k, v in content["ended"].items()})
            for group_id, attempt, floor, issued_step in content["outstanding"]:
                ledger._groups[int(group_id)] = Group(int(attempt), int(floor), int(issued_step))
            ledger.dropped.update({str(k): int(v) for k, v in content["dropped"].items()})
            ledger.reissued.update({str(k): int(v) for k, v in content["reissued"].items()})
        except LedgerError:
            raise
        except (zstandard.ZstdError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise LedgerError(f"these bytes are no ledger: {error!r}") from error
        ledger.counts()
        return ledger
