"""The other end of a session, played by a test: the guest is the adversary, so this one says anything.

Not a stand-in for the agent: what the agent does is tested with the real one (test_agent.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import msgpack

from llm4agents.guest import frames
from llm4agents.guest.channel import Session
from llm4agents.guest.frames import FrameType

ACK = {"version": 1, "agent": "9.9", "boot_id": "b", "capabilities": ["x"], "streams_max": 1024}


class FakeGuest:
    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.nonce = b""
        self.tag = 0
        self._held = bytearray()
        self._loop = asyncio.get_running_loop()

    async def raw(self, data: bytes) -> None:
        await self._loop.sock_sendall(self.sock, data)

    async def take(self, count: int) -> bytes:
        while len(self._held) < count:
            data = await self._loop.sock_recv(self.sock, 262_144)
            if not data:
                raise EOFError
            self._held += data
        taken = bytes(self._held[:count])
        del self._held[:count]
        return taken

    async def frame(self) -> frames.Frame:
        length, session, stream, kind, flags, check = frames.HEADER.unpack(await self.take(16))
        assert check == frames.header_check(length, session, stream, kind, flags)
        assert session == self.tag
        payload = await self.take(length)
        assert struct.unpack("<I", await self.take(4))[0] == self.tag
        return frames.Frame(stream, kind, flags, payload)

    async def expect(self, kind: FrameType) -> frames.Frame:
        frame = await self.frame()
        assert frame.type == kind, frame
        return frame

    async def greeting(self) -> dict[str, Any]:
        magic = await self.take(8)
        assert magic == frames.MAGIC, magic
        self.nonce = await self.take(8)
        self.tag = frames.session_tag(self.nonce)
        hello: dict[str, Any] = msgpack.unpackb((await self.expect(FrameType.HELLO)).payload)
        return hello

    async def answer(self, ack: dict[str, Any] | None = None) -> None:
        await self.raw(frames.preamble(self.nonce))
        await self.send(0, FrameType.HELLO_ACK, ACK if ack is None else ack)

    async def send(self, stream: int, kind: int, body: Any = b"", flags: int = 0) -> None:
        payload = body if isinstance(body, bytes) else msgpack.packb(body)
        await self.raw(frames.encode(self.tag, stream, kind, flags, payload))

    async def opened(self, verb: str) -> tuple[int, dict[Any, Any]]:
        frame = await self.expect(FrameType.OPEN)
        body = msgpack.unpackb(frame.payload)
        assert body["verb"] == verb
        return frame.stream, body

    async def silence(self) -> bool:
        """Whether nothing more has been sent to us, the host's loop having had its turns."""
        for _ in range(20):
            await asyncio.sleep(0)
        if self._held:
            return False
        try:
            return not self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True


@contextlib.asynccontextmanager
async def pair() -> AsyncIterator[tuple[socket.socket, FakeGuest]]:
    """A host's socket and the fake guest at its other end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, FakeGuest(theirs)


@contextlib.asynccontextmanager
async def session() -> AsyncIterator[tuple[Session, FakeGuest]]:
    """An open session with a fake guest, closed at the end."""
    async with pair() as (ours, guest):
        opening = asyncio.create_task(Session.open(ours))
        await guest.greeting()
        await guest.answer()
        opened = await opening
        try:
            yield opened, guest
        finally:
            await opened.close()
