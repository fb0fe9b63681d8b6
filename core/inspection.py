"""What a directory holds, judged from its files alone: a checkpoint, a folder of checkpoints, or live files.

Everything that is wrong is said, as a sentence each; nothing is raised for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from optstream.backends.errors import MissingFileError, OptstreamError
from optstream.backends.reader import DirectoryReader
from optstream.core.bucket_files import inspect_bucket_file
from optstream.core.checkpoint_storage import read_item
from optstream.core.manifest import Manifest
from optstream.core.publish import MANIFEST, SUBDIRECTORY, CheckpointDirectory

_BUCKET = re.compile(r"bucket-\d{5,}\.bin(\.new)?")


@dataclass
class Inspection:
    """kind: checkpoint, scratch (live files) or nothing. path: of what was judged. complete: everything that
    belongs to it is there. iteration: steps done. entries: parameters in a checkpoint, buckets in a scratch.
    formats: of each segment. bytes: of state. verified: every checksum was checked and holds."""

    kind: str
    path: str
    complete: bool = False
    iteration: int | None = None
    topology: dict[str, int] = field(default_factory=dict)
    entries: int = 0
    formats: dict[str, str] = field(default_factory=dict)
    bytes: int = 0
    verified: bool = False
    problems: list[str] = field(default_factory=list)


def inspect_directory(path: str, *, verify: bool = False) -> Inspection:
    """`path`: a checkpoint, the `optimizer` folder in it, a folder of checkpoints (of which the newest
    complete one is judged), or the directory of live files. verify: read everything and check it."""
    path = os.path.abspath(os.path.expanduser(path))
    if os.path.basename(path) == SUBDIRECTORY and os.path.exists(os.path.join(path, MANIFEST)):
        path = os.path.dirname(path)
    if os.path.isdir(os.path.join(path, SUBDIRECTORY)) and not _is_scratch(os.path.join(path, SUBDIRECTORY)):
        return _inspect_checkpoint(path, verify)
    if newest := newest_checkpoint(path):
        return _inspect_checkpoint(newest, verify)
    if unfinished := [each for each in _below(path) if os.path.isdir(os.path.join(each, SUBDIRECTORY))]:
        return _inspect_checkpoint(unfinished[-1], verify)
    if _is_scratch(path):
        return _inspect_scratch(path, verify)
    return Inspection("nothing", path, problems=[f"{path} holds neither a checkpoint nor live files"])


def newest_checkpoint(root: str) -> str | None:
    """The checkpoint directly below `root` with the largest iteration of those that are complete."""
    found = []
    for path in _below(root):
        judged = _inspect_checkpoint(path, verify=False)
        if judged.complete:
            found.append((judged.iteration, path))
    return max(found)[1] if found else None


def _below(root: str) -> list[str]:
    return [os.path.join(root, name) for name in DirectoryReader(root).names()[1]]


def _inspect_checkpoint(path: str, verify: bool) -> Inspection:
    judged = Inspection("checkpoint", path)
    directory = CheckpointDirectory(path)
    try:
        manifest = directory.manifest()
    except OptstreamError as error:
        judged.problems.append(str(error))
        return judged
    if manifest is None:
        judged.problems.append(f"{directory.manifest_path} is missing: the save was never finished")
        return judged
    judged.iteration, judged.topology = manifest.iteration, manifest.topology
    judged.entries, judged.formats, judged.bytes = manifest.entries, manifest.formats, manifest.data_bytes
    judged.problems += _file_problems(manifest, directory.reader())
    judged.complete = not judged.problems
    if verify:
        judged.problems += _content_problems(manifest, directory.reader())
        judged.verified = not judged.problems
    return judged


def _file_problems(manifest: Manifest, reader: DirectoryReader) -> Iterator[str]:
    for name, size in manifest.files.items():
        try:
            with reader.open(name) as file:
                if file.size_bytes < size:
                    yield f"{file.path} has {file.size_bytes} bytes, not {size}: it was cut short"
        except OptstreamError as error:
            yield str(error)


def _content_problems(manifest: Manifest, reader: DirectoryReader) -> Iterator[str]:
    by_file: dict[str, list] = {name: [] for name in manifest.files}
    for index, item in manifest.items.items():
        by_file[item.file].append((item.offset, index.fqn, item))
    for name, items in by_file.items():
        try:
            file = reader.open(name)
        except MissingFileError:
            continue  # Said already.
        with file:
            for _, tensor, item in sorted(items, key=lambda each: each[0]):
                try:
                    read_item(file, tensor, item)
                except OptstreamError as error:
                    yield str(error)


def _is_scratch(path: str) -> bool:
    return next(_bucket_files(path), None) is not None


def _bucket_files(path: str) -> Iterator[tuple[str, str]]:
    for folder, _, names in sorted(os.walk(path)):
        for name in sorted(names):
            if _BUCKET.fullmatch(name):
                yield folder, name


def _inspect_scratch(path: str, verify: bool) -> Inspection:
    judged = Inspection("scratch", path)
    steps: list[int] = []
    formats: set[str] = set()
    for folder, name in _bucket_files(path):
        found = inspect_bucket_file(DirectoryReader(folder), name, verify=verify)
        judged.entries += 1
        judged.bytes += found.state_bytes
        judged.problems += found.problems
        if found.step is not None:
            steps.append(found.step)
        if found.moments:
            formats.add(found.moments)
    judged.iteration = max(steps, default=None)
    judged.topology = {"optimizers": len({folder for folder, _ in _bucket_files(path)})}
    moments = "/".join(sorted(formats))
    judged.formats = {"main": "fp32", "exp_avg": moments, "exp_avg_sq": moments}
    judged.complete = not judged.problems
    judged.verified = verify and judged.complete
    return judged
