"""The `headrace` command.

Exit statuses: 0 done, 1 failed, 2 a run file or argument that cannot be used, 3 no progress, 4 taken over by a newer
learner, 5 an episode failed under `failures.policy = "fail_fast"`, 130 interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.attempts import Attempt, Ended
    from pipelines.config import Run

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
DEMO = EXAMPLES / "smollm2_calculator.toml"
TINY_DEMO = EXAMPLES / "calculator.toml"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="headrace",
        description="Reinforcement learning for tool-using LLM agents.",
        epilog="`headrace COMMAND --help` says more of each; README.md and docs/ say the rest.",
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
    _add_plan(commands)
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help(sys.stderr)
        return 2
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


def _add_stack_arguments(parser: argparse.ArgumentParser, *, resumable: bool = True, out: str = "runs/<name>") -> None:
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting")
    parser.add_argument("--seed", type=int, help="the run's seed")
    parser.add_argument("--out", type=Path, help=f"the run folder (default: {out})")
    if resumable:
        parser.add_argument(
            "--resume",
            action="store_true",
            help="go on with the newest attempt in the run folder, by the run file that it began with and --set",
        )
    parser.add_argument(
        "--dry-run", action="store_true", help="check all that starts no process, print the resolved run and stop"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object on the last line")


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser("demo", help="train a small LLM to use a calculator, here and now")
    parser.add_argument(
        "--tiny", action="store_true", help="a 0.23 M-parameter model: minutes instead of a quarter hour"
    )
    _add_stack_arguments(parser)
    parser.set_defaults(
        handler=lambda args: _run_locally(
            str(TINY_DEMO if args.tiny else DEMO), args, ["demo", *(["--tiny"] if args.tiny else [])]
        )
    )


def _add_run(commands: Any) -> None:
    parser = commands.add_parser("run", help="run a run file on this machine")
    parser.add_argument("file", help="the run file (TOML)")
    _add_stack_arguments(parser)
    parser.set_defaults(handler=lambda args: _run_locally(args.file, args, ["run", args.file]))


def _add_eval(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        help="measure held-out success of a run file's model, with or without an adapter",
        description="Ask held-out questions of a run file's model. The same command goes on with what was interrupted.",
    )
    parser.add_argument("file", help="the run file (TOML)")
    parser.add_argument(
        "--adapter",
        metavar="FOLDER",
        help="an adapter in PEFT layout, such as RUN/latest/adapters/<version> (default: the base model)",
    )
    parser.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help="ask each question N times at temperature 1, for pass@k up to k = N (default: evaluation.samples)",
    )
    _add_stack_arguments(parser, resumable=False, out="runs/<name>-eval, or runs/<name>-eval-<the adapter's folder>")
    parser.set_defaults(handler=_evaluate)


def _add_show(commands: Any) -> None:
    parser = commands.add_parser("show", help="show a run: how it ended, summary, steps, sampled dialogues")
    parser.add_argument("folder", type=Path, help="the run folder, or one attempt in it")
    parser.add_argument(
        "--steps", type=int, default=20, metavar="N", help="newest steps to print, one line each (default: 20)"
    )
    parser.add_argument(
        "--dialogues", type=int, default=2, metavar="N", help="dialogues to print of each phase (default: 2)"
    )
    parser.add_argument("--json", action="store_true", help="print summary and end as one JSON object on one line")
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
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="of a run that only evaluates: a line for each ended episode; those in it are not asked again",
    )
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="where host 0 of sharding.hosts listens (Cloud TPU, Slurm and Open MPI know it themselves)",
    )
    parser.add_argument("--host-id", type=int, metavar="N", help="which of sharding.hosts this is, from 0")
    parser.add_argument(
        "--compilation-cache",
        metavar="FOLDER",
        help="where compiled steps are kept for the next start: a folder or gs:// prefix (default: "
        "$JAX_COMPILATION_CACHE_DIR, else ~/.cache/headrace/xla)",
    )
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


def _add_plan(commands: Any) -> None:
    from pipelines import planning

    parser = commands.add_parser("plan", help="whether a training step fits a TPU slice, and how fast it can be")
    planning.add_arguments(parser)
    parser.set_defaults(handler=planning.run)


def _overrides(args: argparse.Namespace) -> list[str]:
    return [*args.set, *([f"seed={args.seed}"] if args.seed is not None else [])]


def _run_locally(file: str, args: argparse.Namespace, words: Sequence[str]) -> int:
    """`words` are the command's, without options."""
    from pipelines.attempts import newest_attempt
    from pipelines.check import check_unused, finished
    from pipelines.config import load_run
    from pipelines.report import how_it_ended, read_summary

    run = load_run(file, _overrides(args))
    out = args.out or Path("runs") / run.name
    again = shlex.join([*_invoked(), *words, "--resume", "--out", str(out)])
    if not args.resume:
        check_unused(run)
        if args.dry_run:
            return _dry_run(run)
        return _supervise(out, _begin(run, out), args, again=again)

    attempt = newest_attempt(out)
    with attempt.locked():
        before = load_run(str(attempt.run_file))
        run = _at_home(load_run(str(attempt.run_file), _overrides(args)), attempt)
        if args.dry_run:
            return _dry_run(run)
        summary = read_summary(attempt.folder)
        instead = finished(before, run, summary, again)
        if not instead:
            attempt.run_file.write_text(run.to_json())
    if instead:
        print(f"{how_it_ended(attempt, summary)}\nThe run is finished and nothing was started: {instead}")
        print(f"to begin anew, leave out --resume; to look at it: {_shown(out)}")
        if args.json:
            print(json.dumps(summary))
        return 0
    print(f"going on with {attempt.folder}")
    status = _supervise(out, attempt, args, again=again)
    if status == 2:  # settings that cannot be used are not what the next --resume goes on with
        attempt.run_file.write_text(before.to_json())
    return status


