"""Rollouts as TRL sends them: groups that share a prompt, each asked again until there is an answer."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx2

from benchmarks.chaos.fleet import Fleet
from benchmarks.chaos.judge import Asked, Judge
from benchmarks.chaos.scale import Scale
from benchmarks.chaos.streams import BrokenStreamError, joined
from benchmarks.chaos.tally import Ending, Rollout, Tally
from proxy.fleet import names

GROUP_SIZE = 8
PROMPT_TOKENS = 48

STREAMED = 8
"""One in so many rollouts is streamed. TRL streams none, other trainers do."""

OUTER_TRIES, INNER_TRIES = 30, 3
"""TRL tries a rollout 3 times, waiting 1 and 2 s, and does that up to 30 times, waiting up to 16 s in between."""

STUCK_S = 60.0
"""Twice what the proxy holds a rollout for while no replica is ready (PROXY_WAIT_READY_S)."""

READY_FOR_S = 0.25
"""A replica became ready so long before an error was read: then it was ready when the error was written."""

RETIRED = "retired"
"""X-Proxy-Error of a 404 for a policy that has ended."""

ON_PURPOSE = ("blocked", "stopping")
"""X-Proxy-Error of a 503 that is no loss: two engines have died under the policy, or the proxy was told to end."""

_TWO_ENGINES = ("EngineCore encountered an issue", "its engine died")
"""In the answer to a rollout under which an engine has died, and whose second try has failed: there is no third."""


@dataclass(eq=False)
class Target:
    """A policy that rollouts may ask for."""

    model: str
    digest: str
    given_up: bool = False
    """Its trainer has asked for its unload, or is about to."""


def pauses() -> Iterator[float]:
    """Yield TRL's pauses before each further try, in seconds."""
    for outer in range(OUTER_TRIES):
        yield from (float(2**inner) for inner in range(INNER_TRIES - 1))
        if outer < OUTER_TRIES - 1:
            yield float(min(2 ** min(outer, 4), 16))


