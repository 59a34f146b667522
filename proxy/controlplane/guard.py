"""Calls that change the fleet, or open a replica's engine, are for those who may."""

from __future__ import annotations

from fastapi import Request

from proxy.auth import may_administer
from proxy.errors import ApiError
from proxy.settings import AdminSettings


def require_admin(request: Request, settings: AdminSettings) -> None:
    """Raise ApiError 403 unless the caller is on this machine, or has sent PROXY_ADMIN_KEY where one is set."""
    key = settings.admin_key.get_secret_value() if settings.admin_key else None
    host = request.client.host if request.client else ""
    if may_administer(host, request.headers.get("authorization", ""), admin_key=key):
        return
    remedy = "send PROXY_ADMIN_KEY as a bearer token" if key else "call from its machine, or set PROXY_ADMIN_KEY"
    raise ApiError(403, f"{request.method} {request.url.path} is not for everybody: {remedy}.", reason="forbidden")
