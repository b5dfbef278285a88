"""What verbs answer, as plain values, each read from a guest's map without believing it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import msgpack

from llm4agents.errors import ProtocolError
from llm4agents.guest.maps import UNPACK_LIMITS, Fields
from llm4agents.limits import LIST_BYTES_MAX, LIST_ENTRIES_MAX

Kind = Literal["file", "directory", "symlink", "other"]
_KINDS = ("file", "directory", "symlink", "other")


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a process ended: `exit_code`, or the `signal` that killed it. CPU times of its whole group."""

    exit_code: int | None
    signal: int | None
    timed_out: bool = False
    user_ms: int = 0
    system_ms: int = 0

    @classmethod
    def read(cls, end: Fields) -> ExitStatus:
        status = cls(
            exit_code=end.maybe_integer("exit_code", -(2**31), 2**31),
            signal=end.maybe_integer("signal", 0, 127),
            timed_out=end.flag("timed_out", default=False),
            user_ms=end.integer("user_ms", default=0),
            system_ms=end.integer("system_ms", default=0),
        )
        if (status.exit_code is None) == (status.signal is None):
            raise ProtocolError("the guest's END tells neither an exit code nor a signal, or both")
        return status


@dataclass(frozen=True, slots=True)
class FileInfo:
    """Of a file being read: size in bytes when it was opened, permission bits, mtime in unix seconds."""

    size: int
    mode: int
    mtime: float

    @classmethod
    def read(cls, reply: Fields) -> FileInfo:
        return cls(
            size=reply.integer("size"), mode=reply.integer("mode", 0, 2**32), mtime=reply.number("mtime")
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the guest. Names that are not UTF-8 have surrogate escapes, as os.fsdecode gives."""

    name: str
    path: str
    kind: Kind
    size: int
    mode: int
    uid: int
    gid: int
    user: str
    group: str
    mtime: float
    target: str | None
    """Where a symlink points."""

    @classmethod
    def read(cls, fields: Fields) -> Entry:
        kind = fields.text("kind", 16)
        if kind not in _KINDS:
            raise ProtocolError("the guest told of a file of an unknown kind")
        return cls(
            name=fields.name("name"),
            path=fields.name("path"),
            kind=cast(Kind, kind),
            size=fields.integer("size"),
            mode=fields.integer("mode", 0, 2**32),
            uid=fields.integer("uid", 0, 2**32),
            gid=fields.integer("gid", 0, 2**32),
            user=fields.text("user", 64, default=""),
            group=fields.text("group", 64, default=""),
            mtime=fields.number("mtime"),
            target=fields.maybe_name("target"),
        )


@dataclass(frozen=True, slots=True)
class Listing:
    entries: list[Entry]
    truncated: bool
    """There were more than LIST_ENTRIES_MAX, or than fit LIST_BYTES_MAX."""


class EntryReader:
    """Reads a listing's concatenated maps, split anywhere; bounded in entries, bytes, bytes of an entry."""

    _ENTRY_BYTES_MAX = 131_072

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.full = False
        """No more is taken: LIST_ENTRIES_MAX or LIST_BYTES_MAX is reached."""
        self._unpacker = msgpack.Unpacker(max_buffer_size=4 * self._ENTRY_BYTES_MAX, **UNPACK_LIMITS)
        self._bytes = self._unfinished = 0

    def feed(self, chunk: bytes) -> None:
        """Raises ProtocolError for what is not an entry."""
        self._bytes += len(chunk)
        self._unfinished += len(chunk)
        try:
            self._unpacker.feed(chunk)
            for body in self._unpacker:
                if len(self.entries) >= LIST_ENTRIES_MAX:
                    self.full = True
                    return
                self.entries.append(Entry.read(Fields(body, "directory entry")))
                self._unfinished = 0
        except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
            raise ProtocolError(f"the guest's listing is broken ({type(error).__name__})") from None
        # The unpacker's own bound is on bytes it holds, not on what it has made of them so far.
        if self._unfinished > self._ENTRY_BYTES_MAX:
            raise ProtocolError("the guest's listing has an entry without end")
        self.full = self._bytes >= LIST_BYTES_MAX

    def finish(self, count: int) -> None:
        """The agent says that it sent `count` entries."""
        if count != len(self.entries):
            raise ProtocolError("the guest's listing has another number of entries than it says")


@dataclass(frozen=True, slots=True)
class Metrics:
    """Of the whole guest. Memory and disk in bytes; CPU times since its boot, over all its CPUs."""

    cpu_user_ms: int
    cpu_system_ms: int
    cpu_idle_ms: int
    mem_total: int
    mem_available: int
    mem_cache: int
    disk_total: int
    disk_used: int
    processes: int
    uptime_s: float
    load1: float

    @classmethod
    def read(cls, reply: Fields) -> Metrics:
        whole = "cpu_user_ms cpu_system_ms cpu_idle_ms mem_total mem_available mem_cache disk_total disk_used"
        numbers = {name: reply.integer(name, default=0) for name in (*whole.split(), "processes")}
        return cls(
            **numbers, uptime_s=reply.number("uptime_s", default=0), load1=reply.number("load1", default=0)
        )
