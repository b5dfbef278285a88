"""OpenTelemetry, on request (`LLM4AGENTS_OTEL=1` and the extra `otel`): a span per call and per create, pause, resume.

Where spans go is said by OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_ENDPOINT …). Without the request nothing
is imported. Spans say which sandbox, route, states and errors; never what was run or what came out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Final

from llm4agents import __version__
from llm4agents.errors import HostSetupError
from llm4agents.store import SandboxRow, Store
from llm4agents.store.store import Stamp

_ACTS: Final = {"creating": "create", "pausing": "pause", "resuming": "resume"}
_NEEDED: Final = {
    "trace": "opentelemetry.trace",
    "context": "opentelemetry.context",
    "propagate": "opentelemetry.propagate",
    "resources": "opentelemetry.sdk.resources",
    "sdk": "opentelemetry.sdk.trace",
    "export": "opentelemetry.sdk.trace.export",
    "otlp": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}


class Tracing:
    """Raises HostSetupError, naming what to install, when the packages are not there."""

    def __init__(self) -> None:
        try:
            found: dict[str, Any] = {name: import_module(module) for name, module in _NEEDED.items()}
        except ImportError as error:
            raise HostSetupError(
                f"LLM4AGENTS_OTEL is set and OpenTelemetry is not installed: {error}",
                hint="pip install 'llm4agents[otel]', or unset LLM4AGENTS_OTEL",
            ) from error
        self._api = found
        resource = found["resources"].Resource.create(
            {"service.name": "llm4agents", "service.version": __version__}
        )
        self._provider = found["sdk"].TracerProvider(resource=resource)
        self._provider.add_span_processor(
            found["export"].BatchSpanProcessor(found["otlp"].OTLPSpanExporter())
        )
        self._tracer = self._provider.get_tracer("llm4agents", __version__)
        self._began: dict[str, Stamp] = {}

    def watch(self, store: Store) -> None:
        """A span for each create, pause and resume, within the call that asked for it."""
        store.on_transition.append(self._changed)

    def close(self) -> None:
        """Send what is left. Blocks, for seconds when nobody answers: for a thread."""
        self._provider.shutdown()

    @contextlib.contextmanager
    def call(self, method: str, headers: Mapping[str, str]) -> Iterator[Any]:
        """A span around a request, child of the client's own if it sent one; `named` says what it was."""
        parent = self._api["propagate"].extract(dict(headers))
        kind = self._api["trace"].SpanKind.SERVER
        with self._tracer.start_as_current_span(method, context=parent, kind=kind) as span:
            yield span

    def named(self, span: Any, method: str, route: str, status: int, sandbox: str | None) -> None:
        span.update_name(f"{method} {route}")
        span.set_attribute("http.request.method", method)
        span.set_attribute("http.route", route)
        span.set_attribute("http.response.status_code", status)
        if sandbox is not None:
            span.set_attribute("llm4agents.sandbox", sandbox)
        if status >= 500:
            span.set_status(self._api["trace"].Status(self._api["trace"].StatusCode.ERROR))

    def _changed(self, row: SandboxRow, was: str | None, to: str, reason: str | None, at: Stamp) -> None:
        began = self._began.pop(row.id, None)
        if to in _ACTS:
            self._began[row.id] = at
        act = _ACTS.get(was or "")
        if act is None or began is None:
            return
        # Ends now by the wall clock, and took what CLOCK_BOOTTIME says.
        start_ns = at.wall_ns - max(0, at.monotonic_ns - began.monotonic_ns)
        span = self._tracer.start_span(f"sandbox.{act}", start_time=start_ns)
        span.set_attribute("llm4agents.sandbox", row.id)
        span.set_attribute("llm4agents.template", row.template)
        if to in ("failed", "killed"):
            span.set_status(
                self._api["trace"].Status(self._api["trace"].StatusCode.ERROR, (reason or to)[:500])
            )
        span.end(end_time=at.wall_ns)
