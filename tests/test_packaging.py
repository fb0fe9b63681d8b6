"""What is shipped: a wheel that holds optstream and nothing else, importable without the repository."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # A copy: setuptools builds beside the sources.
    source = folder / "source"
    source.mkdir()
    for name in ("core", "backends", "harness", "pyproject.toml", "README.md", "LICENSE"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    script = f"import setuptools.build_meta as b; print(b.build_wheel({str(folder)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]


def test_the_wheel_holds_nothing_but_optstream(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"optstream"}
    for package in ("core", "backends", "harness"):
        sources = {f"optstream/{package}/{path.name}" for path in (ROOT / package).glob("*.py")}
        assert sources <= set(names)
    assert "optstream/harness/templates/report.html" in names


def test_the_wheel_declares_its_command_and_its_plugin(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (entry_points,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        text = archive.read(entry_points).decode()
    assert "optstream = optstream.harness.cli:main" in text
    assert "[pytest11]\noptstream = optstream.harness.pytest_plugin" in text


def test_the_wheel_works_without_the_repository(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    script = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if '__editable__' not in repr(f)]\n"
        f"sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "import optstream.core.config as c; print(c.__file__)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))
