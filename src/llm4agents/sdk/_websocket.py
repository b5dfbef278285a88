"""WebSockets to the server, asynchronous and synchronous: the same class twice, and errors mapped once.

scripts/unasync.py replaces the first name by the second. Not here: what is said over them.
"""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from llm4agents.config import Settings
from llm4agents.errors import (
    ConflictError,
    ConnectionLostError,
    LLM4AgentsError,
    ServerUnavailableError,
    TimedOutError,
)
from llm4agents.sdk import _wire

if TYPE_CHECKING:
    import ssl

    from websockets.asyncio.client import ClientConnection as AsyncConnection
    from websockets.sync.client import ClientConnection as Connection

_OPEN_S: Final = 10.0
_CLOSE_S: Final = 2.0
_MESSAGE_BYTES_MAX: Final = 4_194_304
_QUEUE: Final = 4
"""Messages that wait for a slow reader; behind them the server, and the process, wait."""
PIECE_BYTES: Final = 262_144
"""What is sent goes in messages of this at most: the server takes no larger than four times it."""


def _options(headers: list[tuple[str, str]]) -> dict[str, Any]:
    # No pings: whoever does not read is slow, not gone. No compression: it is one machine most often.
    return {
        "additional_headers": headers,
        "open_timeout": _OPEN_S,
        "close_timeout": _CLOSE_S,
        "ping_interval": None,
        "compression": None,
        "max_size": _MESSAGE_BYTES_MAX,
        "max_queue": _QUEUE,
        "proxy": None,
        "user_agent_header": None,  # it is among the headers
    }


def _secured(uri: str, tls: ssl.SSLContext | None) -> dict[str, Any]:
    return {"ssl": tls} if tls is not None and uri.startswith("wss:") else {}


def _uri(settings: Settings, target: str) -> str:
    if settings.url is None:
        return f"ws://llm4agents{target}"
    return "ws" + settings.url.rstrip("/").removeprefix("http") + target


def _failed(error: Exception, settings: Settings) -> LLM4AgentsError:
    """What a connection that was not made means."""
    from websockets.exceptions import InvalidStatus

    if isinstance(error, InvalidStatus):
        body = error.response.body
        return _wire.error_of(error.response.status_code, bytes(body or b""))
    where = settings.url or str(settings.socket_path)
    hint = _wire.unreachable_hint(where, error) if settings.url else f"see {settings.server_log}"
    return ServerUnavailableError(f"no server answers at {where}: {error}", hint=hint)


def _ended(error: Exception) -> LLM4AgentsError:
    from websockets.exceptions import ConnectionClosedOK

    if isinstance(error, ConnectionClosedOK):
        return ConflictError("it has ended and takes nothing more")
    return ConnectionLostError(
        f"the server went away in mid-call: {error or type(error).__name__}",
        hint="what runs in the sandbox goes on; attach again",
    )


class AsyncWebSocket:
    """One connection; a context manager. `receive` gives None when the server has closed it in order."""

    def __init__(self, connection: AsyncConnection, stack: contextlib.AsyncExitStack) -> None:
        self._connection, self._stack = connection, stack

    @classmethod
    async def open(
        cls,
        settings: Settings,
        target: str,
        headers: list[tuple[str, str]],
        tls: ssl.SSLContext | None = None,
    ) -> AsyncWebSocket:
        from websockets.asyncio.client import connect, unix_connect
        from websockets.exceptions import WebSocketException

        stack, uri = contextlib.AsyncExitStack(), _uri(settings, target)
        try:
            if settings.url is None:
                making = unix_connect(str(settings.socket_path), uri, **_options(headers))
            else:
                making = connect(uri, **_options(headers), **_secured(uri, tls))
            return cls(await stack.enter_async_context(making), stack)
        except (OSError, TimeoutError, WebSocketException) as error:
            raise _failed(error, settings) from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def send(self, message: bytes | str) -> None:
        """Raises ConflictError when the other side has ended, ConnectionLostError when it has gone."""
        from websockets.exceptions import ConnectionClosed

        try:
            await self._connection.send(message)
        except ConnectionClosed as error:
            raise _ended(error) from error

    async def receive(self, timeout: float | None = None) -> bytes | str | None:
        """The next message. Raises TimedOutError, ConnectionLostError."""
        import asyncio

        from websockets.exceptions import ConnectionClosed, ConnectionClosedOK

        try:
            async with asyncio.timeout(timeout):
                return await self._connection.recv()
        except ConnectionClosedOK:
            return None
        except ConnectionClosed as error:
            raise _ended(error) from error
        except TimeoutError:
            raise TimedOutError(f"nothing came within {timeout:g} s") from None

    async def aclose(self) -> None:
        await self._stack.aclose()


class WebSocket:
    """As `AsyncWebSocket`, for threads. `close` may be called from another one."""

    def __init__(self, connection: Connection, stack: contextlib.ExitStack) -> None:
        self._connection, self._stack = connection, stack

    @classmethod
    def open(
        cls,
        settings: Settings,
        target: str,
        headers: list[tuple[str, str]],
        tls: ssl.SSLContext | None = None,
    ) -> WebSocket:
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect, unix_connect

        stack, uri = contextlib.ExitStack(), _uri(settings, target)
        try:
            if settings.url is None:
                making = unix_connect(str(settings.socket_path), uri, **_options(headers))
            else:
                making = connect(uri, **_options(headers), **_secured(uri, tls))
            return cls(stack.enter_context(making), stack)
        except (OSError, TimeoutError, WebSocketException) as error:
            raise _failed(error, settings) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def send(self, message: bytes | str) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            self._connection.send(message)
        except ConnectionClosed as error:
            raise _ended(error) from error

    def receive(self, timeout: float | None = None) -> bytes | str | None:
        from websockets.exceptions import ConnectionClosed, ConnectionClosedOK

        try:
            return self._connection.recv(timeout)
        except ConnectionClosedOK:
            return None
        except ConnectionClosed as error:
            raise _ended(error) from error
        except TimeoutError:
            raise TimedOutError(f"nothing came within {timeout:g} s") from None

    def close(self) -> None:
        self._stack.close()
