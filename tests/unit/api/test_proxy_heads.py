"""Which port a request means, and where a guest's redirects and cookies lead: tables."""

from __future__ import annotations

from typing import Any

import pytest

from llm4agents.api.proxy import address, heads
from llm4agents.api.proxy.address import Target

ID = "sbx_0123456789abcdefghij"
PREFIX = f"/v1/sandboxes/{ID}/ports/8000"
BELOW = Target(ID, 8000, b"/", PREFIX)
NAMED = Target(ID, 8000, b"/")


def scope(path: str, host: str = "", method: str = "GET", kind: str = "http") -> dict[str, Any]:
    return {
        "type": kind,
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "headers": [(b"host", host.encode())],
    }


@pytest.mark.parametrize(
    ("path", "host", "found"),
    [
        (f"{PREFIX}/a//b", "", Target(ID, 8000, b"/a//b", PREFIX)),
        (PREFIX, "", Target(ID, 8000, None, PREFIX)),
        ("/v1/server", f"8000-{ID.replace('_', '-')}.example.org:9", Target(ID, 8000, b"/v1/server")),
        ("/", f"8000-{ID.replace('_', '-').upper()}.x", Target(ID, 8000, b"/")),
        (f"{PREFIX}/wait", "", None),
        (f"/v1/sandboxes/{ID}/ports", "", None),
        (f"/v1/sandboxes/{ID}/ports/", "", None),
        ("/v1/sandboxes/sbx_x/ports/1/", "", None),
        ("/", f"8000-{ID}.x", None),
        ("/", f"x8000-{ID.replace('_', '-')}.x", None),
    ],
)
def test_targets(path: str, host: str, found: Target | None) -> None:
    assert address.of(scope(path, host)) == found


def test_only_a_get_asks_us_whether_a_port_listens() -> None:
    for more in ({"method": "POST"}, {"kind": "websocket"}):
        found = address.of(scope(f"{PREFIX}/wait", **more))
        assert found is not None
        assert found.path == b"/wait"


@pytest.mark.parametrize(
    ("said", "below", "named"),
    [
        ("/login?next=/", f"{PREFIX}/login?next=/", "/login?next=/"),
        (f"{PREFIX}/login", f"{PREFIX}/login", None),
        ("login", "login", "login"),
        ("?page=2", "?page=2", "?page=2"),
        ("http://localhost:8000/a#b", f"{PREFIX}/a#b", "/a#b"),
        ("http://127.0.0.1:8000", f"{PREFIX}/", "/"),
        ("http://[::1]:8000?q", f"{PREFIX}/?q", "/?q"),
        ("//0.0.0.0:8000/x", None, None),
        ("http://localhost:9000/x", "http://localhost:9000/x", "http://localhost:9000/x"),
        ("https://example.org/x", "https://example.org/x", "https://example.org/x"),
        ("http://public.example/x", f"{PREFIX}/x", "/x"),
        ("http://localhost:8000//evil.example/", "http://localhost:8000//evil.example/", None),
        ("mailto:a@b", "mailto:a@b", "mailto:a@b"),
        ("http://[bad", "http://[bad", "http://[bad"),
    ],
)
def test_redirects(said: str, below: str | None, named: str | None) -> None:
    if below is not None:
        assert heads.location(said, BELOW, "public.example") == below
    if named is not None:
        assert heads.location(said, NAMED, "public.example") == named


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (b"a=1; Path=/; HttpOnly", b"a=1; Path=" + PREFIX.encode() + b"/; HttpOnly"),
        (b"a=1; path=/x;Domain=localhost", b"a=1; path=" + PREFIX.encode() + b"/x"),
        (b"a=1", b"a=1"),
        (b"a=1; Path=" + PREFIX.encode() + b"/y", b"a=1; Path=" + PREFIX.encode() + b"/y"),
    ],
)
def test_cookies(said: bytes, kept: bytes) -> None:
    assert heads.cookie(said, PREFIX.encode()) == kept
