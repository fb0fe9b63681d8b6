"""Megatron's own training loop, in processes as torchrun starts them: resident, streamed, killed, resumed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from optstream.core.errors import StreamConfigError, UnsupportedError
from optstream.core.megatron_training import streaming_pretraining

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).parent / "pretrain_gpt_streaming.py"
ITERATIONS, MICROBATCHES = 6, 2
RUN = "OPTSTREAM_TEST_RUN"  # names a run to all of its processes
SAVED = 2  # the iteration that a killed run is resumed from

# fmt: off
FLAGS = [
    "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2",
    "--seq-length", "16", "--max-position-embeddings", "16", "--position-embedding-type", "rope",
    "--tokenizer-type", "NullTokenizer", "--vocab-size", "255", "--mock-data", "--split", "98,1,1",
    "--micro-batch-size", "1", "--train-iters", str(ITERATIONS),
    "--lr", "1e-3", "--min-lr", "1e-4", "--lr-decay-style", "linear", "--clip-grad", "1.0", "--bf16",
    "--attention-dropout", "0", "--hidden-dropout", "0", "--num-workers", "0",
    "--eval-interval", "100", "--eval-iters", "0", "--log-interval", "1", "--save-interval", str(SAVED),
    "--transformer-impl", "local", "--use-cpu-initialization",
    # Fused kernels need TransformerEngine or Apex.
    "--no-masked-softmax-fusion", "--no-bias-gelu-fusion", "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion", "--no-rope-fusion", "--no-gradient-accumulation-fusion",
    "--no-persist-layer-norm", "--use-distributed-optimizer",
]
# fmt: on
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather"]


@dataclass(frozen=True)
class Ended:
    """A run that has ended, and what each of its ranks wrote of it; losses are exact, a microbatch each."""

    returncode: int
    output: str
    ranks: list[dict]

    @property
    def losses(self) -> list[list[str]]:
        return [rank["losses"] for rank in self.ranks]


@pytest.fixture(scope="module")
def pretrain(hardware, tmp_path_factory):
    """Runs the script under torchrun, on the hardware that this test run has."""

    def run(*flags: str, ranks: int = 1, script: Path = SCRIPT) -> Ended:
        summaries = tmp_path_factory.mktemp("run")
        simulation = ["-m", "optstream.harness.simulated_training"] if hardware == "simulated" else []
        backend = "gloo" if hardware == "simulated" else "nccl"
        output = summaries.with_suffix(".log")
        environment = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", RUN: str(summaries)}
        # Into a file: what a killed rank leaves behind would keep a pipe open.
        with output.open("w") as log, leaving_nothing(str(summaries)):
            ended = subprocess.run(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                    *("--nproc-per-node", str(ranks), *simulation, str(script), *FLAGS),
                    *("--global-batch-size", str(MICROBATCHES * ranks), "--distributed-backend", backend),
                    *("--run-summary", str(summaries), *flags),
                ],
                env={**os.environ, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=600,
                check=False,
            )
        found = [json.loads(path.read_text()) for path in sorted(summaries.iterdir())]
        return Ended(ended.returncode, output.read_text(), found)

    return run


@contextlib.contextmanager
def leaving_nothing(run: str) -> Iterator[None]:
    """Ends what a run leaves: Megatron's checkpoints start a process that outlives a rank that is killed."""
    try:
        yield
    finally:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.environ().get(RUN) == run:
                    process.kill()


def streamed(directory: Path) -> list[str]:
    return [
        *("--stream-optimizer-state-to-disk", "--offload-train-disk-dir", str(directory)),
        *("--stream-optimizer-state-bucket-numel", "5000"),
    ]


