"""What is said of a load that takes long, by what the proxy knows of it."""

from __future__ import annotations

from proxy.contract import PolicyStatus
from trainer_client.waiting import waits_for


def said(reason: str | None) -> str:
    """Return what is said of a load for which the proxy gives this reason; None: it does not know the policy."""
    told = {"path": "/lora/run-v1", "state": "loading", "version": 1, "leases": 0, "held_by": (), "reason": reason}
    status = (
        None if reason is None else PolicyStatus.model_validate({"name": "run-v1", "files_deletable": False} | told)
    )
    return waits_for(status, name="run-v1", path="/lora/run-v1", seconds=3.2)


def test_a_replica_that_does_not_see_the_files_is_named_with_where_it_looks() -> None:
    answer = "http://r1 after 9 tries: No adapter found for /lora/run-v1"
    assert said(answer) == (
        f"run-v1 is not served after 3 s: {answer}. Replicas look in /lora/run-v1: is that where they see the store "
        "(--mount)?"
    )


def test_a_policy_that_no_replica_was_asked_for_waits_for_its_files_or_a_slot() -> None:
    assert said(None).startswith("run-v1 is not served after 3 s: no replica has been asked for it")


def test_replicas_that_have_said_nothing_are_loading() -> None:
    assert said("") == "run-v1 is not served after 3 s: it is loading"
