"""Clients that all come at once: the last to be taken waits for its turn, not for the others to be done."""

from __future__ import annotations

import re
import signal
import socket

from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica

CLIENTS, REQUESTS = 100, 30


def test_the_last_client_does_not_wait_until_the_first_is_done() -> None:
    with SimulatedReplica() as replica, RunningProxy(replica.url) as proxy:
        proxy.process.send_signal(signal.SIGSTOP)
        clients = [socket.create_connection(("127.0.0.1", proxy.port), timeout=10) for _ in range(CLIENTS)]
        for client in clients:
            client.sendall(_unknown_model() * REQUESTS)
        proxy.process.send_signal(signal.SIGCONT)
        first_answers = [_numbers(client)[0] for client in clients]
    # Requests are numbered in the order in which they are read.
    assert max(first_answers) - min(first_answers) < CLIENTS * REQUESTS / 2


def _unknown_model() -> bytes:
    body = b'{"model":"nobody-knows-it","prompt":[1]}'
    return b"POST /v1/completions HTTP/1.1\r\nHost: p\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def _numbers(client: socket.socket) -> list[int]:
    """Return the numbers of a client's requests, and close its connection."""
    with client:
        said = b""
        while len(found := re.findall(rb"x-request-id: \w+-(\w+)\r\n", said)) < REQUESTS:
            more = client.recv(65536)
            assert more, "the proxy answers every request"
            said += more
    return [int(number, 16) for number in found]
