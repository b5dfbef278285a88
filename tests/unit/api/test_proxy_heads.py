"""Which port a request means, and where a guest's redirects and cookies lead: tables."""

from __future__ import annotations

from typing import Any

import pytest

from llm4agents.api.proxy import address, heads
from llm4agents.api.proxy.address import Target
from llm4agents.errors import InvalidRequestError

ID = "sbx_0123456789abcdefghij"
PREFIX = f"/v1/sandboxes/{ID}/ports/8000"
BELOW = Target(ID, 8000, b"/", PREFIX)
NAMED = Target(ID, 8000, b"/", form="host")


def scope(path: str, host: str = "", method: str = "GET", kind: str = "http") -> dict[str, Any]:
    return {
        "type": kind,
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "headers": [(b"host", host.encode())],
    }


OURS = address.Names("sbx.example", frozenset({"sbx.example", "api.sbx.example", "203.0.113.7"}))
NOBODY_SAID = address.Names()
H = ID.replace("_", "-")


@pytest.mark.parametrize(
    ("path", "host", "found"),
    [
        (f"{PREFIX}/a//b", "", Target(ID, 8000, b"/a//b", PREFIX)),
        (PREFIX, "", Target(ID, 8000, None, PREFIX)),
        ("/v1/server", f"8000-{H}.sbx.example:9", Target(ID, 8000, b"/v1/server", form="host")),
        ("/", f"8000-{H.upper()}.SBX.Example.", Target(ID, 8000, b"/", form="host")),
        ("/", f"8000-{H}.sbx.example.:443", Target(ID, 8000, b"/", form="host")),
        ("/", f"8000-{H}.sbx.example..", None),
        ("/", f"8000-{H}.example", None),
        ("/", f"8000-{H}.sbx.example.evil.example", None),
        ("/", f"8000-{H}.evil.example", None),
        ("/", f"8000-{H}", None),
        ("/", f"a.8000-{H}.sbx.example", None),
        ("/", f"8000-{H}.localhost", None),
        (f"{PREFIX}/wait", "", None),
        (f"/v1/sandboxes/{ID}/ports", "", None),
        (f"/v1/sandboxes/{ID}/ports/", "", None),
        ("/v1/sandboxes/sbx_x/ports/1/", "", None),
        ("/", f"8000-{ID}.sbx.example", None),
        ("/", f"x8000-{H}.sbx.example", None),
        # The Host goes before the path.
        (f"{PREFIX}/", f"1-{H}.sbx.example", Target(ID, 1, f"{PREFIX}/".encode(), form="host")),
    ],
)
def test_targets(path: str, host: str, found: Target | None) -> None:
    assert address.of(scope(path, host), OURS) == found


def test_without_a_domain_ports_are_names_of_localhost() -> None:
    assert address.of(scope("/", f"8000-{H}.localhost:81"), NOBODY_SAID) == Target(
        ID, 8000, b"/", form="host"
    )
    assert address.of(scope("/", f"8000-{H}.example.org"), NOBODY_SAID) is None


@pytest.mark.parametrize(
    "names", [("x-sandbox-id", "x-sandbox-port"), ("e2b-sandbox-id", "e2b-sandbox-port")]
)
def test_headers_name_a_port_on_our_own_hosts(names: tuple[str, str]) -> None:
    def of(host: str, *fields: tuple[str, str]) -> Target | None:
        asked = scope("/x", host)
        asked["headers"] += [(name.encode(), value.encode()) for name, value in fields]
        return address.of(asked, OURS)

    ident, port = names
    for host in (
        "sbx.example",
        "API.sbx.example:8443",
        "203.0.113.7",
        "127.0.0.1:80",
        "[::1]:80",
        "localhost",
    ):
        for spelt in (ID, H):
            assert of(host, (ident, spelt), (port, "8000")) == Target(ID, 8000, b"/x", form="headers")
    # A name that is not ours may lead anywhere, also to this machine (DNS rebinding): there they mean nothing.
    assert of("evil.example", (ident, ID), (port, "8000")) is None
    # The Host's own port holds.
    assert of(f"1-{H}.sbx.example", (ident, ID), (port, "2")) == Target(ID, 1, b"/x", form="host")
    for wrong in (
        [(ident, ID)],
        [(port, "1")],
        [(ident, ID), (port, "0")],
        [(ident, ID), (port, "+1")],
        [(ident, ID), (port, "65536")],
        [(ident, "sbx_x"), (port, "1")],
        [(ident, "../x"), (port, "1")],
        [(ident, ID), (ident, ID), (port, "1")],
        [(ident, ID), (port, "1"), (port, "2")],
    ):
        with pytest.raises(InvalidRequestError):
            of("sbx.example", *wrong)


@pytest.mark.parametrize(
    "host",
    [
        f"user@8000-{H}.sbx.example",
        f"8000-{H}.sbx.example, evil.example",
        f"8000-{H}.sbx.example/",
        f"8000-{H}.sbx.example\\",
        "a b",
        "a:b",
        "a:123456",
        "[::1",
        f"0-{H}.sbx.example",
        f"65536-{H}.sbx.example",
        f"99999999999999999999-{H}.sbx.example",
    ],
)
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(InvalidRequestError):
        address.of(scope("/", host), OURS)


def test_two_hosts_and_whole_urls_are_refused() -> None:
    host = f"8000-{H}.sbx.example"
    two = scope("/", host)
    two["headers"].append((b"host", b"sbx.example"))
    with pytest.raises(InvalidRequestError, match="more than one"):
        address.of(two, OURS)
    for target in (f"http://1-{H}.sbx.example/", "http://127.0.0.1/", "*"):
        with pytest.raises(InvalidRequestError, match="no proxy"):
            address.of(scope(target, host), OURS)


def test_nothing_that_a_client_says_of_a_forwarded_host_counts() -> None:
    asked = scope("/", "sbx.example")
    for name in (b"x-forwarded-host", b"forwarded", b"x-original-host", b"x-host"):
        asked["headers"].append((name, f"8000-{H}.sbx.example".encode()))
    assert address.of(asked, OURS) is None


def test_only_a_get_asks_us_whether_a_port_listens() -> None:
    for more in ({"method": "POST"}, {"kind": "websocket"}):
        found = address.of(scope(f"{PREFIX}/wait", **more), OURS)
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
        (b"a=1; Path = /; Domain =x.example", b"a=1; Path = " + PREFIX.encode() + b"/"),
        (b"a=1; Path=" + PREFIX.encode() + b"/y", b"a=1; Path=" + PREFIX.encode() + b"/y"),
    ],
)
def test_cookies(said: bytes, kept: bytes) -> None:
    assert heads.cookie(said, PREFIX.encode()) == kept
