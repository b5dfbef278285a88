"""The volumes of one sandbox: what a create may ask for, which disks that makes, what its guest is told of them.

An entry of `row.volumes` is `{"volume", "name", "path", "mode", "slot", "id"}`; `id` is the attachment's own, and
what the guest knows it by. `{"slot", "left": true}` is a slot that the memory of a pause may still have a volume in
which is not there any more: no other gets it before the sandbox has run again. Not here: who may have which
(`engine.volumes`).
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from llm4agents import limits
from llm4agents.engine import parts, tops
from llm4agents.errors import ConflictError, HostSetupError, InvalidRequestError
from llm4agents.images import disk
from llm4agents.images.process import Cancel, in_thread
from llm4agents.images.volumes import Files
from llm4agents.store import SandboxRow
from llm4agents.vmm.base import Disk

SLOTS: Final = tuple(f"vol{number}" for number in range(1, limits.VOLUME_SLOTS))
_NOT: Final = ("/", "/proc", "/sys", "/dev", "/run", "/etc", "/usr", "/tmp", "/home", "/home/user", "/root")  # noqa: S108
"""What a guest needs to have its own of, or would be without what its template put there."""
_BELOW_NOT: Final = ("/proc/", "/sys/", "/dev/", "/run/")
Mode = Literal["rw", "ro"]


@dataclass(frozen=True, slots=True)
class Mount:
    """A wish: a volume, by id or by name, at a path of the guest."""

    volume: str
    path: str
    mode: Mode = "rw"


def wanted(mounts: Iterable[Mount], protected: Sequence[str] = ()) -> tuple[Mount, ...]:
    """Checked, with plain paths. `protected`: paths of the template that the sandbox has read-only. Pure.

    Raises InvalidRequestError.
    """
    plain: list[Mount] = []
    for mount in mounts:
        path = mount.path
        if not path.startswith("/") or "\0" in path or ".." in path.split("/"):
            raise InvalidRequestError(f"a volume's path is absolute, without `..`, and not {path[:200]!r}")
        if len(os.fsencode(path)) > 1_024:
            raise InvalidRequestError(f"a volume's path has at most 1024 bytes: {path[:60]}…")
        path = posixpath.normpath("/" + path.strip("/"))
        if path in _NOT or path.startswith(_BELOW_NOT):
            raise InvalidRequestError(
                f"a volume cannot be mounted at {path}", hint="give a directory of its own: /data"
            )
        for other in protected:
            if apart(path, other):
                continue
            raise InvalidRequestError(f"{path} is in the way of {other}, which protect= names")
        plain.append(Mount(mount.volume, path, mount.mode))
    if len(plain) > limits.VOLUMES_PER_SANDBOX_MAX:
        raise InvalidRequestError(f"a sandbox has at most {limits.VOLUMES_PER_SANDBOX_MAX} volumes")
    for place, one in enumerate(plain):
        for other_one in plain[:place]:
            if not apart(one.path, other_one.path):
                raise InvalidRequestError(
                    f"{one.path} and {other_one.path}: a volume is not mounted on another"
                )
            if one.volume == other_one.volume:
                raise InvalidRequestError(f"{one.volume} is given twice")
    return tuple(plain)


def apart(one: str, other: str) -> bool:
    """Whether neither path is the other's or below it. Pure."""
    return one != other and not one.startswith(other + "/") and not other.startswith(one + "/")


def entries(row: SandboxRow) -> list[dict[str, Any]]:
    """What a sandbox has attached. Pure."""
    return [entry for entry in row.volumes or () if not entry.get("left")]


def writable(row: SandboxRow) -> list[dict[str, Any]]:
    return [entry for entry in entries(row) if entry["mode"] == "rw"]


def left(slots: Iterable[str]) -> list[dict[str, Any]]:
    """Entries of slots that no volume may have."""
    return [{"slot": slot, "left": True} for slot in slots]


def resumed(
    row: SandboxRow, unmounted: Mapping[str, str], busy: Sequence[str]
) -> list[dict[str, Any]] | None:
    """`row.volumes` of a sandbox that runs (again): what could not be mounted says why, and of the slots whose volume
    was taken away only those stay closed that are `busy` in the guest. Pure."""
    has = {entry["slot"] for entry in entries(row)}
    found = left(slot for slot in SLOTS if slot in busy and slot not in has)
    for entry in entries(row):
        kept = {name: value for name, value in entry.items() if name != "error"}
        found.append({**kept, "error": unmounted[entry["id"]]} if entry["id"] in unmounted else kept)
    return stored(found)


