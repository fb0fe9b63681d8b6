"""`optstream doctor` on machines that are fit, slow and unfit."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest

from optstream.backends.fake import FakeSystem, forget_fake_disks, open_fake, put_fake_disk
from optstream.harness import cli, doctor, doctor_cli
from optstream.harness.doctor import Finding, Status

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def small_probe(monkeypatch):
    """A fake disk takes its time for every byte."""
    monkeypatch.setattr(doctor, "PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(doctor, "PROBE_CHUNK_BYTES", 1 << 18)


@pytest.fixture
def on_disk():
    """The findings on a directory of a fake disk."""

    def examine(**properties) -> tuple[list[Finding], FakeSystem]:
        disk = put_fake_disk("/nvme", FakeSystem(**properties))
        return list(doctor.examine_directory("/nvme", open_fake)), disk

    yield examine
    forget_fake_disks()


def statuses(findings: list[Finding]) -> list[Status]:
    return [finding.status for finding in findings]


def doctor_says(capsys, *words: str) -> tuple[int, str]:
    code = cli.main(["doctor", *words])
    return code, capsys.readouterr().out


# ---- the directory -----------------------------------------------------------------------------------------


def test_a_good_disk_is_fit_and_left_empty(on_disk):
    findings, disk = on_disk()
    filesystem, space, speed = findings
    assert filesystem.status is space.status is Status.OK
    assert "fakefs, direct transfers at multiples of" in filesystem.found
    assert "reads" in speed.found
    assert disk.listdir(disk.open("/", 0)) == []


def test_memory_is_no_disk(on_disk):
    findings, _ = on_disk(kind="tmpfs")
    assert findings[0].status is Status.FAILURE
    assert "in memory" in findings[0].found
    assert "NVMe" in findings[0].remedy


def test_copy_on_write_and_the_page_cache_are_warned_of(on_disk):
    findings, _ = on_disk(kind="btrfs")
    assert findings[0].status is Status.WARNING
    assert "copy-on-write" in findings[0].found
    findings, _ = on_disk(alignment_bytes=None)
    assert findings[0].status is Status.WARNING
    assert "page cache" in findings[0].found


def test_a_disk_without_space_is_unfit(on_disk):
    findings, _ = on_disk(capacity_bytes=64 << 20)
    assert findings[1].status is Status.FAILURE
    assert "Free some" in findings[1].remedy


def test_space_is_told_in_parameters(on_disk):
    findings, _ = on_disk(capacity_bytes=120 * 10**9)
    assert "for 10.0" in findings[1].found or "for 9.99" in findings[1].found


def took(seconds: float):
    """Does what is measured, and says that it took so long."""

    def measured(action) -> float:
        action()
        return seconds

    return measured


def test_a_slow_disk_is_warned_of(on_disk, monkeypatch):
    monkeypatch.setattr(doctor, "_seconds", took(60.0))
    findings, _ = on_disk()
    assert findings[2].status is Status.WARNING
    assert "optstream bench step" in findings[2].remedy
    monkeypatch.setattr(doctor, "_seconds", took(1e-4))
    assert on_disk()[0][2].status is Status.OK


def test_a_directory_that_cannot_be_is_one_finding(tmp_path):
    (tmp_path / "file").touch()
    (finding,) = doctor.examine_directory(str(tmp_path / "file" / "below"), doctor.open_backend)
    assert finding.status is Status.FAILURE
    assert str(tmp_path / "file") in finding.found
    assert finding.remedy
    assert finding.remedy not in finding.found


def test_a_real_directory_is_as_it_was(tmp_path):
    findings = list(doctor.examine_directory(str(tmp_path / "new" / "below"), doctor.open_backend))
    assert len(findings) == 3
    assert list(tmp_path.iterdir()) == []


# ---- the machine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("always [madvise] never", Status.OK),
        ("always madvise [never]", Status.WARNING),
        (None, Status.WARNING),
    ],
)
def test_huge_pages(tmp_path, text, status):
    setting = tmp_path / "enabled"
    if text:
        setting.write_text(text + "\n")
    assert doctor.examine_huge_pages(setting).status == status


@pytest.mark.parametrize(("limit", "status"), [(1024, "warning"), (4096, "ok"), (-1, "ok")])
def test_open_files(limit, status):
    assert doctor.examine_open_files(limit).status == status


def test_torch_that_is_missing_is_a_failure(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (finding,) = doctor.examine_torch()
    assert finding.status is Status.FAILURE


def test_no_gpu_is_a_warning_and_gpus_are_told_by_name(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert statuses(list(doctor.examine_torch())) == [Status.OK, Status.WARNING]
    properties = type("Properties", (), {"name": "GB300", "total_memory": 276_600_000_000})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    _, *gpus = doctor.examine_torch()
    assert [gpu.subject for gpu in gpus] == ["GPU 0", "GPU 1"]
    assert gpus[0].found.startswith("GB300, 276.6 GB of memory")


def test_the_driver(tmp_path):
    description = tmp_path / "version"
    assert doctor.driver_version(description) == ""
    description.write_text("NVRM version: Open Kernel Module for aarch64  580.95.05  Release\n")
    assert doctor.driver_version(description) == "580.95.05"


def test_megatron_that_is_missing_is_a_warning(monkeypatch):
    def missing(name: str) -> str:
        raise doctor.PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", missing)
    assert doctor.examine_megatron().status is Status.WARNING


# ---- the command -------------------------------------------------------------------------------------------


@pytest.fixture
def findings(monkeypatch):
    """What the examination finds."""

    def set_to(*found: Finding) -> None:
        monkeypatch.setattr(doctor_cli, "examine", lambda directories: iter(found))

    return set_to


GOOD = Finding("machine", Status.OK, "is good")
SLOW = Finding("disk", Status.WARNING, "is slow", "Buy another")
BAD = Finding("torch", Status.FAILURE, "is missing", "Install [it]")


def test_warnings_are_fit(findings, capsys):
    findings(GOOD, SLOW)
    code, out = doctor_says(capsys)
    assert code == 0
    lines = [line.strip() for line in out.splitlines()]
    assert lines == [
        "ok      machine: is good",
        "warning disk: is slow",
        "-> Buy another",
        "fit for streaming",
    ]


def test_a_failure_is_unfit_and_says_what_to_do(findings, capsys):
    findings(GOOD, BAD)
    code, out = doctor_says(capsys)
    assert code == 1
    assert "failure torch: is missing" in out
    assert "-> Install [it]" in out
    assert "not fit for streaming" in out


def test_json_alone_is_on_standard_output(findings, capsys, tmp_path):
    findings(GOOD, BAD)
    code, out = doctor_says(capsys, "--json", "-")
    found = json.loads(out)
    assert (code, found["fit"]) == (1, False)
    assert found["findings"][1] == {
        "subject": "torch",
        "status": "failure",
        "found": "is missing",
        "remedy": "Install [it]",
    }
    path = tmp_path / "doctor.json"
    doctor_says(capsys, "--json", str(path))
    assert json.loads(path.read_text()) == found


@pytest.mark.parametrize("words", [["--dir", ""], ["--dir", ":"], ["--json", "/no/such/folder/file"]])
def test_bad_usage_is_2(findings, words, capsys):
    findings(GOOD)
    assert cli.main(["doctor", *words]) == 2
    assert capsys.readouterr().err.count("optstream: error:") == 1


def test_an_unknown_flag_is_2():
    with pytest.raises(SystemExit) as stopped:
        cli.main(["doctor", "--directory", "/tmp"])
    assert stopped.value.code == 2


def test_each_directory_is_looked_at_by_its_absolute_path(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(doctor_cli, "examine", lambda directories: asked.append(directories) or iter(()))
    assert cli.main(["doctor", "--dir", "here:/there"]) == 0
    assert asked == [(str(Path("here").absolute()), "/there")]


def test_the_whole_of_it_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor_cli, "examine", partial(doctor.examine, opener=open_fake))
    cli.main(["doctor", "--dir", "/nvme", "--json", str(tmp_path / "found.json")])
    forget_fake_disks()
    subjects = [each["subject"] for each in json.loads((tmp_path / "found.json").read_text())["findings"]]
    expected = ["machine", "torch", "megatron-core", *["directory /nvme"] * 3, "huge pages", "open files"]
    assert [each for each in subjects if not each.startswith("GPU")] == expected
