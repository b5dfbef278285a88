"""Traces: refused with what to install, or (where OpenTelemetry is) sent to a receiver of this test over HTTP."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from llm4agents.engine.tracing import Tracing
from llm4agents.errors import HostSetupError
from llm4agents.store import SandboxRow, open_store
from llm4agents.store.store import Stamp


def _there() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


THERE = _there()
NS = 10**9


@pytest.mark.skipif(THERE, reason="OpenTelemetry is installed")
def test_what_is_missing_is_named() -> None:
    with pytest.raises(HostSetupError, match=r"llm4agents\[otel\]"):
        Tracing()


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    bodies: list[bytes] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    yield bodies
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.skipif(not THERE, reason="OpenTelemetry is not installed: the extra `otel`")
def test_spans_of_calls_and_acts_arrive(received: list[bytes], tmp_path: Path) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    store = open_store(tmp_path / "store.db")
    tracing = Tracing()
    tracing.watch(store)
    row = SandboxRow("sbx_x", "base", "creating", 1.0, 1e12, 60.0, 1, 512, 5)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with tracing.call("POST", {"traceparent": parent}) as span:
        store.add(row, Stamp(100 * NS, 5 * NS, "boot"))
        store.transition(row, "running", None, Stamp(101 * NS, 6 * NS, "boot"))
        tracing.named(span, "POST", "/v1/sandboxes", 201, None)
    with tracing.call("POST", {}) as span:
        store.transition(row, "pausing", None, Stamp(102 * NS, 7 * NS, "boot"))
        # The wall clock is stepped back meanwhile.
        store.transition(row, "failed", "no", Stamp(92 * NS, 10 * NS, "boot"))
        tracing.named(span, "POST", "/v1/sandboxes/{sandbox}/pause", 500, "sbx_x")
    tracing.close()
    store.close()
    spans = {}
    for body in received:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            assert any(a.value.string_value == "llm4agents" for a in resource.resource.attributes)
            spans |= {span.name: span for scope in resource.scope_spans for span in scope.spans}
    assert set(spans) == {
        "POST /v1/sandboxes",
        "sandbox.create",
        "POST /v1/sandboxes/{sandbox}/pause",
        "sandbox.pause",
    }
    create, pause = spans["sandbox.create"], spans["sandbox.pause"]
    assert create.end_time_unix_nano - create.start_time_unix_nano == NS
    assert pause.end_time_unix_nano - pause.start_time_unix_nano == 3 * NS
    assert create.parent_span_id == spans["POST /v1/sandboxes"].span_id
    assert spans["POST /v1/sandboxes"].trace_id.hex() == parent.split("-")[1]
    assert spans["sandbox.pause"].status.code == spans["POST /v1/sandboxes/{sandbox}/pause"].status.code == 2
