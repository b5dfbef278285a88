"""The content-addressed cache: blobs by digest, an index from inputs to results, locks, atomic publication.

Whatever is made is made in a `tmpdir()` and appears under its name whole or not at all. What a process that
died has left there is swept by the next. What things mean (kernels, templates) is not known here.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm4agents import scratch
from llm4agents.errors import InvalidRequestError
from llm4agents.images.process import Cancel, room
from llm4agents.images.progress import Progress, silent

_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,127}")
LOCK_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class Usage:
    """What one part of the cache takes on disk: allocated bytes, not lengths (memory files are sparse)."""

    name: str
    path: Path
    bytes: int


@dataclass(frozen=True, slots=True)
class Pruned:
    removed: list[str]
    bytes: int


class Cache:
    """One cache directory. Cheap to make, holds no state; several processes may use one directory at once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tmp = root / "tmp"
        self.blobs = root / "blobs" / "sha256"
        self.index = root / "index"
        self.locks = root / "locks"
        self.templates = root / "templates"

    # --- blobs

    def blob_path(self, digest: str) -> Path:
        """Where the blob of that SHA-256 (64 hex digits) is or would be."""
        if not _DIGEST.fullmatch(digest):
            raise InvalidRequestError(f"{digest!r} is not a SHA-256 digest")
        return self.blobs / digest[:2] / digest

    def blob(self, digest: str) -> Path | None:
        path = self.blob_path(digest)
        return path if path.is_file() else None

    def ingest(
        self, path: Path, cancel: Cancel | None = None, *, digest: str | None = None
    ) -> tuple[str, Path]:
        """Move a finished file of a tmpdir into the store, read-only; returns its digest and its new path.

        `digest`: its SHA-256 for who has computed it while writing it.
        """
        with room(self.root):
            digest = digest or sha256_file(path, cancel)
            dest = self.blob_path(digest)
            if not dest.is_file():
                path.chmod(0o444)
                dest.parent.mkdir(parents=True, exist_ok=True)
                fsync(path)
                path.replace(dest)
                fsync(dest.parent)
            else:
                path.unlink()
            return digest, dest

    def ingest_bytes(self, data: bytes) -> tuple[str, Path]:
        """The same for bytes in memory."""
        digest = hashlib.sha256(data).hexdigest()
        dest = self.blob_path(digest)
        if not dest.is_file():
            with self.tmpdir() as tmp, room(self.root, len(data)):
                (tmp / "blob").write_bytes(data)
                return self.ingest(tmp / "blob")
        return digest, dest

    # --- from inputs to results

    def remember(self, kind: str, key: str, body: dict[str, Any]) -> None:
        """Write down what the inputs `key` came to, over what was known. What it names must be published."""
        dest = self._entry(kind, key)
        with self.tmpdir() as tmp, room(self.root):
            (tmp / "entry").write_text(json.dumps(body, indent=1, sort_keys=True))
            dest.parent.mkdir(parents=True, exist_ok=True)
            fsync(tmp / "entry")
            (tmp / "entry").replace(dest)
            fsync(dest.parent)

    def recall(self, kind: str, key: str) -> dict[str, Any] | None:
        """What `remember` wrote, or None; an entry that can't be read counts as none."""
        try:
            body = json.loads(self._entry(kind, key).read_text())
        except (OSError, ValueError):
            return None
        return body if isinstance(body, dict) else None

    def _entry(self, kind: str, key: str) -> Path:
        if not _NAME.fullmatch(kind) or not _NAME.fullmatch(key):
            raise InvalidRequestError(f"{kind}/{key} cannot be a cache entry's name")
        return self.index / kind / f"{key}.json"

    # --- one at a time

    @contextlib.asynccontextmanager
    async def lock(self, name: str, progress: Progress = silent) -> AsyncIterator[None]:
        """Hold the lock of that name; whoever else builds the same waits, and says for which process.

        The kernel drops it with its holder, however that ends. Look again for the result after you got it.
        """
        if not _NAME.fullmatch(name):
            raise InvalidRequestError(f"{name!r} cannot be a lock's name")
        async with self._flock(name, fcntl.LOCK_EX, progress):
            yield

    # --- half-made and whole

    @contextlib.contextmanager
    def tmpdir(self) -> Iterator[Path]:
        """A directory for what is not finished, gone afterwards unless `publish` has moved it away.

        Removing a large one takes as long as the disk likes: on an event loop use `workdir`.
        """
        with self._new_tmp() as path:
            try:
                yield path
            finally:
                _remove_tree(path)

    @contextlib.asynccontextmanager
    async def workdir(self) -> AsyncIterator[Path]:
        """`tmpdir` for who must not block: a tree of thousands of files is removed in a thread, and waited for."""
        with self._new_tmp() as path:
            try:
                yield path
            finally:
                removal = asyncio.ensure_future(asyncio.to_thread(_remove_tree, path))
                try:
                    await asyncio.shield(removal)
                except asyncio.CancelledError:
                    await asyncio.wait([removal])
                    raise

    @contextlib.contextmanager
    def _new_tmp(self) -> Iterator[Path]:
        with contextlib.ExitStack() as stack:
            with room(self.root):
                path = stack.enter_context(scratch.held(self.tmp))
            yield path

    def publish(self, tmp: Path, dest: Path) -> bool:
        """Move a finished directory into place, durably. False (`tmp` is left) if `dest` is there already."""
        with room(self.root):
            fsync_tree(tmp)
            dest.parent.mkdir(parents=True, exist_ok=True)
            try:
                tmp.rename(dest)
            except OSError:
                if dest.is_dir():
                    return False
                raise
            fsync(dest.parent)
            return True

    def sweep(self) -> list[Path]:
        """Remove what dead processes left in `tmp`; returns it. Never touches what a live one is making."""
        swept = []
        for path in sorted(self.tmp.iterdir()) if self.tmp.is_dir() else []:
            with scratch.abandoned(path) as free:
                if free:
                    _remove_tree(path)
                    swept.append(path)
        return swept

    # --- housekeeping

    def du(self) -> list[Usage]:
        """Disk use by part: each template, blobs, what is being made, the rest."""
        parts = [("blobs", self.root / "blobs"), ("tmp", self.tmp), ("build", self.root / "build")]
        parts += [("protected paths", self.root / "protect"), ("steps of builds", self.root / "steps")]
        parts += [("files sent for builds", self.root / "copies")]
        if self.templates.is_dir():
            parts += [(f"template {p.name}", p) for p in sorted(self.templates.iterdir()) if p.is_dir()]
        return [Usage(name, path, tree_bytes(path)) for name, path in parts if path.exists()]

    async def prune(self, keep: frozenset[str] = frozenset(), progress: Progress = silent) -> Pruned:
        """Remove what dead builds left, and blobs that neither a template variant nor `keep` names.

        Index entries that named such a blob go with it. Waits until no build is under way (`building`).
        """
        removed, size = [], 0
        async with self._flock("cache", fcntl.LOCK_EX, progress):
            for path in [*self.sweep()]:
                removed.append(str(path))
            keep = keep | self._referred()
            for path in sorted(self.blobs.glob("??/*")):
                if path.name not in keep:
                    size += path.stat().st_blocks * 512
                    path.unlink()
                    removed.append(str(path))
            for path in sorted(self.index.glob("*/*.json")):
                named = _DIGEST.findall(path.read_text(errors="replace"))
                if any(self.blob(digest) is None for digest in named):
                    path.unlink()
                    removed.append(str(path))
        return Pruned(removed, size)

    def _referred(self) -> set[str]:
        """Every digest that a template variant, or the disk kept after a step of a build, names anywhere."""
        found: set[str] = set()
        for pattern in ("templates/*/keys/*/template.json", "steps/*/step.json"):
            for path in self.root.glob(pattern):
                with contextlib.suppress(OSError):
                    found.update(_DIGEST.findall(path.read_text(errors="replace")))
        return found

    @contextlib.asynccontextmanager
    async def building(self, progress: Progress = silent) -> AsyncIterator[None]:
        """Held (shared) from before a build looks up its inputs until what it made is referred to."""
        async with self._flock("cache", fcntl.LOCK_SH, progress):
            yield

    @contextlib.asynccontextmanager
    async def _flock(self, name: str, how: int, progress: Progress) -> AsyncIterator[None]:
        self.locks.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.locks / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            told = False
            while True:
                try:
                    fcntl.flock(fd, how | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not told:
                        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "?"
                        progress("wait", f"waiting for another build (pid {holder})", None)
                        told = True
                    # Polled, since a thread blocked in flock could not be cancelled.
                    await asyncio.sleep(LOCK_RETRY_S)
            with contextlib.suppress(OSError):  # a full disk must not forbid locking
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(fd)


def digest_of(body: object) -> str:
    """SHA-256 of a JSON-able value in its canonical form: the key of what is made from it."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_file(path: Path, cancel: Cancel | None = None) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(4_194_304):
            if cancel is not None:
                cancel.check()
            digest.update(chunk)
    return digest.hexdigest()


def fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_tree(root: Path) -> None:
    for directory, _, files in os.walk(root, topdown=False):
        for name in files:
            path = Path(directory, name)
            if path.is_file() and not path.is_symlink():
                fsync(path)
        fsync(Path(directory))


def tree_bytes(root: Path) -> int:
    """Bytes that a tree really takes."""
    total = 0
    for directory, _, files in os.walk(root):
        for name in files:
            with contextlib.suppress(OSError):
                total += Path(directory, name).lstat().st_blocks * 512
    return total


def _remove_tree(path: Path) -> None:
    """Remove a tree of our own tmp, unless something is mounted in it (a bound /dev is not ours to empty)."""
    with contextlib.suppress(OSError):
        prefix = f"{path}/"
        mounts = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
        if any(mount.startswith(prefix) or mount == str(path) for mount in mounts):
            return
    for directory, _, _ in os.walk(path):
        with contextlib.suppress(OSError):
            Path(directory).chmod(
                0o700
            )  # a package's 0500 directory would keep an ordinary user from emptying it
    shutil.rmtree(path, ignore_errors=True)
