"""The attacker's tools, inside the guest as root: sockets, frames, DNS, TLS hellos and HTTP made by hand.

It is copied into the guest and serves `POST /` there (`python3 kit.py PORT`): the source of a function, its name and
its arguments; `guest.Guest.run` is the other end. Standard library of Python 3.11 only. Cases import from here what
their own functions use in the guest.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import errno
import fcntl
import functools
import http.server
import json
import os
import re
import select
import socket
import ssl
import struct
import subprocess
import sys
import termios
import threading
import time
import traceback
from typing import Any

GATEWAY, GUEST = "198.19.255.1", "198.19.255.2"
GUEST_MAC, GATEWAY_MAC = bytes.fromhex("024c34000001"), bytes.fromhex("024c34000002")
BROADCAST = b"\xff" * 6
LAB_CA = "/root/lab-ca.pem"
NIC = "eth0"
KEPT: dict[Any, Any] = {}
"""What one call leaves for the next: sockets that stay open."""

__all__ = [
    "BROADCAST", "GATEWAY", "GATEWAY_MAC", "GUEST", "GUEST_MAC", "KEPT", "LAB_CA", "NIC", "Any", "arp", "base64",
    "checksum", "client_hello", "contextlib", "dns_answer", "dns_query", "errno", "exchange", "fetch", "frame",
    "h2", "h2_fields", "h2_frame", "h2_request", "handshake", "http", "icmp", "icmp6", "in_pieces", "ip4", "ip6",
    "json", "name_of", "os", "packet_socket", "raw_http", "re", "records", "resolve", "select", "send", "socket", "ssl",
    "struct", "subprocess", "tcp", "tcp_segment", "threading", "time", "tls", "tls_context", "udp", "udp_packet",
    "why", "ws_frame",
]  # fmt: skip


def why(error: BaseException) -> str:
    """One word for how an attempt failed."""
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, socket.gaierror):
        return "unresolved"
    if isinstance(error, ssl.SSLCertVerificationError):
        return "untrusted"
    if isinstance(error, ssl.SSLError):
        return f"tls {error.reason or error}".lower()
    number = getattr(error, "errno", None)
    return {errno.ECONNREFUSED: "refused", errno.ECONNRESET: "reset", errno.EPIPE: "reset",
            errno.ENETUNREACH: "unreachable", errno.EHOSTUNREACH: "unreachable", errno.EACCES: "prohibited",
            errno.EPERM: "prohibited"}.get(number or 0, f"{type(error).__name__}: {error}")  # fmt: skip


# -- ordinary sockets


def _read(
    sock: Any, data: bytes, limit: int, until: bytes | None, quiet: float | None = None
) -> tuple[str, bytes]:
    try:
        while len(data) < limit and not (until and until in data):
            piece = sock.recv(65_536)
            if not piece:
                return "closed", data
            data += piece
            if quiet:
                sock.settimeout(quiet)
    except OSError as error:
        return why(error), data
    return "answered", data


def in_pieces(sock: socket.socket, pieces: tuple[bytes, ...] | list[bytes]) -> None:
    """Each in a segment of its own: the next one goes when the other side has acknowledged all before it, which its
    kernel does once they are read; one who only peeks is not waited for long."""
    waiting = threading.Event()
    for piece in pieces:
        sock.sendall(piece)
        end = time.monotonic() + 0.01
        while struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0] and time.monotonic() < end:
            waiting.wait(0.001)


def tcp(
    address: str,
    port: int,
    *data: bytes,
    timeout: float = 4,
    limit: int = 1,
    until: bytes | None = None,
    family: int = 0,
) -> dict[str, Any]:
    """Connect, send the pieces, each a segment, read until `limit` bytes, `until` or the end. `outcome`: "answered",
    or `why`."""
    start, got = time.monotonic(), b""
    try:
        found = socket.getaddrinfo(address, port, family, socket.SOCK_STREAM)[0]
        with socket.socket(found[0], socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout)
            sock.connect(found[4])
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            in_pieces(sock, data)
            outcome, got = _read(sock, b"", limit, until)
    except OSError as error:
        outcome = why(error)
    return {"outcome": outcome, "data": got, "seconds": time.monotonic() - start}


def udp(address: str, port: int, data: bytes, *, timeout: float = 1.5) -> dict[str, Any]:
    """One datagram from a connected socket, so that ICMP errors are seen."""
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.settimeout(timeout)
            sock.connect((address, port))
            sock.send(data)
            return {"outcome": "answered", "data": sock.recv(65_536)}
    except OSError as error:
        return {"outcome": why(error), "data": b""}


def raw_http(raw: bytes, *, host: str = "api.example.com", port: int = 80, tls: bool = False, timeout: float = 6,
             quiet: float | None = None, limit: int = 1 << 20, until: bytes | None = None,
             sni: str | None = None) -> dict[str, Any]:  # fmt: skip
    """Bytes by hand on one connection to `host`; everything that came back until the other side was gone, or quiet for
    so long (`timeout`; `quiet` once something came)."""
    try:
        with socket.create_connection((host, port), timeout) as plain:
            sock: Any = tls_context().wrap_socket(plain, server_hostname=sni or host) if tls else plain
            sock.settimeout(timeout)
            sock.sendall(raw)
            outcome, got = _read(sock, b"", limit, until, quiet)
            if sock is not plain:
                sock.close()
    except OSError as error:
        outcome, got = why(error), b""
    return {
        "outcome": outcome,
        "data": got,
        "statuses": [int(code) for code in re.findall(rb"HTTP/1\.[01] (\d{3})", got)],
    }


@functools.cache
def tls_context(*, verify: bool = True, alpn: tuple[str, ...] = ("http/1.1",)) -> ssl.SSLContext:
    """Trusts the guest's own store, and the lab's authority. Kept: reading a store takes an emulated CPU a second."""
    context = ssl.create_default_context()
    if os.path.exists(LAB_CA):
        context.load_verify_locations(LAB_CA)
    if not verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(list(alpn))
    return context


def tls(address: str, port: int = 443, *, sni: str | None = None, data: bytes = b"", verify: bool = False,
        alpn: tuple[str, ...] = ("http/1.1",), timeout: float = 6) -> dict[str, Any]:  # fmt: skip
    """A handshake with any SNI (None: none) at any address, then data. `issuer`: who signed the peer's certificate."""
    answer: dict[str, Any] = {"data": b"", "issuer": None, "alpn": None}
    try:
        context = tls_context(verify=verify and sni is not None, alpn=alpn)
        plain = socket.create_connection((address, port), timeout)
        with plain, context.wrap_socket(plain, server_hostname=sni) as sock:
            answer["certificate"] = sock.getpeercert(True)
            answer["alpn"] = sock.selected_alpn_protocol()
            if not data:
                return answer | {"outcome": "answered"}
            sock.sendall(data)
            outcome, got = _read(sock, b"", 1 << 16, b"\r\n\r\n")
            return answer | {"outcome": outcome, "data": got}
    except OSError as error:
        return answer | {"outcome": why(error)}


