"""An EROFS image written from tar streams: what `protect=` mounts read-only in a guest. Blocking I/O.

mkfs.erofs wants a directory on this machine, so a guest's files, owners and links would have to be unpacked here, as
root. This needs neither: a tar stream is read twice, once for its headers and once for its bytes. Not compressed, no
extended attributes, every inode in the long form; the same files give the same bytes.
"""

from __future__ import annotations

import os
import stat
import struct
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, Final

from llm4agents import limits, tarblocks
from llm4agents.errors import CapacityError, ProtocolError

BLOCK: Final = 4_096
MAGIC: Final = 0xE0F5E1E2
_SUPER = struct.Struct("<IIIBBHQQIIII16s16sIHHHBBIQB23s")
_INODE = struct.Struct("<HHHHQIIIIQII16s")
_DIRENT = struct.Struct("<QHBB")
_INODE_BYTES, _SLOT_BYTES = 64, 32
_META_BLOCK = 1
_LONG_PLAIN = 1
"""Of an inode's format: the long form, its data in whole blocks one after another."""
_KINDS = {stat.S_IFREG: 1, stat.S_IFDIR: 2, stat.S_IFLNK: 7}
_PIECE_BYTES = 1_048_576


@dataclass(slots=True)
class Inode:
    """`at`: where a file's bytes are in the spool; `target`: of a link."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int
    size: int = 0
    at: int = 0
    target: bytes = b""
    children: dict[bytes, Inode] = field(default_factory=dict)
    links: int = 0
    number: int = 0
    block: int = 0

    @property
    def directory(self) -> bool:
        return stat.S_ISDIR(self.mode)


class Image:
    """Files by where they lie in `spool`. Add to it, then `write` it."""

    def __init__(self, spool: BinaryIO) -> None:
        self._spool = spool
        self.root = Inode(stat.S_IFDIR | 0o755, 0, 0, 0)
        self._count = 1
        self._bytes = 0

    def add(self, name: str, inode: Inode) -> None:
        """At the top. Raises CapacityError, as all here do, when it becomes too large."""
        self.root.children[os.fsencode(name)] = inode
        self._counted(inode.size)

    def add_tar(self, name: str, top: Inode, begin: int) -> None:
        """At the top: the directory `top` with what the tar stream from byte `begin` of the spool on holds.

        Devices and sockets are left out. Raises ProtocolError for a stream that is broken.
        """
        self.add(name, top)
        spool, fields = self._spool, {}
        spool.seek(begin)
        while True:
            block = spool.read(tarblocks.BLOCK)
            if len(block) < tarblocks.BLOCK:
                raise ProtocolError("the guest's tar stream broke off")
            if not any(block):
                return
            info = tarblocks.header(block)
            if info.type == tarfile.XHDTYPE:
                fields = tarblocks.records(spool.read(info.size + -info.size % tarblocks.BLOCK)[: info.size])
                continue
            size = tarblocks.number(fields, "size", info.size) if info.isreg() else 0
            at = spool.tell()
            spool.seek(at + size + -size % tarblocks.BLOCK)
            inode = Inode(
                info.mode & 0o1777,
                tarblocks.number(fields, "uid", info.uid) & 0xFFFF_FFFF,
                tarblocks.number(fields, "gid", info.gid) & 0xFFFF_FFFF,
                tarblocks.mtime(fields, float(info.mtime)),
            )
            parts = [
                os.fsencode(part) for part in tarblocks.parts(fields.get("path", os.fsencode(info.name)))
            ]
            link = fields.get("linkpath", os.fsencode(info.linkname))
            fields = {}
            if info.islnk():
                first = _find(top, [os.fsencode(part) for part in tarblocks.parts(link)])
                if first is None or first.directory:
                    raise ProtocolError("the guest's tar stream links to what is not in it")
                self._put(top, parts, first)
                continue
            if info.isdir():
                inode.mode |= stat.S_IFDIR
                there = _find(top, parts)
                if there is not None and there.directory:
                    there.mode, there.uid, there.gid, there.mtime_ns = (
                        inode.mode,
                        inode.uid,
                        inode.gid,
                        inode.mtime_ns,
                    )
                    continue
            elif info.issym():
                if not 0 < len(link) < BLOCK or b"\0" in link:
                    raise ProtocolError("the guest's tar stream has a link of no sane length")
                inode.mode, inode.target, inode.size = stat.S_IFLNK | 0o777, link, len(link)
            elif info.isreg():
                inode.mode, inode.size, inode.at = stat.S_IFREG | inode.mode, size, at
            else:
                continue
            self._counted(inode.size)
            self._put(top, parts, inode)

    def _put(self, top: Inode, parts: list[bytes], inode: Inode) -> None:
        parent = top
        for name in parts[:-1]:
            known = parent.children.get(name)
            if known is None:
                known = parent.children[name] = Inode(stat.S_IFDIR | 0o755, 0, 0, 0)
                self._counted(0)
            if not known.directory:
                raise ProtocolError("the guest's tar stream has a file below a file")
            parent = known
        if parts[-1] in parent.children or len(parts[-1]) > 255:
            raise ProtocolError("the guest's tar stream has a name twice, or one that is too long")
        parent.children[parts[-1]] = inode

    def _counted(self, size: int) -> None:
        self._count += 1
        self._bytes += size
        if self._bytes > limits.PROTECT_BYTES_MAX or self._count > limits.PROTECT_ENTRIES_MAX:
            raise CapacityError(
                f"the protected paths hold more than {limits.PROTECT_BYTES_MAX >> 20} MiB "
                f"or {limits.PROTECT_ENTRIES_MAX:,} files",
                hint="protect less of it",
            )

    def write(self, out: BinaryIO) -> int:
        """The image, from the beginning of `out` (which is empty); its size in bytes."""
        inodes = list(self._numbered())
        blocks = _META_BLOCK + _blocks((len(inodes) + 1) * _INODE_BYTES)
        folders: dict[int, bytes] = {}
        for inode, parent in inodes:
            if inode.directory:
                folders[inode.number] = _directory(inode, parent)
                inode.size = len(folders[inode.number])
            inode.block = blocks if inode.size else 0
            blocks += _blocks(inode.size)
        out.write(bytes(1_024) + self._super(len(inodes), blocks))
        out.seek(_META_BLOCK * BLOCK + _INODE_BYTES)  # number 0 is nobody's: some programs take it for "none"
        for inode, _ in inodes:
            out.write(_packed(inode))
        for inode, _ in inodes:
            if inode.size:
                out.seek(inode.block * BLOCK)
                if inode.directory:
                    out.write(folders[inode.number])
                elif inode.target:
                    out.write(inode.target)
                else:
                    self._copy(inode, out)
        size = max(blocks * BLOCK, limits.VOLUME_SLOT_BYTES)
        out.truncate(size)
        return size

    def _numbered(self) -> Iterator[tuple[Inode, Inode]]:
        """Every inode once, with its parent, in the order of their names; numbers and counts of links are set."""
        todo = [(self.root, self.root)]
        number = 0
        while todo:
            inode, parent = todo.pop()
            inode.links += 1
            if inode.number:
                continue
            number += 1
            inode.number = number
            if inode.directory:
                inode.links = 2 + sum(child.directory for child in inode.children.values())
                todo += [(inode.children[name], inode) for name in sorted(inode.children, reverse=True)]
            yield inode, parent

    def _copy(self, inode: Inode, out: BinaryIO) -> None:
        self._spool.seek(inode.at)
        left = inode.size
        while left:
            piece = self._spool.read(min(left, _PIECE_BYTES))
            if not piece:
                raise ProtocolError("the guest's tar stream broke off")
            out.write(piece)
            left -= len(piece)

    def _super(self, count: int, blocks: int) -> bytes:
        return _SUPER.pack(
            MAGIC, 0, 0, 12, 0, _nid(self.root), count, 0, 0, blocks, _META_BLOCK, 0,
            b"llm4agents-prot\1", b"protected".ljust(16, b"\0"), 0, 0, 0, 0, 0, 0, 0, 0, 0, bytes(23),
        )  # fmt: skip


def _find(top: Inode, parts: list[bytes]) -> Inode | None:
    found: Inode | None = top
    for name in parts:
        found = found.children.get(name) if found is not None else None
    return found


def _blocks(size: int) -> int:
    return -(-size // BLOCK)


def _nid(inode: Inode) -> int:
    return inode.number * (_INODE_BYTES // _SLOT_BYTES)


def _packed(inode: Inode) -> bytes:
    seconds, nanoseconds = divmod(inode.mtime_ns, 10**9)
    return _INODE.pack(
        _LONG_PLAIN, 0, inode.mode, 0, inode.size, inode.block, inode.number, inode.uid, inode.gid,
        seconds & (2**64 - 1), nanoseconds, inode.links, bytes(16),
    )  # fmt: skip


def _directory(inode: Inode, parent: Inode) -> bytes:
    """Its entries in blocks: of each first the entries, sorted, then their names."""
    entries = sorted([(b".", inode), (b"..", parent), *inode.children.items()], key=lambda entry: entry[0])
    blocks: list[list[tuple[bytes, Inode]]] = [[]]
    used = 0
    for name, child in entries:
        size = _DIRENT.size + len(name)
        if used + size > BLOCK:
            blocks.append([])
            used = 0
        blocks[-1].append((name, child))
        used += size
    out = bytearray()
    for block in blocks:
        out += bytes(-len(out) % BLOCK)
        where = len(block) * _DIRENT.size
        for name, child in block:
            out += _DIRENT.pack(_nid(child), where, _KINDS[stat.S_IFMT(child.mode)], 0)
            where += len(name)
        for name, _ in block:
            out += name
    return bytes(out)
