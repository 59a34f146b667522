"""What /metrics says, as data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.support.tiny_model import REPO

_SUFFIX = re.compile(r"_(bucket|count|sum)$")


@dataclass(frozen=True)
class Documented:
    """One row of docs/metrics.md."""

    name: str
    type: str
    labels: frozenset[str]


class Scrape:
    """One answer of /metrics."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.types: dict[str, str] = {}
        self.samples: list[Sample] = []
        for family in text_string_to_metric_families(text):
            self.types[f"{family.name}_total" if family.type == "counter" else family.name] = family.type
            self.samples += family.samples

    def labels(self) -> dict[str, set[frozenset[str]]]:
        """Return the sets of label names that each metric has samples with."""
        found: dict[str, set[frozenset[str]]] = {}
        for sample in self.samples:
            name = _SUFFIX.sub("", sample.name) if _SUFFIX.sub("", sample.name) in self.types else sample.name
            found.setdefault(name, set()).add(frozenset(sample.labels) - {"le"})
        return found

    def sum(self, name: str, **labels: str) -> float:
        """Return the sum over the samples of `name` that have these labels; 0 without any."""
        return sum(s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items())


def documented(page: Path = REPO / "docs" / "metrics.md") -> Iterator[Documented]:
    """Yield what the page lists."""
    for line in page.read_text().splitlines():
        if line.startswith("| `lora_sync_"):
            name, kind, labels = (cell.strip() for cell in line.split("|")[1:4])
            yield Documented(name.strip("`"), kind, frozenset(filter(None, labels.replace(" ", "").split(","))))
