"""Python packages for an image: wheels fetched by pip against a lock with hashes, unpacked here, never executed.

A wheel is a zip by strangers: what its RECORD does not vouch for, what would leave the directory, what comes
twice or is too large is refused. pip is only the downloader, so that proxies, mirrors and certificates
configured for it are in force.
"""

from __future__ import annotations

import base64
import configparser
import csv
import email.parser
import fnmatch
import hashlib
import io
import re
import stat
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from llm4agents.errors import HostSetupError
from llm4agents.images.process import Cancel, in_thread, run
from llm4agents.images.progress import Progress

WHEEL_BYTES_MAX = 2_147_483_648
WHEEL_FILES_MAX = 100_000
GLIBC_MINOR = {"3.11": 36, "3.13": 41}
"""Of the Debian that has that Python: wheels that want a newer glibc are not taken."""
_HASH = {"sha256": hashlib.sha256, "sha384": hashlib.sha384, "sha512": hashlib.sha512}
_SCRIPT = """#!/usr/bin/python3
import sys
from {module} import {root}
sys.exit({call}())
"""


@dataclass(frozen=True, slots=True)
class WheelFile:
    path: str
    """Absolute, in the guest."""
    data: bytes
    mode: int


@dataclass(frozen=True, slots=True)
class WheelInfo:
    name: str
    version: str
    licence: str | None


def locked(text: str) -> dict[str, str]:
    """name → version of a lock file, names normalised. Raises HostSetupError for a line without a pin or hash."""
    found: dict[str, str] = {}
    for requirement in re.split(r"\n(?=\S)", re.sub(r"(?m)^\s*#.*\n?", "", text)):
        head = requirement.strip()
        if not head:
            continue
        match = re.match(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^]]*\])?==([^\s;\\]+)", head)
        if match is None or "--hash=sha256:" not in head:
            raise HostSetupError(f"the lock file has a line without version and hash: {head.splitlines()[0]}")
        found[normalised(match[1])] = match[2]
    return found


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


