"""Connections from the host to where a guest may go: resolved here, judged by address, through the host's proxy.

    dialler = Dialler(os.environ)
    there = await dialler.dial("example.com", 443, judge=lambda address: policy.address(target, address))

The address dialled is the address that was judged. Not for deciding: `judge` does that. Gateway and interceptor share
it; standard library only.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import os
import socket
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from llm4agents import limits
from llm4agents.barrier import sockets

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_CACHE_MAX = 4_096
_OWN_KEEP_S = 5.0
_PROXY_HEAD_BYTES_MAX = 16_384


class Judged(Protocol):
    """The part of `policy.Verdict` that is looked at here."""

    @property
    def allowed(self) -> bool: ...
    @property
    def rule(self) -> str: ...
    @property
    def reason(self) -> str: ...


class DialError(Exception):
    """No connection. `kind`: denied | resolve | refused | timeout | proxy; `rule`: what denied it, if that."""

    def __init__(self, kind: str, reason: str, rule: str | None = None) -> None:
        super().__init__(reason)
        self.kind, self.reason, self.rule = kind, reason, rule


@dataclass(frozen=True, slots=True)
class Dialled:
    socket: socket.socket
    """Connected and non-blocking; a stream to the origin (through a proxy's tunnel: also a socket pair's end)."""
    address: str | None
    """What was dialled; None behind a proxy that resolves."""
    unjudged: str | None = None
    """`proxy`: the address was chosen by the proxy, where nobody of ours could judge it."""


@dataclass(frozen=True, slots=True)
class Proxy:
    scheme: str
    host: str
    port: int
    authorization: str | None


class Dialler:
    """Resolves, judges, connects. One for a process; belongs to one event loop."""

    def __init__(self, environ: Mapping[str, str] | None = None, *, ca_file: str | None = None) -> None:
        self._environ = dict(os.environ if environ is None else environ)
        urls = [self._env(name) for name in ("https_proxy", "http_proxy", "all_proxy")]
        self._tls: ssl.SSLContext | None = None
        if any(url.startswith("https://") for url in urls):
            # Now, since later this process may not be able to read it.
            self._tls = ssl.create_default_context(cafile=ca_file or self._env("ssl_cert_file") or None)
        self._pool = ThreadPoolExecutor(limits.RESOLVER_THREADS, "resolve")
        self._cache: OrderedDict[str, tuple[float, tuple[str, ...]]] = OrderedDict()
        self._asking: dict[str, asyncio.Task[tuple[str, ...]]] = {}
        self._turns: dict[str, int] = {}
        self._tunnels: set[asyncio.Task[None]] = set()
        self._own: frozenset[Address] = frozenset()
        self._own_until = 0.0

    def close(self) -> None:
        """Resolutions under way are left to end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for tunnel in self._tunnels:
            tunnel.cancel()

    def own_addresses(self) -> frozenset[Address]:
        """This host's, as of a few seconds ago: for `policy.address`."""
        now = time.monotonic()
        if now >= self._own_until:
            self._own, self._own_until = _own(), now + _OWN_KEEP_S
        return self._own

    # -- names --------------------------------------------------------------------------------------------

    async def resolve(self, name: str, *, owner: str = "", short: bool = False) -> tuple[str, ...]:
        """The host's own resolver's answer, kept for a short time. Raises DialError.

        `owner` is on whose behalf: one has few questions open at a time, so that nobody uses up the threads. `short`:
        the name may be short for another one (the host's search domains); else it is looked up as it is.
        """
        asked = name if short else f"{name}."
        known = self._cache.get(asked)
        if known is not None and known[0] > time.monotonic():
            self._cache.move_to_end(asked)
            if not known[1]:
                raise DialError("resolve", f"the host's resolver knows no address of {name}")
            return known[1]
        task = self._asking.get(asked)
        if task is None:
            # The fewer threads are free, the fewer a single one may have: some that conspire (names whose servers
            # never answer) leave room for the others.
            free = limits.RESOLVER_THREADS - len(self._asking)
            if self._turns.get(owner, 0) >= max(1, min(limits.RESOLVING_PER_SANDBOX_MAX, free // 4)):
                raise DialError("resolve", "too many names are being resolved for this sandbox: try again")
            self._turns[owner] = self._turns.get(owner, 0) + 1
            task = self._asking[asked] = asyncio.create_task(self._ask(asked))

            def over(_: object) -> None:
                self._asking.pop(asked, None)
                self._turns[owner] -= 1
                if not self._turns[owner]:
                    del self._turns[owner]

            task.add_done_callback(over)
        try:
            async with asyncio.timeout(limits.RESOLVE_TIMEOUT_S):
                found = await asyncio.shield(task)
        except TimeoutError:
            raise DialError("timeout", f"the host's resolver did not answer for {name}") from None
        if not found:
            raise DialError("resolve", f"the host's resolver knows no address of {name}")
        return found

    async def _ask(self, asked: str) -> tuple[str, ...]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._pool, _looked_up, asked)
            keep_s = limits.RESOLVED_KEEP_S
        except OSError:
            found, keep_s = (), limits.RESOLVED_NOT_KEEP_S
        self._cache[asked] = (time.monotonic() + keep_s, found)
        while len(self._cache) > _CACHE_MAX:
            self._cache.popitem(last=False)
        return found

    # -- connections --------------------------------------------------------------------------------------

    async def dial(
        self,
        host: str,
        port: int,
        *,
        judge: Callable[[str], Judged],
        plain: bool = False,
        owner: str = "",
        short: bool = False,
        timeout: float = limits.DIAL_TIMEOUT_S,
    ) -> Dialled:
        """A connection to a name or an address; `plain`: it will carry HTTP without TLS (which proxy is asked); `owner`
        and `short` as for `resolve`.

        Raises DialError; within `timeout` seconds and the resolver's own bound.
        """
        literal = _literal(host)
        if literal is not None:
            _check(judge(host))
        proxy = self.proxy(host, port, plain=plain)
        if proxy is not None:
            there = await self._through(proxy, host, port, timeout)
            return Dialled(there, host if literal else None, None if literal else "proxy")
        addresses = (host,) if literal else await self.resolve(host, owner=owner, short=short)
        good, refused = [], None
        for address in addresses:
            verdict = judge(address)
            if verdict.allowed:
                good.append(address)
            else:
                refused = refused or DialError("denied", verdict.reason, verdict.rule)
        if not good:
            raise refused or DialError("resolve", f"no address of {host}")
        try:
            async with asyncio.timeout(timeout):
                return await _race(_interleaved(good)[: limits.DIAL_ADDRESSES_MAX], port)
        except TimeoutError:
            raise DialError("timeout", f"{host}:{port} did not answer within {timeout:.0f} s") from None

    def proxy(self, host: str, port: int, *, plain: bool) -> Proxy | None:
        """The proxy that the environment wants for this host. Raises DialError for one that cannot be used."""
        literal = _literal(host)
        if literal is not None and literal.is_loopback:
            return None
        if self._excluded(host, port):
            return None
        names = ("http_proxy", "all_proxy") if plain else ("https_proxy", "all_proxy")
        url = next(filter(None, (self._env(name) for name in names)), None)
        return parse_proxy(url) if url else None

    def _env(self, name: str) -> str:
        return (self._environ.get(name) or self._environ.get(name.upper()) or "").strip()

    def _excluded(self, host: str, port: int) -> bool:
        literal = _literal(host)
        for part in filter(None, (part.strip().lower() for part in self._env("no_proxy").split(","))):
            if part == "*":
                return True
            if literal is not None:
                with contextlib.suppress(ValueError):
                    if literal in ipaddress.ip_network(part, strict=False):
                        return True
            name, _, wanted = part.partition(":") if part.count(":") == 1 else (part, "", "")
            if wanted and wanted != str(port):
                continue
            name = name.removeprefix("*").strip("[]")
            if host == name or host.endswith("." + name.removeprefix(".")) or host == name.removeprefix("."):
                return True
        return False

    async def _through(self, proxy: Proxy, host: str, port: int, timeout: float) -> socket.socket:
        """A tunnel (CONNECT). The proxy is the operator's own word, so its address is not judged."""
        try:
            async with asyncio.timeout(timeout):
                literal = _literal(proxy.host)
                addresses = (
                    (proxy.host,) if literal else await self.resolve(proxy.host, owner="proxy", short=True)
                )
                sock = (await _race(_interleaved(addresses), proxy.port)).socket
                try:
                    if proxy.scheme == "https":
                        sock = await self._encrypted(sock, proxy.host)
                    await _connect(sock, proxy, host, port)
                except BaseException:
                    sock.close()
                    raise
                return sock
        except DialError as error:
            raise DialError("proxy", f"the host's proxy {proxy.host}:{proxy.port}: {error.reason}") from None
        except TimeoutError:
            raise DialError("proxy", f"the host's proxy {proxy.host}:{proxy.port} did not answer") from None
        except (OSError, ValueError) as error:
            raise DialError("proxy", f"the host's proxy {proxy.host}:{proxy.port}: {error}") from None

    async def _encrypted(self, sock: socket.socket, name: str) -> socket.socket:
        """One end of a socket pair, whose other end is pumped through TLS: who gets it needs to know nothing of it."""
        assert self._tls is not None
        reader, writer = await asyncio.open_connection(sock=sock, ssl=self._tls, server_hostname=name)
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        inner_reader, inner_writer = await asyncio.open_connection(sock=ours)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65_536):
                sink.write(data)
                await sink.drain()
            if sink.can_write_eof():
                sink.write_eof()
            else:
                sink.close()

        async def both() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(pump(reader, inner_writer))
                    group.create_task(pump(inner_reader, writer))
            except* OSError:
                pass
            finally:
                writer.close()
                inner_writer.close()

        task = asyncio.create_task(both())
        self._tunnels.add(task)
        task.add_done_callback(self._tunnels.discard)
        return theirs


