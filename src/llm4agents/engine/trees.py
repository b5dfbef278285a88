"""Whole directories of a running sandbox, as `guest.trees` has them, each call holding the sandbox open."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from typing import Any

from llm4agents.engine.live import Live
from llm4agents.guest import trees
from llm4agents.guest.trees import Change, Found, Match, Packed, Unpacked
from llm4agents.guest.verbs import Agent

__all__ = ["Change", "Found", "Match", "Packed", "Unpacked"]
User = str | int


async def tar_out(
    live: Live, path: str, *, exclude: Sequence[str], user: User
) -> AsyncGenerator[bytes | Packed | None, None]:
    """None once the directory is open, the bytes of its tar stream, and last what was in it."""
    async with (
        live.use(f"tar of {path}") as agent,
        contextlib.aclosing(packing(agent, path, exclude=exclude, user=user)) as pieces,
    ):
        async for piece in pieces:
            yield piece


async def packing(
    agent: Agent, path: str, *, exclude: Sequence[str], user: User
) -> AsyncGenerator[bytes | Packed | None, None]:
    """`tar_out` of an agent that is held already."""
    stream = await trees.tar_out(agent, path, exclude=exclude, user=user)
    async with stream:
        yield None
        async with contextlib.aclosing(aiter(stream)) as pieces:
            async for piece in pieces:
                yield piece
        if stream.packed is not None:
            yield stream.packed


async def tar_in(
    live: Live,
    path: str,
    chunks: AsyncIterable[bytes],
    *,
    parents: bool,
    preserve_owner: bool,
    user: User,
) -> Unpacked:
    async with live.use(f"unpack into {path}") as agent:
        return await trees.tar_in(
            agent, path, chunks, parents=parents, preserve_owner=preserve_owner, user=user
        )


async def set_attributes(live: Live, path: str, **wanted: Any) -> int:
    """The keywords of `guest.trees.set_attributes`."""
    async with live.use("set attributes") as agent:
        return await trees.set_attributes(agent, path, **wanted)


async def link(live: Live, path: str, target: str, *, symbolic: bool, overwrite: bool, user: User) -> None:
    async with live.use("link") as agent:
        await trees.link(agent, path, target, symbolic=symbolic, overwrite=overwrite, user=user)


async def search(live: Live, path: str, **wanted: Any) -> Found:
    """The keywords of `guest.trees.search`."""
    async with live.use("search") as agent:
        return await trees.search(agent, path, **wanted)


async def watch(live: Live, path: str, *, recursive: bool, user: User) -> AsyncGenerator[Change | None, None]:
    """None once all is watched, then each change; ends when what is watched has gone."""
    async with live.use(f"watch {path}") as agent:
        changes = await trees.watch(agent, path, recursive=recursive, user=user)
        async with changes:
            yield None
            async with contextlib.aclosing(aiter(changes)) as seen:
                async for change in seen:
                    yield change
