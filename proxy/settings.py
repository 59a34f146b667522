"""Every setting of the proxy, read once from the environment at the edge; rooms receive values, not the environment.

The string under a field is its documentation: `--help` names the variables, the README table is generated from here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

import httpx2
from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from proxy.contract import API_KEY, API_KEY_FILE, split_keys
from proxy.errors import SettingsError
from proxy.sources import Source, parse_source

RETIRED_NAMES = {
    "PROXY_BLOCK_SIZE": "prefixes are compared by pieces of the request's text, so there is no block of tokens to size",
    "PROXY_IMBALANCE": "the routing rule has its own measure of imbalance",
}
"""Names that the published setup knew and that mean nothing here: accepted, and logged once with the reason."""

_BUCKET_URL = re.compile(r"hf://buckets(/(?!\.{1,2}(/|$))[^/]+){2,}/?")

_HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d*)?")
"""Of a URL. Readers disagree on what is looser: `[::1]evil.example` is loopback to some."""


class _Room(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="PROXY_",
        use_attribute_docstrings=True,
        frozen=True,
        extra="ignore",
        populate_by_name=True,
        hide_input_in_errors=True,
        allow_inf_nan=False,
    )


class ListenSettings(_Room):
    """Where clients reach the proxy, how it stops, and what it logs."""

    host: str = "127.0.0.1"
    """Address to listen on. The container image sets 0.0.0.0."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on. 0 takes a free one and logs it."""
    shutdown_s: float = Field(default=60.0, ge=0)
    """Seconds that rollouts in flight get to finish after SIGTERM or Ctrl-C before they are cancelled."""
    request_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds in which a request must have arrived, and as many again for each MB of its body. A client that sends it
    byte by byte is answered 408 then, so that it cannot hold connections for ever."""
    stats_every_s: float = Field(default=60.0, ge=0)
    """Seconds between two summary lines in the log. 0 writes none."""
    log: Literal["text", "json"] = "text"
    """How the log is written to stderr, one line an event: `text` for people, `json` with one object a line."""


class UpstreamSettings(_Room):
    """The replicas and the token that they get."""

    urls: Annotated[tuple[str, ...], NoDecode] = Field(default=(), validation_alias="UPSTREAM_URLS")
    """Base URLs of the vLLM replicas, separated by commas or spaces."""
    token: SecretStr | None = Field(default=None, validation_alias="HF_TOKEN")
    """Sent to the replicas as a bearer token, over https, loopback or a network group only."""
    token_file: Path | None = None
    """File that holds the token, in place of HF_TOKEN. It is read again when a replica refuses the token."""
    token_over_http: bool = False
    """Send the token over plain http to other addresses too."""
    network_group_prefix: str = Field(default="", validation_alias="HF_NETWORK_GROUP_PREFIX")
    """Host name prefix of the Jobs network group; hosts that start with it get the token over http."""
    conn_limit: int = Field(default=1024, ge=1)
    """Connections kept to each replica, and so the rollouts that are in flight on it; further ones wait for one."""
    connect_timeout_s: float = Field(default=5.0, gt=0)
    """Seconds to wait for a connection to a replica before the rollout goes elsewhere."""

    @field_validator("token", mode="before")
    @classmethod
    def _usable(cls, value: Any) -> Any:
        return _usable_token(value) if isinstance(value, str) else value

    @field_validator("token_file")
    @classmethod
    def _readable(cls, path: Path | None) -> Path | None:
        if path is not None:
            try:
                _usable_token(path.read_text())
            except OSError as error:
                raise ValueError(f"names {path}, which cannot be read: {error.strerror}") from None
        return path

    def read_token(self) -> str | None:
        """Return the token as its file or the environment has it now. Raises OSError or ValueError if it has none."""
        if self.token_file is not None:
            return _usable_token(self.token_file.read_text())
        given = os.environ.get("HF_TOKEN") or (self.token.get_secret_value() if self.token else "")
        return _usable_token(given)

    @field_validator("urls", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value

    @field_validator("urls")
    @classmethod
    def _well_formed(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        cleaned = tuple(base_url(url) for url in urls)
        for position, url in enumerate(cleaned):
            if url in cleaned[:position]:
                raise ValueError(f"lists {url} twice; every replica must be listed once")
        return cleaned


class DiscoverySettings(_Room):
    """Where replicas are looked for, beside those in UPSTREAM_URLS."""

    discover: Annotated[Source | None, NoDecode] = None
    """`jobs:LABEL=VALUE,...` (Hugging Face Jobs with these labels; also `namespace=NAME`, and `port=8000`),
    `dns:HOST:PORT` (every address of a headless service) or `file:PATH` (one URL a line). What appears there joins,
    what vanishes is drained, and what cannot be read changes nothing. Unset: UPSTREAM_URLS are all there are."""
    discover_every_s: float = Field(default=5.0, gt=0)
    """Seconds between two looks there."""

    @field_validator("discover", mode="before")
    @classmethod
    def _parsed(cls, value: Any) -> Any:
        return (parse_source(value) if value.strip() else None) if isinstance(value, str) else value


class DataplaneSettings(_Room):
    """Limits on the path of a rollout."""

    max_body: int = Field(default=64 * 1024 * 1024, ge=1024)
    """Bytes of the largest request body taken; a larger one is answered 413."""
    hold_limit: int = Field(default=64 * 1024 * 1024, ge=0)
    """Bytes up to which a non-streaming answer is held until whole; a longer one is passed on as it arrives."""
    max_buffer: int = Field(default=1024 * 1024 * 1024, ge=1024 * 1024)
    """Bytes that request bodies, held answers and what clients have not taken of theirs may take together; beyond it
    rollouts are answered 503."""
    retries: int = Field(default=3, ge=0)
    """Further tries of a rollout that a replica has failed before the client saw a byte. After them it is held, unless
    one has failed inside with it, and goes on once at most so many of those that failed it are still out."""
    wait_ready_s: float = Field(default=30.0, ge=0)
    """Seconds that a rollout is held in all, while no ready replica holds its policy or its tries are used up, before
    it is answered 503 or 502."""
    rollout_timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds that a rollout may take in all, before it is answered 504: what got lost in a healthy replica would never
    come. 32,768 tokens at 10 a second take 3277 s."""
    max_inflight: int = Field(default=10_000, ge=1)
    """Rollouts in flight; further ones are answered 503 at once. Each takes two descriptors, 20 KB and its body."""


