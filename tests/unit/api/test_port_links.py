"""What the URL of a port is, by what is known of the server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llm4agents.api.proxy import address, links
from llm4agents.api.proxy.address import Names
from llm4agents.config import Settings
from llm4agents.errors import ConflictError

ID = "sbx_0123456789abcdefghij"
H = ID.replace("_", "-")
BARE = Settings(Path("/s"), Path("/c"), Path("/r"))
DOMAIN = replace(BARE, domain="Sbx.Example.")


def _url(settings: Settings, listening: tuple[str, str, int] | None, host: str = "llm4agents") -> str:
    return links.of(links.base(settings, listening, host), Names.of(settings), ID, 8000, "/a?b")


@pytest.mark.parametrize(
    ("settings", "listening", "host", "url"),
    [
        (DOMAIN, ("https", "0.0.0.0", 443), "", f"https://8000-{H}.sbx.example/a?b"),
        (DOMAIN, ("https", "::", 8443), "", f"https://8000-{H}.sbx.example:8443/a?b"),
        (
            replace(DOMAIN, public_url="https://api.example"),
            ("http", "127.0.0.1", 7400),
            "",
            f"https://8000-{H}.sbx.example/a?b",
        ),
        (
            replace(DOMAIN, public_url="https://api.example:8443/x"),
            None,
            "",
            f"https://8000-{H}.sbx.example:8443/a?b",
        ),
        (
            replace(BARE, public_url="https://api.example/x/"),
            None,
            "",
            f"https://api.example/x/v1/sandboxes/{ID}/ports/8000/a?b",
        ),
        (BARE, ("http", "127.0.0.1", 7400), "", f"http://8000-{H}.localhost:7400/a?b"),
        (BARE, ("http", "localhost", 80), "", f"http://8000-{H}.localhost/a?b"),
        (BARE, ("https", "127.0.0.1", 7400), "", f"https://localhost:7400/v1/sandboxes/{ID}/ports/8000/a?b"),
        (BARE, ("https", "203.0.113.7", 443), "", f"https://203.0.113.7/v1/sandboxes/{ID}/ports/8000/a?b"),
        (
            BARE,
            ("https", "0.0.0.0", 443),
            "box.example:443",
            f"https://box.example/v1/sandboxes/{ID}/ports/8000/a?b",
        ),
        (
            BARE,
            ("https", "::", 444),
            "[2001:db8::1]:444",
            f"https://[2001:db8::1]:444/v1/sandboxes/{ID}/ports/8000/a?b",
        ),
    ],
)
def test_where_a_port_is(
    settings: Settings, listening: tuple[str, str, int] | None, host: str, url: str
) -> None:
    made = _url(settings, listening, host)
    assert made == url
    # And what it leads to, when it comes back.
    there, _, rest = made.partition("://")[2].partition("/")
    path = "/" + rest.partition("?")[0].removeprefix("x/")
    scope = {
        "type": "http",
        "method": "GET",
        "raw_path": path.encode(),
        "headers": [(b"host", there.encode())],
    }
    found = address.of(scope, Names.of(settings))
    assert found is not None and (found.sandbox, found.port, found.path) == (ID, 8000, b"/a")


def test_a_server_without_a_name_says_what_to_do() -> None:
    for listening, words in ((None, "unix socket"), (("https", "0.0.0.0", 443), "what it is called")):
        with pytest.raises(ConflictError, match=words):
            _url(BARE, listening)


def test_a_signature_goes_before_the_fragment() -> None:
    assert links.signed("https://h/p", 5, "s") == "https://h/p?l4a-expires=5&l4a-signature=s"
    assert links.signed("https://h/p?a#f", 5, "s") == "https://h/p?a&l4a-expires=5&l4a-signature=s#f"
