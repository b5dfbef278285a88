"""TCP connections to ports inside a running sandbox: where a server listens there, and how many there may be.

Not here: what goes through them (`api.proxy`), which ports listen (`processes`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from llm4agents import limits
from llm4agents.errors import (
    CapacityError,
    GuestError,
    LLM4AgentsError,
    PortError,
    PortRefusedError,
)
from llm4agents.guest.handles import GuestSocket
from llm4agents.guest.verbs import Agent

__all__ = ["Agent", "Dialer", "GuestSocket"]

_HOSTS = ("127.0.0.1", "::1")
"""Where a server of the guest may listen alone: Node's `localhost` is the second."""
_REMEMBERED_MAX = 1_024


class Dialer:
    """The connections to the ports of one guest."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.open = 0
        """Connections under way, of any kind."""
        self._hosts: dict[int, str] = {}

    @property
    def ended(self) -> asyncio.Future[LLM4AgentsError | None]:
        """Done when this guest cannot be reached any more, and every connection to it is gone."""
        return self.agent.session.closed

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Around whatever is connected to a port. Raises CapacityError past PORT_CONNECTIONS_MAX."""
        if self.open >= limits.PORT_CONNECTIONS_MAX:
            raise CapacityError(
                f"{self.open} connections to ports of this sandbox are open, the most there can be",
                hint="close some, then try again",
            )
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    async def dial(self, port: int, first: bytes = b"") -> GuestSocket:
        """A connection to a port, also one bound to a loopback address alone; `first` is sent with the request.

        Raises PortRefusedError when nothing listens, PortError when it cannot be reached for another reason.
        """
        known = self._hosts.get(port)
        hosts = _HOSTS if known is None else (known, *(host for host in _HOSTS if host != known))
        for host in hosts:
            try:
                socket = await self.agent.connect(port, host=host, first=first)
            except GuestError as error:
                # Whatever else the second address says, the first one's refusal is the answer.
                if error.details.get("code") != "refused" and host == hosts[0]:
                    raise PortError(f"port {port} of the sandbox: {error.message}") from error
                continue
            if len(self._hosts) < _REMEMBERED_MAX:
                self._hosts[port] = host
            return socket
        raise PortRefusedError(
            f"nothing listens on port {port} in the sandbox",
            hint="start the server in it, or wait until it listens",
            port=port,
        )
