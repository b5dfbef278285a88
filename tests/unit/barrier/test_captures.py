"""How many captures there may be, and which of those that have ended go for another. No packets."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from llm4agents import limits
from llm4agents.barrier.capture.captures import Captures
from llm4agents.errors import CapacityError

ended: set[str] = set()


def on(tmp_path: Path, test: Callable[[Captures], Coroutine[Any, Any, None]]) -> None:
    async def none(_: Any) -> Any:
        return None

    def worker(*_: Any) -> Any:
        raise AssertionError("of paused sandboxes: nothing runs")

    async def run() -> None:
        await test(Captures(tmp_path, worker, none, none, ended.__contains__))

    ended.clear()
    asyncio.run(run())


async def begin(captures: Captures, root: Path, sandbox: str, owner: str, at: int) -> None:
    await captures.start(sandbox, owner=owner, running=False)
    os.utime(root / "barrier" / f"capture-{sandbox}.json", (at, at))


def of(root: Path) -> set[str]:
    return {path.stem.removeprefix("capture-") for path in (root / "barrier").glob("*.json")}


def test_a_project_has_so_many_and_its_own_that_have_ended_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CAPTURES_PER_PROJECT_MAX", 3)

    async def test(captures: Captures) -> None:
        await begin(captures, tmp_path, "theirs", "them", 0)
        for at in range(3):
            await begin(captures, tmp_path, f"ours{at}", "us", at)
        with pytest.raises(CapacityError, match="3 sandboxes of the project"):
            await begin(captures, tmp_path, "ours3", "us", 3)
        await begin(captures, tmp_path, "ours0", "us", 0)  # is captured already
        await captures.stop("ours1")
        ended.update({"theirs", "ours2"})
        os.utime(tmp_path / "barrier" / "capture-ours1.json", (9, 9))
        await begin(captures, tmp_path, "ours3", "us", 3)
        assert of(tmp_path) == {"theirs", "ours0", "ours1", "ours3"}, (
            "the older of its two that have ended went"
        )

    on(tmp_path, test)


def test_a_full_node_makes_room_at_the_cost_of_who_has_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CAPTURES_KEPT_MAX", 4)

    async def test(captures: Captures) -> None:
        ended.update({"old", "many0", "many1", "many2"})
        await begin(captures, tmp_path, "old", "few", 0)
        for at in range(3):
            await begin(captures, tmp_path, f"many{at}", "many", at + 1)
        await begin(captures, tmp_path, "new", "new", 9)
        assert of(tmp_path) == {"old", "many1", "many2", "new"}
        ended.clear()
        with pytest.raises(CapacityError, match="4 sandboxes of the server"):
            await begin(captures, tmp_path, "more", "new", 10)
        assert of(tmp_path) == {"old", "many1", "many2", "new"}

    on(tmp_path, test)
