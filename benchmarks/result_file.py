"""The file that `--json` names: whether it can be written is known before a run, not after it."""

from __future__ import annotations

import argparse
from pathlib import Path


def result_file(text: str) -> Path:
    """Return the path, for `type=` of an argument; what is there stays until the run has ended."""
    path = Path(text)
    try:
        path.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {error.strerror}") from None
    return path
