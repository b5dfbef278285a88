"""Who may reach a port, and what of a request is meant for us alone and no guest's business. Pure.

A request is let in by an API key of the sandbox's project, because the sandbox is public, by its traffic token, by a
signed URL, or by the cookie that a signed URL became. All but the first two are HMACs of what they are good for, under
the node's key (`engine.traffic`): nothing is stored of them, and a new generation ends them all.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import unquote_to_bytes, urlsplit

from llm4agents import limits
from llm4agents.api.proxy.address import BY_HEADERS, Target, header, values
from llm4agents.engine.principal import NOBODY, Principal
from llm4agents.engine.traffic import Traffic
from llm4agents.errors import AuthenticationError, ForbiddenError, LLM4AgentsError, SandboxNotFoundError

Fields = list[tuple[bytes, bytes]]
By = Literal["key", "public", "token", "url", "cookie"]

EXPIRES, SIGNATURE = b"l4a-expires", b"l4a-signature"
TOKENS: Final = (b"x-traffic-token", b"e2b-traffic-access-token")
COOKIE, SECURE_COOKIE = b"l4a-access", b"__Host-l4a-access"
"""The second where there is TLS: browsers let no other host, not even a sibling's page, put one of that name."""
TOKEN_FORM: Final = "l4at_"  # noqa: S105 (how they all begin)
KEY_FORM: Final = b"l4a_"
_COOKIES: Final = frozenset({COOKIE, SECURE_COOKIE})
_OURS: Final = frozenset({*TOKENS, *(name for pair in BY_HEADERS for name in pair)})
_BEARER_KEY = re.compile(rb"bearer\s+" + KEY_FORM, re.IGNORECASE)
_DIGITS = re.compile(rb"[0-9]{1,12}")
_REFUSED: Final = "there is no such sandbox, or it is not open to you"
_HINT: Final = "send its X-Traffic-Token or an API key of its project, or ask its owner for a signed URL"


@dataclass(frozen=True, slots=True)
class Stamp:
    """Until when (unix seconds), and what says so."""

    expires: int
    signature: bytes

    @classmethod
    def read(cls, expires: bytes, signature: bytes) -> Stamp | None:
        return cls(int(expires), signature) if _DIGITS.fullmatch(expires) else None


class Signer:
    """What opens ports, made and checked under one key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def _mac(self, *words: object) -> str:
        said = "\0".join(str(word) for word in ("llm4agents ports 1", *words)).encode()
        found = hmac.digest(self._key, said, hashlib.sha256)
        return base64.urlsafe_b64encode(found).rstrip(b"=").decode()

    def token(self, sandbox: str, generation: int) -> str:
        """Good for every port of the sandbox until its generation changes."""
        return TOKEN_FORM + self._mac("token", sandbox, generation)

    def stamp(
        self, use: Literal["url", "cookie"], sandbox: str, port: int, expires: int, generation: int
    ) -> str:
        """Good for one port of the sandbox until `expires`, or until its generation changes."""
        return self._mac(use, sandbox, port, expires, generation)


@dataclass(frozen=True, slots=True)
class Offered:
    """What a request has with it, good or not."""

    tokens: tuple[bytes, ...] = ()
    signed: Stamp | None = None
    cookies: tuple[Stamp, ...] = ()


@dataclass(frozen=True, slots=True)
class Admitted:
    """`by` what, and until when, if there is an end to it."""

    by: By
    expires: int | None = None


@dataclass(frozen=True, slots=True)
class Owned:
    """A sandbox there is: whose, and who may reach its ports."""

    project: str
    traffic: Traffic


def offered(scope: Mapping[str, Any], target: Target) -> Offered:
    """What a request offers. A cookie counts for the host that has one, and only when a page of that host, or a person
    who follows a link, sends it: sandboxes' hosts are one site to browsers, which send it for each other's pages."""
    tokens = [value.strip() for name in TOKENS for value in values(scope, name)]
    query = dict(_pairs(scope["query_string"]))
    signed = Stamp.read(query.get(EXPIRES, b""), query.get(SIGNATURE, b""))
    cookies: list[Stamp] = []
    if target.form == "host" and _is_own_page(scope):
        for name, value in _cookies(values(scope, b"cookie")):
            expires, _, signature = value.partition(b".")
            if name in _COOKIES and (stamp := Stamp.read(expires, signature)) is not None:
                cookies.append(stamp)
    most = limits.PORT_PROOFS_MAX
    return Offered(tuple(tokens[:most]), signed, tuple(cookies[:most]))


def judge(
    target: Target, found: Owned | None, who: Principal, offers: Offered, signer: Signer, now: float
) -> Admitted:
    """How a request gets in. Raises ForbiddenError (AuthenticationError by path) for who has no right, and
    SandboxNotFoundError for who has a good key and no right; neither tells whether there is such a sandbox."""
    if found is not None and who.may("sandboxes") and who.sees(found.project):
        return Admitted("key")
    # For a sandbox that is none the same is computed: the answer takes as long.
    traffic = Traffic() if found is None else found.traffic
    if traffic.public:
        return Admitted("public")
    token = signer.token(target.sandbox, traffic.generation).encode()
    right = [hmac.compare_digest(token, one) for one in offers.tokens]
    signed = _good("url", offers.signed, target, traffic, signer)
    cookies = [stamp for stamp in offers.cookies if _good("cookie", stamp, target, traffic, signer)]
    if found is not None:
        if any(right):
            return Admitted("token")
        if signed and offers.signed is not None and offers.signed.expires > now:
            return Admitted("url", offers.signed.expires)
        if good := [stamp.expires for stamp in cookies if stamp.expires > now]:
            return Admitted("cookie", max(good))
        if signed or cookies:  # whoever has one knows of the sandbox
            raise ForbiddenError("this link has expired", hint="ask whoever gave it to you for a new one")
        if who.sees(found.project):
            raise ForbiddenError("this needs a key with the scope sandboxes", needs=["sandboxes"])
    raise _refusal(target, who)


def _good(
    use: Literal["url", "cookie"], stamp: Stamp | None, target: Target, traffic: Traffic, signer: Signer
) -> bool:
    if stamp is None:
        return False
    right = signer.stamp(use, target.sandbox, target.port, stamp.expires, traffic.generation)
    return hmac.compare_digest(right.encode(), stamp.signature)


def _refusal(target: Target, who: Principal) -> LLM4AgentsError:
    if who.actor != NOBODY:
        return SandboxNotFoundError(f"there is no sandbox {target.sandbox}", hint="llm4agents ls shows them")
    if target.form == "path":
        return AuthenticationError(_REFUSED, hint=_HINT)
    return ForbiddenError(_REFUSED, hint=_HINT)


# -- what is ours ------------------------------------------------------------------------------------------


def is_key(name: bytes, value: bytes) -> bool:
    """Whether a header carries an API key of this server's, good or not."""
    if name == b"authorization":
        return _BEARER_KEY.match(value.strip()) is not None
    return name == b"x-api-key" and value.strip().startswith(KEY_FORM)


