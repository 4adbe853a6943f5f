"""The delivery of one subscription: who holds which message until when. Pure logic; the time is an argument.

Invariant: a pending message is in exactly one place: ready (once), waiting in its ordering key's line, waiting for its
backoff to pass, leased (once), or dead (handed to the caller for its dead-letter topic). Only `acknowledge` and
`forget` end it. Of an ordering key, either nothing is leased or one batch that went to one consumer, in order.
"""

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

STALE_DEADLINES = 1024
"""Deadlines of leases that have ended stay in the heap up to this many plus twice the live ones; then it is rebuilt."""


@dataclass(frozen=True)
class DeliverySettings:
    """What of a subscription's configuration rules its delivery."""

    ordered: bool = False
    """Messages with one ordering key go out in the order of publishing, one batch at a time."""
    exactly_once: bool = False
    """An acknowledgement counts only under a live lease, and a lost stream keeps its leases to their deadlines."""
    max_attempts: int = 0
    """Deliveries after which a message that comes back is dead; 0: never."""
    min_backoff_s: float = 0.0
    """Seconds before the second delivery; doubles with each further one."""
    max_backoff_s: float = 0.0
    """Longest backoff, in seconds."""

    def backoff_s(self, attempts: int) -> float:
        """Seconds that a message waits which came back after `attempts` deliveries."""
        return min(self.max_backoff_s, self.min_backoff_s * 2.0 ** min(attempts - 1, 32))


@dataclass(slots=True, eq=False)
class Pending:
    """A message that this subscription has not acknowledged. Its body stays in the log."""

    message: int
    size: int
    """Bytes of the body."""
    published_ns: int
    key: str = ""
    attempts: int = 0
    """Deliveries so far, the running one included."""
    lease: "Lease | None" = None


@dataclass(slots=True, eq=False)
class Lease:
    """A message's loan to one consumer. `serial` is never used twice within a subscription's life in this process."""

    pending: Pending
    serial: int
    deadline: float
    consumer: int
    """Which stream holds it; 0: a unary pull, or a stream that has gone."""


@dataclass(slots=True)
class _Line:
    """One ordering key: what waits (a heap: oldest first) and what is leased."""

    waiting: list[int] = field(default_factory=list)
    leased: set[int] = field(default_factory=set)
    queued: bool = False
    """The key stands in a ready queue, or waits for a backoff to pass."""


@dataclass(slots=True)
class _Consumer:
    leases: set[int] = field(default_factory=set)
    size: int = 0


