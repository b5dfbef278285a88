# Generated from _async/ports.py by scripts/unasync.py: change that file, then run the script.
"""TCP ports of a sandbox: their URLs, and local ports that lead to them."""

from __future__ import annotations

from llm4agents.errors import InvalidRequestError
from llm4agents.sdk._forward import HOST, Forwarding, OnError
from llm4agents.sdk._runtime import blocking
from llm4agents.sdk._sync.listening import Listening


class Ports(Listening):
    """`sandbox.ports`. A port that listens on the guest's 127.0.0.1 alone is reached like any other."""

    def url(self, port: int) -> str:
        """Where a remote server (`LLM4AGENTS_URL`) serves that port over HTTP and WebSocket.

        Raises InvalidRequestError for the local server, which is behind a unix socket: use `forward`.
        """
        if not 1 <= port <= 65_535:
            raise InvalidRequestError(f"{port} is not a TCP port")
        if self._transport.settings.url is None:
            raise InvalidRequestError(
                "the local server has no URL: it listens on a unix socket",
                hint=f"forward({port}) gives a port of this machine and its URL",
            )
        return f"{self._transport.settings.url.rstrip('/')}{self._path}/{port}/"

    def forward(self, port: int, local: int = 0, *, on_error: OnError | None = None) -> Forward:
        """A port of this machine (127.0.0.1) that leads to `port` of the sandbox; `local` 0: any free one.

        Use it as a context manager. A connection when nothing listens in the sandbox is reset, and
        `on_error` is called, from another thread, with the PortRefusedError. Connections hold the sandbox
        open while they are. Raises ConflictError when the local port is taken.
        """
        self._transport.server()
        forwarding = Forwarding(self._transport.settings, self._sandbox, port, local, on_error)
        blocking(forwarding.open)
        return Forward(forwarding, port)


class Forward:
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

    def __enter__(self) -> Forward:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops listening and closes what goes through. Idempotent."""
        blocking(self._forwarding.close)
