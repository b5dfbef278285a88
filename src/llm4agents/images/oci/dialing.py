"""Connections to registries: URLs taken apart, addresses that are allowed, proxies, TLS. Not for what is asked."""

from __future__ import annotations

import contextlib
import re
import ssl
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

import httpcore

from llm4agents import limits
from llm4agents.errors import HostSetupError
from llm4agents.outbound import Checked

_TIMEOUT = {
    "connect": limits.OCI_CONNECT_TIMEOUT_S,
    "read": limits.OCI_READ_TIMEOUT_S,
    "write": limits.OCI_READ_TIMEOUT_S,
    "pool": None,
}


class RefusedError(Exception):
    """That address is not dialled; its words say why."""


@dataclass(frozen=True, slots=True)
class Url:
    """An absolute one of http or https, in the parts that are compared."""

    scheme: str
    host: str
    port: int
    target: str

    @classmethod
    def parse(cls, text: str, base: Url | None = None) -> Url:
        """Raises HostSetupError for what is none: such come from registries."""
        try:
            text = urllib.parse.urljoin(str(base), text) if base is not None and text else text
            parts = urllib.parse.urlsplit(text)
            port = parts.port or {"http": 80, "https": 443}[parts.scheme]
            host = parts.hostname or ""
            bad = not host or "@" in parts.netloc or not text.isascii()
        except (ValueError, KeyError):
            bad = True
        if bad or re.search(r"[\x00-\x20\x7f\\]", text):
            raise HostSetupError(f"the registry names an address that cannot be asked: {text[:200]!r}")
        return cls(parts.scheme, host, port, (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))

    @property
    def origin(self) -> tuple[str, str, int]:
        return self.scheme, self.host, self.port

    def join(self, path: str) -> Url:
        return Url(self.scheme, self.host, self.port, path)

    def with_query(self, fields: Mapping[str, str]) -> Url:
        sign = "&" if "?" in self.target else "?"
        return self.join(self.target + sign + urllib.parse.urlencode(fields))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.target}"


def tls(certificates: bytes | None) -> ssl.SSLContext:
    """Whom registries are believed by: this host's list, and `certificates` (PEM)."""
    context = ssl.create_default_context()
    if certificates:
        context.load_verify_locations(cadata=certificates.decode("ascii"))
    return context


class Pools:
    """Connections kept for the next request, by the proxy they go through."""

    def __init__(self, context: ssl.SSLContext, known: set[str], refuse: Callable[[str], str | None]) -> None:
        def judge(host: str, port: int, address: str) -> None:
            if f"{host}:{port}" not in known and (why := refuse(address)):
                raise RefusedError(f"{host} is {address}, {why}")

        self._context, self._checked = context, Checked(judge)
        self._pools: dict[str, httpcore.AsyncConnectionPool] = {}

    def _pool(self, url: Url) -> httpcore.AsyncConnectionPool:
        proxy = _proxy(url) or ""
        if proxy not in self._pools:
            most = limits.OCI_DOWNLOADS_MAX + 1
            if proxy:
                # It resolves names itself, so what they are cannot be looked at; it is the operator's.
                parts = urllib.parse.urlsplit(proxy)
                user = (
                    urllib.parse.unquote(parts.username or ""),
                    urllib.parse.unquote(parts.password or ""),
                )
                self._pools[proxy] = httpcore.AsyncHTTPProxy(
                    f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}",
                    proxy_auth=user if parts.username else None,
                    ssl_context=self._context,
                    max_connections=most,
                )
            else:
                self._pools[proxy] = httpcore.AsyncConnectionPool(
                    ssl_context=self._context, network_backend=self._checked, max_connections=most
                )
        return self._pools[proxy]

    @contextlib.asynccontextmanager
    async def get(
        self, url: Url, headers: Mapping[str, str]
    ) -> AsyncIterator[tuple[int, dict[str, str], AsyncIterator[bytes]]]:
        """Status, headers by lower-case name, and body of the answer, which must be read within."""
        async with self._pool(url).stream(
            "GET",
            str(url),
            headers=[("host", _authority(url)), *headers.items()],
            extensions={"timeout": _TIMEOUT},
        ) as answer:
            found = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in answer.headers}
            yield answer.status, found, answer.aiter_stream()

    async def close(self) -> None:
        for pool in self._pools.values():
            await pool.aclose()


def _authority(url: Url) -> str:
    host = f"[{url.host}]" if ":" in url.host else url.host
    return host if url.port == {"http": 80, "https": 443}[url.scheme] else f"{host}:{url.port}"


def _proxy(url: Url) -> str | None:
    """The proxy that the server's environment has for it (`HTTPS_PROXY`, `NO_PROXY`), if any."""
    if urllib.request.proxy_bypass(f"{url.host}:{url.port}") or url.host in ("localhost", "127.0.0.1", "::1"):
        return None
    found = urllib.request.getproxies().get(url.scheme)
    return found if found and "://" in found else f"http://{found}" if found else None