class RoutingSettings(_Room):
    """Which replica gets a rollout."""

    routing: Literal["cost", "round_robin", "least_loaded"] = "cost"
    """`cost` goes where the prompt was, unless the wait costs more; `round_robin` and `least_loaded` are to compare."""
    max_tracked_blocks: int = Field(default=500_000, ge=1000)
    """Pieces of prompts remembered over all policies; the least recently used are forgotten beyond it."""


class ControlSettings(_Room):
    """Loads, unloads and probes."""

    lora_load_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds in which a policy must reach every replica; after that the load is rolled back and fails."""
    lora_retry_s: float = Field(default=2.0, gt=0)
    """Longest pause between two tries on a replica that does not see the files yet. The first pause is 0.1 s."""
    call_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds that a replica may take to answer one control call. At full traffic loads took 0.3 s, pauses 1.1 s."""
    unload_wait_s: float = Field(default=60.0, ge=0)
    """Seconds that an unload waits for the rollouts that use the policy, unless its slot is needed earlier."""
    policy_idle_s: float = Field(default=60.0, ge=0)
    """Seconds without a rollout after which a policy counts as abandoned and may lose its slot to a new one."""
    load_quorum: int | None = Field(default=None, ge=1)
    """Replicas that must hold a new policy before it is served, while those that are only late catch up. Unset: all."""
    adapter_roots: Annotated[tuple[str, ...], NoDecode] = ()
    """Directories, separated by commas, below which adapters and checkpoints must lie, links followed. Unset:
    anywhere."""
    storage: Annotated[tuple[tuple[str, str], ...], NoDecode] = ()
    """Buckets that replicas see as mounts, as `hf://buckets/NAMESPACE/NAME[/FOLDER]=/lora,...`: a policy below /lora is
    loaded only once the Hub lists all its files, since a mount that looks too early remembers for 30 s that nothing is
    there. The Hub is HF_ENDPOINT, the token HF_TOKEN or the one of `hf auth login`. Unset: no waiting."""
    verify: Literal["probe", "list", "off"] = "probe"
    """How a load is checked: `probe` asks each replica for one token too, `list` only reads what it lists."""
    verify_s: float = Field(default=2.0, ge=0)
    """Seconds that a load waits for that token. A full vLLM makes it wait; then the check ends in the background."""
    forward_paths: Annotated[tuple[tuple[str, Literal["one", "all"]], ...], NoDecode] = ()
    """Paths of vLLM to open too, as `/path=one,/path=all`: to one ready replica, or to all of them, really paused if a
    pause is on record. Unset: none, since vLLM guards none of them."""
    pause: Literal["lazy", "real"] = "lazy"
    """`lazy` notes a `/pause?mode=keep` and pauses when base weights change; `real` pauses the replicas at once."""
    probe_s: float = Field(default=2.0, gt=0)
    """Seconds between two health probes of a replica."""
    stall_s: float = Field(default=10.0, gt=0)
    """Seconds without a byte of an answer, of a rollout or to /health and /is_paused, after which a replica counts as
    hung and its rollouts go elsewhere. A busy engine answered within 1.1 s; at a false alarm they begin anew."""
    call_stall_s: float = Field(default=30.0, gt=0)
    """Seconds for which a load, unload or pause may keep the engine from answering before it is asked all the same."""
    drain_timeout_s: float = Field(default=300.0, ge=0)
    """Seconds that a replica which is being removed, or reloaded in turn, keeps the rollouts it has."""
    reload: Literal["rolling", "together"] = "rolling"
    """How replicas read a checkpoint: one after the other, each once its rollouts have ended, or all at once, with
    rollouts standing still and going on with the new weights."""
    reload_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that a replica may take to read a checkpoint."""
    min_ready: int = Field(default=1, ge=1)
    """Ready replicas that /health asks for before it answers 200."""
    start_wait_s: float = Field(default=120.0, ge=0)
    """Seconds after the start during which /health waits for all replicas; afterwards PROXY_MIN_READY are enough."""

    @field_validator("adapter_roots", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value

    @field_validator("forward_paths", mode="before")
    @classmethod
    def _reach(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        items = value.replace(",", " ").split()
        pairs = [item.rpartition("=")[::2] for item in items]
        for item, (path, reach) in zip(items, pairs, strict=True):
            if not path.startswith("/") or reach not in ("one", "all"):
                raise ValueError(f"has '{item}', which is not /path=one or /path=all")
        return tuple(pairs)

    @field_validator("storage", mode="before")
    @classmethod
    def _mounts(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        pairs = [item.rpartition("=")[::2] for item in value.replace(",", " ").split()]
        for url, mount in pairs:
            if not _BUCKET_URL.fullmatch(url) or not mount.startswith("/"):
                given = f"{url}={mount}".removeprefix("=")
                raise ValueError(f"has {given!r}, which is not hf://buckets/NAMESPACE/NAME[/FOLDER]=/MOUNT")
        return tuple(pairs)

    @field_validator("adapter_roots")
    @classmethod
    def _absolute(cls, roots: tuple[str, ...]) -> tuple[str, ...]:
        for root in roots:
            if not root.startswith("/"):
                raise ValueError(f"has {root!r}, which is not an absolute path")
        return roots


class AccessSettings(_Room):
    """Who may call."""

    api_key: SecretStr | None = None
    """Asked of callers, as a bearer token or as the password of HTTP Basic; several are separated by commas. /health,
    /ping, /proxy/live and /proxy/ready need none. Unset: whoever reaches the port may call. TRL sends no key."""
    api_key_file: Path | None = None
    """File that holds the keys, in place of PROXY_API_KEY. It is read at the start."""
    admin_key: SecretStr | None = None
    """Asked for, as a bearer token, before replicas are added, removed or reloaded, and for PROXY_FORWARD_PATHS; good
    for all the rest as well. Unset: only this machine may."""
    require_key: bool = False
    """Do not start without PROXY_API_KEY."""

    @field_validator("api_key", "api_key_file", "admin_key", mode="before")
    @classmethod
    def _not_empty(cls, value: Any) -> Any:
        return value or None  # an empty key, as compose and Kubernetes pass it on, would be one that everybody knows

    @field_validator("api_key")
    @classmethod
    def _keys(cls, keys: SecretStr | None) -> SecretStr | None:
        if keys is not None:
            split_keys(keys.get_secret_value())
        return keys

    @field_validator("admin_key")
    @classmethod
    def _one_key(cls, key: SecretStr | None) -> SecretStr | None:
        return SecretStr(_one_of(split_keys(key.get_secret_value()))) if key is not None else None

    @field_validator("api_key_file")
    @classmethod
    def _readable(cls, path: Path | None) -> Path | None:
        if path is not None:
            try:
                split_keys(path.read_text())
            except OSError as error:
                raise ValueError(f"names {path}, which cannot be read: {error.strerror}") from None
        return path

    def read_api_keys(self) -> tuple[str, ...]:
        """Return the keys that callers may have; none if none is asked for."""
        if self.api_key_file is not None:
            return split_keys(self.api_key_file.read_text())
        return split_keys(self.api_key.get_secret_value()) if self.api_key is not None else ()


class TracingSettings(_Room):
    """Whether traces are written. Everything else about them is said by OpenTelemetry's own OTEL_ variables."""

    otel: bool | None = None
    """Write OpenTelemetry traces; needs the extra `otel`. Unset: if OTEL_EXPORTER_OTLP_ENDPOINT is set."""
    endpoint: str = Field(default="", validation_alias="OTEL_EXPORTER_OTLP_ENDPOINT")
    """Where the collector takes traces over HTTP, such as http://localhost:4318."""

    @property
    def wanted(self) -> bool:
        """Whether to write traces."""
        return bool(self.endpoint) if self.otel is None else self.otel


