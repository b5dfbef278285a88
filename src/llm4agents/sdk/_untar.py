"""A sandbox's tar stream unpacked on this machine, never outside the target: what `files.download` does. Blocking I/O.

The stream is the guest's, and the guest is hostile. So tarfile only reads one header block at a time (its own reading
of extended headers, and its checks of links, have no bounds or have had holes), and nothing is ever opened through a
link: directories are walked by descriptor, files appear under another name and are renamed.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llm4agents import limits
from llm4agents.errors import InvalidRequestError, LLM4AgentsError, ProtocolError, UnsupportedPlatformError

BLOCK = tarfile.BLOCKSIZE
PIECE_BYTES = 262_144
RECORDS_BYTES_MAX = 65_536
"""Of a pax header: two paths and some numbers."""
DEPTH_MAX = 1_024
TRAILER = b"LLM4AGENTS-TAR "
TRAILER_BYTES_MAX = 65_536
_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
Read = Callable[[int], bytes]
"""`read(n)`: n bytes, fewer only at the end of the stream."""


@dataclass(frozen=True, slots=True)
class Unpacked:
    """`left_out`: links that lead out of the target, devices, sockets; `unreadable`: what the server could not read."""

    entries: int = 0
    left_out: int = 0
    unreadable: int = 0
    first_unreadable: str | None = None


def unpack(read: Read, target: Path) -> Unpacked:
    """Unpack into `target`, which is made. Files keep mode (without set-id bits and writing by others) and mtime.

    Raises ProtocolError for a stream that is broken or cut, InvalidRequestError for what this machine refuses.
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
    try:
        return _members(read, place)
    except LLM4AgentsError:
        raise  # of the stream, though some are OSErrors
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else ""
        raise InvalidRequestError(f"{target / where} cannot be written: {error.strerror}") from error
    finally:
        place.close()


def _members(read: Read, place: _Place) -> Unpacked:
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
        info = _header(block)
        if info.type == tarfile.XHDTYPE:
            records = _records(read, info.size)
            continue
        name = records.get("path", os.fsencode(info.name))
        link = records.get("linkpath", os.fsencode(info.linkname))
        size, mtime = _number(records, "size", info.size), _mtime(records, float(info.mtime))
        records = {}
        entries += 1
        parts = _parts(name)
        if info.isreg():
            place.file(parts, read, size, info.mode, mtime)
        elif info.isdir():
            place.directory(parts, info.mode)
        elif not (
            (info.issym() and place.symlink(parts, link))
            or (info.islnk() and place.hard_link(parts, _parts(link)))
        ):
            left_out += 1
    return _end(read, Unpacked(entries, left_out))


def _header(block: bytes) -> tarfile.TarInfo:
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError, OverflowError) as error:
        raise ProtocolError(f"the sandbox's tar stream is broken: {error}") from None
    if info.size < 0 or not (
        info.type in (tarfile.XHDTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.REGTYPE)
        or info.isdev()
    ):
        raise ProtocolError("the sandbox's tar stream has a member of a strange kind")
    return info


def _records(read: Read, size: int) -> dict[str, bytes]:
    if size > RECORDS_BYTES_MAX:
        raise ProtocolError("the sandbox's tar stream has a header without end")
    data = read(size + -size % BLOCK)[:size]
    found: dict[str, bytes] = {}
    while data:
        length, space, _ = data.partition(b" ")
        if (
            not space
            or not length.isdigit()
            or len(length) > 6
            or not len(length) + 2 < int(length) <= len(data)
        ):
            raise ProtocolError("the sandbox's tar stream has a broken header")
        key, _, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
        found[key.decode("ascii", "replace")] = value
        data = data[int(length) :]
    return found


def _number(records: dict[str, bytes], name: str, default: int) -> int:
    text = records.get(name)
    if text is None:
        return default
    if not text.isdigit() or len(text) > 18:
        raise ProtocolError(f"the sandbox's tar stream has no sane {name}")
    return int(text)


def _mtime(records: dict[str, bytes], default: float) -> int:
    """In nanoseconds."""
    text = records.get("mtime")
    if text is None:
        return int(default) * 10**9
    whole, _, fraction = text.removeprefix(b"-").partition(b".")
    if not whole.isdigit() or len(whole) > 11 or not (fraction or b"0").isdigit():
        raise ProtocolError("the sandbox's tar stream has no sane mtime")
    value = int(whole) * 10**9 + int(fraction[:9].ljust(9, b"0"))
    return -value if text.startswith(b"-") else value


def _parts(name: bytes) -> list[str]:
    parts = os.fsdecode(name).rstrip("/").split("/")
    if len(name) > limits.PATH_BYTES_MAX or len(parts) > DEPTH_MAX or b"\0" in name:
        raise ProtocolError("the sandbox's tar stream has a name beyond every path")
    if any(part in ("", ".", "..") for part in parts):
        raise ProtocolError(f"the sandbox's tar stream has a member that leads out of it: {name[:200]!r}")
    return parts


def _end(read: Read, done: Unpacked) -> Unpacked:
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

    def symlink(self, parts: list[str], target: bytes) -> bool:
        """False for one that leads out: absolute, or with `..` anywhere but at its beginning, or too many of them."""
        names = [name for name in os.fsdecode(target).split("/") if name not in ("", ".")]
        ups = next((at for at, name in enumerate(names) if name != ".."), len(names))
        if (
            not target
            or target.startswith(b"/")
            or b"\0" in target
            or ups >= len(parts)
            or ".." in names[ups:]
        ):
            return False
        self._put(parts, lambda name, directory: os.symlink(target, os.fsencode(name), dir_fd=directory))
        return True

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
