"""A writer of cpio archives (`newc`, what the kernel unpacks an initramfs from). Pure: entries in, bytes out."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    path: str
    """Relative, no leading slash, parents before children."""
    mode: int
    """With the file type's bits (stat.S_IFREG…)."""
    data: bytes = b""
    """A file's content or a link's target."""
    device: tuple[int, int] = (0, 0)


def directory(path: str, mode: int = 0o755) -> Entry:
    return Entry(path, stat.S_IFDIR | mode)


def file(path: str, data: bytes, mode: int = 0o644) -> Entry:
    return Entry(path, stat.S_IFREG | mode, data)


def char_device(path: str, major: int, minor: int, mode: int = 0o600) -> Entry:
    return Entry(path, stat.S_IFCHR | mode, device=(major, minor))


def archive(entries: Iterable[Entry]) -> bytes:
    """One archive of `entries`, all of root's and without a time: equal entries give equal bytes."""
    out = bytearray()
    for number, entry in enumerate(entries, start=1):
        out += _record(number, entry)
    out += _record(0, Entry("TRAILER!!!", 0))
    out += b"\0" * (-len(out) % 512)
    return bytes(out)


def _record(inode: int, entry: Entry) -> bytes:
    name = entry.path.encode() + b"\0"
    links = 2 if stat.S_ISDIR(entry.mode) else 1
    fields = (inode, entry.mode, 0, 0, links, 0, len(entry.data), 0, 0, *entry.device, len(name), 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + name
    head += b"\0" * (-len(head) % 4)
    return head + entry.data + b"\0" * (-len(entry.data) % 4)
