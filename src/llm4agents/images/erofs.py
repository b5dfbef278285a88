"""EROFS images written from trees in memory: root file systems (`images.oci`), what `protect=` mounts. Blocking I/O.

mkfs.erofs wants a directory on this machine, so a stranger's files, owners and links would have to be unpacked here, as
root. This needs neither: a tar stream is read twice, once for its headers and once for its bytes. Not compressed, every
inode in the long form, short files and ends of files beside it; the same files give the same bytes.
"""

from __future__ import annotations

import os
import stat
import struct
import tarfile
from collections.abc import Callable, Iterator, Sequence
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
_LONG_PLAIN, _LONG_INLINE = 1, 5
"""Of an inode's format: the long form; its data in whole blocks one after another, or the last piece beside it."""
_INLINE_BYTES_MAX = 2_048
"""Of a file's last piece: what is longer has a block of its own, or gaps would eat what is saved."""
_KINDS = {stat.S_IFREG: 1, stat.S_IFDIR: 2, stat.S_IFIFO: 5, stat.S_IFLNK: 7}
_PREFIXES = (
    (b"user.", 1),
    (b"system.posix_acl_access", 2),
    (b"system.posix_acl_default", 3),
    (b"security.", 6),
)
_ATTRIBUTES_HEADER_BYTES = 12
_PIECE_BYTES = 1_048_576


@dataclass(slots=True)
class Inode:
    """`at`: where a file's bytes are in its spool, whose number is `spool`; `target`: of a link."""

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
    place: int = 0
    """Where it is in the area of inodes."""
    tail: int = 0
    """How many of its last bytes are beside it."""
    spool: int = 0
    data: bytes | None = None
    """A file's content, if it is in no spool."""
    extents: tuple[tuple[int, int, int], ...] | None = None
    """Of a file with holes, in order: (offset in it, offset in its spool, length)."""
    attributes: dict[bytes, bytes] | None = None
    """Extended ones, by their whole names: user.*, security.* and POSIX ACLs."""
    layer: int = 0
    """Whose it is, for who merges trees."""

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
        return write(
            self.root,
            [self._spool],
            out,
            uuid=b"llm4agents-prot\1",
            label=b"protected",
            least=limits.VOLUME_SLOT_BYTES,
        )


def write(
    root: Inode,
    spools: Sequence[BinaryIO],
    out: BinaryIO,
    *,
    uuid: bytes,
    label: bytes,
    least: int = 0,
    progress: Callable[[float], None] = lambda done: None,
) -> int:
    """The image of the tree below `root` from the beginning of `out` (which is empty); its size in bytes.

    Raises ProtocolError when a spool ends before what is to be in it.
    """
    inodes = list(_numbered(root))
    place = _INODE_BYTES  # number 0 is nobody's: some programs take it for "none"
    for inode, _ in inodes:
        if inode.directory:
            inode.size = _directory_size(inode)
        place = _placed(inode, place)
    blocks = _META_BLOCK + _blocks(place)
    for inode, _ in inodes:
        whole = _blocks(inode.size - inode.tail)
        inode.block = blocks if whole else 0
        blocks += whole
    meta, first = _META_BLOCK * BLOCK, _META_BLOCK
    out.write(bytes(1_024) + _super(root, len(inodes), blocks, uuid, label))
    for inode, _ in inodes:
        out.seek(meta + inode.place)
        out.write(_packed(inode))
        if inode.tail and not inode.directory:
            out.write(content(inode, spools, inode.size - inode.tail, inode.tail))
    done = 0
    for inode, parent in inodes:
        if inode.directory:
            entries = _directory(inode, parent)
            rest = len(entries) - inode.tail
            if inode.tail:
                out.seek(meta + inode.place + _INODE_BYTES + _attributes_size(inode))
                out.write(entries[rest:])
            if rest:
                out.seek(inode.block * BLOCK)
                out.write(entries[:rest])
        elif inode.size > inode.tail:
            _copy(inode, spools, out)
            done += 1
            if not done % 256:
                progress((inode.block - first) / blocks)
    size = max(blocks * BLOCK, least)
    out.truncate(size)
    return size


def _numbered(root: Inode) -> Iterator[tuple[Inode, Inode]]:
    """Every inode once, with its parent, in the order of their names; numbers and counts of links are set."""
    todo = [(root, root)]
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


