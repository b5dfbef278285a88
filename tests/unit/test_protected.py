"""Which paths a machine obeys without being asked, however they are spelled; and a tar stream without an operator's."""

from __future__ import annotations

import io
import itertools
import tarfile
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm4agents import config, limits, protected
from llm4agents.errors import InvalidRequestError, ProtocolError
from llm4agents.tarblocks import Sieve
from tests.tars import DIRECTORY, FILE, HARD, LINK, archive

ALL = [pattern for patterns in protected.PATTERNS.values() for pattern in patterns]
CONCRETE = st.sampled_from([p for p in ALL if "*" not in p and not p.startswith("/")])


@pytest.mark.parametrize(
    "path",
    [
        ".bashrc",
        "/home/a/.zshrc",
        "a/b/.git/hooks/pre-commit",
        ".git/config",
        "sub/.git/modules/x/y/hooks/post-checkout",
        "bare.git/config",
        "worktree/.git",
        ".mcp.json",
        ".vscode/tasks.json",
        ".idea/workspace.xml",
        ".claude/settings.json",
        "docs/CLAUDE.md",
        ".envrc",
        ".husky/pre-commit",
        ".ssh/authorized_keys",
        "x/.config/systemd/user/a.service",
        ".config/autostart/a.desktop",
        ".npmrc",
        ".pypirc",
        "venv/lib/python3.11/site-packages/a.pth",
        "/etc/cron.d/a",
        "/private/etc/profile.d/x.sh",
        "Library/LaunchAgents/a.plist",
    ],
)
def test_paths_that_are_protected(path: str) -> None:
    assert protected.match(path)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "src/main.py",
        "README.md",
        "package.json",
        "Makefile",
        ".gitignore",
        ".github/workflows/test.yml",
        ".git/HEAD",
        ".git/objects/aa/bb",
        ".git/refs/heads/main",
        "model.pth",
        "bashrc",
        "x.bashrc",
        ".bashrc.d",
        "rootfs/etc/cron.d/a",
        "etc/profile",
        "Dockerfile",
        ".docker/Dockerfile",
        ".env",
        ".vscode/extensions.json",
        "/home/a/.claude/worktrees/one/src/main.py",
        "crontab.txt",
    ],
)
def test_paths_that_are_not(path: str) -> None:
    assert protected.match(path) is None


@pytest.mark.parametrize(
    "path",
    [
        ".GIT/Hooks/post-checkout",
        "x/../.bashrc",
        ".git/../.git//hooks/./x",
        "a/..//.bashrc",
        ".bashrc.",
        ".bashrc . .",
        ".git /hooks /x",
        ".g\u200cit/hooks/x",
        "\ufeff.bashrc",
        ".bashrc\u200d",
        "\uff0ebashrc",
        ".ba\u017fhrc",
        ".\u212anown/../.profile",
        "sitecustomi\uff5ae.py",
        "GIT~1/hooks/x",
        "git~2/config",
        ".bashrc::$DATA",
        ".git::$INDEX_ALLOCATION/config",
        ".git\\hooks\\x",
        "a\\..\\.bashrc",
        "/home/a/.claude/worktrees/one/.claude/settings.json",
        "/home/a/.claude/worktrees/one/../../settings.json",
    ],
)
def test_every_spelling_that_some_file_system_takes_for_it(path: str) -> None:
    assert protected.match(path)


@given(CONCRETE, st.lists(st.sampled_from(["a", "b c", "src"]), max_size=3), st.data())
def test_case_depth_normal_form_and_detours_change_nothing(
    pattern: str, above: list[str], data: st.DataObject
) -> None:
    names = [*above, *pattern.split("/")]
    spelled = []
    for name in names:
        name = "".join(data.draw(st.sampled_from([c, c.upper()])) for c in name)
        name = unicodedata.normalize(data.draw(st.sampled_from(["NFC", "NFD"])), name)
        spelled += [
            name + data.draw(st.sampled_from(["", ".", " "])),
            *data.draw(st.sampled_from([[], ["."], [""], ["x", ".."]])),
        ]
    assert protected.match("/".join(spelled))
    assert protected.match("/".join([*spelled, "below", "it"]))


@given(
    st.text(max_size=60),
    st.lists(st.text(min_size=1, max_size=12), max_size=3),
    st.sampled_from(["file", "directory", "link"]),
)
def test_any_text_has_an_answer(path: str, extra: list[str], kind: protected.Kind) -> None:
    answer = protected.match(path, extra, kind=kind)
    assert answer is None or answer
    assert protected.match("x/" + path + "/.bashrc" if ".." not in path else ".bashrc", extra)


