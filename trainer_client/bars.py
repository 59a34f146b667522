"""A bar on the terminal that shows how far a publication is. Where there is none, only what it waits for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from trainer_client.progress import Progress, Tell


@contextmanager
def bar() -> Iterator[Tell]:
    """Show what is told, on stderr, until the end of the `with` block; then it is gone, but for what was waited for."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _tell_of_waits
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task("reading the adapter", total=None)

        def tell(progress: Progress) -> None:
            _tell_of_waits(progress)
            bars.update(task, description=progress.doing, completed=progress.done, total=progress.total)

        yield tell


def _tell_of_waits(progress: Progress) -> None:
    if progress.waits_for:
        print(f"lora-sync: {progress.waits_for}", file=sys.stderr)
