"""Undoing an act when the store's disk is full: it holds at once, and is written when there is room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from llm4agents.engine import clock, pausing
from llm4agents.engine.node import Node
from llm4agents.errors import CapacityError
from llm4agents.store import SandboxRow, Store, open_store


def allow_pages(store: Store, count: int) -> int:
    """Let the database grow to `count` pages; how many it may have (never fewer than it has)."""
    with store.writing() as connection:
        return int(connection.exec_driver_sql(f"PRAGMA max_page_count={count}").scalar_one())


def test_what_a_full_store_refuses_holds_and_is_written_later(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store.db")
    row = SandboxRow("sbx_x", "base", "resuming", 0.0, 1e12, 300.0, 1, 256, 5)
    store.add(row, clock.stamp())
    later: list[Callable[[], None]] = []
    node = cast(Node, SimpleNamespace(store=store, later=later.append))
    allow_pages(store, 1)
    with pytest.raises(CapacityError):
        for number in range(10_000):
            store.add(SandboxRow(f"sbx_{number}", "base", "killed", 0.0, 1.0, 1.0, 1, 256, 5), clock.stamp())

    pausing.moved(node, row, "paused", "x" * 5_000, pause={"memory": True, "why": "y" * 5_000})
    assert row.state == "paused" and row.pause is not None
    stored = store.get(row.id)
    assert stored is not None and stored.state == "resuming" and len(later) == 1
    with pytest.raises(CapacityError):
        later[0]()

    allow_pages(store, 1_000_000)
    later[0]()
    stored = store.get(row.id)
    assert stored is not None and stored.state == "paused" and stored.pause == row.pause
    store.close()
