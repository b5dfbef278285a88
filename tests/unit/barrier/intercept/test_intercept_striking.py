"""Secrets are struck out in every form, however the stream is cut."""

from __future__ import annotations

import base64
import json
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm4agents.barrier.intercept.striking import Patterns, Striker, forms

SECRET = 'p4ss/word+"ü=%&x'


@pytest.mark.parametrize(
    "written",
    [
        SECRET.encode(),
        quote(SECRET, safe="").encode(),
        quote(SECRET).encode(),
        quote_plus(SECRET).encode(),
        quote(SECRET, safe="").lower().encode() if SECRET.islower() else quote(SECRET, safe="").encode(),
        json.dumps(SECRET)[1:-1].encode(),
        json.dumps(SECRET, ensure_ascii=False)[1:-1].replace("/", "\\/").encode(),
        base64.b64encode(SECRET.encode()),
        base64.urlsafe_b64encode(SECRET.encode()),
        base64.b64encode(SECRET.encode()).rstrip(b"="),
        base64.b64encode(b"git:" + SECRET.encode()),
    ],
)
def test_every_form_is_struck(written: bytes) -> None:
    patterns = Patterns(forms(SECRET, ["git"]))
    found = patterns.strike(b"before " + written + b" after")
    assert found == b"before " + b"*" * len(written) + b" after"


ODD = "a+b/c==d&e'f\"g<h>i`j!k"


@pytest.mark.parametrize(
    "written",
    [
        r"a+b/c\u003d\u003dd\u0026e\u0027f\"g\u003ch\u003ei`j!k",  # Gson
        r"a\u002Bb/c==d\u0026e\u0027f\u0022g\u003Ch\u003Ei\u0060j!k",  # .NET
        r"a+b/c==d\u0026e'f\"g\u003ch\u003ei`j!k",  # Go, Ruby
        r"a+b\/c==d\u0026e\u0027f\u0022g\u003Ch\u003Ei`j!k".replace("\\/", "/"),  # PHP
        "a+b/c==d&amp;e&#39;f&#34;g&lt;h&gt;i`j!k",
        "a&#43;b/c==d&amp;e&#39;f&#34;g&lt;h&gt;i`j!k",  # Go's templates
        "a+b/c&#x3D;&#x3D;d&amp;e&#x27;f&quot;g&lt;h&gt;i&#x60;j!k",  # Handlebars
        "a+b/c==d&amp;e&#039;f&quot;g&lt;h&gt;i`j!k",  # PHP
        "a%2Bb%2Fc%3D%3Dd%26e'f%22g%3Ch%3Ei%60j!k",  # JavaScript
    ],
)
def test_as_other_languages_write_it(written: str) -> None:
    assert Patterns(forms(ODD)).strike(written.encode()) == b"*" * len(written)


def test_a_secret_of_letters_and_digits_has_few_forms() -> None:
    assert len(forms("ghp_abcdefghijklmnopqrstuvwxyz0123")) < 10  # each costs every answer


@pytest.mark.parametrize("before", range(5))
@pytest.mark.parametrize("after", range(4))
def test_as_a_part_of_longer_base64(before: int, after: int) -> None:
    text = base64.b64encode(b"x" * before + SECRET.encode() + b"y" * after)
    found = Patterns(forms(SECRET)).strike(text)
    assert len(found) == len(text)
    # At most what the neighbours' bits decide is left at either end.
    assert found.count(b"*") >= len(base64.b64encode(SECRET.encode()).rstrip(b"=")) - 3


def _cuts(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts})
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


@given(
    st.lists(st.sampled_from([b"abcabd", b"abdab", b"cab", b"a", b"b", b"c", b"d", b"zz"]), max_size=30),
    st.lists(st.integers(0, 10_000), max_size=20),
)
def test_any_split_strikes_the_same(parts: list[bytes], cuts: list[int]) -> None:
    data = b"".join(parts)
    patterns = Patterns([b"abcabd", b"abdab", b"cabdabcabdab"])
    striker = Striker(patterns)
    found = b"".join(striker.feed(piece) for piece in _cuts(data, cuts)) + striker.end()
    assert found == patterns.strike(data)


@given(st.binary(max_size=200), st.binary(max_size=200), st.lists(st.integers(0, 10_000), max_size=10))
def test_a_secret_never_survives(before: bytes, after: bytes, cuts: list[int]) -> None:
    data = before + SECRET.encode() + after + base64.b64encode(SECRET.encode()) + before
    striker = Striker(Patterns(forms(SECRET)))
    found = b"".join(striker.feed(piece) for piece in _cuts(data, cuts)) + striker.end()
    assert len(found) == len(data) and not any(form in found for form in forms(SECRET) if b"*" not in form)


def test_what_cannot_be_a_secret_is_not_held_back() -> None:
    striker = Striker(Patterns(forms(SECRET)))
    assert striker.feed(b"data: event\n\n") == b"data: event\n\n"
    assert striker.feed(b"data: " + SECRET[:4].encode()) == b"data: "


def test_a_long_secret_costs_no_more_than_its_length() -> None:
    key = "-----BEGIN KEY-----\n" + "A1b2" * 2_000 + "\n-----END KEY-----\n"
    striker = Striker(Patterns(forms(key)))
    out = b""
    for at in range(0, len(key), 1_000):
        out += striker.feed(key[at : at + 1_000].encode())
    out += striker.end()
    assert out == b"*" * len(key)


def test_short_encoded_forms_are_left_alone() -> None:
    assert forms("ab") == {b"ab"} | {form for form in forms("ab") if len(form) >= 6}
    assert forms("") == set()
