"""Is this machine fit for streaming? Each check looks at one thing and says what it found and what to do.

A failure is what makes streaming wrong or impossible here; a warning is what makes it slow, or what some
users can do without.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from optstream.backends import open_backend
from optstream.backends.errors import OptstreamError
from optstream.backends.interface import Backend

GIB = 1 << 30
STATE_BYTES_PER_PARAMETER = 12
# Descriptors: two a bucket of a large shard, and what the trainer itself has open.
OPEN_FILES_MIN = 4096
PROBE_BYTES = 256 << 20
PROBE_CHUNK_BYTES = 16 << 20
# A fraction of one current NVMe disk: what is slower is a network, a spinning disk, or busy.
BYTES_PER_S_MIN = 500e6
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MEGATRON = "0.16 to 0.19"


class Status(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class Finding:
    """What one check found. `remedy` says what to do about it; empty where nothing is to be done."""

    subject: str
    status: Status
    found: str
    remedy: str = ""


def examine(
    directories: tuple[str, ...], *, opener: Callable[..., Backend] = open_backend
) -> Iterator[Finding]:
    """Everything, one finding after the other. `directories` are absolute; nothing stays in them.

    opener: as `open_backend`; tests pass another.
    """
    yield examine_machine()
    yield from examine_torch()
    yield examine_megatron()
    for directory in directories:
        yield from examine_directory(directory, opener)
    yield examine_huge_pages(HUGE_PAGES)
    yield examine_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def examine_machine() -> Finding:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = (
        f"{platform.system()} {platform.release()} on {platform.machine()}, {os.cpu_count()} CPUs, "
        f"{memory_bytes / GIB:.0f} GiB of memory, Python {platform.python_version()}"
    )
    if platform.system() != "Linux":
        return Finding("machine", Status.WARNING, found, "Only Linux is fast (O_DIRECT, huge pages)")
    return Finding("machine", Status.OK, found)


def examine_torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("torch", Status.FAILURE, f"cannot be imported: {error}", "Install torch 2.7 or newer")
        return
    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    yield Finding("torch", Status.OK, f"{torch.__version__}, {cuda}")
    gpus = torch.cuda.device_count()
    if not gpus:
        yield Finding(
            "GPUs",
            Status.WARNING,
            "none visible to torch",
            "Tests and `optstream train` run on simulated devices; for GPUs install their driver and a CUDA "
            "build of torch, and check CUDA_VISIBLE_DEVICES",
        )
    for index in range(gpus):
        properties = torch.cuda.get_device_properties(index)
        found = (
            f"{properties.name}, {properties.total_memory / 1e9:.1f} GB of memory, driver {driver_version()}"
        )
        yield Finding(f"GPU {index}", Status.OK, found)


def driver_version(description: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Of the GPUs' kernel module; "" where there is none."""
    if not description.exists():
        return ""
    match = re.search(r"\b\d+\.\d+(\.\d+)?\b", description.read_text())
    return match[0] if match else ""


def examine_megatron() -> Finding:
    """Looks at the code of the installed release, as the adapter does before it streams."""
    subject = "megatron-core"
    try:
        release = version("megatron-core")
    except PackageNotFoundError:
        return Finding(
            subject,
            Status.WARNING,
            "not installed",
            "StreamingAdamW needs none; for Megatron: pip install 'optstream[megatron]'",
        )
    try:
        from optstream.harness.simulated_cuda import quiet_megatron_import

        with quiet_megatron_import():
            from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
            from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
    except Exception as error:
        # Whatever an installation raises that does not fit together.
        what = f"{release} cannot be imported: {type(error).__name__}: {error}".splitlines()[0]
        return Finding(subject, Status.FAILURE, what, "Install it anew, with psutil (and, from 0.17, triton)")
    from optstream.core.megatron_fingerprints import unknown_methods

    unknown = unknown_methods(
        {"DistributedOptimizer": DistributedOptimizer, "MixedPrecisionOptimizer": MixedPrecisionOptimizer}
    )
    if unknown:
        return Finding(
            subject,
            Status.FAILURE,
            f"{release}, whose {', '.join(unknown)} differs from every release that was read",
            f"Use {MEGATRON} as published, or a newer optstream",
        )
    return Finding(subject, Status.OK, f"{release}, every method that optstream stands in for is known")


