"""`headrace serve`: what is served, from a run file or from a model's name alone."""

from __future__ import annotations

import argparse
import logging
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from policy.lora import LoraSettings
    from policy.settings import SamplingSettings
    from policy.weights import ModelSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument(
        "model",
        metavar="RUN|MODEL",
        help="a run file (.toml, or a resolved .json), whose model, lora and sampling count; or a model, as model.path",
    )
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at (default: this machine alone)")
    parser.add_argument("--port", type=int, default=8000, help="the port (default: 8000); 0 for any free one")
    parser.add_argument(
        "--adapter", default="", help="begin with this adapter: a folder or gs:// prefix in PEFT layout"
    )
    parser.add_argument(
        "--adapters",
        action="append",
        default=[],
        metavar="ROOT",
        help="let clients load adapters from below this folder or gs:// prefix; may be repeated",
    )
    parser.add_argument(
        "--max-adapters",
        type=int,
        default=4,
        metavar="N",
        help="adapters held at once beside the base model (default: 4); the one used longest ago makes room",
    )
    parser.add_argument("--follow", default="", metavar="STORAGE", help="keep a run's newest adapter in force")
    parser.add_argument(
        "--api-key-env", default="", metavar="NAME", help="ask clients for the key in this environment variable"
    )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C. Raises SettingsError for what cannot be served."""
    from pipelines.settings import SettingsError
    from policy.adapters import AdapterError
    from policy.allocator import keep_freed_memory
    from policy.serve import AddressError, ServeSettings, serve

    keep_freed_memory()
    model, lora, sampling, storage = _what(args)
    key = os.environ.get(args.api_key_env, "") if args.api_key_env else ""
    if args.api_key_env and not key:
        raise SettingsError(f"--api-key-env names {args.api_key_env}, which is not set: set it to the key")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("jax").setLevel(logging.WARNING)  # it tells every accelerator that it does not find
    try:
        settings = ServeSettings(
            host=args.host,
            port=args.port,
            adapter=args.adapter,
            adapter_roots=(*args.adapters, *([storage] if storage else [])),
            follow=args.follow,
            api_key=key,
            max_adapters=args.max_adapters,
        )
        serve(model, lora, sampling, settings, lambda url: print(f"serving {model.path} at {url}", flush=True))
    except (AddressError, AdapterError, ValueError, OSError) as error:
        raise SettingsError(f"{args.model} cannot be served: {error}") from error
    return 0


def _what(args: argparse.Namespace) -> tuple[ModelSettings, LoraSettings | None, SamplingSettings, str]:
    """Model, what adapters it takes (None: what the adapter at hand asks for), sampling, and the run's storage."""
    from pipelines import settings
    from pipelines.config import load_run
    from policy.lora import LoraSettings
    from policy.settings import SamplingSettings
    from policy.weights import ModelSettings

    if args.model.endswith((".toml", ".json")):
        found = load_run(args.model, args.set)
        return found.model, found.lora, found.sampling, found.storage

    values = settings.override({"model": {"path": args.model}}, args.set)
    if more := sorted(values.keys() - {"model", "lora", "sampling"}):
        raise settings.SettingsError(f"--set takes model, lora and sampling here, found {', '.join(more)}")
    lora = settings.read(LoraSettings, values["lora"], "lora") if "lora" in values else None
    sampling = settings.read(SamplingSettings, values.get("sampling", {}), "sampling")
    return settings.read(ModelSettings, values["model"], "model"), lora, sampling, ""
