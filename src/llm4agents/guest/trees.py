"""Whole directories of a guest: tar out and in, attributes, links, search, watch (capability `files2`).

Functions over an Agent, as `code` is; single files are its own methods. What a guest sends of names and events is
bounded item by item, and whatever is not taken is bounded by the stream's credit.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import msgpack

from llm4agents.errors import ConflictError, InvalidRequestError, ProtocolError
from llm4agents.guest import maps
from llm4agents.guest.handles import _OnStream, within
from llm4agents.guest.maps import UNPACK_LIMITS, Fields, Text
from llm4agents.guest.results import Kind
from llm4agents.guest.stream import Stream
from llm4agents.guest.verbs import Agent, User, pieces, show
from llm4agents.limits import (
    SEARCH_BYTES_MAX,
    SEARCH_MATCHES_MAX,
    STALL_TIMEOUT_S,
    STREAM_CREDIT_BYTES,
    STREAM_WINDOW_BYTES_MAX,
    TREE_TIMEOUT_S,
    VERB_TIMEOUT_S,
)

_BODY = frozenset({0})
_ITEM_BYTES_MAX: Final = 131_072
_KINDS = ("file", "directory", "symlink", "other")
EVENTS = ("created", "modified", "removed", "moved", "attributes", "overflow")
Event = Literal["created", "modified", "removed", "moved", "attributes", "overflow"]


@dataclass(frozen=True, slots=True)
class Packed:
    """What a tar stream held. `skipped`: sockets; `unreadable`: what `user` may not read, and the first of it."""

    entries: int
    bytes: int
    skipped: int
    unreadable: int
    first_unreadable: str | None


@dataclass(frozen=True, slots=True)
class Unpacked:
    """What was unpacked: members, bytes of files; `skipped`: devices that `user` may not make."""

    entries: int
    bytes: int
    skipped: int


@dataclass(frozen=True, slots=True)
class Change:
    """Something happened to `path`; `to` is where it was moved. After `overflow` changes may be missing."""

    event: Event
    path: str
    to: str | None
    kind: Kind

    @classmethod
    def read(cls, fields: Fields) -> Change:
        event = fields.text("event", 16)
        if event not in EVENTS:
            raise ProtocolError("the guest told of a change of an unknown kind")
        return cls(cast(Event, event), fields.name("path"), fields.maybe_name("to"), _kind(fields))


@dataclass(frozen=True, slots=True)
class Match:
    """A file by name (`kind`, `size`, `mtime`), or a line by content (`line` and `column` from 1 on, and `text`)."""

    path: str
    kind: Kind = "file"
    size: int | None = None
    mtime: float | None = None
    line: int | None = None
    column: int | None = None
    text: bytes | None = None

    @classmethod
    def read(cls, fields: Fields) -> Match:
        line = fields.maybe_integer("line", 1)
        if line is None:
            size, mtime = fields.integer("size"), fields.number("mtime")
            return cls(fields.name("path"), _kind(fields), size, mtime)
        text = fields.raw("text", 512)
        return cls(fields.name("path"), line=line, column=fields.integer("column", 1), text=text)


@dataclass(frozen=True, slots=True)
class Found:
    """`files`: how many were looked at; `truncated`: there may be more."""

    matches: list[Match]
    files: int
    truncated: bool


def _kind(fields: Fields) -> Kind:
    kind = fields.text("kind", 16)
    if kind not in _KINDS:
        raise ProtocolError("the guest told of a file of an unknown kind")
    return cast(Kind, kind)


class _Items:
    """Concatenated maps, split anywhere; the bytes of one are bounded."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._unpacker = msgpack.Unpacker(max_buffer_size=4 * _ITEM_BYTES_MAX, **UNPACK_LIMITS)
        self._unfinished = 0

    def feed(self, chunk: bytes) -> list[Fields]:
        found: list[Fields] = []
        # In parts: what one chunk adds to the unpacker is then within its bound, too.
        for at in range(0, len(chunk), _ITEM_BYTES_MAX):
            part = chunk[at : at + _ITEM_BYTES_MAX]
            self._unfinished += len(part)
            try:
                self._unpacker.feed(part)
                for body in self._unpacker:
                    found.append(Fields(body, self._what))
                    self._unfinished = 0
            except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
                raise ProtocolError(f"the guest's {self._what} is broken ({type(error).__name__})") from None
            if self._unfinished > 2 * _ITEM_BYTES_MAX:
                raise ProtocolError(f"the guest's {self._what} is without end")
        return found


