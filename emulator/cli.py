"""The command line of the server: `headrace pubsub`, and `python -m emulator` alone."""

import argparse
import asyncio
import os
import sys
from pathlib import Path

from emulator.storage import Durability, LogError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The server's options."""
    parser.add_argument("--data", type=Path, required=True, help="folder that keeps topics, subscriptions and messages")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; there is no authentication")
    parser.add_argument("--port", type=int, default=8085, help="port to listen on; 0 picks a free one (default 8085)")
    parser.add_argument("--port-file", type=Path, help="file to write the port to once the server listens")
    parser.add_argument(
        "--durability",
        type=Durability,
        choices=list(Durability),
        default=Durability.PROCESS,
        help="what an acknowledged publish survives: the death of the process (default), or the loss of power too "
        "(slower: one fsync per group of commits)",
    )
    parser.add_argument(
        "--keepalive-s", type=float, default=10.0, help="silence after which a connection is probed (default 10)"
    )
    parser.add_argument(
        "--keepalive-timeout-s",
        type=float,
        default=20.0,
        help="how long a probe may go unanswered before the connection counts as dead (default 20)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; the exit status."""
    # Not at the top: `headrace --help` should not load gRPC.
    from emulator.server import ServerSettings, serve

    def listening(address: str) -> None:
        if args.port_file is not None:
            temporary = args.port_file.with_name(f".{args.port_file.name}.{os.getpid()}")
            temporary.write_text(address.rpartition(":")[2] + "\n")
            temporary.replace(args.port_file)
        print(f"Pub/Sub server listens on {address} (export PUBSUB_EMULATOR_HOST={address})", flush=True)

    try:
        settings = ServerSettings(
            data=args.data,
            host=args.host,
            port=args.port,
            durability=args.durability,
            keepalive_s=args.keepalive_s,
            keepalive_timeout_s=args.keepalive_timeout_s,
        )
        return asyncio.run(serve(settings, listening))
    except (LogError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
