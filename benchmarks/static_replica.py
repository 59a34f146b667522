"""A replica that answers at once, with as many bytes as it was told, so that only the proxy costs anything.

`python -m benchmarks.static_replica PORT [CERTIFICATE KEY]`. POST /set?answer_bytes=N before a measurement; with
`&hold_s=S` a completion takes about so many seconds. Answers name the adapter that was loaded last. A request with
`"stream":true` in its body gets 100 events, one every 10 ms.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import sys
from typing import Any, ClassVar, cast
from urllib.parse import parse_qs

import httptools
import uvloop

EVENTS = 100
EVENT_EVERY_S = 0.01

MODEL = {"id": "sim", "object": "model", "root": "sim", "parent": None, "max_model_len": 65536}
SERVER_INFO = {"vllm_config": {"lora_config": {"max_loras": 8, "max_lora_rank": 64}, "parallel_config": {}}}
PAGES: dict[bytes, Any] = {
    b"/server_info": SERVER_INFO,
    b"/is_paused": {"is_paused": False},
}


def answer_of(size: int, model: str) -> bytes:
    """Return a completion by `model` of about `size` bytes, as a whole HTTP answer."""
    choice = {"index": 0, "text": "", "finish_reason": "length", "token_ids": [7], "logprobs": None}
    body = {"id": "cmpl-1", "object": "text_completion", "model": model, "choices": [choice], "usage": {}}
    choice["text"] = "x" * max(0, size - len(json.dumps(body)))
    return http(json.dumps(body, separators=(",", ":")).encode())


def http(body: bytes) -> bytes:
    """Return `body` as a whole HTTP answer."""
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


class State:
    """What every connection answers."""

    adapters: ClassVar[dict[str, str]] = {}
    """Name -> path, as announced."""
    answer_bytes = 2048
    hold_s = 0.0
    """Seconds that a completion takes on average; half as long at least, one and a half times as long at most."""
    completion = answer_of(2048, "sim")
    event = b'data: {"id":"cmpl-1","choices":[{"index":0,"text":"' + b"x" * 120 + b'"}]}\n\n'


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self.parser = httptools.HttpRequestParser(self)
        self.streaming = False

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.streaming = False
        self.body = b""

    def on_url(self, url: bytes) -> None:
        self.url = url

    def on_body(self, body: bytes) -> None:
        self.streaming |= b'"stream":true' in body  # anywhere: a proxy may have written the body anew
        self.body = body

    def on_message_complete(self) -> None:
        path, _, query = self.url.partition(b"?")
        if self.streaming:
            self._stream(0)
        elif path.startswith(b"/v1/c"):
            if State.hold_s:
                hold_s = State.hold_s * random.uniform(0.5, 1.5)
                asyncio.get_running_loop().call_later(hold_s, self.transport.write, State.completion)
            else:
                self.transport.write(State.completion)
        elif path == b"/set":
            asked = parse_qs(query.decode())
            State.hold_s = float(asked.get("hold_s", ["0"])[0])
            State.answer_bytes = int(asked["answer_bytes"][0])
            State.completion = answer_of(State.answer_bytes, "sim")
            self.transport.write(http(b"{}"))
        elif path == b"/v1/load_lora_adapter" and self.body:
            wanted = json.loads(self.body)
            State.adapters[wanted["lora_name"]] = wanted["lora_path"]
            State.completion = answer_of(State.answer_bytes, wanted["lora_name"])
            self.transport.write(http(b"Success"))
        elif path == b"/v1/unload_lora_adapter":
            State.adapters.pop(json.loads(self.body)["lora_name"], None)
            self.transport.write(http(b"Success"))
        elif path == b"/v1/models":
            found = [{"id": name, "root": root, "parent": "sim"} for name, root in State.adapters.items()]
            self.transport.write(http(json.dumps({"object": "list", "data": [MODEL, *found]}).encode()))
        else:
            self.transport.write(http(json.dumps(PAGES.get(path, {})).encode()))

    def _stream(self, sent: int) -> None:
        if self.transport.is_closing():
            return
        if sent == 0:
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            self.transport.write(head)
        if sent == EVENTS:
            self.transport.write(b"0\r\n\r\n")
            return
        self.transport.write(b"%x\r\n%b\r\n" % (len(State.event), State.event))
        asyncio.get_running_loop().call_later(EVENT_EVERY_S, self._stream, sent + 1)


async def main() -> None:
    """Serve until killed."""
    context = None
    if len(sys.argv) > 2:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(sys.argv[2], sys.argv[3])
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Connection, "127.0.0.1", int(sys.argv[1]), ssl=context, backlog=2048)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