def examine_directory(directory: str, opener: Callable[..., Backend]) -> Iterator[Finding]:
    """What it sits on, its free space and its speed. Whatever is written there goes again."""
    subject = f"directory {directory}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what backends warn of are findings here
            backend = opener((directory,), subdirectory=f"optstream/doctor/pid{os.getpid()}")
    except OptstreamError as error:
        yield _unusable(subject, error)
        return
    try:
        yield _filesystem(subject, backend)
        yield _space(subject, backend.free_bytes())
        yield _speed(subject, backend)
    except OptstreamError as error:
        yield _unusable(subject, error)
    finally:
        backend.close(remove_files=True)


def _unusable(subject: str, error: OptstreamError) -> Finding:
    found = f"{error.what}: {error.why}" if error.why else error.what
    return Finding(subject, Status.FAILURE, found, error.remedy or "Choose another directory")


def _filesystem(subject: str, backend: Backend) -> Finding:
    info = backend.filesystem
    kind = info.kind or "unknown filesystem"
    if info.in_memory:
        return Finding(
            subject,
            Status.FAILURE,
            f"{kind}: files there are in memory, and streaming to them saves none",
            "Choose a directory on node-local NVMe",
        )
    if not info.bypasses_page_cache:
        return Finding(
            subject,
            Status.WARNING,
            f"{kind} without direct transfers: all of the state passes through the page cache",
            "Choose ext4 or xfs on node-local NVMe",
        )
    found = f"{kind}, direct transfers at multiples of {info.alignment_bytes} bytes"
    if not info.reserves_space:
        return Finding(
            subject,
            Status.WARNING,
            f"{found}; copy-on-write, so that a disk that others fill can fail a step",
            "Choose ext4 or xfs, or keep the disk for this alone",
        )
    return Finding(subject, Status.OK, found)


def _space(subject: str, free_bytes: int) -> Finding:
    parameters = free_bytes / STATE_BYTES_PER_PARAMETER
    found = f"{free_bytes / 1e9:.1f} GB free, for {parameters / 1e9:.2f} billion parameters of this node"
    if free_bytes < GIB:
        return Finding(subject, Status.FAILURE, found, "Free some, or choose another disk")
    return Finding(subject, Status.OK, found)


def _speed(subject: str, backend: Backend) -> Finding:
    """One thread's speed, a floor: the engine keeps several transfers under way."""
    from optstream.core.memory import allocate_host, bytes_of

    size_bytes = min(PROBE_BYTES, backend.free_bytes() // 4 // PROBE_CHUNK_BYTES * PROBE_CHUNK_BYTES)
    buffer = bytes_of(allocate_host(PROBE_CHUNK_BYTES))
    buffer[:] = os.urandom(PROBE_CHUNK_BYTES)  # zeros may never reach a disk that compresses
    with backend.create("speed.bin", size_bytes) as file:
        offsets = range(0, size_bytes, PROBE_CHUNK_BYTES)
        written_s = _seconds(lambda: [file.write_from(at, buffer) for at in offsets] and file.sync())
        read_s = _seconds(lambda: [file.read_into(at, buffer) for at in offsets])
    speeds = [size_bytes / seconds for seconds in (read_s, written_s)]
    found = "reads {:.2f} GB/s, writes {:.2f} GB/s, by one thread".format(*(each / 1e9 for each in speeds))
    if min(speeds) < BYTES_PER_S_MIN:
        return Finding(
            subject,
            Status.WARNING,
            found,
            "Slow for a local NVMe disk: is it a network disk, or busy? Measure a step with `optstream bench "
            "step`",
        )
    return Finding(subject, Status.OK, found)


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def examine_huge_pages(setting: Path) -> Finding:
    try:
        text = setting.read_text().strip()
    except OSError:
        return Finding(
            "huge pages", Status.WARNING, "the kernel has none", "Host buffers move slower in small pages"
        )
    if "[never]" in text:
        return Finding(
            "huge pages",
            Status.WARNING,
            f"{setting} is {text}: the disk gets requests of 4 KiB, several times slower",
            f"echo madvise > {setting}, as root",
        )
    return Finding("huge pages", Status.OK, text)


def examine_open_files(limit: int) -> Finding:
    unlimited = limit == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else f"{limit} a process"
    if not unlimited and limit < OPEN_FILES_MIN:
        return Finding("open files", Status.WARNING, found, f"ulimit -n {OPEN_FILES_MIN}, or more")
    return Finding("open files", Status.OK, found)
