"""vLLM's dialect, in one place: its paths, its error texts, and what each answer means.

The texts were measured on vLLM 0.32; `tests/vllm` holds them to the real server. Nothing here raises on an answer:
callers decide, so they get data.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from enum import StrEnum
from typing import Any

import httpx2

from proxy.auth import HIDDEN, Credentials
from proxy.contract import LOAD_PATH, UNLOAD_PATH
from proxy.controlplane.answer import Answer
from proxy.controlplane.jobs_gate import refusal
from proxy.controlplane.verify import probe_body
from proxy.errors import NO_ANSWER
from proxy.fleet.replica import Facts, Lack

_LATE = "No adapter found"
_TORN = (
    "doesn't contain tensors",
    "Error while deserializing header",
    "Expecting ",
    "Unterminated string",
    "Extra data",
    "Invalid control character",
)
"""What a half-visible directory gives: no weights yet, a weights file or a config that is not whole."""

_ALREADY = "has already been loaded"


_NO_CHECKPOINT = ("Repo id must be in the form", "Cannot find any model weights", "referenced in index but missing")
"""What a directory gives that is not there yet, has no weights yet, or not all. The model is torn, but not for good."""

_TORN_FOR_GOOD = "has no attribute 'weight_loader'"
"""What a model answers to every checkpoint once it has broken off in the middle of one."""


class LoadOutcome(StrEnum):
    """What a replica's answer to a load means."""

    LOADED = "loaded"
    """It holds the adapter."""
    LATE = "late"
    """It does not see the directory yet: ask again."""
    TORN = "torn"
    """It sees half of the directory: ask again."""
    ALREADY = "already"
    """It holds an adapter of that name, from this or another path."""
    REFUSED = "refused"
    """It will never take this adapter."""
    UNKNOWN = "unknown"
    """It did not answer: it may or may not hold the adapter."""


RETRYABLE = frozenset({LoadOutcome.LATE, LoadOutcome.TORN, LoadOutcome.UNKNOWN})


def load_outcome(answer: Answer) -> LoadOutcome:
    """Say what `answer` to a load means. Pure."""
    if answer.status in (None, 401, 403):  # refused at the door: whoever looks after the replica sees that, too
        return LoadOutcome.UNKNOWN
    if answer.status == 200:
        return LoadOutcome.LOADED
    message = answer.message
    if answer.status == 404 and _LATE in message:
        return LoadOutcome.LATE
    if answer.status == 500 and any(text in message for text in _TORN):
        return LoadOutcome.TORN
    if answer.status == 400 and _ALREADY in message:
        return LoadOutcome.ALREADY
    return LoadOutcome.REFUSED


def sees_no_checkpoint(answer: Answer) -> bool:
    """Whether a replica that was to read a checkpoint has found none: it may be asked again. Pure."""
    return answer.status == 500 and any(text in answer.message for text in _NO_CHECKPOINT)


def needs_restart(answer: Answer) -> bool:
    """Whether a replica will never read a checkpoint again. Pure."""
    return answer.status == 500 and _TORN_FOR_GOOD in answer.message