def fetch(url: str, method: str = "GET", headers: dict[str, str] | None = None, body: bytes | None = None,
          *, timeout: float = 8, verify: bool = True, connect: str | None = None) -> dict[str, Any]:  # fmt: skip
    """One request as an honest client makes it; redirects are not followed. `connect`: to this address instead."""
    import http.client

    scheme, _, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    host, _, port = authority.partition(":")
    number = int(port or (443 if scheme == "https" else 80))
    client: Any
    try:
        if scheme == "https":
            client = http.client.HTTPSConnection(
                host, number, timeout=timeout, context=tls_context(verify=verify)
            )
        else:
            client = http.client.HTTPConnection(host, number, timeout=timeout)
        if connect:
            client._create_connection = lambda _, *more: socket.create_connection((connect, number), *more)
        try:
            client.request(method, slash + path or "/", body, headers or {})
            answer = client.getresponse()
            data = answer.read(1 << 20)
            return {"outcome": "answered", "status": answer.status, "headers": answer.getheaders(), "body": data,
                    "reason": answer.reason}  # fmt: skip
        finally:
            client.close()
    except (OSError, http.client.HTTPException) as error:
        return {"outcome": why(error), "status": 0, "headers": [], "body": b"", "reason": ""}


def ws_frame(data: bytes, opcode: int = 1) -> bytes:
    """One masked WebSocket frame of less than 126 bytes."""
    return bytes([0x80 | opcode, 0x80 | len(data)]) + bytes(4) + data


# -- DNS