def stored(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """As `row.volumes`. Pure."""
    return [dict(entry) for entry in found] or None


def shown(row: SandboxRow) -> list[dict[str, Any]]:
    """As the wire has it. Pure."""
    told = ("volume", "name", "path", "mode", "error")
    return [{name: entry[name] for name in told if name in entry} for entry in entries(row)]


def add(row_volumes: Sequence[Mapping[str, Any]], volume: str, name: str, mount: Mount) -> dict[str, Any]:
    """The entry of one more volume, in a slot that is free. Pure, but for its id. Raises ConflictError."""
    here = [entry for entry in row_volumes if not entry.get("left")]
    for entry in here:
        if entry["volume"] == volume:
            raise ConflictError(f"{name} is attached already, at {entry['path']}")
        if not apart(entry["path"], mount.path):
            raise ConflictError(f"{mount.path} is in the way of {entry['name']}, which is at {entry['path']}")
    if len(here) >= limits.VOLUMES_PER_SANDBOX_MAX:
        raise ConflictError(f"a sandbox has at most {limits.VOLUMES_PER_SANDBOX_MAX} volumes")
    taken = {entry["slot"] for entry in row_volumes}
    free = [slot for slot in SLOTS if slot not in taken]
    if not free:
        raise ConflictError(
            "the sandbox's memory may still have volumes in use that were detached", hint="resume it first"
        )
    return {
        "volume": volume,
        "name": name,
        "path": mount.path,
        "mode": mount.mode,
        "slot": free[0],
        "id": secrets.token_hex(8),
    }


@dataclass(frozen=True, slots=True)
class Attached:
    """The volumes of a machine about to start. `overlays`: of a fork, what a reader's disk is a copy of, by slot."""

    entries: tuple[dict[str, Any], ...]
    files: Files
    overlays: Mapping[str, Path] = field(default_factory=dict)

    def request(self) -> list[dict[str, object]]:
        """As `post_restore` has it. Raises HostSetupError."""
        return [
            {
                "slot": entry["slot"],
                "id": entry["id"],
                "path": entry["path"],
                "bytes": self.files.bytes(entry["volume"]),
                "ro": entry["mode"] == "ro",
            }
            for entry in sorted(self.entries, key=lambda entry: str(entry["path"]))
        ]

    async def disks(self, top: Path, *, fresh: bool) -> tuple[Disk, ...]:
        """Of a writer the volume itself. Of a reader a private one that reads as the volume, of the form of the
        machine's `top` and beside it: what that guest's root writes is in there, and so is what its kernel replayed of
        the volume's journal, which is why memory that is resumed (not `fresh`) needs the one it had.

        Raises OSError, CapacityError, HostSetupError.
        """
        found = []
        for entry in self.entries:
            volume = self.files.path(entry["volume"])
            if entry["mode"] == "rw":
                found.append(Disk(entry["slot"], volume, "raw", read_only=False, lasts=True))
                continue
            private = overlay(top, entry["slot"])
            if fresh or not private.exists():
                private.unlink(missing_ok=True)
                if (source := self.overlays.get(entry["slot"])) is not None:
                    await in_thread(partial(_copy, source, private))
                else:
                    await tops.of(top).over(volume, private.with_suffix(".none"), private)
            reading = parts.writable(entry["slot"], private, (volume,))
            found.append(
                Disk(
                    reading.slot, private, reading.format, False, reading.backing, lasts=bool(reading.backing)
                )
            )
        return tuple(found)

    @property
    def bytes_max(self) -> int:
        """Of the largest file that is written to; 0 when none is."""
        sizes = [0]
        for entry in self.entries:
            if entry["mode"] == "rw":
                with contextlib.suppress(HostSetupError):
                    sizes.append(self.files.bytes(entry["volume"]))
        return max(sizes)

    @property
    def reading_slots(self) -> tuple[str, ...]:
        return tuple(str(entry["slot"]) for entry in self.entries if entry["mode"] == "ro")

    async def photograph(self, top: Path, room: Path) -> dict[str, Path]:
        """Copies of the readers' private disks of a machine that stands still, by slot; their names begin with
        `room`."""
        taken = {}
        for entry in self.entries:
            if entry["mode"] == "ro":
                private = overlay(top, entry["slot"])
                copy = room.with_name(f"{room.name}-{private.name}")
                await in_thread(partial(_copy, private, copy))
                taken[str(entry["slot"])] = copy
        return taken


def _copy(source: Path, path: Path, _: Cancel) -> None:
    disk.copy_sparse(source, path)


def overlay(top: Path, slot: str) -> Path:
    return top.with_name(slot + top.suffix)
