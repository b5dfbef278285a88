"""A sandbox's tar stream unpacked on this machine, never outside the target: what `files.download` does. Blocking I/O.

The stream is the guest's, and the guest is hostile. So its headers are read by `tarblocks`, and nothing is ever opened
through a link: directories are walked by descriptor, files appear under another name and are renamed. What this machine
would obey is left out and reported (`_landing.Guard`).
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from llm4agents import protected, tarblocks
from llm4agents.errors import InvalidRequestError, LLM4AgentsError, ProtocolError, UnsupportedPlatformError
from llm4agents.sdk._landing import Guard, ProtectedPath
from llm4agents.tarblocks import BLOCK

PIECE_BYTES = 262_144
TRAILER = b"LLM4AGENTS-TAR "
TRAILER_BYTES_MAX = 65_536
_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
Read = Callable[[int], bytes]
"""`read(n)`: n bytes, fewer only at the end of the stream."""


@dataclass(frozen=True, slots=True)
class Unpacked:
    """`left_out`: links that lead out of the target, devices, sockets; `unreadable`: what the server could not read;
    `protected`: what this machine would obey, `protected_count` of them."""

    entries: int = 0
    left_out: int = 0
    unreadable: int = 0
    first_unreadable: str | None = None
    protected: tuple[ProtectedPath, ...] = ()
    protected_count: int = 0


def unpack(read: Read, target: Path, guard: Guard | None = None) -> Unpacked:
    """Unpack into `target`, which is made. Files keep mode (without set-id bits and writing by others) and mtime.

    `guard` says what is left out (default: all that is protected). Raises ProtocolError for a stream that is broken or
    cut, InvalidRequestError for what this machine refuses.
    """
    if os.open not in os.supports_dir_fd:
        raise UnsupportedPlatformError(
            "directories cannot be downloaded safely on this platform", hint="files.tar() gives an archive"
        )
    try:
        target.mkdir(parents=True, exist_ok=True)
        root = os.open(target, _DIRECTORY & ~getattr(os, "O_NOFOLLOW", 0))
    except OSError as error:
        raise InvalidRequestError(f"{target} cannot be written: {error.strerror}") from error
    place = _Place(root, target)
    guard = Guard(target) if guard is None else guard
    try:
        done = _members(read, place, guard)
        return replace(done, protected=tuple(guard.found), protected_count=guard.count)
    except LLM4AgentsError:
        raise  # of the stream, though some are OSErrors
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else ""
        raise InvalidRequestError(f"{target / where} cannot be written: {error.strerror}") from error
    finally:
        place.close()


def _members(read: Read, place: _Place, guard: Guard) -> Unpacked:
    entries = left_out = 0
    records: dict[str, bytes] = {}
    while True:
        block = read(BLOCK)
        if len(block) < BLOCK:
            raise ProtocolError(
                "the sandbox's tar stream broke off", hint="what had come is there; call again"
            )
        if not any(block):
            break
        info = tarblocks.header(block)
        if info.type == tarfile.XHDTYPE:
            records = tarblocks.records(read(info.size + -info.size % BLOCK)[: info.size])
            continue
        name = records.get("path", os.fsencode(info.name))
        link = records.get("linkpath", os.fsencode(info.linkname))
        size = tarblocks.number(records, "size", info.size)
        mtime = tarblocks.mtime(records, float(info.mtime))
        records = {}
        entries += 1
        parts = tarblocks.parts(name)
        if info.isreg():
            if guard.refuses(parts):
                _skip(read, size)
            else:
                place.file(parts, read, size, info.mode, mtime)
        elif info.isdir():
            if not guard.refuses(parts, "directory"):
                place.directory(parts, info.mode)
        elif info.issym():
            inside = _inside(parts, link)
            if inside is None:
                left_out += 1
            elif not guard.refuses_link(parts, inside, symbolic=True):
                place.symlink(parts, link)
        elif info.islnk():
            first = tarblocks.parts(link)
            if not guard.refuses_link(parts, first, symbolic=False) and not place.hard_link(parts, first):
                left_out += 1
        else:
            left_out += 1
    return _end(read, Unpacked(entries, left_out), guard)


def _skip(read: Read, size: int) -> None:
    left = size + -size % BLOCK
    while left:
        piece = read(min(left, PIECE_BYTES))
        if not piece:
            raise ProtocolError("the sandbox's tar stream broke off", hint="call again")
        left -= len(piece)


def _inside(parts: list[str], target: bytes) -> list[str] | None:
    """Where a symbolic link leads; None when that is out of the tree: absolute, or with `..` anywhere but at its
    beginning, or too many of them."""
    names = [name for name in os.fsdecode(target).split("/") if name not in ("", ".")]
    ups = next((at for at, name in enumerate(names) if name != ".."), len(names))
    if not target or target.startswith(b"/") or b"\0" in target or ups >= len(parts) or ".." in names[ups:]:
        return None
    return [*parts[: len(parts) - 1 - ups], *names[ups:]]


def _end(read: Read, done: Unpacked, guard: Guard) -> Unpacked:
    """The rest of the stream, and in it what the server says was left out."""
    rest = read(TRAILER_BYTES_MAX)
    while read(PIECE_BYTES):
        pass
    at = rest.find(TRAILER)
    if at < 0:
        return done
    try:
        said = json.loads(rest[at + len(TRAILER) :].partition(b"\n")[0])
        first = said.get("first_unreadable")
        for path in said.get("protected_paths") or ():
            guard.report(str(path), protected.OPERATOR)
        guard.count += max(0, int(said.get("protected") or 0) - len(said.get("protected_paths") or ()))
        return Unpacked(
            done.entries,
            done.left_out + int(said.get("skipped") or 0),
            int(said.get("unreadable") or 0),
            None if first is None else str(first),
        )
    except (ValueError, TypeError, AttributeError):
        raise ProtocolError("the sandbox's tar stream has a broken end") from None


class _Place:
    """The directory it goes into, by descriptor. `close` lets go of it."""

    def __init__(self, root: int, target: Path) -> None:
        self._root, self._target = root, target
        self._parent: tuple[list[str], int] = ([], os.dup(root))

    def close(self) -> None:
        os.close(self._parent[1])
        os.close(self._root)

    def _directory_at(self, parts: list[str]) -> int:
        """A descriptor of a directory below the top, which is made if it is missing; stays this object's."""
        known, descriptor = self._parent
        if known == parts:
            return descriptor
        at = os.dup(self._root)
        for count, name in enumerate(parts, 1):
            try:
                try:
                    inner = os.open(name, _DIRECTORY, dir_fd=at)
                except FileNotFoundError:
                    os.mkdir(name, 0o755, dir_fd=at)
                    inner = os.open(name, _DIRECTORY, dir_fd=at)
            except NotADirectoryError as error:
                raise self._in_the_way(parts[:count]) from error
            except OSError as error:
                if getattr(error, "errno", None) == 40:  # ELOOP, as some systems have it
                    raise self._in_the_way(parts[:count]) from error
                raise
            finally:
                os.close(at)
            at = inner
        os.close(descriptor)
        self._parent = (list(parts), at)
        return at

    def _in_the_way(self, parts: list[str]) -> InvalidRequestError:
        return InvalidRequestError(
            f"{self._target.joinpath(*parts)} is a link or no directory on this machine",
            hint="download into a new directory",
        )

    def _put(self, parts: list[str], make: Callable[[str, int], None]) -> None:
        """Have `make(name, directory)` make something, and rename it into its place when it is whole."""
        directory = self._directory_at(parts[:-1])
        part = f".l4a-{os.urandom(6).hex()}.part"
        try:
            make(part, directory)
            os.replace(part, parts[-1], src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(part, dir_fd=directory)
            if isinstance(error, OSError) and not isinstance(error, LLM4AgentsError):
                error.filename = "/".join(parts)
            raise

    def file(self, parts: list[str], read: Read, size: int, mode: int, mtime_ns: int) -> None:
        def make(name: str, directory: int) -> None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
            descriptor = os.open(name, flags, 0o600, dir_fd=directory)
            try:
                left = size
                while left:
                    piece = read(min(left, PIECE_BYTES))
                    if not piece:
                        raise ProtocolError("the sandbox's tar stream broke off", hint="call again")
                    left -= len(piece)
                    _write(descriptor, piece)
                read(-size % BLOCK)
                os.fchmod(descriptor, stat.S_IMODE(mode) & 0o755 | 0o600)
                os.utime(descriptor, ns=(mtime_ns, mtime_ns))
            finally:
                os.close(descriptor)

        self._put(parts, make)

    def directory(self, parts: list[str], mode: int) -> None:
        os.fchmod(self._directory_at(parts), stat.S_IMODE(mode) & 0o755 | 0o700)

    def symlink(self, parts: list[str], target: bytes) -> None:
        self._put(parts, lambda name, directory: os.symlink(target, os.fsencode(name), dir_fd=directory))

    def hard_link(self, parts: list[str], first: list[str]) -> bool:
        source = os.dup(self._directory_at(first[:-1]))
        try:
            if not stat.S_ISREG(os.stat(first[-1], dir_fd=source, follow_symlinks=False).st_mode):
                return False

            def make(name: str, directory: int) -> None:
                os.link(first[-1], name, src_dir_fd=source, dst_dir_fd=directory, follow_symlinks=False)

            self._put(parts, make)
        except FileNotFoundError:
            return False
        finally:
            os.close(source)
        return True


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
