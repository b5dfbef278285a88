"""Signatures: AWS's published examples, and what botocore 1.44 makes of the same requests (400 were compared)."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

import pytest

from llm4agents.barrier.intercept import sigv4

# fmt: off
BOTOCORE = [
    ("lambda", "GET", "/a%2Fb", "b=2&a=1&a=0",
     {"Host": "svc.example.com", "Content-Type": "application/json", "X-Own": "a  b"},
     "", "to/ken+x==",
     "content-type;host;x-amz-date;x-amz-security-token;x-own",
     "eafc4d3127f021fbe41d7f23e2af0b49d89b5eff09025c2e2aa99a676edc4523"),
    ("s3", "GET", "/key%20with%20space/%C3%BC", "b=2&a=1&a=0",
     {"Host": "svc.example.com", "Content-Type": "application/json", "X-Own": "a  b"},
     "hello", None,
     "content-type;host;x-amz-content-sha256;x-amz-date;x-own",
     "9e707eeb1bb973c431b31fbdee9e7424f3b52261d97c0bde6a23ea2fa6088e9b"),
    ("dynamodb", "GET", "/key%20with%20space/%C3%BC", "acl",
     {"Host": "svc.example.com", "Content-Type": "application/json", "X-Own": "a  b", "X-Amz-Target": "T.List"},
     "", "to/ken+x==",
     "content-type;host;x-amz-date;x-amz-security-token;x-amz-target;x-own",
     "c2915625e8361d3522138cacdbab7812077ac72ab36aed72074e90b32c4e2334"),
    ("sts", "PUT", "/a%2Fb", "",
     {"Host": "svc.example.com:8443"},
     "hello", "to/ken+x==",
     "host;x-amz-date;x-amz-security-token",
     "c756e6a22d33ea82a830a614b2759549f46ef0ce8406b223995e116c5d6d0b07"),
    ("lambda", "PUT", "/a/./b/../c", "acl",
     {"Host": "svc.example.com:8443"},
     "", None,
     "host;x-amz-date",
     "59743807e5c5a314d8f4b2b75ed385b5b087cd690a7a3817ea2ed238d8ba370f"),
    ("dynamodb", "PUT", "/a/b", "acl",
     {"Host": "svc.example.com:8443", "X-Amz-Target": "T.List"},
     "", None,
     "host;x-amz-date;x-amz-target",
     "042fcf4548b04536a5aa7aef5defd12a1dfe182c94369ec3c0717b55b72128ea"),
    ("lambda", "PUT", "/a/b", "b=2&a=1&a=0",
     {"Host": "svc.example.com:8443"},
     "", None,
     "host;x-amz-date",
     "e3f9aed1231a399d340b7aaa3c2ce70b913d5093af57a210d3f9e30509b64b28"),
    ("lambda", "PUT", "/a/./b/../c", "a=1&b=2",
     {"Host": "svc.example.com:8443"},
     "hello", "to/ken+x==",
     "host;x-amz-date;x-amz-security-token",
     "d9677aebeb49297890604b50f40c149b03d1e1ca5ef06c14ad1126df25177ba2"),
]  # service, method, path, query, headers, body, token, signed headers, signature
# fmt: on


def payload_of(body: str, fields: sigv4.Fields, service: str) -> str:
    return sigv4.payload_hash(fields, service=service) or hashlib.sha256(body.encode()).hexdigest()


@pytest.mark.parametrize("vector", BOTOCORE)
def test_as_botocore_signs(
    vector: tuple[str, str, str, str, dict[str, str], str, str | None, str, str],
) -> None:
    service, method, path, query, headers, body, token, names, signature = vector
    fields = [(name.encode(), value.encode()) for name, value in headers.items()]
    if service == "s3":
        fields.append((b"X-Amz-Content-SHA256", hashlib.sha256(body.encode()).hexdigest().encode()))
    _, signed = sigv4.sign(
        sigv4.Keys("AKID", "se/cret+key", token),
        method=method,
        path=path,
        query=query,
        fields=fields,
        payload=payload_of(body, fields, service),
        region="eu-x-1",
        service=service,
        signed=frozenset(["x-own"]),
        now=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    )
    said = signed[-1][1].decode()
    assert said.endswith(f"SignedHeaders={names}, Signature={signature}")


def published(
    query: str, fields: sigv4.Fields, service: str, when: datetime, keys: sigv4.Keys, path: str, payload: str
) -> str:
    _, signed = sigv4.sign(
        keys,
        method="GET",
        path=path,
        query=query,
        fields=fields,
        payload=payload,
        region="us-east-1",
        service=service,
        signed=frozenset(["range"]),
        now=when,
    )
    return signed[-1][1].decode()[-64:]


EMPTY = hashlib.sha256(b"").hexdigest()


def test_as_published() -> None:
    keys = sigv4.Keys("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY")
    when = datetime(2015, 8, 30, 12, 36, 0, tzinfo=UTC)
    host = [(b"Host", b"example.amazonaws.com")]
    assert (
        published("", host, "service", when, keys, "/", EMPTY)
        == "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"
    )
    assert (
        published("Param2=value2&Param1=value1", host, "service", when, keys, "/", EMPTY)
        == "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500"
    )
    keys = sigv4.Keys("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    fields = [(b"Host", b"examplebucket.s3.amazonaws.com"), (b"Range", b"bytes=0-9"),
              (b"x-amz-content-sha256", EMPTY.encode())]  # fmt: skip
    when = datetime(2013, 5, 24, tzinfo=UTC)
    assert (
        published("", fields, "s3", when, keys, "/test.txt", EMPTY)
        == "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
    )


def test_what_the_guest_signed_with_goes() -> None:
    fields = [
        (b"Host", b"h"),
        (
            b"Authorization",
            b"AWS4-HMAC-SHA256 Credential=X/20260101/r/s/aws4_request, SignedHeaders=host, Signature=y",
        ),
        (b"X-Amz-Security-Token", b"theirs"),
        (b"x-amz-date", b"20200101T000000Z"),
    ]
    scope = sigv4.scope_of(fields, b"")
    assert scope == sigv4.Scope("r", "s", frozenset({"host"}))
    query, signed = sigv4.sign(
        sigv4.Keys("A", "B"), method="GET", path="/", fields=fields, payload=EMPTY, region="r", service="s",
        query="a=1&X-Amz-Signature=x&X-Amz-Credential=c", signed=scope.signed, now=datetime(2026, 1, 1, tzinfo=UTC),
    )  # fmt: skip
    assert query == "a=1" and b"theirs" not in b"".join(value for _, value in signed)
    assert [name.lower() for name, _ in signed].count(b"authorization") == 1


def test_a_presigned_address() -> None:
    query = b"X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=K%2F20260101%2Fr%2Fs3%2Faws4_request"
    query += b"&X-Amz-SignedHeaders=host"
    assert sigv4.scope_of([], query) == sigv4.Scope("r", "s3", frozenset({"host"}))
    assert sigv4.scope_of([], b"a=b") is None


def test_bodies() -> None:
    def said(value: str) -> sigv4.Fields:
        return [(b"X-Amz-Content-SHA256", value.encode())]

    assert (
        sigv4.payload_hash([], service="s3") == sigv4.UNSIGNED
        and sigv4.payload_hash([], service="sts") is None
    )
    assert sigv4.payload_hash(said(EMPTY), service="sts") == EMPTY
    with pytest.raises(sigv4.CannotSign, match="piece by piece"):
        sigv4.payload_hash(said("STREAMING-AWS4-HMAC-SHA256-PAYLOAD"), service="s3")
    assert "secret" not in repr(sigv4.Keys("A", "secret"))
