"""The files of a build's copies: tars sent ahead, named by their digest, checked before they are kept.

Each project has its own: a digest that somebody guessed gets him nobody's files. A tar holds files, directories and
links below one directory; links are kept as links and nothing is ever followed on this host, which unpacks none: the
guest's agent does. Not here: what goes into a tar (`sdk._build_files`), unpacking (`guest`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import shutil
import tarfile
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from llm4agents import limits, tarblocks
from llm4agents.errors import InvalidRequestError, ProtocolError
from llm4agents.images.cache import Cache, fsync
from llm4agents.images.process import check_room, in_thread, room

_DIGEST = re.compile(r"[0-9a-f]{64}")
_PROJECT = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_RECORDS: Final = frozenset({"path", "linkpath", "size", "mtime", "atime", "ctime"})
"""What a pax header may say here: no owner, nothing that makes a sparse file."""
_KINDS: Final = (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE)
_PIECE_BYTES: Final = 262_144
_LOOK_BYTES: Final = 16 << 20
"""How much of a copy is taken in before it is looked again whether there is room."""
_ID_MAX: Final = 0o7777777
"""Of a header's field."""
_END: Final = bytes(2 * tarblocks.BLOCK)


class Checker:
    """A tar as it comes: `feed` raises InvalidRequestError for one that is not what a copy may be. Pure."""

    def __init__(self) -> None:
        self.entries = 0
        self.ended = False
        self._held = bytearray()
        self._skip = 0
        self._fields: dict[str, bytes] = {}
        self._links: set[bytes] = set()
        """Digests of their paths: there may be many, and long ones."""

    def feed(self, piece: bytes) -> None:
        if self.ended:
            if piece.count(0) != len(piece):
                raise InvalidRequestError("the tar goes on after its end")
            return
        if self._skip >= len(piece):
            self._skip -= len(piece)
            return
        self._held += piece[self._skip :]
        self._skip = 0
        try:
            while len(self._held) >= tarblocks.BLOCK and not self.ended:
                if not self._block():
                    return
        except ProtocolError as error:
            words = error.message.replace("the sandbox's tar stream", "the tar")
            raise InvalidRequestError(words, hint="the SDK and the command line make one") from None

    def _block(self) -> bool:
        """Take one member's header from what is held; False when more of it must come first."""
        block = bytes(self._held[: tarblocks.BLOCK])
        if not any(block):
            self.ended = True
            rest = self._held[tarblocks.BLOCK :]
            if rest.count(0) != len(rest):
                raise InvalidRequestError("the tar goes on after its end")
            return False
        info = tarblocks.header(block)
        if info.type == tarfile.XHDTYPE:
            whole = tarblocks.BLOCK + info.size + -info.size % tarblocks.BLOCK
            if len(self._held) < whole:
                return False
            self._fields = tarblocks.records(bytes(self._held[tarblocks.BLOCK : tarblocks.BLOCK + info.size]))
            if strange := set(self._fields) - _RECORDS:
                raise InvalidRequestError(
                    f"the tar says {sorted(strange)[0][:80]!r} of a member, which no copy may"
                )
            del self._held[:whole]
            return True
        self._member(info)
        size = tarblocks.number(self._fields, "size", info.size) if info.isreg() else 0
        self._fields = {}
        passed = min(len(self._held), whole := tarblocks.BLOCK + size + -size % tarblocks.BLOCK)
        del self._held[:passed]
        self._skip = whole - passed
        return True

    def _member(self, info: tarfile.TarInfo) -> None:
        self.entries += 1
        if self.entries > limits.COPY_ENTRIES_MAX:
            raise InvalidRequestError(
                f"the tar has more than {limits.COPY_ENTRIES_MAX} entries", hint="leave some out (ignore)"
            )
        if info.type not in _KINDS:
            raise InvalidRequestError(f"the tar has a member of a strange kind: {info.name[:200]!r}")
        parts = tarblocks.parts(self._fields.get("path", os.fsencode(info.name)))
        path = hashlib.blake2b(digest_size=16)
        for at, part in enumerate(parts):  # each directory above it, without looking at any byte twice
            if at and self._links and path.digest() in self._links:
                raise InvalidRequestError(f"the tar has a member behind a link: {'/'.join(parts)[:200]!r}")
            path.update(os.fsencode(part) + b"/")
        if info.issym():
            self._links.add(path.digest())
        else:
            self._links.discard(path.digest())
        if info.islnk():
            tarblocks.parts(self._fields.get("linkpath", os.fsencode(info.linkname)))


