"""Training text and the batches drawn from it."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest
import torch

from optstream.harness.data import ByteDataset, load_text
from optstream.harness.errors import DataError

pytestmark = pytest.mark.unit


def as_bytes(text: torch.Tensor) -> bytes:
    return bytes(text.tolist())


def test_a_file_is_its_bytes(tmp_path):
    file = tmp_path / "text"
    file.write_bytes("naïve 🐍\r\n".encode())
    text = load_text(file)
    assert text.dtype == torch.uint8
    assert as_bytes(text) == "naïve 🐍\r\n".encode()


def test_no_more_is_read_than_asked_for(tmp_path):
    (tmp_path / "a").write_text("abcd")
    (tmp_path / "b").write_text("efgh")
    assert as_bytes(load_text(tmp_path / "a", bytes_max=3)) == b"abc"
    assert as_bytes(load_text(tmp_path, bytes_max=6)) == b"abcdef"


def test_a_directory_is_its_text_files_by_path(tmp_path):
    (tmp_path / "z").write_text("last")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "inner").write_text("middle ")
    (tmp_path / "a").write_text("first ")
    (tmp_path / "b.bin").write_bytes(b"\0\1\2")
    (tmp_path / "empty").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    assert as_bytes(load_text(tmp_path)) == b"first middle last"


def test_the_default_is_the_standard_librarys_source():
    text = as_bytes(load_text(bytes_max=1 << 20))
    first = min(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda path: path.name)
    assert text.startswith(first.read_bytes())
    assert len(text) == 1 << 20
    assert text == as_bytes(load_text(bytes_max=1 << 20))


@pytest.mark.parametrize(
    ("content", "why"), [(b"", "the file is empty"), (b"text\0more", "the file is binary")]
)
def test_a_file_without_text_is_refused(tmp_path, content, why):
    file = tmp_path / "data"
    file.write_bytes(content)
    with pytest.raises(DataError, match=why) as caught:
        load_text(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directory_without_text_is_refused(tmp_path):
    (tmp_path / "b.bin").write_bytes(b"\0")
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match="every file is empty or binary"):
        load_text(tmp_path)


def test_a_missing_path_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*nowhere.*No such file"):
        load_text(tmp_path / "nowhere")


def test_an_unreadable_file_in_a_directory_is_not_passed_over(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("text")
    (tmp_path / "secret").write_text("text")
    original = Path.open

    def refusing(path, *args, **kwargs):
        if path.name == "secret":
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refusing)
    with pytest.raises(DataError, match=r"cannot read .*secret: Permission denied"):
        load_text(tmp_path)


def dataset(text: bytes = bytes(range(256)), seq: int = 8, seed: int = 1) -> ByteDataset:
    return ByteDataset(torch.frombuffer(bytearray(text), dtype=torch.uint8), seq=seq, seed=seed)


def test_labels_are_the_tokens_that_follow():
    tokens, labels = dataset().batch(step=3, microbatch=0, dp_rank=0, batch=5)
    assert tokens.shape == labels.shape == (5, 8)
    assert tokens.dtype == labels.dtype == torch.int64
    # The text counts upwards, so a window does, too, and its labels are one ahead.
    assert torch.equal(tokens - tokens[:, :1], torch.arange(8).expand(5, 8))
    assert torch.equal(labels, tokens + 1)


def test_a_batch_depends_on_its_coordinates_and_nothing_else():
    at = {"step": 2, "microbatch": 1, "dp_rank": 1, "batch": 4}
    batch = dataset().batch(**at)[0]
    later = dataset()
    later.batch(step=0, microbatch=0, dp_rank=0, batch=4)
    assert torch.equal(later.batch(**at)[0], batch)
    for coordinate in ("step", "microbatch", "dp_rank"):
        assert not torch.equal(dataset().batch(**{**at, coordinate: 7})[0], batch), coordinate
    assert not torch.equal(dataset(seed=2).batch(**at)[0], batch)


def test_every_window_of_the_text_can_be_drawn():
    tokens, labels = dataset(text=b"abcde", seq=3).batch(step=0, microbatch=0, dp_rank=0, batch=64)
    assert {bytes(row) for row in tokens.tolist()} == {b"abc", b"bcd"}
    assert {bytes(row) for row in labels.tolist()} == {b"bcd", b"cde"}


def test_text_shorter_than_a_sequence_is_refused():
    dataset(text=b"123456789", seq=8)
    with pytest.raises(DataError, match="has 8 bytes: a sequence of 8 and its labels need 9"):
        dataset(text=b"12345678", seq=8)
