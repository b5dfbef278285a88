"""`AsyncVolume` and `Volume`: disks that outlive sandboxes. Written once, asynchronously."""

from __future__ import annotations

import builtins
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from llm4agents.errors import NotFoundError
from llm4agents.sdk import _volumes, _wire, results
from llm4agents.sdk._async.files import AsyncFiles
from llm4agents.sdk._async.transport import AsyncTransport, transport
from llm4agents.sdk._async.trees import Progress
from llm4agents.sdk._landing import Downloaded
from llm4agents.sdk._volumes import VolumeInfo

if TYPE_CHECKING:
    from llm4agents.sdk._async.transport import AsyncByteStream

_COPY_S = 3_600.0
"""How long an answer may take: a copy of a whole volume, on a file system that cannot share blocks."""


class AsyncVolume:
    """A disk with a name of its own: `Sandbox(volumes={"/data": "name"})` has it, to write to, and what is written
    there is there for the next one. One sandbox at a time writes to it, or many read it (`("name", "ro")`).

    It belongs to nobody's life: `delete` removes it, nothing else does.
    """

    def __init__(self, way: AsyncTransport, info: VolumeInfo) -> None:
        """Not to be called: `create` and `get` make them."""
        self._transport, self._info = way, info
        self._path = f"/v1/volumes/{info.id}"
        self.files = AsyncVolumeFiles(way, info.id)

    @classmethod
    async def create(
        cls,
        name: str,
        size_mib: int | None = None,
        *,
        source: str | AsyncVolume | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> AsyncVolume:
        """A new one, empty, or with what `source` (a volume or snapshot) has now; then `size_mib` may be left out.

        `name`: 1 to 63 of a-z, 0-9, `.`, `_`, `-`. `size_mib` (8 to 1,048,576) can be written to it at least. Raises
        ConflictError when there is one of that name, QuotaError, CapacityError when the server's disk has no room.
        """
        body = {
            "name": name,
            "size_mib": size_mib,
            "source": source.id if isinstance(source, AsyncVolume) else source,
            "metadata": None if metadata is None else dict(metadata),
        }
        way = transport()
        answer = await way.json("POST", "/v1/volumes", _wire.without_none(body), wait_s=_COPY_S)
        return cls(way, _volumes.info_of(answer))

    @classmethod
    async def get(cls, name: str) -> AsyncVolume:
        """The volume of that name or id. Raises NotFoundError."""
        way = transport()
        if name.startswith("vol_"):
            return cls(way, _volumes.info_of(await way.json("GET", f"/v1/volumes/{_wire.segment(name)}")))
        found = (await way.json("GET", "/v1/volumes", params={"name": name})).get("data") or ()
        if not found:
            raise NotFoundError(f"there is no volume {name}", hint="llm4agents volume ls shows them")
        return cls(way, _volumes.info_of(found[0]))

    @classmethod
    async def list(cls) -> builtins.list[VolumeInfo]:
        """Every volume and snapshot, newest first."""
        way, after = transport(), None
        found: builtins.list[VolumeInfo] = []
        while True:
            page = await way.json("GET", "/v1/volumes", params={"limit": 1_000, "after": after})
            found.extend(_volumes.info_of(item) for item in page.get("data") or ())
            after = page.get("next")
            if not after:
                return found

    @property
    def id(self) -> str:
        """`vol_` and 20 of [a-z0-9]."""
        return self._info.id

    @property
    def name(self) -> str:
        return self._info.name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._info.name} {self._info.id}>"

    async def info(self) -> VolumeInfo:
        """Its size, what it takes, and who has it, now."""
        self._info = _volumes.info_of(await self._transport.json("GET", self._path))
        return self._info

    async def delete(self) -> None:
        """Remove it and what is in it. Raises ConflictError while a sandbox has it, also a paused one, and says
        which."""
        await self._transport.json("DELETE", self._path)

    async def snapshot(self, name: str, *, metadata: Mapping[str, str] | None = None) -> AsyncVolume:
        """A record of it as it is now, which can be read and cloned and does not change.

        A sandbox that writes to it stands still meanwhile: its file system is whole in the record, and what a program
        had not written yet is not in it.
        """
        return await self._copied("snapshot", name, None, metadata)

    async def clone(
        self, name: str, *, size_mib: int | None = None, metadata: Mapping[str, str] | None = None
    ) -> AsyncVolume:
        """A volume of its own that begins as this is now, as large or larger."""
        return await self._copied("clone", name, size_mib, metadata)

    async def _copied(
        self, how: str, name: str, size_mib: int | None, metadata: Mapping[str, str] | None
    ) -> AsyncVolume:
        body = {"name": name, "size_mib": size_mib, "metadata": None if metadata is None else dict(metadata)}
        answer = await self._transport.json(
            "POST", f"{self._path}/{how}", _wire.without_none(body), wait_s=_COPY_S
        )
        return type(self)(self._transport, _volumes.info_of(answer))

    async def resize(self, size_mib: int) -> VolumeInfo:
        """Make it larger; the next sandbox that writes to it has the room. Raises ConflictError while one has it,
        InvalidRequestError when it would become smaller."""
        answer = await self._transport.json("POST", f"{self._path}/resize", {"size_mib": size_mib})
        self._info = _volumes.info_of(answer)
        return self._info


