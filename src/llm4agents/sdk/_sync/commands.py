# Generated from _async/commands.py by scripts/unasync.py: change that file, then run the script.
"""A running command of `sandbox.exec_stream`."""

from __future__ import annotations

from typing import Any

from llm4agents.errors import InvalidRequestError
from llm4agents.sdk import _process, results
from llm4agents.sdk._sync.transport import EventStream


class ExecStream:
    """A running command: an iterator of its output as it comes."""

    def __init__(self, events: EventStream) -> None:
        self._events = events
        self.pid: int | None = None
        """In the guest."""
        self.id: str | None = None
        """For `processes.connect`."""
        self.offset = 0
        """Of the next byte in all that the command has said."""
        self.end: dict[str, Any] | None = None

    def __enter__(self) -> ExecStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> ExecStream:
        return self

    def _start(self) -> None:
        """The first event says that the program runs; if it could not be, this raises."""
        started = self._events.__next__()
        self.pid, self.id = started.get("pid"), started.get("id")

    def __next__(self) -> results.Output:
        while True:
            event = self._events.__next__()
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

    def close(self) -> None:
        """Lets go of the command, or kills it if it was started with `on_disconnect="kill"`."""
        self._events.close()
