"""An OpenTelemetry collector of our own: takes spans over OTLP/HTTP on a real port, and gives them as trees.

with Collector() as collector:
    RunningProxy(replica.url, **collector.environment)
    (rollout,) = collector.wait("rollout")
    assert [child.name for child in rollout.children] == ["choose", "upstream", "relay"]
"""

from __future__ import annotations

import gzip
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tests.support.replicas import wait_until


@dataclass
class Span:
    """One span as it arrived; times are nanoseconds since 1970."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    began: int
    ended: int
    attributes: dict[str, Any]
    events: list[str]
    failed: bool
    message: str
    """Of its status."""
    children: list[Span] = field(default_factory=list)

    def sent_as(self, traceparent: str) -> bool:
        """Whether this header carries it."""
        return traceparent.split("-")[1:3] == [self.trace_id, self.span_id]

    def below(self, name: str) -> list[Span]:
        """Return its children of this name, in the order in which they began."""
        return [child for child in self.children if child.name == name]


class Collector:
    """Listens on a free port of loopback and keeps all spans that it is sent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        """The attributes of the resource of each request."""
        self.headers: list[dict[str, str]] = []
        """The HTTP headers of each request."""
        self.raw = b""
        """All that was sent, unpacked."""

    def __enter__(self) -> Self:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers["content-encoding"] == "gzip":
                    body = gzip.decompress(body)
                collector._take(self.path, dict(self.headers), body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        """What OTEL_EXPORTER_OTLP_ENDPOINT is set to."""
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables under which a proxy sends its spans here, soon after they end."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.url, "OTEL_BSP_SCHEDULE_DELAY": "100"}

    def wait(self, name: str, count: int = 1, **attributes: Any) -> list[Span]:
        """Wait for so many spans of this name with these `lora_sync.` attributes, and return them with what is below.

        Of what is below them all has arrived that ended before they did.
        """
        wanted = {f"lora_sync.{key}": value for key, value in attributes.items()}

        def found() -> list[Span]:
            return [s for s in self.spans() if s.name == name and wanted.items() <= s.attributes.items()]

        wait_until(lambda: len(found()) >= count, what=f"{count} spans {name} {attributes}")
        return found()

    def spans(self) -> list[Span]:
        """Return all spans in the order in which they began, each with its children."""
        with self._lock:
            spans = sorted(self._spans, key=lambda span: span.began)
        for span in spans:
            span.children = [child for child in spans if child.parent_id == span.span_id]
        return spans

    def _take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        assert path == "/v1/traces", path
        request = ExportTraceServiceRequest.FromString(body)
        with self._lock:
            self.raw += body
            self.headers.append({name.lower(): value for name, value in headers.items()})
            for resource in request.resource_spans:
                self.resources.append(_attributes(resource.resource.attributes))
                self._spans += [_span(span) for scope in resource.scope_spans for span in scope.spans]


def _span(span: SpanMessage) -> Span:
    return Span(
        name=span.name,
        kind=SpanMessage.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        began=span.start_time_unix_nano,
        ended=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=[event.name for event in span.events],
        failed=span.status.code == Status.STATUS_CODE_ERROR,
        message=span.status.message,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
