"""Tar streams for tests: members as one writes them down."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable

FILE, LINK, HARD, DIRECTORY = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE


def reader(data: bytes) -> Callable[[int], bytes]:
    return io.BytesIO(data).read


def archive(*members: tuple[str, bytes, str | bytes]) -> bytes:
    """Members of (name, type, content or target)."""
    out = bytearray()
    for name, kind, content in members:
        info = tarfile.TarInfo(name)
        info.type = kind
        if isinstance(content, bytes):
            info.size = len(content)
        else:
            info.linkname = content
        out += info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        if isinstance(content, bytes):
            out += content + bytes(-len(content) % 512)
    return bytes(out) + bytes(1024)
