"""Bad input: JSON and HTTP that are almost right, by Hypothesis, and the same with bytes lost, put in or changed."""

from __future__ import annotations

import json
import struct
from random import Random
from typing import Any

from hypothesis import strategies as st

_ATOMS = (
    b"null true false 0 1 -1 7 1.5 -0.0 1e999 -1e999 NaN Infinity 9223372036854775808 01 +1 1e 0x1 tru "
    b'[] {} [1] [[1]] "" "a" ".." "../x" "/" "\\u0000" "\\ud800" "\\ud83d\\ude00" "\xff" "~" "/tmp"'
).split()
_BOMBS = [
    b"1" * 5000,
    b"-" + b"9" * 400,
    b"[" * 3000 + b"]" * 3000,
    b"[" * 20_000,
    b'{"a":' * 2000 + b"1" + b"}" * 2000,
    b'"' + b"a" * 5000 + b'"',
    b'"' + b"\\u0041" * 500 + b'"',
    b"[" + b"[]," * 2000 + b"[]]",
]
"""What readers stumble over: numbers that Python refuses to read, nesting beyond its stack, long texts, many things."""

atoms = st.one_of(
    st.sampled_from(_ATOMS),
    st.sampled_from(_ATOMS),
    st.integers().map(lambda number: b"%d" % number),
    st.text(max_size=12).map(lambda text: json.dumps(text).encode()),
    st.sampled_from(_BOMBS),
)


@st.composite
def json_bytes(draw: st.DrawFn, /, **fields: list[bytes]) -> bytes:
    """Make a JSON object with these fields, each with one of its good values most of the time: so readers get far.

    Else a field is missing, there twice, or of a wrong type.
    """
    bad = st.one_of(atoms, _nested(tuple(fields)))
    names = list(fields)
    extra = draw(st.integers(0, 7))  # 0 and 1: some are missing; 2: some are there twice
    if extra < 2:
        names = draw(st.lists(st.sampled_from(names), max_size=len(names)))
    elif extra == 2:
        names += draw(st.lists(st.sampled_from(names), min_size=1, max_size=2))
    wrong = draw(st.integers(0, 2 * len(names)))
    return _object(
        [(name, draw(bad if place == wrong else st.sampled_from(fields[name]))) for place, name in enumerate(names)]
    )


def _nested(names: tuple[str, ...]) -> st.SearchStrategy[bytes]:
    return st.one_of(
        st.lists(atoms, max_size=4).map(lambda items: b"[" + b",".join(items) + b"]"),
        st.lists(st.tuples(st.sampled_from(names), atoms), max_size=3).map(_object),
    )


def _object(fields: list[tuple[str, bytes]]) -> bytes:
    return b"{" + b",".join(b'"%b":%b' % (name.encode(), value) for name, value in fields) + b"}"


_TOKENS = (
    *(
        b"\0",
        b"\r\n",
        b"\n",
        b" ",
        b"\t",
        b'"',
        b"\\",
        b"\xff",
        b"[",
        b"]",
        b"{",
        b"}",
        b",",
        b":",
        b"0",
        b"-",
        b"e9",
        b"1e999",
    ),
    *(
        b"null",
        b"\\u0000",
        b"\\ud800",
        b"..",
        b"/",
        b"~",
        b"%00",
        b"\r\n\r\n",
        b"0\r\n\r\n",
        b"\r\n ",
        b"Content-Length: 3\r\n",
    ),
    *(
        b"Transfer-Encoding: chunked\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"POST /collective_rpc HTTP/1.1\r\n\r\n",
        b'"usage":{',
    ),
)


def vary(value: Any, random: Random) -> Any:
    """Return `value` with one to three things wrong in one of its texts: bytes put in, taken out or doubled."""
    match value:
        case bytes():
            for _ in range(random.randint(1, 3)):
                value = _damage(value, random)
            return value
        case str():
            return vary(value.encode("utf-8", "replace"), random).decode("utf-8", "replace")
        case tuple() | list() if value:
            at = random.randrange(len(value))
            return type(value)(vary(item, random) if place == at else item for place, item in enumerate(value))
        case _:
            return value


def _damage(content: bytes, random: Random) -> bytes:
    start = random.randint(0, len(content))
    end = min(start + random.randint(0, 8), len(content))
    match random.randrange(6):
        case 0:
            return content[:start]
        case 1:
            return content[:start] + content[end:]
        case 2:
            return content[:end] + content[start:]
        case 3:
            return content[:start] + random.randbytes(random.randint(1, 4)) + content[end:]
        case _:
            return content[:start] + random.choice(_TOKENS) + content[end:]


def cuts() -> st.SearchStrategy[list[int]]:
    """Return where a message is cut into packets: lengths, the last one again and again."""
    return st.lists(st.integers(1, 200), min_size=1, max_size=6)


