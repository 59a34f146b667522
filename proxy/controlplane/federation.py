"""The replicas' own /metrics as one page, each series with its `replica`: Prometheus then needs no token of theirs."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Collection, Mapping

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from proxy.contract import REPLICAS_PATH
from proxy.controlplane.answer import Answer
from proxy.controlplane.broadcast import broadcast
from proxy.controlplane.replica_api import ReplicaApi
from proxy.fleet.pool import Fleet

KEPT_S = 1.0
"""Several who look at once cost the replicas one call."""

ANSWER_S = 5.0
"""A replica that needs longer is left out, since Prometheus itself gives up after 10 s by default."""

_NAMED = re.compile(r"(?:# (?:HELP|TYPE) )?([a-zA-Z_:][\w:]*)")
_HEAD = re.compile(r"# (HELP|TYPE) (\S+) .*")
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?( \S+(?: -?\d+)?)")


class Federation:
    """Asks the replicas that are up, and keeps the page for a second."""

    def __init__(self, fleet: Fleet, apis: Mapping[int, ReplicaApi]) -> None:
        self._fleet = fleet
        self._apis = apis
        self._asking = asyncio.Lock()
        self._page = ""
        self._made_at = -math.inf

    async def page(self) -> str:
        """Return the page, at most KEPT_S old. Who does not answer is left out, with a comment that says why."""
        async with self._asking:
            if self._fleet.clock() - self._made_at >= KEPT_S:
                up = {replica.index: self._apis[replica.index] for replica in self._fleet.up}
                answers = await broadcast(list(up.values()), "GET", "/metrics", timeout_s=ANSWER_S)
                # In a thread, since many replicas together have many lines and rollouts must not wait for them.
                self._page = await asyncio.to_thread(merged, {index: answers[api.url] for index, api in up.items()})
                self._made_at = self._fleet.clock()
            return self._page


def merged(answers: Mapping[int, Answer]) -> str:
    """Return one page of all that these replicas (by index) have answered, each sample with the label `replica`. Pure.

    The samples of a metric stand together, as the format demands. What is neither head nor sample is left out, as
    everything is that a replica says with another status.
    """
    lost = []
    metrics: dict[str, dict[str, str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, answer in answers.items():
        if answer.status != 200:
            said = " ".join(answer.message.split())
            lost.append(f"# replica {replica} is left out: {answer.status or 'no answer'} {said}")
            continue
        metric = ""
        for line in answer.text.split("\n"):
            if (sample := _SAMPLE.fullmatch(line)) is not None:
                name, labels, rest = sample.groups()
                own = metric if metric and name.startswith(metric) else name
                told = f'replica="{replica}",{labels}' if labels else f'replica="{replica}"'
                samples.setdefault(own, []).append(f"{name}{{{told}}}{rest}")
            elif (head := _HEAD.fullmatch(line)) is not None:
                metric = head[2]
                metrics.setdefault(metric, {}).setdefault(head[1], line)
    lines = list(lost)
    for name, told_samples in samples.items():
        lines += [*metrics.get(name, {}).values(), *told_samples]
    return "\n".join([*lines, ""])


def only(page: str, names: Collection[str]) -> str:
    """Return the heads and samples of a page whose names are among `names`. Pure."""
    lines = (line for line in page.splitlines() if (found := _NAMED.match(line)) and found[1] in names)
    return "".join(f"{line}\n" for line in lines)


def federation_routes(fleet: Fleet, apis: Mapping[int, ReplicaApi]) -> APIRouter:
    """Return the route of the page."""
    routes, federation = APIRouter(), Federation(fleet, apis)

    @routes.get(f"{REPLICAS_PATH}/metrics", response_class=PlainTextResponse)
    async def replica_metrics(request: Request) -> Response:
        page = await federation.page()
        if names := request.query_params.getlist("name[]"):
            page = await asyncio.to_thread(only, page, names)
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    return routes
