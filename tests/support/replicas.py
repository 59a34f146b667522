"""Replicas to test against: the simulator and real vLLM, each a process of its own behind the same few verbs.

    with SimulatedReplica(max_loras=3) as replica:
        replica.load("policy", directory)
        replica.complete("policy", prompt=[1, 2, 3])

Both kinds start on a free port, wait until /health answers, and end with the `with` block whatever happened in it.
`async with` works too, and starts off the event loop.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx2

from proxy.demo.processes import free_port
from tests.support.tiny_model import CONTEXT_TOKENS, REPO, VLLM_BIN, VOCAB_SIZE, tiny_model

LOGS = REPO / ".vllm" / "logs"

_SIMULATOR_START_S = 15
_VLLM_START_S = 180
_STOP_S = 10
_CALL_S = 60
_BLOCKS = 512
"""KV blocks: 1024 tokens for each of 16 sequences, and 12 MB."""
_POLL_S = 0.02

CONTRACT_SETTINGS: dict[str, Any] = {
    "model": "tiny",
    "max_loras": 3,
    "max_cpu_loras": 4,
    "max_lora_rank": 8,
    "max_model_len": CONTEXT_TOKENS,
    "max_num_seqs": 16,
    "block_size": 32,
    "kv_cache_tokens": 32 * _BLOCKS,
    "vocab_size": VOCAB_SIZE,
    "decode_step_s": 0.0015,
}
"""The simulator's settings that equal how `VllmReplica` starts vLLM."""


LONG: dict[str, Any] = {"max_tokens": 1900, "temperature": 1}
"""A generation that takes many seconds, so that things can happen while it runs."""


