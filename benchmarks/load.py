"""A closed-loop load generator that costs little: so many connections, each with one request at a time."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import httptools

GROUP_SIZE = 8
"""Requests that share a prompt, as in GRPO."""


RETRY_S = 1.0
"""What the proxy's Retry-After says."""

Request = Callable[[int], bytes]
"""Gives the n-th request, head and all."""

_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


@dataclass
class Measured:
    """What one run saw."""

    seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    errors: int = 0
    refused: int = 0
    """503 with Retry-After; asked again after a second."""
    events: int = 0
    """Chunks of streams."""

    @property
    def requests(self) -> int:
        """How many answers came back whole."""
        return len(self.latencies_s)

    def percentile_ms(self, share: float) -> float:
        """Return a percentile of the latency, in milliseconds."""
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3 if ordered else float("nan")


def bodies(ids: int, *, stream: bool, model: str = "sim", prompts: int = 96, seed: int = 0) -> list[bytes]:
    """Return completion requests of `ids` prompt tokens for `model`, in groups that share a prompt.

    More prompts than the proxy's memory of siblings holds, so that going round does not make each of them known.
    """
    randomness = random.Random(seed)
    made = []
    for _ in range(prompts):
        prompt = ",".join(str(randomness.randrange(10_000, 150_000)) for _ in range(ids))
        for member in range(GROUP_SIZE):
            tail = ',"stream":true}' if stream else "}"
            made.append(f'{{"model":"{model}","seed":{member},"max_tokens":16,"prompt":[{prompt}]{tail}'.encode())
    return made


class _Client(asyncio.Protocol):
    def __init__(self, run: _Run) -> None:
        self._run = run
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._next()

    def _next(self) -> None:
        request = self._run.next_request()
        if request is None:
            self._waits_for_answer = False
            self._transport.close()
            return
        self._parser = httptools.HttpResponseParser(self)
        self._retry_after, self._waits_for_answer = False, True
        self._sent_at = time.perf_counter()  # uvloop's own clock counts milliseconds
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_header(self, name: bytes, _: bytes) -> None:
        self._retry_after = self._retry_after or name.lower() == b"retry-after"

    def on_body(self, _: bytes) -> None:
        self._run.measured.events += 1

    def on_message_complete(self) -> None:
        status, measured = self._parser.get_status_code(), self._run.measured
        if status == 503 and self._retry_after:
            measured.refused += 1
            self._loop.call_later(RETRY_S, self._next)
            return
        if status == 200:
            measured.latencies_s.append(time.perf_counter() - self._sent_at)
        else:
            measured.errors += 1
        self._waits_for_answer = False
        self._loop.call_soon(self._next)

    def connection_lost(self, error: Exception | None) -> None:
        self._run.measured.errors += self._waits_for_answer
        self._run.ended()


class _Run:
    def __init__(self, request: Request, until: float, connections: int, at_most: int | None) -> None:
        self.measured = Measured()
        self._request = request
        self._until = until
        self._sent = 0
        self._at_most = at_most
        self._open = connections
        self.done = asyncio.Event()

    def next_request(self) -> bytes | None:
        over = asyncio.get_running_loop().time() >= self._until
        if over or (self._at_most is not None and self._sent >= self._at_most):
            return None
        self._sent += 1
        return self._request(self._sent)

    def ended(self) -> None:
        self._open -= 1
        if not self._open:
            self.done.set()


async def drive(
    host: str, port: int, requests: Sequence[bytes], *, connections: int, seconds: float, at_most: int | None = None
) -> Measured:
    """Send `requests` (bodies), round and round, over `connections` for `seconds`; at most `at_most` of them."""
    whole = [whole_request(body) for body in requests]
    return await drive_by(
        host, port, lambda n: whole[n % len(whole)], connections=connections, seconds=seconds, at_most=at_most
    )


def whole_request(body: bytes) -> bytes:
    """Return a completion request with this body, head and all."""
    return _HEAD % len(body) + body


async def drive_by(
    host: str, port: int, request: Request, *, connections: int, seconds: float, at_most: int | None = None
) -> Measured:
    """Send what `request` gives for 1, 2, 3 ...; otherwise as `drive`."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    run = _Run(request, started + seconds, connections, at_most)
    for _ in range(connections):
        await loop.create_connection(lambda: _Client(run), host, port)
    async with asyncio.timeout(seconds + 30):
        await run.done.wait()
    run.measured.seconds = loop.time() - started
    return run.measured
