"""What a sandbox's DNS questions are answered: addresses of our own making for allowed names, NXDOMAIN for the rest.

No question is ever passed on, so no question carries anything out. Whether a name is allowed is policy's to say; the
bytes are `dns`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from llm4agents import limits
from llm4agents.barrier import sockets
from llm4agents.barrier.gateway import dns
from llm4agents.barrier.gateway.audit import Audit
from llm4agents.barrier.gateway.names import Names, NamesFull, is_synthetic
from llm4agents.barrier.policy import Verdict

_GATEWAY_NAME = "gateway"
_BATCH = 32
_STREAM_QUERIES_MAX = 1_000
_STREAM_BURST_S = 0.1


class Resolver:
    """`resolve` is `Policy.resolve` of the moment."""

    def __init__(self, names: Names, audit: Audit, resolve: Callable[[str], Verdict]) -> None:
        self._names, self._audit, self._resolve = names, audit, resolve
        self.queries = 0
        self._stream_at = 0.0

    def datagrams(self, sock: socket.socket) -> int:
        """Answer what waits at the planted socket, some of it; how many there were."""
        for done in range(_BATCH):
            try:
                packet, source = sock.recvfrom(dns.QUERY_BYTES_MAX + 1)
            except (BlockingIOError, InterruptedError):
                return done
            except OSError:
                continue  # an ICMP error of an earlier answer, told now
            reply = self.answer(packet, stream=False)
            if reply is not None:
                with contextlib.suppress(OSError):  # the guest does not take it: it will ask again
                    sock.sendto(reply, source)
        return _BATCH

    async def stream(self, sock: socket.socket) -> None:
        """DNS over TCP, until the client has had enough, says nothing for a while, or nonsense."""
        loop = asyncio.get_running_loop()
        sockets.no_delay(sock)
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            for _ in range(_STREAM_QUERIES_MAX):
                await self._turn()
                async with asyncio.timeout(limits.FIRST_BYTES_S):
                    (size,) = struct.unpack("!H", await _exactly(sock, 2))
                    if not 12 <= size <= dns.QUERY_BYTES_MAX:
                        return
                    reply = self.answer(await _exactly(sock, size), stream=True)
                    if reply is None:
                        return
                    await loop.sock_sendall(sock, struct.pack("!H", len(reply)) + reply)

    async def _turn(self) -> None:
        """Between two queries over TCP everybody else has a turn, and a sandbox has no more of them a second than its
        link lets through over UDP, on however many connections: thousands may wait in one segment."""
        now = time.monotonic()
        self._stream_at = max(now - _STREAM_BURST_S, self._stream_at) + 1 / limits.LINK_QUERIES_PER_S
        await asyncio.sleep(max(0.0, self._stream_at - now))

    def answer(self, packet: bytes, *, stream: bool) -> bytes | None:
        """The reply to these bytes; None: they get none."""
        self.queries += 1
        try:
            query = dns.parse(packet)
        except dns.Malformed as error:
            self._say("deny", None, f"malformed query: {error}", "dns")
            return error.answer
        limit = 65_535 if stream else dns.udp_limit(query)
        if query.name is None:
            why = "a name that no host can have"
            self._say("deny", dns.printable(query.labels), why, "dns", query)
            return dns.answer(query, dns.NXDOMAIN, ede=(dns.EDE_BLOCKED, why), limit=limit)
        address = dns.reverse_of(query.name)
        if address is not None:
            return self._reverse(query, str(address), limit)
        verdict = self._resolve(query.name)
        if not verdict.allowed:
            self._say("deny", query.name, verdict.reason, verdict.rule, query)
            return dns.answer(query, dns.NXDOMAIN, ede=(dns.EDE_BLOCKED, verdict.reason), limit=limit)
        if query.type not in (dns.A, dns.ANY):
            self._say("allow", query.name, None, verdict.rule, query)
            return dns.answer(query, dns.NOERROR, limit=limit)
        try:
            synthetic = self._names.address(query.name)
        except (NamesFull, OSError) as error:
            why = (
                f"this sandbox has used up its {limits.SYNTHETIC_NAMES_MAX} names"
                if isinstance(error, NamesFull)
                else f"the gateway cannot keep names: {error.strerror}"
            )
            self._say("deny", query.name, why, verdict.rule, query)
            return dns.answer(query, dns.SERVFAIL, ede=(dns.EDE_OTHER, why), limit=limit)
        self._say("allow", query.name, None, verdict.rule, query, address=synthetic)
        records = (dns.a_record(synthetic),)
        return dns.answer(query, dns.NOERROR, records, ttl_s=limits.DNS_TTL_S, limit=limit)

    def _reverse(self, query: dns.Query, address: str, limit: int) -> bytes:
        name = _GATEWAY_NAME if address == limits.GATEWAY_ADDRESS else None
        if is_synthetic(address):
            name = self._names.name(address)
        if name is None:
            why = "no name of this sandbox has that address"
            self._say("deny", query.name, why, "dns", query)
            return dns.answer(query, dns.NXDOMAIN, ede=(dns.EDE_BLOCKED, why), limit=limit)
        self._say("allow", query.name, None, "dns", query)
        records = (dns.ptr_record(name),) if query.type in (dns.PTR, dns.ANY) else ()
        return dns.answer(query, dns.NOERROR, records, ttl_s=limits.DNS_TTL_S, limit=limit)

    def _say(
        self,
        verdict: str,
        name: str | None,
        reason: str | None,
        rule: str,
        query: dns.Query | None = None,
        **more: Any,
    ) -> None:
        self._audit.write(
            {
                "kind": "dns",
                "verdict": verdict,
                "rule": rule,
                "reason": reason,
                "name": name,
                "protocol": "dns",
                "query": None if query is None else query.type_name,
                **more,
            }
        )


async def _exactly(sock: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        more = await loop.sock_recv(sock, size - len(data))
        if not more:
            raise asyncio.IncompleteReadError(data, size)
        data += more
    return data
