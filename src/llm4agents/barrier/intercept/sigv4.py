"""AWS Signature Version 4 of a request, in its Authorization header. Pure; no clock of its own.

Made for signing anew what a guest signed with a key that means nothing: its headers are kept, its signature goes.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote, unquote_to_bytes

Fields = list[tuple[bytes, bytes]]

UNSIGNED = "UNSIGNED-PAYLOAD"
UNSIGNED_TRAILER = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
_S3 = {"s3", "s3-object-lambda", "s3-outposts", "s3express"}
_NEVER = {"authorization", "connection", "expect", "user-agent", "x-amzn-trace-id", "transfer-encoding",
          "content-length",
          "accept-encoding", "accept", "keep-alive", "te"}  # fmt: skip
_SCOPE = re.compile(
    r"AWS4-HMAC-SHA256\s+Credential=[^/,\s]+/\d{8}/([^/,\s]+)/([^/,\s]+)/aws4_request\s*,\s*SignedHeaders=([^,\s]+)"
)
_QUERY = ("X-Amz-Algorithm", "X-Amz-Credential", "X-Amz-Date", "X-Amz-Expires", "X-Amz-SignedHeaders",
          "X-Amz-Signature",
          "X-Amz-Security-Token")  # fmt: skip


class CannotSign(ValueError):
    """Its words say what the guest should do."""


@dataclass(frozen=True, slots=True)
class Keys:
    access_key_id: str
    secret_access_key: str
    session_token: str | None = None

    def __repr__(self) -> str:
        return "Keys(***)"


@dataclass(frozen=True, slots=True)
class Scope:
    """What the guest's own signature says of itself."""

    region: str
    service: str
    signed: frozenset[str]


def scope_of(fields: Fields, query: bytes) -> Scope | None:
    """From the Authorization header, or from a presigned address. None: it is not signed (in a way we know)."""
    for name, value in fields:
        if name.lower() == b"authorization":
            match = _SCOPE.match(value.decode("latin-1"))
            if match:
                return Scope(match[1], match[2], frozenset(match[3].lower().split(";")))
    found = dict(_pairs(query))
    credential = unquote_to_bytes(found.get("X-Amz-Credential", "")).decode("latin-1").split("/")
    if found.get("X-Amz-Algorithm") == "AWS4-HMAC-SHA256" and len(credential) == 5:
        signed = unquote_to_bytes(found.get("X-Amz-SignedHeaders", "host")).decode("latin-1")
        return Scope(credential[2], credential[3], frozenset(signed.lower().split(";")))
    return None


def payload_hash(fields: Fields, *, service: str) -> str | None:
    """What the signature says about the body, when that is known without it: the client's own word (a wrong one is
    refused by the service), or nothing for S3. None: the body must be hashed.

    Raises CannotSign for bodies signed in pieces.
    """
    said = next((v.decode("latin-1") for n, v in fields if n.lower() == b"x-amz-content-sha256"), None)
    if said is None:
        return UNSIGNED if service in _S3 else None
    if said in (UNSIGNED, UNSIGNED_TRAILER) or re.fullmatch(r"[0-9a-f]{64}", said):
        return said
    raise CannotSign(
        f"a body signed piece by piece ({said[:60]}) cannot be signed anew: have the client send it unsigned "
        "(payload signing off) or whole"
    )


def sign(
    keys: Keys,
    *,
    method: str,
    path: str,
    query: str,
    fields: Fields,
    payload: str,
    region: str,
    service: str,
    signed: frozenset[str],
    now: datetime,
) -> tuple[str, Fields]:
    """The query and headers of the request, signed: `Authorization`, `X-Amz-Date`, the token when there is one.

    `path` and `query` as they are sent; `payload` from `payload_hash` or the body's SHA-256; `signed`: headers that
    are to be covered when they are there, besides Host, Content-Type and x-amz-*.
    """
    stamp = now.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
    gone = {b"authorization", b"x-amz-date", b"x-amz-security-token"}
    fields = [(name, value) for name, value in fields if name.lower() not in gone]
    query = "&".join(f"{k}={v}" if v is not None else k for k, v in _raw_pairs(query) if k not in _QUERY)
    fields.append((b"X-Amz-Date", stamp.encode()))
    if keys.session_token:
        fields.append((b"X-Amz-Security-Token", keys.session_token.encode()))
    has_hash = any(name.lower() == b"x-amz-content-sha256" for name, _ in fields)
    if service in _S3 and not has_hash:
        fields.append((b"X-Amz-Content-SHA256", payload.encode()))
    headers = _covered(fields, signed)
    names = ";".join(headers)
    canonical = "\n".join(
        [
            method,
            _path(path, service),
            _query(query),
            *(f"{name}:{value}" for name, value in headers.items()),
            "",
            names,
            payload,
        ]
    )
    scope = f"{stamp[:8]}/{region}/{service}/aws4_request"
    text = "\n".join(
        ["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(canonical.encode("latin-1")).hexdigest()]
    )
    key = f"AWS4{keys.secret_access_key}".encode()
    for part in (stamp[:8], region, service, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    said = f"Credential={keys.access_key_id}/{scope}, SignedHeaders={names}, Signature={signature}"
    authorization = f"AWS4-HMAC-SHA256 {said}"
    return query, [*fields, (b"Authorization", authorization.encode("latin-1"))]


def _covered(fields: Fields, signed: frozenset[str]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for raw, value in fields:
        name = raw.decode("latin-1").lower()
        if name in _NEVER:
            continue
        if name in ("host", "content-type", "content-md5") or name.startswith("x-amz-") or name in signed:
            found.setdefault(name, []).append(" ".join(value.decode("latin-1").split()))
    return {name: ",".join(found[name]) for name in sorted(found)}


def _path(path: str, service: str) -> str:
    if service in _S3:
        return path or "/"
    out: list[str] = []
    for part in path.split("/"):
        if part == "..":
            if out:
                out.pop()
        elif part not in ("", "."):
            out.append(part)
    plain = "/" + "/".join(out) + ("/" if out and path.endswith("/") else "")
    return quote(plain, safe="/~")


def _query(query: str) -> str:
    pairs = [
        (quote(unquote_to_bytes(key), safe="-_.~"), quote(unquote_to_bytes(value or ""), safe="-_.~"))
        for key, value in _raw_pairs(query)
    ]
    return "&".join(f"{key}={value}" for key, value in sorted(pairs))


def _raw_pairs(query: str) -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = []
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        found.append((key, value if equals else None))
    return found


def _pairs(query: bytes) -> list[tuple[str, str]]:
    return [(key, value or "") for key, value in _raw_pairs(query.decode("latin-1"))]
