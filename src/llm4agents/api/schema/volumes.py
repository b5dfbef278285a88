"""Volumes: disks that outlive sandboxes, and their files. Models and operations. Pure."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field

from llm4agents.api.schema.files import ENTRY, FILE, TAR_READ, Entry, Listing
from llm4agents.api.schema.kinds import NOW, Answer, Operation, Operations
from llm4agents.api.schema.sandboxes import PAUSED, Sandbox


class VolumeHolder(Answer):
    """A sandbox that has it attached."""

    sandbox: str
    mode: Literal["rw", "ro"]


class Volume(Answer):
    """A disk of one's own, which sandboxes attach: one that writes, or many that read."""

    id: str = Field(pattern=r"^vol_[a-z0-9]{20}$")
    name: str
    kind: Literal["volume", "snapshot"]
    state: str
    size_mib: int
    allocated_bytes: int = Field(description="What it takes on the node's disk.")
    created_at: float
    source: str | None = Field(description="What it began as a copy of.")
    metadata: dict[str, str]
    attached: list[VolumeHolder]


class VolumePage(Answer):
    data: list[Volume]
    next: str | None = Field(description="`after` of the next page; null: this is the last.")


_ID: Final = "vol_0123456789abcdefghij"
VOLUME: Final[dict[str, Any]] = {
    "id": _ID,
    "name": "results",
    "kind": "volume",
    "state": "ready",
    "size_mib": 1024,
    "allocated_bytes": 1_126_400,
    "created_at": NOW,
    "source": None,
    "metadata": {},
    "attached": [],
}
_HELD: Final = [{"volume": _ID, "name": "results", "path": "/data", "mode": "rw"}]
_V = "/v1/volumes/{volume}"
_S = "/v1/sandboxes/{sandbox}/volumes"
_F = f"{_V}/files"
_FILES = (
    "Of a volume that no sandbox writes to. A microVM of its own reads it: the node reads no guest's disk."
)
_BROKEN = (404, 409, 422, 502, 504)
_THIS = {"volume": "$response.body#/id"}

OPERATIONS: Final[Operations] = {
    ("POST", "/v1/volumes"): Operation(
        "volumes_create",
        "Volumes",
        "Create a volume",
        (Volume,),
        words="Empty, or (`source`) as a copy of another one or of a snapshot.",
        status=201,
        problems=(404, 409),
        body={"name": "results", "size_mib": 1024},
        example=VOLUME,
        links={"get": ("volumes_get", _THIS), "delete": ("volumes_delete", _THIS)},
    ),
    ("GET", "/v1/volumes"): Operation(
        "volumes_list",
        "Volumes",
        "List volumes and their snapshots",
        (VolumePage,),
        problems=(404,),
        parameters={"name": "Only the one of this name.", "after": "`next` of the page before."},
        example={"data": [VOLUME], "next": None},
    ),
    ("GET", _V): Operation(
        "volumes_get", "Volumes", "Look at a volume", (Volume,), problems=(404,), example=VOLUME
    ),
    ("DELETE", _V): Operation(
        "volumes_delete",
        "Volumes",
        "Delete a volume",
        (Volume,),
        words="For good. Refused while a sandbox has it attached, also a paused one.",
        problems=(404, 409),
        example={**VOLUME, "state": "deleted"},
    ),
    ("POST", f"{_V}/snapshot"): Operation(
        "volumes_snapshot",
        "Volumes",
        "Keep a volume as it is now",
        (Volume,),
        words="What can be cloned, and does not change.",
        status=201,
        problems=_BROKEN,
        body={"name": "results-1"},
        example={**VOLUME, "name": "results-1", "kind": "snapshot", "source": _ID},
    ),
    ("POST", f"{_V}/clone"): Operation(
        "volumes_clone",
        "Volumes",
        "Copy a volume",
        (Volume,),
        status=201,
        problems=_BROKEN,
        body={"name": "results-2"},
        example={**VOLUME, "name": "results-2", "source": _ID},
    ),
    ("POST", f"{_V}/resize"): Operation(
        "volumes_resize",
        "Volumes",
        "Make a volume larger",
        (Volume,),
        problems=_BROKEN,
        body={"size_mib": 2048},
        example={**VOLUME, "size_mib": 2048},
    ),
    ("GET", _F): Operation(
        "volumes_files_read",
        "Volumes",
        "Read a file of a volume",
        (FILE,),
        words=f"{_FILES} Streams, as `GET …/files` of a sandbox does.",
        problems=_BROKEN,
        parameters={
            "path": "From the volume's own root.",
            "offset": "Which byte to begin with.",
            "length": "How many at most.",
        },
    ),
    ("GET", f"{_F}/stat"): Operation(
        "volumes_files_stat",
        "Volumes",
        "Look at a file of a volume",
        (Entry,),
        words=_FILES,
        problems=_BROKEN,
        parameters={
            "path": "From the volume's own root.",
            "follow": "Of a symbolic link: what it points to.",
        },
        example={**ENTRY, "path": "/data.csv"},
    ),
    ("GET", f"{_F}/list"): Operation(
        "volumes_files_list",
        "Volumes",
        "List a directory of a volume",
        (Listing,),
        words=_FILES,
        problems=_BROKEN,
        parameters={"path": "From the volume's own root.", "depth": "How many levels down."},
        example={"entries": [{**ENTRY, "path": "/data.csv"}], "truncated": False},
    ),
    ("GET", f"{_F}/tar"): Operation(
        "volumes_files_tar_read",
        "Volumes",
        "Read a directory of a volume",
        (TAR_READ,),
        words=_FILES,
        problems=_BROKEN,
        parameters={
            "path": "From the volume's own root.",
            "exclude": "A pattern of what is left out; may be given several times.",
        },
    ),
    ("POST", _S): Operation(
        "sandboxes_attach_volume",
        "Volumes",
        "Attach a volume to a paused sandbox",
        (Sandbox,),
        words="It is mounted when that is resumed. At a create: `volumes`.",
        reach="guest",
        body={"volume": "results", "path": "/data"},
        example={**PAUSED, "volumes": _HELD},
    ),
    ("POST", f"{_S}/detach"): Operation(
        "sandboxes_detach_volume",
        "Volumes",
        "Take a volume off a paused sandbox",
        (Sandbox,),
        words="It is free at once.",
        reach="guest",
        body={"volume": "results"},
        example=PAUSED,
    ),
}