class AsyncVolumeFiles:
    """The files of a volume, read while no sandbox writes to it; paths are from its root.

    The server starts a machine for it, which ends by itself. ConflictError: a sandbox writes to it, and reads for you.
    """

    def __init__(self, way: AsyncTransport, volume: str) -> None:
        self._files = AsyncFiles(way, volume)
        self._files._path = f"/v1/volumes/{volume}/files"

    @overload
    async def read(self, path: str, format: Literal["text"] = ...) -> str: ...
    @overload
    async def read(self, path: str, format: Literal["bytes"]) -> bytes: ...
    @overload
    async def read(self, path: str, format: Literal["stream"]) -> AsyncByteStream: ...
    async def read(
        self, path: str, format: Literal["text", "bytes", "stream"] = "text"
    ) -> str | bytes | AsyncByteStream:
        """A file's content, as `Sandbox.files.read` gives it."""
        return await self._files.read(_volumes.path_of(path), format)

    async def stat(self, path: str, *, follow: bool = True) -> results.FileInfo:
        return await self._files.stat(_volumes.path_of(path), follow=follow)

    async def exists(self, path: str) -> bool:
        return await self._files.exists(_volumes.path_of(path))

    async def list(self, path: str = "/", *, depth: int = 1) -> builtins.list[results.FileInfo]:
        """The entries under a directory, `depth` levels deep."""
        return await self._files.list(_volumes.path_of(path), depth=depth)

    async def download(
        self,
        remote: str,
        local: str | os.PathLike[str] | None = None,
        *,
        exclude: Sequence[str] = (),
        allow_protected: bool = False,
        on_progress: Progress | None = None,
    ) -> Downloaded:
        """Copies a file or directory of the volume to this machine, as `Sandbox.files.download` does: what this machine
        would obey is left out, or refused (ProtectedPathError)."""
        return await self._files.download(
            _volumes.path_of(remote),
            local,
            exclude=exclude,
            allow_protected=allow_protected,
            on_progress=on_progress,
        )


class AsyncSandboxVolumes:
    """`sandbox.volumes`: what it has attached, and changes of that while it is paused."""

    def __init__(self, way: AsyncTransport, sandbox: str) -> None:
        self._transport, self._sandbox = way, sandbox
        self._path = f"/v1/sandboxes/{sandbox}/volumes"

    async def list(self) -> builtins.list[dict[str, Any]]:
        """Each as `volume` (id), `name`, `path`, `mode`, and `error` when it could not be mounted."""
        answer = await self._transport.json("GET", f"/v1/sandboxes/{self._sandbox}", sandbox=self._sandbox)
        return [dict(item) for item in answer.get("volumes") or ()]

    async def attach(
        self, path: str, volume: str | _volumes.Named, *, mode: _volumes.Mode = "rw"
    ) -> builtins.list[dict[str, Any]]:
        """Give it a volume, which is at `path` when it is resumed. Raises ConflictError when it is not paused, or
        somebody else has the volume."""
        body = _volumes.mount(path, volume, mode)
        answer = await self._transport.json("POST", self._path, body, sandbox=self._sandbox)
        return [dict(item) for item in answer.get("volumes") or ()]

    async def detach(self, volume: str | _volumes.Named) -> builtins.list[dict[str, Any]]:
        """Take it away; others can have it at once. What in the sandbox has files of it open gets errors for them."""
        body = {"volume": volume if isinstance(volume, str) else volume.id}
        answer = await self._transport.json("POST", f"{self._path}/detach", body, sandbox=self._sandbox)
        return [dict(item) for item in answer.get("volumes") or ()]
