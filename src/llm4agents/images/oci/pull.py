"""An image's layers, from wherever it is into the cache: each blob whole and of the right digest, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from llm4agents import limits
from llm4agents.images.cache import Cache
from llm4agents.images.oci import manifest
from llm4agents.images.oci.image import Auth, Registries
from llm4agents.images.oci.layout import Layout
from llm4agents.images.oci.manifest import Descriptor, Manifest, refuse
from llm4agents.images.oci.reference import Local, Remote
from llm4agents.images.oci.registry import Registry
from llm4agents.images.process import check_room, in_thread
from llm4agents.images.progress import Progress

_INDEXES_MAX = 4


class Source:
    """An image, wherever it is."""

    def __init__(self, where: Registry | Layout, remote: Remote | None) -> None:
        self._where, self._remote = where, remote

    async def resolve(self, platform: str) -> tuple[Manifest, bytes]:
        """What there is for that platform: its manifest, and its configuration's bytes."""
        where = self._where
        if isinstance(where, Layout):
            return await in_thread(lambda _: where.resolve(platform))
        assert self._remote is not None
        which = self._remote.which
        for _ in range(_INDEXES_MAX):
            data, kind, digest = await where.document(which)
            body = manifest.document(data, "manifest")
            if not manifest.is_index(body, kind):
                found = manifest.manifest(body, digest)
                return found, await where.small(found.config)
            which = manifest.choose(body, platform).digest
        return refuse("its indexes lead to indexes without end")

    async def fetch(self, blob: Descriptor, path: Path, got: Callable[[int], None]) -> None:
        """The blob as the new file `path`."""
        where = self._where
        if isinstance(where, Layout):
            await in_thread(lambda cancel: where.fetch(blob, path, got, cancel))
        else:
            await where.fetch(blob, path, got)


@contextlib.asynccontextmanager
async def opened(
    image: Remote | Local, registries: Registries, auth: Auth | None, certificates: bytes | None
) -> AsyncIterator[Source]:
    if isinstance(image, Local):
        layout = await in_thread(lambda _: Layout(image))
        with layout:
            yield Source(layout, None)
        return
    async with Registry(image, registries, auth, certificates) as registry:
        yield Source(registry, image)


async def layers(
    source: Source, wanted: Sequence[Descriptor], cache: Cache, progress: Progress
) -> list[Path]:
    """The blobs of `wanted`, in their order; a few are fetched at a time."""
    missing = {blob.hex: blob for blob in wanted if cache.blob(blob.hex) is None}
    total = sum(blob.size for blob in missing.values())
    done, told = 0, -1

    def got(more: int) -> None:
        nonlocal done, told
        done += more
        percent = 100 * done // total if total else 100
        if percent != told:
            told = percent
            progress("pull", f"fetching {total / 1e6:.0f} MB in {len(missing)} layers", percent / 100)

    turns = asyncio.Semaphore(1 if isinstance(source._where, Layout) else limits.OCI_DOWNLOADS_MAX)

    async def one(blob: Descriptor, tmp: Path) -> None:
        async with turns:
            path = tmp / blob.hex
            await source.fetch(blob, path, got)
            await in_thread(lambda cancel: cache.ingest(path, cancel, digest=blob.hex))

    if missing:
        async with cache.workdir() as tmp:
            check_room(tmp, total)
            tasks = [asyncio.ensure_future(one(blob, tmp)) for blob in missing.values()]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
    found = [cache.blob(blob.hex) for blob in wanted]
    assert all(found)
    return [path for path in found if path is not None]
