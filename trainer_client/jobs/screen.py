"""What is shown of a fleet: a live table in a terminal, plain lines elsewhere, JSON lines with --json.

An output that is gone (a closed terminal, a broken pipe) is no reason to leave a fleet alone: errors of it are dropped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from trainer_client.jobs.seen import Job


@dataclass(frozen=True)
class Row:
    """One Job, as it is shown."""

    name: str
    job: str
    stage: str
    health: str
    age_s: int
    page: str
    message: str

    @classmethod
    def of(cls, job: Job, health: str) -> Row:
        """Return the row of a Job."""
        age_s = round((datetime.now(UTC) - job.created).total_seconds())
        return cls(str(job.seat), job.id, job.stage, health, age_s, job.page, job.message)


class Screen(AbstractContextManager["Screen"], Protocol):
    """Where `up` shows what it sees and does. Enter it."""

    def say(self, text: str) -> None:
        """Show one line about something that has happened."""

    def show(self, rows: Iterable[Row]) -> None:
        """Show the Jobs as they are now."""


class LiveTable(Screen):
    """A table that is redrawn in place, with lines above it."""

    def __init__(self) -> None:
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._live.stop()

    def say(self, text: str) -> None:
        with suppress(OSError):
            self._console.print(f"{datetime.now():%H:%M:%S}  {text}", markup=False, highlight=False)

    def show(self, rows: Iterable[Row]) -> None:
        with suppress(OSError):
            self._live.update(table(rows), refresh=True)


class Lines(Screen):
    """A line, or a JSON object, for each thing that happens: also each time that a Job's stage or health is another."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._shown: dict[str, tuple[str, str]] = {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def say(self, text: str) -> None:
        self._print({"event": "said", "text": text}, text)

    def show(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if self._shown.get(row.job) != (row.stage, row.health):
                self._shown[row.job] = (row.stage, row.health)
                text = f"{row.name} (Job {row.job}) {row.stage.lower()}"
                health = f", {row.health}" * (row.health not in ("", row.stage.lower()))
                self._print({"event": "job", **asdict(row)}, text + health + f": {row.message}" * bool(row.message))

    def _print(self, facts: dict[str, object], text: str) -> None:
        now = datetime.now(UTC)
        line = json.dumps({"time": now.isoformat(timespec="milliseconds"), **facts}) if self._as_json else text
        with suppress(OSError):
            print(line if self._as_json else f"{now:%H:%M:%S}Z  {line}", flush=True)


def screen(*, as_json: bool) -> Screen:
    """Return what suits where the output goes."""
    if not as_json and sys.stdout.isatty():
        return LiveTable()
    return Lines(as_json=as_json)


def table(rows: Iterable[Row]) -> Table:
    """Return a row for each Job."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for header in ("job", "stage", "health", "age", "page"):
        shown.add_column(header, overflow="fold")
    for row in rows:
        health = row.message or (row.health if row.health != row.stage.lower() else "")
        shown.add_row(row.name, row.stage.lower(), health, _age(row.age_s), row.page)
    return shown


def _age(seconds: int) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{rest} s" if not minutes else f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
