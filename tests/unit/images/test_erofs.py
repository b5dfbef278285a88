"""EROFS images as erofs-utils reads them back: what went in as a tar stream is what is in them."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm4agents import limits
from llm4agents.errors import CapacityError, ProtocolError
from llm4agents.images.erofs import BLOCK, Image, Inode
from tests.tars import DIRECTORY, FILE, HARD, LINK, archive

pytestmark = pytest.mark.skipif(shutil.which("fsck.erofs") is None, reason="erofs-utils is not installed")


def folder() -> Inode:
    return Inode(stat.S_IFDIR | 0o750, 0, 0, 10**18)


def written(path: Path, members: list[Any]) -> None:
    image = Image(io.BytesIO(archive(*members)))
    image.add_tar("0", folder(), 0)
    with path.open("w+b") as out:
        size = image.write(out)
    assert path.stat().st_size == size


def read_back(image: Path, to: Path) -> dict[str, bytes | str | None]:
    """By fsck.erofs, which also checks it."""
    done = subprocess.run(
        ["fsck.erofs", f"--extract={to}", str(image)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "<E>" not in done.stderr + done.stdout, done.stderr + done.stdout
    found: dict[str, bytes | str | None] = {}
    for path in to.rglob("*"):
        name = str(path.relative_to(to))
        found[name] = os.readlink(path) if path.is_symlink() else None if path.is_dir() else path.read_bytes()
    return found


def test_a_tree_is_in_the_image(tmp_path: Path) -> None:
    many = [(f"many/{'n' * 60}{number:04}", FILE, b"%d" % number) for number in range(300)]
    members = [
        ("d", DIRECTORY, ""),
        ("d/e", DIRECTORY, ""),
        ("d/e/empty", FILE, b""),
        ("d/one block", FILE, b"x" * BLOCK),
        ("big", FILE, os.urandom(1_000_000)),
        ("link", LINK, "d/e"),
        ("hard", HARD, "big"),
        ("many", DIRECTORY, ""),
        *many,
    ]
    written(tmp_path / "image", members)
    found = read_back(tmp_path / "image", tmp_path / "out")
    wanted = {f"0/{name}": content for name, kind, content in members if kind == FILE}
    assert {name: content for name, content in found.items() if isinstance(content, bytes)} == {
        **wanted,
        "0/hard": wanted["0/big"],
    }
    assert found["0/link"] == "d/e" and found["0/d/e"] is None
    assert stat.S_IMODE((tmp_path / "out/0").stat().st_mode) == 0o750
    info = subprocess.run(
        ["dump.erofs", "--path=/0/big", str(tmp_path / "image")], capture_output=True, text=True, check=True
    )
    assert "Links: 2" in info.stdout


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    digests = set()
    for order in (1, -1):
        members = [("a", FILE, b"1"), ("b", FILE, b"2"), ("c/d", FILE, b"3")][::order]
        written(tmp_path / "image", members)
        digests.add(hashlib.sha256((tmp_path / "image").read_bytes()).hexdigest())
    assert len(digests) == 1
    assert (tmp_path / "image").stat().st_size >= limits.VOLUME_SLOT_BYTES


NAMES = st.binary(min_size=1, max_size=255).filter(lambda n: n not in (b".", b"..") and not set(n) & {0, 47})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(st.dictionaries(NAMES, st.binary(max_size=9_000), max_size=60))
def test_any_names_and_contents(tmp_path: Path, files: dict[bytes, bytes]) -> None:
    members = [(os.fsdecode(name), FILE, content) for name, content in files.items()]
    written(tmp_path / "image", members)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    found = read_back(tmp_path / "image", tmp_path / "out")
    assert {os.fsencode(name[2:]): content for name, content in found.items() if name != "0"} == files


@pytest.mark.parametrize(
    "members",
    [
        [("a", FILE, b""), ("a/b", FILE, b"")],
        [("a", FILE, b"1"), ("a", FILE, b"2")],
        [("a", HARD, "b")],
        [("d", DIRECTORY, ""), ("a", HARD, "d")],
        [("../a", FILE, b"")],
        [("a", LINK, "")],
        [("a" * 256, FILE, b"")],
    ],
)
def test_a_stream_that_is_no_tree_is_refused(members: list[Any]) -> None:
    with pytest.raises(ProtocolError):
        Image(io.BytesIO(archive(*members))).add_tar("0", folder(), 0)


def test_a_stream_that_is_cut_is_refused(tmp_path: Path) -> None:
    whole = archive(("a", FILE, b"x" * 5_000))
    for cut in (100, 700, len(whole) - 1_024):
        with pytest.raises(ProtocolError, match="broke off"), (tmp_path / "i").open("w+b") as out:
            image = Image(io.BytesIO(whole[:cut]))
            image.add_tar("0", folder(), 0)
            image.write(out)


def test_too_much_is_refused() -> None:
    image = Image(io.BytesIO())
    with pytest.raises(CapacityError, match="protect less"):
        image.add("0", Inode(stat.S_IFREG, 0, 0, 0, size=limits.PROTECT_BYTES_MAX + 1))
