"""Where the asynchronous and the synchronous client differ: each thing twice, under two names.

scripts/unasync.py replaces the first name of each pair by the second. Nothing else may differ.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from llm4agents.errors import InvalidRequestError

if TYPE_CHECKING:
    import asyncio
    import ssl

    import httpcore

P = ParamSpec("P")
T = TypeVar("T")

CONNECTIONS_MAX = 1_000
CONNECTIONS_IDLE_MAX = 32
IDLE_EXPIRY_S = 30.0
"""Less than the server's 75 s, so that a connection is rarely found closed when it is wanted."""


class Trust:
    """Whose certificates a client believes: its system's (and SSL_CERT_FILE's), or beside these `ca_file`'s."""

    def __init__(self, ca_file: Path | None) -> None:
        self._ca_file = ca_file
        self._context: ssl.SSLContext | None = None

    def context(self) -> ssl.SSLContext | None:
        """None: what the library takes by itself. Raises InvalidRequestError for a file that is none."""
        if self._ca_file is None:
            return None
        if self._context is None:
            import ssl

            made = ssl.create_default_context()
            try:
                made.load_verify_locations(self._ca_file)
            except (OSError, ssl.SSLError) as error:
                raise InvalidRequestError(
                    f"LLM4AGENTS_CA_FILE={str(self._ca_file)!r} cannot be used: {error}",
                    hint="a file of certificates (PEM); on the server: llm4agents server ca --pem",
                ) from error
            self._context = made
        return self._context


class AsyncPools:
    """One pool per event loop and process; closed when the last handle that used it is let go.

    A connection belongs to the loop it was opened in, so one that outlived its loop would be a leak.
    """

    def __init__(self, socket: str | None, trust: Trust | None = None) -> None:
        self._socket, self._trust = socket, trust or Trust(None)
        self._pools: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[int, httpcore.AsyncConnectionPool]
        ] = weakref.WeakKeyDictionary()
        self._users: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, int] = weakref.WeakKeyDictionary()

    def get(self) -> httpcore.AsyncConnectionPool:
        import httpcore

        loop = _loop()
        held = self._pools.get(loop)
        if held is None or held[0] != os.getpid():
            pool = httpcore.AsyncConnectionPool(
                ssl_context=self._trust.context(),
                uds=self._socket,
                max_connections=CONNECTIONS_MAX,
                max_keepalive_connections=CONNECTIONS_IDLE_MAX,
                keepalive_expiry=IDLE_EXPIRY_S,
            )
            held = self._pools[loop] = (os.getpid(), pool)
        return held[1]

    def retain(self) -> None:
        loop = _loop()
        self._users[loop] = self._users.get(loop, 0) + 1

    async def release(self) -> None:
        loop = _loop()
        self._users[loop] = self._users.get(loop, 1) - 1
        if self._users[loop] <= 0:
            self._users.pop(loop, None)
            held = self._pools.pop(loop, None)
            if held is not None and held[0] == os.getpid():
                await held[1].aclose()


class Pools:
    """One pool per process, for all its threads, kept until the process ends; a fork starts anew."""

    def __init__(self, socket: str | None, trust: Trust | None = None) -> None:
        self._socket, self._trust = socket, trust or Trust(None)
        self._pools: dict[int, httpcore.ConnectionPool] = {}
        weakref.finalize(self, _close, self._pools)  # at exit, too

    def get(self) -> httpcore.ConnectionPool:
        import httpcore

        held = self._pools.get(os.getpid())
        if held is None:
            made = httpcore.ConnectionPool(
                ssl_context=self._trust.context(),
                uds=self._socket,
                max_connections=CONNECTIONS_MAX,
                max_keepalive_connections=CONNECTIONS_IDLE_MAX,
                keepalive_expiry=IDLE_EXPIRY_S,
            )
            held = self._pools.setdefault(os.getpid(), made)
        return held

    def retain(self) -> None:
        pass

    def release(self) -> None:
        pass


def _close(pools: dict[int, httpcore.ConnectionPool]) -> None:
    for pid, pool in pools.items():
        if pid == os.getpid():
            with contextlib.suppress(Exception):
                pool.close()


