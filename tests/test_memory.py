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
from optstream.core.config import StreamConfig
from optstream.core.optimizer import StreamingAdamW

NUMEL, BUCKET = 60_000_000, 1 << 20

def construct(numel):
    param = torch.nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16))
    config = StreamConfig(True, (sys.argv[1],), bucket_numel=BUCKET, depth=1, verify=False)
    optimizer = StreamingAdamW([param], config)
    buckets = len(optimizer.streamer.buckets)
    optimizer.close()
    return buckets

def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

construct(2 * BUCKET)  # What is loaded or started once is no matter of the number of params.
if sys.platform == "linux":
    with open("/proc/self/statm") as file:
        mapped_bytes = int(file.read().split()[0]) * resource.getpagesize()
    cap_bytes = mapped_bytes + 2 * NUMEL + int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (cap_bytes, resource.RLIM_INFINITY))
before_bytes = peak_bytes()
buckets = construct(NUMEL)
streamed_bytes = peak_bytes() - before_bytes - 2 * NUMEL
try:
    mains = torch.ones(NUMEL, dtype=torch.bfloat16).float()
    resident = peak_bytes() - before_bytes - 2 * NUMEL
except RuntimeError as error:
    resident = "memory" in str(error) and "refused"
print(buckets, streamed_bytes, resident)
"""


def test_construction_stays_under_a_cap_that_all_main_params_would_break(tmp_path):
    """60 million bf16 params have 240 MB of main params; 12 MB buckets must do with 200 MB, of which threads'
    stacks (8 MB of address space each) are the most. Where the address space cannot be capped, what was used
    is measured alone."""
    cap_bytes = 200_000_000
    ended = subprocess.run(
        [sys.executable, "-c", CAPPED, str(tmp_path), str(cap_bytes)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    buckets, streamed_bytes, resident = ended.stdout.split()
    assert int(buckets) == -(-60_000_000 // (1 << 20))
    assert int(streamed_bytes) < 60_000_000
    # What the cap must refuse, or it proves nothing.
    assert resident == "refused" if sys.platform == "linux" else int(resident) > cap_bytes
