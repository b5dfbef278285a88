"""DNS messages: one question read from hostile bytes, one answer written. Pure.

    query = parse(packet)                       # raises Malformed, which knows its own answer (or that there is none)
    raw = answer(query, NXDOMAIN, ede=(15, "why"), limit=udp_limit(query))

What the answer should be is decided elsewhere (`resolver`); nothing here, and nothing there, ever asks another server.
"""

from __future__ import annotations

import ipaddress
import re
import struct
from dataclasses import dataclass

NOERROR, FORMERR, SERVFAIL, NXDOMAIN, NOTIMP, REFUSED, BADVERS = 0, 1, 2, 3, 4, 5, 16
A, PTR, AAAA, OPT, ANY = 1, 12, 28, 41, 255
IN = 1
EDE_BLOCKED, EDE_OTHER = 15, 0
UDP_BYTES_MIN, UDP_BYTES_MAX = 512, 1_232
"""Without EDNS; and what is sent at most over UDP whatever the client says, so that nothing is fragmented."""
QUERY_BYTES_MAX = 4_096
NAME_BYTES_MAX = 255
_ADDITIONAL_MAX = 8
_EDE_TEXT_BYTES_MAX = 400
_HEADER = struct.Struct("!6H")
_QR, _TC, _RD, _CD, _AA, _RA = 0x8000, 0x0200, 0x0100, 0x0010, 0x0400, 0x0080
_LABEL = re.compile(rb"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
TYPES = {1: "A", 2: "NS", 5: "CNAME", 6: "SOA", 10: "NULL", 12: "PTR", 15: "MX", 16: "TXT", 28: "AAAA", 33: "SRV",
         35: "NAPTR", 64: "SVCB", 65: "HTTPS", 255: "ANY"}  # fmt: skip


class Malformed(Exception):
    """No question that could be answered; `.answer` is what to send all the same, None: nothing."""

    def __init__(self, why: str, answer: bytes | None = None) -> None:
        super().__init__(why)
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Query:
    """`name` in lower case without its last dot, or None if it has labels no host name has (`labels` has the bytes)."""

    id: int
    flags: int
    question: bytes
    """As asked, with its spelling, to be sent back."""
    labels: tuple[bytes, ...]
    name: str | None
    type: int
    edns_bytes: int | None
    """What the client takes over UDP, if it speaks EDNS."""

    @property
    def type_name(self) -> str:
        return TYPES.get(self.type, f"TYPE{self.type}")


def parse(packet: bytes) -> Query:
    """The one question of a query. Raises Malformed."""
    if len(packet) < _HEADER.size:
        raise Malformed("shorter than a header")
    if len(packet) > QUERY_BYTES_MAX:
        raise Malformed("a query this long is none")
    ident, flags, questions, answers, authorities, additional = _HEADER.unpack_from(packet)
    if flags & _QR:
        raise Malformed("an answer, not a question")  # answering answers makes loops
    if flags >> 11 & 0xF:
        raise Malformed("not a standard query", _error(ident, flags, NOTIMP))
    broken = _error(ident, flags, FORMERR)
    if questions != 1:
        raise Malformed(f"{questions} questions", broken)
    if answers or authorities or additional > _ADDITIONAL_MAX:
        raise Malformed("a query with answers in it", broken)
    labels, at = _question_name(packet, _HEADER.size, broken)
    if at + 4 > len(packet):
        raise Malformed("cut off in its question", broken)
    kind, of_class = struct.unpack_from("!2H", packet, at)
    question = packet[_HEADER.size : at + 4]
    at += 4
    edns: int | None = None
    for _ in range(additional):
        at = _skip_name(packet, at, broken)
        if at + 10 > len(packet):
            raise Malformed("cut off in a record", broken)
        rr_type, rr_class, ttl, size = struct.unpack_from("!HHIH", packet, at)
        at += 10 + size
        if at > len(packet):
            raise Malformed("cut off in a record", broken)
        if rr_type == OPT:
            if edns is not None:
                raise Malformed("two OPT records", broken)
            edns = rr_class
            if ttl >> 16 & 0xFF:
                query = Query(ident, flags, question, labels, None, kind, edns)
                raise Malformed("an EDNS of the future", answer(query, BADVERS))
    if of_class != IN:
        query = Query(ident, flags, question, labels, None, kind, edns)
        raise Malformed(f"class {of_class}", answer(query, REFUSED))
    return Query(ident, flags, question, labels, host_name(labels), kind, edns)


def host_name(labels: tuple[bytes, ...]) -> str | None:
    """The labels as a host's name (letters, digits, `-`, `_`), or None."""
    low = [label.lower() for label in labels]
    if not low or not all(_LABEL.fullmatch(label) for label in low):
        return None
    name = b".".join(low).decode("ascii")
    return name if len(name) <= 253 else None


def printable(labels: tuple[bytes, ...]) -> str:
    """Any name, for the audit: what is not printable, escaped as in zone files."""
    return (
        ".".join(
            "".join(chr(c) if 0x21 <= c <= 0x7E and c not in b'.\\"' else f"\\{c:03d}" for c in label)
            for label in labels
        )
        or "."
    )


def reverse_of(name: str) -> ipaddress.IPv4Address | None:
    """The address that `4.3.2.1.in-addr.arpa` asks for."""
    parts = name.split(".")
    if len(parts) != 6 or parts[4:] != ["in-addr", "arpa"]:
        return None
    try:
        return ipaddress.IPv4Address(".".join(reversed(parts[:4])))
    except ValueError:
        return None


def a_record(address: str) -> tuple[int, bytes]:
    return A, ipaddress.IPv4Address(address).packed


def ptr_record(name: str) -> tuple[int, bytes]:
    return PTR, b"".join(bytes([len(part)]) + part.encode("ascii") for part in name.split(".")) + b"\0"


def udp_limit(query: Query) -> int:
    """How many bytes of answer this client gets over UDP."""
    return max(UDP_BYTES_MIN, min(query.edns_bytes or 0, UDP_BYTES_MAX))


def answer(
    query: Query,
    rcode: int,
    records: tuple[tuple[int, bytes], ...] = (),
    *,
    ttl_s: int = 60,
    ede: tuple[int, str] | None = None,
    limit: int = 65_535,
) -> bytes:
    """The answer in at most `limit` bytes; what doesn't fit leaves it with the flag that says so (TC).

    `records` are (type, data) of the question's own name. `ede` is an Extended DNS Error (RFC 8914), left out
    for clients that do not speak EDNS.
    """
    body = b"".join(
        struct.pack("!HHHIH", 0xC00C, kind, IN, ttl_s, len(data)) + data for kind, data in records
    )
    options = b""
    if ede is not None and query.edns_bytes is not None:
        room = limit - _HEADER.size - len(query.question) - len(body) - 11 - 6
        text = _cut(ede[1], max(0, min(room, _EDE_TEXT_BYTES_MAX)))
        options = struct.pack("!HHH", 15, 2 + len(text), ede[0]) + text
    opt = b""
    if query.edns_bytes is not None:
        opt = b"\0" + struct.pack("!HHIH", OPT, UDP_BYTES_MAX, (rcode >> 4) << 24, len(options)) + options
    flags = _QR | _AA | _RA | (query.flags & (_RD | _CD)) | (rcode & 0xF)
    count = len(records)
    if _HEADER.size + len(query.question) + len(body) + len(opt) > limit:
        flags, body, count = flags | _TC, b"", 0
    header = _HEADER.pack(query.id, flags, 1, count, 0, 1 if opt else 0)
    return header + query.question + body + opt


def _cut(text: str, size: int) -> bytes:
    """UTF-8 of at most so many bytes, no character split."""
    return text.encode()[:size].decode(errors="ignore").encode()


def _error(ident: int, flags: int, rcode: int) -> bytes:
    return _HEADER.pack(ident, _QR | (flags & (0x7800 | _RD)) | rcode, 0, 0, 0, 0)


def _question_name(packet: bytes, at: int, broken: bytes) -> tuple[tuple[bytes, ...], int]:
    """The first name of a message: there is nothing before it that a pointer could lead to, so it has none."""
    labels: list[bytes] = []
    size = 1
    while True:
        if at >= len(packet):
            raise Malformed("cut off in its name", broken)
        length = packet[at]
        at += 1
        if not length:
            return tuple(labels), at
        if length > 63:
            raise Malformed("a compressed question, or a label of no known kind", broken)
        size += 1 + length
        if size > NAME_BYTES_MAX or at + length > len(packet):
            raise Malformed("a name too long", broken)
        labels.append(packet[at : at + length])
        at += length


def _skip_name(packet: bytes, at: int, broken: bytes) -> int:
    """Past a name. A pointer ends it: where it leads is nobody's business, so none can lead in circles."""
    begun = at
    while at < len(packet) and at - begun <= NAME_BYTES_MAX:
        length = packet[at]
        if length & 0xC0 == 0xC0:
            if at + 2 > len(packet):
                break
            return at + 2
        if length > 63:
            break
        at += 1 + length
        if not length:
            return at
    raise Malformed("cut off in a record's name", broken)
