"""Publishing: packs, verdicts, results and dead letters, each to its topic, as one message with attributes each."""

# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import apache_beam as beam
from apache_beam.io.gcp.pubsub import PubsubMessage, WriteToPubSub
from apache_beam.typehints import with_output_types

from trajectories import codec
from transforms import metrics


class Publish(beam.PTransform):
    """Messages of the contract → one topic."""

    def __init__(self, topic: str) -> None:
        super().__init__()
        self.topic = topic

    def expand(self, messages: Any) -> Any:
        return (
            messages
            | "Encode" >> beam.ParDo(_Encode(self.topic.rpartition("/")[2]))
            | "Write" >> WriteToPubSub(self.topic, with_attributes=True)
        )


class PublishRows(Publish):
    """Pack → Pub/Sub."""


class PublishVerdicts(Publish):
    """Verdict → Pub/Sub."""


class PublishResults(Publish):
    """Episode of an eval task → Pub/Sub."""


class PublishDeadLetters(Publish):
    """DeadLetter → Pub/Sub."""


@with_output_types(PubsubMessage)
class _Encode(beam.DoFn):
    def __init__(self, topic_id: str) -> None:
        self.topic_id = topic_id

    def process(self, message: codec.Message) -> Iterator[PubsubMessage]:
        try:
            encoded = PubsubMessage(codec.encode(message), codec.attributes(message))
        except (codec.CodecError, ValueError):
            # The stages before bound what comes here, so this is a mistake of ours: the job must outlive it, and
            # the ledger issues the group again.
            logging.exception("a %s could not be encoded for %s", type(message).__name__, self.topic_id)
            metrics.count("publish/unencodable")
            return
        metrics.count(f"publish/{type(message).__name__}")
        yield encoded
