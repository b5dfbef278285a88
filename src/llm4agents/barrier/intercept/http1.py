"""HTTP/1 as it is spoken with a guest and with an origin: mitmproxy's layers, their readers made strict and bounded.

`install` puts the origin's half in mitmproxy's place once; the guest's half is given to each connection. Both know
nothing of policy: a `Gate` says what becomes of a request.
"""

from __future__ import annotations

import re
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol

import h11
import mitmproxy.proxy.layers.http as http_layers
from h11._receivebuffer import ReceiveBuffer
from mitmproxy import http
from mitmproxy.connection import ConnectionState
from mitmproxy.proxy import commands, events
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layers.http import _events, _http1
from mitmproxy.proxy.layers.http._base import ReceiveHttp

from llm4agents import limits
from llm4agents.barrier.intercept import chunked, heads
from llm4agents.barrier.intercept.heads import BadHead, Head

Commands = Generator[Any, Any, None]

DISCARDED_BYTES_MAX = 67_108_864
"""Of a refused request's body: a client that reads only when it has sent all of it gets its answer."""
_BLANK = re.compile(rb"\n\r?\n")
_EMPTY_LINES = re.compile(rb"(?:\r\n)+")
_INTERIM = re.compile(rb"HTTP/1\.[01] 1(?!01)\d\d(?:[ \r\n])")


@dataclass(frozen=True, slots=True)
class Refusal:
    status: int
    text: str
    close: bool = False


@dataclass(slots=True)
class Admitted:
    """What is sent on in place of what came."""

    target: bytes
    fields: heads.Fields
    exchange: Any
    """Whose this is; on the request as `.exchange`."""


class Gate(Protocol):
    """One guest's connection, as this module sees it."""

    def admit(self, head: Head) -> Admitted | Refusal: ...
    def malformed(self, status: int, reason: str) -> str:
        """Told of what is no request; the answer's text."""
        ...

    def failed(self, message: str) -> tuple[int, str]:
        """Told that the request that was admitted last gets no answer; what the guest is told instead."""
        ...

    def overrun(self) -> None:
        """The guest sends on without reading; its connection is to be cut."""
        ...


_STATUS = {400: "Bad Request", 403: "Forbidden", 405: "Method Not Allowed", 413: "Content Too Large",
           421: "Misdirected Request", 431: "Request Header Fields Too Large", 501: "Not Implemented",
           502: "Bad Gateway",
           503: "Service Unavailable", 504: "Gateway Timeout"}  # fmt: skip


def answer(status: int, text: str, *, close: bool, head_only: bool = False) -> bytes:
    """A whole answer of ours."""
    body = text.encode()
    return (
        f"HTTP/1.1 {status} {_STATUS.get(status, 'Error')}\r\n"
        "content-type: text/plain; charset=utf-8\r\n"
        f"content-length: {len(body)}\r\n"
        "cache-control: no-store\r\n"
        "x-llm4agents: barrier\r\n"
        f"connection: {'close' if close else 'keep-alive'}\r\n\r\n"
    ).encode() + (b"" if head_only else body)


