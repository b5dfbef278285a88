"""What can be protected, and which directories above it others could rename: the decisions."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm4agents import limits
from llm4agents.engine import protecting
from llm4agents.engine.protecting import Covered, Protection
from llm4agents.errors import InvalidRequestError
from llm4agents.guest.results import Entry


def entry(mode: int, uid: int) -> Entry:
    return Entry(
        name="x",
        path="/x",
        kind="directory",
        size=0,
        mode=mode,
        uid=uid,
        gid=uid,
        user="",
        group="",
        mtime=0.0,
        target=None,
    )


def test_paths_are_made_plain_and_those_below_others_left_out() -> None:
    assert protecting.wanted(["/a/b/", "//a//b/c", "/a/bc", "/a/b"]) == ("/a/b", "/a/bc")
    assert protecting.wanted([]) == ()


@pytest.mark.parametrize(
    "path",
    ["a", "", "/", "//", "/proc", "/proc/1", "/sys/x", "/dev", "/run", "/a/../b", "/a\0b", "/" + "a" * 2_000],
)
def test_paths_that_cannot_be(path: str) -> None:
    with pytest.raises(InvalidRequestError, match="protect="):
        protecting.wanted([path])


def test_too_many() -> None:
    with pytest.raises(InvalidRequestError, match="at most"):
        protecting.wanted(f"/a{number}" for number in range(limits.PROTECT_PATHS_MAX + 1))


@pytest.mark.parametrize(
    ("of", "parent", "can"),
    [
        (entry(0o755, 0), entry(0o755, 0), False),
        (entry(0o755, 1000), entry(0o755, 0), False),
        (entry(0o755, 0), entry(0o755, 1000), True),
        (entry(0o755, 0), entry(0o777, 0), True),
        (entry(0o755, 0), entry(0o775, 0), True),
        (entry(0o755, 0), entry(0o1777, 0), False),
        (entry(0o755, 1000), entry(0o1777, 0), True),
        (entry(0o755, 0), entry(0o1777, 1000), True),
    ],
)
def test_who_can_rename_what(of: Entry, parent: Entry, can: bool) -> None:
    assert protecting.replaceable(of, parent) == can


def test_what_the_agent_is_told() -> None:
    covered = (Covered("0", "/a", True), Covered("1", "/b", False))
    request = Protection(Path("/x"), 4_096, covered, ("/home/user/p",)).request()
    assert request["slot"] == "vol0" and request["bytes"] == 4_096 and request["pins"] == ["/home/user/p"]
    assert request["paths"][1] == {"source": "1", "target": "/b", "directory": False}
