"""A collector of OpenTelemetry spans: takes OTLP over HTTP as the real ones do, and keeps them."""

import gzip
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

ERROR = Status.STATUS_CODE_ERROR
CLIENT = Span.SPAN_KIND_CLIENT


@dataclass(frozen=True)
class TakenSpan:
    """One span as it came. Ids in hexadecimal digits, times in nanoseconds."""

    name: str
    trace: str
    id: str
    parent: str
    began: int
    ended: int
    kind: int
    error: str
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...]
    worker: str
    service: str


@dataclass
class Collector:
    """Keeps the spans that came; `url` is the endpoint to configure."""

    url: str = ""
    spans: list[TakenSpan] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    def of(self, run_id: str) -> list[TakenSpan]:
        """Return the spans of a run, in the order of their begins."""
        trace = run_id.replace("-", "")
        return sorted((one for one in self.spans if one.trace == trace), key=lambda one: one.began)

    def names(self, run_id: str) -> list[str]:
        """Return the names of a run's spans, sorted."""
        return sorted(one.name for one in self.of(run_id))

    def has_all(self, run_id: str, *names: str) -> Callable[[], bool]:
        """Return what tells whether spans of these names came of the run."""
        return lambda: set(names) <= set(self.names(run_id))

    def take(self, body: bytes) -> None:
        """Keep the spans of one request."""
        self.bodies.append(body)
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            who = _plain(resource.resource.attributes)
            for scope in resource.scope_spans:
                self.spans += [_taken(span, who) for span in scope.spans]


@contextmanager
def collector() -> Iterator[Collector]:
    """Run a collector on a free port of this machine."""
    kept = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/traces"
            assert self.headers["Content-Type"] == "application/x-protobuf"
            packed = self.headers.get("Content-Encoding") == "gzip"
            kept.take(gzip.decompress(body) if packed else body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            """Keep quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    kept.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield kept
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _taken(span: Span, who: dict[str, Any]) -> TakenSpan:
    return TakenSpan(
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        began=span.start_time_unix_nano,
        ended=span.end_time_unix_nano,
        kind=span.kind,
        error=span.status.message if span.status.code == ERROR else "",
        attributes=_plain(span.attributes),
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        worker=str(who["service.instance.id"]),
        service=str(who["service.name"]),
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind) if kind else None
