"""A frozen machine on disk: `manifest.json`, `memory` (sparse) or `pages`, `state` (devices). Reading and judging one.

The manifest is written last and renamed into place, so a directory with one is whole. A diff (`Snapshot.kind`)
has the digests of its parts in it: what it lies over is mapped by every clone and read at every restore, it is
read once, and damage must not become a machine's memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from llm4agents.errors import (
    ConflictError,
    CorruptSnapshotError,
    HostSetupError,
    LLM4AgentsError,
    NotFoundError,
    VersionMismatchError,
    disk_full,
)
from llm4agents.vmm.base import Capabilities, Disk, MachineSpec, Snapshot

MANIFEST, MEMORY, STATE, PAGES = "manifest.json", "memory", "state", "pages"
FORMAT = 1


def to_json(snapshot: Snapshot) -> dict[str, Any]:
    """The manifest's body; its paths are where the parts were when it was made, and not needed again."""
    spec = asdict(snapshot.spec)
    body = {
        "format": FORMAT,
        "identity": snapshot.identity,
        "memory_bytes": snapshot.memory_bytes,
        "spec": json.loads(json.dumps(spec, default=str)),
    }
    if snapshot.bare:
        body["bare"] = True
    if snapshot.kind == "diff":
        body |= {"kind": "diff", "base": snapshot.base, "parts": snapshot.parts}
        body |= {"pages_bytes": snapshot.pages_bytes, "state_bytes": snapshot.state_bytes}
    return body


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
        spec["vcpus"], spec["memory_mib"] = int(spec["vcpus"]), int(spec["memory_mib"])
        identity = {str(name): str(value) for name, value in body["identity"].items()}
        frozen = Snapshot(path, MachineSpec(**spec), identity, int(body["memory_bytes"]))
        if body.get("kind", "full") == "full":
            return replace(frozen, bare=bool(body.get("bare")))
        return replace(
            frozen,
            kind="diff",
            base=str(body["base"]),
            parts={name: str(body["parts"][name]) for name in (PAGES, STATE)},
            pages_bytes=int(body["pages_bytes"]),
            state_bytes=int(body["state_bytes"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise VersionMismatchError(
            f"the manifest of the snapshot {path} cannot be read: {error!r}", hint="build the template again"
        ) from error


def _disk(body: dict[str, Any]) -> Disk:
    backing = body.get("backing") or ()
    layers = (backing,) if isinstance(backing, str) else backing  # one path, before there were layers
    return Disk(**{**body, "path": Path(body["path"]), "backing": tuple(Path(layer) for layer in layers)})


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


def digest(path: Path) -> str:
    """What a diff over the full snapshot in `path` calls it.

    Of its manifest and its devices' state: no two machines were ever frozen with equal clocks and timers, so a
    template built again under the same key is another base. Raises NotFoundError when it is not whole.
    """
    found = hashlib.sha256()
    try:
        for name in (MANIFEST, STATE):
            found.update((path / name).read_bytes())
    except FileNotFoundError as error:
        raise NotFoundError(f"there is no whole snapshot in {path}") from error
    return found.hexdigest()


class Digests:
    """The digests of full snapshots, kept: a create waits for one. A manifest is renamed into place once."""

    def __init__(self) -> None:
        self._kept: dict[Path, tuple[int, str]] = {}

    def of(self, path: Path) -> str:
        """That of the snapshot in `path`. Raises HostSetupError when it is not whole."""
        try:
            inode = (path / MANIFEST).stat().st_ino
            if self._kept.get(path, (0, ""))[0] != inode:
                self._kept[path] = (inode, digest(path))
        except (OSError, NotFoundError) as error:
            raise HostSetupError(f"{path} is not whole", hint="build the template again") from error
        return self._kept[path][1]

    def forget(self, path: Path) -> None:
        self._kept.pop(path, None)


def manifest_digest(path: Path) -> str | None:
    """Hex SHA-256 of the manifest of the snapshot in `path`, None when there is none."""
    try:
        return hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()
    except OSError:
        return None


def load_diff(path: Path) -> Snapshot:
    """The diff in `path`, every byte of it checked. Blocks.

    Raises NotFoundError when there is no manifest, VersionMismatchError when it is of another format,
    CorruptSnapshotError when a part is missing, short or changed.
    """
    found = load(path)
    if found.kind != "diff":
        raise VersionMismatchError(f"{path} is a full snapshot, not a diff")
    for name, size in ((PAGES, found.pages_bytes), (STATE, found.state_bytes)):
        try:
            with (path / name).open("rb") as file:
                if os.fstat(file.fileno()).st_size != size:
                    raise corrupt(path / name, "it was cut off")
                check_part(found, name, hashlib.file_digest(file, "sha256").hexdigest())
        except FileNotFoundError as error:
            raise corrupt(path / name, "it is gone") from error
    return found


def check_diff(diff: Snapshot, base: Snapshot, base_digest: str) -> None:
    """Raises VersionMismatchError unless `diff` lies over `base`, and both are of the same kind of machine."""
    if diff.kind != "diff":
        raise VersionMismatchError(f"{diff.path} is a full snapshot, not a diff")
    check_identity(diff, base.identity)
    if diff.base != base_digest:
        raise VersionMismatchError(
            f"the pause {diff.path} lies over another build of its template than {base.path}",
            hint="resume with cold=True starts from the disk alone",
            different=["base"],
        )


def check_part(diff: Snapshot, name: str, digest: str) -> None:
    """Raises CorruptSnapshotError unless `digest` (hex SHA-256) is what was written down for that part."""
    if diff.parts.get(name) != digest:
        raise corrupt(diff.path / name, "its digest is not what was written down")


def corrupt(path: Path, why: str) -> CorruptSnapshotError:
    return CorruptSnapshotError(
        f"{path} is not what was written: {why}",
        hint="resume with cold=True starts from the disk alone",
        part=path.name,
    )


@contextlib.asynccontextmanager
async def making(directory: Path, what: str) -> AsyncIterator[None]:
    """Within, what is new is written to `directory` (0700), which is gone again when that fails.

    Raises ConflictError when it is there already, CapacityError and HostSetupError (`unwritten`), and what comes of it.
    """
    try:
        directory.mkdir(0o700)
    except FileExistsError:
        raise ConflictError(f"{directory} exists already") from None
    except OSError as error:
        raise unwritten(what, error) from error
    try:
        yield
    except BaseException as error:
        shutil.rmtree(directory, ignore_errors=True)
        ours = unwritten(what, error)
        if ours is error:
            raise
        raise ours from error


def write_manifest(snapshot: Snapshot, *, sync: bool = True) -> None:
    """Last of all, durably (unless not `sync`): from here on the snapshot exists."""
    temporary = snapshot.path / f".{MANIFEST}"
    with temporary.open("x") as file:
        json.dump(to_json(snapshot), file, indent=1)
        file.flush()
        if sync:
            os.fsync(file.fileno())
    temporary.rename(snapshot.path / MANIFEST)
    if not sync:
        return
    sync_path(snapshot.path)


def write_part(path: Path, body: bytes) -> None:
    """A new file (0600) of a snapshot, durably. Raises OSError."""
    with path.open("xb") as file:
        path.chmod(0o600)
        file.write(body)
        file.flush()
        os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """A file's bytes, or a directory's names, are on the disk when it returns. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def unwritten(what: str, error: BaseException) -> BaseException:
    """An error of the host's disk while `what` was written, in our words; any other as it is.

    Only of a disk without room it is said that room helps: a directory that is gone, or a disk that breaks, is none.
    """
    if not isinstance(error, OSError) or isinstance(error, LLM4AgentsError):
        return error
    return disk_full(error.errno) or HostSetupError(
        f"{what} could not be written: {error}", hint="look at the host's disk, and at its kernel's log"
    )


def identity(driver: str, spec: MachineSpec, can: Capabilities, layout: str) -> dict[str, str]:
    """What a snapshot of `spec` made now by that driver would be called; `layout`: a digest of its devices. Pure."""
    return {
        "driver": driver,
        "vmm": can.version,
        "accelerator": can.accelerator,
        "cpu": can.cpu + ("+nested" if spec.nested else ""),
        # To the MHz: what is measured differs by parts per million from one host to its twin.
        "tsc": f"{round(can.tsc_khz / 1000)} MHz",
        "kernel": spec.kernel_release,
        "vcpus": str(spec.vcpus),
        "memory_mib": str(spec.memory_mib),
        "layout": layout,
    }


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
