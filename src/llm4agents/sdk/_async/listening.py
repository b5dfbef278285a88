"""What listens in a sandbox: the list of its TCP ports, and the wait for one."""

from __future__ import annotations

from llm4agents import limits
from llm4agents.errors import InvalidRequestError
from llm4agents.sdk import _wire, results
from llm4agents.sdk._async.transport import AsyncTransport


class AsyncListening:
    """The part of `sandbox.ports` that looks at the guest."""

    def __init__(self, transport: AsyncTransport, sandbox: str) -> None:
        self._transport, self._sandbox = transport, sandbox
        self._path = f"/v1/sandboxes/{sandbox}/ports"

    async def list(self) -> list[results.Port]:
        """TCP ports on which something in the sandbox listens, lowest first; those of 127.0.0.1 too."""
        body = await self._transport.json("GET", self._path, sandbox=self._sandbox)
        return [
            results.Port(int(item["port"]), str(item.get("address") or "")) for item in body.get("data") or ()
        ]

    async def wait(self, port: int, timeout: float = limits.EXEC_TIMEOUT_S) -> results.Port:
        """Waits until something listens on `port`. Raises TimedOutError after `timeout` seconds."""
        if not 1 <= port <= 65_535:
            raise InvalidRequestError(f"{port} is not a TCP port")
        body = await self._transport.json(
            "GET",
            f"{self._path}/{port}/wait",
            params={"timeout_s": timeout},
            wait_s=timeout + _wire.ANSWER_SLACK_S,
            sandbox=self._sandbox,
        )
        return results.Port(int(body["port"]), str(body.get("address") or ""))
