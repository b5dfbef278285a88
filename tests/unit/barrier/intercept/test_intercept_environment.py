"""The interceptor's environment: by content, whole or not at all, for several builders at once."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from llm4agents.barrier.intercept import environment
from llm4agents.errors import HostSetupError


def wheel(directory: Path) -> str:
    """A package `mitmproxy` that has just the two modules that are looked for; the lock line that pins it."""
    directory.mkdir()
    path = directory / "mitmproxy-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("__init__", "proxy/__init__", "proxy/layers", "proxy/server"):
            archive.writestr(f"mitmproxy/{name}.py", "")
        archive.writestr(
            "mitmproxy-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: mitmproxy\nVersion: 1\n"
        )
        archive.writestr(
            "mitmproxy-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("mitmproxy-1.dist-info/RECORD", "")
    digest = subprocess.run(
        [sys.executable, "-m", "pip", "hash", path], capture_output=True, text=True, check=True
    ).stdout
    return f"mitmproxy==1 --hash={digest.split('--hash=')[1].strip()}\n"


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    line = wheel(tmp_path / "wheels")
    path = tmp_path / "lock"
    path.write_text(line)
    monkeypatch.setattr(environment, "lock_file", lambda: path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return path


def test_it_is_built_once_by_whoever_comes_first(lock: Path, tmp_path: Path) -> None:
    cache, told = tmp_path / "c", []

    async def both() -> list[Path]:
        return await asyncio.gather(
            *(environment.ensure(cache, lambda step, detail, fraction: told.append(detail)) for _ in range(2))
        )

    one, other = asyncio.run(both())
    assert one == other == environment.python(cache)
    assert len([words for words in told if "downloading 1" in words]) == 1
    assert any("waiting" in words for words in told)
    assert not list((cache / "tmp").iterdir())
    found = subprocess.run(
        [one, "-I", "-c", "import mitmproxy; print(mitmproxy.__file__)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.startswith(str(environment.directory(cache)))
    assert {path.name[:6] for path in (environment.directory(cache) / "bin").iterdir()} == {"python"}
    told.clear()
    assert asyncio.run(environment.ensure(cache)) == one and not told


def test_a_python_path_of_the_server_s_stands_in_for_nothing(
    lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "wheels" / "mitmproxy-1-py3-none-any.whl") as archive:
        archive.extractall(tmp_path / "elsewhere")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    asyncio.run(environment.ensure(tmp_path / "c"))
    assert environment.python(tmp_path / "c") is not None


def test_another_lock_is_another_environment(lock: Path, tmp_path: Path) -> None:
    before = environment.directory(tmp_path)
    lock.write_text(lock.read_text() + "\n")
    assert environment.directory(tmp_path) != before


def test_a_package_that_is_another_is_refused_and_nothing_is_left(lock: Path, tmp_path: Path) -> None:
    text = lock.read_text().strip()
    lock.write_text(text[:-1] + ("0" if text[-1] != "0" else "1") + "\n")
    with pytest.raises(HostSetupError, match="environment cannot be made") as error:
        asyncio.run(environment.ensure(tmp_path / "c"))
    assert "index" in str(error.value.hint) and environment.python(tmp_path / "c") is None
    assert not list((tmp_path / "c" / "tmp").iterdir())


def test_what_pip_says_is_told_without_passwords(
    lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    shutil.rmtree(tmp_path / "wheels")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:passw0rd@127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(HostSetupError) as error:
        asyncio.run(environment.ensure(tmp_path / "c"))
    assert "passw0rd" not in str(error.value)


def test_the_locks_are_in_the_package() -> None:
    for version in ((3, 11), (3, 12), (3, 13)):
        text = environment.lock_file(version).read_text()
        assert "mitmproxy==" in text
        major, minor, patch = text.partition("mitmproxy==")[2].split(" ")[0].split(".")
        assert (int(major), int(minor), int(patch)) >= ((12, 1, 2) if version >= (3, 12) else (11, 0, 2))
