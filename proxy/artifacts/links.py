"""Where the entries of a directory really are: a link may lead anywhere, and replicas follow it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path


def is_below(path: Path, roots: Iterable[Path]) -> bool:
    """Return whether `path`, with all links followed, is one of the directories `roots` or below one of them."""
    real = _real(path)
    return any(real.is_relative_to(_real(root)) for root in roots)


def strays(directory: Path, *, roots: Iterable[Path]) -> Iterator[str]:
    """Yield the names of entries that are not below `roots` once links are followed, or are neither file nor folder.

    A pipe or a device would be read for ever. A directory that is not there has none, and a link to nothing is judged
    by where it leads. Only the first level is looked at, as vLLM does.
    """
    known = list(roots)
    try:
        with os.scandir(directory) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return
    for entry in found:
        path = Path(entry.path)
        if not is_below(path, known) or (path.exists() and not path.is_file() and not path.is_dir()):
            yield entry.name


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # unlike Path.resolve it takes links in a circle, which lead nowhere
