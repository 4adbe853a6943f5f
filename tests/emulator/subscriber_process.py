"""A subscriber of its own process, to be killed or frozen: takes messages over a streaming pull and never acknowledges.

Usage: python subscriber_process.py ADDRESS SUBSCRIPTION. Prints one line per message.
"""

import sys
import time

import grpc
from google.cloud import pubsub_v1
from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcTransport

address, subscription = sys.argv[1:]
transport = SubscriberGrpcTransport(channel=grpc.insecure_channel(address))
client = pubsub_v1.SubscriberClient(transport=transport)
future = client.subscribe(subscription, callback=lambda message: print(message.data.decode(), flush=True))
time.sleep(120)
