"""What reads bytes from outside, and what must hold for all of them. A target that raises has found a defect."""

from __future__ import annotations

import asyncio
import io
import json
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httptools
import httpx2
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from benchmarks.fuzz.inputs import answers, cuts, json_bytes, pieces, requests, safetensors
from benchmarks.fuzz.served import Peer, body_of, connection_to
from proxy.artifacts.bucket import BucketFolder, HubFile
from proxy.artifacts.check import inspect
from proxy.artifacts.checkpoint import INDEX, MODEL_CONFIG, differences, read_checkpoint
from proxy.artifacts.hub_listing import HubAccess, Landing
from proxy.artifacts.manifest import MANIFEST_FILE, parse_manifest, verify_manifest
from proxy.artifacts.weights import read_header
from proxy.auth import Credentials
from proxy.contract import LoadRequest, ReloadRequest, version_of
from proxy.controlplane.announcing import inspect as look_at
from proxy.controlplane.announcing import refuse_early
from proxy.controlplane.replica_api import ReplicaApi, adapters
from proxy.dataplane.budget import Account, Budget
from proxy.dataplane.errors import UpstreamError
from proxy.dataplane.exchange import Exchange
from proxy.dataplane.headers import to_client, to_replica
from proxy.dataplane.outbox import Outbox
from proxy.dataplane.pool import Pool
from proxy.dataplane.upstream import request_head
from proxy.dataplane.verdict import judge
from proxy.errors import ApiError, ArtifactError
from proxy.routing.load import usage_of
from proxy.routing.request_key import read_model, read_request, with_model
from proxy.settings import base_url
from trainer_client.errors import ProxyError
from trainer_client.proxy_api import ProxyApi


@dataclass(frozen=True)
class Target:
    """One reader of bytes, and the inputs that it gets."""

    name: str
    inputs: st.SearchStrategy[Any]
    check: Callable[[Any], None]
    """Raises whatever should not come out of the reader; errors of its own it has caught."""


# From replicas


def _outcome(
    parts: list[bytes], loop: asyncio.AbstractEventLoop
) -> tuple[int, list[tuple[bytes, bytes]], bytes] | None:
    """Return the answer that a connection makes of these packets, followed by its end; None if there is none."""
    account = Account(Budget(1 << 20))
    exchange = Exchange(lambda: None, lambda: None, account, loop)
    try:
        for part in parts:
            exchange.feed(part)
        exchange.closed(None)
    except UpstreamError as error:
        exchange.fail(error)
    account.close()
    # Its waits end at once here, since everything has come: a coroutine that would wait is one that hangs.
    try:
        _at_once(exchange.head())
        body = _at_once(exchange.read(1 << 20))
    except UpstreamError:
        return None
    assert body is not None
    return exchange.status, exchange.headers, body


def _at_once(work: Any) -> Any:
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    work.close()
    raise AssertionError("it waits for something that will never come")


_LOOP = asyncio.new_event_loop()


def _http_answer(given: tuple[bytes, list[int]]) -> None:
    content, lengths = given
    whole, in_packets = _outcome([content], _LOOP), _outcome(pieces(content, lengths), _LOOP)
    if whole is not None:
        assert in_packets == whole, "packets change the answer"
    if in_packets is not None:
        status, headers, body = in_packets
        assert 200 <= status <= 999 and sum(map(len, body.split())) <= len(content)
        to_client(headers, replica=0, route="affinity", weights=("x", None))
        judge(status, body, client_aborted=False)


def _answer_body(body: bytes) -> None:
    usage = usage_of(body)
    for count in (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens):
        assert count is None or float(count) >= 0
    judge(200, body, client_aborted=False)


class _Says(httpx2.AsyncBaseTransport, httpx2.BaseTransport):
    """Answers every call with the same content."""

    def __init__(self) -> None:
        self.status, self.content, self.headers = 200, b"", [(b"content-type", b"application/json")]

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        stream = httpx2.ByteStream(self.content)
        return httpx2.Response(self.status, stream=stream, headers=self.headers, request=request)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        return self.handle_request(request)


_SAYS = _Says()
_REPLICA = ReplicaApi(
    httpx2.AsyncClient(transport=_SAYS), "http://replica", credentials=Credentials(lambda: None), stall_s=1
)


def _control_answer(given: tuple[int, bytes]) -> None:
    _SAYS.status, _SAYS.content = given

    async def ask() -> None:
        models = await _REPLICA.models()
        if models is not None:
            adapters(models)
        await _REPLICA.facts(models or [])
        await _REPLICA.is_paused()
        await _REPLICA.weight_version()
        answer = await _REPLICA.load("p", "/p")
        assert answer.ok in (True, False) and len(answer.message) >= 0

    _LOOP.run_until_complete(ask())