def test_a_name_that_is_not_utf_8_is_a_name() -> None:
    assert protected.match("\udcff/.bashrc") and protected.match("\udcff") is None


def test_links_that_would_stand_above_protected_paths() -> None:
    for name in (".git", ".vscode", ".config", "a/.config/systemd", ".local", ".github", "x.git"):
        assert protected.match(name, kind="link"), name
    for name in ("src", "a/current", ".config2"):
        assert protected.match(name, kind="link") is None, name
    assert protected.match(".git", kind="directory") is None
    assert protected.match(".vscode", kind="directory") is None


def test_patterns_of_an_operator() -> None:
    def no(path: str, *patterns: str) -> bool:
        return protected.match(path, patterns, defaults=False) == protected.OPERATOR

    assert no("a/secret", "secret") and no("a/SECRET/x", "secret") and not no("a/secrets", "secret")
    assert no("/etc/x", "/etc/*") and not no("a/etc/x", "/etc/*") and not no("/etc", "/etc/*")
    assert no("x/deploy/a/b/key.pem", "deploy/**/*.pem") and no("deploy/key.pem", "deploy/**/*.pem")
    assert no("a1", "a?") and not no("a12", "a?")
    assert not no(".bashrc", "secret")
    assert not no(".bashrc")


def test_a_pattern_of_many_stars_takes_no_time() -> None:
    assert protected.match("a" * 4_000, ["*a" * 30 + "*b"]) is None
    assert protected.match("/".join(["a"] * 1_000), ["**/a/**/a/**/a/b"]) is None


@pytest.mark.parametrize("pattern", ["/", ".", "..", "a" * 2_000, "**/" * 5 + "x"])
def test_patterns_that_mean_nothing_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequestError, match="PROTECTED_PATHS"):
        config.load({"LLM4AGENTS_PROTECTED_PATHS": f"ok:{pattern}"})


def test_the_setting() -> None:
    assert config.load({"LLM4AGENTS_PROTECTED_PATHS": ".git/hooks:/etc/*\n a "}).protected_paths == (
        ".git/hooks",
        "/etc/*",
        "a",
    )
    assert config.load({}).protected_paths == ()


def test_every_pattern_matches_itself_and_stands_once() -> None:
    assert len(ALL) == len(set(ALL))
    for pattern in ALL:
        assert protected.problem(pattern) is None
        assert protected.match(pattern.replace("**", "q").replace("*", "x")), pattern


# -- an operator's list, on a stream ----------------------------------------------------------------------


MEMBERS = (
    ("a", DIRECTORY, ""),
    ("a/ok", FILE, b"x" * 1_500),
    ("a/Secret", FILE, b"s" * 3_000),
    ("n" * 180 + "/secret", FILE, b"s"),
    ("m" * 180, FILE, b"kept"),
    ("hard", HARD, "a/Secret"),
    ("soft", LINK, "a/ok"),
    ("secret", LINK, "a/ok"),
    ("empty", FILE, b""),
)


@given(st.lists(st.integers(1, 9_000), max_size=20))
def test_a_stream_without_what_is_protected(cuts: list[int]) -> None:
    data = archive(*MEMBERS) + b"behind the end"
    sieve = Sieve("/home/user/", ["secret"])
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    said = b"".join(sieve.feed(data[a:b]) for a, b in itertools.pairwise(edges))
    with tarfile.open(fileobj=io.BytesIO(said)) as left:
        assert left.getnames() == ["a", "a/ok", "m" * 180, "soft", "empty"]
        kept = left.extractfile("m" * 180)
        assert kept is not None and kept.read() == b"kept"
    assert said.endswith(bytes(1024)) and b"behind" not in said and b"sss" not in said
    assert sieve.count == 4
    assert sieve.protected == [
        "/home/user/a/Secret",
        f"/home/user/{'n' * 180}/secret",
        "/home/user/hard",
        "/home/user/secret",
    ]


@given(st.binary(max_size=2_000))
def test_a_hostile_stream_is_refused_or_passed_on(data: bytes) -> None:
    sieve = Sieve("/", ["x"])
    try:
        sieve.feed(data)
    except ProtocolError:
        return
    assert len(data) < 512 or not any(data[:512])


def test_the_report_of_a_stream_is_bounded() -> None:
    sieve = Sieve("/", ["x"])
    one = archive(("x", FILE, b""))[:512]
    for _ in range(limits.PROTECTED_REPORTED_MAX + 5):
        sieve.feed(one)
    assert sieve.count == limits.PROTECTED_REPORTED_MAX + 5
    assert len(sieve.protected) == limits.PROTECTED_REPORTED_MAX
