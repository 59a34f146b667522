"""A vLLM server as far as adapters go, in memory: what it registers, what its KV was made with, and answers that a
test chooses. It serialises calls by name, as vLLM does: one whose caller has given up still comes before the next.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from proxy.contract import LOAD_PATH, UNLOAD_PATH
from proxy.controlplane.answer import Answer
from proxy.controlplane.replica_api import ReplicaApi

BASE = "base"


@dataclass(frozen=True)
class Adapter:
    """One registered adapter."""

    path: str
    content: int
    """Stands for its weights: what the files held when it was read."""
    by_hand: bool = False
    """Somebody else than the proxy has loaded it."""


class Reply(Enum):
    """How a server treats one load or unload."""

    DONE = "done"
    LATE = "late"
    TORN = "torn"
    REFUSED = "refused"
    LOST_AFTER = "done, and the answer is lost"
    LOST_BEFORE = "lost on its way"
    LOST_EARLY = "the answer is lost, and it is done later"


@dataclass(eq=False)
class Call:
    """A load or unload that has arrived and has not been done."""

    name: str
    path: str | None
    """None: an unload."""
    answer: asyncio.Future[Answer]


class ModelReplica:
    """One server. `files` (path -> content) is what it sees on disk; `alarm` is told of a broken promise, and
    `on_unload` of every unload that arrives."""

    def __init__(
        self,
        url: str,
        *,
        max_loras: int,
        files: dict[str, int],
        alarm: Callable[[str], None],
        on_unload: Callable[[ModelReplica, str], None],
    ) -> None:
        self.url = url
        self.max_loras = max_loras
        self.adapters: dict[str, Adapter] = {}
        self.kv: dict[tuple[str, str], int] = {}
        """(name, path) -> the content that computed what is cached under them."""
        self.alive = True
        self.hung = False
        """Its engine does nothing; what needs no engine is answered."""
        self.held = False
        """Loads and unloads wait for `reply`; else they are answered at once."""
        self.blind = False
        """It does not see any files yet."""
        self.slow = False
        """Lists wait for `answer_lists`."""
        self.spoils = False
        """Its probes show NaN."""
        self.script: deque[Reply] = deque()
        """How the next calls are treated; then DONE."""
        self.queue: list[Call] = []
        self.instance = 1
        self.meddled = 0
        """Counts what the proxy could not know of: changes by hand, and restarts."""
        self.listed = 0
        """`meddled` as it was when the last list that the proxy has read was made."""
        self._files = files
        self._alarm = alarm
        self._on_unload = on_unload
        self._lists: list[tuple[asyncio.Future[Answer], Answer]] = []
        self._waiting: list[asyncio.Future[Answer]] = []

    @property
    def unseen(self) -> bool:
        """Whether something has happened to it since it was last looked at."""
        return self.meddled != self.listed or not self.alive

    # What the proxy asks

    async def take(self, method: str, target: str, body: bytes | None) -> Answer:
        """Answer one call."""
        if not self.alive:
            return _lost("connection refused")
        sent: dict[str, Any] = json.loads(body) if body else {}
        match method, target.partition("?")[0]:
            case "POST", path if path == LOAD_PATH:
                return await self._arrived(Call(sent["lora_name"], sent["lora_path"], _future()))
            case "POST", path if path == UNLOAD_PATH:
                return await self._arrived(Call(sent["lora_name"], None, _future()))
            case "POST", "/v1/completions":
                return await self._engine(self._probed(sent["model"]))
            case "GET", "/v1/models":
                return await self._list()
            case "GET", "/is_paused":
                return await self._engine(Answer(200, '{"is_paused": false}'))
            case "GET", "/server_info":
                lora = {"max_loras": self.max_loras, "max_cpu_loras": 2 * self.max_loras, "max_lora_rank": 8}
                config = {"instance_id": f"{self.url}#{self.instance}", "lora_config": lora}
                return Answer(200, json.dumps({"vllm_config": config}))
            case "GET", "/health":
                return Answer(200, "")
        return Answer(405, "")

    async def _arrived(self, call: Call) -> Answer:
        self.queue.append(call)
        if call.path is None:
            self._on_unload(self, call.name)
        else:
            self._count_registered()
        if not self.held and not self.hung:
            self.reply(call, self.script.popleft() if self.script else Reply.DONE)
        return await call.answer

    def _count_registered(self) -> None:
        ours = {name for name, adapter in self.adapters.items() if not adapter.by_hand}
        asked = {call.name for call in self.queue if call.path is not None}
        if len(ours | asked) > self.max_loras:
            self._alarm(f"P4: {self.url} has {self.max_loras} slots, and holds or is asked for {sorted(ours | asked)}")

    async def _engine(self, answer: Answer) -> Answer:
        if not self.hung:
            return answer
        self._waiting.append(never := _future())
        return await never

    async def _list(self) -> Answer:
        entries: list[dict[str, Any]] = [{"id": BASE, "root": BASE, "parent": None, "max_model_len": 2048}]
        entries += [{"id": name, "root": a.path, "parent": BASE} for name, a in self.adapters.items()]
        answer = Answer(200, json.dumps({"data": entries}))
        self._lists.append((arrived := _future(), answer))
        if not self.slow:
            self.answer_lists()
        return await arrived

    def _probed(self, name: str) -> Answer:
        adapter = self.generate(name)
        if adapter is None:
            return Answer(404, json.dumps({"error": {"message": f"The model `{name}` does not exist."}}))
        value = float("nan") if self.spoils else -1.0
        return Answer(200, json.dumps({"choices": [{"prompt_logprobs": [None, {"1": {"logprob": value}}]}]}))

    def was_listed(self, meddled: int) -> None:
        """Note that the proxy is about to read a list that was made when `meddled` was this."""
        self.listed = meddled

    # What the test decides

    def reply(self, call: Call, how: Reply) -> None:
        """Treat a waiting call in this way."""
        match how:
            case Reply.DONE:
                self._do(call)
            case Reply.LOST_AFTER:
                _answer(call.answer, _lost("connection reset"))
                self._do(call)
            case Reply.LOST_EARLY:
                _answer(call.answer, _lost("connection reset"))
            case Reply.LOST_BEFORE:
                self.queue.remove(call)
                _answer(call.answer, _lost("connection reset"))
            case _:
                self._do_earlier(call)
                self.queue.remove(call)
                _answer(call.answer, _refusal(how, call))

    def do_given_up(self) -> None:
        """Do all that waits to be done and whose caller has left."""
        for call in [call for call in self.queue if call.answer.done()]:
            if call in self.queue:
                self._do(call)

    def _do_earlier(self, call: Call) -> None:
        for earlier in [other for other in self.queue[: self.queue.index(call)] if other.name == call.name]:
            self._do_one(earlier)

    def _do(self, call: Call) -> None:
        self._do_earlier(call)
        self._do_one(call)

    def _do_one(self, call: Call) -> None:
        self.queue.remove(call)
        _answer(call.answer, self._load(call.name, call.path) if call.path is not None else self._unload(call.name))

    def _load(self, name: str, path: str) -> Answer:
        if name in self.adapters:
            return _failure(400, f"The lora adapter '{name}' has already been loaded.")
        if self.blind or path not in self._files:
            return _failure(404, f"Loading lora {name} failed: No adapter found for {path}")
        self.adapters[name] = Adapter(path, self._files[path])
        self._count_registered()
        return Answer(200, f"Success: LoRA adapter '{name}' added successfully.")

    def _unload(self, name: str) -> Answer:
        if self.adapters.pop(name, None) is None:
            return _failure(404, f"The lora adapter '{name}' cannot be found.")
        return Answer(200, f"Success: LoRA adapter '{name}' removed successfully.")

    def answer_lists(self) -> None:
        """Let the lists that were asked for arrive, as they were made."""
        for arrived, answer in self._lists:
            _answer(arrived, answer)
        self._lists.clear()

    def generate(self, name: str) -> Adapter | None:
        """Run a rollout: return what served it, or None (404). Its KV stays under the adapter's name and path."""
        adapter = self.adapters.get(name)
        if adapter is not None:
            self.kv.setdefault((name, adapter.path), adapter.content)
        return adapter

    def load_by_hand(self, name: str, path: str) -> None:
        """Load, as somebody else."""
        if name not in self.adapters:
            self.adapters[name] = Adapter(path, self._files[path], by_hand=True)
            self.meddled += 1

    def unload_by_hand(self, name: str) -> None:
        """Unload, as somebody else."""
        if self.adapters.pop(name, None) is not None:
            self.meddled += 1

    def die(self) -> None:
        """End, with all that was asked unanswered."""
        self.alive = self.hung = False
        self.adapters, self.kv = {}, {}
        self.meddled += 1
        waiting = [call.answer for call in self.queue] + [arrived for arrived, _ in self._lists] + self._waiting
        for future in waiting:
            _answer(future, _lost("connection reset"))
        self.queue.clear()
        self._lists.clear()
        self._waiting.clear()

    def restart(self) -> None:
        """Come back, or be replaced by a new process in no time, empty."""
        self.die()
        self.alive = True
        self.instance += 1

    def recover(self) -> None:
        """End every fault, and do what has waited."""
        if not self.alive:
            self.restart()
        self.hung = self.held = self.blind = self.slow = self.spoils = False
        self.script.clear()
        self.answer_lists()
        for call in list(self.queue):
            if call in self.queue:
                self._do(call)

    def __repr__(self) -> str:
        state = "dead" if not self.alive else "hung" if self.hung else "alive"
        return f"<ModelReplica {self.url} {state} {sorted(self.adapters)} waiting={[call.name for call in self.queue]}>"


