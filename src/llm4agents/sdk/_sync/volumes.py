# Generated from _async/volumes.py by scripts/unasync.py: change that file, then run the script.
"""`Volume` and `Volume`: disks that outlive sandboxes."""

from __future__ import annotations

import builtins
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from llm4agents.errors import NotFoundError
from llm4agents.sdk import _volumes, _wire, results
from llm4agents.sdk._landing import Downloaded
from llm4agents.sdk._sync.files import Files
from llm4agents.sdk._sync.transport import Transport, transport
from llm4agents.sdk._sync.trees import Progress
from llm4agents.sdk._volumes import VolumeInfo

if TYPE_CHECKING:
    from llm4agents.sdk._sync.transport import ByteStream

_COPY_S = 3_600.0
"""How long an answer may take: a copy of a whole volume, on a file system that cannot share blocks."""


class Volume:
    """A disk with a name of its own: `Sandbox(volumes={"/data": "name"})` has it, to write to, and what is written
    there is there for the next one. One sandbox at a time writes to it, or many read it (`("name", "ro")`).

    It belongs to nobody's life: `delete` removes it, nothing else does.
    """

    def __init__(self, way: Transport, info: VolumeInfo) -> None:
        """Not to be called: `create` and `get` make them."""
        self._transport, self._info = way, info
        self._path = f"/v1/volumes/{info.id}"
        self.files = VolumeFiles(way, info.id)

    @classmethod
    def create(
        cls,
        name: str,
        size_mib: int | None = None,
        *,
        source: str | Volume | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Volume:
        """A new one, empty, or with what `source` (a volume or snapshot) has now; then `size_mib` may be left out.

        `name`: 1 to 63 of a-z, 0-9, `.`, `_`, `-`. `size_mib` (8 to 1,048,576) can be written to it at least. Raises
        ConflictError when there is one of that name, QuotaError, CapacityError when the server's disk has no room.
        """
        body = {
            "name": name,
            "size_mib": size_mib,
            "source": source.id if isinstance(source, Volume) else source,
            "metadata": None if metadata is None else dict(metadata),
        }
        way = transport()
        answer = way.json("POST", "/v1/volumes", _wire.without_none(body), wait_s=_COPY_S)
        return cls(way, _volumes.info_of(answer))

    @classmethod
    def get(cls, name: str) -> Volume:
        """The volume of that name or id. Raises NotFoundError."""
        way = transport()
        if name.startswith("vol_"):
            return cls(way, _volumes.info_of(way.json("GET", f"/v1/volumes/{_wire.segment(name)}")))
        found = (way.json("GET", "/v1/volumes", params={"name": name})).get("data") or ()
        if not found:
            raise NotFoundError(f"there is no volume {name}", hint="llm4agents volume ls shows them")
        return cls(way, _volumes.info_of(found[0]))

    @classmethod
    def list(cls) -> builtins.list[VolumeInfo]:
        """Every volume and snapshot, newest first."""
        way, after = transport(), None
        found: builtins.list[VolumeInfo] = []
        while True:
            page = way.json("GET", "/v1/volumes", params={"limit": 1_000, "after": after})
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

    def info(self) -> VolumeInfo:
        """Its size, what it takes, and who has it, now."""
        self._info = _volumes.info_of(self._transport.json("GET", self._path))
        return self._info

    def delete(self) -> None:
        """Remove it and what is in it. Raises ConflictError while a sandbox has it, also a paused one, and says
        which."""
        self._transport.json("DELETE", self._path)

    def snapshot(self, name: str, *, metadata: Mapping[str, str] | None = None) -> Volume:
        """A record of it as it is now, which can be read and cloned and does not change.

        A sandbox that writes to it stands still meanwhile: its file system is whole in the record, and what a program
        had not written yet is not in it.
        """
        return self._copied("snapshot", name, None, metadata)

    def clone(
        self, name: str, *, size_mib: int | None = None, metadata: Mapping[str, str] | None = None
    ) -> Volume:
        """A volume of its own that begins as this is now, as large or larger."""
        return self._copied("clone", name, size_mib, metadata)

    def _copied(
        self, how: str, name: str, size_mib: int | None, metadata: Mapping[str, str] | None
    ) -> Volume:
        body = {"name": name, "size_mib": size_mib, "metadata": None if metadata is None else dict(metadata)}
        answer = self._transport.json("POST", f"{self._path}/{how}", _wire.without_none(body), wait_s=_COPY_S)
        return type(self)(self._transport, _volumes.info_of(answer))

    def resize(self, size_mib: int) -> VolumeInfo:
        """Make it larger; the next sandbox that writes to it has the room. Raises ConflictError while one has it,
        InvalidRequestError when it would become smaller."""
        answer = self._transport.json("POST", f"{self._path}/resize", {"size_mib": size_mib})
        self._info = _volumes.info_of(answer)
        return self._info


class VolumeFiles:
    """The files of a volume, read while no sandbox writes to it; paths are from its root.

    The server starts a machine for it, which ends by itself. ConflictError: a sandbox writes to it, and reads for you.
    """

    def __init__(self, way: Transport, volume: str) -> None:
        self._files = Files(way, volume)
        self._files._path = f"/v1/volumes/{volume}/files"

    @overload
    def read(self, path: str, format: Literal["text"] = ...) -> str: ...
    @overload
    def read(self, path: str, format: Literal["bytes"]) -> bytes: ...
    @overload
    def read(self, path: str, format: Literal["stream"]) -> ByteStream: ...
    def read(
        self, path: str, format: Literal["text", "bytes", "stream"] = "text"
    ) -> str | bytes | ByteStream:
        """A file's content, as `Sandbox.files.read` gives it."""
        return self._files.read(_volumes.path_of(path), format)

    def stat(self, path: str, *, follow: bool = True) -> results.FileInfo:
        return self._files.stat(_volumes.path_of(path), follow=follow)

    def exists(self, path: str) -> bool:
        return self._files.exists(_volumes.path_of(path))

    def list(self, path: str = "/", *, depth: int = 1) -> builtins.list[results.FileInfo]:
        """The entries under a directory, `depth` levels deep."""
        return self._files.list(_volumes.path_of(path), depth=depth)

    def download(
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
        return self._files.download(
            _volumes.path_of(remote),
            local,
            exclude=exclude,
            allow_protected=allow_protected,
            on_progress=on_progress,
        )


class SandboxVolumes:
    """`sandbox.volumes`: what it has attached, and changes of that while it is paused."""

    def __init__(self, way: Transport, sandbox: str) -> None:
        self._transport, self._sandbox = way, sandbox
        self._path = f"/v1/sandboxes/{sandbox}/volumes"

    def list(self) -> builtins.list[dict[str, Any]]:
        """Each as `volume` (id), `name`, `path`, `mode`, and `error` when it could not be mounted."""
        answer = self._transport.json("GET", f"/v1/sandboxes/{self._sandbox}", sandbox=self._sandbox)
        return [dict(item) for item in answer.get("volumes") or ()]

    def attach(
        self, path: str, volume: str | _volumes.Named, *, mode: _volumes.Mode = "rw"
    ) -> builtins.list[dict[str, Any]]:
        """Give it a volume, which is at `path` when it is resumed. Raises ConflictError when it is not paused, or
        somebody else has the volume."""
        body = _volumes.mount(path, volume, mode)
        answer = self._transport.json("POST", self._path, body, sandbox=self._sandbox)
        return [dict(item) for item in answer.get("volumes") or ()]

    def detach(self, volume: str | _volumes.Named) -> builtins.list[dict[str, Any]]:
        """Take it away; others can have it at once. What in the sandbox has files of it open gets errors for them."""
        body = {"volume": volume if isinstance(volume, str) else volume.id}
        answer = self._transport.json("POST", f"{self._path}/detach", body, sandbox=self._sandbox)
        return [dict(item) for item in answer.get("volumes") or ()]
