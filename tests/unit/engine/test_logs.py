"""The log of a sandbox: what gets into it, and that it stays within its bounds whatever a guest prints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llm4agents import limits
from llm4agents.engine.logs import FOLLOW_LINES_MAX, LINE_BYTES_MAX, Logs
from llm4agents.store import SandboxRow, Store, open_store
from llm4agents.store.store import Stamp

ID = "sbx_" + "a" * 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path / "store.db")
    yield opened
    opened.close()


@pytest.fixture
def logs(tmp_path: Path, store: Store) -> Logs:
    return Logs(tmp_path / "logs", lambda sandbox: tmp_path / "run" / sandbox, store)


def test_lines_about_a_sandbox_are_kept_and_others_not(logs: Logs) -> None:
    for line in (
        {"event": "ended", "sandbox": ID, "level": "info"},
        {"event": "listening"},
        {"event": "x", "sandbox": "../../etc/passwd"},
        {"event": "y", "sandbox": 7},
    ):
        assert logs.processor(None, "info", dict(line)) == line, "the server's own log is as it was"
    (kept,) = logs.read(ID)
    assert (kept["event"], kept["level"]) == ("ended", "info")
    assert [path.name for path in logs.directory.iterdir()] == [f"{ID}.jsonl"]


def test_a_file_and_a_line_are_bounded_and_the_newest_is_there(logs: Logs) -> None:
    for number in range(400):
        logs.add(ID, "line", number=number, text="\x1b\udcff" + "x" * 1_000)
    path = logs.directory / f"{ID}.jsonl"
    assert path.stat().st_size <= limits.SANDBOX_LOG_BYTES_MAX + LINE_BYTES_MAX
    kept = logs.read(ID)
    assert kept[-1]["number"] == 399 and kept[0]["number"] > 0
    assert [line["number"] for line in kept] == list(range(kept[0]["number"], 400))
    logs.add(ID, "huge", text="y" * 1_000_000)
    assert len(json.dumps(logs.read(ID)[-1])) < LINE_BYTES_MAX


def test_a_follower_that_does_not_read_costs_no_memory(logs: Logs, store: Store) -> None:
    async def test() -> list[dict[str, Any]]:
        row = SandboxRow(ID, "base", "creating", 1.0, 1e12, 60.0, 1, 512, 5)
        store.add(row, Stamp(1, 1, "b"))
        follower = logs.follow(ID)
        assert (await anext(follower))["to"] == "creating"
        waiting = asyncio.ensure_future(anext(follower))
        await asyncio.sleep(0)
        for number in range(3 * FOLLOW_LINES_MAX):
            logs.add(ID, "line", number=number)
        store.transition(row, "killed", "done", Stamp(2, 2, "b"), ended_at=1.0)
        first = await waiting
        return [first, *[line async for line in follower]]

    told = asyncio.run(test())
    assert len(told) == FOLLOW_LINES_MAX
    assert told[-1]["to"] == "killed", "it ends with the sandbox"


def test_logs_of_forgotten_sandboxes_go(logs: Logs) -> None:
    logs.add(ID, "x")
    logs.sweep(lambda sandbox: sandbox == ID)
    assert logs.read(ID)
    logs.sweep(lambda _: False)
    assert not list(logs.directory.iterdir())