async def download(lock: Path, python: str, directory: Path, progress: Progress) -> list[Path]:
    """Fetch every wheel of `lock` for the guest's Python into `directory`. pip checks the hashes.

    Raises HostSetupError (no pip, no network, a hash that differs), CapacityError.
    """
    wanted = await in_thread(lambda _: locked(lock.read_text()))
    tag = python.replace(".", "")
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC_MINOR[python], 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    argv = [sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check", "--no-deps"]
    argv += [
        "--require-hashes",
        "--only-binary",
        ":all:",
        "--progress-bar",
        "off",
        "--python-version",
        python,
    ]
    argv += ["--implementation", "cp", "--abi", f"cp{tag}", "--abi", "abi3", "--abi", "none"]
    for platform in platforms:
        argv += ["--platform", platform]
    progress("wheels", f"downloading {len(wanted)} Python packages", 0.0)
    await run([*argv, "-d", str(directory), "-r", str(lock)], cwd=directory, needed_bytes=400_000_000)
    wheels = await in_thread(lambda _: sorted(directory.glob("*.whl")))
    size = sum(path.stat().st_size for path in wheels)
    got = {normalised(path.name.split("-")[0]) for path in wheels}
    if got != set(wanted):
        raise HostSetupError(
            f"pip left out: {', '.join(sorted(set(wanted) - got)) or 'nothing, but added others'}"
        )
    progress("wheels", f"downloaded {len(wheels)} Python packages ({size / 1e6:.0f} MB)", 0.3)
    return wheels


def unpack(
    wheel: Path,
    python: str,
    drop: tuple[str, ...],
    cancel: Cancel | None = None,
    moves: tuple[tuple[str, str], ...] = (),
) -> Iterator[WheelFile | WheelInfo]:
    """The files a wheel installs (console scripts included), then one WheelInfo. Reads, executes nothing.

    Raises HostSetupError for a wheel that breaks a rule above.
    """
    site = f"/usr/local/lib/python{python}/dist-packages"
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = _checked_members(wheel.name, archive)
            dist_info = _dist_info(wheel.name, members)
            record = _record(archive.read(members[f"{dist_info}/RECORD"]).decode())
            for name, member in members.items():
                if cancel is not None:
                    cancel.check()
                data = archive.read(member)
                _check_record(wheel.name, dist_info, name, data, record)
                yield from _placed(wheel.name, name, member, data, site, drop, moves)
            yield WheelFile(f"{site}/{dist_info}/INSTALLER", b"llm4agents\n", 0o644)
            if f"{dist_info}/entry_points.txt" in members:
                text = archive.read(members[f"{dist_info}/entry_points.txt"]).decode()
                yield from _console_scripts(wheel.name, text)
            metadata = archive.read(members[f"{dist_info}/METADATA"]).decode("utf-8", "replace")
            yield _info(metadata)
    except (
        zipfile.BadZipFile,
        KeyError,
        UnicodeDecodeError,
        NotImplementedError,
        EOFError,
        RuntimeError,
    ) as error:
        raise _bad(wheel.name, f"not a readable wheel: {error}") from error


def _bad(wheel: str, why: str) -> HostSetupError:
    return HostSetupError(
        f"{wheel}: {why}", hint="the package source gave something that is not what it says"
    )


def _checked_members(wheel: str, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    members: dict[str, zipfile.ZipInfo] = {}
    if len(archive.infolist()) > WHEEL_FILES_MAX:
        raise _bad(wheel, "too many files")
    if sum(member.file_size for member in archive.infolist()) > WHEEL_BYTES_MAX:
        raise _bad(wheel, "too large when unpacked")
    for member in archive.infolist():
        name = member.filename
        kind = stat.S_IFMT(member.external_attr >> 16)
        parts = name.rstrip("/").split("/")
        if "\0" in name or "\\" in name or name.startswith("/") or any(p in ("", ".", "..") for p in parts):
            raise _bad(wheel, f"a path that leaves its place: {name!r}")
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise _bad(wheel, f"{name} is neither a file nor a directory")
        if name.endswith("/"):
            continue
        if name in members:
            raise _bad(wheel, f"{name} is there twice")
        members[name] = member
    return members


def _dist_info(wheel: str, members: dict[str, zipfile.ZipInfo]) -> str:
    found = {name.split("/")[0] for name in members if name.split("/")[0].endswith(".dist-info")}
    if len(found) != 1:
        raise _bad(wheel, f"{len(found)} dist-info directories, not one")
    (dist_info,) = found
    if normalised(dist_info.split("-")[0]) != normalised(wheel.split("-")[0]):
        raise _bad(wheel, f"it is another package: {dist_info}")
    return dist_info


def _record(text: str) -> dict[str, str]:
    return {row[0]: row[1] for row in csv.reader(io.StringIO(text)) if len(row) >= 2}


def _check_record(wheel: str, dist_info: str, name: str, data: bytes, record: dict[str, str]) -> None:
    if name in (f"{dist_info}/RECORD", f"{dist_info}/RECORD.jws", f"{dist_info}/RECORD.p7s"):
        return
    method, _, expected = record.get(name, "").partition("=")
    if method not in _HASH:
        raise _bad(wheel, f"its RECORD does not vouch for {name}")
    digest = base64.urlsafe_b64encode(_HASH[method](data).digest()).rstrip(b"=").decode()
    if digest != expected.rstrip("="):
        raise _bad(wheel, f"{name} is not what its RECORD says")


def _placed(
    wheel: str,
    name: str,
    member: zipfile.ZipInfo,
    data: bytes,
    site: str,
    drop: tuple[str, ...],
    moves: tuple[tuple[str, str], ...] = (),
) -> Iterator[WheelFile]:
    executable = bool((member.external_attr >> 16) & 0o111)
    mode = 0o755 if executable else 0o644
    top, _, rest = name.partition("/")
    if top.endswith(".data"):
        scheme, _, rest = rest.partition("/")
        if scheme in ("purelib", "platlib"):
            yield from [] if dropped(rest, drop) else [WheelFile(f"{site}/{rest}", data, mode)]
        elif scheme == "scripts":
            if data.startswith(b"#!python"):
                data = b"#!/usr/bin/python3" + data[data.index(b"\n") :]
            yield WheelFile(f"/usr/local/bin/{rest}", data, 0o755)
        elif scheme == "data":
            yield WheelFile(f"/usr/local/{rest}", data, mode)
        elif scheme != "headers":  # nothing is compiled against a sandbox's packages yet
            raise _bad(wheel, f"an unknown place: {name}")
    elif not dropped(name, drop):
        yield WheelFile(moved(name, moves) or f"{site}/{name}", data, mode)


def moved(path: str, moves: tuple[tuple[str, str], ...]) -> str | None:
    """Where in the guest a path of dist-packages goes, if `moves` names a directory it lies in."""
    for source, target in moves:
        if path.startswith(f"{source}/"):
            return f"{target}/{path[len(source) + 1 :]}"
    return None


def dropped(path: str, drop: tuple[str, ...]) -> bool:
    """Whether `drop` names a path of dist-packages, or a directory it lies in (`*` is one path component)."""
    parts = PurePosixPath(path).parts
    for pattern in drop:
        wanted = pattern.split("/")
        if len(parts) >= len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted)):
            return True
    return False


def _console_scripts(wheel: str, text: str) -> Iterator[WheelFile]:
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        parser.read_string(text)
    except configparser.Error as error:
        raise _bad(wheel, f"entry_points.txt: {error}") from error
    if not parser.has_section("console_scripts"):
        return
    for name, target in parser.items("console_scripts"):
        match = re.fullmatch(r"([A-Za-z_][\w.]*)\s*:\s*([A-Za-z_][\w.]*)\s*(\[[^]]*\])?", target.strip())
        if match is None or not re.fullmatch(r"[A-Za-z0-9_][\w.-]*", name):
            raise _bad(wheel, f"a script that cannot be: {name} = {target}")
        script = _SCRIPT.format(module=match[1], root=match[2].split(".")[0], call=match[2])
        yield WheelFile(f"/usr/local/bin/{name}", script.encode(), 0o755)


def _info(metadata: str) -> WheelInfo:
    message = email.parser.HeaderParser().parsestr(metadata)
    licence = message.get("License-Expression")
    if not licence:
        classifiers = message.get_all("Classifier") or []
        named = [c.rsplit("::", 1)[1].strip() for c in classifiers if c.startswith("License ::")]
        stated = (message.get("License") or "").strip()
        short = stated if "\n" not in stated and 0 < len(stated) <= 80 else None
        licence = ", ".join(n for n in named if n != "OSI Approved") or short
    return WheelInfo(message.get("Name", ""), message.get("Version", ""), licence or None)
