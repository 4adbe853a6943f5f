"""What stock clients may rely on, run against our server and against Google's emulator where it is installed."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from google.api_core import exceptions
from google.cloud import pubsub_v1
from google.cloud.pubsub_v1.subscriber.exceptions import AcknowledgeError, AcknowledgeStatus
from google.protobuf import duration_pb2, field_mask_pb2, timestamp_pb2
from google.pubsub_v1.types import SeekRequest, StreamingPullRequest

from tests.emulator.clients import TIMEOUT_S, Clients, wait_until

HERE = Path(__file__).parent


@contextmanager
def streaming(clients: Clients, subscription: str, callback: Callable[[Any], None], **flow: int) -> Iterator[None]:
    """A stock streaming pull, closed at the end."""
    control = pubsub_v1.types.FlowControl(**flow)
    future = clients.subscriber.subscribe(subscription, callback=callback, flow_control=control)
    try:
        yield
    finally:
        future.cancel()
        future.result(timeout=TIMEOUT_S)


# Topics


def test_topic_lifecycle(clients: Clients) -> None:
    name = clients.name("topics")
    created = clients.publisher.create_topic(request={"name": name, "labels": {"a": "b"}}, timeout=TIMEOUT_S)
    assert (created.name, dict(created.labels)) == (name, {"a": "b"})
    assert clients.publisher.get_topic(topic=name, timeout=TIMEOUT_S) == created
    project = name.rsplit("/", 2)[0]
    assert name in [topic.name for topic in clients.publisher.list_topics(project=project, timeout=TIMEOUT_S)]
    with pytest.raises(exceptions.AlreadyExists):
        clients.publisher.create_topic(name=name, timeout=TIMEOUT_S)
    clients.publisher.delete_topic(topic=name, timeout=TIMEOUT_S)
    for call in (clients.publisher.get_topic, clients.publisher.delete_topic):
        with pytest.raises(exceptions.NotFound):
            call(topic=name, timeout=TIMEOUT_S)


@pytest.mark.parametrize("name", ["projects/conformance/topics/ab", "projects/conformance/topics/goog-x", "topics/abc"])
def test_bad_topic_name(clients: Clients, name: str) -> None:
    with pytest.raises(exceptions.InvalidArgument):
        clients.publisher.create_topic(name=name, timeout=TIMEOUT_S)


def test_list_pages(clients: Clients) -> None:
    topics = {f"projects/paging-project/topics/{clients.name('topics').rsplit('/')[-1]}" for _ in range(5)}
    for topic in topics:
        clients.publisher.create_topic(name=topic, timeout=TIMEOUT_S)
    request = {"project": "projects/paging-project", "page_size": 2}
    pages = list(clients.publisher.list_topics(request=request, timeout=TIMEOUT_S).pages)
    assert all(len(page.topics) <= 2 for page in pages)
    assert topics <= {topic.name for page in pages for topic in page.topics}
    for topic in topics:
        clients.publisher.delete_topic(topic=topic, timeout=TIMEOUT_S)


def test_update_topic(clients: Clients) -> None:
    topic = clients.topic()
    update = {"topic": {"name": topic, "labels": {"k": "v"}}, "update_mask": {"paths": ["labels"]}}
    assert dict(clients.publisher.update_topic(request=update, timeout=TIMEOUT_S).labels) == {"k": "v"}
    assert dict(clients.publisher.get_topic(topic=topic, timeout=TIMEOUT_S).labels) == {"k": "v"}
    with pytest.raises(exceptions.InvalidArgument):
        clients.publisher.update_topic(request={**update, "update_mask": {"paths": []}}, timeout=TIMEOUT_S)


def test_topic_subscriptions(clients: Clients) -> None:
    topic = clients.topic()
    subscriptions = {clients.subscription(topic) for _ in range(2)}
    found = clients.publisher.list_topic_subscriptions(topic=topic, timeout=TIMEOUT_S)
    assert set(found) == subscriptions


def test_deleted_topic_leaves_its_backlog(clients: Clients) -> None:
    topic = clients.topic()
    subscription = clients.subscription(topic)
    clients.publish(topic, b"kept")
    clients.publisher.delete_topic(topic=topic, timeout=TIMEOUT_S)
    found = clients.subscriber.get_subscription(subscription=subscription, timeout=TIMEOUT_S)
    assert found.topic == "_deleted-topic_"
    assert [m.message.data for m in clients.pull(subscription)] == [b"kept"]


# Subscriptions


def test_subscription_lifecycle(clients: Clients) -> None:
    topic = clients.topic()
    name = clients.name("subscriptions")
    created = clients.subscriber.create_subscription(name=name, topic=topic, timeout=TIMEOUT_S)
    assert created.ack_deadline_seconds == 10
    assert created.message_retention_duration.total_seconds() == 7 * 24 * 3600
    assert clients.subscriber.get_subscription(subscription=name, timeout=TIMEOUT_S).topic == topic
    project = name.rsplit("/", 2)[0]
    listed = clients.subscriber.list_subscriptions(project=project, timeout=TIMEOUT_S)
    assert name in [subscription.name for subscription in listed]
    with pytest.raises(exceptions.AlreadyExists):
        clients.subscriber.create_subscription(name=name, topic=topic, timeout=TIMEOUT_S)
    clients.subscriber.delete_subscription(subscription=name, timeout=TIMEOUT_S)
    with pytest.raises(exceptions.NotFound):
        clients.subscriber.get_subscription(subscription=name, timeout=TIMEOUT_S)
    with pytest.raises(exceptions.NotFound):
        clients.subscriber.pull(subscription=name, max_messages=1, timeout=TIMEOUT_S)
    with pytest.raises(exceptions.NotFound):
        clients.subscriber.create_subscription(name=name, topic=f"{topic}-absent", timeout=TIMEOUT_S)


@pytest.mark.parametrize("seconds", [5, 601])
def test_ack_deadline_range(clients: Clients, seconds: int) -> None:
    topic = clients.topic()
    with pytest.raises(exceptions.InvalidArgument):
        clients.subscription(topic, ack_deadline_seconds=seconds)


def test_update_subscription(clients: Clients) -> None:
    subscription = clients.subscription(clients.topic())
    update = {
        "subscription": {"name": subscription, "ack_deadline_seconds": 33},
        "update_mask": field_mask_pb2.FieldMask(paths=["ack_deadline_seconds"]),
    }
    assert clients.subscriber.update_subscription(request=update, timeout=TIMEOUT_S).ack_deadline_seconds == 33
    found = clients.subscriber.get_subscription(subscription=subscription, timeout=TIMEOUT_S)
    assert found.ack_deadline_seconds == 33


@pytest.mark.parametrize("field", ["enable_message_ordering", "filter", "topic"])
def test_immutable_subscription_fields(clients: Clients, field: str) -> None:
    subscription = clients.subscription(clients.topic())
    values = {"enable_message_ordering": True, "filter": "attributes:a", "topic": clients.topic()}
    update = {"subscription": {"name": subscription, field: values[field]}, "update_mask": {"paths": [field]}}
    with pytest.raises(exceptions.InvalidArgument):
        clients.subscriber.update_subscription(request=update, timeout=TIMEOUT_S)


def test_detach(clients: Clients) -> None:
    topic = clients.topic()
    subscription = clients.subscription(topic)
    clients.publish(topic, b"gone")
    clients.publisher.detach_subscription(request={"subscription": subscription}, timeout=TIMEOUT_S)
    assert clients.subscriber.get_subscription(subscription=subscription, timeout=TIMEOUT_S).detached
    with pytest.raises(exceptions.FailedPrecondition):
        clients.subscriber.pull(subscription=subscription, max_messages=1, timeout=TIMEOUT_S)


# Publishing


@pytest.mark.parametrize(
    "message",
    [
        pytest.param({}, id="empty"),
        pytest.param({"data": b"x" * 10_000_001}, id="over 10 MB"),
        pytest.param({"data": b"x", "attributes": {"k" * 257: "v"}}, id="long attribute key"),
        pytest.param({"data": b"x", "attributes": {"k": "v" * 1025}}, id="long attribute value"),
        pytest.param({"data": b"x", "attributes": {str(n): "v" for n in range(101)}}, id="too many attributes"),
        pytest.param({"data": b"x", "ordering_key": "k" * 1025}, id="long ordering key"),
    ],
)
def test_publish_is_refused(clients: Clients, message: dict[str, Any]) -> None:
    topic = clients.topic()
    with pytest.raises(exceptions.InvalidArgument):
        clients.publisher.api.publish(topic=topic, messages=[message], timeout=TIMEOUT_S, retry=None)


def test_publish_of_nothing_or_to_nowhere(clients: Clients) -> None:
    topic = clients.topic()
    with pytest.raises(exceptions.InvalidArgument):
        clients.publisher.api.publish(topic=topic, messages=[], timeout=TIMEOUT_S)
    with pytest.raises(exceptions.NotFound):
        clients.publisher.api.publish(topic=f"{topic}-absent", messages=[{"data": b"x"}], timeout=TIMEOUT_S)


def test_batched_publish_reaches_every_subscription(clients: Clients) -> None:
    topic = clients.topic()
    subscriptions = [clients.subscription(topic) for _ in range(2)]
    futures = [clients.publisher.publish(topic, b"%d" % number, number=str(number)) for number in range(300)]
    ids = {future.result(timeout=TIMEOUT_S) for future in futures}
    assert len(ids) == 300
    for subscription in subscriptions:
        received = clients.pull(subscription, 300)
        assert {m.message.message_id for m in received} == ids
        assert all(m.message.attributes["number"] == m.message.data.decode() for m in received)
        assert all(m.message.publish_time.timestamp() > 0 for m in received)
        clients.acknowledge(subscription, received)
        assert clients.nothing_left(subscription, for_s=0.1)


def test_a_new_subscription_gets_nothing_old(clients: Clients) -> None:
    topic = clients.topic()
    clients.subscription(topic)
    clients.publish(topic, b"before")
    subscription = clients.subscription(topic)
    clients.publish(topic, b"after")
    assert [m.message.data for m in clients.pull(subscription)] == [b"after"]
    assert clients.nothing_left(subscription)


# Pulling


def test_pull_needs_max_messages(clients: Clients) -> None:
    subscription = clients.subscription(clients.topic())
    with pytest.raises(exceptions.InvalidArgument):
        clients.subscriber.pull(subscription=subscription, max_messages=0, timeout=TIMEOUT_S)


def test_nack_redelivers_at_once(clients: Clients) -> None:
    topic = clients.topic()
    subscription = clients.subscription(topic, ack_deadline_seconds=600)
    clients.publish(topic, b"again")
    for _ in range(3):
        (received,) = clients.pull(subscription)
        clients.give_back(subscription, [received])
    (received,) = clients.pull(subscription)
    clients.acknowledge(subscription, [received])
    assert clients.nothing_left(subscription)


def test_deadline_redelivers(clients: Clients) -> None:
    topic = clients.topic()
    subscription = clients.subscription(topic)
    clients.publish(topic, b"a", b"b")
    received = clients.pull(subscription, 2)
    clients.modify(subscription, received[:1], 1)
    assert clients.nothing_left(subscription, for_s=0.4)
    (again,) = clients.pull(subscription)
    assert again.message == received[0].message
    assert again.ack_id != received[0].ack_id
    clients.acknowledge(subscription, [again, received[1]])
    assert clients.nothing_left(subscription)


def test_acknowledging_twice_is_no_error(clients: Clients) -> None:
    topic = clients.topic()
    subscription = clients.subscription(topic)
    clients.publish(topic, b"x")
    received = clients.pull(subscription)
    clients.acknowledge(subscription, received)
    clients.acknowledge(subscription, received)
    clients.give_back(subscription, received)
    assert clients.nothing_left(subscription)


def test_modify_range(clients: Clients) -> None:
    topic = clients.topic()
    subscription = clients.subscription(topic)
    clients.publish(topic, b"x")
    received = clients.pull(subscription)
    for seconds in (-1, 601):
        with pytest.raises(exceptions.InvalidArgument):
            clients.modify(subscription, received, seconds)


# Streaming pull


def test_streaming_pull_delivers_each_once(clients: Clients) -> None:
    topic = clients.topic()
    subscription = clients.subscription(topic)
    received: list[bytes] = []

    def callback(message: Any) -> None:
        received.append(message.data)
        message.ack()

    with streaming(clients, subscription, callback):
        for number in range(500):
            clients.publisher.publish(topic, b"%d" % number)
        assert wait_until(lambda: len(received) >= 500)
    assert sorted(received, key=int) == [b"%d" % number for number in range(500)]
    assert clients.nothing_left(subscription)


def test_streaming_nack_redelivers_at_once(clients: Clients) -> None:
    topic = clients.topic()
    subscription = clients.subscription(topic, ack_deadline_seconds=600)
    attempts: list[bytes] = []

    def callback(message: Any) -> None:
        attempts.append(message.data)
        if len(attempts) < 4:
            message.nack()
        else:
            message.ack()

    clients.publish(topic, b"x")
    with streaming(clients, subscription, callback):
        assert wait_until(lambda: len(attempts) == 4, 10)
    assert clients.nothing_left(subscription)


def test_flow_control(clients: Clients) -> None:
    topic = clients.topic()
    subscription = clients.subscription(topic)
    clients.publish(topic, *[b"%d" % number for number in range(20)])
    held: list[Any] = []
    with streaming(clients, subscription, held.append, max_messages=5):
        assert wait_until(lambda: len(held) == 5)
        # The other fifteen are not stuck in the first stream.
        assert len(clients.pull(subscription, 15)) == 15
        assert len(held) == 5


def test_messages_above_grpcs_default_limit(clients: Clients) -> None:
    topic = clients.topic()
    subscription = clients.subscription(topic)
    body = os.urandom(9_000_000)
    clients.publish(topic, body)
    (pulled,) = clients.pull(subscription)
    assert pulled.message.data == body
    clients.acknowledge(subscription, [pulled])
    received: list[Any] = []

    def callback(message: Any) -> None:
        received.append(message.data)
        message.ack()

    with streaming(clients, subscription, callback):
        clients.publish(topic, body)
        assert wait_until(lambda: len(received) == 1)
    assert received == [body]


def test_acknowledgements_over_the_stream(clients: Clients) -> None:
    topic = clients.topic()
    subscription = clients.subscription(topic)
    clients.publish(topic, b"a", b"b")
    delivered, done = threading.Event(), threading.Event()
    ack_ids: list[str] = []

    def requests() -> Iterator[StreamingPullRequest]:
        yield StreamingPullRequest(subscription=subscription, stream_ack_deadline_seconds=60)
        assert delivered.wait(TIMEOUT_S)
        yield StreamingPullRequest(
            ack_ids=ack_ids[:1], modify_deadline_ack_ids=ack_ids[1:], modify_deadline_seconds=[0] * len(ack_ids[1:])
        )
        done.wait(TIMEOUT_S)

    bodies = []
    for response in clients.subscriber.api.streaming_pull(requests=requests(), timeout=TIMEOUT_S):
        for received in response.received_messages:
            bodies.append(received.message.data)
            ack_ids.append(received.ack_id)
        if len(ack_ids) == 2:
            delivered.set()
        if len(ack_ids) == 3:
            break
    done.set()
    # The acknowledged first one did not come again; the given back second one did.
    assert bodies[2] == bodies[1]


def test_a_dead_subscribers_messages_go_to_the_living(clients: Clients) -> None:
    topic = clients.topic()
    subscription = clients.subscription(topic, ack_deadline_seconds=600)
    clients.publish(topic, *[b"%d" % number for number in range(40)])
    command = [sys.executable, str(HERE / "subscriber_process.py"), clients.address, subscription]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        taken = [process.stdout.readline() for _ in range(40)]
        process.kill()
    assert len(taken) == 40
    received: set[bytes] = set()

    def callback(message: Any) -> None:
        received.add(message.data)
        message.ack()

    with streaming(clients, subscription, callback):
        assert wait_until(lambda: len(received) == 40, clients.patience_s)


def test_stream_of_an_absent_subscription(clients: Clients) -> None:
    absent = f"{clients.subscription(clients.topic())}-absent"
    future = clients.subscriber.subscribe(absent, callback=lambda message: None)
    with pytest.raises(exceptions.NotFound):
        future.result(timeout=TIMEOUT_S)


# Ordering


def publish_ordered(clients: Clients, topic: str, keys: dict[str, int]) -> None:
    messages = [
        {"data": b"%d" % number, "ordering_key": key}
        for number in range(max(keys.values()))
        for key in keys
        if number < keys[key]
    ]
    clients.publisher.api.publish(topic=topic, messages=messages, timeout=TIMEOUT_S)


def test_ordering(clients: Clients) -> None:
    topic = clients.topic()
    subscription = clients.subscription(topic, enable_message_ordering=True)
    keys = {f"key-{number}": 25 for number in range(4)}
    publish_ordered(clients, topic, keys)
    received: dict[str, list[int]] = {key: [] for key in keys}

    def callback(message: Any) -> None:
        received[message.ordering_key].append(int(message.data))
        message.ack()

    with streaming(clients, subscription, callback):
        assert wait_until(lambda: sum(map(len, received.values())) >= 100)
    assert all(numbers == list(range(25)) for numbers in received.values())


def test_nack_brings_a_keys_later_messages_again(clients: Clients) -> None:
    topic = clients.topic()
    subscription = clients.subscription(topic, enable_message_ordering=True)
    publish_ordered(clients, topic, {"key": 5})
    first = clients.pull(subscription, 5)
    assert [m.message.data for m in first] == [b"0", b"1", b"2", b"3", b"4"]
    clients.acknowledge(subscription, first[:2])
    clients.give_back(subscription, first[2:3])
    again = clients.pull(subscription, 3)
    assert [m.message.data for m in again] == [b"2", b"3", b"4"]
    clients.acknowledge(subscription, again)
    assert clients.nothing_left(subscription)


def test_one_batch_of_a_key_at_a_time(clients: Clients) -> None:
    topic = clients.topic()
    subscription = clients.subscription(topic, enable_message_ordering=True)
    publish_ordered(clients, topic, {"key": 4})
    first = clients.pull(subscription, 2)
    assert [m.message.data for m in first] == [b"0", b"1"]
    assert clients.nothing_left(subscription)
    clients.acknowledge(subscription, first)
    assert [m.message.data for m in clients.pull(subscription, 2)] == [b"2", b"3"]


# Dead letters and retries


def test_dead_letter_topic(clients: Clients) -> None:
    topic, dead = clients.topic(), clients.topic()
    dead_subscription = clients.subscription(dead)
    policy = {"dead_letter_topic": dead, "max_delivery_attempts": 5}
    subscription = clients.subscription(topic, dead_letter_policy=policy)
    clients.publish(topic, b"poison", colour="green")
    attempts = []
    for _ in range(5):
        (received,) = clients.pull(subscription)
        attempts.append(received.delivery_attempt)
        clients.give_back(subscription, [received])
    assert attempts == [1, 2, 3, 4, 5]
    assert clients.nothing_left(subscription)
    (letter,) = clients.pull(dead_subscription)
    assert letter.message.data == b"poison"
    attributes = dict(letter.message.attributes)
    assert attributes["colour"] == "green"
    assert attributes["CloudPubSubDeadLetterSourceDeliveryCount"] == "5"
    assert attributes["CloudPubSubDeadLetterSourceSubscription"] == subscription.rsplit("/", 1)[-1]
    assert attributes["CloudPubSubDeadLetterSourceSubscriptionProject"] == "conformance"
    assert "CloudPubSubDeadLetterSourceTopicPublishTime" in attributes


@pytest.mark.parametrize("attempts", [4, 101])
def test_dead_letter_range(clients: Clients, attempts: int) -> None:
    topic = clients.topic()
    with pytest.raises(exceptions.OutOfRange):
        clients.subscription(topic, dead_letter_policy={"dead_letter_topic": topic, "max_delivery_attempts": attempts})


def test_retry_policy_delays_redelivery(clients: Clients) -> None:
    topic = clients.topic()
    policy = {"minimum_backoff": duration_pb2.Duration(seconds=1), "maximum_backoff": duration_pb2.Duration(seconds=2)}
    subscription = clients.subscription(topic, retry_policy=policy)
    clients.publish(topic, b"x")
    clients.give_back(subscription, clients.pull(subscription))
    assert clients.nothing_left(subscription, for_s=0.5)
    assert len(clients.pull(subscription)) == 1


# Filters


def test_filter(clients: Clients) -> None:
    topic = clients.topic()
    subscription = clients.subscription(topic, filter='attributes.kind = "row" AND NOT attributes:skip')
    clients.publish(topic, b"wanted", kind="row")
    clients.publish(topic, b"other kind", kind="task")
    clients.publish(topic, b"skipped", kind="row", skip="")
    assert [m.message.data for m in clients.pull(subscription)] == [b"wanted"]
    assert clients.nothing_left(subscription)
    found = clients.subscriber.get_subscription(subscription=subscription, timeout=TIMEOUT_S)
    assert found.filter == 'attributes.kind = "row" AND NOT attributes:skip'


def test_bad_filter(clients: Clients) -> None:
    topic = clients.topic()
    with pytest.raises(exceptions.InvalidArgument):
        clients.subscription(topic, filter="attributes.kind ==")


# Seek and snapshots


def seek(clients: Clients, subscription: str, seconds: float) -> None:
    time_ = timestamp_pb2.Timestamp()
    time_.FromNanoseconds(int(seconds * 1e9))
    clients.subscriber.seek(request=SeekRequest(subscription=subscription, time=time_), timeout=TIMEOUT_S)


def test_seek_back_replays_what_was_retained(clients: Clients) -> None:
    topic = clients.topic()
    subscription = clients.subscription(topic, retain_acked_messages=True)
    clients.publish(topic, b"before")
    time.sleep(0.05)
    moment = time.time()
    time.sleep(0.05)
    clients.publish(topic, b"a", b"b")
    clients.acknowledge(subscription, clients.pull(subscription, 3))
    assert clients.nothing_left(subscription)
    seek(clients, subscription, moment)
    received = clients.pull(subscription, 2)
    assert sorted(m.message.data for m in received) == [b"a", b"b"]
    clients.acknowledge(subscription, received)
    assert clients.nothing_left(subscription)


def test_seek_forward_drops_the_backlog(clients: Clients) -> None:
    topic = clients.topic()
    subscription = clients.subscription(topic)
    clients.publish(topic, b"a", b"b")
    seek(clients, subscription, time.time() + 60)
    assert clients.nothing_left(subscription)


def test_topic_retention_serves_a_later_subscription(clients: Clients) -> None:
    topic = clients.topic(message_retention_duration=duration_pb2.Duration(seconds=3600))
    moment = time.time() - 1
    clients.publish(topic, b"early")
    subscription = clients.subscription(topic)
    assert clients.nothing_left(subscription)
    seek(clients, subscription, moment)
    assert [m.message.data for m in clients.pull(subscription)] == [b"early"]


def test_snapshot(clients: Clients) -> None:
    topic = clients.topic()
    subscription = clients.subscription(topic)
    clients.publish(topic, b"acknowledged")
    clients.acknowledge(subscription, clients.pull(subscription))
    clients.publish(topic, b"pending")
    snapshot = clients.name("snapshots")
    created = clients.subscriber.create_snapshot(name=snapshot, subscription=subscription, timeout=TIMEOUT_S)
    assert created.topic == topic
    assert created.expire_time.timestamp() > time.time() + 6 * 24 * 3600
    clients.publish(topic, b"later")
    clients.acknowledge(subscription, clients.pull(subscription, 2))
    assert clients.nothing_left(subscription)
    clients.subscriber.seek(request=SeekRequest(subscription=subscription, snapshot=snapshot), timeout=TIMEOUT_S)
    received = clients.pull(subscription, 2)
    assert sorted(m.message.data for m in received) == [b"later", b"pending"]
    clients.acknowledge(subscription, received)
    assert clients.nothing_left(subscription)


def test_snapshot_lifecycle(clients: Clients) -> None:
    topic = clients.topic()
    subscription = clients.subscription(topic)
    snapshot = clients.name("snapshots")
    clients.subscriber.create_snapshot(name=snapshot, subscription=subscription, timeout=TIMEOUT_S)
    assert clients.subscriber.get_snapshot(snapshot=snapshot, timeout=TIMEOUT_S).name == snapshot
    project = snapshot.rsplit("/", 2)[0]
    assert snapshot in [s.name for s in clients.subscriber.list_snapshots(project=project, timeout=TIMEOUT_S)]
    listed = clients.publisher.list_topic_snapshots(request={"topic": topic}, timeout=TIMEOUT_S)
    assert list(listed) == [snapshot]
    clients.subscriber.delete_snapshot(snapshot=snapshot, timeout=TIMEOUT_S)
    with pytest.raises(exceptions.NotFound):
        clients.subscriber.get_snapshot(snapshot=snapshot, timeout=TIMEOUT_S)


# Exactly-once


def test_exactly_once_reports_late_acknowledgements(clients: Clients) -> None:
    topic = clients.topic()
    subscription = clients.subscription(topic, enable_exactly_once_delivery=True)
    clients.publish(topic, b"x")
    (received,) = clients.pull(subscription)
    clients.give_back(subscription, [received])
    with pytest.raises(exceptions.InvalidArgument) as caught:
        clients.acknowledge(subscription, [received])
    (info,) = caught.value.details
    assert info.metadata == {received.ack_id: "PERMANENT_FAILURE_INVALID_ACK_ID"}
    clients.acknowledge(subscription, clients.pull(subscription))
    assert clients.nothing_left(subscription)


def test_exactly_once_futures_of_the_stock_client(clients: Clients) -> None:
    topic = clients.topic()
    subscription = clients.subscription(topic, enable_exactly_once_delivery=True)
    outcomes: dict[bytes, Any] = {}
    # The futures must be awaited off the callback's thread: they are completed by it.
    waiting = ThreadPoolExecutor(4)

    def settle(message: Any) -> None:
        if message.data == b"late" and message.data not in outcomes:
            outcomes[message.data] = None
            clients.subscriber.modify_ack_deadline(
                subscription=subscription, ack_ids=[message.ack_id], ack_deadline_seconds=0, timeout=TIMEOUT_S
            )
            try:
                message.ack_with_response().result(timeout=TIMEOUT_S)
            except AcknowledgeError as error:
                outcomes[message.data] = error.error_code
        elif message.data == b"good":
            outcomes[message.data] = message.ack_with_response().result(timeout=TIMEOUT_S)
        else:
            message.ack()

    with streaming(clients, subscription, lambda message: waiting.submit(settle, message)):
        # One after the other: in one request, the stock client fails the good ones with the late one.
        clients.publish(topic, b"good")
        assert wait_until(lambda: outcomes.get(b"good") is not None)
        clients.publish(topic, b"late")
        assert wait_until(lambda: outcomes.get(b"late") is not None)
    assert outcomes == {b"good": AcknowledgeStatus.SUCCESS, b"late": AcknowledgeStatus.INVALID_ACK_ID}
    waiting.shutdown()
