"""Who is let in to a port, and what of a request is taken off: tables, without a server."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm4agents.api.proxy import admission
from llm4agents.api.proxy.address import Target
from llm4agents.api.proxy.admission import Admitted, Offered, Owned, Signer, Stamp
from llm4agents.engine.principal import ORDINARY, Principal
from llm4agents.engine.traffic import Traffic
from llm4agents.errors import AuthenticationError, ForbiddenError, LLM4AgentsError, SandboxNotFoundError

ID, OTHER = "sbx_0123456789abcdefghij", "sbx_9999999999abcdefghij"
HOST = Target(ID, 8000, b"/", form="host")
PATH = Target(ID, 8000, b"/", f"/v1/sandboxes/{ID}/ports/8000", form="path")
SIGNER = Signer(b"k" * 32)
NOBODY = Principal.nobody("203.0.113.1")
OWNER = Principal("prj_a", "key_a", ORDINARY, "203.0.113.1")
READER = Principal("prj_a", "key_r", frozenset({"read"}), "203.0.113.1")
STRANGER = Principal("prj_b", "key_b", ORDINARY, "203.0.113.1")
PRIVATE, PUBLIC = Owned("prj_a", Traffic(False, 3)), Owned("prj_a", Traffic(True, 3))
NOW = 1_000_000.0


def url(expires: int = 1_000_100, *, port: int = 8000, sandbox: str = ID, generation: int = 3) -> Stamp:
    return Stamp(expires, SIGNER.stamp("url", sandbox, port, expires, generation).encode())


def cookie(expires: int = 1_000_100) -> Stamp:
    return Stamp(expires, SIGNER.stamp("cookie", ID, 8000, expires, 3).encode())


TOKEN = SIGNER.token(ID, 3).encode()


@pytest.mark.parametrize(
    ("who", "found", "offers", "how"),
    [
        (OWNER, PRIVATE, Offered(), Admitted("key")),
        (Principal.operator(), PRIVATE, Offered(), Admitted("key")),
        (NOBODY, PUBLIC, Offered(), Admitted("public")),
        (STRANGER, PUBLIC, Offered(), Admitted("public")),
        (NOBODY, PRIVATE, Offered(tokens=(b"l4at_no", TOKEN)), Admitted("token")),
        (STRANGER, PRIVATE, Offered(tokens=(TOKEN,)), Admitted("token")),
        (READER, PRIVATE, Offered(tokens=(TOKEN,)), Admitted("token")),
        (NOBODY, PRIVATE, Offered(signed=url()), Admitted("url", 1_000_100)),
        (NOBODY, PRIVATE, Offered(cookies=(cookie(),)), Admitted("cookie", 1_000_100)),
    ],
)
def test_who_gets_in(who: Principal, found: Owned, offers: Offered, how: Admitted) -> None:
    assert admission.judge(HOST, found, who, offers, SIGNER, NOW) == how


@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (Offered(tokens=(TOKEN,)), Offered(tokens=(b"l4at_no",))),
        (Offered(signed=url()), Offered(signed=Stamp(1_000_100, b"no"))),
        (Offered(cookies=(cookie(),)), Offered(cookies=(Stamp(1_000_100, b"no"),))),
    ],
    ids=["token", "url", "cookie"],
)
def test_what_opens_a_port_is_compared_in_constant_time(
    monkeypatch: pytest.MonkeyPatch, good: Offered, bad: Offered, said: bool
) -> None:
    """Whether it is right is what `hmac.compare_digest` says, and no other comparison."""
    asked = []
    monkeypatch.setattr(admission.hmac, "compare_digest", lambda right, given: asked.append(right) or said)
    for offers in (good, bad):
        asked.clear()
        if said:
            admission.judge(HOST, PRIVATE, NOBODY, offers, SIGNER, NOW)
        else:
            with pytest.raises(ForbiddenError):
                admission.judge(HOST, PRIVATE, NOBODY, offers, SIGNER, NOW)
        assert len(asked) == 1
        with contextlib.suppress(LLM4AgentsError):
            admission.judge(HOST, None, NOBODY, offers, SIGNER, NOW)
        assert len(asked) == 2, "of a sandbox that is none it is compared, too"


BAD: list[Offered] = [
    Offered(),
    Offered(tokens=(b"", b"l4at_", TOKEN[:-1], TOKEN + b"x", "é".encode())),
    Offered(
        tokens=(SIGNER.token(ID, 2).encode(), SIGNER.token(ID, 4).encode(), SIGNER.token(OTHER, 3).encode())
    ),
    Offered(tokens=(Signer(b"x" * 32).token(ID, 3).encode(),)),
    Offered(signed=url(port=8001)),
    Offered(signed=url(sandbox=OTHER)),
    Offered(signed=url(generation=2)),
    Offered(signed=Stamp(1_000_101, url().signature)),  # a longer life than was signed
    Offered(signed=Stamp(1_000_100, b"")),
    Offered(signed=cookie()),  # neither is the other
    Offered(cookies=(url(),)),
    Offered(tokens=(url().signature,)),
]


@pytest.mark.parametrize("offers", BAD)
@pytest.mark.parametrize("target", [HOST, PATH], ids=["host", "path"])
def test_who_has_no_right_learns_nothing(target: Target, offers: Offered) -> None:
    """The same words for a sandbox that is none, for one's own kind of caller."""
    for who, kind in ((NOBODY, LLM4AgentsError), (STRANGER, SandboxNotFoundError)):
        said = []
        for found in (PRIVATE, None):
            with pytest.raises(kind) as raised:
                admission.judge(target, found, who, offers, SIGNER, NOW)
            said.append((type(raised.value), raised.value.message, raised.value.hint, raised.value.details))
        assert said[0] == said[1]
        if who is NOBODY:
            assert said[0][0] is (ForbiddenError if target is HOST else AuthenticationError)


