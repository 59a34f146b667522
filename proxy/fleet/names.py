"""Names of policies: what clients call one, and what replicas call it (P1). Pure.

vLLM keeps the KV of an unloaded adapter under its name and path. A client whose names repeat (TRL starts every run at
`trl-policy-v1`) would meet that KV with other weights, so such a name goes upstream as `NAME~GENERATION`, and every
announcement of it gets a new generation. A managed name holds run, version and digest: it cannot repeat, and goes as it
is.
"""

from __future__ import annotations

import re

SEPARATOR = "~"
"""Stands between a client's name and its generation; a client's own name may not hold it."""

_GENERATION = re.compile(r"(?P<name>.+)~(?P<generation>[0-9a-f]{8})")


def upstream_name(name: str, generation: int) -> str:
    """Return what replicas call a generation of `name`."""
    return f"{name}{SEPARATOR}{generation:08x}"


def decode(upstream: str) -> tuple[str, int | None]:
    """Split what a replica lists into the client's name and the generation (None: it carries none)."""
    found = _GENERATION.fullmatch(upstream)
    return (found["name"], int(found["generation"], 16)) if found else (upstream, None)


def next_generation(now_s: float, highest: int) -> int:
    """Return a generation above `highest`: seconds since 1970, so that a restarted proxy, too, goes on upwards."""
    return max(int(now_s), highest + 1)
