"""Calls that change the fleet, or open a replica's engine, are for those who may."""

from __future__ import annotations

from fastapi import Request

from proxy.access import Keys, refuse_admin
from proxy.errors import ApiError


def require_admin(request: Request, keys: Keys) -> None:
    """Raise ApiError 403 unless the caller has sent the admin key or, where there is none, is on this machine."""
    headers = request.headers
    why = refuse_admin(
        keys,
        peer=request.client.host if request.client else "",
        authorization=headers.get("authorization", "").encode("latin-1"),
        host=headers.get("host", ""),
        origin=headers.get("origin"),
    )
    if why is not None:
        raise ApiError(403, f"{request.method} {request.url.path} is not for everybody: {why}.", reason="forbidden")
