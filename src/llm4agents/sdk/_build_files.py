"""The files of a template's copies: what is left out, and the rest as a tar that is the same for the same files.

Names are in order, times and owners are nobody's, so that only what is in a file, its name and its mode make another
digest. Links stay links. Blocking I/O. Not here: sending it (`_async.template`).
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llm4agents import limits
from llm4agents.errors import InvalidRequestError

PIECE_BYTES = 262_144
MTIME = 1_577_836_800
"""Of every file, 2020-01-01: some tools mind times before 1980."""


@dataclass(frozen=True, slots=True)
class Source:
    """What one copy sends: `target` is the directory it goes to, `name` what a single file is called there."""

    path: Path
    target: str
    name: str | None
    ignore: tuple[str, ...]

    def pieces(self) -> Iterator[bytes]:
        """Its tar. Raises InvalidRequestError naming what cannot be read or is too large."""
        sent = 0
        try:
            for piece in self._all():
                sent += len(piece)
                if sent > limits.COPY_BYTES_MAX:
                    raise InvalidRequestError(
                        f"{self.path} has more than {limits.COPY_BYTES_MAX >> 20} MiB",
                        hint="leave some out (ignore), or fetch it in a step",
                    )
                yield piece
        except OSError as error:
            where = error.filename or self.path
            raise InvalidRequestError(f"{where} cannot be read: {error.strerror}", path=str(where)) from error

    def digest(self) -> str:
        """SHA-256 of its tar."""
        hashed = hashlib.sha256()
        for piece in self.pieces():
            hashed.update(piece)
        return hashed.hexdigest()

    def _all(self) -> Iterator[bytes]:
        held = bytearray()
        for at, (path, name) in enumerate(self._entries()):
            if at >= limits.COPY_ENTRIES_MAX:
                raise InvalidRequestError(
                    f"{self.path} has more than {limits.COPY_ENTRIES_MAX} files",
                    hint="leave some out (ignore)",
                )
            for piece in _member(path, name):
                held += piece
                if len(held) >= PIECE_BYTES:
                    yield bytes(held)
                    held.clear()
        yield bytes(held) + bytes(2 * tarfile.BLOCKSIZE)

    def _entries(self) -> Iterator[tuple[str, str]]:
        top = os.fspath(self.path)
        if self.name is not None:
            yield top, self.name
            return
        ignored = matcher(self.ignore)
        yield from _walk(top, "", ignored)


def source(path: Path, to: str, ignore: Sequence[str]) -> Source:
    """What is copied from `path` to `to`: of a directory what is in it; a file to the file `to`, or into the directory
    when that ends with `/`. Raises InvalidRequestError."""
    if not path.exists():
        raise InvalidRequestError(
            f"{path} is not there", hint="copies are relative to the directory of the recipe"
        )
    if path.is_dir():
        return Source(path, to, None, tuple(ignore))
    if to.endswith("/") or to in (".", ""):
        return Source(path, to.rstrip("/") or ("/" if to.startswith("/") else "."), path.name, ())
    directory, _, name = to.rpartition("/")
    return Source(path, directory or ("/" if to.startswith("/") else "."), name, ())


def matcher(patterns: Sequence[str]) -> Callable[[str, bool], bool]:
    """Whether a path below the source (`/` between its names) is left out. Pure.

    As in a .gitignore: a pattern without `/` is about names at any depth, one with it about the path; `*`, `?`, `[…]`,
    `**`; with `/` at its end about directories alone; `!` takes in again; the last one that fits counts.
    """
    compiled = [
        (not text.startswith("!"), text.endswith("/"), _pattern(text)) for text in patterns if text.strip()
    ]

    def ignored(path: str, directory: bool) -> bool:
        verdict = False
        for out, directories, pattern in compiled:
            if (directory or not directories) and pattern.fullmatch(path):
                verdict = out
        return verdict

    return ignored


def _pattern(text: str) -> re.Pattern[str]:
    text = text.removeprefix("!").rstrip("/")
    anywhere = "/" not in text
    text = text.removeprefix("/").removeprefix("./")
    found, at = [], 0
    while at < len(text):
        if text.startswith("**/", at):
            found.append("(?:.*/)?")
            at += 3
        elif text.startswith("**", at):
            found.append(".*")
            at += 2
        elif text[at] == "*":
            found.append("[^/]*")
            at += 1
        elif text[at] == "?":
            found.append("[^/]")
            at += 1
        elif text[at] == "[" and "]" in text[at + 2 :]:
            end = text.index("]", at + 2)
            inner = text[at + 1 : end].replace("\\", "\\\\")
            found.append(f"[{'^' + inner[1:] if inner[0] == '!' else inner}]")
            at = end + 1
        else:
            found.append(re.escape(text[at]))
            at += 1
    try:
        return re.compile(("(?:.*/)?" if anywhere else "") + "".join(found), re.DOTALL)
    except re.error as error:
        raise InvalidRequestError(f"ignore: {text!r} cannot be read: {error}") from None


def _walk(top: str, prefix: str, ignored: Callable[[str, bool], bool]) -> Iterator[tuple[str, str]]:
    with os.scandir(os.path.join(top, prefix) if prefix else top) as found:  # noqa: PTH118, names of any bytes
        entries = sorted(found, key=lambda entry: os.fsencode(entry.name))
    for entry in entries:
        name, directory = prefix + entry.name, entry.is_dir(follow_symlinks=False)
        if ignored(name, directory):
            # What is in a directory that is left out can be taken in by nothing: as in a .gitignore.
            continue
        yield entry.path, name
        if directory:
            yield from _walk(top, f"{name}/", ignored)


def _member(path: str, name: str) -> Iterator[bytes]:
    found = os.lstat(path)
    info = tarfile.TarInfo(name)
    info.mode, info.mtime = stat.S_IMODE(found.st_mode), MTIME
    if stat.S_ISLNK(found.st_mode):
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, os.readlink(path), 0o777  # noqa: PTH115
    elif stat.S_ISDIR(found.st_mode):
        info.type = tarfile.DIRTYPE
    elif stat.S_ISREG(found.st_mode):
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            info.size = os.fstat(file.fileno()).st_size
            yield info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
            left = info.size
            while left:
                # One that has shrunk is filled up: its header has been sent.
                piece = file.read(min(left, PIECE_BYTES)) or bytes(min(left, PIECE_BYTES))
                left -= len(piece)
                yield piece
        yield bytes(-info.size % tarfile.BLOCKSIZE)
        return
    else:
        return  # a socket, FIFO or device of this machine means nothing there
    yield info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
