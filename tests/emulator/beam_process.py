"""A Beam streaming job of its own process: reads a subscription, marks each message, writes it to a topic.

Usage: PUBSUB_EMULATOR_HOST=… python beam_process.py SUBSCRIPTION TOPIC. Runs until killed.
"""

import sys

import apache_beam as beam
from apache_beam.io import ReadFromPubSub, WriteToPubSub
from apache_beam.io.gcp.pubsub import PubsubMessage
from apache_beam.options.pipeline_options import PipelineOptions

subscription, topic = sys.argv[1:]
with beam.Pipeline(options=PipelineOptions(streaming=True, runner="DirectRunner")) as pipeline:
    (
        pipeline
        | ReadFromPubSub(subscription=subscription, with_attributes=True)
        | beam.Map(lambda message: PubsubMessage(message.data, {**message.attributes, "seen": "yes"}))
        | WriteToPubSub(topic, with_attributes=True)
    )