def _dry_run(run: Run, adapter: str | None = None) -> int:
    from pipelines.check import check, check_adapter

    print(check(run), file=sys.stderr)
    if adapter is not None:
        check_adapter(run, adapter)
    print(run.to_json(), end="")
    return 0


def _begin(run: Run, out: Path) -> Attempt:
    """A fresh attempt with its resolved run file."""
    from pipelines.attempts import new_attempt, new_run_id

    if run.storage and not run.storage.startswith("gs://"):
        _check_writable(Path(run.storage))
    attempt = new_attempt(out)
    storage = run.storage or str(attempt.folder)
    resolved = dataclasses.replace(
        run,
        run_id=new_run_id(run.name, attempt),
        storage=storage if storage.startswith("gs://") else str(Path(storage).absolute()),
    )
    attempt.run_file.write_text(resolved.to_json())
    return attempt


def _check_writable(storage: Path) -> None:
    """Make the folder; raises SettingsError, which the learner would find out only after all had started."""
    from pipelines.settings import SettingsError

    try:
        storage.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=storage).close()
    except OSError as error:
        raise SettingsError(
            f"storage {str(storage)!r} cannot be written: {error}; name a folder that can, or leave it out"
        ) from error


def _at_home(run: Run, attempt: Attempt) -> Run:
    """The run with its storage where the attempt now lies: run folders may be moved."""
    own = Path(run.storage).parts[-2:] == attempt.folder.parts[-2:]
    return dataclasses.replace(run, storage=str(attempt.folder)) if own else run


def _supervise(out: Path, attempt: Attempt, args: argparse.Namespace, *, again: str) -> int:
    """Train the attempt here and show what came of it; `again` is the command that would go on with it."""
    from pipelines import report

    ended = _run_stack(attempt, [])
    summary = report.read_summary(attempt.folder)
    if summary is None or ended.exit_status == 2:
        print(f"what is left of it: {_shown(out)}")
    else:
        print(f"\n{report.how_it_ended(attempt, summary)}\n{report.summary_words(summary)}")
        print(f"the run lies in    {attempt.folder.resolve()}\nlook at it         {_shown(out)}")
    if ended.exit_status == 130:
        print(f"go on with it      {again}")
    if args.json:
        print(json.dumps(summary))
    return ended.exit_status


def _run_stack(attempt: Attempt, learner_arguments: Sequence[str]) -> Ended:
    """Run the attempt here, to its end."""
    from pipelines.attempts import Ended
    from pipelines.config import load_run
    from pipelines.local import LocalStack

    run = load_run(str(attempt.run_file))
    with attempt.locked():
        attempt.note_start()
        print(f"{run.run_id}: {2 + run.sharding.hosts} processes, logs in {attempt.logs}", flush=True)
        try:
            stack = LocalStack(
                attempt,
                run.topics,
                learner_arguments=learner_arguments,
                hosts=run.sharding.hosts,
            )
            ended = stack.run()
        except Exception as error:
            attempt.note_end(Ended(1, f"{type(error).__name__}: {error}"))
            raise
        attempt.note_end(ended)
    return ended