def files_under(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def expect_streamed(run: Ended, directory: Path, steps: range, *, parameters: int) -> None:
    """It did stream, every element of the state, to files where the flags say, and has removed them."""
    assert [rank["streamed_steps"] for rank in run.ranks] == [list(steps)] * len(run.ranks)
    written = zip(*(rank["written_bytes"] for rank in run.ranks), strict=True)
    assert [sum(step) for step in written] == [12 * parameters] * len(steps)
    for rank in run.ranks:
        assert rank["file_bytes"] >= rank["written_bytes"][0]
        assert rank["roots"]
        assert all(Path(root).is_relative_to(directory) for root in rank["roots"])
    assert files_under(directory) == []


@pytest.fixture(scope="module")
def resident(pretrain, tmp_path_factory) -> tuple[Ended, Path]:
    """The reference, and its checkpoints."""
    saved = tmp_path_factory.mktemp("resident")
    # Megatron's default layout cannot be saved where the optimizer's ranges are flattened.
    run = pretrain("--save", str(saved), "--dist-ckpt-optim-fully-reshardable")
    assert run.returncode == 0, run.output[-3000:]
    return run, saved


@pytest.fixture(scope="module")
def parameters(resident) -> int:
    run, _ = resident
    (line,) = [line for line in run.output.splitlines() if "number of parameters on" in line]
    return int(line.split(":")[-1])


@pytest.fixture(scope="module")
def streaming(pretrain, tmp_path_factory) -> tuple[Ended, Path, Path]:
    """The same run streamed, its checkpoints, and where its files were."""
    saved, disk = tmp_path_factory.mktemp("streamed"), tmp_path_factory.mktemp("disk")
    run = pretrain("--save", str(saved), *streamed(disk))
    assert run.returncode == 0, run.output[-3000:]
    return run, saved, disk


def test_streamed_is_resident_to_the_last_bit(resident, streaming, parameters):
    reference, _ = resident
    run, _, disk = streaming
    (losses,) = reference.losses
    assert len(losses) == ITERATIONS * MICROBATCHES
    assert len(set(losses)) > 1
    assert run.losses == reference.losses
    expect_streamed(run, disk, range(1, ITERATIONS + 1), parameters=parameters)
    assert [(rank["streamed_steps"], rank["roots"]) for rank in reference.ranks] == [([], [])]


@pytest.mark.ranks(2)
def test_two_ranks_with_overlap_are_resident_to_the_last_bit(pretrain, parameters, tmp_path):
    reference = pretrain(*OVERLAP, ranks=2)
    run = pretrain(*OVERLAP, *streamed(tmp_path), ranks=2)
    assert (reference.returncode, run.returncode) == (0, 0), run.output[-3000:]
    assert [len(losses) for losses in reference.losses] == [ITERATIONS * MICROBATCHES] * 2
    assert reference.losses[0] != reference.losses[1]
    assert run.losses == reference.losses
    expect_streamed(run, tmp_path, range(1, ITERATIONS + 1), parameters=parameters)


def test_a_killed_run_resumes_as_if_it_had_not_been(pretrain, resident, parameters, tmp_path):
    """Killed in the backward pass after its first checkpoint, while reads of the next step are under way."""
    reference, _ = resident
    saved, disk = tmp_path / "saved", tmp_path / "disk"
    doomed = tmp_path / "doomed.py"
    doomed.write_text(
        textwrap.dedent(f"""\
        import os, signal, sys
        sys.path.insert(0, {str(SCRIPT.parent)!r})
        import pretrain_gpt_streaming as script

        class Killer(list):
            def append(self, loss):
                if len(self) == {SAVED * MICROBATCHES + 1}:
                    os.kill(os.getpid(), signal.SIGKILL)
                super().append(loss)

        if __name__ == "__main__":  # a save starts processes that import this
            script.LOSSES = Killer()
            script.main()
        """)
    )
    killed = pretrain("--save", str(saved), *streamed(disk), script=doomed)
    assert killed.returncode != 0
    assert "exitcode  : -9" in killed.output, killed.output[-3000:]
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == str(SAVED)
    assert files_under(disk), "a killed process leaves its files for the next one to remove"

    run = pretrain("--save", str(saved), "--load", str(saved), *streamed(disk))
    assert run.returncode == 0, run.output[-3000:]
    assert run.losses == [losses[SAVED * MICROBATCHES :] for losses in reference.losses]
    expect_streamed(run, disk, range(SAVED + 1, ITERATIONS + 1), parameters=parameters)
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == str(ITERATIONS)


def test_a_resident_run_goes_on_streamed(pretrain, resident, parameters, tmp_path):
    """From the checkpoint that Megatron wrote of the resident optimizer."""
    reference, saved = resident
    run = pretrain("--load", str(saved), "--ckpt-step", str(SAVED), *streamed(tmp_path))
    assert run.returncode == 0, run.output[-3000:]
    assert run.losses == [losses[SAVED * MICROBATCHES :] for losses in reference.losses]
    expect_streamed(run, tmp_path, range(SAVED + 1, ITERATIONS + 1), parameters=parameters)


def test_a_checkpoint_that_lost_its_streamed_state_is_refused(pretrain, streaming, tmp_path):
    _, saved, _ = streaming
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    shutil.rmtree(copy / f"iter_{SAVED:07d}" / "optimizer")
    run = pretrain("--load", str(copy), "--ckpt-step", str(SAVED), *streamed(tmp_path / "disk"))
    assert run.returncode != 0
    assert run.ranks == []
    assert "CheckpointError" in run.output
    assert "--no-load-optim" in run.output
    assert files_under(tmp_path / "disk") == []


def test_weights_alone_are_loaded_where_that_is_asked_for(pretrain, resident, parameters, tmp_path):
    _, saved = resident
    run = pretrain("--load", str(saved), "--no-load-optim", "--ckpt-step", str(SAVED), *streamed(tmp_path))
    assert run.returncode == 0, run.output[-3000:]
    expect_streamed(run, tmp_path, range(1, ITERATIONS - SAVED + 1), parameters=parameters)


def arguments(**flags) -> Namespace:
    defaults = {"save": None, "load": None, "ckpt_format": "torch_dist", "non_persistent_save_interval": None}
    streaming = {"stream_optimizer_state_to_disk": True, "use_distributed_optimizer": True}
    return Namespace(**{**defaults, **streaming, **flags})


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        ({"save": "s", "ckpt_format": "torch"}, UnsupportedError, "--ckpt-format torch cannot be combined"),
        ({"load": "s", "ckpt_format": "torch_dcp"}, UnsupportedError, "Use --ckpt-format torch_dist"),
        ({"non_persistent_save_interval": 5}, UnsupportedError, "--non-persistent-save-interval"),
        ({"optimizer": "sgd"}, StreamConfigError, "stream-needs-adam"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_cannot_be_streamed_are_refused_before_anything_is_built(flags, error, message):
    entered = False
    with pytest.raises(error, match=message), streaming_pretraining(arguments(**flags)):
        entered = True
    assert not entered


def test_megatron_is_as_it_was_afterwards(tmp_path):
    from megatron.training import training

    def interrupted() -> None:
        with streaming_pretraining(arguments(offload_train_disk_dir=str(tmp_path))):
            assert dict(vars(training)) != before
            raise KeyError

    before = dict(vars(training))
    with pytest.raises(KeyError):
        interrupted()
    assert dict(vars(training)) == before
    with streaming_pretraining(arguments(stream_optimizer_state_to_disk=False)):
        assert dict(vars(training)) == before
