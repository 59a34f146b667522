"""What stands between the proxy and the vLLM of a Hugging Face Job: a gate that wants a token for every path.

vLLM with --api-key wants one too, but not for /health, and says so in words of its own. Pure.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from proxy.controlplane.answer import Answer

_VLLMS_OWN = {"error": "Unauthorized"}
"""The body of vLLM's 401."""

_GATE_DOMAIN = ".hf.jobs"


def refusal(answer: Answer, *, token_sent: bool) -> str | None:
    """Return who refuses the proxy's token and what to do, or None if nobody does. Never says the token."""
    if answer.status not in (401, 403):
        return None
    if answer.json() == _VLLMS_OWN:
        remedy = "start it without --api-key, or make the proxy's HF_TOKEN that key"
        return f"vLLM itself asks for a key (--api-key) that is not the proxy's token: {remedy}"
    if not token_sent:
        return "the gate in front of it asks for a token, and the proxy has none for it: set HF_TOKEN"
    remedy = "set HF_TOKEN to one with read access to the namespace of this Job"
    if answer.status == 403:
        return f"the gate in front of it knows the proxy's token, which may not come in here: {remedy}"
    return f"the gate in front of it does not take the proxy's token, which has expired or lacks access: {remedy}"


def job_behind(url: str) -> str:
    """Return how to find out why the Job behind an exposed port is silent; empty: `url` is no such port."""
    host = urlsplit(url).hostname or ""
    if not host.endswith(_GATE_DOMAIN):
        return ""
    job_id = host.removesuffix(_GATE_DOMAIN).rpartition("--")[0]
    return f"its Job may still be starting, or has ended: `hf jobs inspect {job_id}` tells"