class Settings:
    """All settings, one field per room. Build it with `Settings.from_env()`."""

    ROOMS: Mapping[str, type[_Room]] = {
        "listen": ListenSettings,
        "upstream": UpstreamSettings,
        "discovery": DiscoverySettings,
        "dataplane": DataplaneSettings,
        "routing": RoutingSettings,
        "control": ControlSettings,
        "access": AccessSettings,
        "tracing": TracingSettings,
    }

    def __init__(
        self,
        *,
        listen: ListenSettings,
        upstream: UpstreamSettings,
        discovery: DiscoverySettings,
        dataplane: DataplaneSettings,
        routing: RoutingSettings,
        control: ControlSettings,
        access: AccessSettings,
        tracing: TracingSettings,
    ) -> None:
        self.listen = listen
        self.upstream = upstream
        self.discovery = discovery
        self.dataplane = dataplane
        self.routing = routing
        self.control = control
        self.access = access
        self.tracing = tracing

    @classmethod
    def from_env(cls) -> Settings:
        """Read the environment. Raises SettingsError with one sentence that names the variable and the remedy."""
        rooms: dict[str, Any] = {}
        for name, room in cls.ROOMS.items():
            try:
                rooms[name] = room()
            except ValidationError as error:
                raise SettingsError(_sentence(room, error)) from error
        settings = cls(**rooms)
        if settings.access.require_key and not settings.access.read_api_keys():
            raise SettingsError(
                "PROXY_REQUIRE_KEY is set, but there is no key: "
                f"set {API_KEY}, or {API_KEY_FILE} to a file that holds it."
            )
        if not settings.upstream.urls and settings.discovery.discover is None:
            raise SettingsError(
                "UPSTREAM_URLS is empty; set it to the URLs of the vLLM replicas, separated by commas, "
                "such as UPSTREAM_URLS=http://127.0.0.1:8001,http://127.0.0.1:8002, or set PROXY_DISCOVER."
            )
        for url in settings.upstream.urls:
            if is_address_of(settings.listen.host, settings.listen.port, url):
                raise SettingsError(
                    f"UPSTREAM_URLS has {url}, where the proxy itself listens; give the replicas' URLs, and let the "
                    "proxy have another port (PROXY_PORT) than a replica on this machine."
                )
        return settings


