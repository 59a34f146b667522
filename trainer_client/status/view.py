"""How a reading is shown: fits into eighty columns, tells states by words and not by colours alone."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from urllib.parse import urlsplit

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from proxy.contract import CacheHits, PolicyStatus, ReplicaStatus, Router, version_of
from trainer_client.status.reading import Rates, Reading

NOTHING = "-"

TONES = {
    **{"ready": "green", "live": "green"},
    **{"joining": "yellow", "draining": "yellow", "loading": "yellow", "blocked": "red"},
    **{"down": "red", "quarantined": "red", "retiring": "dim"},
}

_BARS = "▁▂▃▄▅▆▇█"


def frame(reading: Reading, rates: Rates | None = None) -> Group:
    """Return everything about one moment; with `rates` also how fast it goes."""
    return Group(
        *_lines(reading, rates),
        Text(),
        replicas_table(reading),
        *_reasons(reading.replicas),
        Text(),
        policies_table(reading.policies),
        *_waits(reading.policies),
    )


def _lines(reading: Reading, rates: Rates | None) -> Iterator[Text]:
    current, router = reading.current, reading.stats.router
    yield _pairs(
        ("replicas ready", f"{reading.ready} of {len(reading.replicas)}"),
        ("slots", f"{len(reading.policies)} of {NOTHING if reading.slots is None else reading.slots}"),
        ("in flight", f"{reading.inflight:,}"),
    )
    if current is not None:
        yield _pairs(("policy", _name_of(current)), ("its sync took", f"{sum(current.phases.values()):.2f} s"))
    if rates is not None:
        speed = f"{rates.rollouts[-1]:,.1f}" if rates.rollouts else NOTHING
        yield _pairs(("rollouts/s", speed), ("tokens/s", f"{rates.tokens:,.0f}"), ("", bars(rates.rollouts)))
    yield _pairs(("rollouts", f"{router.routed:,}"), *routes(router))


def _pairs(*pairs: tuple[str, str]) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    for position, (name, value) in enumerate(pairs):
        line.append("   " if position else "").append(f"{name} " if name else "", "dim").append(value, "bold")
    return line


def _name_of(policy: PolicyStatus) -> str:
    return policy.name if policy.step is None else f"{policy.name} (step {policy.step})"


def routes(router: Router) -> list[tuple[str, str]]:
    """Return why rollouts went where they went, as shares. Pure."""
    counts = {name: getattr(router, name) for name in ("affinity", "spilled", "unmatched", "retried")}
    return [(name, share(count, router.routed)) for name, count in counts.items()]


def replicas_table(reading: Reading) -> Table:
    """Return a row for each replica."""
    table = _table("#", "replica", "state", "in flight", "rollouts", "hits", "predicted", "policies")
    versions = {policy.upstream: policy.version for policy in reading.policies}
    for column in (3, 4, 5, 6):
        table.columns[column].justify = "right"
    for replica in reading.replicas:
        cache = replica.prefix_cache
        held = [version_label(upstream, versions.get(upstream)) for upstream in replica.policies]
        table.add_row(
            str(replica.index),
            escape(urlsplit(replica.url).netloc),
            _state(replica),
            f"{replica.inflight:,}",
            f"{replica.routed:,}",
            hits(cache.reported),
            hits(cache.predicted),
            " ".join([*base_label(replica.weights), *held]) or NOTHING,
        )
    return table


def version_label(upstream: str, version: int | None) -> str:
    """Return a few letters for what a replica calls `upstream`; of one that is leaving only its name is known. Pure."""
    name = upstream.partition("~")[0]
    known = version_of(name) if version is None else version
    return name if known is None else f"v{known}"


def base_label(weights: str | None) -> list[str]:
    """Return a few letters for base weights that are not those of the servers' start, from their label. Pure."""
    if weights is None or weights == "default":
        return []
    number, _, name = weights.partition("~")
    return [f"base:{version_label(name or number, None)}"]


def _reasons(replicas: Iterable[ReplicaStatus]) -> Iterator[Text]:
    """Why replicas get no rollouts, in lines of their own: no column is wide enough."""
    for replica in replicas:
        if replica.state != "ready" and replica.reason:
            yield Text(f"{replica.index} is {replica.state}: {replica.reason}", "yellow")


def _waits(policies: Iterable[PolicyStatus]) -> Iterator[Text]:
    """What policies that are not served yet wait for, or why they take no rollouts."""
    for policy in policies:
        if why := policy.blocked or (policy.reason if policy.state == "loading" else ""):
            yield Text(f"{policy.name} is {'blocked' if policy.blocked else policy.state}: {why}", "yellow")


def policies_table(policies: Iterable[PolicyStatus]) -> RenderableType:
    """Return a row for each policy, newest first."""
    newest_first = list(policies)[::-1]
    if not newest_first:
        return Text("No policy yet: rollouts are served by the base model.", "dim")
    table = _table("policy", "state", "version", "step", "for", "in flight", "on replicas")
    for column in (2, 3, 4, 5, 6):
        table.columns[column].justify = "right"
    now = time.time()
    for policy in newest_first:
        state = "blocked" if policy.blocked else policy.state
        numbers = (policy.version, policy.step)
        table.add_row(
            escape(policy.name),
            Text(state, TONES.get(state, "")),
            *(NOTHING if number is None else str(number) for number in numbers),
            age(now - policy.since),
            f"{policy.leases:,}",
            str(len(policy.held_by)),
        )
    return table


def _state(replica: ReplicaStatus) -> Text:
    return Text(f"{replica.state}{', paused' * replica.paused}", TONES.get(replica.state, ""))


def hits(cache: CacheHits) -> str:
    """Return the share of prompt tokens that were in the cache. Pure."""
    return share(cache.cached_tokens, cache.prompt_tokens)


def share(part: int, whole: int) -> str:
    """Return a share as a percentage. Pure."""
    return f"{part / whole:.1%}" if whole else NOTHING


def age(seconds: float) -> str:
    """Return how long something has lasted, in whole units. Pure."""
    whole = max(int(seconds), 0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if whole >= length:
            return f"{whole // length} {unit}"
    return f"{whole} s"


def bars(values: Iterable[float]) -> str:
    """Return values as a line of small bars, the highest of them full. Pure."""
    known = list(values)
    top = max(known, default=0.0)
    return "".join(_BARS[round(value / top * (len(_BARS) - 1))] for value in known[-30:]) if top > 0 else ""


def _table(*headers: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for header in headers:
        table.add_column(header, overflow="ellipsis", no_wrap=True)
    return table
