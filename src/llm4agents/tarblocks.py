"""Headers of a tar stream whose writer may be hostile: the agent's (`tar_out`), read by the SDK and, for an operator's
protected paths, by the server. Pure.

tarfile only reads one header block at a time here: its own reading of extended headers has no bounds.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass

from llm4agents import limits, protected
from llm4agents.errors import ProtocolError

BLOCK = tarfile.BLOCKSIZE
RECORDS_BYTES_MAX = 65_536
"""Of a pax header: two paths and some numbers."""
DEPTH_MAX = 1_024
_END = bytes(2 * BLOCK)


def header(block: bytes) -> tarfile.TarInfo:
    """Raises ProtocolError, as all here do."""
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError, OverflowError) as error:
        raise ProtocolError(f"the sandbox's tar stream is broken: {error}") from None
    if info.size < 0 or not (
        info.type in (tarfile.XHDTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.REGTYPE)
        or info.isdev()
    ):
        raise ProtocolError("the sandbox's tar stream has a member of a strange kind")
    if info.type == tarfile.XHDTYPE and info.size > RECORDS_BYTES_MAX:
        raise ProtocolError("the sandbox's tar stream has a header without end")
    return info


def records(data: bytes) -> dict[str, bytes]:
    """Those of a pax header."""
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


def number(found: dict[str, bytes], name: str, default: int) -> int:
    text = found.get(name)
    if text is None:
        return default
    if not text.isdigit() or len(text) > 18:
        raise ProtocolError(f"the sandbox's tar stream has no sane {name}")
    return int(text)


def mtime(found: dict[str, bytes], default: float) -> int:
    """In nanoseconds."""
    text = found.get("mtime")
    if text is None:
        return int(default) * 10**9
    whole, _, fraction = text.removeprefix(b"-").partition(b".")
    if not whole.isdigit() or len(whole) > 11 or not (fraction or b"0").isdigit():
        raise ProtocolError("the sandbox's tar stream has no sane mtime")
    value = int(whole) * 10**9 + int(fraction[:9].ljust(9, b"0"))
    return -value if text.startswith(b"-") else value


def parts(name: bytes) -> list[str]:
    """The components of a member's name, none of which leads anywhere else."""
    found = os.fsdecode(name).rstrip("/").split("/")
    if len(name) > limits.PATH_BYTES_MAX or len(found) > DEPTH_MAX or b"\0" in name:
        raise ProtocolError("the sandbox's tar stream has a name beyond every path")
    if any(part in ("", ".", "..") for part in found):
        raise ProtocolError(f"the sandbox's tar stream has a member that leads out of it: {name[:200]!r}")
    return found


@dataclass(slots=True)
class _Member:
    """Of which so many bytes are still to come, and whether they are passed on."""

    left: int
    kept: bool


class Sieve:
    """A tar stream of directory `top` without what `patterns` protect: `feed` gives what may go on.

    `protected` are the first so many of their paths, `count` is how many there were. What follows the end marker is
    not passed on: some readers would look there for more.
    """

    def __init__(self, top: str, patterns: Sequence[str]) -> None:
        self.protected: list[str] = []
        self.count = 0
        self._top, self._patterns = top.rstrip("/"), tuple(patterns)
        self._held = bytearray()
        self._extended = b""  # the pax header of the member whose own header comes next, with its block
        self._fields: dict[str, bytes] = {}
        self._member: _Member | None = None
        self._ended = False

    def feed(self, piece: bytes) -> bytes:
        """Raises ProtocolError for a stream that is broken."""
        if self._ended:
            return b""
        self._held += piece
        out = bytearray()
        while True:
            member = self._member
            if member is not None:
                taken = bytes(self._held[: member.left])
                del self._held[: member.left]
                member.left -= len(taken)
                if member.kept:
                    out += taken
                if member.left:
                    return bytes(out)
                self._member = None
            if len(self._held) < BLOCK:
                return bytes(out)
            block = bytes(self._held[:BLOCK])
            if not any(block):
                self._ended = True
                self._held.clear()
                return bytes(out) + _END
            info = header(block)
            if info.type == tarfile.XHDTYPE:
                whole = BLOCK + info.size + -info.size % BLOCK
                if len(self._held) < whole:
                    return bytes(out)
                self._extended = bytes(self._held[:whole])
                self._fields = records(self._extended[BLOCK : BLOCK + info.size])
                del self._held[:whole]
                continue
            del self._held[:BLOCK]
            size = number(self._fields, "size", info.size) if info.isreg() else 0
            kept = self._kept(info)
            if kept:
                out += self._extended + block
            self._extended, self._fields = b"", {}
            self._member = _Member(size + -size % BLOCK, kept)

    def _kept(self, info: tarfile.TarInfo) -> bool:
        name = "/".join(parts(self._fields.get("path", os.fsencode(info.name))))
        names = [name]
        if info.islnk():  # its content is the other's
            names.append("/".join(parts(self._fields.get("linkpath", os.fsencode(info.linkname)))))
        kind: protected.Kind = "link" if info.issym() else "directory" if info.isdir() else "file"
        for said in names:
            path = f"{self._top}/{said}"
            if protected.match(path, self._patterns, kind=kind, defaults=False) is not None:
                self.count += 1
                if len(self.protected) < limits.PROTECTED_REPORTED_MAX:
                    self.protected.append(f"{self._top}/{name}")
                return False
        return True