def variables() -> Iterator[tuple[str, FieldInfo]]:
    """Yield every environment variable with its field: name, default, documentation."""
    for room in Settings.ROOMS.values():
        for name, field in room.model_fields.items():
            yield _variable(name, field), field


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each PROXY_ variable that nothing reads: a typing error, or a retired name."""
    known = {name for name, _ in variables()}
    sentences = []
    for name in sorted(environment):
        if name.startswith("PROXY_") and name not in known:
            meant = get_close_matches(name, known, n=1, cutoff=0.8)
            no_such = f"no setting has this name{f', but {meant[0]} does' if meant else ''}"
            reason = RETIRED_NAMES.get(name, no_such)
            sentences.append(f"{name} is ignored: {reason}.")
    return sentences


def is_address_of(host: str, port: int, url: str) -> bool:
    """Return whether a replica's URL is where the proxy listens, as far as the names say."""
    parts = urlsplit(url)
    names = {host}
    if host in ("127.0.0.1", "0.0.0.0"):
        names |= {"localhost", "127.0.0.1"}
    return (parts.port or {"http": 80, "https": 443}[parts.scheme]) == port and parts.hostname in names


def _variable(name: str, field: FieldInfo) -> str:
    alias = field.validation_alias
    return alias if isinstance(alias, str) else f"PROXY_{name.upper()}"


