"""Settings: read from the environment, refused in one sentence, documented in one place."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from proxy.errors import SettingsError
from proxy.settings import RETIRED_NAMES, Settings, settings_table, unknown_variables, variables
from proxy.sources import DnsSource

REPO = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, _ in variables():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UPSTREAM_URLS", "http://a:8000")


def test_the_published_names_and_defaults_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPSTREAM_URLS", "http://a:8000/, https://b.hf.jobs")
    monkeypatch.setenv("HF_TOKEN", "secret")
    settings = Settings.from_env()
    assert settings.upstream.urls == ("http://a:8000", "https://b.hf.jobs")
    assert settings.upstream.token is not None and settings.upstream.token.get_secret_value() == "secret"
    assert (settings.listen.host, settings.listen.port) == ("127.0.0.1", 8000)
    assert settings.routing.max_tracked_blocks == 500_000
    assert settings.control.lora_load_timeout_s == 300
    assert settings.control.lora_retry_s == 2
    assert settings.upstream.conn_limit == 1024
    assert settings.listen.stats_every_s == 60


def test_buckets_are_given_with_their_mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXY_STORAGE", "hf://buckets/me/runs=/lora, hf://buckets/me/runs/a/b=/other")
    assert Settings.from_env().control.storage == (
        ("hf://buckets/me/runs", "/lora"),
        ("hf://buckets/me/runs/a/b", "/other"),
    )


def test_replicas_may_be_found_instead_of_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UPSTREAM_URLS")
    monkeypatch.setenv("PROXY_DISCOVER", "dns:vllm:8000")
    assert Settings.from_env().discovery.discover == DnsSource("vllm", 8000)
    monkeypatch.setenv("PROXY_DISCOVER", "")
    with pytest.raises(SettingsError, match="UPSTREAM_URLS is empty"):
        Settings.from_env()


def test_the_token_is_read_again_from_its_file_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "one")
    settings = Settings.from_env().upstream
    assert settings.read_token() == "one"
    monkeypatch.setenv("HF_TOKEN", "two")
    assert settings.read_token() == "two"
    (tmp_path / "token").write_text("three\n")
    monkeypatch.setenv("PROXY_TOKEN_FILE", str(tmp_path / "token"))
    settings = Settings.from_env().upstream
    assert settings.read_token() == "three"
    (tmp_path / "token").write_text("four\n")
    assert settings.read_token() == "four"


def test_an_empty_admin_key_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXY_ADMIN_KEY", "")
    assert Settings.from_env().access.admin_key is None


def test_the_token_never_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "very-secret")
    assert "very-secret" not in repr(Settings.from_env().upstream)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("UPSTREAM_URLS", "", "UPSTREAM_URLS is empty"),
        ("UPSTREAM_URLS", "ftp://a", "not an http or https URL"),
        ("UPSTREAM_URLS", "a:8000", "not an http or https URL"),
        ("UPSTREAM_URLS", "http://a:80000", "port"),
        ("UPSTREAM_URLS", "http://[::1]a", "whose host is neither a name in ASCII nor an address"),
        ("UPSTREAM_URLS", "http://300.0.0.1:8000", "whose host is neither a name in ASCII nor an address"),
        ("UPSTREAM_URLS", "http://a:1,http://a:1/", "lists http://a:1 twice"),
        ("UPSTREAM_URLS", "http://me:pass@a", "credentials"),
        ("PROXY_PORT", "many", "PROXY_PORT='many'"),
        ("PROXY_PORT", "70000", "less than or equal to 65535"),
        ("PROXY_LORA_RETRY_S", "-1", "PROXY_LORA_RETRY_S"),
        ("PROXY_STORAGE", "hf://buckets/me/runs", "is not hf://buckets/NAMESPACE/NAME[/FOLDER]=/MOUNT"),
        ("PROXY_STORAGE", "hf://buckets/me/runs=lora", "'hf://buckets/me/runs=lora', which is not"),
        ("PROXY_STORAGE", "hf://buckets/me=/lora", "is not hf://"),
        ("PROXY_STORAGE", "hf://buckets/me/runs/../x=/lora", "is not hf://"),
        ("PROXY_STORAGE", "s3://me/runs=/lora", "is not hf://"),
        ("PROXY_DISCOVER", "dns:x", "PROXY_DISCOVER has 'x' after dns:, which is not HOST:PORT"),
        ("PROXY_DISCOVER", "consul:x", "which is none of jobs:LABEL=VALUE"),
        ("PROXY_FORWARD_PATHS", "/sleep=one,wake", "has 'wake', which is not /path=one"),
        ("PROXY_TOKEN_FILE", "/no/such/file", "cannot be read: No such file"),
    ],
)
def test_bad_values_are_one_sentence(monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        Settings.from_env()
    message = str(caught.value)
    assert said in message and name in message
    assert "\n" not in message and message.endswith(".")
    assert "pass@" not in message


def test_a_secret_in_a_bad_value_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPSTREAM_URLS", "http://user:hunter2@host")
    with pytest.raises(SettingsError) as caught:
        Settings.from_env()
    assert "hunter2" not in str(caught.value)


def test_names_that_nothing_reads_are_said() -> None:
    sentences = unknown_variables({"PROXY_BLOCK_SIZE": "16", "PROXY_PROT": "1", "PROXY_PORT": "8000", "PATH": "/bin"})
    assert len(sentences) == 2
    assert RETIRED_NAMES["PROXY_BLOCK_SIZE"] in sentences[0]
    assert sentences[1] == "PROXY_PROT is ignored: no setting has this name, but PROXY_PORT does."
    assert unknown_variables({"PROXY_COLOUR": "1"}) == ["PROXY_COLOUR is ignored: no setting has this name."]


@pytest.mark.parametrize(
    ("host", "url", "own"),
    [
        ("127.0.0.1", "http://localhost:8000", True),
        ("127.0.0.1", "http://127.0.0.1:8000/", True),
        ("0.0.0.0", "http://127.0.0.1:8000", True),
        ("10.0.0.1", "http://10.0.0.1:8000", True),
        ("10.0.0.1", "http://localhost:8000", False),
        ("127.0.0.1", "http://localhost:8001", False),
        ("127.0.0.1", "http://[::1]:8000", False),
        ("127.0.0.1", "http://replica:8000", False),
    ],
)
def test_the_proxy_is_no_replica_of_its_own(monkeypatch: pytest.MonkeyPatch, host: str, url: str, own: bool) -> None:
    monkeypatch.setenv("PROXY_HOST", host)
    monkeypatch.setenv("UPSTREAM_URLS", url)
    with pytest.raises(SettingsError, match="where the proxy itself listens") if own else nullcontext():
        Settings.from_env()


def test_every_setting_is_documented() -> None:
    for name, field in variables():
        assert field.description, f"{name} has no string under it"


def test_the_readme_table_is_the_generated_one() -> None:
    assert settings_table() in (REPO / "README.md").read_text(), "run: python -m proxy.settings, and paste its output"