class InFlight:
    """A completion that has been sent and whose answer has not been read."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=_CALL_S)
        self._connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        self._answer: httpx2.Response | None = None

    def done(self) -> bool:
        """Tell whether the answer is there."""
        return self._answer is not None or bool(select.select([self._connection.sock], [], [], 0)[0])

    def result(self) -> httpx2.Response:
        """Wait for the answer and return it."""
        if self._answer is None:
            response = self._connection.getresponse()
            self._answer = httpx2.Response(response.status, headers=response.getheaders(), content=response.read())
        return self._answer

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


class Replica:
    """A running replica and the calls that tests make to it. Start one of the two classes below."""

    kind: str
    url: str
    client: httpx2.Client
    base_model: str
    _process: subprocess.Popen[bytes]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self, 'url', 'not started')})"

    def start(self) -> None:
        """Start the process and wait until it is healthy."""
        raise NotImplementedError

    def hang(self) -> None:
        """Stop the engine from doing anything, until `unhang`."""
        raise NotImplementedError

    def unhang(self) -> None:
        """Let the engine go on."""
        raise NotImplementedError

    def kill_engine(self) -> None:
        """Let the engine die, and the server with it."""
        raise NotImplementedError

    def kill(self) -> None:
        """End every process of it at once: connections are cut off without an answer."""
        raise NotImplementedError

    @property
    def max_loras(self) -> int:
        """Its --max-loras."""
        raise NotImplementedError

    def reconfigure(self, *, max_loras: int) -> None:
        """Change its settings for the next start."""
        raise NotImplementedError

    def load(self, name: str, path: Path | str, **fields: Any) -> httpx2.Response:
        """Send a load."""
        return self.client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **fields})

    def unload(self, name: str) -> httpx2.Response:
        """Send an unload."""
        return self.client.post("/v1/unload_lora_adapter", json={"lora_name": name})

    def completion(self, model: str | None = None, **fields: Any) -> httpx2.Response:
        """Send a completion; eight tokens that no end-of-text cuts short, unless `fields` say otherwise."""
        body = {"prompt": [100, 200, 300], "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
        return self.client.post("/v1/completions", json=body if model is None else {"model": model, **body})

    def complete(self, model: str | None = None, **fields: Any) -> list[int]:
        """Send a completion that must work and return its tokens."""
        answer = self.completion(model, return_token_ids=True, **fields)
        assert answer.status_code == 200, answer.text
        tokens: list[int] = answer.json()["choices"][0]["token_ids"]
        return tokens

    def cached_tokens(self, model: str | None = None, **fields: Any) -> int:
        """Send a completion that must work and return how many of its prompt's tokens were cached."""
        answer = self.completion(model, **fields)
        assert answer.status_code == 200, answer.text
        cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached

    @contextmanager
    def in_flight(self, model: str | None = None, *, n: int = 4, **fields: Any) -> Iterator[InFlight]:
        """Keep one request of `n` long sequences in the engine, and abort what is left of it in the end.

        It is sent while the engine is paused, and a stream after it: once that stream's headers are here, the request
        has arrived for certain, however busy the machine is.
        """
        body = {"prompt": [100, 200, 300], "ignore_eos": True, **LONG, "n": n, **fields}
        if model is not None:
            body["model"] = model
        self.client.post("/pause?mode=keep&clear_cache=false").raise_for_status()
        sent = InFlight(self.url, body)
        try:
            with self.opened_stream():
                pass
            self.client.post("/resume").raise_for_status()
            yield sent
        finally:
            with suppress(httpx2.TransportError):
                self.client.post("/abort_requests", json={})
            sent.close()

    @contextmanager
    def opened_stream(self, model: str | None = None, **fields: Any) -> Iterator[httpx2.Response]:
        """Open a streamed completion: once inside, the replica has accepted it."""
        body = {"prompt": [100, 200, 300], "max_tokens": 8, "ignore_eos": True, "stream": True, **fields}
        if model is not None:
            body["model"] = model
        with self.client.stream("POST", "/v1/completions", json=body) as response:
            yield response

    def models(self) -> dict[str, str]:
        """Return the names in /v1/models, in order, with their `root`."""
        return {card["id"]: card["root"] for card in self.client.get("/v1/models").json()["data"]}

    def metric(self, name: str, **labels: str) -> float:
        """Return one value from /metrics, of the first line that has these labels."""
        for line in self.client.get("/metrics").text.splitlines():
            matched = re.fullmatch(r"([^{ ]+)\{(.*)\} (\S+)", line)
            if (
                matched
                and matched[1] == name
                and all(f'{key}="{value}"' in matched[2] for key, value in labels.items())
            ):
                return float(matched[3])
        raise AssertionError(f"{self.url}/metrics has no {name} with {labels}")

    def running(self) -> int:
        """Return how many sequences run."""
        return int(self.metric("vllm:num_requests_running"))

    def answers(self, path: str, *, within_s: float) -> bool:
        """Tell whether a GET is answered at all within the time."""
        try:
            self.client.get(path, timeout=within_s)
        except httpx2.TimeoutException:
            return False
        return True

    def accepts(self) -> bool:
        """Tell whether the port is open."""
        host, port = self.url.removeprefix("http://").split(":")
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return True
        return False

    def is_running(self) -> bool:
        """Tell whether the process is there."""
        return self._process.poll() is None

    def freeze(self) -> None:
        """Stop the server's process until `thaw`: its port takes connections, and nobody answers."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let the server's process go on."""
        self._process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        """Send SIGTERM and return at once."""
        self._process.send_signal(signal.SIGTERM)

    def wait_exit(self, *, limit_s: float) -> int:
        """Wait until the process has ended and return its exit code."""
        return self._process.wait(limit_s)

    def stop(self) -> None:
        """End the process, asking first. Stopping it twice changes nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    def _connect(self, headers: dict[str, str] | None = None) -> None:
        # The environment's HTTP proxy, if any, must not see loopback calls.
        limits = httpx2.Limits(max_connections=256, keepalive_expiry=2)
        self.client = httpx2.Client(base_url=self.url, timeout=_CALL_S, limits=limits, trust_env=False, headers=headers)

    def _wait_healthy(self, *, limit_s: float) -> None:
        def healthy() -> bool:
            assert self._process.poll() is None, f"{self} exited with {self._process.returncode} while starting"
            with suppress(httpx2.TransportError):
                return self.client.get("/health").status_code == 200
            return False

        wait_until(healthy, limit_s=limit_s, what=f"{self} healthy")


class SimulatedReplica(Replica):
    """`python -m proxy.simulator` with the given `SimulatorSettings`."""

    kind = "simulator"

    def __init__(self, *, port: int = 0, cwd: Path = REPO, **settings: Any) -> None:
        self._port = port
        self._cwd = cwd
        self._settings = settings
        self.base_model = settings.get("model", "sim")

    def start(self) -> None:
        """Start on the given port, or on a free one."""
        command = [sys.executable, "-m", "proxy.simulator", "--port", str(self._port)]
        command += ["--settings", json.dumps(self._settings)]
        # In a session of its own: Ctrl-C in the terminal is for those who started it, and they end it in order.
        self._process = subprocess.Popen(
            command, cwd=self._cwd, env={**os.environ, **own_code()}, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdout is not None
        with self._process.stdout as output:
            first_line = output.readline().decode()
        assert "http://" in first_line, f"the simulator did not start: exit code {self._process.wait(_STOP_S)}"
        self.url = "http://" + first_line.strip().rpartition("http://")[2]
        self._port = int(self.url.rpartition(":")[2])
        key = self._settings.get("api_key")
        self._connect({"Authorization": f"Bearer {key}"} if key else None)
        self._wait_healthy(limit_s=_SIMULATOR_START_S)

    def set_faults(self, **faults: Any) -> None:
        """Set faults, as POST /sim/faults takes them."""
        answer = self.client.post("/sim/faults", json=faults)
        assert answer.status_code == 200, answer.text

    def clear_faults(self) -> None:
        """End every fault."""
        self.client.delete("/sim/faults").raise_for_status()

    def state(self) -> dict[str, Any]:
        """Return GET /sim/state."""
        state: dict[str, Any] = self.client.get("/sim/state").json()
        return state

    def hang(self) -> None:
        self.set_faults(hang=True)

    def unhang(self) -> None:
        self.set_faults(hang=False)

    def kill_engine(self) -> None:
        self.set_faults(die=True)

    @property
    def max_loras(self) -> int:
        return int(self._settings["max_loras"])

    def reconfigure(self, *, max_loras: int) -> None:
        self._settings |= {"max_loras": max_loras, "max_cpu_loras": 2 * max_loras}

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(_STOP_S)

    def restart(self) -> None:
        """Start again on the same port, after the process has ended, as an empty replica."""
        self.stop()
        self.start()

    def stop(self) -> None:
        if client := getattr(self, "client", None):
            client.close()
        if process := getattr(self, "_process", None):
            process.kill()
            process.wait(_STOP_S)


class VllmReplica(Replica):
    """`vllm serve` of the tiny model, on the CPU. One needs 1.4 GB and 40 s to start: share it."""

    kind = "vllm"

    def __init__(
        self,
        *,
        model: str = "tiny",
        max_loras: int = 3,
        max_cpu_loras: int = 4,
        flags: bool = True,
        args: tuple[str, ...] = (),
        plugins: Path | None = None,
        cwd: Path = REPO,
    ) -> None:
        self.base_model = model
        self._max_loras = max_loras
        self._max_cpu_loras = max_cpu_loras
        self._flags = flags
        self._args = args
        self._plugins = plugins
        self._cwd = cwd
        self._port = 0

    def start(self) -> None:
        """Start on a free port, and on the same one again; the log is a new file in .vllm/logs."""
        port = self._port = self._port or free_port()
        self.url = f"http://127.0.0.1:{port}"
        LOGS.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix="vllm-", suffix=".log", dir=LOGS, delete=False) as log:
            self.log = Path(log.name)
            self._process = subprocess.Popen(
                self._command(port),
                cwd=self._cwd,
                env=self._environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        key = self._args[self._args.index("--api-key") + 1] if "--api-key" in self._args else None
        self._connect({"Authorization": f"Bearer {key}"} if key else None)
        self._wait_healthy(limit_s=_VLLM_START_S)
        # The worker polls without pause. On few cores it would starve the server in front of it for seconds.
        os.setpriority(os.PRIO_PROCESS, self._worker_pid(), 10)

    def hang(self) -> None:
        os.kill(self._worker_pid(), signal.SIGSTOP)

    def unhang(self) -> None:
        os.kill(self._worker_pid(), signal.SIGCONT)

    def kill_engine(self) -> None:
        os.kill(self._worker_pid(), signal.SIGKILL)

    @property
    def max_loras(self) -> int:
        return self._max_loras

    def reconfigure(self, *, max_loras: int) -> None:
        self._max_loras, self._max_cpu_loras = max_loras, 2 * max_loras

    def kill(self) -> None:
        # Its own session, so this reaches the engine and the worker and nobody else.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_STOP_S)

    def stop(self) -> None:
        if client := getattr(self, "client", None):
            client.close()
        process: subprocess.Popen[bytes] | None = getattr(self, "_process", None)
        if process is None:
            return
        with suppress(subprocess.TimeoutExpired):
            if process.poll() is None:
                process.terminate()
            process.wait(_STOP_S)
        self.kill()

    def _command(self, port: int) -> list[str]:
        options = {
            "--served-model-name": self.base_model,
            "--host": "127.0.0.1",
            "--port": port,
            "--max-lora-rank": 8,
            "--max-loras": self._max_loras,
            "--max-cpu-loras": self._max_cpu_loras,
            "--dtype": "bfloat16",
            "--max-model-len": CONTEXT_TOKENS,
            "--generation-config": "vllm",
            "--logprobs-mode": "processed_logprobs",
            "--max-num-seqs": 16,
            "--block-size": 32,
            "--num-gpu-blocks-override": _BLOCKS,
        }
        switches = ["--enable-lora", "--enforce-eager", "--enable-prompt-tokens-details"]
        flat = [str(part) for option in options.items() for part in option]
        return [str(VLLM_BIN / "vllm"), "serve", str(tiny_model()), *flat, *switches, *self._args]

    def _environment(self) -> dict[str, str]:
        flags = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1"} if self._flags else {}
        plugins = {"PYTHONPATH": str(self._plugins)} if self._plugins else {}
        return {
            **os.environ,
            **flags,
            **plugins,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }

    def _worker_pid(self) -> int:
        return next(pid for pid, name in descendants(self._process.pid) if name.startswith("VLLM::Worker"))


AnyReplica = TypeVar("AnyReplica", bound=Replica)


def own_code() -> dict[str, str]:
    """Return the environment in which a Python started anywhere runs the code of this checkout."""
    return {"PYTHONPATH": str(REPO)}


def wait_until(condition: Callable[[], bool], *, limit_s: float = 10, what: str = "the condition") -> None:
    """Return as soon as `condition()` is true; fail when it is not by the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(_POLL_S)


@contextmanager
def started(replicas: list[AnyReplica]) -> Iterator[list[AnyReplica]]:
    """Start these one after the other, and stop them all."""
    try:
        for replica in replicas:
            replica.start()
        yield replicas
    finally:
        for replica in replicas:
            replica.stop()


def simulators(count: int, **settings: Any) -> AbstractContextManager[list[SimulatedReplica]]:
    """Start several simulators with the same settings, and stop them all."""
    return started([SimulatedReplica(**settings) for _ in range(count)])


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """Yield the processes below `pid` with their names."""
    tree: dict[int, list[tuple[int, str]]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            matched = re.fullmatch(r"(\d+) \((.*)\) \S+ (\d+) .*", stat.read_text().strip(), re.DOTALL)
            if matched:
                tree.setdefault(int(matched[3]), []).append((int(matched[1]), matched[2]))
    todo = [pid]
    while todo:
        for child, name in tree.get(todo.pop(), []):
            yield child, name
            todo.append(child)
