"""The `headrace` command.

Exit statuses: 0 done, 1 failed, 2 a run file or argument that cannot be used, 3 no progress, 130 interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.config import Run

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
DEMO = EXAMPLES / "smollm2_calculator.toml"
TINY_DEMO = EXAMPLES / "calculator.toml"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="headrace",
        description="Reinforcement learning for tool-using LLM agents.",
        epilog="Docs: docs/ and README.md",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_run(commands)
    _add_eval(commands)
    _add_show(commands)
    _add_learner(commands)
    _add_serve(commands)
    _add_pubsub(commands)
    _add_launch(commands)
    args = parser.parse_args(argv)
    from pipelines.attempts import AttemptError
    from pipelines.settings import SettingsError

    try:
        return int(args.handler(args))
    except (SettingsError, AttemptError) as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _add_stack_arguments(parser: argparse.ArgumentParser, *, resumable: bool = True) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting")
    parser.add_argument("--seed", type=int, help="the run's seed")
    parser.add_argument("--out", type=Path, help="the run folder (default: runs/<name>)")
    if resumable:
        parser.add_argument(
            "--resume",
            action="store_true",
            help="go on with the newest attempt in the run folder, by the run file that it began with and --set",
        )
    parser.add_argument("--dry-run", action="store_true", help="print the resolved run and stop")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object on the last line")


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser("demo", help="train a small LLM to use a calculator, here and now")
    parser.add_argument(
        "--tiny", action="store_true", help="a 0.23 M-parameter model: minutes instead of a quarter hour"
    )
    _add_stack_arguments(parser)
    parser.set_defaults(handler=lambda args: _run_locally(str(TINY_DEMO if args.tiny else DEMO), args))


def _add_run(commands: Any) -> None:
    parser = commands.add_parser("run", help="run a run file on this machine")
    parser.add_argument("file", help="the run file (TOML)")
    _add_stack_arguments(parser)
    parser.set_defaults(handler=lambda args: _run_locally(args.file, args))


def _add_eval(commands: Any) -> None:
    parser = commands.add_parser(
        "eval", help="measure held-out success of a run file's model, with or without an adapter"
    )
    parser.add_argument("file", help="the run file (TOML)")
    parser.add_argument(
        "--adapter", type=Path, help="a folder with an adapter in PEFT layout (default: the base model)"
    )
    _add_stack_arguments(parser, resumable=False)
    parser.set_defaults(handler=_evaluate)


def _add_show(commands: Any) -> None:
    parser = commands.add_parser("show", help="show a run: summary, steps, sampled dialogues")
    parser.add_argument("folder", type=Path, help="the run folder, or one attempt in it")
    parser.add_argument(
        "--dialogues", type=int, default=2, metavar="N", help="dialogues to print of each phase (default: 2)"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object on one line")
    parser.set_defaults(handler=_show)


def _add_learner(commands: Any) -> None:
    parser = commands.add_parser("learner", help="the learner alone, for a resolved run (what a TPU host starts)")
    parser.add_argument("run", help="path or gs:// address of the resolved run file (run.json)")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where summary.json and metrics.jsonl go (default: beside the file; here, if that is on gs://)",
    )
    parser.add_argument("--adapter", help="start from this adapter: a folder or gs:// prefix in PEFT layout")
    parser.set_defaults(handler=_learner)


def _add_serve(commands: Any) -> None:
    from pipelines import serving

    parser = commands.add_parser(
        "serve", help="serve a model over HTTP: token ids as vLLM and SGLang do, text and chat as OpenAI does"
    )
    serving.add_arguments(parser)
    parser.set_defaults(handler=serving.run)


def _add_pubsub(commands: Any) -> None:
    from emulator import cli as pubsub

    parser = commands.add_parser("pubsub", help="the embedded Pub/Sub server alone")
    pubsub.add_arguments(parser)
    parser.set_defaults(handler=pubsub.run)


def _add_launch(commands: Any) -> None:
    from pipelines import cloud

    parser = commands.add_parser("launch", help="launch the rollout job on Dataflow, or print the request")
    cloud.add_arguments(parser)
    parser.set_defaults(handler=cloud.run)


def _overrides(args: argparse.Namespace) -> list[str]:
    return [*args.set, *([f"seed={args.seed}"] if args.seed is not None else [])]


def _run_locally(file: str, args: argparse.Namespace) -> int:
    from pipelines.attempts import newest_attempt
    from pipelines.config import load_run

    if args.dry_run:
        print(load_run(file, _overrides(args)).to_json(), end="")
        return 0
    if args.resume:
        out = args.out or Path("runs") / load_run(file, _overrides(args)).name
        attempt = newest_attempt(out)
        with attempt.locked():
            run = load_run(str(attempt.run_file), _overrides(args))
            attempt.run_file.write_text(run.to_json())
        print(f"going on with {attempt.folder}")
    else:
        out, attempt = _begin(load_run(file, _overrides(args)), args.out, file)
    return _supervise(out, attempt, args)


def _begin(run: Run, out: Path | None, file: str) -> tuple[Path, Any]:
    """A fresh attempt with its resolved run file."""
    from pipelines.attempts import new_attempt, new_run_id

    out = out or Path("runs") / run.name
    attempt = new_attempt(out)
    resolved = dataclasses.replace(
        run,
        run_id=new_run_id(run.name, attempt),
        storage=run.storage or str(attempt.folder),
        code=dataclasses.replace(
            run.code, path=str(Path(file).absolute().parent / run.code.path) if run.code.path else ""
        ),
    )
    attempt.run_file.write_text(resolved.to_json())
    return out, attempt


def _supervise(out: Path, attempt: Any, args: argparse.Namespace, learner_arguments: Sequence[str] = ()) -> int:
    from pipelines import report
    from pipelines.config import load_run
    from pipelines.local import LocalStack

    run = load_run(str(attempt.run_file))
    with attempt.locked():
        print(f"{run.run_id}: three processes, logs in {attempt.logs}", flush=True)
        status = LocalStack(attempt, run.topics, learner_arguments=learner_arguments).run()
    summary = report.read_summary(attempt.folder)
    if summary is not None:
        print(report.closing_words(summary, out))
    if status == 130 and hasattr(args, "resume"):
        print(f"stopped; `--resume --out {out}` goes on")
    if args.json:
        print(json.dumps(summary))
    return status


def _evaluate(args: argparse.Namespace) -> int:
    from pipelines.config import load_run

    only = ["learner.steps=0", "evaluation.before=true", "evaluation.after=false"]
    # The resolved file of another run names its storage, lease and checkpoints: no business of an evaluation.
    run = dataclasses.replace(load_run(args.file, [*_overrides(args), *only]), storage="")
    if args.dry_run:
        print(run.to_json(), end="")
        return 0
    out = args.out or Path("runs") / f"{run.name}-eval"
    out, attempt = _begin(run, out, args.file)
    adapter = ["--adapter", args.adapter] if args.adapter else []
    return _supervise(out, attempt, args, adapter)


def _show(args: argparse.Namespace) -> int:
    from pipelines import report
    from pipelines.attempts import AttemptError

    summary = report.read_summary(args.folder)
    if summary is None:
        raise AttemptError(f"{args.folder} holds no summary.json: give a run folder such as runs/<name>")
    if args.json:
        print(json.dumps(summary))
        return 0
    print(report.steps_table(args.folder))
    print(report.dialogues(args.folder, args.dialogues))
    print(report.closing_words(summary, args.folder))
    return 0


def _learner(args: argparse.Namespace) -> int:
    from learner.train import leave
    from pipelines.config import load_run
    from pipelines.learner import run_learner

    folder = args.folder or (Path() if args.run.startswith("gs://") else Path(args.run).absolute().parent)
    leave(run_learner(load_run(args.run), folder, adapter=args.adapter))


if __name__ == "__main__":
    sys.exit(main())