def pieces(content: bytes, lengths: list[int]) -> list[bytes]:
    """Cut `content` into pieces of these lengths."""
    cut, start, number = [], 0, 0
    while start < len(content):
        length = lengths[min(number, len(lengths) - 1)]
        cut.append(content[start : start + length])
        start, number = start + length, number + 1
    return cut


_LINE_ENDS = st.sampled_from([b"\r\n"] * 9 + [b"\n", b"\r", b"\r\n "])
_HEADERS = st.sampled_from(
    [
        b"content-length: 5",
        b"Content-Length: 5",
        b"content-length: 6",
        b"content-length: 0",
        b"content-length: -1",
        b"content-length: +5",
        b"content-length: 5, 5",
        b"content-length: 99999999999999999999999",
        b"content-length : 5",
        b"transfer-encoding: chunked",
        b"Transfer-Encoding: xchunked",
        b"transfer-encoding: gzip, chunked",
        b"transfer-encoding: chunked, identity",
        b"transfer-encoding : chunked",
        b"connection: close",
        b"connection: keep-alive, x-session-id",
        b"connection: upgrade",
        b"upgrade: h2c",
        b"expect: 100-continue",
        b"host: replica",
        b"authorization: Bearer theirs",
        b"x-request-id: a",
        b"x-session-id: \xff\xfe",
        b"content-type: text/event-stream",
        b"content-type: application/json",
        b"retry-after: 99999999999999999999",
        b"x: " + b"y" * 300,
        b"x:\0",
        b": x",
        b"x",
    ]
)
_BODIES = st.one_of(
    st.sampled_from([b"", b"hello", b"5\r\nhello\r\n0\r\n\r\n", b"5;a=b\r\nhello\r\n0\r\nx: y\r\n\r\n", b"0\r\n\r\n"]),
    st.sampled_from([b"5\nhello\n0\n\n", b"05\r\nhello\r\n00\r\n\r\n", b"ffffffffffffffffff\r\n", b"-1\r\n", b"g\r\n"]),
    st.binary(max_size=20),
)
_STARTS = st.sampled_from(
    [b"HTTP/1.1 200 OK"] * 6
    + [b"HTTP/1.1 100 Continue", b"HTTP/1.1 204 No Content", b"HTTP/1.1 304 X", b"HTTP/1.0 200 OK", b"HTTP/2 200"]
    + [b"HTTP/1.1 503 ", b"HTTP/1.1 101 Switching", b"HTTP/1.1 999 ?", b"HTTP/1.1 20 OK", b"ICY 200 OK", b""]
)
_TARGETS = st.sampled_from(
    [b"/v1/completions"] * 5
    + [b"//v1/completions", b"/v1/%63ompletions", b"/v1/../collective_rpc", b"/v1/completions%00", b"*", b"/\xff"]
    + [b"http://other/v1/completions", b"/v1/completions?a=b&c=%0d%0a", b"/v1/completions#x", b"/v1/completions\\x"]
)
_METHODS = st.sampled_from([b"POST"] * 6 + [b"GET", b"post", b"CONNECT", b"PRI", b"OPTIONS", b""])


def _message(start: bytes, headers: list[bytes], end: bytes, body: bytes) -> bytes:
    return end.join([start, *headers]) + end + end + body


answers = st.builds(_message, _STARTS, st.lists(_HEADERS, max_size=4), _LINE_ENDS, _BODIES)
"""HTTP answers, or what a broken server takes for one."""

requests = st.builds(
    _message,
    st.builds(b"%b %b HTTP/1.1".__mod__, st.tuples(_METHODS, _TARGETS)),
    st.lists(_HEADERS, max_size=5),
    _LINE_ENDS,
    _BODIES,
)
"""HTTP requests of clients that are broken, or want in."""

_NAMES = [
    "base_model.model.model.layers.10.self_attn.q_proj.lora_A.weight",
    "x.lora_B.weight",
    "lm_head.lora_embedding_A",
    "w",
    "",
]
_tensor = json_bytes(
    dtype=[b'"F32"', b'"BF16"', b'"I64"'], shape=[b"[2,2]", b"[0]", b"[1e999]"], data_offsets=[b"[0,16]", b"[16,16]"]
)


def _safetensors(tensors: list[tuple[str, bytes]], length: int | None, data: bytes) -> bytes:
    header = _object([*tensors, ("__metadata__", b"{}")])
    return struct.pack("<Q", len(header) if length is None else length) + header + data


safetensors = st.builds(
    _safetensors,
    st.lists(st.tuples(st.sampled_from(_NAMES), _tensor), max_size=3),
    st.none() | st.integers(0, 2**64 - 1),
    st.sampled_from([b"", bytes(16), b"\xff" * 16, bytes(64)]),
)
"""Files of weights whose header lies."""
