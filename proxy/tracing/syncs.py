"""The spans of a sync: `sync`, below it its phases (see LoadReport), and `load` and `verify` for each replica's calls.

A replica that joins loads what is live without an announcement: its calls are traces of their own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from opentelemetry import propagate
from opentelemetry.context import Context, get_current
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from proxy.contract import LoadReport, LoadRequest
from proxy.controlplane.answer import Answer
from proxy.controlplane.loading import Loading
from proxy.controlplane.replica_api import LoadOutcome, ReplicaApi, load_outcome
from proxy.errors import ApiError
from proxy.fleet import names

OF_REPLICAS = ("load", "verify")
"""Phases that are told call by call instead."""

Syncs = dict[str, Context]
"""The contexts of the syncs under way, by the policy's name."""


def traced_syncs(tracer: Tracer) -> dict[str, Any]:
    """Return the parts (see `parts`) that write the spans of syncs."""
    syncs: Syncs = {}
    return {
        "loading": partial(TracedLoading, tracer, syncs),
        "replica_api": partial(TracedReplicaApi, tracer, syncs),
        "request_hooks": (_pass_on,),
    }


class TracedLoading(Loading):
    """Opens the span of a sync below that of its trainer, where the trainer has sent one."""

    def __init__(self, tracer: Tracer, syncs: Syncs, *rooms: Any) -> None:
        super().__init__(*rooms)
        self._tracer = tracer
        self._syncs = syncs

    async def load(self, request: LoadRequest) -> LoadReport:
        name = request.lora_name
        with self._tracer.start_as_current_span(
            "sync",
            kind=SpanKind.SERVER,
            attributes=_about(request),
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            own = self._syncs[name] = get_current()
            phases: Mapping[str, float] = {}
            try:
                report = await super().load(request)
                phases = report.phases
                span.set_attribute("lora_sync.outcome", report.status)
                return report
            except ApiError as error:
                phases = (error.details or {}).get("phases", {})
                span.set_attribute("lora_sync.outcome", error.reason)
                span.set_status(Status(StatusCode.ERROR, error.message))
                raise
            finally:
                if self._syncs.get(name) is own:
                    del self._syncs[name]
                for phase, began, ended in laid_out(phases, ended=time.time_ns()):
                    if phase not in OF_REPLICAS:
                        self._tracer.start_span(phase, own, start_time=began).end(ended)


class TracedReplicaApi(ReplicaApi):
    """Shows each call that loads a policy or proves it."""

    def __init__(self, tracer: Tracer, syncs: Syncs, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._tracer = tracer
        self._syncs = syncs

    async def load(self, name: str, path: str) -> Answer:
        with self._calling("load", name) as span:
            answer = await super().load(name, path)
            outcome = load_outcome(answer)
            span.set_attribute("lora_sync.outcome", outcome.value)
            if outcome not in (LoadOutcome.LOADED, LoadOutcome.ALREADY):
                span.set_status(Status(StatusCode.ERROR, answer.message))
            return answer

    async def prove(self, name: str) -> Answer:
        with self._calling("verify", name) as span:
            answer = await super().prove(name)
            if not answer.ok:
                span.set_status(Status(StatusCode.ERROR, answer.message))
            return answer

    @contextmanager
    def _calling(self, what: str, upstream: str) -> Iterator[Span]:
        policy, _ = names.decode(upstream)
        with self._tracer.start_as_current_span(
            what,
            self._syncs.get(policy),
            SpanKind.CLIENT,
            {"lora_sync.policy": policy, "lora_sync.replica": self.url},
            record_exception=False,
        ) as span:
            yield span


def laid_out(phases: Mapping[str, float], *, ended: int) -> list[tuple[str, int, int]]:
    """Return each phase with its begin and end, the last one ending at `ended`; in nanoseconds. Pure."""
    found = []
    for name, seconds in reversed(list(phases.items())):
        began = ended - int(seconds * 1e9)
        found.append((name, began, ended))
        ended = began
    return found[::-1]


def _about(request: LoadRequest) -> dict[str, str | int]:
    told: dict[str, str | int] = {"lora_sync.policy": request.lora_name}
    if (policy := request.policy) is not None:
        told |= {"lora_sync.run": policy.run, "lora_sync.version": policy.version, "lora_sync.step": policy.step}
    return told


async def _pass_on(request: Any) -> None:
    """Write the current context into the headers of a request of the control plane."""
    propagate.inject(request.headers)
