"""The Xet side of the offline Hub over HTTP: version 1 of each call in https://huggingface.co/docs/xet/api.

Version 2 of shards and reconstructions is answered 404, on which clients fall back to version 1.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route

from tests.hub.content import Content
from tests.hub.shard import Term, answer_shard
from tests.hub.xorb import Malformed

_TOKEN_LIVES_S = 3600
_WHOLE = 1 << 62


class CasApi:
    """Tokens, uploads and reconstructions over one store. Its URL is unique, so that no client's cache mixes up two."""

    def __init__(self, content: Content, *, endpoint: str) -> None:
        self._content = content
        self._path = f"/cas-{secrets.token_hex(4)}"
        self._url = endpoint + self._path
        self._token = secrets.token_hex(16)

    def routes(self) -> list[BaseRoute]:
        """Return the routes, all below a path of their own."""
        return [
            Route(f"{self._path}/v1/xorbs/default/{{hash}}", self._add_xorb, methods=["POST"]),
            Route(f"{self._path}/v1/xorbs/default/{{hash}}", self._send_xorb, methods=["GET"]),
            Route(f"{self._path}/v1/shards", self._add_shard, methods=["POST"]),
            Route(f"{self._path}/v1/chunks/{{prefix}}/{{hash}}", self._find_chunk),
            Route(f"{self._path}/v1/reconstructions/{{hash}}", self._reconstruct),
        ]

    def connection(self) -> Response:
        """Return what a client needs to talk to this store, as the Hub's token calls answer it."""
        expires = int(time.time()) + _TOKEN_LIVES_S
        return JSONResponse(
            {"casUrl": self._url, "exp": expires, "accessToken": self._token},
            headers={
                "X-Xet-Cas-Url": self._url,
                "X-Xet-Access-Token": self._token,
                "X-Xet-Token-Expiration": str(expires),
            },
        )

    async def _add_xorb(self, request: Request) -> Response:
        self._check(request)
        with _refusing_malformed():
            inserted = self._content.add_xorb(request.path_params["hash"], await request.body())
        return JSONResponse({"was_inserted": inserted})

    async def _add_shard(self, request: Request) -> Response:
        self._check(request)
        with _refusing_malformed():
            return JSONResponse({"result": int(self._content.add_shard(await request.body()))})

    async def _find_chunk(self, request: Request) -> Response:
        self._check(request)
        record = self._content.owner(request.path_params["hash"])
        if record is None:
            raise HTTPException(404, "no xorb holds that chunk")
        return Response(answer_shard(record), media_type="application/octet-stream")

    async def _reconstruct(self, request: Request) -> Response:
        self._check(request)
        file = request.path_params["hash"]
        size = self._content.size(file)
        if size is None:
            raise HTTPException(404, f"nobody has uploaded file {file}")
        start, end = byte_range(request, default=(0, _WHOLE))
        if start >= size:
            raise HTTPException(416, f"file {file} has {size} bytes")
        skip, terms = self._content.terms(file, start, min(end, size))
        return JSONResponse(
            {
                "offset_into_first_range": skip,
                "terms": [
                    {
                        "hash": term.xorb,
                        "unpacked_length": term.size,
                        "range": {"start": term.first, "end": term.end},
                    }
                    for term in terms
                ],
                "fetch_info": {
                    xorb: [self._fetch_info(xorb, first, end) for first, end in runs]
                    for xorb, runs in _runs_to_fetch(terms).items()
                },
            }
        )

    async def _send_xorb(self, request: Request) -> Response:
        # Where the real store gives out signed URLs, so no token: FileResponse sees to the Range header.
        return FileResponse(self._content.xorb_path(request.path_params["hash"]), media_type="application/octet-stream")

    def _fetch_info(self, xorb: str, first: int, end: int) -> dict[str, object]:
        start, last = self._content.stored_range(xorb, first, end)
        return {
            "range": {"start": first, "end": end},
            "url": f"{self._url}/v1/xorbs/default/{xorb}",
            "url_range": {"start": start, "end": last},
        }

    def _check(self, request: Request) -> None:
        if request.headers.get("authorization") != f"Bearer {self._token}":
            raise HTTPException(401, "that is not the token of this store")


def byte_range(request: Request, *, default: tuple[int, int]) -> tuple[int, int]:
    """Return the bytes that a request asks for, the end not included."""
    asked = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
    if asked is None:
        return default
    return int(asked[1]), int(asked[2]) + 1 if asked[2] else default[1]


def _runs_to_fetch(terms: list[Term]) -> dict[str, list[tuple[int, int]]]:
    """Return for each xorb the runs of chunks to fetch. None may overlap: hf_xet looks a run up by its first chunk."""
    runs: dict[str, list[tuple[int, int]]] = {}
    for term in sorted(terms, key=lambda term: (term.first, term.end)):
        of_xorb = runs.setdefault(term.xorb, [])
        if of_xorb and term.first <= of_xorb[-1][1]:
            of_xorb[-1] = of_xorb[-1][0], max(of_xorb[-1][1], term.end)
        else:
            of_xorb.append((term.first, term.end))
    return runs


@contextmanager
def _refusing_malformed() -> Iterator[None]:
    try:
        yield
    except Malformed as error:
        raise HTTPException(400, str(error)) from error
