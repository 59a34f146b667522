"""What follows from a replica's whole answer, or from how its stream begins: deliver it, or try another one. Pure."""

from __future__ import annotations

from enum import Enum

from proxy.errors import NOT_FINITE

ABORTED = b'"finish_reason":"abort"'
"""As vLLM writes it. Within a generated text the quotes would be escaped, so this is the field itself."""

_UNKNOWN_MODEL = b"does not exist"
_ENGINE_DIED = b"EngineCore encountered an issue"
_NOT_FINITE = NOT_FINITE.encode()


class Verdict(Enum):
    """What to do with an answer that no byte has been sent of."""

    DELIVER = "deliver"
    """The client gets it: a success, or an error that the request itself has caused."""
    LOST_POLICY = "it has lost the policy"
    """The replica does not hold what it should: it joins again, the rollout goes elsewhere."""
    ABORTED = "it aborted the rollout"
    """Cut short, and no client asked for that: training on it would be silently wrong (P5)."""
    ENGINE_DIED = "its engine died"
    """One other replica may try. A rollout that kills engines must not kill the fleet."""
    FAILED_INSIDE = "it failed inside"
    """An error of the replica's own; one other replica may try."""
    NOT_FINITE = "its values are not finite"
    """One other replica may try: NaN of one policy spoils the rollouts of others beside it, for a while."""
    SHUT_OUT = "it refuses the proxy's token"
    """Its gate or vLLM's --api-key: no fault of the client, whose own Authorization never gets here."""
    BUSY = "it is busy or unavailable"
    """Neither a failure nor a success: another replica may take it, else the client gets the answer."""


def judge_first(event: bytes, *, client_aborted: bool) -> Verdict:
    """Say what follows from the first bytes of a stream; a body that is none is always delivered."""
    if event.startswith(b'data: {"error"'):
        return Verdict.ENGINE_DIED if _ENGINE_DIED in event else Verdict.FAILED_INSIDE
    ended = event.startswith(b"data: [DONE]")  # vLLM aborts before the first token without a word
    return Verdict.ABORTED if not client_aborted and (ended or ABORTED in event) else Verdict.DELIVER


def judge(status: int, body: bytes, *, client_aborted: bool) -> Verdict:
    """Say what follows from an answer. `client_aborted`: a client has asked for aborts since the rollout began."""
    if status == 200:
        return Verdict.ABORTED if not client_aborted and ABORTED in body else Verdict.DELIVER
    if status == 404 and _UNKNOWN_MODEL in body:
        return Verdict.LOST_POLICY
    if status == 400 and _NOT_FINITE in body:
        return Verdict.NOT_FINITE
    if status == 500:
        return Verdict.ENGINE_DIED if _ENGINE_DIED in body else Verdict.FAILED_INSIDE
    if status in (401, 403):
        return Verdict.SHUT_OUT
    if status in (502, 503, 504):
        return Verdict.BUSY
    return Verdict.DELIVER
