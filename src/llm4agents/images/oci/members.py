"""The members of a layer's tar, whose writer may be hostile: names, kinds, owners, where their bytes are. Reads a file.

tarfile reads one header block at a time here; its own reading of long names and extended headers has no bounds. Not for
what members mean to each other: that is `tree`.
"""

from __future__ import annotations

import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, NoReturn

from llm4agents import limits
from llm4agents.images.oci.manifest import refuse

BLOCK = tarfile.BLOCKSIZE
_ATTRIBUTE = b"SCHILY.xattr."
_KINDS = {
    tarfile.REGTYPE: stat.S_IFREG,
    tarfile.AREGTYPE: stat.S_IFREG,
    tarfile.CONTTYPE: stat.S_IFREG,
    tarfile.GNUTYPE_SPARSE: stat.S_IFREG,
    tarfile.DIRTYPE: stat.S_IFDIR,
    tarfile.SYMTYPE: stat.S_IFLNK,
    tarfile.FIFOTYPE: stat.S_IFIFO,
}
_NUMBER_MAX = 1 << 60
Extents = tuple[tuple[int, int, int], ...]


@dataclass(slots=True)
class Member:
    kind: int
    """S_IFREG, S_IFDIR, S_IFLNK or S_IFIFO; 0: a hard link."""
    path: list[bytes]
    """Its components, none of which is empty, `.` or `..`; none at all: the root itself."""
    link: bytes
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    size: int
    at: int
    extents: Extents | None
    attributes: dict[bytes, bytes] | None


def read(file: BinaryIO, size: int, layer: str) -> Iterator[Member]:
    """Every member of the tar in the first `size` bytes of `file`. `layer` is for messages ("layer 2").

    Raises InvalidRequestError for devices, for names that lead elsewhere and for what is broken.
    """
    return _Reader(file, size, layer).members()


