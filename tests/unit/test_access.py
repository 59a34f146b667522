"""Who may call: what counts as a key, who may change the fleet, and whom the start warns of."""

from __future__ import annotations

from base64 import b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.access import Keys, exposure, is_cross_site, refuse_admin
from proxy.contract import split_keys

KEYS = Keys(["first-key", "second:key"], "the-admins-key")


def basic(password: str, user: str = "anybody") -> bytes:
    return b"Basic " + b64encode(f"{user}:{password}".encode())


@pytest.mark.parametrize("key", ["first-key", "second:key", "the-admins-key"])
def test_each_key_is_taken_as_bearer_and_as_password(key: str) -> None:
    for authorization in (f"Bearer {key}".encode(), f"bearer  {key} ".encode(), basic(key), basic(key, user="")):
        assert KEYS.admit(authorization), authorization


@pytest.mark.parametrize(
    "authorization",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        b"Basic",
        b"Basic !!!",
        b"Basic " + b64encode(b"first-key"),
        basic("anybody", user="first-key"),
        basic("key", user="second"),
        basic(""),
        b"first-key",
        b"Token first-key",
        b"Bearer first-key2",
        b"Bearer first-ke",
        b"Bearer FIRST-KEY",
        b"Bearer first-key,second:key",
        b"Bearer \xff",
    ],
)
def test_nothing_else_is(authorization: bytes) -> None:
    assert not KEYS.admit(authorization)


@given(st.binary(max_size=60))
def test_no_odd_header_gets_in_or_breaks_anything(authorization: bytes) -> None:
    assert not KEYS.admit(authorization)
    assert not KEYS.admit_admin(authorization)


@given(st.lists(st.text(st.characters(codec="ascii", categories=["L", "N", "P"], exclude_characters=","), min_size=1)))
def test_every_key_that_is_listed_is_known_and_each_by_itself(keys: list[str]) -> None:
    known = Keys(split_keys(" ,".join(keys)) if keys else ())
    assert known.asked is bool(keys)
    for key in keys:
        assert known.admit(b"Bearer " + key.encode()) and known.admit(basic(key))


@pytest.mark.parametrize("text", ["", " , ", "\n", "schl\u00fcssel", "a\x00b"])
def test_a_text_without_a_usable_key_is_refused_unrepeated(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        split_keys(text)
    assert len(text.strip(" ,\n")) == 0 or text not in str(caught.value)


def test_keys_never_print() -> None:
    assert repr(KEYS) == "<Keys api=2 admin=set>"
    assert repr(Keys()) == "<Keys api=0 admin=unset>"


def refused(keys: Keys, **changes: str | bytes | None) -> str | None:
    call = {"peer": "127.0.0.1", "authorization": b"", "host": "localhost:8000", "origin": None, **changes}
    return refuse_admin(keys, **call)  # type: ignore[arg-type]  # the values are of the types that the names ask for


def test_with_an_admin_key_only_its_bearer_changes_the_fleet() -> None:
    assert refused(KEYS, authorization=b"Bearer the-admins-key", peer="10.0.0.3", host="proxy") is None
    for other in (b"", b"Bearer first-key", basic("the-admins-key"), b"the-admins-key"):
        assert "PROXY_ADMIN_KEY" in (refused(KEYS, authorization=other) or ""), other


@pytest.mark.parametrize("keys", [Keys(), Keys(["first-key"])])
def test_without_one_only_this_machine_does_and_no_page_on_it(keys: Keys) -> None:
    for host in ("localhost:8000", "127.0.0.1:8000", "[::1]:8000", "127.0.0.1", ""):
        assert refused(keys, host=host) is None, host
    for peer in ("10.0.0.3", "192.0.2.1", "2001:db8::1", "::ffff:127.0.0.1", "", "localhost.example.org"):
        said = refused(keys, peer=peer) or ""
        assert peer in said and "set PROXY_ADMIN_KEY" in said
    for page in (
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:8000"},
        {"host": "evil.example:8000"},
        {"host": "localhost.evil.example"},
        {"host": "localhost@evil.example"},
        {"host": "[::1"},
        {"host": "[::1]evil.example"},
    ):
        assert "web page" in (refused(keys, **page) or ""), page


@given(st.text(max_size=30))
def test_no_odd_host_is_taken_for_this_machine(host: str) -> None:
    if refused(Keys(), host=f"{host}.evil.example") is None:
        raise AssertionError(host)


@pytest.mark.parametrize(
    ("method", "origin", "host", "cross"),
    [
        ("POST", b"http://evil.example", b"localhost:8000", True),
        ("POST", b"null", b"localhost:8000", True),
        ("POST", b"", b"localhost:8000", True),
        ("DELETE", b"http://localhost:3000", b"localhost:8000", True),
        ("OPTIONS", b"http://evil.example", b"localhost:8000", True),
        ("POST", b"http://localhost:8000", b"localhost:8000", False),
        ("POST", b"https://proxy.example", b"proxy.example", False),
        ("GET", b"http://evil.example", b"localhost:8000", False),
    ],
)
def test_what_another_site_asks_for_is_told(method: str, origin: bytes, host: bytes, cross: bool) -> None:
    assert is_cross_site(method, origin=origin, host=host) is cross


@pytest.mark.parametrize("address", ["0.0.0.0", "10.0.0.3", "::", "trainer-0"])
def test_the_start_says_who_could_do_what(address: str) -> None:
    said = exposure(address, Keys()) or ""
    assert address in said and "generate" in said and "only this machine may add" in said and "127.0.0.1" in said
    assert "only who has PROXY_ADMIN_KEY may add" in (exposure(address, Keys(admin="k")) or "")
    assert exposure(address, Keys(["k"])) is None


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.5", "::1", "localhost"])
def test_on_loopback_it_says_nothing(address: str) -> None:
    assert exposure(address, Keys()) is None
