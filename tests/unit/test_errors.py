"""The shape in which clients see an error is vLLM's."""

from __future__ import annotations

from proxy.errors import ApiError


def test_the_body_is_vllms_and_details_stand_beside_it() -> None:
    error = ApiError(409, "taken", reason="no_slot", type="Conflict", param="lora_name", details={"report": {"a": 1}})
    assert error.body() == {
        "error": {"message": "taken", "type": "Conflict", "param": "lora_name", "code": 409},
        "report": {"a": 1},
    }
    assert error.headers() == {"X-Proxy-Error": "no_slot"}


def test_a_passing_state_says_when_to_come_back() -> None:
    assert ApiError(503, "wait", reason="not_ready", retry_after_s=1).headers()["Retry-After"] == "1"
