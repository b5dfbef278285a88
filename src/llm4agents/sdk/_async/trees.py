"""Whole directories of a sandbox: archives, search, watch, modes, owners, links. Mixed into `files`.

Paths as in `files`: what is not absolute is taken from /home/user.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm4agents.errors import GuestError, InvalidRequestError
from llm4agents.sdk import _untar, _wire, tree_results
from llm4agents.sdk._async.transport import AsyncEventStream
from llm4agents.sdk._landing import Downloaded, Guard
from llm4agents.sdk._runtime import async_call, async_chunks, async_fed
from llm4agents.sdk._tar import Packer

if TYPE_CHECKING:
    from llm4agents.sdk._async.transport import AsyncByteStream, AsyncTransport

CHUNK_BYTES = 262_144
SEARCH_SLACK_S = 30.0
Progress = Callable[[int, "int | None"], Any]
"""Called with (bytes so far, bytes in all or None), after each chunk."""


class AsyncTrees:
    """What `files` does with whole directories."""

    _transport: AsyncTransport
    _sandbox: str
    _path: str

    async def _post(
        self, verb: str, body: dict[str, Any], wait_s: float | None = _wire.DEFAULT_WAIT_S
    ) -> dict[str, Any]:
        return await self._transport.json(
            "POST", f"{self._path}/{verb}", _wire.without_none(body), wait_s=wait_s, sandbox=self._sandbox
        )

    async def tar(
        self, path: str = ".", *, exclude: Sequence[str] = (), user: str | None = None
    ) -> AsyncByteStream:
        """A directory's content as a POSIX tar stream, as large as it comes: an iterator of bytes, to be closed.

        `exclude`: globs; one without `/` is about names at any depth. What `user` may not read is left out.
        """
        pairs = {"path": _wire.path_of(path), "exclude": list(exclude), "user": user}
        return await self._transport.stream("GET", f"{self._path}/tar", params=pairs, sandbox=self._sandbox)

    async def untar(
        self,
        path: str,
        data: Any,
        *,
        preserve_owner: bool = False,
        user: str | None = None,
    ) -> int:
        """Unpacks a tar archive (not compressed) below `path`, which is made; returns how many members it had.

        `data`: bytes, a binary file object or an iterable of bytes. A member that leads out of `path` is refused.
        Each file appears whole or not at all; what was unpacked before an error stays.
        """
        return await self._put_tar(path, async_chunks(data, CHUNK_BYTES), preserve_owner, user)

    async def _put_tar(self, path: str, content: Any, preserve_owner: bool, user: str | None) -> int:
        stream = await self._transport.stream(
            "PUT",
            f"{self._path}/tar",
            params={"path": _wire.path_of(path), "preserve_owner": preserve_owner, "user": user},
            content=content,
            headers=[("content-type", "application/x-tar")],
            sandbox=self._sandbox,
        )
        async with stream:
            answer = _wire.object_of(await stream.read())
        return int(answer.get("entries") or 0)

    async def _upload_tree(
        self, source: Path, target: str, user: str | None, progress: Progress | None
    ) -> None:
        packer = Packer(source)

        async def pieces() -> Any:
            async for piece in async_chunks(packer, CHUNK_BYTES):
                yield piece
                if progress is not None:
                    await async_call(progress, packer.done, packer.total)

        await self._put_tar(target, pieces(), False, user)

    async def _download_tree(
        self,
        source: str,
        target: Path,
        exclude: Sequence[str],
        allow: bool,
        user: str | None,
        progress: Progress | None,
    ) -> Downloaded:
        async with await self.tar(source, exclude=exclude, user=user) as stream:
            guard = Guard(target, allow=allow, never=_wire.protected_by(stream.headers))
            if guard.why_not((), "directory") is not None:
                guard.check()
            done = await async_fed(lambda read: _untar.unpack(read, target, guard), stream, progress)
        if done.unreadable:
            raise GuestError(
                f"sandbox {self._sandbox}: {done.unreadable} files below {source} cannot be read by "
                f"{user or 'user'}, the first is {done.first_unreadable}; all others are in {target}",
                hint='user="root" reads everything, exclude= leaves them out',
                code="permission",
                path=done.first_unreadable,
                protected=[found.path for found in done.protected],
            )
        result = Downloaded(target)
        result.protected, result.protected_count = done.protected, done.protected_count
        result.left_out = done.left_out
        return result

    async def search(
        self,
        path: str = ".",
        *,
        name: str | None = None,
        content: str | None = None,
        regex: bool = False,
        ignore_case: bool = False,
        hidden: bool = True,
        max: int = 1_000,
        max_file_bytes: int | None = None,
        timeout: float = 60.0,
        user: str | None = None,
    ) -> tree_results.SearchResult:
        """Files below `path` whose name fits the glob `name`, or lines in them that hold `content`.

        With `regex`, `content` is a regular expression (without look-around). Binary files, links and what `user`
        may not read are passed over. TimedOutError after `timeout` seconds (at most 300).
        """
        wanted = {
            "name": name,
            "content": content,
            "regex": regex,
            "ignore_case": ignore_case,
            "hidden": hidden,
        }
        bounds = {"max": max, "max_file_bytes": max_file_bytes, "timeout_s": timeout, "user": user}
        body = {"path": _wire.path_of(path), **wanted, **bounds}
        return tree_results.search_result(await self._post("search", body, timeout + SEARCH_SLACK_S))

    async def watch(self, path: str = ".", *, recursive: bool = True, user: str | None = None) -> AsyncWatch:
        """Changes of a file or directory as they happen, from now on: an iterator, to be used as a context manager.

        Ends when what is watched is itself removed. GuestError (`no_space`) when the guest can watch no more.
        """
        params = {"path": _wire.path_of(path), "recursive": recursive, "user": user}
        stream = await self._transport.stream(
            "GET", f"{self._path}/watch", params=params, wait_s=None, sandbox=self._sandbox
        )
        return AsyncWatch(AsyncEventStream(stream, frozenset({"end"})))

    async def chmod(self, path: str, mode: int, *, recursive: bool = False, user: str | None = None) -> int:
        """Sets permission bits; with `recursive` of all below it too. Returns how many were changed."""
        body = {"path": _wire.path_of(path), "mode": mode, "recursive": recursive, "user": user}
        return int((await self._post("attributes", body, None))["changed"])

    async def chown(
        self,
        path: str,
        owner: str | int | None = None,
        group: str | int | None = None,
        *,
        recursive: bool = False,
        user: str = "root",
    ) -> int:
        """Gives it to another user or group, by name or number; only root may, so that is who asks."""
        body = {"path": _wire.path_of(path), "owner": owner, "group": group, "recursive": recursive}
        return int((await self._post("attributes", {**body, "user": user}, None))["changed"])

    async def symlink(
        self, target: str, path: str, *, overwrite: bool = False, user: str | None = None
    ) -> None:
        """Makes `path` a symbolic link to whatever `target` says (as os.symlink; `stat(follow=False)` reads it)."""
        if not target:
            raise InvalidRequestError("a link's target cannot be empty")
        body = {
            "path": _wire.path_of(path),
            "target": os.fspath(target),
            "overwrite": overwrite,
            "user": user,
        }
        await self._post("link", body)


class AsyncWatch:
    """Changes as they come. Leaving it as a context manager, or `aclose`, ends the watch."""

    def __init__(self, events: AsyncEventStream) -> None:
        self._events = events

    async def __aenter__(self) -> AsyncWatch:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __aiter__(self) -> AsyncWatch:
        return self

    async def __anext__(self) -> tree_results.FileChange:
        while True:
            event = await self._events.__anext__()
            if event.get("type") == "end":
                raise StopAsyncIteration
            if event.get("type") != "watching":
                return tree_results.file_change(event)

    async def aclose(self) -> None:
        await self._events.aclose()