def _placed(inode: Inode, place: int) -> int:
    """Gives it its place, at `place` or after it, and what of its data goes there too; where the next may begin."""
    head = _INODE_BYTES + _attributes_size(inode)
    tail = inode.size % BLOCK
    most = BLOCK if inode.directory or inode.target else _INLINE_BYTES_MAX
    inode.tail = tail if tail <= most and head + tail <= BLOCK else 0
    if inode.tail and place % BLOCK + head + inode.tail > BLOCK:
        place += -place % BLOCK  # what is beside an inode does not go over a block's end
    inode.place = place
    place += head + inode.tail
    return place + -place % _SLOT_BYTES


def _attributes(inode: Inode) -> list[bytes]:
    found = []
    for name, value in sorted((inode.attributes or {}).items()):
        prefix, index = next(item for item in _PREFIXES if name.startswith(item[0]))
        rest = name[len(prefix) :]
        entry = struct.pack("<BBH", len(rest), index, len(value)) + rest + value
        found.append(entry + bytes(-len(entry) % 4))
    return found


def _attributes_size(inode: Inode) -> int:
    if not inode.attributes:
        return 0
    return _ATTRIBUTES_HEADER_BYTES + sum(map(len, _attributes(inode)))


def storable(name: bytes, value: bytes) -> bool:
    """Whether an extended attribute of that name has a place in an image. Pure."""
    prefix = next((prefix for prefix, _ in _PREFIXES if name.startswith(prefix)), None)
    return prefix is not None and len(name) - len(prefix) < 256 and len(value) < 65_536


def content(inode: Inode, spools: Sequence[BinaryIO], begin: int, length: int) -> bytes:
    """That piece of a file or link, holes as zeros."""
    if inode.target or inode.data is not None:
        return (inode.target or inode.data or b"")[begin : begin + length]
    found = bytearray(length)
    for offset, at, size in inode.extents if inode.extents is not None else ((0, inode.at, inode.size),):
        first, last = max(offset, begin), min(offset + size, begin + length)
        if first < last:
            found[first - begin : last - begin] = _read(
                spools[inode.spool], at + first - offset, last - first
            )
    return bytes(found)


def _read(spool: BinaryIO, at: int, length: int) -> bytes:
    spool.seek(at)
    data = spool.read(length)
    if len(data) < length:
        raise ProtocolError("the guest's tar stream broke off")
    return data


def _copy(inode: Inode, spools: Sequence[BinaryIO], out: BinaryIO) -> None:
    """Its whole blocks; holes stay holes."""
    whole = inode.size - inode.tail
    if inode.target or inode.data is not None:
        out.seek(inode.block * BLOCK)
        out.write(content(inode, spools, 0, whole))
        return
    for offset, at, size in inode.extents if inode.extents is not None else ((0, inode.at, inode.size),):
        out.seek(inode.block * BLOCK + offset)
        left = min(offset + size, whole) - offset
        while left > 0:
            piece = _read(spools[inode.spool], at, min(left, _PIECE_BYTES))
            out.write(piece)
            left -= len(piece)
            at += len(piece)


def _super(root: Inode, count: int, blocks: int, uuid: bytes, label: bytes) -> bytes:
    return _SUPER.pack(
        MAGIC, 0, 0, 12, 0, _nid(root), count, 0, 0, blocks, _META_BLOCK, 0,
        uuid, label.ljust(16, b"\0"), 0, 0, 0, 0, 0, 0, 0, 0, 0, bytes(23),
    )  # fmt: skip


def _find(top: Inode, parts: list[bytes]) -> Inode | None:
    found: Inode | None = top
    for name in parts:
        found = found.children.get(name) if found is not None else None
    return found


def _blocks(size: int) -> int:
    return -(-size // BLOCK)


def _nid(inode: Inode) -> int:
    return inode.place // _SLOT_BYTES


def _packed(inode: Inode) -> bytes:
    """The inode and its extended attributes."""
    seconds, nanoseconds = divmod(inode.mtime_ns, 10**9)
    entries = _attributes(inode) if inode.attributes else []
    count = sum(map(len, entries)) // 4 + 1 if entries else 0
    head = _INODE.pack(
        _LONG_INLINE if inode.tail else _LONG_PLAIN,
        count, inode.mode, 0, inode.size, inode.block, inode.number, inode.uid, inode.gid,
        seconds & (2**64 - 1), nanoseconds, inode.links, bytes(16),
    )  # fmt: skip
    return head + bytes(_ATTRIBUTES_HEADER_BYTES) + b"".join(entries) if entries else head


def _directory_size(inode: Inode) -> int:
    """What `_directory` comes to, before anything has a place."""
    size = used = 0
    for name in sorted([b".", b"..", *inode.children]):
        entry = _DIRENT.size + len(name)
        if used + entry > BLOCK:
            size, used = size + BLOCK, 0
        used += entry
    return size + used


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
