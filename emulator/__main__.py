"""`python -m emulator`: the Pub/Sub server alone."""

import argparse
import sys

from emulator.cli import add_arguments, run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m emulator",
        description="A durable local Pub/Sub server (google.pubsub.v1). Point clients at it with PUBSUB_EMULATOR_HOST.",
    )
    add_arguments(parser)
    sys.exit(run(parser.parse_args()))
