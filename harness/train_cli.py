"""`optstream train`: a Megatron GPT on real text, resident and streamed from one seed, compared bit by bit.

Exit 0 if every loss, model param, main param and moment is equal to the last bit (or, with a lossy moment
format, within its stated tolerance), 1 if not, 2 on bad usage.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from optstream.core.config import DISK, FLAGS, STREAMING, add_arguments
from optstream.core.validator import validate_arguments
from optstream.harness import resume, rl_cli
from optstream.harness.errors import ConfigurationError
from optstream.harness.output import write_json
from optstream.harness.resume import Resume
from optstream.harness.stream_settings import StreamSettings
from optstream.harness.summary import summarise, table, verdict
from optstream.harness.terminal import plain_warnings
from optstream.harness.training_config import TrainingConfig, require_megatron

if TYPE_CHECKING:
    from optstream.harness.compare import Comparison

EQUAL, DIFFERENT = 0, 1
RUNS = Path("runs")

# Trainers' default bucket would hold this small model whole, and nothing would be seen to stream.
BUCKET_NUMEL = 131072

_MODEL_HELP = {
    "steps": "optimizer steps of each run",
    "layers": "transformer layers",
    "hidden": "hidden size",
    "heads": "attention heads",
    "seq": "sequence length, in bytes of text",
    "batch": "sequences a microbatch and data-parallel rank",
    "ranks": "processes",
    "tp": "tensor-parallel size",
    "pp": "pipeline-parallel size",
    "ep": "expert-parallel size",
    "experts": "experts a mixture-of-experts layer; 0 is a dense model",
    "seed": "of the initial weights and the batches",
}
_MODEL_DEFAULTS = {"steps": 20, "layers": 4, "hidden": 256, "heads": 8, "seq": 128, "batch": 2}


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "train",
        help="train a small GPT, resident and streamed, and compare every bit",
        description="Train a byte-level GPT on real text with Megatron-Core, first with the optimizer state "
        "resident and then streamed, from the same seed; compare; write runs/<time>/.",
        allow_abbrev=False,
    )
    model = parser.add_argument_group("model and run")
    defaults = TrainingConfig()
    for name, text in _MODEL_HELP.items():
        default = _MODEL_DEFAULTS.get(name, getattr(defaults, name))
        model.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} ({default})")
    model.add_argument("--lr", type=float, default=defaults.lr, help=f"constant ({defaults.lr})")
    model.add_argument(
        "--data",
        metavar="FILE_OR_DIR",
        help="text to train on (by default the running Python's standard library)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="PATH|-", help="also write summary.json there, or to stdout")
    output.add_argument("--trace", metavar="FILE", help="write the streamed steps as a Perfetto trace")
    storage = parser.add_argument_group("short forms")
    storage.add_argument("--backend", choices=("nvme", "fake"), default="nvme", help="real files, or memory")
    for short, long in (
        ("--bucket-numel", "--stream-optimizer-state-bucket-numel"),
        ("--dir", "--offload-train-disk-dir"),
    ):
        storage.add_argument(
            short,
            dest=long.removeprefix("--").replace("-", "_"),
            type=int if short == "--bucket-numel" else str,
            default=argparse.SUPPRESS,
            metavar="N" if short == "--bucket-numel" else "DIR",
            help=f"short for {long}",
        )
    resume.add_arguments(parser)
    rl_cli.add_loop_arguments(parser)
    add_arguments(parser, flags=[flag for flag in FLAGS if flag.group in (DISK, STREAMING)])
    parser.set_defaults(run=run, stream_optimizer_state_bucket_numel=BUCKET_NUMEL)
    return parser


def run(args: argparse.Namespace) -> int:
    """The exit code. Raises typed errors for anything that cannot run; nothing is left behind then."""
    require_megatron()
    from optstream.harness.data import check_data
    from optstream.harness.trace import write_trace
    from optstream.harness.train_report import write_train_report

    config = _training_config(args)
    start = resume.resume_of(args)
    with _run_folder() as folder:
        if rl_cli.asks_for_loop(args):
            _refuse_checkpoints(start)
            return rl_cli.run_loop(args, config, folder)
        settings = _stream_settings(args, folder)
        validate_arguments(settings.namespace())
        check_data(config.data)
        comparisons = _compare(config, settings, start)
        shutil.rmtree(folder / "scratch", ignore_errors=True)
        summary = summarise(config, comparisons)
        outcome = verdict(config, settings.flags["stream_optimizer_state_moment_dtype"], comparisons)
        write_json(str(folder / "summary.json"), summary)
        write_train_report(folder / "report.html", config, settings, comparisons, outcome)
        if args.json:
            write_json(args.json, summary)
        if args.trace:
            write_trace(args.trace, comparisons[0].streamed.records)
    out = Console(stderr=args.json == "-")
    out.print(table(config, comparisons))
    out.print(f"report: {folder / 'report.html'}", soft_wrap=True, highlight=False)
    out.print(outcome.text, style="bold green" if outcome.passed else "bold red", soft_wrap=True)
    return EQUAL if outcome.passed else DIFFERENT


def _training_config(args: argparse.Namespace) -> TrainingConfig:
    names = {each.name for each in dataclasses.fields(TrainingConfig)}
    return TrainingConfig(**{name: value for name, value in vars(args).items() if name in names})


def _stream_settings(args: argparse.Namespace, folder: Path) -> StreamSettings:
    flags = {flag.dest: getattr(args, flag.dest) for flag in FLAGS if hasattr(args, flag.dest)}
    flags |= {"stream_optimizer_state_to_disk": True, "use_distributed_optimizer": True}
    if flags["offload_train_disk_dir"] is None:
        flags["offload_train_disk_dir"] = str(folder / "scratch")
    return StreamSettings(flags, backend=args.backend)


def _refuse_checkpoints(start: Resume) -> None:
    if start.load is not None or start.save is not None:
        raise ConfigurationError(
            "--rl-steps cannot be combined with --save or --load",
            why="the loop begins anew each time",
            remedy="Drop one of them",
        )


def _compare(config: TrainingConfig, settings: StreamSettings, start: Resume) -> list[Comparison]:
    from optstream.harness.launch import available_hardware, run_ranks

    hardware = available_hardware()
    return run_ranks(compare_with_progress, config.ranks, config, settings, start, hardware=hardware)


def compare_with_progress(
    rank: int, config: TrainingConfig, settings: StreamSettings, start: Resume
) -> Comparison:
    """`compare_on_rank`, with a progress bar on rank 0's standard error. A function for `run_ranks`."""
    with plain_warnings():
        from optstream.harness.compare import compare_on_rank

        if rank:
            return compare_on_rank(rank, config, settings, resume=start)
        columns = TextColumn("{task.description:>9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, console=Console(stderr=True)) as bar:
            tasks = {name: bar.add_task(name, total=config.steps) for name in ("resident", "streamed")}

            def progress(name: str, step: int) -> None:
                bar.update(tasks[name], completed=step)

            return compare_on_rank(rank, config, settings, progress, start)


@contextlib.contextmanager
def _run_folder() -> Iterator[Path]:
    """`runs/<time>/`, private to the user; removed again if the run fails."""
    name = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S.%f")[:-3]
    folder = RUNS.resolve() / name
    had_parent = RUNS.exists()
    try:
        folder.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise ConfigurationError(
            f"cannot create {folder}",
            why=error.strerror or str(error),
            remedy="Run it in a folder that you may write to",
        ) from error
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if not had_parent:
            with contextlib.suppress(OSError):  # another run may have put its own folder there meanwhile
                RUNS.rmdir()
        raise
