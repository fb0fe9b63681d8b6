"""Host memory: aligned, in huge pages where there are any, and never all main params at once."""

from __future__ import annotations

import mmap
import subprocess
import sys

import pytest
import torch

from optstream.core.memory import HUGE_PAGE_BYTES, allocate_host, bytes_of

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("size_bytes", [0, 1, 4096, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 4097])
def test_host_memory_is_exact_aligned_and_writable(size_bytes):
    memory = allocate_host(size_bytes)
    assert memory.dtype is torch.uint8
    assert memory.shape == (size_bytes,)
    if size_bytes:
        assert memory.data_ptr() % HUGE_PAGE_BYTES == 0
    assert not memory.any(), "fresh memory is zeros"
    view = bytes_of(memory)
    assert len(view) == size_bytes
    view[:] = b"\xab" * size_bytes
    assert (memory == 0xAB).all()


def test_memory_lives_as_long_as_any_view():
    view = allocate_host(10_000)[5000:6000].view(torch.float32)
    view.fill_(1.5)
    others = [allocate_host(10_000).fill_(7) for _ in range(20)]
    assert (view == 1.5).all()
    assert len(others) == 20


def test_a_kernel_without_huge_pages_will_do(monkeypatch):
    class Refusing(mmap.mmap):
        def madvise(self, *arguments) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    assert allocate_host(1000).fill_(3).sum() == 3000


CAPPED = """
import resource, sys, torch
from optstream.backends import open_backend
from optstream.core.config import StreamConfig
from optstream.core.optimizer import StreamingAdamW

NUMEL, BUCKET = 60_000_000, 1 << 20
param = torch.nn.Parameter(torch.zeros(NUMEL, dtype=torch.bfloat16))
warm = torch.nn.Parameter(torch.ones(2 * BUCKET, dtype=torch.bfloat16))
StreamingAdamW([warm], StreamConfig(True, (sys.argv[1],), bucket_numel=BUCKET, depth=1)).close()

if sys.platform == "linux":
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + int(sys.argv[2]), resource.RLIM_INFINITY))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if sys.argv[3] == "resident":
    main = param.detach().float()
else:
    optimizer = StreamingAdamW(
        [param], StreamConfig(True, (sys.argv[1],), bucket_numel=BUCKET, depth=1, chunk_bytes=1 << 20)
    )
    assert len(optimizer.streamer.buckets) == 58
    optimizer.close()
unit = 1 if sys.platform == "darwin" else 1024
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit)
"""


def test_construction_stays_under_a_cap_that_all_main_params_would_break(tmp_path):
    """60 million bf16 params have 240 MB of main params; 12 MB buckets must do with 200 MB more, of which
    threads' stacks (8 MB of address space each) are the most."""
    cap = str(200 << 20)

    def run(what: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-c", CAPPED, str(tmp_path), cap, what],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    resident, streamed = run("resident"), run("streamed")
    if sys.platform == "linux":
        assert resident.returncode != 0
        assert "memory" in resident.stderr, "the cap does not bite, so it proves nothing"
    else:  # Where the address space cannot be capped, what was used is measured.
        assert int(resident.stdout) > 200_000_000
    assert streamed.returncode == 0, streamed.stderr
    assert int(streamed.stdout) < 100_000_000
