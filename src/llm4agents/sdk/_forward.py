"""A local port that leads to a port of a sandbox: each connection is a WebSocket tunnel to the server.

It runs in a thread with an event loop of its own, for both clients alike: a forward serves while its owner
computes. Not here: the public handle (`ports`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
import struct
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llm4agents import __version__
from llm4agents.config import Settings
from llm4agents.errors import (
    ConflictError,
    ConnectionLostError,
    InvalidRequestError,
    LLM4AgentsError,
    ServerUnavailableError,
)
from llm4agents.sdk import _local, _wire
from llm4agents.sdk._runtime import Trust

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

HOST = "127.0.0.1"
_CHUNK_BYTES = 65_536
_OPEN_TIMEOUT_S = 60.0
_EOF = '{"eof":true}'
_DONE = 1000

OnError = Callable[[LLM4AgentsError], Any]


class Forwarding:
    """`open` it, use `local`, `close` it. `on_error` is told, in the thread, why a connection was refused."""

    def __init__(
        self, settings: Settings, sandbox: str, port: int, local: int, on_error: OnError | None
    ) -> None:
        for number, least in ((port, 1), (local, 0)):
            if not least <= number <= 65_535:
                raise InvalidRequestError(f"{number} is not a TCP port")
        self.local = local
        self._settings, self._sandbox, self._port = settings, sandbox, port
        self._on_error = on_error
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    def open(self) -> None:
        """Listen. Raises ConflictError when the local port is taken."""
        listener = self._listen()
        self.local = int(listener.getsockname()[1])
        ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(listener, ready)),
            name=f"llm4agents-forward-{self._port}",
            daemon=True,
        )
        self._thread.start()
        ready.wait()

    def close(self) -> None:
        """Stop listening and close what goes through. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None or self._loop is None or self._stop is None:
            return
        with contextlib.suppress(RuntimeError):  # its loop has ended
            self._loop.call_soon_threadsafe(self._stop.set)
        thread.join()

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((HOST, self.local))
            listener.listen(128)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                raise ConflictError(
                    f"port {self.local} of this machine cannot be listened on: {error.strerror}",
                    hint="choose another, or 0 for any that is free",
                ) from error
            raise
        return listener

    async def _serve(self, listener: socket.socket, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        connections: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._connection(reader, writer))
            connections.add(task)
            task.add_done_callback(connections.discard)

        server = await asyncio.start_server(accept, sock=listener, limit=_CHUNK_BYTES)
        ready.set()
        await self._stop.wait()
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        whole = False
        try:
            async with await self._dial() as tunnel:
                whole = await _relay(tunnel, reader, writer)
        except LLM4AgentsError as error:
            if self._on_error is not None:
                self._on_error(_wire.named(error, self._sandbox))
        finally:
            if not whole:
                # What the connection stands for was refused or broken, which a mere end would hide.
                with contextlib.suppress(OSError):
                    writer.get_extra_info("socket").setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                    )
                writer.transport.abort()
            writer.close()

    async def _dial(self) -> ClientConnection:
        try:
            return await self._connect()
        except OSError as error:
            if self._settings.url is not None or isinstance(error, LLM4AgentsError):
                raise _unavailable(self._settings, error) from error
        # The local server has left meanwhile: find or start its successor.
        _local.forget(self._settings)
        await asyncio.to_thread(_local.ensure, self._settings)
        try:
            return await self._connect()
        except OSError as error:
            raise _unavailable(self._settings, error) from error

    async def _connect(self) -> ClientConnection:
        """Raises OSError when no server answers, and what the server says of the port."""
        from websockets.asyncio.client import connect, unix_connect
        from websockets.exceptions import InvalidStatus, WebSocketException

        base = (self._settings.url or "http://llm4agents").rstrip("/")
        uri = f"ws{base.removeprefix('http')}/v1/sandboxes/{self._sandbox}/ports/{self._port}/tcp"
        options: dict[str, Any] = {
            "compression": None,
            "ping_interval": None,  # whoever does not read for a while is not dead
            "open_timeout": _OPEN_TIMEOUT_S,
            "user_agent_header": f"llm4agents/{__version__}",
        }
        try:
            if self._settings.url is None:
                return await unix_connect(str(self._settings.socket_path), uri, **options)
            if self._settings.api_key:
                options["additional_headers"] = {"authorization": f"Bearer {self._settings.api_key}"}
            if uri.startswith("wss:") and (tls := Trust(self._settings.ca_file).context()) is not None:
                options["ssl"] = tls
            return await connect(uri, **options)
        except InvalidStatus as error:
            answer = error.response
            raise _wire.error_of(answer.status_code, bytes(answer.body or b"")) from error
        except WebSocketException as error:
            raise ConnectionLostError(f"the server did not open the tunnel: {error}") from error


def _unavailable(settings: Settings, error: OSError) -> LLM4AgentsError:
    if isinstance(error, LLM4AgentsError):
        return error
    where = settings.url or str(settings.socket_path)
    return ServerUnavailableError(f"no server answers at {where}: {error}", hint=f"see {settings.server_log}")


async def _relay(
    tunnel: ClientConnection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> bool:
    """Both directions until both have ended; False when either was broken."""
    from websockets.exceptions import ConnectionClosed

    async def out() -> None:
        while data := await reader.read(_CHUNK_BYTES):
            await tunnel.send(data)
        await tunnel.send(_EOF)

    async def back() -> None:
        async for message in tunnel:
            if isinstance(message, bytes):
                writer.write(message)
                await writer.drain()
            elif json.loads(message) == {"eof": True}:
                writer.write_eof()

    both = [sending, receiving] = asyncio.create_task(out()), asyncio.create_task(back())
    try:
        # Receiving ends with the tunnel; sending with an error only when this side is gone.
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not receiving.done() and sending.exception() is None:
            await receiving
        return tunnel.close_code == _DONE
    except ConnectionClosed:
        return False
    finally:
        for task in both:
            task.cancel()
        for error in await asyncio.gather(*both, return_exceptions=True):
            if isinstance(error, Exception) and not isinstance(error, OSError | ConnectionClosed):
                raise error