def test_a_key_without_the_scope_is_told_so_and_only_of_its_own() -> None:
    with pytest.raises(ForbiddenError, match="sandboxes"):
        admission.judge(HOST, PRIVATE, READER, Offered(), SIGNER, NOW)
    with pytest.raises(SandboxNotFoundError):
        admission.judge(HOST, None, READER, Offered(), SIGNER, NOW)


def test_a_link_that_has_expired_says_so_to_whoever_had_one() -> None:
    for offers in (Offered(signed=url(999_999)), Offered(cookies=(cookie(1_000_000),))):
        with pytest.raises(ForbiddenError, match="expired"):
            admission.judge(HOST, PRIVATE, NOBODY, offers, SIGNER, NOW)
    with pytest.raises(ForbiddenError, match="no such sandbox"):
        admission.judge(HOST, PRIVATE, NOBODY, Offered(signed=Stamp(1, b"made up")), SIGNER, NOW)


def _scope(query: bytes = b"", *fields: tuple[bytes, bytes], kind: str = "http") -> dict[str, Any]:
    headers = [(b"host", b"8000-x.sbx.example"), *fields]
    return {"type": kind, "method": "GET", "query_string": query, "headers": headers, "scheme": "https"}


def test_what_a_request_offers() -> None:
    made = admission.cookie_for(HOST, 1_000_100, PRIVATE.traffic, SIGNER, tls=True, now=NOW)
    assert made.startswith("__Host-l4a-access=1000100.")
    assert made.endswith("; Path=/; Max-Age=100; HttpOnly; SameSite=Lax; Secure")
    pair = made.partition(";")[0].encode()
    scope = _scope(
        b"a=1&l4a-expires=5&l4a-signature=sig&b=%26",
        (b"x-traffic-token", b" one "),
        (b"e2b-traffic-access-token", b"two"),
        (b"cookie", b"theirs=1; " + pair),
        (b"cookie", b"more=2"),
    )
    assert admission.offered(scope, HOST) == Offered(
        (b"one", b"two"), Stamp(5, b"sig"), (Stamp(1_000_100, cookie().signature),)
    )
    assert admission.offered(scope, PATH).cookies == (), "the path form shares its host with everything"
    for wrong in (b"l4a-expires=-1", b"l4a-expires=1e9", b"l4a-expires=9999999999999999", b"l4a-expires="):
        assert admission.offered(_scope(wrong + b"&l4a-signature=x"), HOST).signed is None