class Copies:
    """Those of one cache."""

    def __init__(self, cache: Cache) -> None:
        self._cache, self._root = cache, cache.root / "copies"

    def find(self, project: str, digest: str) -> Path | None:
        """The tar of that digest that the project has sent; it counts as used now. Raises InvalidRequestError."""
        path = self._path(project, digest)
        try:
            os.utime(path)
        except OSError:
            return None
        return path

    def _path(self, project: str, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise InvalidRequestError(f"{digest[:80]!r} is no SHA-256: 64 hex digits are wanted")
        if not _PROJECT.fullmatch(project) or project.startswith("."):
            raise InvalidRequestError(f"{project[:80]!r} is no project")
        return self._root / project / f"{digest}.tar"

    async def receive(self, project: str, digest: str, chunks: AsyncIterable[bytes]) -> int:
        """Take in the tar of that digest; its bytes. Raises InvalidRequestError (another digest, too large, no tar a
        copy may be), CapacityError; then nothing of it is kept."""
        dest = self._path(project, digest)
        self._cache.root.mkdir(parents=True, exist_ok=True)  # a new server's, which has built nothing yet
        check_room(self._cache.root, limits.DISK_FREE_BYTES_MIN)
        hashed, size, looked, checker = hashlib.sha256(), 0, 0, Checker()

        def take(file: BinaryIO, chunk: bytes) -> None:
            # Not on the event loop: of a tar that is nothing but headers this is work.
            checker.feed(chunk)
            hashed.update(chunk)
            file.write(chunk)

        async with self._cache.workdir() as tmp:
            path = tmp / "copy.tar"
            with room(tmp), path.open("xb") as file:
                async for chunk in chunks:
                    size += len(chunk)
                    if size > limits.COPY_BYTES_MAX:
                        raise InvalidRequestError(
                            f"the files of one copy are at most {limits.COPY_BYTES_MAX >> 20} MiB",
                            hint="leave some out (ignore), or fetch them in a step",
                        )
                    if size - looked >= _LOOK_BYTES:  # others write too
                        looked = size
                        check_room(self._cache.root, limits.DISK_FREE_BYTES_MIN)
                    await asyncio.to_thread(take, file, chunk)
            if not checker.ended:
                raise InvalidRequestError("the tar is cut short")
            if hashed.hexdigest() != digest:
                raise InvalidRequestError(
                    "what was sent has another digest", hint="did the files change meanwhile? build again"
                )

            def publish() -> None:
                with room(self._cache.root):
                    fsync(path)
                    dest.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                    path.replace(dest)
                self._evict(dest.parent, dest)

            await in_thread(lambda _: publish())
        return size

    def _evict(self, directory: Path, but: Path) -> None:
        found = []
        for path in directory.iterdir():
            with contextlib.suppress(OSError):
                entry = path.stat()
                found.append((entry.st_mtime, entry.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total > limits.COPIES_BYTES_MAX and path != but:
                path.unlink(missing_ok=True)
                total -= size

    def prune(self, *, everything: bool, unused_s: float, now: float) -> list[str]:
        """Remove what no build has used for so long, or all; the paths."""
        gone = []
        for path in sorted(self._root.glob("*/*.tar")):
            with contextlib.suppress(OSError):
                if everything or now - path.stat().st_mtime >= unused_s:
                    path.unlink()
                    gone.append(str(path))
        return gone

    def forget(self, project: str) -> None:
        """All of a project that is gone."""
        shutil.rmtree(self._path(project, "0" * 64).parent, ignore_errors=True)


async def owned(path: Path, uid: int, gid: int) -> AsyncIterator[bytes]:
    """The tar at `path`, which was checked, with that owner of everything in it. Raises InvalidRequestError."""
    if max(uid, gid) > _ID_MAX:
        raise InvalidRequestError(f"files cannot be copied for the user {uid}: more than {_ID_MAX}")
    pieces = _owned(path, uid, gid)
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece


def _owned(path: Path, uid: int, gid: int) -> Iterator[bytes]:
    held = bytearray()
    fields: dict[str, bytes] = {}
    with path.open("rb") as file:
        while any(block := file.read(tarblocks.BLOCK)):
            info = tarblocks.header(block)
            if info.type == tarfile.XHDTYPE:
                body = file.read(info.size + -info.size % tarblocks.BLOCK)
                fields = tarblocks.records(body[: info.size])
                held += block + body
                continue
            held += _with_owner(block, uid, gid)
            left = tarblocks.number(fields, "size", info.size) if info.isreg() else 0
            left += -left % tarblocks.BLOCK
            fields = {}
            while left:
                piece = file.read(min(left, _PIECE_BYTES))
                if not piece:
                    raise InvalidRequestError("the tar is cut short")
                left -= len(piece)
                held += piece
                if len(held) >= _PIECE_BYTES:
                    yield bytes(held)
                    held.clear()
    yield bytes(held + _END)


def _with_owner(block: bytes, uid: int, gid: int) -> bytes:
    """A member's header with those numbers and no names, its checksum right again."""
    header = bytearray(block)
    for at, number in ((108, uid), (116, gid)):
        header[at : at + 8] = b"%07o\0" % number
    header[265:329] = bytes(64)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)
