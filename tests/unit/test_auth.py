"""P8: the token reaches only the replicas, and over plain http only where nobody else listens."""

from __future__ import annotations

import pytest

from proxy.auth import may_carry_token


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://abc--8000.hf.jobs", True),
        ("http://127.0.0.1:8000", True),
        ("http://127.8.9.1:8000", True),
        ("http://[::1]:8000", True),
        ("http://localhost:8000", True),
        ("http://grp-replica-0:8000", True),
        ("http://grp-replica-0.evil.example:8000", False),
        ("http://grp.example:8000", False),
        ("http://10.0.0.1:8000", False),
        ("http://vllm.example.org", False),
        ("http://localhost.example.org", False),
        ("http://127.0.0.1.example.org", False),
    ],
)
def test_where_the_token_may_go(url: str, allowed: bool) -> None:
    assert may_carry_token(url, network_group_prefix="grp-") is allowed


def test_without_a_network_group_no_name_is_special() -> None:
    assert not may_carry_token("http://grp-replica-0:8000")


def test_the_user_may_allow_plain_http() -> None:
    assert may_carry_token("http://10.0.0.1:8000", token_over_http=True)