class ReplicaApi:
    """Control calls to one replica. `stall_s` limits calls that ask its engine."""

    def __init__(self, client: httpx2.AsyncClient, url: str, *, credentials: Credentials, stall_s: float) -> None:
        self.url = url
        self.no_models = ""
        """Why the last call of `models` has told nothing."""
        self._client = client
        self._credentials = credentials
        self._stall_s = stall_s
        self._in_engine: dict[int, tuple[float, float]] = {}
        """Calls that its engine is busy with: since when, and how long each of them may take if its caller has said."""

    async def call(
        self, method: str, target: str, *, body: bytes | None = None, timeout_s: float | None = None
    ) -> Answer:
        """Send one call and return the answer; a missing one has status None.

        `timeout_s`: what it may take, math.inf for a call whose caller has a limit; else PROXY_CALL_TIMEOUT_S. A POST
        that is given so long may keep the engine from answering for as long. When the token is refused and there is
        another one by now, the call is sent once more.
        """
        token = self._credentials.bearer(self.url)
        answer = await self._call(method, target, token, body, timeout_s)
        if answer.status == 401 and token and self._credentials.has_another_than(token):
            token = self._credentials.bearer(self.url)
            answer = await self._call(method, target, token, body, timeout_s)
        refused = refusal(answer, token_sent=token is not None)
        return answer if refused is None else Answer(answer.status, refused)

    async def _call(
        self, method: str, target: str, token: str | None, body: bytes | None, timeout_s: float | None
    ) -> Answer:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        if body:
            headers["Content-Type"] = "application/json"
        endless = timeout_s == math.inf
        limit_s = self._client.timeout.read if timeout_s is None else timeout_s
        limits = httpx2.Timeout(None, connect=self._stall_s if endless else self._client.timeout.connect)
        if method == "POST":  # loads, pauses and weight calls run in the engine's own loop, and keep it from answering
            self._in_engine[id(headers)] = (time.monotonic(), timeout_s or 0.0)
            if timeout_s is not None:
                # A weight call. Where one fails, vLLM's server closes the connection behind its answer, and the next
                # call on it would be cut off.
                headers["Connection"] = "close"
        try:
            async with asyncio.timeout(None if endless else limit_s):  # of the whole answer, however slowly it comes
                response = await self._client.request(
                    method, self.url + target, content=body, headers=headers, timeout=limits
                )
        except TimeoutError:
            return Answer(None, f"no answer within {limit_s:.3g} s")
        except NO_ANSWER as error:
            said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            return Answer(None, said)
        finally:
            self._in_engine.pop(id(headers), None)
        said = response.text.replace(token, HIDDEN) if token else response.text
        return Answer(response.status_code, said, response.headers.get("content-type", ""))

    def engine_is_busy(self, stall_s: float) -> bool:
        """Whether a call is under way that keeps the engine from answering others, and not for longer than it may.

        `stall_s`: for calls whose callers have set no limit.
        """
        return any(time.monotonic() - began < max(stall_s, may_s) for began, may_s in self._in_engine.values())

    async def is_paused(self, *, timeout_s: float | None = None) -> bool | None:
        """Ask the engine, and so whether it works at all; None when it does not answer in time (else PROXY_STALL_S).

        A server without VLLM_SERVER_DEV_MODE has no such page: it counts as running.
        """
        answer = await self.call("GET", "/is_paused", timeout_s=timeout_s or self._stall_s)
        if answer.status == 404:
            return False
        body = answer.json() if answer.status == 200 else None
        paused = body.get("is_paused") if isinstance(body, dict) else None
        return paused if isinstance(paused, bool) else None

    async def weight_version(self) -> str | None:
        """Return the label of its base weights; None where it does not tell, as older servers."""
        answer = await self.call("GET", "/weight_info", timeout_s=self._stall_s)
        body = answer.json() if answer.status == 200 else None
        label = body.get("weight_version") if isinstance(body, dict) else None
        return label if isinstance(label, str) else None

    async def prove(self, name: str) -> Answer:
        """Send the request of `verify`."""
        return await self.call("POST", "/v1/completions", body=probe_body(name))

    async def load(self, name: str, path: str) -> Answer:
        """Ask for an adapter. `load_inplace` is never used: it changes weights under running rollouts."""
        body = {"lora_name": name, "lora_path": path, "load_inplace": False}
        return await self.call("POST", LOAD_PATH, body=json.dumps(body).encode())

    async def unload(self, name: str) -> Answer:
        """Take an adapter away. Rollouts in flight finish on its weights; 404 means that it was not there."""
        return await self.call("POST", UNLOAD_PATH, body=json.dumps({"lora_name": name}).encode())

    async def health(self, *, timeout_s: float | None = None) -> Answer:
        """Ask whether the server is up."""
        return await self.call("GET", "/health", timeout_s=timeout_s)

    async def models(self) -> list[dict[str, Any]] | None:
        """Return the entries of /v1/models, or None if it did not answer with a list."""
        answer = await self.call("GET", "/v1/models")
        body = answer.json() if answer.status == 200 else None
        data = body.get("data") if isinstance(body, dict) else None
        refused = f": {answer.status} {answer.message}" if answer.status in (401, 403) else ""
        self.no_models = f"/v1/models does not answer{refused}"
        return data if _is_model_list(data) else None

    async def facts(self, models: list[dict[str, Any]]) -> Facts:
        """Ask the replica what it is, and find out what it lacks for its work here."""
        info_answer = await self.call("GET", "/server_info?config_format=json")
        # vLLM registers the route only with the flag: a GET is then 405, else 404. This asks without changing anything.
        load_answer = await self.call("GET", LOAD_PATH)
        info = info_answer.json() if info_answer.status == 200 else None
        config = info.get("vllm_config") if isinstance(info, dict) else None
        return read_facts(
            models,
            config if isinstance(config, dict) else None,
            dev_mode=info_answer.status != 404,
            runtime_lora=load_answer.status != 404,
        )


