"""One pretend replica: its engine, its adapters, its faults, and what it remembers of the calls it got."""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from proxy.simulator.asgi import Refusal, Request
from proxy.simulator.engine import Engine
from proxy.simulator.faults import FaultBox
from proxy.simulator.lora import LoraRequest, Registry
from proxy.simulator.settings import SimulatorSettings

_REMEMBERED_CALLS = 1000
"""Control calls and rollouts that /sim/state shows: enough for a test, bounded for a long benchmark."""


@dataclass
class CallLog:
    """What the replica was asked, for tests to compare with what the proxy should have sent."""

    control: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_CALLS))
    rollouts: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_CALLS))
    counts: Counter[str] = field(default_factory=Counter)
    authorization: dict[str, str | None] = field(default_factory=dict)
    """The last credentials seen per path."""

    def note(self, request: Request) -> None:
        """Count a call, whatever it is."""
        path = f"{request.method} {request.path}"
        self.counts[path] += 1
        self.authorization[path] = fingerprint(request.headers.get("authorization"))

    def note_control(self, request: Request) -> None:
        """Remember a call that may change something."""
        query = "&".join(f"{name}={value}" for name, value in request.query.items())
        self.control.append(
            {
                "at": time.time(),
                "method": request.method,
                "path": request.path + (f"?{query}" if query else ""),
                "body": request.body.decode(errors="replace"),
                "headers": _selected_headers(request),
            }
        )

    def note_rollout(self, request: Request, *, model: Any, prompt_tokens: int, seed: int | None) -> None:
        """Remember a generation."""
        self.rollouts.append(
            {
                "at": time.time(),
                "path": request.path,
                "model": model,
                "prompt_tokens": prompt_tokens,
                "seed": seed,
                "headers": _selected_headers(request),
            }
        )


class Replica:
    """Everything that the HTTP handlers share."""

    def __init__(self, settings: SimulatorSettings) -> None:
        self.settings = settings
        self.faults = FaultBox()
        self.engine = Engine(settings, self.faults)
        self.registry = Registry()
        self.calls = CallLog()
        self.weight_version = "default"
        self.group: Any = None
        """The init_info of the trainer's group."""
        self.torn = False
        """A checkpoint has broken off in the middle: no other one can be read any more."""
        self.received: str | None = None
        """Weights that an update has brought and that are not served yet."""
        self.started = int(time.time())
        self.instance_id = uuid.uuid4().hex
        self.unloads: Counter[str] = Counter()
        self.load_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """vLLM handles loads and unloads of one name one after the other."""
        self.lora_label_sets: dict[tuple[str, str], float] = {}
        """Running and waiting adapters as /metrics has shown them: like vLLM's, its lines are never taken back."""
        self.fingerprint = "vllm-0.32.0-" + hashlib.sha256(settings.model_dump_json().encode()).hexdigest()[:8]

    def __repr__(self) -> str:
        return f"Replica({self.settings.model}, {self.engine}, {self.registry})"

    def adapter_of(self, model: str | None) -> LoraRequest | None:
        """Return the adapter that a request's `model` names, None for the base model. Raises Refusal."""
        if not model or model == self.settings.model:
            return None
        if lora := self.registry.get(model):
            return lora
        raise Refusal(
            404,
            f"The model `{model}` does not exist. Valid aliases: {self.settings.model}.",
            type="NotFoundError",
            param="model",
        )


def fingerprint(credentials: str | None) -> str | None:
    """Return something that tells credentials apart without showing them."""
    return None if credentials is None else hashlib.sha256(credentials.encode()).hexdigest()[:16]


def _selected_headers(request: Request) -> dict[str, str | None]:
    return {
        "authorization": fingerprint(request.headers.get("authorization")),
        "user-agent": request.headers.get("user-agent"),
        **{name: request.headers.get(name) for name in ("x-request-id", "traceparent", "tracestate")},
    }
