# Generated from _async/observe.py by scripts/unasync.py: change that file, then run the script.
"""What a server tells of its sandboxes: transitions as they happen, usage, logs, the figures of `top`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llm4agents.errors import ConnectionLostError, LLM4AgentsError
from llm4agents.sdk import _wire
from llm4agents.sdk._sync.network import Network
from llm4agents.sdk._sync.transport import Transport, transport


class Observer:
    """One server, looked at. As a context manager it lets go of its connections at the end."""

    def __init__(self) -> None:
        self._transport: Transport = transport()

    def __enter__(self) -> Observer:
        self._transport.retain()
        return self

    def __exit__(self, *_: object) -> None:
        self._transport.release()

    def events(
        self, after: int | None = None, *, sandbox: str | None = None, follow: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Transitions behind the cursor `after` (an event's `id`), oldest first; with `follow` then those that
        come, from now on when there is no `after`. A server that restarts meanwhile is no end of it."""
        path = "/v1/events"
        while not follow:
            params = {"after": after, "sandbox": sandbox, "limit": 1000}
            page = self._transport.json("GET", path, params=params)
            for event in page.get("data") or ():
                after = event["id"]
                yield event
            if page.get("next") is None:
                return
        while True:
            params = {"after": after, "sandbox": sandbox, "follow": True}
            lines = _wire.LineDecoder()
            stream = self._transport.stream("GET", path, params=params, wait_s=None)
            with stream:
                try:
                    for piece in stream:
                        for event in lines.feed(piece):
                            after = int(event["id"])
                            if event.get("type") != "cursor":
                                yield event
                except ConnectionLostError:
                    if after is None:
                        raise
            # The server has left: the next call finds, or starts, its successor.
            self._transport._left()

    def usage(self, sandbox: str | None = None, *, after: int = 0) -> Iterator[dict[str, Any]]:
        """Rows of usage, oldest first; durations in nanoseconds."""
        while True:
            params = {"after": after, "sandbox": sandbox, "limit": 1000}
            page = self._transport.json("GET", "/v1/usage", params=params)
            for row in page.get("data") or ():
                after = row["id"]
                yield row
            if page.get("next") is None:
                return

    def usage_totals(self, sandbox: str | None = None) -> list[dict[str, Any]]:
        """Sums per sandbox and state: `duration_ns`, `vcpu_ns`, `memory_mib_ns`."""
        params = {"sandbox": sandbox, "totals": True}
        return list((self._transport.json("GET", "/v1/usage", params=params)).get("data") or ())

    def top(self) -> dict[str, Any]:
        """`node` and, of each sandbox that has not ended, what it takes now (`data`)."""
        return self._transport.json("GET", "/v1/top")

    def jobs(self, state: str | None = None) -> list[dict[str, Any]]:
        """Jobs of every sandbox, newest first."""
        found: list[dict[str, Any]] = []
        after: str | None = None
        while True:
            params = {"state": state, "limit": 1000, "after": after}
            page = self._transport.json("GET", "/v1/jobs", params=params)
            found += page.get("data") or ()
            after = page.get("next")
            if not after:
                return found

    def network(self, sandbox: str) -> Network:
        """The network of a sandbox, also of one that has ended: its audit and what was captured are kept."""
        return Network(self._transport, sandbox)

    def logs(self, sandbox: str, *, follow: bool = False) -> Iterator[dict[str, Any]]:
        """What the server did with a sandbox and what its console said, oldest first; with `follow` as it comes,
        until the sandbox has ended."""
        path = f"/v1/sandboxes/{sandbox}/logs"
        if not follow:
            kept = self._transport.json("GET", path, sandbox=sandbox)
            console = {"type": "console", "text": kept["console"]}
            for line in [*kept["data"], *([console] if kept["console"] else [])]:
                yield dict(line)
            return
        lines = _wire.LineDecoder()
        stream = self._transport.stream("GET", path, params={"follow": True}, wait_s=None, sandbox=sandbox)
        with stream:
            for piece in stream:
                for line in lines.feed(piece):
                    if _wire.is_problem(line):
                        raise LLM4AgentsError(str(line.get("detail")))
                    yield line
