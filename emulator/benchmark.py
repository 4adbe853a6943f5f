"""What the server carries on this machine: `python -m emulator.benchmark`.

A server, a publisher and a streaming subscriber (each its own process) on loopback with stock clients; prints one JSON
object. `published_mb_per_s` counts until every publish is acknowledged, `delivered_mb_per_s` until every message is
acknowledged by the subscriber; `latency_ms` is from publish() to the callback, one message at a time.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from typing import Any

from emulator.testing import running_server

TOPIC = "projects/benchmark/topics/benchmark"
SUBSCRIPTION = "projects/benchmark/subscriptions/benchmark"
WAIT_S = 300.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m emulator.benchmark", description=__doc__.split("\n")[0])
    parser.add_argument("--bytes", type=int, default=1_000_000, help="size of a message (default 1,000,000)")
    parser.add_argument("--megabytes", type=int, default=500, help="how much to send (default 500)")
    parser.add_argument("--durability", default="process", choices=["process", "power"])
    args = parser.parse_args()
    with running_server(options=["--durability", args.durability]) as address:
        os.environ["PUBSUB_EMULATOR_HOST"] = address
        print(json.dumps(_measure(args.bytes, args.megabytes * 1_000_000 // args.bytes)))


def _measure(size: int, count: int) -> dict[str, float]:
    from google.cloud import pubsub_v1

    publisher = pubsub_v1.PublisherClient()
    subscriber = pubsub_v1.SubscriberClient()
    publisher.create_topic(name=TOPIC, timeout=30)
    subscriber.create_subscription(name=SUBSCRIPTION, topic=TOPIC, timeout=30)
    context = multiprocessing.get_context("spawn")
    done = context.Event()
    consumer = context.Process(target=_consume, args=(count, done))
    body = os.urandom(size)
    started = time.perf_counter()
    for future in [publisher.publish(TOPIC, body) for _ in range(count)]:
        future.result(timeout=WAIT_S)
    published_s = time.perf_counter() - started
    consumer.start()
    if not done.wait(WAIT_S):
        raise RuntimeError(f"not every message was delivered within {WAIT_S:g} s")
    consumer.join(WAIT_S)
    together = context.Process(target=_consume, args=(count, done))
    done.clear()
    together.start()
    started = time.perf_counter()
    for future in [publisher.publish(TOPIC, body) for _ in range(count)]:
        future.result(timeout=WAIT_S)
    if not done.wait(WAIT_S):
        raise RuntimeError(f"not every message was delivered within {WAIT_S:g} s")
    together_s = time.perf_counter() - started
    together.join(WAIT_S)
    return {
        "message_bytes": size,
        "messages": count,
        "published_mb_per_s": round(size * count / 1e6 / published_s, 1),
        "published_per_s": round(count / published_s),
        "through_mb_per_s": round(size * count / 1e6 / together_s, 1),
        "through_per_s": round(count / together_s),
        **_latency(publisher, subscriber),
    }


def _consume(count: int, done: Event) -> None:
    """Acknowledge `count` messages over a streaming pull."""
    from google.cloud import pubsub_v1

    subscriber = pubsub_v1.SubscriberClient()
    left = threading.Semaphore(0)
    with subscriber:
        flow = pubsub_v1.types.FlowControl(max_messages=1000, max_bytes=64_000_000)
        pull = subscriber.subscribe(SUBSCRIPTION, callback=_acknowledging(left.release), flow_control=flow)
        for _ in range(count):
            left.acquire()
        done.set()
        pull.cancel()
        pull.result(timeout=WAIT_S)


def _acknowledging(also: Callable[[], None]) -> Callable[[Any], None]:
    def callback(message: Any) -> None:
        message.ack()
        also()

    return callback


def _latency(publisher: Any, subscriber: Any) -> dict[str, float]:
    arrived = threading.Semaphore(0)
    pull = subscriber.subscribe(SUBSCRIPTION, callback=_acknowledging(arrived.release))
    times = []
    for _ in range(200):
        started = time.perf_counter()
        publisher.publish(TOPIC, b"x")
        arrived.acquire()
        times.append(1e3 * (time.perf_counter() - started))
    pull.cancel()
    pull.result(timeout=WAIT_S)
    return {
        "latency_ms_p50": round(statistics.median(times), 1),
        "latency_ms_p95": round(statistics.quantiles(times, n=20)[-1], 1),
    }


if __name__ == "__main__":
    main()