@pytest.mark.parametrize(
    ("fields", "counts"),
    [
        ([], True),
        ([(b"origin", b"https://8000-x.sbx.example")], True),
        (
            [(b"origin", b"https://8000-y.sbx.example")],
            False,
        ),  # a sibling: the same site, another guest's page
        ([(b"origin", b"null")], False),
        ([(b"origin", b"https://[")], False),
        ([(b"sec-fetch-site", b"same-origin")], True),
        ([(b"sec-fetch-site", b"none")], True),
        ([(b"sec-fetch-site", b"same-site")], False),
        ([(b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"no-cors")], False),
        (
            [
                (b"sec-fetch-site", b"cross-site"),
                (b"sec-fetch-mode", b"navigate"),
                (b"sec-fetch-dest", b"document"),
            ],
            True,
        ),
        (
            [
                (b"sec-fetch-site", b"same-site"),
                (b"sec-fetch-mode", b"navigate"),
                (b"sec-fetch-dest", b"iframe"),
            ],
            False,
        ),
    ],
)
def test_the_cookie_counts_for_pages_of_its_own_host(fields: list[tuple[bytes, bytes]], counts: bool) -> None:
    sent = (b"cookie", b"l4a-access=5.x")
    assert bool(admission.offered(_scope(b"", sent, *fields), HOST).cookies) == counts
    if (b"sec-fetch-mode", b"navigate") not in fields:
        assert bool(admission.offered(_scope(b"", sent, *fields, kind="websocket"), HOST).cookies) == counts


def test_what_is_ours_is_taken_off_and_the_rest_left() -> None:
    kept = admission.for_the_guest(
        [
            (b"authorization", b"Bearer l4a_aaaaaaaa_00"),
            (b"authorization", b"bearer  l4a_x"),
            (b"x-api-key", b" l4a_aaaaaaaa_00"),
            (b"x-traffic-token", b"t"),
            (b"e2b-traffic-access-token", b"t"),
            (b"x-sandbox-id", ID.encode()),
            (b"x-sandbox-port", b"1"),
            (b"e2b-sandbox-id", b"x"),
            (b"e2b-sandbox-port", b"1"),
            (b"cookie", b"a=1; __Host-l4a-access=5.x; b=2"),
            (b"cookie", b"l4a-access=5.x"),
            (b"cookie", b"c=3"),
            (b"referer", b"https://h/p?x=1&l4a-signature=s&l4a-expires=1#f"),
            (b"authorization", b"Bearer theirs"),
            (b"x-api-key", b"theirs"),
        ]
    )
    assert kept == [
        (b"referer", b"https://h/p?x=1#f"),
        (b"authorization", b"Bearer theirs"),
        (b"x-api-key", b"theirs"),
        (b"cookie", b"a=1; b=2; c=3"),
    ]
    assert admission.for_the_guest([(b"cookie", b"l4a-access=1")]) == []
    assert admission.query_for_the_guest(b"l4a-expires=1&q=%2F&l4a%2Dsignature=2&&r") == b"q=%2F&&r"
    for set_cookie, ours in (
        (b"l4a-access=x", True),
        (b" __Host-l4a-access =x; Path=/", True),
        (b"= l4a-access=x", True),
        (b"a=l4a-access", False),
    ):
        assert admission.is_our_cookie(set_cookie) == ours


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_no_query_hides_what_is_ours_and_none_is_changed_otherwise(one: bytes, two: bytes) -> None:
    kept = admission.query_for_the_guest(one + b"&l4a-signature=secret&" + two)
    assert b"l4a-signature=secret" not in kept
    if b"4a" not in one + two and b"%" not in one + two:
        assert kept == one + b"&" + two