# From clients


class _Replica:
    """Reads requests as uvicorn does, and keeps those that came whole: method, URL, headers and body."""

    def __init__(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.url, self.body, self.headers = b"", b"", list[tuple[bytes, bytes]]()
        self.whole: list[tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes]] = []

    def on_message_begin(self) -> None:
        self.url, self.body, self.headers = b"", b"", []

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.whole.append((self.parser.get_method(), self.url, self.headers, self.body))


class _Served:
    """Takes what arrives on one connection to the proxy's server, and keeps the requests that came whole."""

    def __init__(self) -> None:
        self.whole: list[tuple[list[tuple[bytes, bytes]], bytes]] = []

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (body := await body_of(receive)) is None:
            return
        self.whole.append((scope["headers"], body))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def take(self, parts: list[bytes]) -> None:
        """Take `parts`, one a turn. Each request is answered once, and at most one more is refused."""
        state, peer = ServerState(), Peer()
        connection = connection_to(self.app, state)
        connection.connection_made(peer)
        for part in parts:
            connection.data_received(part)
            for _ in range(4):
                await asyncio.sleep(0)
        connection.connection_lost(None)
        await asyncio.gather(*state.tasks)
        assert not state.connections
        served, refused = peer.said.count(b"HTTP/1.1 204 "), peer.said.count(b"HTTP/1.1 4")
        assert served == len(self.whole) and refused <= 1 and (peer.closed or not refused)
        assert peer.said.count(b"HTTP/1.1 ") == served + refused + peer.said.count(b"HTTP/1.1 100 ")


_POOL = Pool("http://replica:8000/base", limit=1, connect_timeout_s=1, outbox=Outbox(_LOOP))


def _http_request(given: tuple[bytes, list[int]]) -> None:
    client = _Served()
    _LOOP.run_until_complete(client.take(pieces(*given)))
    for headers, body in client.whole:
        forwarded = to_replica(headers)
        replica = _Replica()
        replica.parser.feed_data(request_head(_POOL, "ours", "POST", "/v1/completions", forwarded, len(body)) + body)
        assert len(replica.whole) == 1, "a replica would see more than one request"
        method, url, seen, got = replica.whole[0]
        assert (method, url, got) == (b"POST", b"/base/v1/completions", body)
        names = [name for name, _ in seen]
        for once in (b"content-length", b"host", b"authorization"):
            assert names.count(once) == 1, once
        assert not {b"transfer-encoding", b"connection", b"upgrade", b"expect"} & set(names)
        assert dict(seen)[b"authorization"] == b"Bearer ours"


def _generation(body: bytes) -> None:
    read_model(body)
    try:
        key = read_request(body)
    except ApiError as error:
        assert error.status == 400
        return
    sent = with_model(body, key, "other~0000002a")
    with suppress(ValueError, RecursionError):  # what Python cannot read, a number of 5,000 digits, a replica judges
        before, after = json.loads(body), json.loads(sent)
        assert before["model"] == key.model, "the replica would see another model"
        assert json.dumps(after) == json.dumps(before | {"model": "other~0000002a"}), "more than the model has changed"


def _control_request(body: bytes) -> None:
    for shape in (LoadRequest, ReloadRequest):
        with suppress(ValueError):
            wanted = shape.model_validate_json(body)
            if isinstance(wanted, LoadRequest):
                _announced(wanted)


def _announced(wanted: LoadRequest) -> None:
    version_of(wanted.lora_name)
    if refuse_early(wanted, base_models=("base",), roots=("/tmp",)) is None:
        with suppress(ApiError):
            look_at(wanted, max_lora_rank=8)


def _url(text: str) -> None:
    try:
        told = base_url(text)
    except ValueError:
        return
    assert told.startswith(("http://", "https://")) and "@" not in told.split("/")[2]
    Pool(told, limit=1, connect_timeout_s=1, outbox=Outbox(_LOOP))


# From storage

