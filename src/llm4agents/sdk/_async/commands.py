"""A running command of `sandbox.exec_stream`."""

from __future__ import annotations

from typing import Any

from llm4agents.errors import InvalidRequestError
from llm4agents.sdk import _process, results
from llm4agents.sdk._async.transport import AsyncEventStream


class AsyncExecStream:
    """A running command: an iterator of its output as it comes."""

    def __init__(self, events: AsyncEventStream) -> None:
        self._events = events
        self.pid: int | None = None
        """In the guest."""
        self.id: str | None = None
        """For `processes.connect`."""
        self.offset = 0
        """Of the next byte in all that the command has said."""
        self.end: dict[str, Any] | None = None

    async def __aenter__(self) -> AsyncExecStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __aiter__(self) -> AsyncExecStream:
        return self

    async def _start(self) -> None:
        """The first event says that the program runs; if it could not be, this raises."""
        started = await self._events.__anext__()
        self.pid, self.id = started.get("pid"), started.get("id")

    async def __anext__(self) -> results.Output:
        while True:
            event = await self._events.__anext__()
            if (output := _process.output_of(event)) is not None:
                self.offset = (output.offset or 0) + len(output.data)
                return output
            if event.get("type") == "exit":
                self.end = event

    @property
    def result(self) -> results.ExecResult:
        """How it ended (without the output, which was yours). Raises InvalidRequestError before the end."""
        if self.end is None:
            raise InvalidRequestError("the command has not ended", hint="iterate to the end first")
        return results.exec_end(self.end, b"", b"")

    async def aclose(self) -> None:
        """Lets go of the command, or kills it if it was started with `on_disconnect="kill"`."""
        await self._events.aclose()
