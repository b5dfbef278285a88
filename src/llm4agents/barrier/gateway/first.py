"""A connection's first bytes: looked at and left in the socket, until it is known what they begin.

The parsers are `hello` and `http1`; here is the waiting, which ends: by a whole head, by a bound on bytes, by a clock.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import Literal

from llm4agents.barrier import sockets
from llm4agents.barrier.gateway import hello, http1
from llm4agents.barrier.gateway.hello import Hello
from llm4agents.barrier.gateway.http1 import Head

_BYTES_MAX = max(hello.HELLO_BYTES_MAX + 1_024, http1.HEAD_BYTES_MAX)
_LOOKS_UNPACED = 16
_PACE_S = 0.02


@dataclass(slots=True)
class First:
    """What a connection begins with; `refused`: why it cannot be let through as that protocol, and the HTTP status."""

    protocol: Literal["tls", "http", "tcp", "nothing"]
    hello: Hello | None = None
    head: Head | None = None
    ended: bool = False
    """The client ended before it said anything."""
    refused: str | None = None
    status: int = 400

    @property
    def name(self) -> str | None:
        """The host that the client itself names."""
        if self.hello is not None:
            return self.hello.name
        return self.head.host if self.head is not None else None


async def look(sock: socket.socket, within_s: float) -> First:
    """Raises OSError when the connection breaks. `nothing`: silence, or an end before the first byte."""
    found = First("nothing")
    try:
        async with asyncio.timeout(within_s):
            data = await sockets.peek(sock, _BYTES_MAX)
            found.ended = not data
            looks = 0
            while data:
                found, needed = _examine(data)
                if not needed:
                    return found
                looks += 1
                if looks > _LOOKS_UNPACED:
                    await asyncio.sleep(_PACE_S)  # a head in crumbs costs its sender time, not us
                seen = await sockets.more(sock, _BYTES_MAX, than=max(len(data), needed - 1))
                if len(seen) <= len(data):
                    found.refused = "it ended within its first message"
                    return found
                data = seen
    except TimeoutError:
        if found.protocol != "nothing":
            found.refused = f"its first message took more than {within_s:.0f} s"
    return found


def _examine(data: bytes) -> tuple[First, int]:
    """What it is so far, and how many bytes are needed to know more (0: known)."""
    if data[0] == 22:
        try:
            seen = hello.examine(data)
        except hello.NotHello:
            return First("tcp"), 0
        except hello.Refused as error:
            return First("tls", refused=str(error)), 0
        return (First("tls"), seen) if isinstance(seen, int) else (First("tls", hello=seen), 0)
    likely = http1.likely(data)
    if likely is False:
        return First("tcp"), 0
    if likely is None:
        return First("tcp"), len(data) + 1
    try:
        head = http1.examine(data)
    except http1.Refused as error:
        return First("http", refused=error.reason, status=error.status), 0
    return (First("http"), len(data) + 1) if head is None else (First("http", head=head), 0)
