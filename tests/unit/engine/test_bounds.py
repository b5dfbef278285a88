"""Bounds as they are stored, and what of them an old agent can do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from llm4agents.engine import bounds
from llm4agents.engine.bounds import Bounds
from llm4agents.errors import VersionMismatchError


def test_what_is_stored_comes_back() -> None:
    for some in (Bounds(), Bounds(100), Bounds(None, 20, 4096)):
        assert Bounds.of(some.to_json()) == some
    assert Bounds().to_json() is None and not Bounds()
    assert Bounds.of({"pids": 3, "of_a_later_version": 1}) == Bounds(pids=3)


def test_the_file_has_room_for_a_disk_that_is_full() -> None:
    assert bounds.file_bytes_max(64) > 64 << 20
    assert bounds.file_bytes_max(5120) < 7 << 30


def test_an_agent_of_old_is_an_error_that_says_what_to_do() -> None:
    old: Any = SimpleNamespace(session=SimpleNamespace(hello=SimpleNamespace(capabilities=(), agent="0.1")))
    bounds.check(cast(Any, old), Bounds())
    with pytest.raises(VersionMismatchError, match="build"):
        bounds.check(cast(Any, old), Bounds(pids=20))


def test_the_hosts_bound_is_that_of_the_disk_alone() -> None:
    seen: list[int] = []
    machine: Any = SimpleNamespace(limit_files=seen.append)
    for stored in (None, {"pids": 3}, {"disk_mib": 100}):
        bounds.on_host(machine, stored)
    assert seen == [bounds.file_bytes_max(100)]
