"""The keys that the client sends to the proxy: given, or from the variables in which the proxy itself finds them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

from proxy.contract import ADMIN_KEY, API_KEY, API_KEY_FILE, RELOAD_PATH, REPLICAS_PATH, split_keys
from proxy.errors import SettingsError

_ADMIN_CALLS = frozenset([("POST", REPLICAS_PATH), ("DELETE", REPLICAS_PATH), ("POST", RELOAD_PATH)])
"""They change the fleet itself."""


class CallerKeys:
    """The keys of one caller. They never print."""

    def __init__(self, api: str | None, admin: str | None) -> None:
        self._api = api
        self._admin = admin

    @classmethod
    def found(cls, *, api_key: str | None = None, admin_key: str | None = None) -> Self:
        """Return the given keys; in place of one that is None, the environment's. Where several are listed, the first.

        Raises SettingsError for what cannot be a key, or a file that cannot be read.
        """
        api = _first("api_key", lambda: api_key) or _first(API_KEY_FILE, _in_file) or _first(API_KEY, _in_environment)
        admin = _first("admin_key", lambda: admin_key) or _first(ADMIN_KEY, lambda: os.environ.get(ADMIN_KEY))
        return cls(api, admin)

    def __repr__(self) -> str:
        return f"<CallerKeys api={'set' if self._api else 'unset'} admin={'set' if self._admin else 'unset'}>"

    def headers(self, method: str, path: str) -> dict[str, str]:
        """Return what a call has to carry: the admin key only where nothing else does."""
        key = (self._admin or self._api) if (method, path) in _ADMIN_CALLS else (self._api or self._admin)
        return {"Authorization": f"Bearer {key}"} if key else {}


def _in_file() -> str | None:
    path = os.environ.get(API_KEY_FILE)
    return Path(path).read_text() if path else None


def _in_environment() -> str | None:
    return os.environ.get(API_KEY)


def _first(source: str, read: Callable[[], str | None]) -> str | None:
    try:
        text = read()
        return split_keys(text)[0] if text else None
    except OSError as error:
        raise SettingsError(f"{source} names a file that cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise SettingsError(f"{source} {error}.") from None
