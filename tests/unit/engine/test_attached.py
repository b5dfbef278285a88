"""What a sandbox may ask for of volumes, and what that makes of its row."""

from __future__ import annotations

from typing import Any

import pytest

from llm4agents.engine import attached
from llm4agents.engine.attached import Mount, apart, wanted
from llm4agents.engine.volume_files import inside, outside
from llm4agents.engine.volumes import check_name, check_size
from llm4agents.errors import ConflictError, InvalidRequestError
from llm4agents.store import SandboxRow


def row(volumes: list[dict[str, Any]] | None) -> SandboxRow:
    return SandboxRow("sbx_a", "base", "paused", 0, 0, 0, 1, 256, 5, volumes=volumes)


def test_paths_are_plain_and_apart() -> None:
    assert wanted([Mount("a", "/data//x/"), Mount("b", "/srv", "ro")]) == (
        Mount("a", "/data/x"),
        Mount("b", "/srv", "ro"),
    )
    assert apart("/data", "/database") and not apart("/data", "/data/x") and not apart("/data", "/data")


@pytest.mark.parametrize(
    "mounts",
    [
        [Mount("a", "data")],
        [Mount("a", "/")],
        [Mount("a", "/home/user")],
        [Mount("a", "/proc/x")],
        [Mount("a", "/run/llm4agents")],
        [Mount("a", "/a/../b")],
        [Mount("a", "/a\0b")],
        [Mount("a", "/" + "x" * 1_100)],
        [Mount("a", "/a"), Mount("b", "/a/b")],
        [Mount("a", "/a"), Mount("b", "/a")],
        [Mount("a", "/a"), Mount("a", "/b")],
        [Mount(str(n), f"/{n}") for n in range(4)],
        [Mount("a", "/home/user/tests/x")],
    ],
)
def test_what_cannot_be(mounts: list[Mount]) -> None:
    with pytest.raises(InvalidRequestError):
        wanted(mounts, ["/home/user/tests"])


def test_a_slot_that_memory_may_use_is_no_others() -> None:
    one = attached.add([], "vol_1", "one", Mount("one", "/one"))
    two = attached.add([one], "vol_2", "two", Mount("two", "/two", "ro"))
    assert (one["slot"], two["slot"]) == ("vol1", "vol2") and one["id"] != two["id"]
    left = [two, {"slot": "vol1", "left": True}]
    three = attached.add(left, "vol_3", "three", Mount("three", "/one"))
    assert three["slot"] == "vol3"
    with pytest.raises(ConflictError, match="resume it first"):
        attached.add([*left, three], "vol_4", "four", Mount("four", "/four"))
    for volume, path in (("vol_2", "/x"), ("vol_9", "/two/x")):
        with pytest.raises(ConflictError):
            attached.add(left, volume, "nine", Mount("nine", path))
    assert attached.entries(row(left)) == [two] and attached.writable(row(left)) == []
    assert attached.shown(row([*left, three])) == [
        {"volume": "vol_2", "name": "two", "path": "/two", "mode": "ro"},
        {"volume": "vol_3", "name": "three", "path": "/one", "mode": "rw"},
    ]


def test_after_a_resume_only_slots_in_use_are_closed() -> None:
    one = attached.add([], "vol_1", "one", Mount("one", "/one"))
    before = row([{**one, "error": "old"}, *attached.left(["vol2", "vol3"])])
    assert attached.resumed(before, {}, ()) == [one]
    assert attached.resumed(before, {one["id"]: "broken"}, ()) == [{**one, "error": "broken"}]
    assert attached.resumed(before, {}, ("vol3", "vol1", "vol7")) == [*attached.left(["vol3"]), one]
    assert attached.resumed(row(attached.left(["vol2"])), {}, ()) is None


def test_paths_of_a_volume_stay_in_it() -> None:
    for path in ("/", "", ".", "..", "/../..", "//"):
        assert inside(path) == "/mnt/volume"
    assert inside("a/../../b") == inside("/b") == "/mnt/volume/b"
    for path in ("/", "/b", "/b/c"):
        assert outside(inside(path)) == path
    assert outside("/etc/passwd") == "/etc/passwd"


def test_names_and_sizes() -> None:
    assert check_name("my-data_1.x") == "my-data_1.x" and check_size(8) == 8 << 20
    for bad in ("", "A", "-a", "a/b", "a" * 64, "vol_" + "a" * 20, "..", "a\n"):
        with pytest.raises(InvalidRequestError):
            check_name(bad)
    for size in (7, 0, -1, 1_048_577):
        with pytest.raises(InvalidRequestError):
            check_size(size)
