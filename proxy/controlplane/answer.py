"""A replica's answer to a control call, as data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """A replica's answer to a control call. `status` is None when there was none, and `text` then says why."""

    status: int | None
    text: str
    content_type: str = ""

    @property
    def ok(self) -> bool:
        """Whether the call did what it says: 200, and not the `{"success": false}` of /reset_prefix_cache."""
        if self.status != 200:
            return False
        body = self.json()
        return not (isinstance(body, dict) and body.get("success") is False)

    @property
    def failed_inside(self) -> bool:
        """Whether the server itself failed, rather than finding fault with the call."""
        return self.status is not None and self.status >= 500

    def json(self) -> Any:
        """Return the decoded body, or None if it is not JSON."""
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError):
            return None

    @property
    def message(self) -> str:
        """The replica's own words, taken out of any of vLLM's three error shapes."""
        body = self.json()
        if isinstance(body, dict):
            error = body.get("error", body.get("detail"))
            if isinstance(error, dict):
                return str(error.get("message", error))
            if error is not None:
                return str(error)
        return self.text[:500]