def for_the_guest(fields: Fields) -> Fields:
    """A request's headers without what is ours. Cookies are joined: HTTP/2 may send each in a header of its own."""
    sent: Fields = []
    cookies: list[bytes] = []
    for name, value in fields:
        if name == b"cookie":
            kept = (pair for pair in value.split(b";") if _cookie_name(pair) not in _COOKIES)
            cookies += [pair.strip() for pair in kept if pair.strip()]
        elif name == b"referer":
            sent.append((name, _url_without_ours(value)))
        elif name not in _OURS and not is_key(name, value):
            sent.append((name, value))
    if cookies:
        sent.append((b"cookie", b"; ".join(cookies)))
    return sent


def query_for_the_guest(query: bytes) -> bytes:
    """A query without what is ours; the rest byte for byte."""
    if b"4a" not in query and b"%" not in query:
        return query
    kept = [pair for pair in query.split(b"&") if not _is_ours(pair)]
    return b"&".join(kept)


def _url_without_ours(url: bytes) -> bytes:
    start, mark, rest = url.partition(b"?")
    if not mark:
        return url
    query, sharp, fragment = rest.partition(b"#")
    kept = query_for_the_guest(query)
    return start + (b"?" + kept if kept else b"") + sharp + fragment


def _is_ours(pair: bytes) -> bool:
    return unquote_to_bytes(pair.partition(b"=")[0]) in (EXPIRES, SIGNATURE)


def _pairs(query: bytes) -> list[tuple[bytes, bytes]]:
    parts = [pair.partition(b"=") for pair in query.split(b"&") if _is_ours(pair)]
    return [(unquote_to_bytes(name), unquote_to_bytes(value)) for name, _, value in parts]


def _cookies(fields: list[bytes]) -> list[tuple[bytes, bytes]]:
    pairs = [pair for field in fields for pair in field.split(b";")]
    return [(_cookie_name(pair), pair.partition(b"=")[2].strip()) for pair in pairs]


def _cookie_name(pair: bytes) -> bytes:
    return pair.partition(b"=")[0].strip()


def is_our_cookie(set_cookie: bytes) -> bool:
    """Whether a guest's Set-Cookie is of a name that is ours, or comes back as one (`=NAME=x`, which has no name)."""
    return _cookie_name(set_cookie.partition(b";")[0].lstrip(b"= \t")) in _COOKIES


def _is_own_page(scope: Mapping[str, Any]) -> bool:
    site = header(scope, b"sec-fetch-site")
    if site:
        return site in (b"same-origin", b"none") or is_followed(scope)
    origin = header(scope, b"origin")
    if not origin:
        return True
    try:
        return urlsplit(origin.decode("latin-1")).netloc.lower() == header(scope, b"host").decode().lower()
    except ValueError:
        return False


def is_followed(scope: Mapping[str, Any]) -> bool:
    """Whether a person opens this in a window of its own, by a link or the address bar."""
    if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
        return False
    mode, where = header(scope, b"sec-fetch-mode"), header(scope, b"sec-fetch-dest")
    if mode:
        return mode == b"navigate" and where in (b"document", b"")
    return b"text/html" in header(scope, b"accept").lower()


def cookie_for(
    target: Target, expires: int, traffic: Traffic, signer: Signer, *, tls: bool, now: float
) -> str:
    """The Set-Cookie that a signed URL becomes: of this host alone, out of reach of its pages' scripts."""
    name = (SECURE_COOKIE if tls else COOKIE).decode()
    stamp = signer.stamp("cookie", target.sandbox, target.port, expires, traffic.generation)
    left = max(1, int(expires - now))
    secure = "; Secure" if tls else ""
    return f"{name}={expires}.{stamp}; Path=/; Max-Age={left}; HttpOnly; SameSite=Lax{secure}"
