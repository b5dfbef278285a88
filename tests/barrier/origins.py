"""The servers of the lab's world: they answer on every address, do what the path says, and record what reached them.

Ports: 80, 8080 HTTP · 443, 8443 HTTPS (HTTP/1.1, h2 offered by h2.example.com only) · 53, 853 DNS over TCP and TLS ·
22, 25, 5432, 9000, 9418 raw (a banner, then an echo). A host's own service listens on HOST_PORT of the host.

Paths: /echo (headers and body come back as JSON), /echo-header, /echo-gzip, /echo-deflate, /echo-zstd (unreadable),
/echo-split (one byte a chunk), /echo-base64, /echo-percent, /echo-status and others · /redirect?to=URL · /sse?n= ·
/ws, /ws-head (begins with a message of what the head carried) · /big?bytes= · whatever else says hello.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import socket
import ssl
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.barrier.world import NAMES, Arrival

if TYPE_CHECKING:
    from tests.barrier.lab import Lab

HOST_PORT = 8_099
RAW_PORTS = (22, 25, 5432, 9000, 9418)
_BODY_KEPT = 65_536
_H2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class Origins:
    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        for context in (lab.trusted, lab.trusted_h2, lab.untrusted):
            context.sni_callback = self._named

    @staticmethod
    def _named(sock: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        sock.lab_sni = name  # type: ignore[attr-defined]

    def listen(self) -> None:
        """In the world."""
        for port in (80, 8080):
            self.lab.accept(listener(port), self.http)
        for port in (443, 8443):
            self.lab.accept(listener(port), self.https)
        for port in RAW_PORTS:
            self.lab.accept(listener(port), self.raw)
        self.lab.accept(listener(53), self.dns)
        self.lab.accept(listener(853), self.dot)

    def listen_on_host(self) -> None:
        self.lab.accept(listener(HOST_PORT), self.raw)

    def record(self, kind: str, sock: socket.socket, **more: Any) -> Arrival:
        address, port = sock.getsockname()[:2]
        arrival = Arrival(kind, address.removeprefix("::ffff:"), port, **more)
        with self.lab.lock:
            self.lab.arrivals.append(arrival)
        return arrival

    # -- what listens

    def raw(self, sock: socket.socket) -> None:
        arrival = self.record("tcp", sock)
        sock.sendall(b"lab ready\n")
        while data := sock.recv(65_536):
            arrival.body_bytes += len(data)
            arrival.body = (arrival.body + data)[:_BODY_KEPT]
            sock.sendall(data)

    def dns(self, sock: socket.socket, over: str = "tcp") -> None:
        stream = sock.makefile("rb")
        while head := stream.read(2):
            answer = self.lab.answer(
                stream.read(int.from_bytes(head, "big")), over, sock.getsockname()[0].removeprefix("::ffff:")
            )
            sock.sendall(len(answer).to_bytes(2, "big") + answer)

    def dot(self, sock: socket.socket) -> None:
        self.record("tcp", sock)
        with self.lab.trusted.wrap_socket(sock, server_side=True) as tls:
            self.dns(tls, "tls")

    def http(self, sock: socket.socket) -> None:
        self.record("tcp", sock)
        Conversation(self, sock, "http", None).run()

    def https(self, sock: socket.socket) -> None:
        arrival = self.record("tls", sock)
        address = arrival.address
        arrival.raw = sock.recv(16_384, socket.MSG_PEEK)
        context = self.lab.trusted
        if address in NAMES["untrusted.example.com"]:
            context = self.lab.untrusted
        elif address in NAMES["h2.example.com"]:
            context = self.lab.trusted_h2
        with context.wrap_socket(sock, server_side=True) as tls:
            arrival.sni = getattr(tls, "lab_sni", None)
            if tls.selected_alpn_protocol() == "h2":
                H2Conversation(self, tls, arrival.sni).run()
            else:
                Conversation(self, tls, "https", arrival.sni).run()


class Conversation:
    """HTTP/1.x on one connection, until one side has had enough."""

    def __init__(self, origins: Origins, sock: socket.socket, kind: str, sni: str | None) -> None:
        self.origins, self.sock, self.kind, self.sni = origins, sock, kind, sni
        self.stream = sock.makefile("rb")

    def run(self) -> None:
        while self.one():
            pass

    def one(self) -> bool:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = self.stream.readline(65_537)
            if not line or len(head) > 1 << 20:
                return False
            if head or line.strip():
                head += line
        first, *rest = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        headers = [(name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in rest)]
        method, target, version = [*first.split(" "), "", ""][:3]
        arrival = self.origins.record(
            self.kind, self.sock, sni=self.sni, method=method, target=target, headers=headers, raw=head
        )
        for piece in self.body(arrival):
            arrival.body_bytes += len(piece)
            arrival.body = (arrival.body + piece)[:_BODY_KEPT]
        self.answer(arrival)
        return version == "HTTP/1.1" and (arrival.header("connection") or "").lower() != "close"

    def body(self, arrival: Arrival) -> Iterator[bytes]:
        """As this origin frames it. They differ where a message says two things: te.example.com sees "chunked" in
        whatever looks like it and heeds it, cl.example.com heeds the last Content-Length, all others the standard."""
        coding = (arrival.header("transfer-encoding") or "").lower()
        lengths = [value for name, value in arrival.headers if name.lower() == "content-length"]
        chunked, length = coding == "chunked", int(lengths[0]) if lengths else 0
        if arrival.address in NAMES["te.example.com"]:
            chunked = any(
                "chunked" in value.lower() for name, value in arrival.headers if "encoding" in name.lower()
            )
        if arrival.address in NAMES["cl.example.com"] and lengths:
            chunked, length = False, int(lengths[-1])
        if arrival.header("expect"):
            self.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if chunked:
            while size := int(self.stream.readline().split(b";")[0] or b"0", 16):
                yield self.stream.read(size)
                self.stream.readline()
            while self.stream.readline().strip():
                pass
            return
        while length > 0 and (piece := self.stream.read1(min(length, 65_536))):
            length -= len(piece)
            yield piece

    def send(self, body: bytes, status: str = "200 OK", **headers: str) -> None:
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.sock.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body)

    def answer(self, arrival: Arrival) -> None:
        url = urlsplit(arrival.target)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        echo = json.dumps(
            {
                "method": arrival.method,
                "target": arrival.target,
                "headers": arrival.headers,
                "body": arrival.body.decode("latin-1"),
                "origin": f"{arrival.address}:{arrival.port}",
                "sni": arrival.sni,
            }
        ).encode()
        carried = " ".join(value for name, value in arrival.headers if name.lower() not in ("host", "accept"))
        if arrival.method == "TRACE":
            self.send(arrival.raw, Content_Type="message/http")
        elif url.path == "/echo":
            self.send(echo, Content_Type="application/json")
        elif url.path == "/echo-header":
            self.send(
                b"see the headers\n", X_Echo=carried, Set_Cookie=f"session={carried}", X_Target=arrival.target
            )
        elif url.path == "/echo-gzip":
            self.send(gzip.compress(echo), Content_Encoding="gzip")
        elif url.path == "/echo-deflate":
            self.send(zlib.compress(echo), Content_Encoding="deflate")
        elif url.path == "/echo-zstd":
            self.send(b"\x28\xb5\x2f\xfd" + echo, Content_Encoding="zstd")
        elif url.path == "/echo-base64":
            token = (arrival.header("authorization") or arrival.header("x-api-key") or "").split(" ")[-1]
            self.send(base64.b64encode(token.encode()) + b"\n")
        elif url.path == "/echo-percent":
            self.send(quote(carried, safe="").encode())
        elif url.path == "/echo-status":
            self.send(b"", f"200 {carried.replace(chr(13), '')}")
        elif url.path == "/echo-double":
            self.send(gzip.compress(gzip.compress(echo)), Content_Encoding="gzip, gzip")
        elif url.path == "/echo-members":
            self.send(gzip.compress(echo[:30]) + gzip.compress(echo[30:]), Content_Encoding="gzip")
        elif url.path == "/echo-percent-small":
            self.send(
                re.sub("%[0-9A-F]{2}", lambda found: found[0].lower(), quote(carried, safe="")).encode()
            )
        elif url.path == "/echo-trailer":
            self.chunks(
                iter([b"see the trailer\n"]), trailer=f"X-Echo: {carried}\r\n", before="Trailer: X-Echo\r\n"
            )
        elif url.path == "/echo-extension":
            self.sock.sendall(
                f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x={carried}\r\nabc\r\n0\r\n\r\n".encode()
            )
        elif url.path == "/echo-early":
            self.sock.sendall(f"HTTP/1.1 103 Early Hints\r\nLink: <{carried}>\r\n\r\n".encode())
            self.send(b"see the hints\n")
        elif url.path == "/echo-until-close":
            self.sock.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + echo)
            raise ValueError("closed")
        elif url.path == "/echo-failing":
            self.send(echo, "500 Internal Server Error", WWW_Authenticate=f'Basic realm="{carried}"')
        elif url.path == "/echo-not-modified":
            self.sock.sendall(f'HTTP/1.1 304 Not Modified\r\nETag: "{carried}"\r\n\r\n'.encode())
        elif url.path == "/ws-head":
            self.websocket(arrival, carried.encode())
        elif url.path == "/echo-split":
            self.chunks(bytes([byte]) for byte in echo)
        elif url.path == "/redirect":
            self.send(b"", query.get("code", "302") + " Found", Location=unquote(query["to"]))
        elif url.path == "/sse":
            self.chunks(
                (f"data: event {n}\n\n".encode() for n in range(int(query.get("n", "3")))),
                "text/event-stream",
            )
        elif url.path == "/ws":
            self.websocket(arrival)
        elif url.path == "/big":
            self.big(int(query["bytes"]))
        else:
            self.send(f"hello from {arrival.address}:{arrival.port}\n".encode(), Content_Type="text/plain")

    def chunks(
        self,
        pieces: Iterator[bytes],
        content_type: str = "text/plain",
        *,
        trailer: str = "",
        before: str = "",
    ) -> None:
        head = (
            f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\n{before}Transfer-Encoding: chunked\r\n\r\n"
        )
        self.sock.sendall(head.encode())
        for piece in pieces:
            self.sock.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        self.sock.sendall(f"0\r\n{trailer}\r\n".encode())

    def big(self, size: int) -> None:
        self.sock.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n".encode())
        block = bytes(1 << 18)
        while size > 0:
            self.sock.sendall(block[:size])
            size -= len(block)

    def websocket(self, arrival: Arrival, greeting: bytes = b"") -> None:
        key = arrival.header("sec-websocket-key") or ""
        digest = hashlib.sha1(key.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
        accept = base64.b64encode(digest).decode()
        self.sock.sendall(
            f"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Accept: {accept}\r\n\r\n".encode()
        )
        if greeting:
            half = len(greeting) // 2  # one message in two frames
            for start, piece in ((1, greeting[:half]), (0x80, greeting[half:])):
                length = bytes([len(piece)]) if len(piece) < 126 else b"\x7e" + len(piece).to_bytes(2, "big")
                self.sock.sendall(bytes([start]) + length + piece)
        while len(head := self.stream.read(2)) == 2:
            size = head[1] & 127
            if size > 125:
                size = int.from_bytes(self.stream.read(2 if size == 126 else 8), "big")
            mask = self.stream.read(4)
            data = bytes(byte ^ mask[at % 4] for at, byte in enumerate(self.stream.read(size)))
            arrival.body = (arrival.body + data)[:_BODY_KEPT]
            if head[0] & 15 == 8:
                self.sock.sendall(b"\x88\x00")
                break
            self.sock.sendall(bytes([head[0], len(data)]) + data if len(data) < 126 else b"\x88\x00")
        raise ValueError("a tunnel is the last of a connection")


class H2Conversation:
    """As much HTTP/2 as a splice needs: headers as the attacker's own client sends them (literal, not compressed)."""

    def __init__(self, origins: Origins, sock: socket.socket, sni: str | None) -> None:
        self.origins, self.sock, self.sni = origins, sock, sni
        self.stream = sock.makefile("rb")

    def run(self) -> None:
        if self.stream.read(len(_H2_PREFACE)) != _H2_PREFACE:
            return
        self.sock.sendall(bytes(3) + b"\x04\x00" + bytes(4))
        while len(head := self.stream.read(9)) == 9:
            size, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
            payload = self.stream.read(size)
            if kind == 4 and not flags & 1:
                self.sock.sendall(bytes(3) + b"\x04\x01" + bytes(4))
            elif kind == 1:
                fields = dict(literals(payload))
                self.origins.record(
                    "h2", self.sock, sni=self.sni, method=fields.get(":method", ""), target=fields.get(":path", ""),
                    headers=list(fields.items()), raw=payload,
                )  # fmt: skip
                body = f"hello {fields.get(':authority')}\n".encode()
                self.sock.sendall(bytes(2) + b"\x01\x01\x04" + head[5:] + b"\x88")  # :status 200
                self.sock.sendall(len(body).to_bytes(3, "big") + b"\x00\x01" + head[5:] + body)


def literals(block: bytes) -> Iterator[tuple[str, str]]:
    """Fields of a header block made of literals with new names alone, as `kit.h2_fields` writes them."""
    at = 0
    while at < len(block):
        if block[at] != 0:
            raise ValueError("not a literal without index")
        texts = []
        at += 1
        for _ in range(2):
            size = block[at]
            texts.append(block[at + 1 : at + 1 + size].decode("latin-1"))
            at += 1 + size
        yield texts[0], texts[1]


def listener(port: int) -> socket.socket:
    """On every address of both families, with room for a flood."""
    sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    sock.bind(("::", port))
    sock.listen(4096)
    return sock
