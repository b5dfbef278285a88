"""A wheel installs what its RECORD vouches for, where it belongs; a hostile one installs nothing."""

from __future__ import annotations

import base64
import hashlib
import stat
import zipfile
from pathlib import Path

import pytest

from llm4agents.errors import HostSetupError
from llm4agents.images.wheels import WheelFile, WheelInfo, dropped, locked, unpack

SITE = "/usr/local/lib/python3.11/dist-packages"
METADATA = b"Name: Good\nVersion: 1.0\nLicense-Expression: MIT\n"


def digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def wheel(
    tmp_path: Path,
    files: dict[str, bytes],
    *,
    record: dict[str, str] | None = None,
    extra: list[tuple[zipfile.ZipInfo, bytes]] = (),
    name: str = "good-1.0-py3-none-any.whl",
) -> Path:
    everything = {"good-1.0.dist-info/METADATA": METADATA, "good-1.0.dist-info/WHEEL": b"Tag: x\n", **files}
    lines = {path: digest(data) for path, data in everything.items()} | (record or {})
    text = "".join(f"{path},{value},1\n" for path, value in lines.items()) + "good-1.0.dist-info/RECORD,,\n"
    path = tmp_path / name
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in everything.items():
            archive.writestr(member, data)
        for info, data in extra:
            archive.writestr(info, data)
        archive.writestr("good-1.0.dist-info/RECORD", text)
    return path


def contents(path: Path, drop: tuple[str, ...] = ()) -> tuple[dict[str, WheelFile], WheelInfo]:
    items = list(unpack(path, "3.11", drop))
    infos = [item for item in items if isinstance(item, WheelInfo)]
    assert len(infos) == 1
    return {item.path: item for item in items if isinstance(item, WheelFile)}, infos[0]


def test_files_scripts_and_data_go_where_they_belong(tmp_path: Path) -> None:
    files, info = contents(
        wheel(
            tmp_path,
            {
                "good/__init__.py": b"x = 1\n",
                "good-1.0.data/scripts/tool": b"#!python\nprint()\n",
                "good-1.0.data/purelib/more.py": b"",
                "good-1.0.data/data/share/doc.txt": b"doc",
                "good-1.0.data/headers/good.h": b"",
                "good-1.0.dist-info/entry_points.txt": b"[console_scripts]\ngood-run = good.cli:App.main\n",
            },
        )
    )
    assert info == WheelInfo("Good", "1.0", "MIT")
    assert files[f"{SITE}/good/__init__.py"].data == b"x = 1\n"
    assert files["/usr/local/bin/tool"].data == b"#!/usr/bin/python3\nprint()\n"
    assert files["/usr/local/bin/tool"].mode == 0o755
    assert f"{SITE}/more.py" in files
    assert "/usr/local/share/doc.txt" in files
    script = files["/usr/local/bin/good-run"]
    assert script.mode == 0o755
    assert b"from good.cli import App\nsys.exit(App.main())" in script.data
    assert files[f"{SITE}/good-1.0.dist-info/INSTALLER"].data == b"llm4agents\n"
    assert not [path for path in files if path.endswith(".h")]


def test_what_is_dropped_is_checked_and_left_out(tmp_path: Path) -> None:
    files, _ = contents(wheel(tmp_path, {"good/tests/a.py": b"", "good/b.py": b""}), drop=("good/tests",))
    assert f"{SITE}/good/b.py" in files
    assert f"{SITE}/good/tests/a.py" not in files
    assert dropped("scipy/io/tests/x.py", ("scipy/*/tests",))
    assert not dropped("scipy/io/sub/tests/x.py", ("scipy/*/tests",))
    assert dropped("scipy/tests", ("scipy/tests",)) and not dropped("scipy/tests2", ("scipy/tests",))


@pytest.mark.parametrize(
    "path",
    [
        "../evil.py",
        "/etc/passwd",
        "good/../../evil",
        "good//x",
        "good/./x",
        "C:\\x",
        "good\\x",
        "good-1.0.data/scripts/../../x",
    ],
)
def test_a_path_that_leaves_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(HostSetupError, match="leaves its place"):
        contents(wheel(tmp_path, {path: b"x"}))


def test_a_link_is_refused(tmp_path: Path) -> None:
    info = zipfile.ZipInfo("good/link")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with pytest.raises(HostSetupError, match="neither a file nor a directory"):
        contents(wheel(tmp_path, {}, extra=[(info, b"/etc/shadow")]))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_file_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HostSetupError, match="twice"):
        contents(wheel(tmp_path, {"good/a.py": b"1"}, extra=[(zipfile.ZipInfo("good/a.py"), b"2")]))


def test_what_the_record_does_not_vouch_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HostSetupError, match="does not vouch"):
        contents(wheel(tmp_path, {}, extra=[(zipfile.ZipInfo("good/extra.py"), b"")]))
    with pytest.raises(HostSetupError, match="does not vouch"):
        contents(wheel(tmp_path, {"good/a.py": b"1"}, record={"good/a.py": "md5=abc"}))
    with pytest.raises(HostSetupError, match="not what its RECORD says"):
        contents(wheel(tmp_path, {"good/a.py": b"1"}, record={"good/a.py": digest(b"2")}))


def test_another_packages_wheel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HostSetupError, match="another package"):
        contents(wheel(tmp_path, {}, name="bad-1.0-py3-none-any.whl"))


@pytest.mark.parametrize("target", ["os:system('x')", "good", "good:main; import os", "../x:main"])
def test_a_script_that_is_code_is_refused(tmp_path: Path, target: str) -> None:
    entry = f"[console_scripts]\nrun = {target}\n".encode()
    with pytest.raises(HostSetupError, match="script"):
        contents(wheel(tmp_path, {"good-1.0.dist-info/entry_points.txt": entry}))


def test_a_claimed_size_does_not_fill_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm4agents.images.wheels.WHEEL_BYTES_MAX", 1000)
    with pytest.raises(HostSetupError, match="too large"):
        contents(wheel(tmp_path, {"good/a": bytes(2000)}))


@pytest.mark.parametrize("keep", [0, 10, 200])
def test_what_is_no_zip_is_refused(tmp_path: Path, keep: int) -> None:
    path = wheel(tmp_path, {})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(HostSetupError, match="not a readable wheel"):
        contents(path)


@pytest.mark.parametrize(
    "text", ["numpy>=1\n", "numpy==1.0\n", "-r other.txt\n", "numpy @ https://x --hash=sha256:ab\n"]
)
def test_a_lock_without_pin_or_hash_is_refused(text: str) -> None:
    with pytest.raises(HostSetupError, match="without version and hash"):
        locked(text)


@pytest.mark.parametrize("python", ["3.11", "3.13"])
def test_our_locks_are_whole_and_name_no_address(python: str) -> None:
    from llm4agents.images.overlay import DATA

    text = (DATA / f"python-{python}.lock").read_text()
    assert "://" not in text and "--index" not in text and " ; " not in text
    found = locked(text)
    assert {"numpy", "pandas", "matplotlib", "scipy", "openpyxl", "pyarrow", "requests", "ipython"} <= set(
        found
    )
    assert {"sqlalchemy", "psycopg", "psycopg-binary", "pymysql", "duckdb"} <= set(found)
