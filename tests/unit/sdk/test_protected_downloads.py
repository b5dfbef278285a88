"""What a copy out of a sandbox leaves out of this machine, and that it says so, on real directories."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from llm4agents import Downloaded, ProtectedPathError, Sandbox, protected
from llm4agents.config import Settings
from llm4agents.sdk._landing import Guard
from llm4agents.sdk._untar import Unpacked, unpack
from tests.tars import DIRECTORY, FILE, HARD, LINK, archive, reader


def left_out(done: Unpacked) -> list[str]:
    return [found.path for found in done.protected]


def there(top: Path) -> list[str]:
    return sorted(str(path.relative_to(top)) for path in top.rglob("*"))


def test_a_checkout_comes_without_what_would_run(tmp_path: Path) -> None:
    members = [
        ("src", DIRECTORY, ""),
        ("src/main.py", FILE, b"1"),
        (".git", DIRECTORY, ""),
        (".git/HEAD", FILE, b"ref: refs/heads/main\n"),
        (".git/config", FILE, b"[core]\n\tfsmonitor = evil\n"),
        (".git/hooks", DIRECTORY, ""),
        (".git/hooks/post-checkout", FILE, b"#!/bin/sh\n"),
        (".VSCode/Tasks.JSON", FILE, b"{}"),
        ("big/.bashrc", FILE, b"x" * 700_000),
        ("last", FILE, b"2"),
    ]
    done = unpack(reader(archive(*members)), tmp_path / "in")
    assert there(tmp_path / "in") == [".git", ".git/HEAD", "last", "src", "src/main.py"]
    assert left_out(done) == [
        ".git/config",
        ".git/hooks",
        ".git/hooks/post-checkout",
        ".VSCode/Tasks.JSON",
        "big/.bashrc",
    ]
    assert done.protected_count == 5 and done.left_out == 0 and done.entries == len(members)
    allowed = unpack(reader(archive(*members)), tmp_path / "all", Guard(tmp_path / "all", allow=True))
    assert (tmp_path / "all/.git/hooks/post-checkout").exists() and allowed.protected == ()
    never = Guard(tmp_path / "most", allow=True, never=["hooks"])
    assert left_out(unpack(reader(archive(*members)), tmp_path / "most", never)) == [
        ".git/hooks",
        ".git/hooks/post-checkout",
    ]


@pytest.mark.parametrize(
    "members",
    [
        [("p", DIRECTORY, ""), ("p/hooks/x", FILE, b"!"), (".git", LINK, "p")],
        [("p/config", FILE, b"!"), (".git", FILE, b"gitdir: p")],
        [("p/tasks.json", FILE, b"!"), (".vscode", LINK, "p")],
        [("p", FILE, b"!"), (".bashrc", LINK, "p")],
        [("p", FILE, b"!"), (".bashrc", HARD, "p")],
        [("p/fish/config.fish", FILE, b"!"), (".config", LINK, "p")],
        [("p", FILE, b"!"), (".BashRC", HARD, "p")],
        [("a/b", DIRECTORY, ""), ("a/b/l", LINK, "../../.git/hooks")],
    ],
)
def test_no_link_or_rename_puts_one_there(tmp_path: Path, members: list[Any]) -> None:
    done = unpack(reader(archive(*members)), tmp_path / "in")
    assert left_out(done) == [members[-1][0]]
    assert not os.path.lexists(tmp_path / "in" / members[-1][0])


def test_a_protected_file_of_this_machine_is_not_linked_to(tmp_path: Path) -> None:
    (tmp_path / "in/.git").mkdir(parents=True)
    (tmp_path / "in/.git/config").write_text("mine")
    done = unpack(reader(archive(("notes", HARD, ".git/config"))), tmp_path / "in")
    assert [(found.path, found.reason) for found in done.protected] == [("notes", protected.LINKED)]
    assert (tmp_path / "in/.git/config").stat().st_nlink == 1


@pytest.mark.parametrize("order", [("HEAD", "config"), ("config", "HEAD")])
def test_a_directory_that_git_would_take_for_a_repository(tmp_path: Path, order: tuple[str, str]) -> None:
    members = [(f"p/{name}", FILE, b"[core]\n\tfsmonitor = touch /x\n") for name in order]
    members += [("p/objects", DIRECTORY, b""), ("p/refs", DIRECTORY, b"")]
    done = unpack(reader(archive(*members)), tmp_path / "in")
    assert left_out(done) == [f"p/{order[1]}"] and done.protected[0].reason == protected.BARE
    asked = ["git", "-C", str(tmp_path / "in/p"), "rev-parse", "--is-bare-repository"]
    clean = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "GIT_CEILING_DIRECTORIES": str(tmp_path)}
    assert subprocess.run(asked, env=clean, capture_output=True, check=False).returncode != 0


def test_a_hook_directory_beside_a_head(tmp_path: Path) -> None:
    done = unpack(
        reader(archive(("HEAD", FILE, b""), ("hooks/deep/x", FILE, b""), ("src/hooks/use.ts", FILE, b""))),
        tmp_path,
    )
    assert left_out(done) == ["hooks/deep/x"]


def test_where_it_lands_counts_with_the_links_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "repo/.git/hooks").mkdir(parents=True)
    (tmp_path / "x").symlink_to("repo/.git/hooks")
    (tmp_path / "y").symlink_to("repo/.git")
    for target in (tmp_path / "x", tmp_path / "repo/.git/hooks", tmp_path / "x/../hooks"):
        assert Guard(target).why_not(["post-checkout"])
        with pytest.raises(ProtectedPathError, match="git"):
            Guard(target / "post-checkout").check()
    assert (
        Guard(tmp_path / "y").why_not(["hooks", "a"])
        and Guard(tmp_path / "y").why_not(["description"]) is None
    )
    Guard(tmp_path / "x/post-checkout", allow=True).check()
    with pytest.raises(ProtectedPathError, match="operator"):
        Guard(tmp_path / "x/post-checkout", allow=True, never=["post-*"]).check()


def test_through_the_sdk(settings: Settings, tmp_path: Path) -> None:
    with Sandbox("base") as sandbox:
        sandbox.files.write("t/ok", "1")
        sandbox.files.write("t/.envrc", "2")
        done = sandbox.files.download("t", tmp_path / "t")
        assert isinstance(done, Downloaded) and isinstance(done, Path) and done == tmp_path / "t"
        assert [found.path for found in done.protected] == [".envrc"] and done.protected_count == 1
        assert there(done) == ["ok"]
        again = sandbox.files.download("t", tmp_path / "all", allow_protected=True)
        assert there(again) == [".envrc", "ok"] and again.protected == ()
        with pytest.raises(ProtectedPathError, match="shells run it") as caught:
            sandbox.files.download("t/ok", tmp_path / ".bashrc")
        assert caught.value.outcome == "not_started"
        with pytest.raises(ProtectedPathError):
            sandbox.files.download("t/.envrc", tmp_path)
        assert sandbox.files.download("t/.envrc", tmp_path / "envrc.txt").read_text() == "2"
        assert not (tmp_path / ".bashrc").exists() and not list(tmp_path.glob(".e*"))
        (tmp_path / "hooks").symlink_to(tmp_path / "repo/.git/hooks")
        (tmp_path / "repo/.git/hooks").mkdir(parents=True)
        with pytest.raises(ProtectedPathError):
            sandbox.files.download("t/ok", tmp_path / "hooks")
        assert not list((tmp_path / "repo/.git/hooks").iterdir())
