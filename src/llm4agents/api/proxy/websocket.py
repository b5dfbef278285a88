"""A WebSocket of the client's, and one of ours to the guest's port, joined message by message.

Pings are answered on each side by whoever speaks there; compression is the client's and this server's matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

from starlette.types import Receive, Scope, Send
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.typing import Subprotocol
from websockets.uri import WebSocketURI

from llm4agents import limits
from llm4agents.api.proxy import heads
from llm4agents.api.proxy.address import Target
from llm4agents.engine.dialing import Dialer, GuestSocket
from llm4agents.errors import GuestError, LLM4AgentsError, PortError

BAD_GATEWAY, TOO_BIG, GOING_AWAY, NO_STATUS = 1014, 1009, 1001, 1005
_PIECE = 1_024
CLOSE_S = 2.0
"""How long the guest has to answer a close."""
_QUIET = logging.getLogger("llm4agents.proxy.websocket")
_QUIET.disabled = True  # what a guest gets wrong is not for this server's log


async def bridge(dialer: Dialer, target: Target, scope: Scope, receive: Receive, send: Send) -> None:
    """Until either side closes. Raises, before the handshake is accepted, PortRefusedError and PortError."""
    query = scope["query_string"].decode("latin-1")
    uri = WebSocketURI(False, "localhost", target.port, (target.path or b"/").decode("latin-1"), query)
    wanted = [Subprotocol(name) for name in scope.get("subprotocols", ())]
    protocol = ClientProtocol(
        uri, subprotocols=wanted or None, max_size=limits.WEBSOCKET_MESSAGE_BYTES_MAX, logger=_QUIET
    )
    request = protocol.connect()
    for name, value in heads.request(scope, target):
        if name != b"host":
            request.headers[name.decode("latin-1")] = value.decode("latin-1")
    protocol.send_request(request)
    socket = await dialer.dial(target.port, b"".join(protocol.data_to_send()))
    async with socket:
        link = _Link(protocol, socket, target.port)
        try:
            answer = await link.handshake()
        except GuestError as error:
            raise PortError(f"port {target.port} of the sandbox: {error.message}") from error
        fields = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in answer.headers.raw_items()]
        fields = heads.answer(fields, scope, target)
        if answer.status_code != 101:
            await _refused(answer, fields, send)
            return
        accepted = {"type": "websocket.accept", "subprotocol": protocol.subprotocol, "headers": fields}
        await send(accepted)
        await link.run(receive, send)


async def _refused(answer: Response, fields: heads.Fields, send: Send) -> None:
    """The guest answered as to any request: so does this."""
    status = answer.status_code if 200 <= answer.status_code <= 599 else 502
    fields = [field for field in fields if field[0] != b"content-length"]
    await send({"type": "websocket.http.response.start", "status": status, "headers": fields})
    await send({"type": "websocket.http.response.body", "body": bytes(answer.body or b"")})


class _Link:
    """The guest's side, and the two directions between."""

    def __init__(self, protocol: ClientProtocol, socket: GuestSocket, port: int) -> None:
        self._protocol, self._socket, self._port = protocol, socket, port
        self._writing = asyncio.Lock()
        self._read = memoryview(b"")
        """Bytes that wait for their turn."""
        self._parts: list[bytes] = []
        self._text = False

    async def _flush(self) -> None:
        async with self._writing:
            for piece in self._protocol.data_to_send():
                if piece:
                    await self._socket.write(piece)
                else:
                    await self._socket.close_write()

    async def _events(self) -> list[Any]:
        """What the next bytes of the guest come to; of many bytes a few, since each two can be a message."""
        if not self._read:
            self._read = memoryview(await self._socket.read())
        if self._read:
            piece, self._read = self._read[:_PIECE], self._read[_PIECE:]
            self._protocol.receive_data(bytes(piece))
        else:
            self._protocol.receive_eof()
        return self._protocol.events_received()

    async def handshake(self) -> Response:
        while True:
            for event in await self._events():
                if isinstance(event, Response):
                    failed = self._protocol.handshake_exc
                    if failed is not None and not isinstance(failed, InvalidStatus):
                        raise PortError(f"port {self._port} of the sandbox: {failed}")
                    return event
            if self._protocol.handshake_exc is not None:
                raise PortError(
                    f"port {self._port} of the sandbox: {self._protocol.handshake_exc}",
                    hint="is it a WebSocket server?",
                )

    async def run(self, receive: Receive, send: Send) -> None:
        client = asyncio.create_task(self._from_client(receive))
        guest = asyncio.create_task(self._from_guest(send))
        try:
            await asyncio.wait({client, guest}, return_when=asyncio.FIRST_COMPLETED)
            if not guest.done():
                await asyncio.wait({guest}, timeout=CLOSE_S)
        finally:
            for task in (client, guest):
                task.cancel()
            done = await asyncio.gather(client, guest, return_exceptions=True)
        lost = next((error for error in done if isinstance(error, LLM4AgentsError)), None)
        code, reason = self._ending()
        if client.cancelled() or done[0] is not None:  # else it was the client that closed
            await send({"type": "websocket.close", "code": code, "reason": reason})
        if lost is not None and not isinstance(lost, GuestError):
            raise lost

    def _ending(self) -> tuple[int, str]:
        """The code and words the client is to hear."""
        closed = self._protocol.close_rcvd
        if closed is not None:
            if closed.code == NO_STATUS:
                return 1000, ""
            return closed.code, closed.reason
        if self._protocol.close_sent is not None and self._protocol.close_sent.code == TOO_BIG:
            return (
                TOO_BIG,
                f"a message of the guest has more than {limits.WEBSOCKET_MESSAGE_BYTES_MAX} bytes, or too many frames",
            )
        return BAD_GATEWAY, "the guest's connection broke off"

    async def _from_client(self, receive: Receive) -> None:
        while (message := await receive())["type"] == "websocket.receive":
            if self._protocol.state is not State.OPEN:
                continue
            if (text := message.get("text")) is not None:
                self._protocol.send_text(text.encode())
            else:
                self._protocol.send_binary(message["bytes"])
            await self._flush()
        if message["type"] == "websocket.disconnect" and self._protocol.state is State.OPEN:
            code = message.get("code", NO_STATUS)
            if code in (NO_STATUS, None):
                self._protocol.send_close()
            elif code == 1006:
                self._protocol.send_close(GOING_AWAY)
            else:
                self._protocol.send_close(code, message.get("reason") or "")
            with contextlib.suppress(LLM4AgentsError):
                await self._flush()

    async def _from_guest(self, send: Send) -> None:
        began = time.monotonic()
        while self._protocol.state is not State.CLOSED:
            if time.monotonic() - began > limits.LISTEN_SLICE_S:
                await asyncio.sleep(limits.LISTEN_SLICE_S if self._read else 0)
                began = time.monotonic()
            events = await self._events()
            for event in events:
                if isinstance(event, Frame) and (message := self._joined(event)) is not None:
                    await send(message)
            if len(self._parts) > limits.WEBSOCKET_FRAMES_MAX:
                self._protocol.fail(TOO_BIG, "too many frames in a message")
                self._parts = []
                await self._flush()
                return
            await self._flush()
            if self._protocol.close_rcvd is not None or self._protocol.parser_exc is not None:
                return

    def _joined(self, frame: Frame) -> dict[str, Any] | None:
        """The message that ends with this frame. Their sizes together are bounded by the protocol's `max_size`."""
        if frame.opcode not in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            return None
        if frame.opcode is not Opcode.CONT:
            self._text = frame.opcode is Opcode.TEXT
        self._parts.append(bytes(frame.data))
        if not frame.fin:
            return None
        data, self._parts = b"".join(self._parts), []
        if self._text:
            return {"type": "websocket.send", "text": data.decode(errors="replace")}
        return {"type": "websocket.send", "bytes": data}