def name_of(*labels: str | bytes) -> bytes:
    """A name of the wire: labels as they are, each under 64 bytes or not."""
    raws = [label.encode() if isinstance(label, str) else label for label in labels]
    return b"".join(bytes([len(raw) & 0xFF]) + raw for raw in raws) + b"\0"


def dns_query(name: str | bytes, kind: int = 1, *, flags: int = 0x0100, questions: int = 1, more: bytes = b"",
              additional: int = 0, number: int = 0x4C34) -> bytes:  # fmt: skip
    """A query; `name` as text or as the wire's bytes. `more` follows the question."""
    wire = name_of(*name.rstrip(".").split(".")) if isinstance(name, str) else name
    return (
        struct.pack(">HHHHHH", number, flags, questions, 0, 0, additional)
        + wire
        + struct.pack(">HH", kind, 1)
        + more
    )


def dns_answer(raw: bytes) -> dict[str, Any]:
    """What an answer says: code, A addresses, and any text of an Extended DNS Error."""
    if len(raw) < 12:
        return {"code": None, "addresses": [], "text": "", "answers": 0}
    code, answers = raw[3] & 15, int.from_bytes(raw[6:8], "big")
    addresses = [
        socket.inet_ntoa(found)
        for found in re.findall(rb"\x00\x01\x00\x01....\x00\x04(....)", raw, re.DOTALL)
    ]
    text = "".join(map(chr, filter(lambda byte: 32 <= byte < 127, raw[12:])))
    return {
        "code": code,
        "addresses": addresses,
        "text": text,
        "answers": answers,
        "truncated": bool(raw[2] & 2),
    }


def resolve(name: str | bytes, kind: int = 1, *, server: str = GATEWAY, port: int = 53, over: str = "udp",
            timeout: float = 2, query: bytes | None = None) -> dict[str, Any]:  # fmt: skip
    """A query by hand; `outcome` "answered" and what `dns_answer` reads, or how it failed."""
    raw = query if query is not None else dns_query(name, kind)
    try:
        if over == "udp":
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.settimeout(timeout)
                sock.connect((server, port))
                sock.send(raw)
                return {"outcome": "answered", "raw": (got := sock.recv(65_536)), **dns_answer(got)}
        with socket.create_connection((server, port), timeout) as plain:
            stream: Any = plain
            if over == "tls":
                stream = tls_context(verify=False).wrap_socket(plain, server_hostname="dns.google")
            stream.sendall(len(raw).to_bytes(2, "big") + raw)
            outcome, got = _read(stream, b"", 12, None)
            if outcome != "answered":
                return {"outcome": outcome, **dns_answer(b"")}
            return {"outcome": "answered", "raw": got[2:], **dns_answer(got[2:])}
    except OSError as error:
        return {"outcome": why(error), **dns_answer(b"")}


# -- TLS by hand


def _vector(data: bytes, size: int) -> bytes:
    return len(data).to_bytes(size, "big") + data


def client_hello(sni: str | bytes | None, *, alpn: tuple[bytes, ...] = (b"http/1.1",), ech: str | None = None,
                 names: tuple[bytes, ...] = (), padding: int = 0, extra: bytes = b"") -> bytes:  # fmt: skip
    """A handshake message. `ech`: "outer" (type outer with a config id, an enc and a payload, as real ECH and GREASE
    alike), "inner" (only what a backend may see). `names`: more host names in the one extension."""

    def extension(kind: int, data: bytes) -> bytes:
        return kind.to_bytes(2, "big") + _vector(data, 2)

    extensions = b""
    if sni is not None:
        hosts = (sni.encode() if isinstance(sni, str) else sni, *names)
        extensions += extension(0, _vector(b"".join(b"\0" + _vector(host, 2) for host in hosts), 2))
    extensions += extension(10, _vector(b"\x00\x1d\x00\x17", 2)) + extension(
        13, _vector(b"\x04\x03\x08\x04\x04\x01", 2)
    )
    extensions += extension(43, b"\x02\x03\x04") + extension(
        51, _vector(b"\x00\x1d" + _vector(os.urandom(32), 2), 2)
    )
    if alpn:
        extensions += extension(16, _vector(b"".join(_vector(one, 1) for one in alpn), 2))
    if ech == "outer":
        # HKDF-SHA256, AES-128-GCM, config id, enc, payload
        extensions += extension(
            0xFE0D, b"\0\0\1\0\1" + os.urandom(1) + _vector(os.urandom(32), 2) + _vector(os.urandom(144), 2)
        )
    elif ech == "inner":
        extensions += extension(0xFE0D, b"\x01")
    if padding:
        extensions += extension(21, bytes(padding))
    extensions += extra
    body = (
        b"\x03\x03"
        + os.urandom(32)
        + _vector(os.urandom(32), 1)
        + _vector(b"\x13\x01\x13\x02\xc0\x2b", 2)
        + b"\x01\0"
    )
    return b"\x01" + _vector(body + _vector(extensions, 2), 3)