class Delivery:
    """See the module's docstring. Times are seconds of whatever clock the caller uses."""

    def __init__(self, settings: DeliverySettings) -> None:
        self.settings = settings
        self.pending: dict[int, Pending] = {}
        """Every unacknowledged message by id, oldest first."""
        self._serial = 0
        self._consumers: dict[int, _Consumer] = {}
        self.clear()

    def clear(self) -> None:
        """Forget every message and lease (a seek is about to load others)."""
        self.pending.clear()
        self._fresh: deque[int | str] = deque()
        self._returned: deque[int | str] = deque()
        self._returned_next = True
        self._lines: dict[str, _Line] = {}
        self._delayed: list[tuple[float, int, int | str]] = []
        self._deadlines: list[tuple[float, int, int]] = []
        self._leased = 0
        self._came_back: list[Pending] = []
        self._dead: list[Pending] = []
        for consumer in self._consumers.values():
            consumer.leases.clear()
            consumer.size = 0

    def add(self, messages: Iterable[Pending]) -> None:
        """Take in newly published messages, in the order of their ids."""
        for pending in messages:
            self.pending[pending.message] = pending
            self._enqueue(pending, self._fresh)

    # Consumers

    def attach(self, consumer: int) -> None:
        """A stream begins; `consumer` is not 0 and not in use."""
        self._consumers[consumer] = _Consumer()

    def outstanding(self, consumer: int) -> tuple[int, int]:
        """Messages and bytes that the stream holds."""
        held = self._consumers[consumer]
        return len(held.leases), held.size

    def detach(self, consumer: int, now: float) -> None:
        """A stream has ended: what it held is ready again, except under exactly-once, where deadlines stand."""
        held = self._consumers.pop(consumer)
        for message in sorted(held.leases):
            pending = self.pending[message]
            if pending.lease is None:
                continue  # Came back with an earlier one of its key.
            pending.lease.consumer = 0
            if not self.settings.exactly_once:
                self._give_back(pending, now)

    # Leases

    def take(self, max_messages: int, max_bytes: int, now: float, lease_s: float, consumer: int = 0) -> list[Lease]:
        """Lease what is ready: at most `max_messages` and `max_bytes`, but one message whatever its size."""
        leases: list[Lease] = []
        room = max_bytes
        while len(leases) < max_messages:
            queue = self._ready_queue()
            if queue is None:
                break
            unit = queue.popleft()
            if isinstance(unit, int):
                pending = self.pending.get(unit)
                if pending is None:
                    continue
                if leases and pending.size > room:
                    queue.appendleft(unit)
                    break
                room -= pending.size
                leases.append(self._lend(pending, now + lease_s, consumer))
                continue
            line = self._lines.get(unit)
            if line is None:
                continue
            line.queued = False
            if line.leased:
                continue
            full = False
            while line.waiting and len(leases) < max_messages and not full:
                pending = self.pending.get(line.waiting[0])
                if pending is not None and leases and pending.size > room:
                    full = True
                    continue
                heapq.heappop(line.waiting)
                if pending is not None:
                    room -= pending.size
                    line.leased.add(pending.message)
                    leases.append(self._lend(pending, now + lease_s, consumer))
            self._settle_line(unit, line, queue, front=True)
            if full:
                break
        return leases

    def acknowledge(self, message: int, serial: int) -> bool:
        """Whether the acknowledgement counts; if so, the message is gone.

        Without exactly-once a late one (its lease has ended) still counts: the work is done, and delivering it again
        would help nobody. Not so with an ordering key, where what follows a redelivered message comes again as well.
        """
        pending = self.pending.get(message)
        if pending is None:
            return False
        live = pending.lease is not None and pending.lease.serial == serial
        if not live and (self.settings.exactly_once or self._is_ordered(pending)):
            return False
        self.forget(message)
        return True

    def modify(self, message: int, serial: int, seconds: float, now: float) -> bool:
        """Set the lease's deadline `seconds` from now; 0 gives the message back at once. Whether the lease was live."""
        pending = self.pending.get(message)
        if pending is None or pending.lease is None or pending.lease.serial != serial:
            return False
        if seconds <= 0:
            self._give_back(pending, now)
            return True
        lease = pending.lease
        shorter = now + seconds < lease.deadline
        lease.deadline = now + seconds
        if shorter:
            heapq.heappush(self._deadlines, (lease.deadline, message, serial))
        return True

    def forget(self, message: int) -> None:
        """End a message without counting it anywhere: acknowledged, expired or forwarded."""
        pending = self.pending.pop(message)
        if pending.lease is not None:
            self._end_lease(pending)
        if self._is_ordered(pending):
            line = self._lines[pending.key]
            line.leased.discard(message)
            self._settle_line(pending.key, line, self._fresh)

    def tick(self, now: float) -> bool:
        """Take back leases past their deadline, release what has waited its backoff; whether there was any."""
        changed = False
        while self._deadlines and self._deadlines[0][0] <= now:
            _, message, serial = heapq.heappop(self._deadlines)
            if not self._is_live(message, serial):
                continue
            pending = self.pending[message]
            assert pending.lease is not None
            if pending.lease.deadline > now:
                heapq.heappush(self._deadlines, (pending.lease.deadline, message, serial))
                continue
            self._give_back(pending, now)
            changed = True
        while self._delayed and self._delayed[0][0] <= now:
            self._returned.append(heapq.heappop(self._delayed)[2])
            changed = True
        return changed

    def drain_returned(self) -> tuple[list[Pending], list[Pending]]:
        """What came back since the last call (attempts to note down), and what of it is dead.

        A dead message is in the caller's hands: `forget` it once it is forwarded, or `revive` it.
        """
        came_back, self._came_back = self._came_back, []
        dead, self._dead = self._dead, []
        return came_back, dead

    def revive(self, pending: Pending) -> None:
        """A dead message that could not be forwarded is ready again."""
        if self.pending.get(pending.message) is pending and pending.lease is None:
            self._enqueue(pending, self._returned)

    def older_than(self, published_ns: int) -> list[int]:
        """Ids of the messages published before `published_ns`."""
        found = []
        for message, pending in self.pending.items():
            if pending.published_ns >= published_ns:
                break
            found.append(message)
        return found

    # Inside

    def _is_ordered(self, pending: Pending) -> bool:
        return self.settings.ordered and pending.key != ""

    def _ready_queue(self) -> deque[int | str] | None:
        """What came back and what is new take turns: neither a poison message nor a backlog starves the other."""
        self._returned_next = not self._returned_next
        first, second = (self._returned, self._fresh) if self._returned_next else (self._fresh, self._returned)
        return first or second or None

    def _enqueue(self, pending: Pending, queue: deque[int | str]) -> None:
        if not self._is_ordered(pending):
            queue.append(pending.message)
            return
        line = self._lines.setdefault(pending.key, _Line())
        heapq.heappush(line.waiting, pending.message)
        self._settle_line(pending.key, line, queue)

    def _settle_line(self, key: str, line: _Line, queue: deque[int | str], *, front: bool = False) -> None:
        """Make the key ready if it waits and nothing of it is out; drop it when it is empty."""
        while line.waiting and line.waiting[0] not in self.pending:
            heapq.heappop(line.waiting)
        if not line.waiting and not line.leased:
            self._lines.pop(key, None)
        elif line.waiting and not line.leased and not line.queued:
            line.queued = True
            if front:
                queue.appendleft(key)
            else:
                queue.append(key)

    def _lend(self, pending: Pending, deadline: float, consumer: int) -> Lease:
        self._serial += 1
        pending.attempts += 1
        lease = pending.lease = Lease(pending, self._serial, deadline, consumer)
        self._leased += 1
        if consumer:
            held = self._consumers[consumer]
            held.leases.add(pending.message)
            held.size += pending.size
        heapq.heappush(self._deadlines, (deadline, pending.message, lease.serial))
        if len(self._deadlines) > 2 * self._leased + STALE_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if self._is_live(entry[1], entry[2])]
            heapq.heapify(self._deadlines)
        return lease

    def _is_live(self, message: int, serial: int) -> bool:
        pending = self.pending.get(message)
        return pending is not None and pending.lease is not None and pending.lease.serial == serial

    def _end_lease(self, pending: Pending) -> None:
        lease = pending.lease
        assert lease is not None
        pending.lease = None
        self._leased -= 1
        held = self._consumers.get(lease.consumer)
        if held is not None and pending.message in held.leases:
            held.leases.remove(pending.message)
            held.size -= pending.size

    def _give_back(self, pending: Pending, now: float) -> None:
        self._end_lease(pending)
        self._came_back.append(pending)
        dead = bool(self.settings.max_attempts) and pending.attempts >= self.settings.max_attempts
        if dead:
            self._dead.append(pending)
        wait_s = 0.0 if dead else self.settings.backoff_s(pending.attempts)
        if not self._is_ordered(pending):
            if wait_s:
                heapq.heappush(self._delayed, (now + wait_s, pending.message, pending.message))
            elif not dead:
                self._returned.append(pending.message)
            return
        line = self._lines[pending.key]
        line.leased.remove(pending.message)
        if not dead:
            heapq.heappush(line.waiting, pending.message)
        for later in [message for message in line.leased if message > pending.message]:
            # Their turn comes again after this one; they were not refused, so the attempt does not count.
            follower = self.pending[later]
            self._end_lease(follower)
            follower.attempts -= 1
            line.leased.remove(later)
            heapq.heappush(line.waiting, later)
        if wait_s and not line.queued:
            line.queued = True
            heapq.heappush(self._delayed, (now + wait_s, pending.message, pending.key))
        else:
            self._settle_line(pending.key, line, self._returned)
