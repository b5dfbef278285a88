"""Credentials go where they are bound to and nowhere else, in every form."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm4agents.barrier.intercept.credentials import Outgoing, Values, Withheld, put_in, waits_for_body
from llm4agents.barrier.intercept.placeholders import Placeholder, Unfit

SECRET = 'v4lue /+&="x'


@dataclass(frozen=True)
class Bound:
    form: str
    secret: str = "name"
    header: str | None = None
    prefix: str | None = None
    username: str | None = None
    parameter: str | None = None
    placeholder: str | None = None
    region: str | None = None
    service: str | None = None


def now() -> datetime:
    return datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def sent(bound: Bound, request: Outgoing, value: Any = SECRET) -> Outgoing:
    put_in([bound], Values({"name": value}), request, now=now)
    return request


def fields_of(request: Outgoing, name: str) -> list[bytes]:
    return [value for key, value in request.fields if key.lower() == name.encode()]


def test_header_forms_are_put_over_what_was_there() -> None:
    there = [(b"authorization", b"a"), (b"Authorization", b"b"), (b"X-Key", b"c")]
    assert fields_of(sent(Bound("bearer"), Outgoing("GET", b"/", list(there))), "authorization") == [
        b"Bearer " + SECRET.encode()
    ]
    basic = sent(Bound("basic", username="git"), Outgoing("GET", b"/", list(there)))
    assert fields_of(basic, "authorization") == [b"Basic " + base64.b64encode(f"git:{SECRET}".encode())]
    own = sent(Bound("header", header="x-key", prefix="token "), Outgoing("GET", b"/", list(there)))
    assert (
        fields_of(own, "x-key") == [b"token " + SECRET.encode()] and len(fields_of(own, "authorization")) == 2
    )


def test_a_parameter_takes_the_place_of_the_guests_own() -> None:
    request = sent(Bound("query", parameter="key"), Outgoing("GET", b"/p?a=1&key=x&%6bey=y&b=2", []))
    assert request.target == b"/p?a=1&b=2&key=v4lue%20%2F%2B%26%3D%22x"
    assert sent(Bound("query", parameter="key"), Outgoing("GET", b"/p", [])).target.startswith(
        b"/p?key=v4lue"
    )


def test_a_value_that_would_end_a_line_is_refused() -> None:
    for bound in (Bound("bearer"), Bound("header", header="X-Key")):
        with pytest.raises(Withheld) as error:
            sent(bound, Outgoing("GET", b"/", []), "line\r\nX-Injected: 1")
        assert "X-Injected" not in str(error.value)


def test_a_secret_that_is_not_there_is_said() -> None:
    with pytest.raises(Withheld, match="the secret name has no value"):
        put_in([Bound("bearer")], Values({}), Outgoing("GET", b"/", []), now=now)


def test_placeholders() -> None:
    bound = Bound("placeholder", placeholder="MY_KEY.1")
    target = b"/a/MY_KEY.1/b?k=%4dY%5fKEY%2E1&z=MY_KEY.2"
    request = sent(
        bound, Outgoing("POST", target, [(b"Host", b"MY_KEY.1"), (b"X", b"a MY_KEY.1 b")], None), "s/x y"
    )
    assert request.target == b"/a/s%2Fx%20y/b?k=s%2Fx%20y&z=MY_KEY.2"
    assert request.fields == [(b"Host", b"MY_KEY.1"), (b"X", b"a s/x y b")]
    basic = base64.b64encode(b"user:MY_KEY.1")
    request = sent(bound, Outgoing("GET", b"/", [(b"Authorization", b"Basic " + basic)]), "s")
    assert request.fields == [(b"Authorization", b"Basic " + base64.b64encode(b"user:s"))]


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        (b"application/json; charset=utf-8", b'{"a": "MY_KEY.1"}', json.dumps({"a": SECRET}).encode()),
        (b"application/x-www-form-urlencoded", b"a=MY%5FKEY.1", b"a=v4lue+%2F%2B%26%3D%22x"),
        (b"text/plain", b"x MY_KEY.1 y", b"x " + SECRET.encode() + b" y"),
    ],
)
def test_placeholders_in_bodies(kind: bytes, body: bytes, expected: bytes) -> None:
    bound = Bound("placeholder", placeholder="MY_KEY.1")
    fields = [(b"Content-Type", kind), (b"Content-Length", str(len(body)).encode())]
    assert waits_for_body([bound], fields, len(body)) and not waits_for_body([bound], fields, None)
    request = sent(bound, Outgoing("POST", b"/", fields, body))
    assert request.body == expected and fields_of(request, "content-length") == [str(len(expected)).encode()]


def test_a_request_without_the_placeholder_carries_nothing() -> None:
    carried = put_in(
        [Bound("placeholder", placeholder="MY_KEY.1")],
        Values({"name": SECRET}),
        Outgoing("GET", b"/", [(b"X", b"y")], b"z"),
        now=now,
    )
    assert carried.names == [] and not carried.forms


def test_values_show_nothing() -> None:
    values = Values({"name": SECRET, "pair": {"access_key_id": "AKID", "secret_access_key": SECRET}})
    assert SECRET not in repr(values) and SECRET not in repr(values.keys("pair"))
    assert SECRET not in repr(Placeholder("word", SECRET))
    assert SECRET.encode() in values.forms("pair") and b"AKID" not in values.forms("pair")


@given(st.text(alphabet="MYKE_.1%2Ff", max_size=40))
def test_any_header_value(text: str) -> None:
    placeholder = Placeholder("MY_KEY.1", "value")
    try:
        changed, did = placeholder.in_header(b"X", text.encode())
    except Unfit:
        raise AssertionError from None
    assert did == (changed != text.encode())
