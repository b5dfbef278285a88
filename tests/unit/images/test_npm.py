"""Files from npm's packages: what a tar ball holds goes where the catalogue says, and nothing else does."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from llm4agents.errors import HostSetupError
from llm4agents.images import npm
from llm4agents.images.kinds import NpmPackage


def package(*files: tuple[str, str, int], integrity: str = "sha512-") -> NpmPackage:
    return NpmPackage("tool", "1.0.0", integrity, "MIT", files)


def archive(path: Path, members: dict[str, bytes | str]) -> Path:
    """Text is the target of a symbolic link."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


def test_named_files_are_taken_and_nothing_else(tmp_path: Path) -> None:
    made = archive(tmp_path / "x.tgz", {"package/bin/tool": b"one", "package/../../etc/passwd": b"two"})
    wanted = package(("package/bin/tool", "/usr/local/bin/tool", 0o755))
    assert list(npm.files(wanted, made)) == [("/usr/local/bin/tool", b"one", 0o755)]


@pytest.mark.parametrize("members", [{}, {"package/bin/tool": "/etc/passwd"}])
def test_what_is_not_there_or_is_no_file_is_refused(tmp_path: Path, members: dict[str, bytes | str]) -> None:
    made = archive(tmp_path / "x.tgz", members)
    with pytest.raises(HostSetupError, match="tool"):
        list(npm.files(package(("package/bin/tool", "/usr/local/bin/tool", 0o755)), made))


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.tgz").write_bytes(b"<html>not found</html>")
    with pytest.raises(HostSetupError, match="cannot be read"):
        list(npm.files(package(("a", "/a", 0o644)), tmp_path / "x.tgz"))


def test_npm_is_believed_by_the_digest_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools, content = tmp_path / "bin", b"what a registry gave"
    tools.mkdir()
    (tools / "npm").write_text(
        '#!/bin/sh\nwhile [ "$1" != --pack-destination ]; do shift; done\n'
        f"printf '{content.decode()}' > \"$2/tool-1.0.0.tgz\"\n"
    )
    (tools / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode()
    places = [tmp_path / "good", tmp_path / "bad"]
    for place in places:
        place.mkdir()
    wanted = package(integrity=integrity)
    found = asyncio.run(npm.download([wanted], places[0], lambda *_: None))
    assert found[wanted].read_bytes() == content
    with pytest.raises(HostSetupError, match="another tool"):
        asyncio.run(npm.download([package(integrity="sha512-AAAA")], places[1], lambda *_: None))
