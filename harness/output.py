"""Where commands put what they found: `--json PATH|-`, `--report FILE.html`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from optstream.harness.errors import ConfigurationError


def write_json(destination: str, data: object) -> None:
    """Write to a file, or to standard output where the destination is `-`.

    Raises ConfigurationError where the file cannot be written.
    """
    text = json.dumps(data, indent=2) + "\n"
    if destination == "-":
        sys.stdout.write(text)
    else:
        write_text(destination, text)


def write_text(path: str, text: str) -> None:
    """Raises ConfigurationError where the file cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"cannot write {path}",
            why=error.strerror or str(error),
            remedy="Name a file in a folder that exists",
        ) from error
