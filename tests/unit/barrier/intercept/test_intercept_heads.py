"""A request's head has one reading or none."""

from __future__ import annotations

import contextlib
import time

import pytest
from h11._receivebuffer import ReceiveBuffer
from hypothesis import given
from hypothesis import strategies as st

from llm4agents.barrier.intercept import chunked, heads
from llm4agents.barrier.intercept.heads import BadHead, Head


def head(*lines: str, line: str = "GET / HTTP/1.1") -> Head:
    return heads.parse("\r\n".join([line, *lines, "", ""]).encode("latin-1"))


def test_a_plain_one() -> None:
    found = head("Host: example.com", "X-A:  b \t", "Content-Length: 10")
    assert (found.method, found.target, found.version, found.length) == ("GET", b"/", "1.1", 10)
    assert found.get(b"x-a") == b"b"


@pytest.mark.parametrize(
    ("lines", "word"),
    [
        (["Host: a", "Content-Length: 1", "Transfer-Encoding: chunked"], "both"),
        (["Host: a", "Content-Length: 1", "Content-Length: 1"], "twice"),
        (["Host: a", "Content-Length: 1, 1"], "no number"),
        (["Host: a", "Content-Length: +1"], "no number"),
        (["Host: a", "Content-Length: 0x1"], "no number"),
        (["Host: a", "Content-Length: 01"], "no number"),
        (["Host: a", "Transfer-Encoding: chunked", "Transfer-Encoding: identity"], "twice"),
        (["Host: a", "Transfer-Encoding: xchunked"], "only"),
        (["Host: a", "Transfer-Encoding: gzip, chunked"], "only"),
        (["Host: a", "Transfer-Encoding : chunked"], "malformed"),
        (["Host: a", "Host: b"], "more than one"),
        (["X: y"], "no Host"),
        (["Host: a", "X: y", " folded"], "folded"),
        (["Host: a", "no colon"], "malformed"),
        (["Host: a", "X\xa0: y"], "malformed"),
        (["Host: a", ": y"], "malformed"),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(lines: list[str], word: str) -> None:
    with pytest.raises(BadHead, match=word) as error:
        head(*lines)
    assert error.value.status == 400


@pytest.mark.parametrize(
    "line",
    [
        "GET  / HTTP/1.1",
        "GET /\tHTTP/1.1",
        "GET / HTTP/1.1 ",
        " GET / HTTP/1.1",
        "GET / HTTP/2.0",
        "GET / http/1.1",
        "GET /",
        "G(ET / HTTP/1.1",
        "GET / x HTTP/1.1",
    ],
)
def test_request_lines(line: str) -> None:
    with pytest.raises(BadHead):
        head("Host: a", line=line)


@pytest.mark.parametrize(
    "raw",
    [b"GET / HTTP/1.1\nHost: a\n\n", b"GET / HTTP/1.1\r\nHost: a\n\r\n", b"GET / HTTP/1.1\r\nX: a\rb\r\n\r\n",
     b"GET / HTTP/1.1\r\nX: a\0b\r\n\r\n", b"GET / HTTP/1.1\r\nX: a\n"],
)  # fmt: skip
def test_line_ends(raw: bytes) -> None:
    with pytest.raises(BadHead):
        heads.end_of(raw)


def test_an_end_that_is_not_there_yet() -> None:
    assert heads.end_of(b"GET / HTTP/1.1\r\nHost: a\r\n\r") is None
    assert heads.end_of(b"GET / HTTP/1.1\r\nHost: a\r\n\r\nrest\n\n") == 27
    with pytest.raises(BadHead) as error:
        heads.end_of(b"GET /" + b"a" * 70_000)
    assert error.value.status == 431


@given(st.lists(st.sampled_from([b"G", b"\r", b"\n", b"\r\n", b"\r\n\r\n", b"\0"]), max_size=12))
def test_a_head_in_crumbs_is_read_as_one_that_came_at_once(parts: list[bytes]) -> None:
    data = b"".join(parts)

    def in_pieces(step: int) -> int | str | None:
        seen = 0
        for size in (*range(step, len(data), step), len(data)):
            try:
                end = heads.end_of(data[:size], seen)
            except BadHead:
                return "bad"
            if end is not None:
                return end
            seen = size
        return None

    assert in_pieces(1) == in_pieces(3) == in_pieces(max(1, len(data)))


def test_targets() -> None:
    assert heads.origin_form(head("Host: a", line="GET /x?y HTTP/1.1"), "https") == (b"/x?y", None)
    assert heads.origin_form(head("Host: a", line="GET https://a:1/x HTTP/1.1"), "https") == (b"/x", b"a:1")
    assert heads.origin_form(head("Host: a", line="GET HTTPS://a?q HTTP/1.1"), "https") == (b"/?q", b"a")
    assert heads.origin_form(head("Host: a", line="OPTIONS * HTTP/1.1"), "https") == (b"*", None)
    bad = ["GET * HTTP/1.1", "GET http://a/ HTTP/1.1", "GET a:443 HTTP/1.1", "GET ftp://a/ HTTP/1.1"]
    for line in (*bad, "GET https://u@a/ HTTP/1.1"):
        with pytest.raises(BadHead):
            heads.origin_form(head("Host: a", line=line), "https")


def test_authorities() -> None:
    assert heads.authority(b"Example.COM.:443") == ("example.com", 443)
    assert heads.authority(b"[::1]:80") == ("::1", 80)
    for bad in (b"a b", b"a/b", b"a@b", b"a:b", b"", b"a\xff", b"a..b", b"a:123456"):
        with pytest.raises(BadHead):
            heads.authority(bad)


def test_what_is_sent_on_is_plain() -> None:
    found = heads.plain(
        head("Host: A", "Connection: close, X-Drop", "Keep-Alive: 1", "TE: trailers", "Upgrade: h2c",
         "HTTP2-Settings: x",
             "Proxy-Authorization: y", "X: z"),
        b"a",
    )  # fmt: skip
    assert found == [(b"Host", b"a"), (b"X", b"z"), (b"Connection", b"close")]


@pytest.mark.parametrize(
    "query",
    ["_method=delete", "a=1&_method=delete", "a=1;_method=delete", "%5fmethod=DELETE", ".method=DELETE",
     "[method=DELETE", "+_method=delete", "%20.method=DELETE", "_method%00x=DELETE", "_method[]=DELETE"],
)  # fmt: skip
def test_methods_in_the_query_however_they_are_spelt(query: str) -> None:
    assert heads.overrides(head("Host: a", line=f"POST /x?{query} HTTP/1.1")) == ["DELETE"]


def test_what_only_looks_like_a_method_in_the_query() -> None:
    found = head(
        "Host: a", line="POST /x?method=DELETE&x_method=DELETE&_methods=DELETE&+method=DELETE HTTP/1.1"
    )
    assert heads.overrides(found) == []


def test_headers_that_some_servers_take_for_others() -> None:
    for line in ("X.HTTP.Method.Override: DELETE", "X_HTTP-Method~Override: DELETE"):
        assert heads.overrides(head("Host: a", line)) == ["DELETE"]
    assert heads.plain(head("Host: a", "X.Original.URL: /", "X-Kept.URL: /"), b"a")[1:] == [
        (b"X-Kept.URL", b"/")
    ]
    with pytest.raises(BadHead):
        head("Host: a", "Content.Length: 5")


def test_websockets() -> None:
    lines = ["Host: a", "Upgrade: websocket", "Connection: keep-alive, Upgrade", "Sec-WebSocket-Version: 13",
             "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="]  # fmt: skip
    found = head(*lines, "Sec-WebSocket-Extensions: permessage-deflate")
    assert heads.is_websocket(found)
    names = [name for name, _ in heads.plain(found, b"a")]
    assert b"Upgrade" in names and b"Connection" in names and b"Sec-WebSocket-Extensions" not in names
    for index in range(1, 5):
        assert not heads.is_websocket(head(*(line for at, line in enumerate(lines) if at != index)))
    assert not heads.is_websocket(head(*lines, "Content-Length: 5"))
    assert not heads.is_websocket(head(*lines, line="POST / HTTP/1.1"))


@given(st.binary(max_size=400))
def test_any_bytes(data: bytes) -> None:
    with contextlib.suppress(BadHead):
        end = heads.end_of(data)
        if end is not None:
            found = heads.parse(data[:end])
            assert heads.origin_form(found, "https")


def read(data: bytes, step: int = 1) -> bytes:
    reader, buffer, out = chunked.Reader(), ReceiveBuffer(), b""
    for at in range(0, len(data), step):
        buffer += data[at : at + step]
        while (found := reader(buffer)) is not None:
            if isinstance(found, chunked.End):
                assert at + step >= len(data)
                return out
            out += found
    raise EOFError


@pytest.mark.parametrize("step", [1, 2, 3, 7, 100])
def test_chunks(step: int) -> None:
    assert read(b"5\r\nhello\r\n6;x=y\r\n world\r\n0\r\n\r\n", step) == b"hello world"
    assert read(b"0\r\nX-Trailer: a\r\n\r\n", step) == b""


@pytest.mark.parametrize(
    "data",
    [b"5\r\nhelloXX0\r\n\r\n", b"5\nhello\r\n0\r\n\r\n", b"-1\r\n\r\n", b"0x5\r\nhello\r\n0\r\n\r\n",
     b"5 \r\nhello\r\n0\r\n\r\n",
     b"\r\n0\r\n\r\n", b"5\r\nhello\n0\r\n\r\n", b"0\r\nbad trailer\r\n\r\n", b"0\r\n\n", b"F" * 16 + b"\r\n",
      b"5;" + b"a" * 2_000],
)  # fmt: skip
def test_bad_chunks(data: bytes) -> None:
    with pytest.raises(chunked.BadChunk):
        read(data, 3)


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=8), st.integers(1, 40))
def test_any_chunks(parts: list[bytes], step: int) -> None:
    data = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    assert read(data, step) == b"".join(parts)


