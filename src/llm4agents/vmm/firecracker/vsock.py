"""Connections to a port of the guest through Firecracker's vsock socket: `CONNECT PORT`, `OK …`, then bytes.

Not here: which connection is the good one after a snapshot (`machine`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

from llm4agents.errors import ConnectionLostError
from llm4agents.vmm import unixhttp

_LINE_BYTES_MAX = 64


def ask(path: Path, port: int) -> socket.socket:
    """Ask for a connection to `port`, without waiting for the guest to take it. Raises ConnectionLostError."""
    try:
        sock = unixhttp.connect(path)
    except OSError as error:
        raise ConnectionLostError(f"the guest's channel cannot be connected: {error.strerror}") from error
    try:
        sock.send(f"CONNECT {port}\n".encode())  # a fresh socket's buffer has room for it
    except OSError as error:
        sock.close()
        raise ConnectionLostError(f"the guest's channel broke: {error.strerror}") from error
    return sock


async def taken(sock: socket.socket) -> bool:
    """Wait until the guest has taken the connection; False when it refused. Nothing after the answer is consumed."""
    loop = asyncio.get_running_loop()
    line = b""
    with contextlib.suppress(ConnectionError):
        while len(line) < _LINE_BYTES_MAX:
            # Byte by byte: what follows the line is the guest's.
            byte = await loop.sock_recv(sock, 1)
            if not byte:
                return False
            if byte == b"\n":
                return line.startswith(b"OK ")
            line += byte
    return False
