"""Volumes as the SDK tells of them, and how a sandbox asks for them. Pure; shared by both kinds of client."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, Protocol, TypeAlias

from llm4agents.errors import InvalidRequestError
from llm4agents.sdk.results import parse_time

Mode = Literal["rw", "ro"]
LeaveVolumes = Literal["refuse", "leave"]


class Named(Protocol):
    """A `Volume` or `AsyncVolume`."""

    @property
    def id(self) -> str: ...


Wanted: TypeAlias = "str | Named | tuple[str | Named, Mode]"
"""A volume or its name, to write to; or with the mode: `("models", "ro")`."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """Who has a volume. `mode`: `rw` or `ro`."""

    sandbox: str
    mode: Mode


@dataclass(frozen=True, slots=True)
class VolumeInfo:
    """A volume, or a snapshot of one (which can only be read), as the server knew it when asked."""

    id: str
    name: str
    kind: Literal["volume", "snapshot"] = "volume"
    state: str = "ready"
    size_mib: int = 0
    """What can be written to it at least."""
    allocated_bytes: int = 0
    """What it takes on the server's disk now."""
    created_at: datetime | None = None
    source: str | None = None
    """The id of what it was made of."""
    metadata: dict[str, str] = field(default_factory=dict)
    attached: tuple[Attachment, ...] = ()


def info_of(body: Mapping[str, Any]) -> VolumeInfo:
    known = {name: body[name] for name in VolumeInfo.__slots__ if name in body}
    known["created_at"] = parse_time(body.get("created_at"))
    known["metadata"] = dict(body.get("metadata") or {})
    held = (
        Attachment(str(one.get("sandbox")), one.get("mode") or "ro") for one in body.get("attached") or ()
    )
    known["attached"] = tuple(held)
    return VolumeInfo(**{"id": "", "name": "", **known})


def mounts(volumes: Mapping[str, Wanted] | None) -> list[dict[str, str]] | None:
    """`volumes=` of a create as the wire has it. Raises InvalidRequestError."""
    return [mount(path, wanted) for path, wanted in (volumes or {}).items()] or None


def mount(path: str, wanted: Wanted, mode: Mode = "rw") -> dict[str, str]:
    volume: object = wanted
    if isinstance(wanted, tuple):
        if len(wanted) != 2:
            raise InvalidRequestError(f"volumes[{path!r}]: give a volume, or (volume, mode)")
        volume, mode = wanted
    name = volume if isinstance(volume, str) else getattr(volume, "id", None)
    if not isinstance(name, str) or not name or not isinstance(path, str):
        raise InvalidRequestError(
            f"volumes[{path!r}] is {wanted!r}", hint='for example volumes={"/data": "my-volume"}'
        )
    if mode not in ("rw", "ro"):
        raise InvalidRequestError(f"volumes[{path!r}]: the mode is rw or ro, not {mode!r}")
    return {"volume": name, "path": path, "mode": mode}


def path_of(path: str) -> str:
    """A path of a volume, whose root is `/`: what is relative is taken from there. Raises InvalidRequestError."""
    text = str(path)
    if not text or "\0" in text:
        raise InvalidRequestError(f"{text!r} is not a path", hint="give the path of a file on the volume")
    return posixpath.normpath("/" + text.lstrip("/"))
