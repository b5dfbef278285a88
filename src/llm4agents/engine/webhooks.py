"""Telling a URL what a run came to: which URLs may be called, how the message is signed, one try of it.

The server makes the request, from its own network: names are resolved here, and the address that was checked is the
one that is connected to. Link-local addresses (where clouds keep their metadata), multicast and unspecified ones are
refused; loopback and private ones only to jobs of callers who do not run the host (`reach`, given as `refuse`): the
user of the local socket is the host's own user.
Redirects are not followed and answers not kept. Not here: when it is tried again (`schedule`), what is told (`jobs`).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import ssl
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final
from urllib.parse import urlsplit

import httpcore

from llm4agents import __version__, limits
from llm4agents.errors import InvalidRequestError
from llm4agents.outbound import Checked

Refuse = Callable[[ipaddress.IPv4Address | ipaddress.IPv6Address], str | None]
"""Why an address is not called; None: it is."""
_METADATA: Final = {ipaddress.ip_address("fd00:ec2::254"), ipaddress.ip_address("100.100.100.200")}


class WebhookError(Exception):
    """One try failed; its words say why."""


def check_url(url: str, refuse: Refuse | None = None) -> None:
    """Raises InvalidRequestError for what can never be called. Names are judged when they are resolved."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidRequestError(f"webhook={url[:200]!r}: {error}") from None
    if (
        len(url) > limits.WEBHOOK_URL_BYTES_MAX
        or not url.isascii()
        or any(ord(letter) <= 32 for letter in url)
    ):
        raise InvalidRequestError(
            f"webhook: a URL is at most {limits.WEBHOOK_URL_BYTES_MAX} ASCII characters without spaces"
        )
    if parts.scheme not in ("http", "https") or not host:
        raise InvalidRequestError(f"webhook={url[:200]!r} is no http or https URL")
    if parts.username is not None or parts.password is not None:
        raise InvalidRequestError(
            "webhook: no user name or password in the URL", hint="messages are signed; check the signature"
        )
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        try:
            host.encode("idna")
        except UnicodeError:
            raise InvalidRequestError(f"webhook={url[:200]!r}: {host[:80]!r} is no host name") from None
        return
    if why := _why_not(address, refuse):
        raise InvalidRequestError(f"webhook={url[:200]!r}: {why}")


def refused(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    """Why this server does not call an address; None: it does. Pure."""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_link_local or address in _METADATA:
        return f"{address} is link-local or a metadata service"
    if address.is_multicast or address.is_unspecified:
        return f"{address} is no address of one host"
    return None


def _why_not(address: ipaddress.IPv4Address | ipaddress.IPv6Address, refuse: Refuse | None) -> str | None:
    return refused(address) or (None if refuse is None else refuse(address))


def signature(secret: str, at: int, body: bytes) -> str:
    """The value of `X-LLM4Agents-Signature`: `t=UNIX,v1=HEX`, HMAC-SHA256 with the job's secret over `UNIX.BODY`."""
    digest = hmac.new(secret.encode(), b"%d." % at + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


async def deliver(
    url: str, message: dict[str, Any], secret: str, at: int, refuse: Refuse | None = None
) -> int:
    """POST `message` once, to no address that `refuse` has a word against; the status that was answered.

    Raises WebhookError when there was none, or no 2xx.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    headers: list[tuple[bytes | str, bytes | str]] = [
        ("content-type", "application/json"),
        ("user-agent", f"llm4agents/{__version__}"),
        ("x-llm4agents-delivery", str(message["id"])),
        ("x-llm4agents-signature", signature(secret, at, body)),
    ]

    def judge(host: str, port: int, address: str) -> None:
        if why := _why_not(ipaddress.ip_address(address), refuse):
            raise WebhookError(why)

    tls = _tls() if url.lower().startswith("https") else None
    try:
        async with (
            asyncio.timeout(limits.WEBHOOK_TIMEOUT_S),
            httpcore.AsyncConnectionPool(ssl_context=tls, network_backend=Checked(judge)) as pool,
            pool.stream(
                "POST",
                url,
                headers=headers,
                content=body,
                extensions={"timeout": {"connect": limits.WEBHOOK_CONNECT_TIMEOUT_S}},
            ) as answer,
        ):
            status = answer.status
    except TimeoutError:
        raise WebhookError(f"no answer within {limits.WEBHOOK_TIMEOUT_S:g} s") from None
    except (
        httpcore.NetworkError,
        httpcore.ProtocolError,
        httpcore.TimeoutException,
        OSError,
        ValueError,
    ) as error:
        raise WebhookError(f"{type(error).__name__}: {error}"[:300]) from error
    if not 200 <= status < 300:
        raise WebhookError(f"answered {status}")
    return int(status)
