"""Put a stream together to what the same answer would be as a whole."""

from __future__ import annotations

import json
from typing import Any

from proxy.fleet import names

DONE = "[DONE]"


class BrokenStreamError(Exception):
    """The stream says that it broke off."""


def joined(text: str) -> dict[str, Any]:
    """Return the answer of a completion's stream. Raises BrokenStreamError if it says itself that it is not whole.

    One that stops without a word is put together all the same: whoever judges it sees that it is cut short.
    """
    model, finish_reason = "", None
    tokens: list[int] = []
    logprobs: list[float] = []
    for line in text.split("\n"):
        data = line.removeprefix("data: ")
        if data in (line, DONE):
            continue
        try:
            event = json.loads(data)
        except ValueError:
            continue  # broken off within an event; what comes next says so
        if error := event.get("error"):
            raise BrokenStreamError(error["message"])
        model, _ = names.decode(event["model"])  # within a stream, replicas' names for policies are left as they are
        for choice in event["choices"]:
            tokens += choice.get("token_ids") or []
            logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
            finish_reason = choice["finish_reason"] or finish_reason
    choice = {"token_ids": tokens, "finish_reason": finish_reason, "logprobs": {"token_logprobs": logprobs}}
    return {"model": model, "choices": [choice]}
