"""What goes wrong on purpose. POST /sim/faults sets these, GET shows them, DELETE ends them all.

Times and attempts of late and torn directories are counted per adapter name, from the first load that asked for it, so
that one fault can stay set while many policies pass.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

TornKind = Literal["no_weights", "truncated", "empty_weights", "bad_config", "empty_config"]

_TORN_TEXTS: dict[TornKind, str] = {
    "no_weights": "{path} doesn't contain tensors",
    "truncated": "Error while deserializing header: incomplete metadata, file not fully covered",
    "empty_weights": "Error while deserializing header: header too small",
    "bad_config": "Expecting ':' delimiter: line 1 column 22 (char 21)",
    "empty_config": "Expecting value: line 1 column 1 (char 0)",
}


class _Fault(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Late(_Fault):
    """The directory is not there yet: loads answer 404 "No adapter found"."""

    seconds: float = 0
    """For so long after the first load of a name."""
    attempts: int = 0
    """For so many loads of a name."""
    name: str | None = None
    """Only for this adapter, or for what a proxy calls its generations (NAME~...)."""


class Torn(Late):
    """The directory is only half there: loads answer the 500 of `kind`."""

    kind: TornKind = "no_weights"


class LoadError(_Fault):
    """Loads answer this, whatever the directory holds."""

    status: int = 500
    body: Any = None
    """A text is sent as it is, anything else as JSON; none becomes vLLM's error shape."""
    attempts: int = 0
    """For so many loads of a name; 0 means always."""
    name: str | None = None


class Faults(_Fault):
    """All faults. A POST names those it changes; null ends one."""

    late: Late | None = None
    torn: Torn | None = None
    load_error: LoadError | None = None
    load_delay_s: float = Field(default=0, ge=0)
    """Every load takes so much longer, without holding up the engine."""
    unload_status: int | None = None
    """Unloads answer this status and change nothing."""
    unload_delay_s: float = Field(default=0, ge=0)
    """Every unload takes so much longer."""
    slow: float = Field(default=1, gt=0)
    """Prefill and decoding take so many times as long."""
    hang: bool = False
    """The engine stands still: /health answers, everything that needs the engine does not."""
    generations_status: int | None = None
    """Generations answer this status at once, with the words of vLLM's admission limit; 400 with those for NaN."""
    wrong_weights: str | None = None
    """Generations are computed with these weights instead of those they named."""
    stuck_at_sigterm: bool = False
    """SIGTERM closes the port and nothing else: what is in flight is never answered and the process stays, as with
    vLLM 0.32 about every second time."""
    weights_hang: bool = False
    """Calls that change base weights wait, as a collective does for a process that does not come."""
    weights_error: bool = False
    """Calls that change base weights fail in the worker."""
    abort_answers: bool = False
    """Generations end at once with finish_reason "abort"."""


@dataclass
class _Seen:
    since: float
    loads: int = 0


@dataclass(frozen=True)
class LoadVerdict:
    """What a fault answers to a load."""

    status: int
    message: str
    body: Any = None


class FaultBox:
    """The faults in force, and what they have counted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.now = Faults()
        self._clock = clock
        self._seen: dict[str, _Seen] = {}
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"FaultBox({self.now.model_dump(exclude_defaults=True)})"

    def set(self, changes: dict[str, Any]) -> Faults:
        """Change the faults that `changes` names and start counting anew. Raises pydantic's ValidationError."""
        self.now = Faults.model_validate({**self.now.model_dump(), **changes})
        self._seen.clear()
        self._changed.set()
        return self.now

    def clear(self) -> None:
        """End every fault."""
        self.now = Faults()
        self._seen.clear()
        self._changed.set()

    async def weights_may_go_on(self) -> None:
        """Return once no fault holds up calls that change base weights."""
        while self.now.weights_hang:
            self._changed.clear()
            await self._changed.wait()

    def judge_load(self, name: str, path: str) -> LoadVerdict | None:
        """Count one load and return what a fault answers to it, or None if it may go on."""
        seen = self._seen.setdefault(name, _Seen(since=self._clock()))
        seen.loads += 1
        faults = self.now
        if faults.late and self._applies(faults.late, name, seen):
            return LoadVerdict(404, f"Loading lora {name} failed: No adapter found for {path}")
        if faults.torn and self._applies(faults.torn, name, seen):
            return LoadVerdict(500, _TORN_TEXTS[faults.torn.kind].format(path=path))
        error = faults.load_error
        if error and _is_meant(error.name, name) and (not error.attempts or seen.loads <= error.attempts):
            return LoadVerdict(error.status, "the load failed on purpose", error.body)
        return None

    def _applies(self, fault: Late, name: str, seen: _Seen) -> bool:
        if not _is_meant(fault.name, name):
            return False
        return seen.loads <= fault.attempts or self._clock() - seen.since < fault.seconds


def _is_meant(wanted: str | None, name: str) -> bool:
    return wanted is None or name == wanted or name.startswith(f"{wanted}~")
