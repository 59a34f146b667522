"""A replica that answers garbage: a small fake, since the simulator only errs as vLLM does. It knows loads, not tokens.

with FlakyReplica() as replica:
    replica.spoil("GET /v1/models", "html")
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

GARBAGE: dict[str, tuple[int, bytes]] = {
    "html": (200, b"<html>a gateway says hello</html>"),
    "empty": (200, b""),
    "null": (200, b"null"),
    "list": (200, b"[1]"),
    "object": (200, b'{"data": "x", "world_size": "two", "vllm_config": 3}'),
    "odd entries": (200, b'{"data": ["x", 3, {"id": 5}, {}], "vllm_config": {"lora_config": 1}}'),
    "no base model": (200, b'{"data": [], "vllm_config": {"parallel_config": {"world_size": "x"}}}'),
    "binary": (200, b"\xff\xfe\x00\x01"),
    "refuses": (500, b'{"error": {"message": "no", "type": "x", "param": null, "code": 500}}'),
    "moved": (307, b""),
    "refused": (401, b""),
    "barred": (403, b""),
}
"""What it can answer instead; besides, "hangs" and "cuts" (half an answer, then the end)."""


class FlakyReplica:
    """Answers like a healthy replica, except for what was spoiled."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.adapters: dict[str, str] = {}
        self.calls: list[str] = []
        self.spoiled: dict[str, str] = {}
        self._healed = threading.Event()
        replica = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                replica._answer(self, {})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"] or 0))
                replica._answer(self, json.loads(body or b"{}"))

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((host, 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.heal()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def spoil(self, call: str, how: str) -> None:
        """Answer `call` ("METHOD /path") with one of GARBAGE, or let it hang or cut it off."""
        self._healed.clear()
        self.spoiled[call] = how

    def heal(self) -> None:
        """Answer everything as it should be."""
        self.spoiled.clear()
        self._healed.set()

    def _answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        call = f"{handler.command} {handler.path.partition('?')[0]}"
        self.calls.append(call)
        how = self.spoiled.get(call)
        if how == "hangs":
            self._healed.wait(15)
            handler.close_connection = True
            return
        status, content = GARBAGE[how] if how in GARBAGE else self._right(call, body)
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        if status == 307:
            handler.send_header("Location", "http://127.0.0.1:9/elsewhere")
        handler.send_header("Content-Length", str(len(content) + (10 if how == "cuts" else 0)))
        handler.end_headers()
        handler.wfile.write(content)
        handler.close_connection = how == "cuts"

    def _right(self, call: str, body: dict[str, Any]) -> tuple[int, bytes]:
        match call:
            case "GET /v1/models":
                entries = [{"id": "sim", "root": "sim", "parent": None, "max_model_len": 4096}]
                entries += [{"id": name, "root": root, "parent": "sim"} for name, root in self.adapters.items()]
                return 200, json.dumps({"object": "list", "data": entries}).encode()
            case "GET /server_info":
                config = {"lora_config": {"max_loras": 4, "max_lora_rank": 8}, "parallel_config": {"world_size": 1}}
                return 200, json.dumps({"vllm_config": config}).encode()
            case "GET /is_paused":
                return 200, b'{"is_paused": false}'
            case "GET /get_world_size":
                return 200, b'{"world_size": 1}'
            case "POST /v1/load_lora_adapter":
                self.adapters[body["lora_name"]] = body["lora_path"]
                return 200, b"Success"
            case "POST /v1/unload_lora_adapter":
                return (200, b"Success") if self.adapters.pop(body["lora_name"], None) else (404, b"not found")
            case "GET /v1/load_lora_adapter":
                return 405, b'{"detail": "Method Not Allowed"}'
            case "POST /v1/completions":
                return 200, json.dumps({"choices": [{"token_ids": [1, 2, 3]}]}).encode()
            case _:
                return 200, b"{}"