def _loop() -> asyncio.AbstractEventLoop:
    import asyncio  # 40 ms that the synchronous client does not need

    return asyncio.get_running_loop()


async def async_blocking(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs what blocks (disk, the start of a server) in a thread."""
    import asyncio

    return await asyncio.to_thread(function, *args, **kwargs)


def blocking(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return function(*args, **kwargs)


async def async_call(callback: Callable[..., Any] | None, *args: Any) -> None:
    """Calls a user's callback, which may be a coroutine function."""
    if callback is not None:
        answer = callback(*args)
        if isinstance(answer, Awaitable):
            await answer


def call(callback: Callable[..., Any] | None, *args: Any) -> None:
    if callback is not None:
        callback(*args)


def async_begin(start: Callable[[], Awaitable[Any]]) -> None:
    """A constructor cannot wait: `AsyncSandbox(...)` is created on `async with`."""


def begin(start: Callable[[], Any]) -> None:
    """`Sandbox(...)` creates at once."""
    start()


async def async_chunks(data: Any, size: int) -> Any:
    """Pieces of bytes, of a binary file object, or of a (possibly asynchronous) iterable of bytes."""
    if hasattr(data, "__aiter__"):
        async for piece in data:
            yield piece
    elif hasattr(data, "read"):
        while piece := await async_blocking(data.read, size):
            yield piece
    else:
        for piece in _split(data, size):
            yield piece


def chunks(data: Any, size: int) -> Iterator[bytes]:
    if hasattr(data, "read"):
        while piece := data.read(size):
            yield piece
    else:
        yield from _split(data, size)


def _split(data: Any, size: int) -> Iterator[bytes]:
    if isinstance(data, bytes | bytearray | memoryview):
        view = memoryview(data).cast("B")
        for at in range(0, len(view), size):
            yield bytes(view[at : at + size])
    else:
        yield from data


class _Feed:
    """`read(n)` for a function that blocks: n bytes of the pieces `next_piece` gives, fewer only at their end."""

    def __init__(self, next_piece: Callable[[], bytes | None]) -> None:
        self._next, self._held, self._ended = next_piece, bytearray(), False

    def read(self, size: int) -> bytes:
        while len(self._held) < size and not self._ended:
            piece = self._next()
            if piece is None:
                self._ended = True
            else:
                self._held += piece
        taken = bytes(self._held[:size])
        del self._held[:size]
        return taken


async def async_fed(
    function: Callable[[Callable[[int], bytes]], T], stream: Any, progress: Callable[..., Any] | None
) -> T:
    """Runs `function(read)`, which blocks, in a thread that is fed with the bytes of `stream`.

    When this is cancelled, `read` raises in the thread, and its end is waited for.
    """
    import asyncio
    import concurrent.futures

    loop, got, stopped = asyncio.get_running_loop(), 0, False
    waiting: list[concurrent.futures.Future[bytes | None]] = []

    async def piece() -> bytes | None:
        nonlocal got
        try:
            found: bytes = await stream.__anext__()
        except StopAsyncIteration:
            return None
        got += len(found)
        await async_call(progress, got, None)
        return found

    def next_piece() -> bytes | None:
        future = asyncio.run_coroutine_threadsafe(piece(), loop)
        waiting[:] = [future]
        if stopped:
            future.cancel()
        return future.result()

    thread = asyncio.ensure_future(asyncio.to_thread(function, _Feed(next_piece).read))
    try:
        return await asyncio.shield(thread)
    finally:
        stopped = True
        for future in waiting:
            future.cancel()
        if not thread.done():
            await asyncio.wait({thread})


def fed(
    function: Callable[[Callable[[int], bytes]], T], stream: Any, progress: Callable[..., Any] | None
) -> T:
    """The same where nothing is asynchronous."""
    got = 0

    def next_piece() -> bytes | None:
        nonlocal got
        found: bytes | None = next(stream, None)
        if found is not None:
            got += len(found)
            call(progress, got, None)
        return found

    return function(_Feed(next_piece).read)