async def _open(
    agent: Agent,
    verb: str,
    arguments: dict[str, Any],
    path: Text,
    *,
    timeout: float,
    window: int = STREAM_CREDIT_BYTES,
    body: bool = True,
) -> tuple[Stream, Fields]:
    return await agent._open(
        verb,
        {"path": maps.wire_path(path), **arguments},
        timeout=timeout,
        subject=show(path),
        channels=_BODY if body else frozenset(),
        window=window,
    )


class TarStream(_OnStream):
    """A directory as a tar stream: iterate for its bytes; `packed` is there when it has ended."""

    packed: Packed | None = None

    def __aiter__(self) -> AsyncGenerator[bytes, None]:
        return self._chunks()

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        count = 0
        try:
            while True:
                async with within(self._stream, TREE_TIMEOUT_S, self._what):
                    item = await self._stream.receive()
                if item is None:
                    break
                count += len(item[1])
                yield item[1]
            async with within(self._stream, VERB_TIMEOUT_S, self._what):
                end = await self._stream.end()
                numbers = {
                    name: end.integer(name, default=0) for name in ("entries", "skipped", "unreadable")
                }
                if end.integer("bytes") != count:
                    raise ProtocolError("the guest sent another number of bytes than it says it did")
                first = end.maybe_name("first_unreadable")
                self.packed = Packed(bytes=count, first_unreadable=first, **numbers)
        finally:
            self._stream.cancel()


async def tar_out(
    agent: Agent,
    path: Text,
    *,
    exclude: Sequence[str] = (),
    user: User = "user",
    timeout: float = VERB_TIMEOUT_S,
) -> TarStream:
    """The content of a directory as a POSIX tar stream, names relative to it; as large as it comes.

    `exclude`: globs; one without `/` is about names at any depth, one with it about the path below `path`.
    """
    globs = [maps.wire_text(glob, "exclude") for glob in exclude]
    arguments = {"exclude": globs, "user": user}
    stream, _ = await _open(
        agent, "tar_out", arguments, path, timeout=timeout, window=STREAM_WINDOW_BYTES_MAX
    )
    return TarStream(stream, f"tar of {show(path)}")


async def tar_in(
    agent: Agent,
    path: Text,
    chunks: AsyncIterable[bytes] | bytes,
    *,
    parents: bool = True,
    preserve_owner: bool = False,
    user: User = "user",
    timeout: float = VERB_TIMEOUT_S,
) -> Unpacked:
    """Unpack a tar stream (ustar, pax, GNU long names; not compressed) below `path`.

    Each file appears whole or not at all; what was unpacked before an error or a cancel stays. A member that leads
    out of `path` is refused (InvalidRequestError). No progress for STALL_TIMEOUT_S is the end.
    """
    what = f"unpack into {show(path)}"
    arguments = {"parents": parents, "preserve_owner": preserve_owner, "user": user}
    stream, _ = await _open(agent, "tar_in", arguments, path, timeout=timeout, body=False)
    try:
        async for chunk in pieces(chunks):
            async with within(stream, STALL_TIMEOUT_S, what):
                await stream.send(chunk)
        async with within(stream, TREE_TIMEOUT_S, what):
            await stream.send_eof()
            end = await stream.end()
            return Unpacked(end.integer("entries"), end.integer("bytes"), end.integer("skipped", default=0))
    except BaseException:
        stream.cancel()
        raise


async def set_attributes(
    agent: Agent,
    path: Text,
    *,
    mode: int | None = None,
    owner: str | int | None = None,
    group: str | int | None = None,
    mtime: float | None = None,
    follow: bool = True,
    recursive: bool = False,
    user: User = "user",
    timeout: float = TREE_TIMEOUT_S,
) -> int:
    """Set what is not None, on one file or (`recursive`) on all below it too; returns how many were changed.

    Not all or nothing: the first file that refuses ends it.
    """
    arguments: dict[str, Any] = {"mode": mode, "mtime": mtime, "follow": follow, "recursive": recursive}
    for number, name, value in (("uid", "user_name", owner), ("gid", "group_name", group)):
        if value is not None:
            arguments[number if isinstance(value, int) else name] = value
    stream, reply = await _open(
        agent, "set_attributes", {**arguments, "user": user}, path, timeout=timeout, body=False
    )
    async with within(stream, timeout, f"set attributes of {show(path)}"):
        await stream.end()
        return reply.integer("changed")


