"""Who refuses the token: the gate in front of a Job, or vLLM's own --api-key; and whose silence is a Job's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.controlplane.answer import Answer
from proxy.controlplane.jobs_gate import job_behind, refusal


@pytest.mark.parametrize(
    ("status", "body", "token_sent", "said"),
    [
        (401, '{"error":"Unauthorized"}', True, "vLLM itself asks for a key (--api-key)"),
        (401, '{"error":"Unauthorized"}', False, "vLLM itself asks for a key (--api-key)"),
        (401, "", True, "the gate in front of it does not take the proxy's token, which has expired or lacks access"),
        (401, "<html>who are you?</html>", True, "the gate in front of it does not take the proxy's token"),
        (401, '{"error":"Invalid username or password."}', True, "the gate in front of it does not take"),
        (401, "", False, "the proxy has none for it: set HF_TOKEN"),
        (403, "", True, "the gate in front of it knows the proxy's token, which may not come in here"),
    ],
)
def test_who_refuses(status: int, body: str, token_sent: bool, said: str) -> None:
    assert said in (refusal(Answer(status, body), token_sent=token_sent) or "")


@given(st.none() | st.integers(100, 599).filter(lambda status: status not in (401, 403)), st.text(), st.booleans())
def test_nothing_else_is_a_refusal(status: int | None, body: str, token_sent: bool) -> None:
    assert refusal(Answer(status, body), token_sent=token_sent) is None


def test_the_job_behind_an_exposed_port() -> None:
    assert "`hf jobs inspect 687fb701029421ae5549d998`" in job_behind("https://687fb701029421ae5549d998--8000.hf.jobs")
    for url in ("http://127.0.0.1:8000", "https://hf.jobs.example.com", "http://grp-replica-0:8000"):
        assert job_behind(url) == ""
