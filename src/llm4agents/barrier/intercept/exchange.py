"""One request and its answer: judged, given its credentials, its answer struck clean, written down.

Everything here is decided without waiting for anything; the bytes are `connection`'s and mitmproxy's.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from llm4agents import limits
from llm4agents.barrier.intercept import credentials, heads
from llm4agents.barrier.intercept.credentials import Outgoing, Withheld
from llm4agents.barrier.intercept.heads import BadHead, Head
from llm4agents.barrier.intercept.striking import Patterns, Striker
from llm4agents.barrier.policy import Request, Target, Verdict

if TYPE_CHECKING:
    from llm4agents.barrier.intercept.box import Box

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_PATH_CHARACTERS_MAX = 1_024
_HIGH = re.compile(rb"[\x80-\xff]")
_GONE = {b"trailer", b"proxy-authenticate", b"proxy-connection", b"upgrade"}


class Unreadable(Exception):
    """The origin's answer cannot be let through; the guest gets a 502 with these words."""


class Denied(Exception):
    """The request goes nowhere; the guest gets `status` and `text`."""

    def __init__(self, status: int, text: str, *, close: bool = False) -> None:
        self.status, self.text, self.close = status, text, close
        super().__init__(text)


class Exchange:
    """From a request's head to the end of its answer. `carried`: what the connection has carried before."""

    def __init__(
        self, box: Box, flow: str, target: Target, scheme: str, head: Head, carried: set[bytes]
    ) -> None:
        self.box, self.flow, self.target, self.scheme = box, flow, target, scheme
        self.method, self.length = head.method, head.length
        self.version = head.version
        self.began = time.monotonic()
        self.path = "?"
        self.host = ""
        self.verdict: Verdict | None = None
        self.names: list[str] = []
        self.waits = False
        self.over = self.switched = False
        self.ours: Any = None
        """The answer of ours that takes the place of the origin's."""
        self.websocket = heads.is_websocket(head)
        self._accept = _accept(head.get(b"sec-websocket-key") or b"") if self.websocket else b""
        self._head = head
        self._bindings: tuple[Any, ...] = ()
        self._overrides: list[str] = []
        self._carried = carried
        self._signatures: set[bytes] = set()
        self._patterns: Patterns | None = None
        self._reserved = 0
        self._note = ""

    @property
    def what(self) -> str:
        port = "" if self.target.port == (443 if self.scheme == "https" else 80) else f":{self.target.port}"
        return f"{self.method} {self.scheme}://{self.target.seen_as}{port}{self.path}"

    # -- the request --------------------------------------------------------------------------------------

    def admit(self) -> tuple[bytes, heads.Fields]:
        """The target and headers as they are sent on (for a request that waits for its body: as they came).

        Raises Denied, after it has been written down.
        """
        try:
            path = self._where()
            request = self.request()
            verdict = self.box.policy.request(self.target, request)
            self._overrides = heads.overrides(self._head)
            for method in self._overrides:
                if verdict.allowed:  # as its server would act on it, it must be allowed too
                    verdict = self.box.policy.request(self.target, replace(request, method=method))
            self.verdict = verdict
            if not verdict.allowed:
                raise Denied(403, _denied(self.what, verdict.rule, verdict.reason))
            meter = self.box.meter(verdict)
            if meter is not None and meter.spent:
                reason = f"its rule lets {verdict.bytes_max} bytes through, and they are"
                self.verdict = Verdict(False, verdict.rule, reason)
                raise Denied(403, _denied(self.what, verdict.rule, reason))
            fields = heads.plain(self._head, self._host())
            self._bindings = self._bound(request)
            fields = self._remembering(fields)
            if self._bindings:
                self.waits = credentials.waits_for_body(self._bindings, fields, self.length)
                if self.waits:
                    self._reserve(self.length or 0)
                else:
                    path, fields, _ = self.put_in(path, fields, None)
            self._unbound(path, fields)
        except Withheld as error:
            self.done(error.status, reason=error.reason)
            raise Denied(error.status, _failed(self.what, error.reason)) from None
        except BadHead as error:
            self.done(error.status, deny=("framing", error.reason))
            raise Denied(error.status, _refused(error.reason), close=True) from None
        except Denied as error:
            self.done(error.status)
            raise
        return path, fields

    def request(self) -> Request:
        return Request(self.method, self.path, self.scheme, self.host)  # type: ignore[arg-type]

    def _bound(self, request: Request) -> tuple[Any, ...]:
        """The credentials it gets: those that are bound to each method it may be taken for."""
        found = self.box.policy.credentials(self.target, request)
        for method in self._overrides:
            also = self.box.policy.credentials(self.target, replace(request, method=method))
            found = tuple(binding for binding in found if binding in also)
        return found

    def _where(self) -> bytes:
        """The path and query. Raises BadHead for what is no request to the connection's host."""
        head, target = self._head, self.target
        if head.method.upper() in ("CONNECT", "TRACE", "TRACK"):
            why = (
                "there is no proxy here"
                if head.method.upper() == "CONNECT"
                else "it would echo what was put in"
            )
            raise BadHead(405, f"{head.method} is not let through: {why}")
        path, authority = heads.origin_form(head, self.scheme)
        # Bytes that should have been escaped are read as if they were, as servers do.
        self.path = _HIGH.sub(lambda byte: b"%%%02X" % byte[0][0], path.partition(b"?")[0]).decode("ascii")
        named = head.get(b"host")
        for said in (named, authority):
            if said is None:
                continue
            host, port = heads.authority(said)
            self.host = host
            if host != target.seen_as:
                raise BadHead(421, f"the request is for {host}, and its connection goes to {target.seen_as}")
            if port is not None and port != self._port:
                raise BadHead(421, f"the request is for port {port}, and its connection goes to {self._port}")
        self.host = self.host or target.seen_as
        return path

    @property
    def _port(self) -> int:
        return self.box.asked_port(self.flow, self.target)

    def _host(self) -> bytes:
        host = self.target.host
        host = f"[{host}]" if ":" in host else host
        return (
            host
            if self.target.port == (443 if self.scheme == "https" else 80)
            else f"{host}:{self.target.port}"
        ).encode()

    def put_in(
        self, path: bytes, fields: heads.Fields, body: bytes | None
    ) -> tuple[bytes, heads.Fields, bytes | None]:
        """The same with the credentials in it. Raises Withheld."""
        if body is not None and self._bindings != self._bound(self.request()):
            raise Withheld(503, "the network's credentials have changed while its body came: try again")
        outgoing = Outgoing(self.method, path, fields, body)
        carried = credentials.put_in(self._bindings, self.box.values, outgoing, now=lambda: datetime.now(UTC))
        self.names = list(dict.fromkeys(carried.names))
        if carried.signatures or carried.forms - self._carried:
            self._carried |= carried.forms
            self._signatures |= carried.signatures
            self._patterns = None
        return outgoing.target, outgoing.fields, outgoing.body

    def _remembering(self, fields: heads.Fields) -> heads.Fields:
        """The headers of a request to a host that has been given secrets by other requests, perhaps: one that was put
        there to be kept is struck when it is asked for, by whichever request."""
        bound = self.box.policy.bound(self.target)
        if not bound:
            return fields
        for binding in bound:
            self._carried |= self.box.values.known(binding.secret, binding.username)
        gone = {b"accept-encoding"}
        if any(binding.form == "placeholder" for binding in bound):
            # The guest chooses where it is put: asked for in ranges, it would come in parts that nobody recognises.
            gone |= {b"range", b"if-range"}
        return [*(f for f in fields if f[0].lower() not in gone), (b"Accept-Encoding", b"identity")]

    def _unbound(self, path: bytes, fields: heads.Fields) -> None:
        """Placeholders that go out as they are, since nothing binds them to this host: noted."""
        for name, placeholder in self.box.placeholders:
            if (
                name not in self.names
                and not self.waits
                and (placeholder.search(path) or any(placeholder.search(value) for _, value in fields))
            ):
                self._note = f"the placeholder of {name} is not bound to this request and was left as it is"

    def _reserve(self, size: int) -> None:
        if self.box.waiting + size > limits.INTERCEPT_WAITING_BYTES_MAX:
            raise Withheld(503, "too many bodies wait for a placeholder or a signature: try again")
        self._reserved = size
        self.box.waiting += size

    def hold(self, size: int) -> bool:
        """Parts of WebSocket messages wait for the rest, `size` bytes of this one's now: whether there is room."""
        if self.over:
            return True
        self.box.waiting += size - self._reserved
        self._reserved = size
        return not size or self.box.waiting <= limits.INTERCEPT_WAITING_BYTES_MAX

    # -- the answer ---------------------------------------------------------------------------------------

    def patterns(self) -> Patterns | None:
        """What is struck from everything the guest is sent."""
        if self._patterns is None and self._signatures:
            self._patterns = Patterns(self._carried | self._signatures)
        elif self._patterns is None and self._carried:
            self._patterns = self.box.patterns(frozenset(self._carried))
        return self._patterns

    def answer(
        self, status: int, fields: Iterable[tuple[bytes, bytes]]
    ) -> tuple[heads.Fields, Callable[[bytes], Any] | None]:
        """The answer's headers as the guest gets them, and what its body goes through. Raises Unreadable."""
        patterns = self.patterns()
        found: heads.Fields = []
        for name, value in fields:
            value = value.replace(b"\r\n", b"")  # folded lines
            if not heads.is_value(value):
                raise Unreadable("a header with control characters")
            if name.lower() in _GONE and not (status == 101 and name.lower() == b"upgrade"):
                continue
            found.append((patterns.strike(name), patterns.strike(value)) if patterns else (name, value))
        if status == 101:
            self._switched(found)
            return found, None
        if not patterns or self.method == "HEAD" or status in (204, 304):
            return found, None
        codings = [coding for coding in _values(found, b"content-encoding") if coding != b"identity"]
        if set(_values(found, b"transfer-encoding")) - {b"chunked"} or len(codings) > 1:
            raise Unreadable("it is encoded more than once, so a credential in it could not be struck out")
        coding = codings[0] if codings else b"identity"
        if coding == b"identity":
            return found, _through(Striker(patterns))
        if coding not in (b"gzip", b"x-gzip", b"deflate"):
            raise Unreadable(
                f"it is encoded with {printable(coding[:20].decode('latin-1'))} although identity was asked for, so a "
                "credential in it could not be struck out"
            )
        found = [
            f
            for f in found
            if f[0].lower() not in (b"content-encoding", b"content-length", b"transfer-encoding")
        ]
        found.append(
            (b"Transfer-Encoding", b"chunked") if self.version == "1.1" else (b"Connection", b"close")
        )
        return found, _through(Striker(patterns), Inflater(coding))

    def may_switch(self, fields: Iterable[tuple[bytes, bytes]]) -> bool:
        try:
            self._switched(list(fields))
        except Unreadable:
            return False
        return True

    def _switched(self, fields: heads.Fields) -> None:
        """Only a WebSocket that was asked for, in every particular."""
        upgrade = _values(fields, b"upgrade")
        accept = [value for name, value in fields if name.lower() == b"sec-websocket-accept"]
        if not self.websocket or upgrade != [b"websocket"] or accept != [self._accept]:
            raise Unreadable("it switches to a protocol that was not asked for")
        if _values(fields, b"sec-websocket-extensions"):
            raise Unreadable("it switches on WebSocket extensions that were not asked for")

    # -- the end ------------------------------------------------------------------------------------------

    def done(
        self, status: int | None = None, *, reason: str | None = None, deny: tuple[str, str] | None = None
    ) -> None:
        """Write it down, once."""
        if self.over:
            return
        self.over = True
        status = 101 if self.switched else status
        self.box.waiting -= self._reserved
        verdict = self.verdict
        if deny is not None:
            verdict = Verdict(False, *deny)
        bytes_out, bytes_in = self.box.counted(self.flow)
        self.box.write(
            flow=self.flow,
            verdict="allow" if verdict is not None and verdict.allowed else "deny",
            rule=verdict.rule if verdict is not None else None,
            reason=reason
            or self._note
            or (verdict.reason if verdict is not None and not verdict.allowed else None),
            name=self.target.seen_as if self.target.name or self.target.asked else None,
            address=self.box.address(self.flow),
            port=self.target.port,
            protocol="tls" if self.scheme == "https" else "http",
            method=self.method[:32],
            path=printable(self.path),
            status=status,
            bytes_in=bytes_in,
            bytes_out=bytes_out,
            duration_ms=round((time.monotonic() - self.began) * 1_000),
            credentials=self.names or None,
        )


