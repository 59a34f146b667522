"""A closed-loop load generator that costs little: so many connections, each with one request at a time.

What it takes to make the connections, here and behind the proxy, is not measured: trainers keep theirs. So counting
begins when each of them has had an answer.
"""

from __future__ import annotations

import asyncio
import math
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
        self._had_one = False
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
        self._waits_for_answer = False
        if not self._had_one:
            self._had_one = True
            self._loop.call_soon(self._run.had_its_first)
        if status == 503 and self._retry_after:
            measured.refused += 1
            self._loop.call_later(RETRY_S, self._next)
            return
        if status == 200:
            measured.latencies_s.append(time.perf_counter() - self._sent_at)
        else:
            measured.errors += 1
        self._loop.call_soon(self._next)

    def connection_lost(self, error: Exception | None) -> None:
        self._run.measured.errors += self._waits_for_answer
        self._run.ended()


class _Run:
    def __init__(self, request: Request, connections: int, seconds: float, begins: Callable[[], object]) -> None:
        self.measured = Measured()
        self._loop = asyncio.get_running_loop()
        self._request = request
        self._seconds = seconds
        self._begins = begins
        self._began_at = math.inf
        self._sent = 0
        self._without_answer = self._open = connections
        self.done = asyncio.Event()

    def next_request(self) -> bytes | None:
        if self._loop.time() >= self._began_at + self._seconds:
            return None
        self._sent += 1
        return self._request(self._sent)

    def had_its_first(self) -> None:
        self._without_answer -= 1
        if not self._without_answer:
            self.measured = Measured(errors=self.measured.errors)
            self._began_at = self._loop.time()
            self._begins()

    def ended(self) -> None:
        self._open -= 1
        if not self._open:
            self.measured.seconds = self._loop.time() - self._began_at
            self.done.set()


async def drive(
    host: str,
    port: int,
    requests: Sequence[bytes],
    *,
    connections: int,
    seconds: float,
    begins: Callable[[], object] = lambda: None,
) -> Measured:
    """Send `requests` (bodies), round and round, over `connections` for `seconds` from when it `begins` to count."""
    whole = [whole_request(body) for body in requests]
    return await drive_by(
        host, port, lambda n: whole[n % len(whole)], connections=connections, seconds=seconds, begins=begins
    )


def whole_request(body: bytes) -> bytes:
    """Return a completion request with this body, head and all."""
    return _HEAD % len(body) + body


async def drive_by(
    host: str,
    port: int,
    request: Request,
    *,
    connections: int,
    seconds: float,
    begins: Callable[[], object] = lambda: None,
) -> Measured:
    """Send what `request` gives for 1, 2, 3 ...; otherwise as `drive`."""
    run = _Run(request, connections, seconds, begins)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(seconds + 60):
        for _ in range(connections):
            await loop.create_connection(lambda: _Client(run), host, port)
        await run.done.wait()
    return run.measured