class GuestHttp1(_http1.Http1Server):
    """The guest's side of a connection."""

    def __init__(self, context: Context, gate: Gate) -> None:
        super().__init__(context)
        self._gate = gate
        self._discarded = 0
        self._seen = 0
        """Bytes of a head that is not whole, which were looked at."""
        self.head_since: float | None = None
        """When the head that is not whole yet began (monotonic); None when none has."""
        self.discarding_since: float | None = None

    def _handle_event(self, event: events.Event) -> Commands:
        yield from super()._handle_event(event)
        if (
            isinstance(event, events.DataReceived)
            and self.state == self.wait
            and len(self.buf) > limits.INTERCEPT_PIPELINED_BYTES_MAX
        ):
            self._gate.overrun()

    def read_headers(self, event: events.ConnectionEvent) -> Commands:
        if isinstance(event, events.ConnectionClosed):
            yield commands.CloseConnection(self.conn)
            return
        refused = 0
        while self.state == self.read_headers:
            raw = bytes(self.buf)
            if empty := _EMPTY_LINES.match(raw):
                # After the body of the one before: old clients do that (RFC 9112, 2.2).
                self.buf.maybe_extract_at_most(empty.end())
                continue
            seen, self._seen = self._seen, 0
            try:
                end = heads.end_of(raw, seen)
                if end is None:
                    if raw:
                        self._seen = len(raw)
                        self.head_since = self.head_since or time.monotonic()
                    return
                self.head_since = None
                head = heads.parse(raw[:end])
            except BadHead as error:
                yield from self._refuse(
                    Refusal(error.status, self._gate.malformed(error.status, error.reason), True), False
                )
                return
            self.buf.maybe_extract_at_most(end)
            found = self._gate.admit(head)
            if isinstance(found, Refusal):
                # What has a body, or asks to be closed after the answer, is; so is who sends on without reading.
                refused += 1
                close = (
                    head.length != 0 or heads.closes(head) or refused >= limits.INTERCEPT_REFUSED_AHEAD_MAX
                )
                yield from self._refuse(found, close, head_only=head.method == "HEAD")
                continue
            yield from self._begin(head, found, event)
            return

    def _begin(self, head: Head, admitted: Admitted, event: events.ConnectionEvent) -> Commands:
        self.request = http.Request(
            host="",
            port=0,
            method=head.method.encode(),
            scheme=b"",
            authority=b"",
            path=admitted.target,
            http_version=f"HTTP/{head.version}".encode(),
            headers=http.Headers(admitted.fields),
            content=None,
            trailers=None,
            timestamp_start=time.time(),
            timestamp_end=None,
        )
        self.request.exchange = admitted.exchange
        yield ReceiveHttp(_events.RequestHeaders(self.stream_id, self.request, head.length == 0))
        self.body_reader = make_body_reader(head.length)
        self.state = self.read_body
        yield from self.state(event)

    def _refuse(self, refusal: Refusal, close: bool, *, head_only: bool = False) -> Commands:
        close = refusal.close or close
        yield commands.SendData(
            self.conn, answer(refusal.status, refusal.text, close=close, head_only=head_only)
        )
        if close:
            yield from self._end()

    def _end(self) -> Commands:
        """Nothing more is said; the guest is heard out for a while: closing at once would take the answer back."""
        self.buf = ReceiveBuffer()
        self.discarding_since = time.monotonic()
        self.state = self.discard
        yield commands.CloseTcpConnection(self.conn, half_close=True)

    def discard(self, event: events.ConnectionEvent) -> Commands:
        """The answer is given; what still comes is not looked at."""
        if isinstance(event, events.ConnectionClosed):
            yield commands.CloseConnection(self.conn)
            return
        self._discarded += len(self.buf)
        self.buf = ReceiveBuffer()
        if self._discarded > DISCARDED_BYTES_MAX:
            yield commands.CloseConnection(self.conn)
            self.state = self.done

    def read_body(self, event: events.Event) -> Commands:
        for command in super().read_body(event):
            if isinstance(command, commands.CloseConnection) and isinstance(event, events.DataReceived):
                text = self._gate.malformed(400, "the body's framing is broken")
                if self.response is None:
                    yield commands.SendData(self.conn, answer(400, text, close=True))
                yield from self._end()
            else:
                yield command

    def send(self, event: _events.HttpEvent) -> Commands:
        if isinstance(event, _events.ResponseProtocolError):
            # Its words may quote the origin: the guest gets ours.
            status, text = self._gate.failed(event.message)
            if self.conn.state & ConnectionState.CAN_WRITE:
                if not self.response and status:
                    head_only = self.request is not None and self.request.method == "HEAD"
                    yield commands.SendData(self.conn, answer(status, text, close=True, head_only=head_only))
                yield commands.CloseConnection(self.conn)
            return
        if isinstance(event, _events.ResponseData) and not event.data:
            return  # a chunk of nothing would be the last
        yield from super().send(event)


class OriginHttp1(_http1.Http1Client):
    """The origin's side: heads are bounded, interim answers (100, 103) are read over."""

    _seen = 0

    def read_headers(self, event: events.ConnectionEvent) -> Commands:
        if isinstance(event, events.DataReceived) and self.request is not None:
            while True:
                raw = bytes(self.buf)
                blank = _BLANK.search(raw, max(0, self._seen - 2))
                self._seen = len(raw) if blank is None else 0
                size = len(raw) if blank is None else blank.end()
                if size > limits.INTERCEPT_ANSWER_HEAD_BYTES_MAX:
                    yield commands.CloseConnection(self.conn)
                    yield ReceiveHttp(_server_error(self.stream_id, "the answer's head is too long"))
                    self.state = self.done
                    return
                if blank is None or not _INTERIM.match(raw):
                    break
                self.buf.maybe_extract_at_most(blank.end())
        yield from super().read_headers(event)

    def mark_done(self, *, request: bool = False, response: bool = False) -> Commands:
        if response and self.response is not None and self.response.status_code == 101:
            exchange = getattr(self.request, "exchange", None)
            if exchange is None or not exchange.may_switch(self.response.headers.fields):
                # It is refused further up; what follows is in no protocol that anybody asked for.
                yield commands.CloseConnection(self.conn)
                self.state = self.done
                return
        yield from super().mark_done(request=request, response=response)


class _Chunked:
    """Our reader in the place of h11's."""

    def __init__(self) -> None:
        self._reader = chunked.Reader()

    def __call__(self, buffer: ReceiveBuffer) -> h11.Data | h11.EndOfMessage | None:
        try:
            found = self._reader(buffer)
        except chunked.BadChunk as error:
            raise h11.RemoteProtocolError(str(error)) from None
        if isinstance(found, chunked.End):
            return h11.EndOfMessage()
        return None if found is None else h11.Data(data=found)

    def read_eof(self) -> h11.EndOfMessage:
        raise h11.RemoteProtocolError("the connection ended in the middle of a body")


_original_reader = _http1.make_body_reader


def make_body_reader(expected_size: int | None) -> Any:
    return _Chunked() if expected_size is None else _original_reader(expected_size)


def _server_error(stream_id: int, message: str) -> Any:
    if hasattr(_events, "ErrorCode"):  # mitmproxy 12
        return _events.ResponseProtocolError(stream_id, message, _events.ErrorCode.GENERIC_SERVER_ERROR)
    return _events.ResponseProtocolError(stream_id, message)


def install() -> None:
    """Once for a process. mitmproxy finds both by these names."""
    http_layers.Http1Client = OriginHttp1
    _http1.make_body_reader = make_body_reader
