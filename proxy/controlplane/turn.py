"""One change of base weights at a time: a second one would find replicas in the middle of the first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from proxy.errors import ApiError


class Turn:
    """Lets one caller in and refuses the others."""

    def __init__(self) -> None:
        self.taken_by = ""
        """What is being done, empty if nothing is."""

    @contextmanager
    def taken(self, what: str) -> Iterator[None]:
        """Have the turn for the time of a `with` block. Raises ApiError 409 if somebody has it."""
        if self.taken_by:
            raise ApiError(409, f"{what}: {self.taken_by} is still under way.", reason="under_way")
        self.taken_by = what
        try:
            yield
        finally:
            self.taken_by = ""
