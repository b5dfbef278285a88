"""The files of a copy: the same tar for the same files, what is left out, what is refused."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from llm4agents import Template, limits
from llm4agents.errors import InvalidRequestError
from llm4agents.sdk import _build_files
from llm4agents.sdk._build_files import matcher, source


@pytest.fixture
def top(tmp_path: Path) -> Path:
    for name in ("a/one", "a/b/two", "z", "c.log", "a/c.log"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "a/one").chmod(0o750)
    (tmp_path / "a/out").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "fifo")
    return tmp_path


def members(top: Path, to: str = "/x", ignore: tuple[str, ...] = ()) -> dict[str, tarfile.TarInfo]:
    data = b"".join(source(top, to, ignore).pieces())
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {member.name: member for member in archive}


def test_a_directory_is_what_is_in_it_in_order(top: Path) -> None:
    found = members(top)
    assert list(found) == ["a", "a/b", "a/b/two", "a/c.log", "a/one", "a/out", "c.log", "z"]
    assert (
        found["a/one"].mode == 0o750 and found["a/out"].linkname == "/etc/passwd" and found["a/out"].issym()
    )
    assert {(one.uid, one.gid, one.uname, one.mtime) for one in found.values()} == {
        (0, 0, "", _build_files.MTIME)
    }


def test_a_digest_is_of_names_modes_and_content(top: Path) -> None:
    before = source(top, "/x", ()).digest()
    os.utime(top / "z", (1, 1))
    assert source(top, "/x", ()).digest() == before
    (top / "z").chmod(0o600)
    assert (other := source(top, "/x", ()).digest()) != before
    (top / "z").write_text("another")
    assert source(top, "/x", ()).digest() not in (before, other)


def test_a_file_goes_to_a_file_or_into_a_directory(top: Path) -> None:
    for to, target, name in (
        ("/etc/conf", "/etc", "conf"),
        ("/etc/", "/etc", "z"),
        ("/conf", "/", "conf"),
        ("conf", ".", "conf"),
        (".", ".", "z"),
        ("sub/conf", "sub", "conf"),
    ):
        found = source(top / "z", to, ())
        assert (found.target, found.name) == (target, name), to
        assert list(members(top / "z", to)) == [name]


@pytest.mark.parametrize(
    ("patterns", "kept"),
    [
        (("*.log",), ["a", "a/b", "a/b/two", "a/one", "a/out", "z"]),
        (("/c.log",), ["a", "a/b", "a/b/two", "a/c.log", "a/one", "a/out", "z"]),
        (("a/",), ["c.log", "z"]),
        (("a/b",), ["a", "a/c.log", "a/one", "a/out", "c.log", "z"]),
        (("*", "!z"), ["z"]),
        (("**/two", "a/o*", "c.log"), ["a", "a/b", "z"]),
        (("a/**", "?"), ["c.log"]),
        (("[!a]*",), ["a"]),
        (("z/",), ["a", "a/b", "a/b/two", "a/c.log", "a/one", "a/out", "c.log", "z"]),
    ],
)
def test_what_is_left_out(top: Path, patterns: tuple[str, ...], kept: list[str]) -> None:
    if patterns == ("[!a]*",):
        assert list(members(top, ignore=patterns)) == ["a"]
        return
    assert list(members(top, ignore=patterns)) == kept


def test_a_pattern_that_cannot_be_read_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="ignore"):
        matcher(["[z-a]"])


def test_bounds_and_what_is_not_there(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequestError, match="is not there"):
        source(top / "none", "/x", ())
    monkeypatch.setattr(limits, "COPY_ENTRIES_MAX", 3)
    with pytest.raises(InvalidRequestError, match="more than 3 files"):
        source(top, "/x", ()).digest()
    monkeypatch.setattr(limits, "COPY_BYTES_MAX", 1_024)
    with pytest.raises(InvalidRequestError, match="leave some out"):
        source(top, "/x", ("*",)).digest() and source(top / "z", "/x", ()).digest()


def test_a_builder_is_never_changed(top: Path) -> None:
    common = Template(directory=top).from_template("base").env(A="b")
    one, two = common.run("one"), common.run("two").copy("z", "/etc/")
    assert common.to_dict() == {"from": {"template": "base"}, "steps": [{"env": {"A": "b"}}]}
    assert one.to_dict()["steps"][-1] == {"run": "one"}
    body, sources = two.resolved()
    assert body["steps"][-1] == {"copy": "z", "to": "/etc", "sha256": next(iter(sources))}
    with pytest.raises(InvalidRequestError, match="step 2"):
        common.apt_install("a b")
    with pytest.raises(InvalidRequestError, match="what it begins with"):
        Template().run("x").resolved()
