"""The AWS verifier of the tests' own: AWS's published example passes, and what is changed in it does not."""

from __future__ import annotations

import pytest

from tests.barrier.services import verify

# "Examples: Signature Calculations in AWS Signature Version 4", GET Object, with its published keys and signature.
KEY = ("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
SIGNATURE = "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
HEADERS = [
    ("host", "examplebucket.s3.amazonaws.com"),
    ("range", "bytes=0-9"),
    ("x-amz-content-sha256", EMPTY),
    ("x-amz-date", "20130524T000000Z"),
]


def asked(headers: list[tuple[str, str]], target: str = "/test.txt", body: bytes = b"", **change: str) -> str:
    authorization = (
        f"AWS4-HMAC-SHA256 Credential={change.get('key', KEY[0])}/20130524/us-east-1/s3/aws4_request,"
        f"SignedHeaders=host;range;x-amz-content-sha256;x-amz-date,Signature={SIGNATURE}"
    )
    keys = {KEY[0]: (change.get("secret", KEY[1]), change.get("token"))}
    return verify("GET", target, [*headers, ("authorization", authorization)], body, keys.get)


def test_the_published_example_is_taken() -> None:
    assert asked(HEADERS) == ""


@pytest.mark.parametrize(
    ("headers", "more", "words"),
    [
        (HEADERS, {"secret": "another"}, "the signature is another"),
        (HEADERS, {"key": "AKIAOTHER"}, "no such key"),
        (HEADERS, {"target": "/other.txt"}, "the signature is another"),
        (HEADERS, {"target": "/test.txt?acl"}, "the signature is another"),
        (HEADERS, {"body": b"x"}, "not that of the body"),
        (HEADERS, {"token": "needed"}, "another session token"),
        ([*HEADERS[:1], ("range", "bytes=0-99"), *HEADERS[2:]], {}, "the signature is another"),
        ([*HEADERS, ("x-amz-acl", "public-read")], {}, "not signed: x-amz-acl"),
    ],
)
def test_what_is_changed_is_not(headers: list[tuple[str, str]], more: dict[str, str], words: str) -> None:
    assert words in asked(headers, **more)  # type: ignore[arg-type]