def _is_model_list(data: Any) -> bool:
    """Whether this is what vLLM lists: the base model at least, and every entry with its name."""
    entries = data if isinstance(data, list) else []
    named = all(isinstance(entry, dict) and isinstance(entry.get("id"), str) for entry in entries)
    return named and bool(base_entries(entries))


def base_entries(models: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return the entries of /v1/models that are the base model."""
    return tuple(entry for entry in models if not entry.get("parent"))


def adapters(models: list[dict[str, Any]]) -> dict[str, str]:
    """Return the adapters among the entries of /v1/models: name -> path."""
    return {str(entry["id"]): str(entry.get("root")) for entry in models if entry.get("parent")}


def read_facts(
    models: list[dict[str, Any]], config: dict[str, Any] | None, *, dev_mode: bool, runtime_lora: bool
) -> Facts:
    """Read `config` (`vllm_config` of /server_info, None if it is not to be had) into Facts. Pure."""
    config = config or {}
    lora, parallel = _section(config, "lora_config"), _section(config, "parallel_config")
    data_parallel = _number(parallel, "data_parallel_size")
    lacks = []
    if not runtime_lora:
        lacks.append(Lack("adapters cannot be loaded: start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1", True))
    if not dev_mode:
        lacks.append(Lack("pause, resume and server_info are closed: start it with VLLM_SERVER_DEV_MODE=1", False))
    loras, cached = _number(lora, "max_loras"), _number(lora, "max_cpu_loras")
    if loras is not None and cached is not None and cached < loras + 2:
        told = f"an unload leaves its adapter in a cache of {cached}, so live ones are read from disk again"
        lacks.append(Lack(f"{told}: start it with --max-cpu-loras {2 * loras}", False))
    if config and not lora:
        lacks.append(Lack("LoRA is off: start it with --enable-lora", True))
    if data_parallel is not None and data_parallel > 1:
        remedy = "start it with --data-parallel-size 1, and one replica for each engine"
        what = f"data_parallel_size is {data_parallel}, and an adapter reaches only one of its engines"
        lacks.append(Lack(f"{what}: {remedy}", True))
    base = base_entries(models)
    return Facts(
        models=base,
        dtype=_text(_section(config, "model_config"), "dtype"),
        max_model_len=_number(base[0], "max_model_len") if base else None,
        max_loras=loras,
        max_cpu_loras=cached,
        max_lora_rank=_number(lora, "max_lora_rank"),
        kv_cache_tokens=_number(_section(config, "cache_config"), "kv_cache_size_tokens"),
        data_parallel_size=data_parallel,
        world_size=_number(parallel, "world_size") or 1,
        instance_id=_text(config, "instance_id"),
        model=_text(_section(config, "model_config"), "model"),
        lacks=tuple(lacks),
    )


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _number(section: dict[str, Any], name: str) -> int | None:
    value = section.get(name)
    return value if isinstance(value, int) else None


def _text(section: dict[str, Any], name: str) -> str | None:
    value = section.get(name)
    return value if isinstance(value, str) else None