class Inflater:
    """A compressed body, piece by piece. A piece that comes to too much is refused: it is a bomb."""

    def __init__(self, coding: bytes) -> None:
        self._wrapped = coding != b"deflate"
        self._stream: Any = zlib.decompressobj(16 + zlib.MAX_WBITS) if self._wrapped else None
        self._ended = False

    def __call__(self, data: bytes) -> bytes:
        if self._stream is None and data:  # `deflate` is zlib's format, but some send the bare one
            header = len(data) > 1 and data[0] & 0x0F == 8 and (data[0] << 8 | data[1]) % 31 == 0
            self._stream = zlib.decompressobj() if header else zlib.decompressobj(-zlib.MAX_WBITS)
        out = bytearray()
        while data and not self._ended:
            try:
                out += self._stream.decompress(data, limits.INTERCEPT_INFLATED_BYTES_MAX - len(out) + 1)
            except zlib.error:
                raise Unreadable("it is not what its Content-Encoding says") from None
            if len(out) > limits.INTERCEPT_INFLATED_BYTES_MAX:
                raise Unreadable("it is a compressed answer that comes to far too much")
            data = self._stream.unconsumed_tail
            if self._stream.eof:
                data = self._stream.unused_data
                self._ended = not self._wrapped or not data.startswith(b"\x1f\x8b")
                self._stream = zlib.decompressobj(16 + zlib.MAX_WBITS)
        return bytes(out)


