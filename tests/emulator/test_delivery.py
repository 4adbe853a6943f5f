"""The delivery of one subscription, without a server: time is a number that the tests move."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from emulator.delivery import Delivery, DeliverySettings, Lease, Pending

LEASE_S = 10.0


def delivery(*messages: tuple[int, str], size: int = 1, **fields) -> Delivery:
    found = Delivery(DeliverySettings(**fields))
    found.add(Pending(message, size, message, key) for message, key in messages)
    return found


def ids(leases: list[Lease]) -> list[int]:
    return [lease.pending.message for lease in leases]


def take(subject: Delivery, now: float = 0.0, count: int = 100, consumer: int = 0) -> list[Lease]:
    return subject.take(count, 1 << 30, now, LEASE_S, consumer)


def test_limits_and_order():
    subject = delivery((1, ""), (2, ""), (3, ""), size=10)
    assert ids(subject.take(2, 1000, 0, LEASE_S)) == [1, 2]
    subject = delivery((1, ""), (2, ""), (3, ""), size=10)
    assert ids(subject.take(9, 20, 0, LEASE_S)) == [1, 2]
    # One that is larger than the limit goes alone rather than never.
    assert ids(subject.take(9, 5, 0, LEASE_S)) == [3]


def test_deadline_is_kept_to():
    subject = delivery((1, ""))
    take(subject)
    assert not subject.tick(LEASE_S - 0.001)
    assert subject.tick(LEASE_S)
    assert ids(take(subject, LEASE_S)) == [1]


def test_modified_deadlines():
    subject = delivery((1, ""), (2, ""))
    first, second = take(subject)
    assert subject.modify(1, first.serial, 30, 5)
    assert subject.modify(2, second.serial, 1, 5)
    subject.tick(6)
    assert ids(take(subject, 6)) == [2]
    subject.tick(34.9)
    assert 1 not in ids(take(subject, 34.9))
    subject.tick(35)
    assert ids(take(subject, 35)) == [1]


def test_late_acknowledgement_counts_unless_exactly_once_or_ordered():
    for fields, key, counts in [({}, "", True), ({"exactly_once": True}, "", False), ({"ordered": True}, "k", False)]:
        subject = delivery((1, key), **fields)
        (lease,) = take(subject)
        subject.tick(LEASE_S)
        assert subject.acknowledge(1, lease.serial) is counts
        assert (1 in subject.pending) is not counts


def test_a_lost_stream_returns_its_leases():
    subject = delivery((1, ""), (2, ""))
    subject.attach(7)
    take(subject, consumer=7)
    assert subject.outstanding(7) == (2, 2)
    subject.detach(7, 1.0)
    assert ids(take(subject, 1.0)) == [1, 2]


def test_a_lost_stream_keeps_exactly_once_leases():
    subject = delivery((1, ""), exactly_once=True)
    subject.attach(7)
    (lease,) = take(subject, consumer=7)
    subject.detach(7, 1.0)
    assert not take(subject, 1.0)
    assert subject.acknowledge(1, lease.serial)


def test_neither_poison_nor_backlog_starves():
    subject = delivery(*[(number, "") for number in range(1, 50)])
    seen = []
    for _ in range(20):
        (lease,) = take(subject, count=1)
        seen.append(lease.pending.message)
        if lease.pending.message == 1:
            subject.modify(1, lease.serial, 0, 0)
    assert seen.count(1) >= 5
    assert len(set(seen)) >= 10


def test_keys_wait_for_their_batch_but_not_for_each_other():
    subject = delivery((1, "a"), (2, "b"), (3, "a"), (4, ""), ordered=True)
    first = take(subject, count=1)
    assert ids(first) == [1]
    assert sorted(ids(take(subject))) == [2, 4]
    assert not take(subject)
    subject.acknowledge(1, first[0].serial)
    assert ids(take(subject)) == [3]


def test_a_refused_message_takes_its_followers_along():
    subject = delivery((1, "a"), (2, "a"), (3, "a"), ordered=True)
    one, two, three = take(subject)
    subject.modify(2, two.serial, 0, 0)
    # The first is still out: nothing of the key goes before it.
    assert not take(subject)
    assert not subject.acknowledge(3, three.serial)
    subject.acknowledge(1, one.serial)
    again = take(subject)
    assert ids(again) == [2, 3]
    assert [lease.pending.attempts for lease in again] == [2, 1]


def test_backoff_doubles_to_its_limit():
    subject = delivery((1, ""), min_backoff_s=1, max_backoff_s=3)
    now = 0.0
    waits = []
    for _ in range(4):
        (lease,) = take(subject, now)
        subject.modify(1, lease.serial, 0, now)
        given_back = now
        while not (subject.tick(now) and subject._returned):
            now += 0.5
        waits.append(now - given_back)
    assert waits == [1, 2, 3, 3]


def test_backoff_holds_a_key_in_order():
    subject = delivery((1, "a"), (2, "a"), ordered=True, min_backoff_s=1, max_backoff_s=1)
    one, _ = take(subject)
    subject.modify(1, one.serial, 0, 0)
    assert not take(subject)
    subject.tick(1)
    assert ids(take(subject, 1)) == [1, 2]


@pytest.mark.parametrize("key", ["", "a"])
def test_dead_after_the_last_attempt(key):
    subject = delivery((1, key), (2, key), ordered=True, max_attempts=5)
    for attempt in range(1, 6):
        lease = next(lease for lease in take(subject) if lease.pending.message == 1)
        assert lease.pending.attempts == attempt
        assert not subject.drain_returned()[1]
        for held in [p for p in subject.pending.values() if p.lease and p.message == 2]:
            subject.modify(2, held.lease.serial, 30, 0)
        subject.modify(1, lease.serial, 0, 0)
        if key == "":
            for held in [p for p in subject.pending.values() if p.lease]:
                subject.acknowledge(2, held.lease.serial)
    _, (dead,) = subject.drain_returned()
    assert dead.message == 1
    assert 1 not in ids(take(subject))
    subject.revive(dead)
    subject.tick(1000)
    assert 1 in ids(take(subject, 1000))


def test_stale_deadlines_are_not_kept():
    subject = delivery(*[(number, "") for number in range(20_000)])
    for lease in subject.take(20_000, 1 << 30, 0, LEASE_S):
        subject.acknowledge(lease.pending.message, lease.serial)
    subject.add(Pending(20_000 + number, 1, 0) for number in range(2))
    take(subject)
    assert len(subject._deadlines) < 2000


class DeliveryMachine(RuleBasedStateMachine):
    """Any sequence of events: no message is lost, none is lent twice at once, keys keep their order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.next_message = 1
        self.acknowledged: set[int] = set()
        self.subject = delivery(ordered=True)
        self.leases: dict[int, Lease] = {}
        for consumer in (1, 2):
            self.subject.attach(consumer)

    @rule(key=st.sampled_from(["", "a", "b"]))
    def publish(self, key: str) -> None:
        self.subject.add([Pending(self.next_message, 1, self.next_message, key)])
        self.next_message += 1

    @rule(count=st.integers(1, 4), consumer=st.integers(0, 2))
    def lend(self, count: int, consumer: int) -> None:
        leases = take(self.subject, self.now, count, consumer)
        for lease in leases:
            message, key = lease.pending.message, lease.pending.key
            assert message not in self.acknowledged
            held = self.leases.get(message)
            assert held is None or held.pending.lease is not held
            if key:
                earlier = [p for p in self.subject.pending.values() if p.key == key and p.message < message]
                assert all(p.lease in leases for p in earlier)
            self.leases[message] = lease

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        message = data.draw(st.sampled_from(sorted(self.leases)))
        if self.subject.acknowledge(message, self.leases.pop(message).serial):
            self.acknowledged.add(message)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), seconds=st.sampled_from([0, 3, 30]))
    def modify(self, data: st.DataObject, seconds: int) -> None:
        message = data.draw(st.sampled_from(sorted(self.leases)))
        self.subject.modify(message, self.leases[message].serial, seconds, self.now)

    @rule(consumer=st.integers(1, 2))
    def lose_stream(self, consumer: int) -> None:
        self.subject.detach(consumer, self.now)
        self.subject.attach(consumer)

    @rule(seconds=st.sampled_from([1.0, 5.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.subject.tick(self.now)

    @invariant()
    def nothing_is_lost(self) -> None:
        published = set(range(1, self.next_message))
        assert set(self.subject.pending) == published - self.acknowledged

    @invariant()
    def consumers_are_charged_for_what_they_hold(self) -> None:
        for consumer in (1, 2):
            held = [p for p in self.subject.pending.values() if p.lease and p.lease.consumer == consumer]
            assert self.subject.outstanding(consumer) == (len(held), len(held))

    def teardown(self) -> None:
        """Whatever happened, one patient consumer gets the rest, in order within a key."""
        for consumer in (1, 2):
            self.subject.detach(consumer, self.now)
        self.now += 1000
        self.subject.tick(self.now)
        last: dict[str, int] = {}
        while leases := take(self.subject, self.now, 3):
            for lease in leases:
                pending = lease.pending
                if pending.key:
                    assert pending.message > last.get(pending.key, 0)
                    last[pending.key] = pending.message
                assert self.subject.acknowledge(pending.message, lease.serial)
        assert not self.subject.pending


TestDelivery = DeliveryMachine.TestCase
TestDelivery.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