def parse_proxy(url: str) -> Proxy:
    """`http://user:password@host:port`, or without a scheme. Raises DialError for what is no HTTP proxy."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
        host = parts.hostname
    except ValueError:
        host, port, parts = None, 0, None
    if parts is None or not host or parts.scheme not in ("http", "https"):
        raise DialError(
            "proxy", "the host's proxy setting is no http:// or https:// URL: set HTTPS_PROXY to one"
        )
    authorization = None
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = "Basic " + base64.b64encode(pair.encode()).decode()
    return Proxy(parts.scheme, host, port, authorization)


async def _connect(sock: socket.socket, proxy: Proxy, host: str, port: int) -> None:
    loop = asyncio.get_running_loop()
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    lines = [f"CONNECT {where} HTTP/1.1", f"Host: {where}"]
    if proxy.authorization:
        lines.append(f"Proxy-Authorization: {proxy.authorization}")
    await loop.sock_sendall(sock, "\r\n".join([*lines, "", ""]).encode())
    head = b""
    while b"\r\n\r\n" not in head:
        seen = await sockets.peek(sock, 4_096)
        if not seen or len(head) > _PROXY_HEAD_BYTES_MAX:
            raise DialError("proxy", "it broke off")
        end = (head + seen).find(b"\r\n\r\n")
        head += sock.recv(len(seen) if end < 0 else end + 4 - len(head))  # what comes after is the origin's
    status = head.split(b"\r\n", 1)[0].split(b" ", 2)
    if len(status) < 2 or not status[0].startswith(b"HTTP/1.") or not status[1].startswith(b"2"):
        said = head.split(b"\r\n", 1)[0][:120].decode("latin-1")
        raise DialError("proxy", f"it refused {where}: {said!r}")


async def _race(addresses: list[str], port: int) -> Dialled:
    """The first address that answers; the next is tried when one has failed, or has not answered for a moment."""
    queue = list(addresses)
    running: dict[asyncio.Task[socket.socket], str] = {}
    error: OSError | None = None
    try:
        while queue or running:
            if queue:
                address = queue.pop(0)
                running[asyncio.create_task(_one(address, port))] = address
            wait_s = limits.DIAL_STAGGER_S if queue else None
            done, _ = await asyncio.wait(running, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                address = running.pop(task)
                failed = task.exception()
                if failed is None:
                    return Dialled(task.result(), address)
                if not isinstance(failed, OSError):
                    raise failed
                error = error or failed
        why = os.strerror(error.errno) if error is not None and error.errno else str(error)
        raise DialError("refused", f"{addresses[0]} port {port}: {why}")
    finally:
        for task in running:
            task.add_done_callback(_discard)
            task.cancel()


def _discard(task: asyncio.Task[socket.socket]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()


async def _one(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sockets.no_delay(sock)
        await asyncio.get_running_loop().sock_connect(sock, (address, port))
    except BaseException:
        sock.close()
        raise
    return sock


def _check(verdict: Judged) -> None:
    if not verdict.allowed:
        raise DialError("denied", verdict.reason, verdict.rule)


def _looked_up(asked: str) -> tuple[str, ...]:
    """With a dot at its end the name is that and no other: no search domain makes it another host's. Names of
    /etc/hosts, which has none with a dot, are as they stand there."""
    name = asked.removesuffix(".")
    return _lookup(name if _in_hosts(name) else asked)


def _in_hosts(name: str) -> bool:
    with contextlib.suppress(OSError):
        for line in Path("/etc/hosts").read_text(errors="replace").splitlines():
            if name in line.partition("#")[0].lower().split()[1:]:
                return True
    return False


def _lookup(name: str) -> tuple[str, ...]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))


def _own() -> frozenset[Address]:
    """What is configured on this host's interfaces, from /proc (no privileges, no child)."""
    found: set[Address] = set()
    with contextlib.suppress(OSError):
        lines = Path("/proc/net/fib_trie").read_text().splitlines()
        for line, following in pairwise(lines):
            if following.strip() == "/32 host LOCAL":
                found.add(ipaddress.IPv4Address(line.rpartition("-- ")[2].strip()))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            found.add(ipaddress.IPv6Address(int(line.split()[0], 16)))
    return frozenset(found)


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _interleaved(addresses: Iterable[str]) -> list[str]:
    """The families by turns, in the resolver's order: one that goes nowhere costs one stagger, not all of them."""
    addresses = list(addresses)
    first_six = bool(addresses) and ":" in addresses[0]
    first = [address for address in addresses if (":" in address) is first_six]
    second = [address for address in addresses if (":" in address) is not first_six]
    short = min(len(first), len(second))
    mixed = [address for pair in zip(first, second, strict=False) for address in pair]
    return mixed + first[short:] + second[short:]
