"""A socket as the two streams that mitmproxy works with; what is written is counted."""

from __future__ import annotations

import asyncio
import socket
from typing import Any


class CountingWriter(asyncio.StreamWriter):
    """Counts, and sends what one turn of the loop writes at once: an answer's head and body are two writes."""

    sent = 0
    _pending: list[bytes] | None = None

    def write(self, data: Any) -> None:
        self.sent += len(data)
        if self._pending is None:
            self._pending = []
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append(data)

    def _flush(self) -> None:
        pending, self._pending = self._pending, None
        if pending:
            super().write(b"".join(pending))

    async def drain(self) -> None:
        self._flush()
        await super().drain()

    def write_eof(self) -> None:
        self._flush()
        super().write_eof()

    def close(self) -> None:
        self._flush()
        super().close()


async def streams(sock: socket.socket) -> tuple[asyncio.StreamReader, CountingWriter]:
    """Of a connected socket, which they own."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=65_536, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await loop.create_connection(lambda: protocol, sock=sock)
    return reader, CountingWriter(transport, protocol, reader, loop)
