"""The connection to a guest's agent through Cloud Hypervisor's vsock socket.

What is said there is Firecracker's: `CONNECT PORT`, answered by `OK PORT-OF-THE-HOST` once the guest has accepted. The
guest refuses at once while nobody listens. After a restore the first request is refused too (seen): the muxer counts
its ports anew, and the frozen guest still has a connection of the same.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

from llm4agents.errors import ConnectionLostError
from llm4agents.vmm import unixhttp
from llm4agents.vmm.waiting import readable

AGENT_PORT = 1024
RETRY_S = 0.02
"""Between tries while nobody listens in the guest yet: it says no at once. An answer is waited for, not asked for."""
_ASK = f"CONNECT {AGENT_PORT}\n".encode()
_LINE_BYTES_MAX = 32


async def connect(path: Path, ended: Callable[[], bool], *, timeout: float) -> socket.socket:
    """A connection to the agent, non-blocking, of whose bytes none has been read.

    Raises ConnectionLostError when there is none in `timeout` seconds or the VMM has `ended`.
    """
    tries = 0
    try:
        async with asyncio.timeout(timeout):
            while not ended():
                # The second time at once: what a restored guest refuses is one request.
                if tries > 1:
                    await asyncio.sleep(RETRY_S)
                tries += 1
                try:
                    sock = unixhttp.connect(path)
                except OSError:
                    continue  # it has no socket yet
                try:
                    sock.send(_ASK)  # into an empty buffer: all of it
                    if await _accepted(sock):
                        return sock
                except OSError:
                    pass
                except BaseException:
                    sock.close()
                    raise
                sock.close()
    except TimeoutError:
        pass
    raise ConnectionLostError("the guest's agent does not answer on vsock")


async def _accepted(sock: socket.socket) -> bool:
    """Whether `OK PORT\\n` comes. Byte by byte: what follows is the agent's. OSError when it is reset."""
    line = b""
    while len(line) < _LINE_BYTES_MAX:
        await readable(sock.fileno())
        try:
            part = sock.recv(1)
        except BlockingIOError:
            continue
        if not part:
            return False
        if part == b"\n":
            return line.startswith(b"OK ")
        line += part
    return False
