"""A WebSocket of the client's as a TCP connection to a port: bytes both ways in binary messages.

A text message `{"eof": true}` says, in either direction, that no more bytes come (a half-close). When both
directions have ended the WebSocket is closed with 1000; when the guest broke the connection, with 1014.
"""

from __future__ import annotations

import asyncio
import json

from starlette.types import Receive, Send

from llm4agents.engine.dialing import Dialer, GuestSocket
from llm4agents.errors import ConflictError, GuestError, InvalidRequestError

DONE, BROKEN = 1000, 1014


async def tunnel(dialer: Dialer, port: int, receive: Receive, send: Send) -> None:
    """Until both directions have ended, or either side is gone. Raises PortRefusedError before it is accepted."""
    async with await dialer.dial(port) as socket:
        await send({"type": "websocket.accept"})
        await _Tunnel(socket, receive, send).run()


class _Tunnel:
    def __init__(self, socket: GuestSocket, receive: Receive, send: Send) -> None:
        self._socket, self._receive, self._send = socket, receive, send
        self._client_ended = self._guest_ended = False

    async def run(self) -> None:
        out = asyncio.create_task(self._to_client())
        into = asyncio.create_task(self._to_guest())
        try:
            while True:
                running = [task for task in (out, into) if not task.done()]
                if into.done() or (out.done() and (out.exception() or self._client_ended)):
                    break
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        finally:
            out.cancel()
            into.cancel()
            errors = await asyncio.gather(out, into, return_exceptions=True)
        broken = next((error for error in errors if isinstance(error, GuestError | ConflictError)), None)
        other = next(
            (error for error in errors if isinstance(error, Exception) and error is not broken), None
        )
        if other is not None:
            raise other
        if broken is not None:
            reason = f"the guest broke the connection: {broken.message}"[:120]
            await self._send({"type": "websocket.close", "code": BROKEN, "reason": reason})
        elif self._client_ended and self._guest_ended:
            await self._send({"type": "websocket.close", "code": DONE})

    async def _to_client(self) -> None:
        while data := await self._socket.read():
            await self._send({"type": "websocket.send", "bytes": data})
        self._guest_ended = True
        await self._send({"type": "websocket.send", "text": '{"eof":true}'})

    async def _to_guest(self) -> None:
        """Returns when the client is gone, or has ended after the guest."""
        while (message := await self._receive())["type"] != "websocket.disconnect":
            if message["type"] != "websocket.receive":
                continue
            if data := message.get("bytes"):
                if self._client_ended:
                    raise InvalidRequestError("bytes after the end")
                await self._socket.write(data)
            elif (text := message.get("text")) is not None:
                _check_eof(text)
                self._client_ended = True
                await self._socket.close_write()
                if self._guest_ended:
                    return


def _check_eof(text: str) -> None:
    try:
        if json.loads(text) == {"eof": True}:
            return
    except ValueError:
        pass
    raise InvalidRequestError('text in a tunnel is {"eof": true}', hint="bytes go in binary messages")