def _invoked() -> list[str]:
    """How this command was started, for commands that a person can paste."""
    started = Path(sys.argv[0])
    if started.name != "headrace":
        return [sys.executable, "-m", "pipelines.cli"]
    found = shutil.which("headrace")
    return ["headrace"] if found and Path(found).resolve() == started.resolve() else [str(started)]


def _shown(out: Path) -> str:
    return shlex.join([*_invoked(), "show", str(out)])


def _evaluate(args: argparse.Namespace) -> int:
    from pipelines import evaluations
    from pipelines.check import check_adapter
    from pipelines.config import load_run
    from pipelines.report import evaluation_words, read_summary
    from pipelines.settings import SettingsError

    only = ["learner.steps=0", "evaluation.before=true", "evaluation.after=false"]
    only += [] if args.samples is None else [f"evaluation.samples={args.samples}"]
    # The resolved file of another run names its storage, lease and checkpoints: no business of an evaluation.
    run = dataclasses.replace(load_run(args.file, [*_overrides(args), *only]), storage="")
    if not run.evaluation.questions:
        raise SettingsError("evaluation.questions is 0: set it to how many held-out questions are to be asked")
    if args.dry_run:
        return _dry_run(run, args.adapter)
    if args.adapter is not None:
        check_adapter(run, args.adapter)
    out = args.out or evaluations.default_folder(run.name, args.adapter)
    results = evaluations.claim(out, evaluations.subject(run, args.adapter))
    status, found = 0, evaluations.finished(out)
    if found is None:
        attempt = _begin(run, out)
        options = ["--results", str(results.absolute()), *(["--adapter", args.adapter] if args.adapter else [])]
        status = _run_stack(attempt, options).exit_status
        found = read_summary(attempt.folder)
        print(f"\nthe evaluation lies in {attempt.folder.resolve()}, each episode in {results}")
    else:
        print(f"this evaluation is finished and nothing was started; its episodes lie in {results}")
    if found is not None and found["evaluation_before"] is not None:
        what = f"adapter {args.adapter}" if args.adapter else "the base model, without an adapter"
        print(evaluation_words(found, what))
    elif status != 2:
        print(f"{evaluations.ended(results)} episodes have ended; the same command goes on with it")
    if args.json:
        print(json.dumps(evaluations.figures(found, args.adapter, results)))
    return status


def _show(args: argparse.Namespace) -> int:
    from pipelines import report
    from pipelines.attempts import find_attempt

    attempt = find_attempt(args.folder)
    summary, ended = report.read_summary(attempt.folder), attempt.ended
    if args.json:
        end = {"running": attempt.running, "ended": dataclasses.asdict(ended) if ended else None}
        print(json.dumps((summary or {}) | end))
        return 0
    print(report.how_it_ended(attempt, summary))
    if summary is not None:
        print(report.summary_words(summary))
    print(f"the run lies in    {attempt.folder}")
    for text in (report.steps_table(report.read_steps(attempt.folder), args.steps), report.end_of_log(attempt)):
        if text:
            print(f"\n{text}")
    try:
        dialogues = report.dialogues(attempt.folder, args.dialogues)
    except ValueError as error:
        dialogues = f"the dialogues cannot be decoded here: {error}"
    if dialogues:
        print(f"\n{dialogues}")
    return 0


def _learner(args: argparse.Namespace) -> int:
    from learner.train import leave
    from pipelines.config import load_run
    from pipelines.learner import run_learner
    from pipelines.settings import SettingsError

    folder = args.folder or (Path() if args.run.startswith("gs://") else Path(args.run).absolute().parent)
    run = load_run(args.run)
    try:
        status = run_learner(
            run,
            folder,
            adapter=args.adapter,
            results=args.results,
            coordinator=args.coordinator,
            host=args.host_id,
            compilation_cache=args.compilation_cache,
        )
    except SettingsError as error:
        print(f"headrace: {error}", file=sys.stderr)
        status = 2
    except Exception:
        # With several hosts an orderly exit of the interpreter waits for those that are gone.
        logging.exception("the learner failed")
        status = 1
    leave(status)


if __name__ == "__main__":
    sys.exit(main())