async def link(
    agent: Agent,
    path: Text,
    target: Text,
    *,
    symbolic: bool = True,
    overwrite: bool = False,
    user: User = "user",
    timeout: float = VERB_TIMEOUT_S,
) -> None:
    """Make `path` a symbolic link to whatever `target` says, or another name of the file `target`."""
    where = maps.wire_text(target, "target") if symbolic else maps.wire_path(target)
    arguments = {"target": where, "symbolic": symbolic, "overwrite": overwrite, "user": user}
    stream, _ = await _open(agent, "link", arguments, path, timeout=timeout, body=False)
    async with within(stream, timeout, f"link {show(path)}"):
        await stream.end()


async def search(
    agent: Agent,
    path: Text,
    *,
    name: str | None = None,
    content: str | None = None,
    regex: bool = False,
    ignore_case: bool = False,
    hidden: bool = True,
    max: int = 1_000,
    max_file_bytes: int | None = None,
    user: User = "user",
    timeout: float = TREE_TIMEOUT_S,
) -> Found:
    """Files below `path` whose name fits the glob `name`, or lines in them that hold `content`.

    At most `max` (≤ SEARCH_MATCHES_MAX), one a line; binary files are not searched. TimedOutError after `timeout`.
    """
    if not 1 <= max <= SEARCH_MATCHES_MAX:
        raise InvalidRequestError(f"max is 1 to {SEARCH_MATCHES_MAX}", hint="search in a directory below it")
    arguments = {
        "name": None if name is None else maps.wire_text(name, "name"),
        "content": None if content is None else maps.wire_text(content, "content"),
        "regex": regex,
        "ignore_case": ignore_case,
        "hidden": hidden,
        "max": max,
        "max_file_bytes": max_file_bytes,
        "user": user,
    }
    what = f"search {show(path)}"
    stream, _ = await _open(agent, "search", arguments, path, timeout=timeout)
    matches: list[Match] = []
    items, taken = _Items("search result"), 0
    async with within(stream, timeout, what):
        while (item := await stream.receive()) is not None:
            taken += len(item[1])
            matches += [Match.read(fields) for fields in items.feed(item[1])]
            if len(matches) > max:
                raise ProtocolError("the guest found more than it was asked for")
            if taken > SEARCH_BYTES_MAX:
                stream.cancel()
                return Found(matches, 0, truncated=True)
        end = await stream.end()
        if end.integer("matches") != len(matches):
            raise ProtocolError("the guest's search has another number of results than it says")
        return Found(matches, end.integer("files"), end.flag("truncated", default=False))


class Watch(_OnStream):
    """Changes as they happen: iterate. Ends when what is watched is itself removed; `cancel` ends it before.

    What is not taken waits in the guest, up to a bound; then there is an `overflow`.
    """

    def __aiter__(self) -> AsyncGenerator[Change, None]:
        return self._changes()

    async def _changes(self) -> AsyncGenerator[Change, None]:
        items = _Items("change")
        try:
            while True:
                async with within(self._stream, None, self._what):
                    item = await self._stream.receive()
                    found = [] if item is None else [Change.read(fields) for fields in items.feed(item[1])]
                for change in found:
                    yield change
                if item is None:
                    break
            with contextlib.suppress(ConflictError):
                async with within(self._stream, VERB_TIMEOUT_S, self._what):
                    await self._stream.end()
        finally:
            self._stream.cancel()


async def watch(
    agent: Agent,
    path: Text,
    *,
    recursive: bool = True,
    user: User = "user",
    timeout: float = TREE_TIMEOUT_S,
) -> Watch:
    """Watch a file or directory; nothing that happens after this returns is missed (or there is an `overflow`).

    GuestError (code `no_space`) when the guest's limit of inotify watches is reached.
    """
    stream, _ = await _open(agent, "watch", {"recursive": recursive, "user": user}, path, timeout=timeout)
    return Watch(stream, f"watch {show(path)}")
