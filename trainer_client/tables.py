"""What `lora-sync` prints for people."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from urllib.parse import urlsplit

from rich.console import Console, RenderableType
from rich.table import Table

from proxy.contract import PolicyStatus
from trainer_client.policies import Policy
from trainer_client.retention import Garbage

KILOBYTE = 1000

PIPED_WIDTH = 200
"""Columns of what goes into a pipe or a file, so that names stay whole."""


def show(what: RenderableType) -> None:
    """Print it on stdout, if there is one, as wide as the terminal."""
    if sys.stdout is not None:
        Console(width=None if sys.stdout.isatty() else PIPED_WIDTH).print(what)


def policy_sentence(policy: Policy) -> str:
    """Return one line about a policy that has become live."""
    phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in vars(policy.timings).items())
    replicas = sum(replica.status in ("loaded", "reloaded") for replica in policy.report.replicas)
    where = f"live on {replicas} replica{'s' * (replicas != 1)}" if replicas else "live already"
    where += f", merged, as {policy.served_as}" * (policy.served_as is not None)
    return f"{policy.name} is {where} (step {policy.step}; seconds: {phases})"


def policies_table(policies: Iterable[PolicyStatus]) -> Table:
    """Return a row for each policy that the proxy knows."""
    table = _table("name", "state", "version", "step", "leases", "held by", "why")
    for policy in policies:
        held_by = ", ".join(urlsplit(url).netloc for url in policy.held_by)
        numbers = (policy.version, policy.step, policy.leases)
        table.add_row(policy.name, policy.state, *map(_or_dash, numbers), held_by or "-", policy.reason)
    return table


def garbage_table(found: Iterable[Garbage]) -> Table:
    """Return a row for each folder that nobody needs."""
    table = _table("folder", "size", "why", "removed")
    for garbage in found:
        table.add_row(garbage.folder, size_text(garbage.size), garbage.why, "yes" if garbage.removed else "no")
    return table


def size_text(count: float) -> str:
    """Return a number of bytes for people, in powers of 1,000."""
    for unit in ("B", "kB", "MB"):
        if count < KILOBYTE:
            return f"{count:.0f} {unit}"
        count /= KILOBYTE
    return f"{count:.1f} GB"


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _table(*headers: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in headers:
        table.add_column(header, overflow="fold")
    return table
