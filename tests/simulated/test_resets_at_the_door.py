"""A replica, or what stands before it, that resets connections as soon as it has them: it is down, nothing more."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count

from tests.simulated.checks import Traffic
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, wait_until

RESETS = 400
"""Each may come at any moment of the connection's making: before, in and after the library's look at it."""


@contextmanager
def resetting() -> Iterator[tuple[str, list[int]]]:
    """Reset every connection at once; yield the URL, and a list that ends with how many there were."""
    taken = [0]
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:

        def serve() -> None:
            with suppress(OSError):
                for number in count(1):
                    connection, _ = listener.accept()
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    connection.close()
                    taken.append(number)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", taken
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_the_proxy_outlives_it(pair: list[SimulatedReplica]) -> None:
    with (
        resetting() as (url, taken),
        RunningProxy(pair[0].url, url, PROXY_PROBE_S="0.005", PROXY_START_WAIT_S="0") as proxy,
        Traffic(proxy, {"sim": "base:sim"}) as traffic,
    ):
        wait_until(lambda: taken[-1] >= RESETS, what="it has been asked often enough")
        traffic.wait_more(10)
        assert proxy.states() == ["ready", "down"]
    assert taken[-1] >= RESETS
