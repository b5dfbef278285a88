"""Hellos of a real TLS client, cut, stretched, bent and made up."""

from __future__ import annotations

import ssl
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm4agents.barrier.gateway import hello
from llm4agents.barrier.gateway.hello import Hello, NotHello, Refused, examine


def real(name: str | None = "api.example.com", alpn: tuple[str, ...] = ("h2", "http/1.1")) -> bytes:
    """What OpenSSL sends."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if alpn:
        context.set_alpn_protocols(list(alpn))
    out = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return out.read()


def record(payload: bytes, kind: int = 22) -> bytes:
    return struct.pack("!BHH", kind, 0x0301, len(payload)) + payload


def made(extensions: list[tuple[int, bytes]], *, session: bytes = b"", suites: bytes = b"\x13\x01") -> bytes:
    body = struct.pack("!H", 0x0303) + bytes(32) + bytes([len(session)]) + session
    body += struct.pack("!H", len(suites)) + suites + b"\x01\x00"
    packed = b"".join(struct.pack("!HH", kind, len(value)) + value for kind, value in extensions)
    body += struct.pack("!H", len(packed)) + packed
    return record(b"\x01" + len(body).to_bytes(3, "big") + body)


def sni(*names: bytes, kind: int = 0) -> tuple[int, bytes]:
    packed = b"".join(bytes([kind]) + struct.pack("!H", len(name)) + name for name in names)
    return 0, struct.pack("!H", len(packed)) + packed


def test_a_real_clients_hello() -> None:
    raw = real()
    assert examine(raw) == Hello("api.example.com", ("h2", "http/1.1"), False, len(raw))
    assert examine(raw + b"more") == examine(raw)


def test_without_a_name() -> None:
    found = examine(real(None, ()))
    assert isinstance(found, Hello)
    assert (found.name, found.alpn) == (None, ())


def test_every_prefix_asks_for_more_and_never_for_too_much() -> None:
    raw = real()
    for end in range(1, len(raw)):
        needed = examine(raw[:end])
        assert isinstance(needed, int)
        assert end < needed <= len(raw)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_spread_over_records(size: int) -> None:
    message = real()[5:]
    raw = b"".join(record(message[at : at + size]) for at in range(0, len(message), size))
    if len(message) / size > 64:
        with pytest.raises(Refused, match="pieces"):
            examine(raw)
        return
    found = examine(raw)
    assert isinstance(found, Hello)
    assert found.name == "api.example.com"
    assert found.size == len(raw)
    for end in range(1, len(raw)):
        assert isinstance(examine(raw[:end]), int | Hello)


def test_an_encrypted_hello_is_seen_and_real_or_greased_is_not_told_apart() -> None:
    found = examine(made([sni(b"public.example.com"), (0xFE0D, b"\x00" + bytes(40))]))
    assert isinstance(found, Hello)
    assert found.ech
    assert found.name == "public.example.com"


@pytest.mark.parametrize(
    "raw", [b"GET / HTTP/1.1", b"SSH-2.0-x", b"\x16\x02", b"\x16\x03\x01\x00\x00", b"\x15\x03\x01"]
)
def test_what_is_no_tls(raw: bytes) -> None:
    with pytest.raises(NotHello):
        examine(raw)


def test_another_message_first_is_no_tls() -> None:
    with pytest.raises(NotHello):
        examine(record(b"\x02" + bytes(60)))


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (made([sni(b"a.example", b"b.example")]), "exactly one"),
        (made([sni(b"a.example"), sni(b"b.example")]), "twice"),
        (made([sni(b"a.example", kind=1)]), "exactly one"),
        (made([(0, b"")]), "shorter"),
        (made([(0, b"\x00\x00")]), "shorter"),
        (made([sni(b"a.example.")]), "no host name"),
        (made([sni(b"a\x00.example")]), "no host name"),
        (made([sni("ä.example".encode())]), "no host name"),
        (made([sni(b"a" * 64 + b".example")]), "no host name"),
        (made([(16, b"\x00\x01\x00")]), "empty protocol"),
        (made([], suites=b""), "cipher"),
        (made([], session=bytes(33)), "session"),
        (record(b"\x01\xff\xff\xff" + bytes(100)), "bytes"),
        (record(b"\x01\x00\x00\x01\x00"), "bytes"),
        (
            real()[:20][:5].replace(real()[3:5], b"\x00\x0a") + real()[5:15] + b"\x17\x03\x03\x00\x01x",
            "something else",
        ),
    ],
)
def test_what_is_let_through_nowhere(raw: bytes, why: str) -> None:
    with pytest.raises(Refused, match=why):
        examine(raw)


def test_upper_case_is_the_same_name() -> None:
    found = examine(made([sni(b"API.Example.COM")]))
    assert isinstance(found, Hello)
    assert found.name == "api.example.com"


@given(st.binary(max_size=400))
def test_noise(raw: bytes) -> None:
    for data in (raw, b"\x16\x03\x01" + raw, record(b"\x01" + raw[:16_000]) if raw else b""):
        try:
            found = examine(data)
        except (NotHello, Refused):
            continue
        if isinstance(found, int):
            assert found > len(data)


_REAL = real()


@settings(max_examples=400)
@given(st.data())
def test_bits_flipped_in_a_real_hello(data: st.DataObject) -> None:
    raw = bytearray(_REAL)
    for _ in range(data.draw(st.integers(1, 8))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = examine(bytes(raw))
    except (NotHello, Refused):
        return
    if isinstance(found, int):
        assert len(raw) < found <= hello.HELLO_BYTES_MAX + 64 * 5 + 16_384
    elif found.name is not None:
        assert found.name == found.name.lower()
        assert found.name.isascii()