class ModelApi(ReplicaApi):
    """The real client of a replica, but for the wire."""

    def __init__(self, server: ModelReplica, *, call_timeout_s: float, stall_s: float) -> None:
        self.url = server.url
        self.no_models = ""
        self._server = server
        self._call_timeout_s = call_timeout_s
        self._stall_s = stall_s
        self._in_engine = {}

    async def call(
        self, method: str, target: str, *, body: bytes | None = None, timeout_s: float | None = None
    ) -> Answer:
        """Ask the server; without an answer in time its status is None."""
        loop = asyncio.get_running_loop()
        if method == "POST":
            self._in_engine[id(marker := object())] = (loop.time(), timeout_s or 0.0)
        try:
            async with asyncio.timeout(timeout_s or self._call_timeout_s):
                return await self._server.take(method, target, body)
        except TimeoutError:
            return _lost("timed out")
        finally:
            if method == "POST":
                del self._in_engine[id(marker)]

    async def models(self) -> list[dict[str, Any]] | None:
        """As the real one; the server is told when its list is read, which is in the turn after this returns."""
        made = self._server.meddled
        models = await super().models()
        if models is not None:
            asyncio.get_running_loop().call_soon(self._server.was_listed, made)
        return models

    def engine_is_busy(self, stall_s: float) -> bool:
        """As the real one, by the loop's clock."""
        now = asyncio.get_running_loop().time()
        return any(now - began < max(stall_s, may_s) for began, may_s in self._in_engine.values())


def _future() -> asyncio.Future[Answer]:
    return asyncio.get_running_loop().create_future()


def _answer(future: asyncio.Future[Answer], answer: Answer) -> None:
    """Answer, if somebody still waits."""
    if not future.done():
        future.set_result(answer)


def _lost(why: str) -> Answer:
    return Answer(None, why)


def _failure(status: int, message: str) -> Answer:
    return Answer(status, json.dumps({"error": {"message": message, "code": status}}))


def _refusal(how: Reply, call: Call) -> Answer:
    if call.path is None:
        return _failure(500, "Internal Server Error")
    match how:
        case Reply.LATE:
            return _failure(404, f"Loading lora {call.name} failed: No adapter found for {call.path}")
        case Reply.TORN:
            return _failure(500, f"Call to add_lora method failed: {call.path} doesn't contain tensors")
        case _:
            return _failure(500, "Call to add_lora method failed: Worker failed with error 'rank too high'")
