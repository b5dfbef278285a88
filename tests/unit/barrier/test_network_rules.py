"""`network=` as people write it: the grammar of rules, rewrites and credentials, and what is said about mistakes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm4agents import limits
from llm4agents.barrier import rules
from llm4agents.barrier.network import FORMS, Binding, Network, Rewrite
from llm4agents.errors import InvalidRequestError
from tests.unit.barrier.rule_lines import lines

CANONICAL = [
    "allow example.com",
    "deny example.com",
    "allow *.example.com",
    "allow *",
    "deny *:*",
    "allow *.com",
    "allow example.com:8080",
    "allow example.com:8000-8080",
    "allow example.com:*",
    "allow example.com/repos/*",
    "allow example.com:8443/a*b/c",
    "allow GET example.com",
    "allow GET,HEAD https example.com:8443/x",
    "allow http example.com",
    "deny https example.com/admin*",
    "allow tcp db.example.com:5432",
    "allow tcp db.example.com:*",
    "deny tcp *",
    "allow 192.0.2.1",
    "allow 10.0.0.0/8:5432",
    "allow 10.0.0.0/8:443/v1/*",
    "allow [2001:db8::1]:443",
    "allow [2001:db8::1]",
    "allow [2001:db8::/32]:443/x",
    "deny 0.0.0.0/0",
    "allow example.com rate=10MiB/s bytes=1GiB",
    "allow example.com rate=1500B/s",
    "allow localhost:3000",
    "allow PROPFIND example.com/dav/*",
]


@pytest.mark.parametrize("line", CANONICAL)
def test_what_is_written_canonically_stays(line: str) -> None:
    rule = rules.parse(line)
    assert str(rule) == line
    assert rules.parse(str(rule)) == rule


@pytest.mark.parametrize(
    "line, canonical",
    [
        ("  allow\texample.com  ", "allow example.com"),
        ("allow EXAMPLE.com.", "allow example.com"),
        ("allow bücher.example", "allow xn--bcher-kva.example"),
        ("allow *.Bücher.example:443", "allow *.xn--bcher-kva.example:443"),
        ("allow 10.0.0.1/32", "allow 10.0.0.1"),
        ("allow 2001:db8::1", "allow [2001:db8::1]"),
        ("allow 2001:DB8::/32", "allow [2001:db8::/32]"),
        ("allow 2001:db8::/32/x", "allow [2001:db8::/32]/x"),
        ("allow [2001:db8::]/32:443", "allow [2001:db8::/32]:443"),
        ("allow 10.0.0.1/admin", "allow 10.0.0.1/admin"),
        ("allow GET,GET example.com", "allow GET example.com"),
        ("allow example.com:80-80", "allow example.com:80"),
        ("allow example.com rate=1024KiB/s", "allow example.com rate=1MiB/s"),
        ("allow example.com/a%20b", "allow example.com/a%20b"),
        ("allow example.com:1-65535", "allow example.com:*"),
        ("allow tcp:22", "allow tcp:22"),  # a host of that name
    ],
)
def test_other_spellings_become_canonical(line: str, canonical: str) -> None:
    assert str(rules.parse(line)) == canonical
    assert rules.parse(canonical) == rules.parse(line)


MISTAKES = [
    ("", 1, "empty"),
    ("permit example.com", 1, "neither allow nor deny"),
    ("Allow example.com", 1, "neither allow nor deny"),
    ("allow", 6, "no host"),
    ("allow GET", 10, "no host"),
    ("allow rate=1MiB/s", 6, "no host"),
    ("allow exa mple.com", 11, "not expected after the host"),
    ("allow get example.com", 7, "no list of methods.*capitals"),
    ("allow GET, POST example.com", 7, "no list of methods.*without blanks"),
    ("allow GET POST example.com", 11, "not expected after methods"),
    ("allow udp example.com:53", 11, "after the host 'udp'.*http, https or tcp"),
    ("allow https://example.com/x", 7, "not written here"),
    ("allow ex*mple.com", 7, "is no host"),
    ("allow *example.com", 7, "is no host"),
    ("allow **.example.com", 7, "is no host"),
    ("allow exa$mple.com", 7, "no label"),
    ("allow example.com:", 19, "no port"),
    ("allow example.com:0", 19, "no port"),
    ("allow example.com:65536", 19, "no port"),
    ("allow example.com:90-80", 19, "no port"),
    ("allow example.com:http", 19, "no port"),
    ("allow example.com/a?b=c", 18, "queries"),
    ("allow example.com/a/../b", 18, "more than one way"),
    ("allow example.com//a", 18, "more than one way"),
    ("allow example.com/a%2fb", 18, "more than one way"),
    ("allow example.com/a;b", 18, "more than one way"),
    ("allow example.com/a%2Ab", 18, "stands for anything"),
    ("allow example.com/%zz", 18, "more than one way"),
    ("allow example.com rate=1MiB", 19, "no rate"),
    ("allow example.com rate=1MB/s", 19, "no such size"),
    ("allow example.com bytes=0B", 19, "no such size"),
    ("allow example.com bytes=1GiB bytes=1GiB", 30, "not expected"),
    ("deny example.com rate=1MiB/s", 18, "deny has no limits"),
    ("allow tcp example.com", 11, "tcp needs a port"),
    ("allow tcp example.com:22/x", 11, "neither methods nor paths"),
    ("allow GET tcp example.com:22", 15, "neither methods nor paths"),
    ("allow CONNECT example.com", 7, "never pass"),
    ("allow 10.0.0.1/8", 7, "bits set"),
    ("allow 10.0.0.0/33", 7, "no prefix length"),
    ("allow 127.1", 7, "another spelling of 127.0.0.1"),
    ("allow 0x7f000001:80", 7, "another spelling of 127.0.0.1"),
    ("allow 300.1.1.1", 7, "ends in a number"),
    ("allow [::1", 7, "not closed"),
    ("allow [example.com]:443", 7, "no IPv6 address"),
    ("allow fe80::1%eth0", 12, "no port"),
    ("allow 224.0.0.1", 7, "nothing can be connected"),
    ("allow 198.18.0.1", 7, "nothing can be connected"),
    ("allow exam\u0000ple.com", 11, "not printable"),
    ("allow a\nb", 8, "not printable"),
]


@pytest.mark.parametrize("line, column, words", MISTAKES)
def test_a_mistake_is_told_with_its_place(line: str, column: int, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as raised:
        rules.parse(line, "rule 7", line=7)
    assert raised.value.hint is not None and raised.value.hint.startswith("expected")
    assert "rule 7" in raised.value.message and raised.value.details["line"] == 7
    assert abs(raised.value.details["column"] - column) <= 1, raised.value.details


def test_a_line_has_an_end() -> None:
    with pytest.raises(InvalidRequestError, match="characters long"):
        rules.parse("allow " + "a" * limits.NETWORK_RULE_CHARACTERS_MAX)


@given(lines())
def test_rules_survive_being_written_and_read(line: str) -> None:
    rule = rules.parse(line)
    assert rules.parse(str(rule)) == rule
    assert str(rules.parse(str(rule))) == str(rule)


WORDS = st.sampled_from(
    ["allow", "deny", "GET", "GET,POST", "http", "tcp", "*", "*.a.b", "a.b", "10.0.0.0/8", "[::1]", "[", "]", ":", "/",
     "::1", "rate=", "rate=1MiB/s", "bytes=1B", "->", "://", "%2f", "..", "0x7f.1", "ü", "\u202e", "\x00", ":443", "-"]
)  # fmt: skip


@settings(max_examples=400)
@given(
    st.one_of(
        st.text(max_size=60),
        st.lists(WORDS, max_size=7).map(" ".join),
        st.lists(WORDS, max_size=7).map("".join),
    )
)
def test_no_text_does_more_than_be_refused(text: str) -> None:
    for line in (text, f"allow {text}", f"allow example.com{text}", f"deny 10.0.0.0{text}"):
        try:
            rule = rules.parse(line)
        except InvalidRequestError:
            continue
        assert rules.parse(str(rule)) == rule
    for parse in (Rewrite.parse, Binding.from_json, Network.from_json):
        try:
            parse(text)
        except InvalidRequestError as error:
            assert error.hint


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | lines(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["profile", "rules", "rewrite", "credentials", "secret", "host", "as", "port", "path", "x"]),
        inner, max_size=5),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=300)
@given(JSON)
def test_no_json_does_more_than_be_refused(value: Any) -> None:
    for parse in (Network.from_json, Binding.from_json):
        try:
            found = parse(value)
        except InvalidRequestError:
            continue
        again = json.loads(json.dumps(found.to_json()))
        assert parse(again) == found


def test_a_network_in_its_forms() -> None:
    assert (
        Network.from_json(None)
        == Network()
        == Network.from_json("none")
        == Network.from_json({})
        == Network.from_json([])
    )
    assert Network.from_json("public").profile == "public"
    network = Network.from_json(["allow example.com", "deny *"])
    assert network.profile == "none" and [str(rule) for rule in network.rules] == [
        "allow example.com",
        "deny *",
    ]
    whole = {
        "profile": "packages",
        "rules": ["allow api.example.com"],
        "rewrite": ["prod.example.com -> staging.example.com:8443"],
        "credentials": ["TOKEN=bearer@api.example.com"],
    }
    network = Network.from_json(whole)
    assert Network.from_json(json.loads(json.dumps(network.to_json()))) == network
    assert network == Network.from_words(
        ["packages", "allow api.example.com"],
        ["prod.example.com -> staging.example.com:8443"],
        ["TOKEN=bearer@api.example.com"],
    )


@pytest.mark.parametrize(
    "value, words",
    [
        ("pubic", "'pubic' is no profile.*none, packages, public"),
        ("Public ", "is no profile.*expected public"),
        ("api.example.com", "is no profile.*'allow api.example.com'"),
        (["public", "allow example.com"], "rule 1: 'public' is a profile.*network=\"public\""),
        ({"credentials": ["X=bearer@https://example.com"]}, "a scheme is not written here"),
        ("allow example.com", r"goes into a list: network=\[…\]"),
        ({"profiles": "none"}, "unknown key 'profiles'"),
        ({"profile": ["none"]}, "is no profile"),
        ({"rules": "allow x"}, "rules is no list"),
        ({"rules": ["allow a.example", 3]}, "rule 2: 3 is no text"),
        ({"rules": ["allow a.example", "allow b c"]}, "rule 2 .*column 9"),
        ({"rewrite": ["a -> b", "a -> c"]}, "a is rewritten twice"),
        ({"rules": ["allow x"] * 501}, "at most 500"),
        ({"rules": ["allow " + "x" * 60] * 500 + [""] * 0, "credentials": ["x" * 60_000]}, "bytes of JSON"),
        (7, "type int"),
        (b"none", "type bytes"),
    ],
)
def test_a_network_that_is_none(value: object, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        Network.from_json(value)


def test_words_of_the_command_line() -> None:
    with pytest.raises(InvalidRequestError, match="public and none together"):
        Network.from_words(["public", "none"])
    with pytest.raises(InvalidRequestError, match="'pubic' is no profile"):
        Network.from_words(["pubic"])
    assert Network.from_words([]).profile == "none"


@pytest.mark.parametrize(
    "text, canonical",
    [
        ("api.example.com -> staging.example.com", None),
        ("API.example.com->10.0.0.9:8443", "api.example.com -> 10.0.0.9:8443"),
        ("a.example -> [2001:db8::1]:80", None),
        ("a.example -> 2001:db8::1", "a.example -> [2001:db8::1]"),
    ],
)
def test_rewrites(text: str, canonical: str | None) -> None:
    rewrite = Rewrite.parse(text)
    assert str(rewrite) == (canonical or text) and Rewrite.parse(str(rewrite)) == rewrite


@pytest.mark.parametrize(
    "text", ["a", "a ->", "-> b", "a -> *.b", "a -> b/c", "a -> b:1-2", "*.a -> b", "1.2.3.4 -> b", 5]
)  # fmt: skip
def test_rewrites_that_are_none(text: object) -> None:
    with pytest.raises(InvalidRequestError):
        Rewrite.parse(text)


SHORT = {
    "T=bearer@api.example.com": {"as": "bearer", "host": "api.example.com", "port": 443, "path": None},
    "T=bearer@api.example.com/repos/*": {"path": "/repos/*"},
    "T=bearer@api.example.com:8443/@scope/*": {"port": 8443, "path": "/@scope/*"},
    "T=bearer@*.example.com": {"host": "*.example.com"},
    "T=basic:x-access-token@git.example.com": {"as": "basic", "username": "x-access-token"},
    "T=basic:me@corp.example@git.example.com/a": {"username": "me@corp.example", "path": "/a"},
    "T=header:X-Key@h.example": {"as": "header", "header": "X-Key"},
    "T=query:key@h.example": {"as": "query", "parameter": "key"},
    "T=placeholder:PUT-IT-HERE@h.example": {"as": "placeholder", "placeholder": "PUT-IT-HERE"},
    "T=sigv4@h.example": {"as": "sigv4"},
    "T=sigv4:s3/eu-west-1@s3.example/b/*": {"service": "s3", "region": "eu-west-1", "path": "/b/*"},
    "T=bearer@[2001:db8::1]:8443": {"host": "[2001:db8::1]", "port": 8443},
}


@pytest.mark.parametrize("text", SHORT)
def test_credentials_in_short(text: str) -> None:
    binding = Binding.from_json(text)
    told = binding.to_json()
    assert {key: told[key] for key in SHORT[text]} == SHORT[text] and told["secret"] == "T"
    assert Binding.from_json(told) == binding


@pytest.mark.parametrize(
    "value, words",
    [
        ("T", "cannot be read"),
        ("=bearer@h.example", "no secret's name"),
        ("T=wave@h.example", "cannot be read"),
        ("T=bearer:x@h.example", "takes nothing"),
        ("T=basic@h.example", "needs something"),
        ("T=bearer@*", "would go to anyone"),
        ("T=bearer@*.com", "would go to anyone"),
        ("T=bearer@10.0.0.0/8", "whole network"),
        ("T=header:Host@h.example", "cannot carry"),
        ("T=header:a b@h.example", "cannot carry"),
        ("T=placeholder:short@h.example", "8 to 256"),
        ("index:h=bearer@h.example", "no secret's name"),
        ({"secret": "T", "host": "h.example"}, "expected one of bearer"),
        ({"secret": "T", "host": "h.example", "as": "bearer", "value": "s3cret"}, "'value' is no part"),
        ({"secret": "T", "host": "h.example:1", "as": "bearer"}, "keys of their own"),
        ({"secret": "T", "host": "h.example", "as": "basic"}, "needs `username`"),
        ({"secret": "T", "host": "h.example", "as": "basic", "username": "a:b"}, "no colon"),
        ({"secret": "T", "host": "h.example", "as": "bearer", "port": True}, "port=True"),
        ({"secret": "T", "host": "h.example", "as": "bearer", "methods": []}, "methods"),
        ({"secret": "T", "host": "h.example", "as": "bearer", "scheme": "ftp"}, "scheme"),
        ({"secret": "T", "host": "h.example", "as": "bearer", "path": "x"}, "path"),
        ({"secret": "T", "host": "h.example", "as": "header", "header": "X\r\nY: z"}, "printable"),
    ],
)
def test_credentials_that_are_none(value: object, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        Binding.from_json(value)


def test_a_value_in_a_names_place_is_not_repeated() -> None:
    with pytest.raises(InvalidRequestError) as raised:
        Binding.from_json("ghp_notaname/with+signs")
    assert "ghp_" not in str(raised.value) + str(raised.value.details)


def test_every_form_has_a_test() -> None:
    assert {text.partition("=")[2].partition("@")[0].partition(":")[0] for text in SHORT} == set(FORMS)


def test_wide_rules_are_warned_about() -> None:
    network = Network.from_json(
        ["allow *", "allow *.com", "allow *.example.com", "deny *", "allow example.com"]
    )
    assert len(network.warnings()) == 3


@pytest.mark.parametrize(
    "target, credential, elsewhere",
    [
        ("b.example", "X=bearer@a.example", "b.example:443"),
        ("10.0.0.9:8443", "X=bearer@a.example", "a.example:8443"),
        ("10.0.0.9:8443", "X=bearer@a.example:8443", None),
        ("10.0.0.9", "X=bearer@a.example", None),
        ("10.0.0.9:80", "X=bearer@b.example", None),
        (
            "10.0.0.9:8080",
            {"secret": "X", "host": "a.example", "as": "bearer", "scheme": "http"},
            "10.0.0.9:8080",
        ),
    ],
)
def test_a_credential_that_a_rewrite_leads_away_from_is_warned_about(
    target: str, credential: object, elsewhere: str | None
) -> None:
    network = Network.from_json({"rewrite": [f"a.example -> {target}"], "credentials": [credential]})
    found = [line for line in network.warnings() if "leads its requests away" in line]
    assert len(found) == (elsewhere is not None) and all(f"bind it to {elsewhere} " in line for line in found)
