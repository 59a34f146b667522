"""How an adapter can be served, and every reason why not as it is. Plain data; `check` finds the reasons."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

MAX_FAULTS_SHOWN = 8
"""A diverged run has NaN in every tensor: the first few tell the story."""


class Way(StrEnum):
    """In which form a set of trained weights can reach vLLM."""

    ADAPTER = "adapter"
    """As it is: vLLM applies it beside the base model."""
    MERGED = "merged"
    """Only added into the base model's own weights: vLLM has no place for it beside them."""
    BROKEN = "broken"
    """In neither form: a file is damaged, a value is not finite, or the files contradict each other."""


@dataclass(frozen=True)
class Fault:
    """One reason why vLLM cannot serve an adapter as it is."""

    file: str
    text: str
    merging_helps: bool
    """Whether the weights are sound, so that they could be served once merged into the base model."""

    def __str__(self) -> str:
        return f"{self.file}: {self.text}"


@dataclass(frozen=True)
class Verdict:
    """How an adapter can be served."""

    way: Way
    reasons: tuple[str, ...] = ()
    """Every reason why not as it is, each beginning with the file's name. Empty for `Way.ADAPTER`."""

    @classmethod
    def on(cls, faults: Iterable[Fault]) -> Verdict:
        """Sum up what was found."""
        found = tuple(faults)
        if not found:
            return cls(Way.ADAPTER)
        way = Way.MERGED if all(fault.merging_helps for fault in found) else Way.BROKEN
        return cls(way, tuple(str(fault) for fault in found))

    def unless_merged(self, reason: str) -> Verdict:
        """Return the verdict with one more reason why not as an adapter, which has nothing to do with its files."""
        way = Way.MERGED if self.way is Way.ADAPTER else self.way
        return Verdict(way, (*self.reasons, reason))

    def __str__(self) -> str:
        """Return the reasons in one line, the first MAX_FAULTS_SHOWN in full."""
        more = len(self.reasons) - MAX_FAULTS_SHOWN
        return "; ".join(self.reasons[:MAX_FAULTS_SHOWN]) + (f"; and {more} more" if more > 0 else "")