def records(handshake: bytes, size: int = 16_384) -> bytes:
    """The message in records of at most `size` bytes each."""
    pieces = (handshake[at : at + size] for at in range(0, len(handshake), size))
    return b"".join(b"\x16\x03\x01" + _vector(piece, 2) for piece in pieces)


def handshake(address: str, *pieces: bytes, port: int = 443, timeout: float = 4) -> dict[str, Any]:
    """Records by hand, in as many segments as pieces. `answer`: "hello" (a server did), "alert N", or as of `tcp`."""
    found = tcp(address, port, *pieces, timeout=timeout, limit=7)
    data = found["data"]
    if data[:1] == b"\x16":
        found["answer"] = "hello"
    elif data[:1] == b"\x15" and len(data) >= 7:
        found["answer"] = f"alert {data[6]}"
    else:
        found["answer"] = found["outcome"]
    return found


# -- HTTP/2 by hand


def h2_fields(*fields: tuple[str, str]) -> bytes:
    """A header block of literals without indexing: what any decoder reads."""
    return b"".join(
        b"\0" + _vector(name.encode("latin-1"), 1) + _vector(value.encode("latin-1"), 1)
        for name, value in fields
    )


def h2_frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return _vector(payload, 3)[:3] + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def h2_request(stream: int, *fields: tuple[str, str], body: bytes | None = None) -> bytes:
    frames = h2_frame(1, 4 | (body is None), stream, h2_fields(*fields))
    return frames if body is None else frames + h2_frame(0, 1, stream, body)


def h2(
    address: str, sni: str, frames: bytes, *, port: int = 443, timeout: float = 5, streams: int = 1
) -> dict[str, Any]:
    """A connection of HTTP/2 with these frames after the preface. `ended`: how many streams were ended or reset."""
    answer: dict[str, Any] = {"alpn": None, "data": b"", "ended": 0, "goaway": None, "reset": []}
    try:
        plain = socket.create_connection((address, port), timeout)
        with plain, tls_context(verify=False, alpn=("h2",)).wrap_socket(plain, server_hostname=sni) as sock:
            answer["alpn"] = sock.selected_alpn_protocol()
            sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + h2_frame(4, 0, 0, b"") + frames)
            buffer = b""
            while answer["ended"] < streams and answer["goaway"] is None:
                piece = sock.recv(65_536)
                if not piece:
                    return answer | {"outcome": "closed", "data": answer["data"] + buffer}
                buffer += piece
                while len(buffer) >= 9 and len(buffer) >= 9 + int.from_bytes(buffer[:3], "big"):
                    size, kind, flags = int.from_bytes(buffer[:3], "big"), buffer[3], buffer[4]
                    payload, buffer = buffer[9 : 9 + size], buffer[9 + size :]
                    if kind in (0, 1):
                        answer["data"] += payload
                        answer["ended"] += flags & 1
                    elif kind == 3:
                        answer["reset"].append(int.from_bytes(payload, "big"))
                        answer["ended"] += 1
                    elif kind == 7:
                        answer["goaway"] = int.from_bytes(payload[4:8], "big")
            return answer | {"outcome": "answered"}
    except OSError as error:
        return answer | {"outcome": why(error)}


# -- frames by hand


def checksum(data: bytes) -> int:
    if len(data) % 2:
        data += b"\0"
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return int(~total & 0xFFFF)


def frame(payload: bytes, kind: int = 0x0800, *, to: bytes = GATEWAY_MAC, source: bytes = GUEST_MAC) -> bytes:
    return to + source + kind.to_bytes(2, "big") + payload