def _through(striker: Striker, inflate: Inflater | None = None) -> Callable[[bytes], bytes]:
    """As mitmproxy calls it: with each piece, and with nothing at the end."""

    def step(data: bytes) -> bytes:
        if not data:
            return striker.end()
        return striker.feed(inflate(data) if inflate is not None else data)

    return step


def _accept(key: bytes) -> bytes:
    return base64.b64encode(hashlib.sha1(key + _GUID).digest())  # noqa: S324 (RFC 6455 has no other)


def _values(fields: heads.Fields, name: bytes) -> list[bytes]:
    found = [
        part.strip().lower() for key, value in fields if key.lower() == name for part in value.split(b",")
    ]
    return [part for part in found if part]


def printable(text: str) -> str:
    """As it is written down: no control character ends a line or colours a terminal."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text[:_PATH_CHARACTERS_MAX])


def _denied(what: str, rule: str, reason: str) -> str:
    return (
        f"LLM4Agents sandbox: {printable(what)} is not allowed by this sandbox's network policy.\n\n"
        f"reason: {reason}\nrule:   {rule}\n"
    )


def _failed(what: str, reason: str) -> str:
    return f"LLM4Agents sandbox: {printable(what)} is allowed, but there is no answer to it.\n\nreason: {reason}\n"


def _refused(reason: str) -> str:
    return f"LLM4Agents sandbox: this request is let through nowhere.\n\nreason: {reason}\n"


def failed(what: str, reason: str) -> str:
    """The text of an answer that the origin did not give."""
    return _failed(what, reason)
