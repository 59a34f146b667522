"""Wherever a URL leads and whatever is printed: the token goes to the host that was named, and no secret is shown."""

from __future__ import annotations

import ipaddress
import logging
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from proxy.access import Keys
from proxy.auth import Credentials, may_carry_token
from proxy.errors import SettingsError
from proxy.settings import Settings, base_url, variables

SECRET = "hunter2-hunter2-hunter2"
SECRETS = ("HF_TOKEN", "PROXY_API_KEY", "PROXY_ADMIN_KEY")

parts = st.sampled_from(
    [*"/:@?#[]\\%. \t", "http://", "https://", "//", "localhost", "127.0.0.1", "[::1]", "evil.example", "grp-", "80"]
)
urls = st.lists(parts, max_size=9).map("".join).map("http://{}".format) | st.lists(parts, max_size=9).map("".join)


@settings(max_examples=1000)
@given(url=urls)
def test_every_reader_of_a_url_takes_it_for_the_same_host(url: str) -> None:
    try:
        clean = base_url(url)
    except ValueError:
        return
    host = urlsplit(clean).hostname  # what the data plane connects to
    assert httpx2.URL(clean).raw_host.decode() == host, "and what the control plane connects to"
    if may_carry_token(clean) and not clean.startswith("https://"):
        assert host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    if may_carry_token(clean, network_group_prefix="grp-") and not may_carry_token(clean):
        assert host.startswith("grp-") and "." not in host


@settings(max_examples=1000)
@given(before=st.lists(parts, max_size=4).map("".join), after=st.lists(parts, max_size=6).map("".join))
def test_what_stands_before_the_at_of_a_url_is_never_repeated(before: str, after: str) -> None:
    for url in (f"{before}{SECRET}@{after}", f"http://{before}:{SECRET}@{after}"):
        with pytest.raises(ValueError) as caught:
            base_url(url)
        assert SECRET not in str(caught.value)


@contextmanager
def environment(**given: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, _ in variables():
            patch.delenv(name, raising=False)
        for name, value in {"UPSTREAM_URLS": "http://a:8000", **given}.items():
            patch.setenv(name, value)
        yield


def test_no_form_of_the_settings_shows_a_secret() -> None:
    with environment(**dict.fromkeys(SECRETS, SECRET)):
        whole = Settings.from_env()
    for name in Settings.ROOMS:
        room = getattr(whole, name)
        for form in (repr(room), str(room), f"{room.model_dump()}", room.model_dump_json(), repr(vars(room))):
            assert SECRET not in form, name
    assert SECRET not in repr(whole) + repr(vars(whole))
    assert SECRET not in repr(Credentials(lambda: SECRET)) + repr(Keys([SECRET], SECRET))


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(SECRETS),
    spoiled=st.sampled_from(["\u00fc{}", "{}\x01", "{} {}", "{},{}", "{}\n{}", " {} ", "{}"]),
    other=st.sampled_from([{}, {"UPSTREAM_URLS": f"http://me:{SECRET}@a"}, {"PROXY_PORT": "x"}, {"UPSTREAM_URLS": ""}]),
)
def test_no_refusal_of_a_setting_shows_one(name: str, spoiled: str, other: dict[str, str]) -> None:
    with environment(**{**dict.fromkeys(SECRETS, SECRET), name: spoiled.format(SECRET, SECRET), **other}):
        try:
            Settings.from_env()
        except SettingsError as error:
            assert SECRET not in str(error)
            assert SECRET not in "".join(traceback.format_exception(error)), "nor does its whole traceback"
        except ValueError:
            raise AssertionError("a setting that cannot work is a SettingsError") from None


def test_every_secret_is_kept_as_one() -> None:
    looks = {name for name, _ in variables() if name.endswith(("TOKEN", "KEY", "PASSWORD")) and "REQUIRE" not in name}
    kept = {name for name, field in variables() if SecretStr in getattr(field.annotation, "__args__", ())}
    assert looks == kept == set(SECRETS)


def test_no_command_takes_a_secret_as_an_argument_which_everybody_on_the_machine_can_read() -> None:
    code = (
        "import typer, proxy.cli, trainer_client.cli\n"
        "def walk(c):\n"
        "    for p in c.params: print(*p.opts)\n"
        "    for s in getattr(c, 'commands', {}).values(): walk(s)\n"
        "for app in (proxy.cli.app, trainer_client.cli.app): walk(typer.main.get_command(app))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    options = [word for word in told.split() if word.startswith("--")]
    assert "--proxy" in options
    assert not [option for option in options if any(word in option for word in ("key", "token", "secret", "password"))]


def test_libraries_that_log_headers_stay_quiet() -> None:
    code = "import logging\nfrom proxy.logs import configure\nconfigure('text')\n"
    code += "for n in ('httpx2', 'httpcore2', 'huggingface_hub'): print(logging.getLogger(n).getEffectiveLevel())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert [int(level) >= logging.INFO for level in told.split()] == [True] * 3
