"""Few acts on non-blocking sockets that asyncio lacks: wait for readiness, look without taking, end with a reset.

Standard library only: gateway and interceptor share it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import struct

_SO_ORIGINAL_DST = 80
_LINGER_0 = struct.pack("ii", 1, 0)


async def readable(sock: socket.socket) -> None:
    """Until there is something to read, or the peer has ended. One waiter at a time."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    fd = sock.fileno()
    loop.add_reader(fd, _wake, done)
    try:
        await done
    finally:
        loop.remove_reader(fd)


async def writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    fd = sock.fileno()
    loop.add_writer(fd, _wake, done)
    try:
        await done
    finally:
        loop.remove_writer(fd)


def _wake(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


async def peek(sock: socket.socket, size: int, *, at_least: int = 1) -> bytes:
    """What has come so far, at most `size` bytes, left where it is; waits for `at_least` bytes or the peer's end.

    Raises OSError when the connection is broken.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, max(1, min(at_least, size)))
    try:
        while True:
            try:
                return sock.recv(size, socket.MSG_PEEK)
            except BlockingIOError:
                await readable(sock)
    finally:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


async def more(sock: socket.socket, size: int, *, than: int) -> bytes:
    """`peek`, once there are more than `than` bytes (or the peer has ended: then no more than before)."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, max(1, min(than + 1, size)))
    try:
        await readable(sock)
        return sock.recv(size, socket.MSG_PEEK)
    except BlockingIOError:
        return b""
    finally:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


def original_destination(sock: socket.socket) -> tuple[str, int]:
    """Where a redirected connection was going. Raises OSError."""
    raw = sock.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16)
    port, address = struct.unpack("!2xH4s8x", raw)
    return str(ipaddress.IPv4Address(address)), port


def reset(sock: socket.socket) -> None:
    """Close at once; a TCP peer gets a RST."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)
    sock.close()


def no_delay(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # not a TCP socket
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
