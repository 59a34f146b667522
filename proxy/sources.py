"""Where replicas are looked for: the three forms of PROXY_DISCOVER, as data. `discovery` looks there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_FORMS = "jobs:LABEL=VALUE, dns:HOST:PORT or file:PATH"


@dataclass(frozen=True)
class JobsSource:
    """Hugging Face Jobs that have all these labels."""

    labels: tuple[tuple[str, str], ...]
    namespace: str | None = None
    """Of the user or organization that runs them; None: the token's own."""
    port: int = 8000
    """On which their servers listen."""

    def __str__(self) -> str:
        return "jobs:" + ",".join(f"{name}={value}" for name, value in self.labels)


@dataclass(frozen=True)
class DnsSource:
    """The addresses of one host name, as a headless service of Kubernetes has them."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"dns:{self.host}:{self.port}"


@dataclass(frozen=True)
class FileSource:
    """A file with one URL a line."""

    path: Path

    def __str__(self) -> str:
        return f"file:{self.path}"


Source = JobsSource | DnsSource | FileSource


def parse_source(text: str) -> Source:
    """Read a value of PROXY_DISCOVER. Raises ValueError that says what is wrong with it."""
    kind, _, rest = text.strip().partition(":")
    match kind:
        case "jobs":
            return _jobs(rest)
        case "dns":
            host, _, port = rest.rpartition(":")
            if not host or ":" in host:
                raise ValueError(f"has {rest!r} after dns:, which is not HOST:PORT")
            return DnsSource(host, _port(port))
        case "file" if rest:
            return FileSource(Path(rest))
    raise ValueError(f"has {text!r}, which is none of {_FORMS}")


def _jobs(text: str) -> JobsSource:
    """Read `label=value,...`; the names `namespace` and `port` are no labels."""
    given: dict[str, str] = {}
    for item in text.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not (name and equals and value):
            raise ValueError(f"has {item!r} after jobs:, which is not LABEL=VALUE")
        if name in given:
            raise ValueError(f"has {name!r} twice")
        given[name] = value
    namespace, port = given.pop("namespace", None), _port(given.pop("port", "8000"))
    if not given:
        raise ValueError("has no label after jobs:, and would take every Job for a replica")
    return JobsSource(tuple(given.items()), namespace, port)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 65536):
        raise ValueError(f"has {text!r}, which is not a port")
    return int(text)