def test_small_chunks_are_read_together_and_end_by_themselves() -> None:
    whole = b"1\r\nA\r\n" * 1_000 + b"3;x=y\r\nxyz\r\n" + b"0\r\nTrailer: 1\r\n\r\nNEXT"
    for step in (1, 2, 3, 7, 64, len(whole)):
        reader, buffer, found = chunked.Reader(), ReceiveBuffer(), []
        for at in range(0, len(whole), step):
            buffer += whole[at : at + step]
            while (got := reader(buffer)) is not None:
                found.append(got)
                if isinstance(got, chunked.End):
                    break
            if found and isinstance(found[-1], chunked.End):
                break
        assert b"".join(part for part in found if isinstance(part, bytes)) == b"A" * 1_000 + b"xyz"
        assert isinstance(found[-1], chunked.End) and (step < len(whole) or bytes(buffer) == b"NEXT")
        assert step < len(whole) or len(found) == 2
    reader, buffer = chunked.Reader(), ReceiveBuffer()
    buffer += b"1\r\nA\r\n1\r\nBx\r\n"
    assert reader(buffer) == b"AB"
    with pytest.raises(chunked.BadChunk):
        reader(buffer)


@pytest.mark.parametrize("value", [b" " * 60_000, b" \t" * 15_000 + b"x" + b" " * 30_000, b"x" * 60_000])
@pytest.mark.parametrize("end", [b"", b"\x01", b"\x7f"])
def test_no_head_takes_long_to_read(value: bytes, end: bytes) -> None:
    """A pattern that tried every way to tell blanks apart took minutes for one header, and everybody waited."""
    began = time.process_time()
    raw = b"GET / HTTP/1.1\r\nHost: a\r\nA:" + value + end + b"\r\n\r\n"
    if end:
        with pytest.raises(BadHead):
            heads.parse(raw)
    else:
        assert heads.parse(raw).get(b"a") == value.strip()
    assert time.process_time() - began < 1
