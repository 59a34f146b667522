"""Which key the client sends with which call, and where it finds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.contract import LOAD_PATH, RELOAD_PATH, REPLICAS_PATH
from proxy.errors import SettingsError
from trainer_client.keys import CallerKeys
from trainer_client.proxy_api import ProxyApi

VARIABLES = ("PROXY_API_KEY", "PROXY_API_KEY_FILE", "PROXY_ADMIN_KEY")


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def sent(keys: CallerKeys, method: str, path: str) -> str | None:
    return keys.headers(method, path).get("Authorization")


@pytest.mark.parametrize(
    ("given", "usual", "for_the_fleet"),
    [
        ({}, None, None),
        ({"api_key": "a"}, "Bearer a", "Bearer a"),
        ({"admin_key": "b"}, "Bearer b", "Bearer b"),
        ({"api_key": "a", "admin_key": "b"}, "Bearer a", "Bearer b"),
    ],
)
def test_the_admin_key_goes_with_what_changes_the_fleet(
    given: dict[str, str], usual: str | None, for_the_fleet: str | None
) -> None:
    keys = CallerKeys.found(**given)
    for method, path in (("GET", REPLICAS_PATH), ("POST", LOAD_PATH), ("POST", "/pause")):
        assert sent(keys, method, path) == usual
    for method, path in (("POST", REPLICAS_PATH), ("DELETE", REPLICAS_PATH), ("POST", RELOAD_PATH)):
        assert sent(keys, method, path) == for_the_fleet


def test_by_default_they_are_the_environments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PROXY_API_KEY", "new-one, old-one")
    monkeypatch.setenv("PROXY_ADMIN_KEY", "of-the-admin")
    keys = CallerKeys.found()
    assert (sent(keys, "POST", LOAD_PATH), sent(keys, "POST", RELOAD_PATH)) == ("Bearer new-one", "Bearer of-the-admin")
    assert sent(CallerKeys.found(api_key="given"), "POST", LOAD_PATH) == "Bearer given"
    (tmp_path / "keys").write_text("in-a-file\nold\n")
    monkeypatch.setenv("PROXY_API_KEY_FILE", str(tmp_path / "keys"))
    assert sent(CallerKeys.found(), "POST", LOAD_PATH) == "Bearer in-a-file", "as the proxy takes it"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("PROXY_API_KEY", "schl\u00fcssel", "PROXY_API_KEY holds characters"),
        ("PROXY_ADMIN_KEY", " , ", "PROXY_ADMIN_KEY holds no key"),
        ("PROXY_API_KEY_FILE", "/no/such/file", "PROXY_API_KEY_FILE names a file that cannot be read: No such file"),
    ],
)
def test_what_is_no_key_is_one_sentence(monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=said) as caught:
        CallerKeys.found()
    assert "schl" not in str(caught.value)


def test_they_never_print() -> None:
    assert repr(CallerKeys("hunter2", None)) == "<CallerKeys api=set admin=unset>"
    api = ProxyApi(
        "http://proxy:8000", timeout_s=1, retry_timeout_s=1, connect_timeout_s=1, api_key="hunter2", admin_key="hunter3"
    )
    assert "hunter" not in repr(api)
    api.close()
