"""Log lines: one for each event, for people or for machines. Never a prompt, never a token.

A log call says what a line is about in `extra={"about": {...}}`: `event` (a short word), `policy`, `version`, `replica`
(its URL), `request` (the X-Request-Id that the replica got), `seconds`, and more where there is more. None is left out.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

IN_TEXT = ("policy", "version", "replica", "request", "seconds")
"""What a line of text repeats behind its message; the message says the rest."""

_CHATTY = ("httpx2", "httpcore2", "asyncio", "uvicorn.error")


def configure(style: Literal["text", "json"]) -> None:
    """Log to stderr from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if style == "json" else _Text("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)


class _Text(logging.Formatter):
    """TIME LEVEL EVENT: MESSAGE policy=... version=... replica=... request=... seconds=..."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        about = _about(record)
        event = f"{about['event']}: " if "event" in about else ""
        told = "".join(f" {name}={about[name]}" for name in IN_TEXT if name in about)
        record.message = " ".join(f"{event}{record.message}{told}".split())  # a name may hold a line break, too
        return super().formatMessage(record)


class _Json(logging.Formatter):
    """One object a line: `at` (UTC), `level`, `message`, what it is about, and `traceback` if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"at": at, "level": record.levelname.lower(), "message": record.getMessage(), **_about(record)}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _about(record: logging.LogRecord) -> dict[str, Any]:
    about: dict[str, Any] = getattr(record, "about", {})
    return {name: _rounded(value) for name, value in about.items() if value is not None}


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value
