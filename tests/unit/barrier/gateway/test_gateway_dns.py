"""Hostile questions, and the few answers there are."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm4agents.barrier.gateway import dns


def question(name: bytes = b"\x07example\x03com\x00", kind: int = 1, of_class: int = 1) -> bytes:
    return name + struct.pack("!2H", kind, of_class)


def packet(
    body: bytes | None = None, *, ident: int = 7, flags: int = 0x0100, counts: tuple[int, ...] = (1, 0, 0, 0)
) -> bytes:
    return struct.pack("!6H", ident, flags, *counts) + (question() if body is None else body)


def opt(size: int = 1232, ttl: int = 0, data: bytes = b"") -> bytes:
    return b"\0" + struct.pack("!HHIH", 41, size, ttl, len(data)) + data


def sections(raw: bytes) -> tuple[int, int, tuple[int, ...]]:
    ident, flags, *counts = struct.unpack_from("!6H", raw)
    return ident, flags, tuple(counts)


def test_a_question_is_read_and_its_spelling_is_sent_back() -> None:
    query = dns.parse(packet(question(b"\x07eXamPLE\x03cOm\x00")))
    assert (query.name, query.type, query.id, query.edns_bytes) == ("example.com", dns.A, 7, None)
    raw = dns.answer(query, dns.NOERROR, (dns.a_record("198.18.0.1"),))
    ident, flags, counts = sections(raw)
    assert (ident, flags & 0x8000, flags & 0xF, counts) == (7, 0x8000, 0, (1, 1, 0, 0))
    assert b"\x07eXamPLE\x03cOm\x00" in raw
    assert raw.endswith(bytes([198, 18, 0, 1]))


def test_a_denial_says_why_to_those_who_speak_edns_only() -> None:
    plain = dns.parse(packet())
    raw = dns.answer(plain, dns.NXDOMAIN, ede=(dns.EDE_BLOCKED, "because"))
    assert sections(raw)[2] == (1, 0, 0, 0)
    assert b"because" not in raw
    modern = dns.parse(packet(question() + opt(), counts=(1, 0, 0, 1)))
    raw = dns.answer(modern, dns.NXDOMAIN, ede=(dns.EDE_BLOCKED, "because"), limit=dns.udp_limit(modern))
    assert sections(raw)[1] & 0xF == dns.NXDOMAIN
    assert sections(raw)[2] == (1, 0, 0, 1)
    assert raw.endswith(struct.pack("!HHH", 15, 9, 15) + b"because")


def test_a_reason_too_long_is_cut_between_characters_and_never_the_answer() -> None:
    query = dns.parse(packet(question() + opt(512), counts=(1, 0, 0, 1)))
    raw = dns.answer(query, dns.NXDOMAIN, ede=(15, "ü" * 4000), limit=dns.udp_limit(query))
    assert len(raw) <= 512
    assert not sections(raw)[1] & 0x0200
    raw[raw.index("ü".encode()) :].decode()


def test_what_does_not_fit_is_flagged_as_cut() -> None:
    query = dns.parse(packet())
    raw = dns.answer(query, dns.NOERROR, tuple(dns.a_record("198.18.0.1") for _ in range(60)), limit=512)
    assert len(raw) <= 512
    assert sections(raw)[1] & 0x0200
    assert sections(raw)[2][1] == 0


@pytest.mark.parametrize(
    ("raw", "rcode"),
    [
        (b"", None),
        (packet()[:11], None),
        (packet(flags=0x8100), None),  # an answer
        (packet(flags=0x2800), dns.NOTIMP),  # an update
        (packet(counts=(0, 0, 0, 0)), dns.FORMERR),
        (packet(question() * 2, counts=(2, 0, 0, 0)), dns.FORMERR),
        (packet(counts=(1, 1, 0, 0)), dns.FORMERR),
        (packet(counts=(1, 0, 0, 1)), dns.FORMERR),
        (packet(question(b"\xc0\x0c")), dns.FORMERR),  # a pointer to itself
        (packet(question(b"\x03www\xc0\x0c")), dns.FORMERR),
        (packet(question(b"\x40" + b"a" * 64 + b"\0")), dns.FORMERR),
        (packet(question(b"".join(b"\x3f" + b"a" * 63 for _ in range(4)) + b"\0")), dns.FORMERR),
        (packet(b"\x07exam"), dns.FORMERR),
        (packet(question()[:-1]), dns.FORMERR),
        (packet(question() + opt() + opt(), counts=(1, 0, 0, 2)), dns.FORMERR),
        (packet(question() + b"\xc0\x0c\0\0", counts=(1, 0, 0, 1)), dns.FORMERR),
        (packet(question(of_class=3)), dns.REFUSED),
    ],
)
def test_what_is_no_question_gets_an_error_or_nothing(raw: bytes, rcode: int | None) -> None:
    with pytest.raises(dns.Malformed) as caught:
        dns.parse(raw)
    reply = caught.value.answer
    if rcode is None:
        assert reply is None
    else:
        assert reply is not None
        assert sections(reply)[1] & 0x800F == 0x8000 | rcode


def test_a_later_edns_is_told_which_we_speak() -> None:
    with pytest.raises(dns.Malformed) as caught:
        dns.parse(packet(question() + opt(ttl=1 << 16), counts=(1, 0, 0, 1)))
    assert caught.value.answer is not None
    assert caught.value.answer[-6] == 1  # the upper bits of BADVERS


@pytest.mark.parametrize(
    ("labels", "name"),
    [
        ((b"a_b", b"Example", b"COM"), "a_b.example.com"),
        ((b"xn--bcher-kva", b"de"), "xn--bcher-kva.de"),
        ((b"a b", b"com"), None),
        ((b"a.b", b"com"), None),
        ((b"-a", b"com"), None),
        ((b"\xff", b"com"), None),
        ((b"a\n", b"com"), None),
        ((), None),
    ],
)
def test_names_are_names_of_hosts(labels: tuple[bytes, ...], name: str | None) -> None:
    assert dns.host_name(labels) == name


def test_reverse_names() -> None:
    assert str(dns.reverse_of("4.3.18.198.in-addr.arpa")) == "198.18.3.4"
    for name in ("in-addr.arpa", "1.2.3.in-addr.arpa", "256.1.1.1.in-addr.arpa", "a.b.c.d.in-addr.arpa"):
        assert dns.reverse_of(name) is None


@given(st.binary(max_size=600))
def test_noise_never_raises_anything_else(raw: bytes) -> None:
    try:
        query = dns.parse(raw)
    except dns.Malformed as error:
        assert error.answer is None or len(error.answer) <= len(raw) + 11
    else:
        dns.answer(query, dns.NXDOMAIN, ede=(15, "no"), limit=dns.udp_limit(query))


@settings(max_examples=300)
@given(st.data())
def test_bits_flipped_in_a_question(data: st.DataObject) -> None:
    raw = bytearray(packet(question() + opt(data=b"\0\x0a\0\x08cookie!!"), counts=(1, 0, 0, 1)))
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    del raw[data.draw(st.integers(0, len(raw))) :]
    try:
        query = dns.parse(bytes(raw))
    except dns.Malformed:
        return
    reply = dns.answer(query, dns.NXDOMAIN, ede=(15, "no"), limit=dns.udp_limit(query))
    assert reply[12 : 12 + len(query.question)] == query.question
    assert len(reply) <= dns.udp_limit(query)
    assert dns.printable(query.labels).isascii()