class _Reader:
    def __init__(self, file: BinaryIO, size: int, layer: str) -> None:
        self._file, self._size, self._layer = file, size, layer
        self._at = 0
        self._fields: dict[bytes, bytes] = {}
        self._sparse: list[tuple[bytes, bytes]] = []
        self._headers = 0
        """Bytes of what the next member says of itself."""

    def _no(self, why: str) -> NoReturn:
        refuse(f"{self._layer} {why}")

    def _take(self, length: int) -> bytes:
        if length > self._size - self._at:
            self._no("is a tar that is cut short")
        self._file.seek(self._at)
        data = self._file.read(length)
        if len(data) < length:
            self._no("is a tar that is cut short")
        self._at += length
        return data

    def members(self) -> Iterator[Member]:
        while self._at < self._size:
            block = self._take(BLOCK)
            if not any(block):
                return
            try:
                info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            except (tarfile.HeaderError, ValueError, OverflowError, IndexError) as error:
                self._no(f"is a broken tar: {error}")
            if not 0 <= info.size <= _NUMBER_MAX:
                self._no("has a member of no sane size")
            if info.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE):
                data = self._extra(info.size)
                if info.type != tarfile.XGLTYPE:  # what is said of all (git's commit) is nothing that is used
                    self._records(data)
            elif info.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
                name = self._extra(info.size).rstrip(b"\0")
                self._fields[b"path" if info.type == tarfile.GNUTYPE_LONGNAME else b"linkpath"] = name
            else:
                yield self._member(info, block)
                self._fields, self._sparse, self._headers = {}, [], 0

    def _extra(self, size: int) -> bytes:
        self._headers += size + BLOCK
        if self._headers > limits.OCI_HEADER_BYTES_MAX:
            self._no("has a member that says too much of itself")
        data = self._take(size + -size % BLOCK)
        return data[:size]

    def _records(self, data: bytes) -> None:
        while data:
            digits, space, _ = data.partition(b" ")
            if not space or not digits.isdigit() or len(digits) > 7:
                self._no("has a broken header")
            length = int(digits)
            if not len(digits) + 2 < length <= len(data) or data[length - 1] != 10:
                self._no("has a broken header")
            key, equals, value = data[len(digits) + 1 : length - 1].partition(b"=")
            if not equals:
                self._no("has a broken header")
            if key in (b"GNU.sparse.offset", b"GNU.sparse.numbytes"):
                self._sparse.append((key, value))
            else:
                self._fields[key] = value
            data = data[length:]

    def _number(self, name: bytes, default: int) -> int:
        text = self._fields.get(name)
        if text is None:
            return default
        if not text.isdigit() or len(text) > 18:
            self._no(f"has a member with no sane {name.decode()}")
        return int(text)

    def _member(self, info: tarfile.TarInfo, block: bytes) -> Member:
        fields = self._fields
        name = (
            fields.get(b"GNU.sparse.name")
            or fields.get(b"path")
            or info.name.encode("utf-8", "surrogateescape")
        )
        path = self._path(name)
        link = fields.get(b"linkpath") or info.linkname.encode("utf-8", "surrogateescape")
        if info.type in (tarfile.CHRTYPE, tarfile.BLKTYPE):
            refuse(
                f"{self._layer} has a device, {shown(name)}",
                "devices have no place in an image: the guest's kernel makes those in /dev; build it without",
            )
        kind = 0 if info.type == tarfile.LNKTYPE else _KINDS.get(info.type)
        if kind is None:
            self._no(f"has {shown(name)}, of a strange kind ({info.type!r})")
        if kind in (0, stat.S_IFLNK) and (not link or b"\0" in link or len(link) >= limits.PATH_BYTES_MAX):
            self._no(f"has {shown(name)}, a link to no path")
        if kind != stat.S_IFDIR and not path:
            self._no("has a root that is no directory")
        stored = self._number(b"size", info.size) if kind == stat.S_IFREG else 0
        # What is no file has no content, whatever size it says it has.
        size, extents, begin = stored, None, self._at
        if kind == stat.S_IFREG:
            size, extents, begin, stored = self._holes(info, block, stored)
        if stored > self._size - begin:
            self._no("is a tar that is cut short")
        at = begin
        if extents is not None:
            extents, used = self._placed(extents, begin, size)
            if used > stored:
                self._no(f"has {shown(name)}, with holes that cannot be")
        self._at = min(begin + stored + -stored % BLOCK, self._size)
        return Member(
            kind=kind,
            path=path,
            link=link,
            mode=info.mode & 0o7777,
            uid=self._number(b"uid", info.uid) & 0xFFFF_FFFF,
            gid=self._number(b"gid", info.gid) & 0xFFFF_FFFF,
            mtime_ns=self._time(info.mtime),
            size=size,
            at=at,
            extents=extents,
            attributes={
                key[len(_ATTRIBUTE) :]: value for key, value in fields.items() if key.startswith(_ATTRIBUTE)
            }
            or None,
        )

    def _path(self, name: bytes) -> list[bytes]:
        parts = [part for part in name.split(b"/") if part not in (b"", b".")]
        if b".." in parts or b"\0" in name:
            self._no(f"has a member that leads out of it: {shown(name)}")
        if len(name) > limits.PATH_BYTES_MAX or len(parts) > limits.OCI_DEPTH_MAX:
            self._no(f"has a name that is too long or too deep: {shown(name)}")
        if any(len(part) > 255 for part in parts):
            self._no(f"has a name of more than 255 bytes: {shown(name)}")
        return parts

    def _time(self, default: float) -> int:
        text = self._fields.get(b"mtime")
        if text is None:
            return max(0, min(int(default), 1 << 40)) * 10**9
        whole, _, fraction = text.removeprefix(b"-").partition(b".")
        if not whole.isdigit() or len(whole) > 12 or not (fraction or b"0").isdigit():
            self._no("has a member of no sane time")
        value = int(whole) * 10**9 + int(fraction[:9].ljust(9, b"0"))
        return -value if text.startswith(b"-") else value

    # -- files with holes, in the four ways there are to say so

    def _holes(
        self, info: tarfile.TarInfo, block: bytes, stored: int
    ) -> tuple[int, Extents | None, int, int]:
        """(size of the file, its pieces as (offset, 0, length), where its data begins, how much there is)."""
        fields = self._fields
        if info.type == tarfile.GNUTYPE_SPARSE:
            pairs, more = self._old(block[386:482]), block[482]
            size = self._field(block[483:495])
            while more:
                block = self._take(BLOCK)
                pairs += self._old(block[:504])
                more = block[504]
                self._few(pairs)
            return size, self._pieces(pairs), self._at, stored
        if fields.get(b"GNU.sparse.major") == b"1":
            size = self._number(b"GNU.sparse.realsize", -1)
            begin, need = self._at, -1
            numbers: list[int] = []
            text = b""
            while need < 0 or len(numbers) < need:
                line, newline, rest = text.partition(b"\n")
                if not newline:
                    if len(text) > 64:
                        self._no("has a broken map of holes")
                    text += self._take(BLOCK)
                    continue
                text = rest
                if not line.isdigit() or len(line) > 18:
                    self._no("has a broken map of holes")
                if need < 0:
                    need = 2 * int(line)
                    if need > 2 * limits.OCI_SPARSE_EXTENTS_MAX:
                        self._no("has a file of too many holes")
                else:
                    numbers.append(int(line))
            used = self._at - begin
            if used > stored:
                self._no("has a broken map of holes")
            return size, self._pieces(_pairs(numbers)), self._at, stored - used
        if b"GNU.sparse.map" in fields or self._sparse:
            texts = (
                fields[b"GNU.sparse.map"].split(b",")
                if b"GNU.sparse.map" in fields
                else [v for _, v in self._sparse]
            )
            if not all(text.isdigit() and len(text) <= 18 for text in texts) or len(texts) % 2:
                self._no("has a broken map of holes")
            return (
                self._number(b"GNU.sparse.size", -1),
                self._pieces(_pairs([int(t) for t in texts])),
                self._at,
                stored,
            )
        return stored, None, self._at, stored

    def _field(self, raw: bytes) -> int:
        try:
            value = tarfile.nti(raw)  # type: ignore[attr-defined]
        except (tarfile.HeaderError, ValueError):
            value = -1
        if not 0 <= value <= _NUMBER_MAX:
            self._no("has a broken map of holes")
        return int(value)

    def _old(self, raw: bytes) -> list[tuple[int, int]]:
        found = []
        for at in range(0, len(raw) - 23, 24):
            if not any(raw[at : at + 24]):
                break
            found.append((self._field(raw[at : at + 12]), self._field(raw[at + 12 : at + 24])))
        return found

    def _few(self, pairs: list[tuple[int, int]]) -> None:
        if len(pairs) > limits.OCI_SPARSE_EXTENTS_MAX:
            self._no("has a file of too many holes")

    def _pieces(self, pairs: list[tuple[int, int]]) -> Extents:
        self._few(pairs)
        return tuple((offset, 0, length) for offset, length in pairs if length)

    def _placed(self, pieces: Extents, begin: int, size: int) -> tuple[Extents, int]:
        """The pieces with where their bytes are, and how many bytes that is."""
        found, end, used = [], 0, 0
        if not 0 <= size <= _NUMBER_MAX:
            self._no("has a file with holes and of no size")
        for offset, _, length in pieces:
            if offset < end or offset + length > size:
                self._no("has a broken map of holes")
            found.append((offset, begin + used, length))
            end, used = offset + length, used + length
        return tuple(found), used


def _pairs(numbers: list[int]) -> list[tuple[int, int]]:
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def shown(name: bytes) -> str:
    """A name for a message."""
    text = name[:200].decode("utf-8", "backslashreplace")
    return "".join(letter if letter.isprintable() else "?" for letter in text) + (
        "…" if len(name) > 200 else ""
    )
