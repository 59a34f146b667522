"""Buckets over HTTP, as huggingface_hub calls them: create, list, batch, paths-info, resolve and the feed of changes.

Every call but the feed answers at once; `Faults` says when what a batch uploads is shown.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from tests.hub.bucket import Bucket, FileVersion, hub_time
from tests.hub.cas_api import CasApi, byte_range
from tests.hub.content import Content
from tests.hub.faults import Faults

_COALESCE_S = 0.2
"""The Hub gathers changes for about this long before it sends them."""
_KEEP_ALIVE_S = 30.0
_PAGE = 1000
"""Entries in one page of a listing."""
_NO_BUCKET = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Bucket not found"}
_NO_FILE = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}


class BucketApi:
    """The buckets of one user. `closing` tells when the feeds have to end."""

    def __init__(
        self, content: Content, cas: CasApi, faults: Faults, *, endpoint: str, user: str, closing: Callable[[], bool]
    ) -> None:
        self.buckets: dict[str, Bucket] = {}
        self._content = content
        self._cas = cas
        self._faults = faults
        self._endpoint = endpoint
        self._user = user
        self._closing = closing

    def routes(self) -> list[BaseRoute]:
        """Return the routes of the API and of downloads."""
        bucket = "/api/buckets/{owner}/{name}"
        return [
            Route("/api/buckets/{owner}", self._list),
            Route(bucket, self._create, methods=["POST"]),
            Route(bucket, self._info, methods=["GET"]),
            Route(bucket, self._remove, methods=["DELETE"]),
            Route(f"{bucket}/batch", self._batch, methods=["POST"]),
            Route(f"{bucket}/paths-info", self._paths_info, methods=["POST"]),
            Route(f"{bucket}/tree", self._tree),
            Route(f"{bucket}/tree/{{prefix:path}}", self._tree),
            Route(f"{bucket}/events", self._events),
            Route(f"{bucket}/xet-write-token", self._token),
            Route(f"{bucket}/xet-read-token", self._token),
            Route("/buckets/{owner}/{name}/resolve/{path:path}", self._resolve, methods=["GET", "HEAD"]),
        ]

    def now(self) -> float:
        """Return the time on the clock of the buckets."""
        return time.monotonic()

    async def _list(self, request: Request) -> Response:
        owner = self._owner(request)
        search = request.query_params.get("search", "")
        return JSONResponse(
            [
                self._describe(bucket)
                for bucket in self.buckets.values()
                if bucket.id.startswith(f"{owner}/") and search in bucket.id
            ]
        )

    async def _create(self, request: Request) -> Response:
        if (owner := self._owner(request)) != self._user:
            raise HTTPException(403, f"{self._user} may not create a bucket for {owner}")
        bucket_id = f"{owner}/{request.path_params['name']}"
        settings = await request.json()
        known = bucket_id in self.buckets
        private = settings.get("visibility") == "private"
        self.buckets.setdefault(bucket_id, Bucket(bucket_id, private=private))
        return JSONResponse({"url": f"{self._endpoint}/buckets/{bucket_id}"}, 409 if known else 200)

    async def _info(self, request: Request) -> Response:
        return JSONResponse(self._describe(self._bucket(request)))

    async def _remove(self, request: Request) -> Response:
        del self.buckets[self._bucket(request).id]
        return JSONResponse({})

    async def _batch(self, request: Request) -> Response:
        bucket = self._bucket(request)
        operations = [json.loads(line) for line in (await request.body()).splitlines() if line]
        failed = [
            {"path": operation["path"], "error": error}
            for operation in operations
            if (error := self._carry_out(bucket, operation))
        ]
        body = {
            "success": not failed,
            "processed": len(operations),
            "succeeded": len(operations) - len(failed),
            "failed": failed,
        }
        return JSONResponse(body, 422 if operations and len(failed) == len(operations) else 200)

    def _carry_out(self, bucket: Bucket, operation: dict[str, Any]) -> str | None:
        path = operation["path"]
        if self._faults.refuses(path):
            return "the test asked for this failure"
        if operation["type"] == "deleteFile":
            bucket.delete(path, self.now())
            return None
        xet_hash = operation["xetHash"]
        size = self._content.size(xet_hash)
        if size is None:
            return f"no file {xet_hash} has been uploaded"
        listed_at = self.now() + self._faults.landing_of_path(path)
        bucket.put(FileVersion(path, xet_hash, size, mtime_ms=operation["mtime"], listed_at=listed_at))
        return None

    async def _paths_info(self, request: Request) -> Response:
        files = self._bucket(request).files(self._listing_time())
        paths = (await request.json())["paths"]
        return JSONResponse([files[path].describe() for path in paths if path in files])

    async def _tree(self, request: Request) -> Response:
        recursive = request.query_params.get("recursive", "").lower() == "true"
        prefix = request.path_params.get("prefix", "")
        entries = self._bucket(request).tree(self._listing_time(), prefix=prefix, recursive=recursive)
        after = request.query_params.get("cursor", "")
        page = [entry for entry in entries if entry["path"] > after]
        headers = {}
        if len(page) > _PAGE:
            page = page[:_PAGE]
            following = request.url.include_query_params(cursor=page[-1]["path"])
            headers["Link"] = f'<{following}>; rel="next"'
        return JSONResponse(page, headers=headers)

    async def _events(self, request: Request) -> Response:
        bucket = self._bucket(request)
        since = self.now()
        if cursor := request.query_params.get("cursor"):
            since = float(cursor)
        elif moment := request.query_params.get("since"):
            since -= time.time() - datetime.fromisoformat(moment).timestamp()
        return StreamingResponse(self._follow(bucket, since), media_type="text/event-stream")

    async def _follow(self, bucket: Bucket, since: float) -> AsyncIterator[str]:
        ready = False
        spoken = self.now()
        while not self._closing():
            until = self.now()
            if changes := bucket.changes(since, until):
                yield _event("changes", cursor=repr(until), changes=changes)
                spoken = until
            since = until
            if not ready:
                yield _event("ready", cursor=repr(until))
                ready = True
            if until - spoken > _KEEP_ALIVE_S:
                yield ": keep-alive\n\n"
                spoken = until
            await asyncio.sleep(_COALESCE_S)

    async def _token(self, request: Request) -> Response:
        self._bucket(request)
        return self._cas.connection()

    async def _resolve(self, request: Request) -> Response:
        bucket = self._bucket(request)
        version = bucket.files(self.now()).get(request.path_params["path"])
        if version is None:
            raise HTTPException(404, f"{bucket.id} has no {request.path_params['path']}", _NO_FILE)
        start, end = byte_range(request, default=(0, version.size))
        end = min(end, version.size)
        if start > end or (start and start == end):
            raise HTTPException(416, f"{version.path} has {version.size} bytes")
        headers = {
            "ETag": f'"{version.xet_hash}"',
            "X-Linked-Etag": f'"{version.xet_hash}"',
            "X-Linked-Size": str(version.size),
            "X-Xet-Hash": version.xet_hash,
            "X-Xet-Refresh-Route": f"{self._endpoint}/api/buckets/{bucket.id}/xet-read-token",
            "Accept-Ranges": "bytes",
            "Content-Length": str(end - start),
        }
        partial = "range" in request.headers
        if partial:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{version.size}"
        pieces = iter(()) if request.method == "HEAD" else self._content.read(version.xet_hash, start, end)
        return StreamingResponse(pieces, 206 if partial else 200, headers, "application/octet-stream")

    def _listing_time(self) -> float:
        return self.now() - self._faults.stale_listing_s

    def _bucket(self, request: Request) -> Bucket:
        bucket_id = f"{self._owner(request)}/{request.path_params['name']}"
        if bucket_id not in self.buckets:
            raise HTTPException(404, f"there is no bucket {bucket_id}", _NO_BUCKET)
        return self.buckets[bucket_id]

    def _owner(self, request: Request) -> str:
        owner: str = request.path_params["owner"]
        return self._user if owner == "me" else owner

    def _describe(self, bucket: Bucket) -> dict[str, Any]:
        files = bucket.files(self.now()).values()
        return {
            "id": bucket.id,
            "private": bucket.private,
            "createdAt": hub_time(bucket.created_at),
            "size": sum(version.size for version in files),
            "totalFiles": len(files),
        }


def _event(name: str, **data: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"
