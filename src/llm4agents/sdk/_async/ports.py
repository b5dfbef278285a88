"""TCP ports of a sandbox: their URLs, and local ports that lead to them."""

from __future__ import annotations

from llm4agents import limits
from llm4agents.errors import InvalidRequestError
from llm4agents.sdk._async.listening import AsyncListening
from llm4agents.sdk._forward import HOST, Forwarding, OnError
from llm4agents.sdk._runtime import async_blocking


class AsyncPorts(AsyncListening):
    """`sandbox.ports`. A port that listens on the guest's 127.0.0.1 alone is reached like any other."""

    async def url(self, port: int, *, path: str = "/", expires: float | None = limits.PORT_URL_S) -> str:
        """The URL of a port, which opens it to whoever has it, for `expires` seconds (30 days at most).

        `expires=None`: without that, for a sandbox that is public, or for clients that have its token
        (`sandbox.traffic().token`). Raises ConflictError when the server has no listener but its unix socket: use
        `forward`, or `llm4agents server run --listen`.
        """
        if not 1 <= port <= 65_535:
            raise InvalidRequestError(f"{port} is not a TCP port")
        body = {"port": port, "path": path, "expires_s": expires}
        where = f"/v1/sandboxes/{self._sandbox}/traffic/urls"
        answer = await self._transport.json("POST", where, body, sandbox=self._sandbox)
        return str(answer["url"])

    async def forward(self, port: int, local: int = 0, *, on_error: OnError | None = None) -> AsyncForward:
        """A port of this machine (127.0.0.1) that leads to `port` of the sandbox; `local` 0: any free one.

        Use it as a context manager. A connection when nothing listens in the sandbox is reset, and
        `on_error` is called, from another thread, with the PortRefusedError. Connections hold the sandbox
        open while they are. Raises ConflictError when the local port is taken.
        """
        await self._transport.server()
        forwarding = Forwarding(self._transport.settings, self._sandbox, port, local, on_error)
        await async_blocking(forwarding.open)
        return AsyncForward(forwarding, port)


class AsyncForward:
    """A local port that leads to a port of a sandbox, until it is closed."""

    def __init__(self, forwarding: Forwarding, port: int) -> None:
        self._forwarding = forwarding
        self.port = port
        """In the sandbox."""

    @property
    def local(self) -> int:
        """The port of this machine, on 127.0.0.1."""
        return self._forwarding.local

    @property
    def url(self) -> str:
        """For a browser on this machine."""
        return f"http://{HOST}:{self.local}/"

    async def __aenter__(self) -> AsyncForward:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stops listening and closes what goes through. Idempotent."""
        await async_blocking(self._forwarding.close)
