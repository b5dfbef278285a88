"""A frozen machine on disk: `manifest.json`, `memory` (sparse), `state` (devices). Reading and judging one.

The manifest is written last and renamed into place, so a directory with one is whole.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llm4agents.errors import NotFoundError, VersionMismatchError
from llm4agents.vmm.base import Disk, MachineSpec, Snapshot

MANIFEST, MEMORY, STATE = "manifest.json", "memory", "state"
FORMAT = 1


def to_json(snapshot: Snapshot) -> dict[str, Any]:
    """The manifest's body; its paths are where the parts were when it was made, and not needed again."""
    spec = asdict(snapshot.spec)
    return {
        "format": FORMAT,
        "identity": snapshot.identity,
        "memory_bytes": snapshot.memory_bytes,
        "spec": json.loads(json.dumps(spec, default=str)),
    }


def from_json(path: Path, body: Any) -> Snapshot:
    """Raises VersionMismatchError when it is not a manifest of this format."""
    try:
        if body["format"] != FORMAT:
            raise VersionMismatchError(
                f"the snapshot {path} has format {body['format']}; this version reads {FORMAT}",
                hint="build the template again",
            )
        spec = dict(body["spec"])
        spec["disks"] = tuple(_disk(disk) for disk in spec["disks"])
        spec["kernel_args"] = tuple(spec["kernel_args"])
        spec["kernel"], spec["initrd"] = Path(spec["kernel"]), Path(spec["initrd"])
        identity = {str(name): str(value) for name, value in body["identity"].items()}
        return Snapshot(path, MachineSpec(**spec), identity, int(body["memory_bytes"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise VersionMismatchError(
            f"the manifest of the snapshot {path} cannot be read: {error!r}", hint="build the template again"
        ) from error


def _disk(body: dict[str, Any]) -> Disk:
    backing = body.get("backing")
    return Disk(**{**body, "path": Path(body["path"]), "backing": Path(backing) if backing else None})


def load(path: Path) -> Snapshot:
    """The snapshot in directory `path`. Raises NotFoundError when there is no whole one."""
    try:
        raw = (path / MANIFEST).read_text()
    except FileNotFoundError as error:
        raise NotFoundError(
            f"there is no whole snapshot in {path}", hint="build the template again"
        ) from error
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise VersionMismatchError(
            f"{path / MANIFEST} is not JSON", hint="build the template again"
        ) from error
    return from_json(path, body)


def write_manifest(snapshot: Snapshot) -> None:
    """Last of all, durably: from here on the snapshot exists."""
    temporary = snapshot.path / f".{MANIFEST}"
    with temporary.open("x") as file:
        json.dump(to_json(snapshot), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(snapshot.path / MANIFEST)
    directory = os.open(snapshot.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def check_identity(snapshot: Snapshot, here: dict[str, str]) -> None:
    """Raises VersionMismatchError naming every difference from what this host would make."""
    names = sorted({*snapshot.identity, *here})
    different = [name for name in names if snapshot.identity.get(name) != here.get(name)]
    if different:
        words = "; ".join(
            f"{name}: made with {snapshot.identity.get(name, 'none')}, here {here.get(name, 'none')}"
            for name in different
        )
        raise VersionMismatchError(
            f"the snapshot {snapshot.path} cannot be loaded here ({words})",
            hint="build the template again on this host",
            different=different,
        )