def ip4(to: str, protocol: int, payload: bytes, *, source: str = GUEST, options: bytes = b"", flags: int = 0,
        offset: int = 0, number: int = 0x4C34, ttl: int = 64) -> bytes:  # fmt: skip
    """An IPv4 packet; `flags` 1 = more fragments, `offset` in bytes, `options` padded to 4."""
    options += b"\0" * (-len(options) % 4)
    words = (5 + len(options) // 4) | 0x40
    head = struct.pack(">BBHHHBBH4s4s", words, 0, 20 + len(options) + len(payload), number, flags << 13 | offset // 8,
                       ttl, protocol, 0, socket.inet_aton(source), socket.inet_aton(to)) + options  # fmt: skip
    return head[:10] + checksum(head).to_bytes(2, "big") + head[12:] + payload


def _pseudo(source: str, to: str, protocol: int, data: bytes) -> bytes:
    family = socket.AF_INET6 if ":" in to else socket.AF_INET
    ends = socket.inet_pton(family, source) + socket.inet_pton(family, to)
    return ends + (
        struct.pack(">BBH", 0, protocol, len(data))
        if family == socket.AF_INET
        else struct.pack(">II", len(data), protocol)
    )


def udp_packet(to: str, port: int, data: bytes, *, source: str = GUEST, source_port: int = 40_000) -> bytes:
    head = struct.pack(">HHHH", source_port, port, 8 + len(data), 0)
    total = checksum(_pseudo(source, to, 17, head + data) + head + data) or 0xFFFF
    return head[:6] + total.to_bytes(2, "big") + data


def tcp_segment(to: str, port: int, *, source: str = GUEST, source_port: int = 40_001, flags: int = 2,
                sequence: int = 1, acknowledge: int = 0, data: bytes = b"") -> bytes:  # fmt: skip
    head = struct.pack(">HHIIBBHHH", source_port, port, sequence, acknowledge, 0x50, flags, 64_240, 0, 0)
    total = checksum(_pseudo(source, to, 6, head + data) + head + data)
    return head[:16] + total.to_bytes(2, "big") + head[18:] + data


def icmp(kind: int, code: int = 0, data: bytes = b"") -> bytes:
    head = struct.pack(">BBHHH", kind, code, 0, 1, 1)
    return head[:2] + checksum(head + data).to_bytes(2, "big") + head[4:] + data


def ip6(
    to: str, protocol: int, payload: bytes, *, source: str = "fe80::4c:34ff:fe00:1", hops: int = 255
) -> bytes:
    ends = socket.inet_pton(socket.AF_INET6, source) + socket.inet_pton(socket.AF_INET6, to)
    return struct.pack(">IHBB", 6 << 28, len(payload), protocol, hops) + ends + payload


def icmp6(to: str, kind: int, data: bytes, *, source: str = "fe80::4c:34ff:fe00:1") -> bytes:
    head = struct.pack(">BBH", kind, 0, 0) + data
    total = checksum(_pseudo(source, to, 58, head) + head)
    return head[:2] + total.to_bytes(2, "big") + head[4:]


def arp(
    operation: int, *, sender: bytes, sender_address: str, target: bytes = bytes(6), target_address: str
) -> bytes:
    return (struct.pack(">HHBBH", 1, 0x0800, 6, 4, operation) + sender + socket.inet_aton(sender_address)
            + target + socket.inet_aton(target_address))  # fmt: skip


def packet_socket() -> socket.socket:
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    sock.bind((NIC, 3))
    return sock


def send(*frames: bytes) -> int:
    """Frames onto the wire, as they are."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
        sock.bind((NIC, 0))
        sent = 0
        for one in frames:
            sent += sock.send(one)
        return sent


def exchange(*frames: bytes, seconds: float = 1.0) -> list[bytes]:
    """Frames sent, and every frame that then came in."""
    with packet_socket() as sock:
        for one in frames:
            sock.send(one)
        found, end = [], time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([sock], [], [], left)[0]:
                raw, (_, _, kind, *_) = sock.recvfrom(65_536)
                if kind != socket.PACKET_OUTGOING:
                    found.append(raw)
        return found


# -- the service


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        try:
            source, name, args, named = ast.literal_eval(body.decode())
            scope = globals()
            if source:
                scope = dict(globals())
                exec(compile(f"from __future__ import annotations\n{source}", name, "exec"), scope)
            answer = (True, scope[name](*args, **named))
        except BaseException:
            answer = (False, traceback.format_exc())
        raw = repr(answer).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


if __name__ == "__main__":
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), _Handler).serve_forever()
