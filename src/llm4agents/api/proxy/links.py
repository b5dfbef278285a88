"""What the URL of a port is. Pure.

Not here: what opens it (`admission`), reading such URLs back (`address`).
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from llm4agents.api.proxy.address import LOCAL, Names, plain
from llm4agents.api.proxy.admission import EXPIRES, SIGNATURE
from llm4agents.config import Settings
from llm4agents.errors import ConflictError

_DEFAULT = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Base:
    """Where clients reach this server. `named`: whether `PORT-ID.DOMAIN` leads to it too."""

    scheme: str
    host: str
    port: int | None
    named: bool
    path: str = ""

    def at(self, host: str) -> str:
        host = f"[{host}]" if ":" in host else host
        shown = "" if self.port in (None, _DEFAULT[self.scheme]) else f":{self.port}"
        return f"{self.scheme}://{host}{shown}"


def base(settings: Settings, listening: tuple[str, str, int] | None, host: str) -> Base:
    """By what the operator says, else by where it listens; `host` is how the one who asks calls this server.

    Raises ConflictError when it has no listener but its unix socket, or one that has no name.
    """
    if settings.public_url is not None:
        parts = urlsplit(settings.public_url)
        scheme = parts.scheme if parts.scheme in _DEFAULT else "https"
        named = settings.domain is not None or parts.hostname == LOCAL
        return Base(scheme, parts.hostname or "", parts.port, named, parts.path.rstrip("/"))
    if listening is None:
        raise ConflictError(
            "this server has no URL: it listens on a unix socket alone",
            hint="use a forward (sandbox.ports.forward, llm4agents forward), or server run --listen HOST:PORT",
        )
    scheme, address, port = listening
    if settings.domain is not None:
        return Base(scheme, plain(settings.domain), port, True)
    if _is_loopback(address):
        # No certificate is for all names of localhost: with TLS, and no domain, the path has to say the port.
        return Base(scheme, LOCAL, port, scheme == "http")
    asked = urlsplit(f"//{host}").hostname or ""
    known = address if address not in ("0.0.0.0", "::", "") else asked  # noqa: S104 (said, not listened on)
    if not known or ("." not in known and ":" not in known):  # what clients of the unix socket say
        raise ConflictError(
            "this server listens on every address and does not know what it is called",
            hint="set LLM4AGENTS_DOMAIN, or LLM4AGENTS_PUBLIC_URL",
        )
    return Base(scheme, known, port, False)


def of(where: Base, names: Names, sandbox: str, port: int, path: str) -> str:
    """The URL of a path of a port: under a host of its own where there can be one."""
    if where.named:
        label = f"{port}-{sandbox.replace('_', '-')}"
        return f"{where.at(f'{label}.{names.domain}')}{path}"
    return f"{where.at(where.host)}{where.path}/v1/sandboxes/{sandbox}/ports/{port}{path}"


def signed(url: str, expires: int, stamp: str) -> str:
    start, sharp, fragment = url.partition("#")
    mark = "&" if "?" in start else "?"
    said = f"{EXPIRES.decode()}={expires}&{SIGNATURE.decode()}={stamp}"
    return f"{start}{mark}{said}{sharp}{fragment}"


def _is_loopback(address: str) -> bool:
    if address == LOCAL:
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
