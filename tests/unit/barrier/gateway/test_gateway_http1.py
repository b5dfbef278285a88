"""Request heads: what passes, what is refused and why, and that noise is one of both."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm4agents.barrier.gateway import http1
from llm4agents.barrier.gateway.http1 import Head, Refused, examine, likely


def head(*lines: str, first: str = "GET /a/b?c=d HTTP/1.1", host: str | None = "Host: example.com") -> bytes:
    every = [first, *([host] if host is not None else []), *lines]
    return "\r\n".join([*every, "", ""]).encode("latin-1")


def test_an_ordinary_request() -> None:
    found = examine(head("Accept: */*", "X-Nothing:"))
    assert found == Head("GET", "/a/b?c=d", "example.com", None, None)
    assert found.path == "/a/b"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("Host: Example.COM:8080", ("example.com", 8080)),
        ("host:example.com.", ("example.com", None)),
        ("HOST: [::1]:80", ("::1", 80)),
        ("Host: 127.0.0.1", ("127.0.0.1", None)),
    ],
)
def test_hosts(host: str, expected: tuple[str, int | None]) -> None:
    found = examine(head(host=host))
    assert found is not None
    assert (found.host, found.port) == expected


def test_a_body_may_follow_and_a_websocket_is_seen() -> None:
    found = examine(head("Content-Length: 3", first="POST / HTTP/1.1") + b"abc")
    assert found is not None
    assert found.method == "POST"
    found = examine(head("Upgrade: websocket", "Connection: Upgrade"))
    assert found is not None
    assert found.upgrade == "websocket"
    assert examine(head("Transfer-Encoding: chunked")) is not None
    assert examine(head(first="OPTIONS * HTTP/1.1")) is not None


def test_what_is_no_request_is_not_waited_for() -> None:
    for raw in (b"EHLO there\r\n", b"USER a b c\r\nPASS", b"GET /a\r\nHost: x\r\n"):
        with pytest.raises(Refused, match="request line"):
            examine(raw)


def test_half_a_head_is_none_yet() -> None:
    raw = head("Accept: */*")
    for end in range(len(raw)):
        assert examine(raw[:end]) is None


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (head("Host: other.example.com"), "2 Host"),
        (head(host=None), "no Host"),
        (head(host="Host:"), "no host"),
        (head(host="Host: a b"), "no host"),
        (head(host="Host: a@b"), "no host"),
        (head(host="Host: a,b"), "no host"),
        (head(host="Host: a:99999"), "port"),
        (head(host="Host : a"), "proper name"),
        (head(first="GET http://example.com/ HTTP/1.1"), "absolute"),
        (head(first="CONNECT example.com:443 HTTP/1.1"), "CONNECT"),
        (head(first="TRACE / HTTP/1.1"), "TRACE"),
        (head(first="GET * HTTP/1.1"), r"\*"),
        (head(first="GET  / HTTP/1.1"), "request line"),
        (head(first="GET / HTTP/1.1 "), "request line"),
        (head(first="GET / HTTP/2.0"), "request line"),
        (head(first="GET /"), "request line"),
        (head(first="GET /\t HTTP/1.1"), "request line"),
        (head(first="GET /ä HTTP/1.1"), "request line"),
        (head(" folded: yes"), "folded"),
        (head("X: a", "\tb"), "folded"),
        (head("X: a\0b"), "control"),
        (head("X: a\rb"), "control"),
        (head("X: a\nHost: evil.example"), "control"),
        (head("no colon"), "proper name"),
        (head(": empty"), "proper name"),
        (b"GET / HTTP/1.1\nHost: a\n\n", "CRLF"),
        (head("Content-Length: 3", "Content-Length: 3"), "one number"),
        (head("Content-Length: 3, 3"), "one number"),
        (head("Content-Length: +3"), "one number"),
        (head("Content-Length: 0x3"), "one number"),
        (head("Content-Length: 3", "Transfer-Encoding: chunked"), "both"),
        (head("Transfer-Encoding: chunked", "Transfer-Encoding: identity"), "other than chunked"),
        (head("Transfer-Encoding: gzip, chunked"), "other than chunked"),
        (head("Transfer-Encoding: xchunked"), "other than chunked"),
        (head("Transfer-Encoding:\x0bchunked"), "control"),
        (head("Transfer-Encoding : chunked"), "proper name"),
        (head("Transfer_Encoding: chunked"), "take for another"),
        (head("Transfer-Encoding: chunked", first="GET / HTTP/1.0"), "1.0"),
        (head("X: " + "a" * http1.HEAD_BYTES_MAX), "more than"),
        (head(*[f"X{n}: 1" for n in range(201)]), "more than 200"),
    ],
)
def test_refused(raw: bytes, why: str) -> None:
    with pytest.raises(Refused, match=why):
        examine(raw)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", None),
        (b"GE", None),
        (b"GET ", True),
        (b"PATCH /", True),
        (b"BREW /pot", True),
        (b"SSH-2.0-OpenSSH_9\r\n", False),
        (b"get / HTTP/1.1", False),
        (b"\x00\x00\x00\x08\x04\xd2", False),
        (b"PRI * HTTP/2.0\r\n\r\nSM", False),
        (b"A" * 40, False),
    ],
)
def test_what_begins_like_a_request(data: bytes, expected: bool | None) -> None:
    assert likely(data) is expected


@given(st.binary(max_size=300))
def test_noise(raw: bytes) -> None:
    for data in (raw, b"GET / HTTP/1.1\r\n" + raw + b"\r\n\r\n"):
        likely(data)
        try:
            found = examine(data)
        except Refused as error:
            assert error.reason
            assert 400 <= error.status < 500
            continue
        if found is not None:
            assert b"\r\n\r\n" in data
            assert found.host
            assert found.target.startswith(("/", "*"))


@settings(max_examples=300)
@given(st.data())
def test_two_readings_of_where_it_ends_or_goes_never_pass(data: st.DataObject) -> None:
    """Whatever is between: a head with two hosts or two framings is refused."""
    extra = data.draw(
        st.sampled_from(["Host: evil.example", "Transfer-Encoding: chunked", "Content-Length: 5"])
    )
    noise = data.draw(st.lists(st.sampled_from(["A: b", "C: d", "Accept: */*"]), max_size=4))
    lines = [*noise, "Content-Length: 4", extra]
    lines = data.draw(st.permutations(lines))
    with pytest.raises(Refused):
        examine(head(*lines))
