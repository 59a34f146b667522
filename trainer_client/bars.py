"""A bar on the terminal that shows how far a publication is. Where there is no terminal, nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from trainer_client.progress import Progress, Tell, tell_nobody


@contextmanager
def bar() -> Iterator[Tell]:
    """Show what is told, on stderr, until the end of the `with` block; then it is gone."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield tell_nobody
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task("reading the adapter", total=None)

        def tell(progress: Progress) -> None:
            bars.update(task, description=progress.doing, completed=progress.done, total=progress.total)

        yield tell
