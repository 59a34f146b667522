"""Which headers cross the proxy: the client's to the replica, the replica's to the client, tokens nowhere else."""

from __future__ import annotations

import pytest

from proxy.dataplane.headers import to_client, to_replica


def test_the_clients_authorization_and_cookies_stay_here() -> None:
    sent = to_replica([(b"authorization", b"Bearer client"), (b"cookie", b"a=b"), (b"content-type", b"text/plain")])
    assert (b"content-type", b"text/plain") in sent
    assert not {name for name, _ in sent} & {b"authorization", b"cookie"}


@pytest.mark.parametrize("name", [b"connection", b"transfer-encoding", b"upgrade", b"host", b"content-length", b"te"])
def test_what_belongs_to_one_connection_stays_there(name: bytes) -> None:
    assert name not in {sent for sent, _ in to_replica([(name, b"x")])}


def test_what_connection_names_stays_here_too() -> None:
    headers = [(b"connection", b"X-Hop, keep-alive"), (b"x-hop", b"1"), (b"x-session-id", b"s")]
    assert [name for name, _ in to_replica(headers)] == [b"x-session-id", b"x-request-id"]


def test_a_request_id_is_passed_on_or_made() -> None:
    assert (b"x-request-id", b"abc") in to_replica([(b"x-request-id", b"abc")])
    made = dict(to_replica([]))
    assert len(made[b"x-request-id"]) > 12
    assert made != dict(to_replica([]))


def test_the_client_learns_which_replica_and_why() -> None:
    received = to_client(
        [(b"content-type", b"application/json"), (b"transfer-encoding", b"chunked"), (b"content-length", b"9")],
        replica=1,
        route="affinity",
    )
    assert received == [
        (b"content-type", b"application/json"),
        (b"x-proxy-upstream", b"1"),
        (b"x-proxy-route", b"affinity"),
    ]