class Rollouts:
    """Keeps rollouts in flight. Trainers set `target`; None: there is no policy to ask for."""

    def __init__(self, fleet: Fleet, tally: Tally, judge: Judge, scale: Scale, *, seed: int) -> None:
        self.target: Target | None = None
        self._fleet = fleet
        self._tally = tally
        self._judge = judge
        self._scale = scale
        self._seed = seed
        self._count = 0
        self._under_way: set[asyncio.Task[None]] = set()

    async def run(self, stop: asyncio.Event) -> None:
        """Keep `in_flight` rollouts going until `stop`, then wait for those that are on their way."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._scale.in_flight):
                tasks.create_task(self._worker(stop, tasks))

    def run_ends(self) -> None:
        """Break off everything, as when the training run's process ends."""
        self.target = None
        for task in self._under_way:
            task.cancel()

    async def _worker(self, stop: asyncio.Event, tasks: asyncio.TaskGroup) -> None:
        while not stop.is_set():
            if self.target is None:
                await asyncio.sleep(0.05)
                continue
            task = tasks.create_task(self._rollout(self.target))
            self._under_way.add(task)
            await asyncio.wait([task])
            self._under_way.discard(task)

    async def _rollout(self, target: Target) -> None:
        asked = self._next(target)
        rollout = self._tally.sent(asked)
        try:
            ending, why = await self._serve(rollout, target)
        except asyncio.CancelledError:
            self._tally.ended(rollout, Ending.LEFT)
            raise
        self._tally.ended(rollout, ending, why)

    def _next(self, target: Target) -> Asked:
        self._count += 1
        group = random.Random(f"{self._seed}/{self._count // GROUP_SIZE}")
        prompt = [group.randrange(10, self._scale.vocabulary) for _ in range(PROMPT_TOKENS)]
        own = random.Random(f"{self._seed}:{self._count}")
        seed, count, stream = own.getrandbits(62), own.choice(self._scale.lengths), not own.randrange(STREAMED)
        return Asked(target.model, target.digest, prompt, seed, count, stream)

    async def _serve(self, rollout: Rollout, target: Target) -> tuple[Ending, str]:
        """Ask until there is an answer or no hope."""
        body = json.dumps(_body(rollout.asked)).encode()
        for pause_s in (*pauses(), None):
            try:
                async with asyncio.timeout(STUCK_S):
                    answer = await self._fleet.http.post(
                        f"{self._fleet.proxy.url}/v1/completions", content=body, headers=_HEADERS
                    )
            except TimeoutError:
                return Ending.STUCK, f"no answer within {STUCK_S:.0f} s"
            except httpx2.HTTPError as error:
                self._tally.failed(rollout, f"{type(error).__name__} {error}", group=type(error).__name__)
            else:
                if (ending := await self._read(rollout, target, answer)) is not None:
                    return ending
            if pause_s is not None:
                await asyncio.sleep(pause_s)
        clear = all(try_.startswith("HTTP") for try_ in rollout.tries)
        return (Ending.ERROR if clear else Ending.LOST), "tried as often as TRL does"

    async def _read(self, rollout: Rollout, target: Target, answer: httpx2.Response) -> tuple[Ending, str] | None:
        """Return how the rollout ends with this answer, or None if it is to be tried again."""
        if answer.status_code == 200:
            try:
                whole = joined(answer.text) if rollout.asked.stream else answer.json()
            except BrokenStreamError as error:
                self._tally.failed(rollout, f"HTTP 200, then: {error}", group="stream_broken")
                return None
            self._tally.moved(rollout, answer.headers.get("X-Proxy-Route") == "retried")
            problem = self._judge.look(rollout.asked, whole)
            told = f"{problem}, by replica {answer.headers.get('X-Proxy-Upstream')}: {answer.text[-400:]!r}"
            return (Ending.WRONG, told) if problem else (Ending.RETRIED if rollout.tries else Ending.FIRST, "")
        read_at = time.time()
        reason = answer.headers.get("X-Proxy-Error", "of a replica")
        self._tally.failed(rollout, _words(answer), group=f"{answer.status_code} {reason}")
        if reason == RETIRED and target.given_up:
            return Ending.RETIRED, ""
        if reason == RETIRED:
            rollout.lost = "its policy was retired although nobody had unloaded it"
            return Ending.LOST, rollout.lost
        if reason in ON_PURPOSE or any(words in answer.text for words in _TWO_ENGINES):
            return None
        if not rollout.lost and (holder := await self._holder(target, read_at)) is not None:
            rollout.lost = f"refused while {holder} was ready and held its policy: {_words(answer)}"
        return None

    async def _holder(self, target: Target, at: float) -> str | None:
        """Return a replica that was ready and held the policy at `at`, if the policy is one that is served."""
        try:
            status = await self._fleet.http.get(f"{self._fleet.proxy.url}/proxy/policies/{target.model}", timeout=5)
            standings = await self._fleet.standings()
        except httpx2.HTTPError:
            return None
        if status.status_code != 200 or status.json()["state"] not in ("live", "retiring"):
            return None
        latest = at - READY_FOR_S
        for url, replica in standings.items():
            held = any(names.decode(name)[0] == target.model and s <= latest for name, s in replica.held.items())
            if replica.state == "ready" and replica.since <= latest and held:
                return url
        return None


_HEADERS = {"Content-Type": "application/json"}


def _body(asked: Asked) -> dict[str, Any]:
    return {
        "model": asked.model,
        "prompt": asked.prompt,
        "max_tokens": asked.count,
        "temperature": 1.0,
        "n": 1,
        "seed": asked.seed,
        "logprobs": 0,
        "return_token_ids": True,
        "stream": asked.stream,
        "ignore_eos": True,  # so that the length of a whole answer is known
    }


def _words(answer: httpx2.Response) -> str:
    return f"HTTP {answer.status_code} {answer.text[:400]}"
