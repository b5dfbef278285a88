"""Addresses of package indexes as the host's tools have them, cleaned of what a guest must not see. Pure."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import unquote, urlsplit

from llm4agents.barrier import addresses, rules
from llm4agents.errors import InvalidRequestError

Tool = Literal["apt", "pip", "npm", "cargo", "go"]
Kind = Literal["apt", "simple", "links", "npm", "sparse", "git", "go", "sumdb"]
THIS_HOST = "this-host.internal"
"""What a guest calls an index on the host's own loopback: `localhost` means itself there."""
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Login:
    """What the host's own tool would send. `user` is None for a token that goes after `scheme`."""

    user: str | None
    value: str
    scheme: str = "Basic"

    def header(self) -> str:
        if self.user is None:
            return f"{self.scheme} {self.value}".strip()
        return "Basic " + base64.b64encode(f"{self.user}:{self.value}".encode()).decode()

    def __repr__(self) -> str:
        return "Login(…)"


@dataclass(frozen=True, slots=True)
class Place:
    """Scheme, host, port and the directory of a path (it ends in /)."""

    scheme: Literal["http", "https"]
    host: str
    port: int
    path: str = "/"

    @property
    def loopback(self) -> bool:
        address = addresses.parse(self.host)
        return self.host == "localhost" or (
            address is not None and addresses.classify(address) is addresses.Kind.LOOPBACK
        )

    def url(self, host: str | None = None) -> str:
        shown = host or self.host
        shown = f"[{shown}]" if ":" in shown else shown
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{shown}{port}{self.path}"

    def guest_url(self) -> str:
        return self.url(THIS_HOST if self.loopback else None)


def place(url: str) -> tuple[Place, Login | None]:
    """A URL without its user, password, query and fragment, and what these come to. Raises ValueError with a sentence
    (that has no password) for what is none of HTTP."""
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError:
        raise ValueError("an address that cannot be read") from None
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"an address of {parts.scheme or 'no scheme'}, not of HTTP")
    host = (parts.hostname or "").lower()
    literal = addresses.parse(host)
    try:
        host = str(literal) if literal is not None else addresses.name(host)
    except ValueError as error:
        raise ValueError(f"host {host!r}: {error}") from None
    login = None
    if parts.username or parts.password:
        user, word = unquote(parts.username or ""), unquote(parts.password or "")
        # A user alone is a token in the user's place: nothing of it is public.
        login = (
            Login(user, word)
            if word
            else Login(None, base64.b64encode(f"{user}:".encode()).decode(), "Basic")
        )
    scheme: Literal["http", "https"] = "https" if parts.scheme == "https" else "http"
    path = parts.path if parts.path.startswith("/") else "/" + parts.path
    return Place(scheme, host, port or _PORTS[scheme], path), login


def directory(path: str) -> str:
    return path if path.endswith("/") else path.rpartition("/")[0] + "/"


@dataclass(frozen=True, slots=True)
class Index:
    """One index of one tool. `probes`: paths below it that tell where its files are."""

    tool: Tool
    kind: Kind
    place: Place
    login: Login | None = None
    probes: tuple[str, ...] = ()
    name: str = ""

    def key(self) -> list[object]:
        """What its probing depends on, without secrets."""
        return [self.tool, self.kind, self.place.url(), self.login is not None, list(self.probes)]


@dataclass(slots=True)
class Found:
    """What one tool said: `skipped` why it (or a part of it) is left out."""

    indexes: list[Index] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


def prefix_of(index: Place, link: Place) -> str:
    """The directory under which an index's files are, from one of them.

    What index and file share on one host (`/repository/x/` of `/repository/x/simple/` and `/repository/x/packages/…`);
    on another host, or where they share nothing, the file's first directory.
    """
    segments = link.path.split("/")[1:-1]
    if (link.host, link.port) == (index.host, index.port):
        shared = []
        for one, other in zip(index.path.split("/")[1:-1], segments, strict=False):
            if one != other:
                break
            shared.append(one)
        if shared:
            return "/" + "/".join(shared) + "/"
    return f"/{segments[0]}/" if segments else "/"


def pattern(path: str) -> str | None:
    """A rule's path for everything under a directory; None when only the whole host can be said."""
    if path == "/":
        return None
    try:
        return rules.target(f"x{path}*")[2]
    except InvalidRequestError:
        return None


def links(page: str) -> Iterable[str]:
    """The `href`s of a page, as they are."""
    for match in re.finditer(r"""<a\s[^>]*?href\s*=\s*(?:"([^"]*)"|'([^']*)')""", page, re.IGNORECASE):
        yield (match[1] or match[2] or "").replace("&amp;", "&")


def toml(value: str) -> str:
    """A basic string of TOML."""
    return '"' + "".join(c if c.isprintable() and c not in '"\\' else f"\\u{ord(c):04x}" for c in value) + '"'


def expand(text: str, env: Mapping[str, str]) -> str:
    """npm's `${NAME}` in a configuration file; an unset one stays as it is."""
    return re.sub(r"\$\{([^}?]+)\??\}", lambda match: env.get(match[1], match[0]), text)