_CONFIG = b'{"peft_type":"LORA","r":2,"lora_alpha":4,"target_modules":["q_proj"]}'
_FOLDER = tempfile.TemporaryDirectory(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
_DIRECTORY = Path(_FOLDER.name)


def _safetensors(content: bytes) -> None:
    with suppress(ArtifactError):
        read_header(io.BytesIO(content), source="file")
    with suppress(ArtifactError):
        inspect(_CONFIG, io.BytesIO(content), source="file", max_lora_rank=8)


_NAME_OF_WEIGHTS = b"base_model.model.model.layers.10.self_attn.q_proj.lora_A.weight"
_HEADER = b'{"%b":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}' % _NAME_OF_WEIGHTS
_WEIGHTS = struct.pack("<Q", len(_HEADER)) + _HEADER + bytes(16)


def _adapter_config(content: bytes) -> None:
    with suppress(ArtifactError):
        inspect(content, io.BytesIO(_WEIGHTS), source="file", max_lora_rank=8)


def _checkpoint(given: tuple[bytes, bytes, bytes]) -> None:
    config, index, weights = given
    for name, content in ((MODEL_CONFIG, config), (INDEX, index), ("model.safetensors", weights)):
        (_DIRECTORY / name).write_bytes(content)
    with suppress(ArtifactError):
        found = read_checkpoint(_DIRECTORY)
        assert list(differences(found, found)) == []
        (_DIRECTORY / MODEL_CONFIG).write_bytes(b'{"architectures":["Other"]}')
        list(differences(found, read_checkpoint(_DIRECTORY)))


def _manifest(content: bytes) -> None:
    (_DIRECTORY / MANIFEST_FILE).write_bytes(content)
    with suppress(ArtifactError):
        manifest = parse_manifest(content, source="file")
        verify_manifest(_DIRECTORY, manifest.announcement(), manifest.name)


_HUB = HubAccess("http://hub", {})
_FILES = (HubFile("adapter_config.json", 5, "a" * 64), HubFile("x"))


def _hub_answer(given: list[tuple[int, list[tuple[str, bytes]], bytes]]) -> None:
    landing = Landing(BucketFolder("me/runs", "lora"), _FILES, hub=_HUB, deadline=100, clock=lambda: 1.0)
    with suppress(ArtifactError):
        for status, headers, content in given:
            landing.request()
            landing.learn(
                httpx2.Response(status, headers=[(name.encode(), value) for name, value in headers], content=content)
            )
            assert 0 <= landing.pause_s <= 100


# From the proxy, for the trainer

_API = ProxyApi("http://proxy", timeout_s=1, connect_timeout_s=1, retry_timeout_s=0)
_API._http = httpx2.Client(transport=_SAYS)


def _proxy_answer(given: tuple[int, bytes, bytes]) -> None:
    _SAYS.status, _SAYS.content = given[:2]
    _SAYS.headers = [(b"content-type", b"application/json"), (b"retry-after", given[2]), (b"x-proxy-error", b"x")]
    asked: list[Callable[[], Any]] = [
        lambda: _API.load(LoadRequest(lora_name="p", lora_path="/p")),
        lambda: _API.status("p"),
        lambda: _API.unload("p"),
        _API.policies,
        _API.replicas,
        _API.stats,
        _API.resume,
    ]
    with suppress(ProxyError):
        asked[len(given[1]) % len(asked)]()


_DIGEST = b'"%b"' % (b"a" * 64)
_STATUSES = st.sampled_from([200] * 6 + [201, 204, 301, 400, 401, 403, 404, 409, 429, 500, 502, 503, 504])
_NUMBERS = st.sampled_from(
    [b"", b"1", b"-1", b"1.5", b"9" * 400, b"9" * 5000, b"\xb2", b"Wed, 21 Oct 2026 07:28:00 GMT"]
)
_HUB_WORDS = st.sampled_from([b"a" * 64, b'"api";r=0;t=99', b'"api";r=0;t=' + b"9" * 400, b"RepoNotFound"])
_HUB_HEADERS = st.sampled_from(["Retry-After", "RateLimit", "X-Xet-Hash", "X-Linked-Size", "X-Error-Code"])
_COUNT, _NAME, _PATH, _YES = (
    [b"1", b"2", b"4096"],
    [b'"p"', b'"p-v1"'],
    [b'"/tmp/p"', b'"/a\\u0000b"'],
    [b"true", b"false"],
)
_FILES_TOLD = [
    b"[]",
    b'[{"path":"a\\u0000b","size":1,"sha256":"b"}]',
    b'[{"path":"../%b","size":1,"sha256":"b"}]' % (b"a" * 300),
]
_POLICIES = [b'{"run":"r","version":1,"step":0,"digest":%b,"files":%b}' % (_DIGEST, files) for files in _FILES_TOLD]
_REPLICAS = [b"[]", b'[{"replica":"http://a","status":"failed","attempts":1,"seconds":0.1,"message":"no"}]']
_ENTRIES = json_bytes(
    type=[b'"file"'], path=[b'"lora/adapter_config.json"', b'"lora/x"'], size=[b"5"], xetHash=[_DIGEST]
)

TARGETS = (
    Target("HTTP answers of replicas", st.tuples(answers, cuts()), _http_answer),
    Target(
        "answers to rollouts",
        json_bytes(
            id=_NAME,
            choices=[b'[{"finish_reason":"stop"}]', b'[{"finish_reason":"abort"}]'],
            usage=[
                b'{"prompt_tokens":3,"completion_tokens":%b}' % count for count in (b"7", b"9" * 400, b"-1", b"1e9")
            ],
        ),
        _answer_body,
    ),
    Target(
        "answers to control calls",
        st.tuples(
            _STATUSES,
            json_bytes(
                data=[b'[{"id":"base"}]', b'[{"id":"base"},{"id":"p~0000002a","root":"/p","parent":"base"}]'],
                vllm_config=[
                    b'{"lora_config":{"max_loras":2,"max_cpu_loras":3},"parallel_config":{"data_parallel_size":2}}',
                    b'{"model_config":{"dtype":"x"},"cache_config":[],"instance_id":"i"}',
                ],
                is_paused=_YES,
                weight_version=[b'"1 p-v1"'],
                success=_YES,
                error=[b'{"message":"no"}', b'"no"', b"[]"],
                detail=[b'"no"', b"{}"],
            ),
        ),
        _control_answer,
    ),
    Target("HTTP requests of clients", st.tuples(requests, cuts()), _http_request),
    Target(
        "bodies of rollouts",
        json_bytes(
            **{"model": _NAME, "mod\\u0065l": _NAME},
            prompt=[b"[1,2,3]", b"[[1],[2]]", b'["a","b"]', b'"a"', b'["\\ud800"]'],
            messages=[b'[{"role":"user","content":"x"}]'],
            stream=_YES,
            n=_COUNT,
            max_tokens=_COUNT,
            sampling_params=[b'{"n":2,"max_tokens":3}', b'{"n":[[[1e999]]]}'],
        ),
        _generation,
    ),
    Target(
        "bodies of control calls",
        json_bytes(
            lora_name=[*_NAME, b'"r-v1-aaaaaaaa"', b'"p-v%b"' % (b"1" * 5000)],
            lora_path=_PATH,
            load_inplace=[b"false"],
            name=_NAME,
            path=_PATH,
            policy=[*_POLICIES, b"null"],
        ),
        _control_request,
    ),
    Target("URLs", st.text(max_size=20).map("http://".__add__) | st.text("htps:/[]@%.1a?#\\", max_size=16), _url),
    Target("weights (safetensors)", safetensors, _safetensors),
    Target(
        "adapter_config.json",
        json_bytes(
            r=_COUNT,
            lora_alpha=[b"2", b"0.5"],
            peft_type=[b'"LORA"'],
            target_modules=[b'["q_proj"]', b'"all-linear"'],
            rank_pattern=[b'{"q_proj":2}', b'{"([a-z0-9_.]+)+!":4}', b'{".*.*.*.*.*.*.*.*.*!":4}', b'{"[":1}', b"{}"],
            modules_to_save=[b"null", b"[]", b'["lm_head"]'],
            init_lora_weights=[b"true", b'"pissa"'],
            base_model_name_or_path=_NAME,
        ),
        _adapter_config,
    ),
    Target(
        "checkpoints",
        st.tuples(
            json_bytes(architectures=[b'["A"]', b'"A"', b"[1]"]),
            json_bytes(weight_map=[b'{"w":"model.safetensors"}', b'{"w":1}', b'{"w":".."}', b'{"w":"a\\u0000"}']),
            safetensors,
        ),
        _checkpoint,
    ),
    Target(
        "manifests",
        json_bytes(
            run=_NAME,
            version=_COUNT,
            step=_COUNT,
            name=_NAME,
            base_model=_NAME,
            digest=[_DIGEST],
            config_digest=[_DIGEST],
            created=[b'"2026-01-01T00:00:00Z"'],
            files=_FILES_TOLD,
        ),
        _manifest,
    ),
    Target(
        "answers of the Hub",
        st.lists(
            st.tuples(
                _STATUSES,
                st.dictionaries(_HUB_HEADERS, _NUMBERS | _HUB_WORDS, max_size=3).map(lambda told: list(told.items())),
                st.lists(_ENTRIES, max_size=3).map(lambda entries: b"[" + b",".join(entries) + b"]"),
            ),
            min_size=1,
            max_size=3,
        ),
        _hub_answer,
    ),
    Target(
        "answers of the proxy",
        st.tuples(
            _STATUSES,
            json_bytes(
                policy=_NAME,
                status=[b'"live"', b'"failed"'],
                seconds=[b"0.1"],
                replicas=_REPLICAS,
                policies=[b"[]"],
                slots=[b"null", b"3"],
                error=[b'{"message":"no"}', b"{}"],
                detail=[b'"no"', b"[]"],
            ),
            _NUMBERS,
        ),
        _proxy_answer,
    ),
)