def _one_of(keys: tuple[str, ...]) -> str:
    if len(keys) > 1:
        raise ValueError("holds several keys; there can be one")
    return keys[0]


def _usable_token(text: str) -> str | None:
    token = text.strip()  # a token read from a file ends with a line break, which no header may hold
    if not (token.isascii() and token.isprintable()):
        raise ValueError("holds characters that no token has; set it to the token alone")
    return token or None


def base_url(url: str) -> str:
    """Return a replica's URL in its one form. Raises ValueError that says what is wrong with it.

    What it lets through names one host to every reader, since the token goes there (P8).
    """
    if "@" in url:  # before anything else: no message may repeat what stands before it
        raise ValueError("has a URL with credentials in it; give only scheme, host and port")
    if not url.isascii() or not url.isprintable() or " " in url:  # it goes into the head of every request as it is
        raise ValueError(f"has {url!r}, which has a character that a URL cannot have; write host names in ASCII")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ValueError(f"has {url!r}, which is not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"has {url!r}, which is not an http or https URL such as http://127.0.0.1:8001")
    if parts.query or parts.fragment:
        raise ValueError(f"has a URL for {parts.hostname} with a query; give only scheme, host and port")
    if not _HOST_AND_PORT.fullmatch(parts.netloc) or _host_for_httpx(url) != parts.hostname:
        raise ValueError(f"has {url!r}, whose host is neither a name in ASCII nor an address; give one that is")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ValueError(f"has {url!r}; leave /v1 out, since the replicas are asked for other paths as well")
    try:
        _ = parts.port
    except ValueError:
        raise ValueError(f"has {url!r}, whose port is not a number up to 65535") from None
    return parts._replace(netloc=parts.netloc.lower()).geturl().rstrip("/")


def _host_for_httpx(url: str) -> str | None:
    """Return whom the client of the control plane would call, None if nobody; the data plane goes by `urlsplit`."""
    try:
        return httpx2.URL(url).raw_host.decode("ascii")
    except httpx2.InvalidURL:
        return None


def _sentence(room: type[_Room], error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = str(first["loc"][0]) if first["loc"] else ""
    name = _variable(where, room.model_fields[where]) if where in room.model_fields else where
    what = first["msg"].removeprefix("Value error, ")
    given = os.environ.get(name, "")
    is_secret = where in room.model_fields and SecretStr in get_args(room.model_fields[where].annotation)
    if first["type"] == "value_error" or is_secret:
        return f"{name} {what}."
    return f"{name}={given!r} cannot be used: {what[:1].lower()}{what[1:]}."


def settings_table() -> str:
    """Return the README's table of all settings, in Markdown."""
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for name, field in variables():
        default = "" if field.default in (None, "", ()) else f"`{field.default}`"
        rows.append(f"| `{name}` | {default} | {' '.join((field.description or '').split())} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(settings_table())
