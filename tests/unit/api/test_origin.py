"""What of a request's head is believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm4agents.api.listen.origin import Hosts, Origin, Proxies, name_of, read
from llm4agents.errors import InvalidRequestError

PROXIES = Proxies.of(["10.0.0.0/8", "127.0.0.1", "fd00::/8"])


def said(peer: str, *more: tuple[str, str], scheme: str = "http", proxies: Proxies = PROXIES) -> Origin:
    headers = [(b"host", b"a.test"), *((name.encode(), value.encode()) for name, value in more)]
    return read(headers, peer, scheme, proxies)


def test_a_strangers_word_on_himself_is_taken_off() -> None:
    forged = [
        ("x-forwarded-for", "127.0.0.1"),
        ("x-forwarded-proto", "https"),
        ("x-forwarded-host", "evil.test"),
        ("forwarded", "for=127.0.0.1;host=evil.test"),
        ("x-real-ip", "127.0.0.1"),
    ]
    found = said("192.0.2.9", *forged, ("accept", "*/*"))
    assert found == Origin("192.0.2.9", "http", "a.test", [(b"host", b"a.test"), (b"accept", b"*/*")])


def test_chains_are_read_from_their_end() -> None:
    for chain, client in (
        ("203.0.113.7", "203.0.113.7"),
        ("203.0.113.7, 10.1.1.1", "203.0.113.7"),
        ("127.0.0.1, 203.0.113.7, 10.1.1.1", "203.0.113.7"),  # the first is the client's own invention
        ("203.0.113.7:4711", "203.0.113.7"),
        ("[2001:db8::1]:4711", "2001:db8::1"),
        ("10.2.2.2", "10.2.2.2"),
        ("unknown, x", "10.0.0.1"),
        ("", "10.0.0.1"),
    ):
        assert said("10.0.0.1", ("x-forwarded-for", chain)).client == client, chain
    assert said("10.0.0.1", ("forwarded", 'for="[2001:db8::2]:1";proto=https')).client == "2001:db8::2"
    assert said("::ffff:10.0.0.1", ("x-forwarded-for", "203.0.113.7")).client == "203.0.113.7"
    assert said("fd00::5", ("x-forwarded-for", "203.0.113.7")).client == "203.0.113.7"


def test_scheme_and_host() -> None:
    assert said("10.0.0.1", ("x-forwarded-proto", "https")).scheme == "https"
    assert said("10.0.0.1", ("x-forwarded-proto", "https"), scheme="ws").scheme == "wss"
    assert said("10.0.0.1", ("x-forwarded-proto", "gopher")).scheme == "http"
    found = said("10.0.0.1", ("x-forwarded-host", "first.test, last.test"))
    assert found.host == "last.test" and found.headers == [(b"host", b"last.test")]
    assert read([], "10.0.0.1", "http", PROXIES).host is None
    assert read([(b"host", b"a"), (b"host", b"b")], "10.0.0.1", "http", PROXIES).host is None


def test_names() -> None:
    for text, name in (
        ("A.Test:80", "a.test"),
        ("a.test.", "a.test"),
        ("[::1]:80", "::1"),
        ("", None),
        ("a b", None),
        ("a@b", None),
        ("a:b", None),
        (".", None),
    ):
        assert name_of(text) == name, text
    hosts = Hosts.of("10.1.1.1", "sbx.test", "https://Public.example/x", {"cert.test"})
    for ours in ("10.1.1.1", "sbx.test", "8000-sbx-a.sbx.test", "public.example", "cert.test", "x.localhost"):
        assert hosts.are(ours, None), ours
    assert hosts.are("10.9.9.9", "10.9.9.9")
    for other in ("evilsbx.test", "sbx.test.evil", "test", "10.9.9.9", ""):
        assert not hosts.are(other, "10.1.1.1"), other


def test_what_is_no_network_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="TRUSTED_PROXIES"):
        Proxies.of(["proxy.example"])


@given(
    st.lists(
        st.tuples(
            st.sampled_from([b"host", b"forwarded", b"x-forwarded-for", b"x-a"]), st.binary(max_size=40)
        )
    )
)
def test_no_head_makes_it_fail(headers: list[tuple[bytes, bytes]]) -> None:
    for peer in ("10.0.0.1", "192.0.2.1", "", None):
        found = read(headers, peer, "http", PROXIES)
        assert all(not name.startswith((b"x-forwarded", b"forwarded")) for name, _ in found.headers)
        name_of(found.host or "")
