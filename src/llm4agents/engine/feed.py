"""What happened to sandboxes, told to whoever follows: the store's events, with their id as the cursor.

A follower reads pages from the store, so one that is slow holds up nobody and costs no memory, and one that was
away, or that asks another server, goes on behind the last id it has seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Final

from llm4agents.store import Store

PAGE: Final = 500


def line(event: dict[str, Any]) -> dict[str, Any]:
    """An event as the wire has it."""
    return {
        "type": "transition",
        "id": event["id"],
        "sandbox": event["sandbox"],
        "project": event["project"],
        "sequence": event["sequence"],
        "from": event["from_state"],
        "to": event["to_state"],
        "reason": event["reason"],
        "at": event["wall_ns"] / 1e9,
        "boot_id": event["boot_id"],
    }


class Feed:
    """The transitions of a store; `close` ends every follower."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._news = asyncio.Event()
        self._closed = False
        store.on_transition.append(lambda *_: self._wake())

    def page(
        self, after: int, limit: int = PAGE, sandbox: str | None = None, project: str | None = None
    ) -> list[dict[str, Any]]:
        return [line(event) for event in self._store.events_after(after, limit, sandbox, project)]

    def newest(self) -> int:
        """The cursor of now."""
        return self._store.last_event()

    async def follow(
        self, after: int, sandbox: str | None = None, project: str | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The cursor, everything behind it, then what comes, until the server stops."""
        yield {"type": "cursor", "id": after}
        while True:
            news = self._news  # taken before the page is read: what comes after that sets it
            found = self.page(after, sandbox=sandbox, project=project)
            for event in found:
                after = event["id"]
                yield event
            if len(found) < PAGE:
                if self._closed:
                    return
                await news.wait()

    def close(self) -> None:
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
