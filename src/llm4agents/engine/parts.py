"""A variant of a template as it lies on disk: what is in `template.json`, and the key of what went in.

Not here: building one (`templates`). Everything but `load` and `save` is pure.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from llm4agents import limits
from llm4agents.errors import InvalidRequestError, VersionMismatchError
from llm4agents.images.cache import digest_of
from llm4agents.images.spec import TemplateSpec
from llm4agents.vmm.base import Disk, MachineSpec
from llm4agents.vmm.snapshot import MANIFEST

FORMAT = 1
TEMPLATE, SNAPSHOT, UPPER, EMPTY = "template.json", "snapshot", "upper.raw", "upper.qcow2.empty"


class Shape(NamedTuple):
    """What a machine is of, and how large: what a template has one variant for each of."""

    name: str
    vcpus: int
    memory_mib: int
    vmm: str
    nested: bool = False


@dataclass(frozen=True, slots=True)
class Parts:
    """What a template's machine is made from; paths of the cache."""

    kernel: Path
    kernel_release: str
    kernel_digest: str
    initrd: Path
    initrd_digest: str
    rootfs: Path
    rootfs_digest: str
    contents: list[dict[str, Any]]
    ca: str | None = None
    """The CA whose certificate the root file system trusts (`barrier.ca`): its digest."""

    def machine(self, shape: Shape, upper: Path) -> MachineSpec:
        return MachineSpec(
            vcpus=shape.vcpus,
            memory_mib=shape.memory_mib,
            nested=shape.nested,
            kernel=self.kernel,
            initrd=self.initrd,
            kernel_release=self.kernel_release,
            disks=(
                Disk("root", self.rootfs, "raw", read_only=True),
                Disk("upper", upper, "raw", read_only=False),
            ),
        )

    def variant(self, shape: Shape, *, path: Path, key: str, disk_format: Literal["qcow2", "raw"]) -> Variant:
        """A variant of that shape made from these, in which nothing has been said or started yet."""
        return Variant(
            path=path,
            name=shape.name,
            key=key,
            vcpus=shape.vcpus,
            memory_mib=shape.memory_mib,
            created_at=0.0,
            rootfs=self.rootfs,
            rootfs_digest=self.rootfs_digest,
            environment={},
            services=[],
            contents=self.contents,
            blobs=[self.kernel_digest, self.initrd_digest, self.rootfs_digest],
            ca=self.ca,
            vmm=shape.vmm,
            nested=shape.nested,
            disk_format=disk_format,
        )


@dataclass(frozen=True, slots=True)
class Variant:
    """A built template of one shape. `path` is its directory."""

    path: Path
    name: str
    key: str
    vcpus: int
    memory_mib: int
    created_at: float
    rootfs: Path
    rootfs_digest: str
    environment: dict[str, str]
    services: list[str]
    contents: list[dict[str, Any]]
    blobs: list[str]
    """Digests of the cache's blobs that it needs; prune keeps them."""
    family: str | None = None
    """For a snapshot: the built-in template it came from, whose services a cold boot starts."""
    description: str = ""
    ca: str | None = None
    """Digest of the CA that guests of it trust: an intercepting network works with no other."""
    vmm: str = ""
    """The driver whose machines it can be cloned as."""
    nested: bool = False
    """Whether its machines have a `/dev/kvm` that works."""
    disk_format: Literal["qcow2", "raw"] = "qcow2"
    """Of its clones' disks (`engine.tops`)."""
    left_slots: tuple[str, ...] = ()
    """Of disks that its memory may have volumes in, which a clone has not: no other volume goes there."""
    user: str | None = None
    """Whose rights commands in its clones have that name nobody; None: `user`."""
    workdir: str | None = None
    """Where they run; None: at home."""
    start: dict[str, Any] | None = None
    """What lives in its machines, as a recipe has it (`recipe.read_start`): a cold boot starts it too."""
    disk: str | None = None
    """Of one that was built by a recipe: the key of its disk, which what is built on it goes by."""

    @property
    def shape(self) -> Shape:
        return Shape(self.name, self.vcpus, self.memory_mib, self.vmm, self.nested)

    @property
    def defaults(self) -> dict[str, Any] | None:
        """`{user, workdir}` of what is done in its clones without saying; None: the user `user`, at home."""
        if self.user is None and self.workdir is None:
            return None
        return {"user": self.user, "workdir": self.workdir}

    @property
    def snapshot(self) -> Path:
        return self.path / SNAPSHOT

    @property
    def upper(self) -> Path:
        return self.path / UPPER

    @property
    def empty(self) -> Path:
        """What the tops of its clones are copies of, if they are layers over its disk."""
        return self.path / EMPTY

    def disks(self, top: Path, layers: tuple[Path, ...] = ()) -> tuple[Disk, ...]:
        """The disks of a clone: `top`, over `layers` (nearest first) and the template's upper if it is a layer too."""
        return (
            Disk("root", self.rootfs, "raw", read_only=True),
            writable("upper", top, (*layers, self.upper)),
        )


def writable(slot: str, path: Path, backing: tuple[Path, ...]) -> Disk:
    """A disk by the file that is written to, whose name says its form. Pure."""
    if path.suffix == ".raw":
        return Disk(slot, path, "raw", read_only=False)
    return Disk(slot, path, "qcow2", read_only=False, backing=backing)


def variant_key(
    spec: TemplateSpec, parts: Parts, identity: dict[str, str], shape: Shape, disk_format: str = "qcow2"
) -> str:
    """Digest of everything a frozen machine depends on: equal keys, equal machines. The VMM is in `identity`."""
    return digest_of(
        {
            "format": FORMAT,
            "name": spec.name,
            "warm": spec.warm_inputs(),
            "kernel": parts.kernel_digest,
            "initrd": parts.initrd_digest,
            "rootfs": parts.rootfs_digest,
            "identity": identity,
            "vcpus": shape.vcpus,
            "memory_mib": shape.memory_mib,
            "disk_gib": limits.DISK_GIB,
            **({"ca": parts.ca} if parts.ca else {}),
            **({"disks": disk_format} if disk_format != "qcow2" else {}),
        }
    )[:32]


def check_ca(variant: Variant, ca: str) -> None:
    """Raises VersionMismatchError when guests of `variant` do not trust the CA of that digest, this node's.

    To be asked only where TLS will be intercepted (credentials, methods, paths): all else works with any.
    """
    if variant.ca != ca:
        raise VersionMismatchError(
            f"{variant.name} was made on a node with another CA, which its programs trust and this node's not: "
            "credentials and rules with methods or paths, for which TLS is ended on the host, would fail in it",
            hint="rules of hosts and ports alone work; or build the template here (llm4agents template build "
            f"{variant.family or variant.name} --force), or give both nodes the same CA (LLM4AGENTS_CA)",
            found=variant.ca,
            needed=ca,
        )


def check_shape(vcpus: int, memory_mib: int, cores: int) -> None:
    """Raises InvalidRequestError for a shape this host cannot give, with what it can."""
    most = min(limits.VCPUS_MAX, cores)
    if not limits.VCPUS_MIN <= vcpus <= most:
        raise InvalidRequestError(
            f"vcpus={vcpus} is not possible here: {limits.VCPUS_MIN} to {most}",
            hint=f"this host has {cores} cores",
        )
    if (
        not limits.MEMORY_MIB_MIN <= memory_mib <= limits.MEMORY_MIB_MAX
        or memory_mib % limits.MEMORY_MIB_STEP
    ):
        raise InvalidRequestError(
            f"memory_mib={memory_mib} is not possible: {limits.MEMORY_MIB_MIN} to {limits.MEMORY_MIB_MAX} "
            f"in steps of {limits.MEMORY_MIB_STEP}"
        )


def save(variant: Variant, directory: Path) -> None:
    """Write `template.json` into `directory`, which is then renamed to `variant.path`."""
    body = {
        "format": FORMAT,
        "name": variant.name,
        "key": variant.key,
        "vcpus": variant.vcpus,
        "memory_mib": variant.memory_mib,
        "created_at": variant.created_at,
        "rootfs_digest": variant.rootfs_digest,
        "environment": variant.environment,
        "services": variant.services,
        "contents": variant.contents,
        "blobs": variant.blobs,
        "family": variant.family,
        "description": variant.description,
        "ca": variant.ca,
        "vmm": variant.vmm,
        "nested": variant.nested,
        "disk_format": variant.disk_format,
        "left_slots": list(variant.left_slots),
        "user": variant.user,
        "workdir": variant.workdir,
        "start": variant.start,
        "disk": variant.disk,
    }
    with (directory / TEMPLATE).open("x") as file:
        json.dump(body, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _vmm_of(path: Path) -> str:
    """Of a variant from before there were several: its manifest says it."""
    return str(json.loads((path / SNAPSHOT / MANIFEST).read_text())["identity"]["driver"])


def load(path: Path, blob: Any) -> Variant:
    """The variant in directory `path`; `blob(digest)` gives a blob's path or None.

    Raises VersionMismatchError when it is not whole, or from a version that wrote it otherwise.
    """
    try:
        body = json.loads((path / TEMPLATE).read_text())
        if body["format"] != FORMAT:
            raise ValueError(f"format {body['format']}")
        rootfs = blob(body["rootfs_digest"])
        raw = body.get("disk_format") == "raw"
        if rootfs is None or not all((path / name).is_file() for name in (UPPER, *([] if raw else [EMPTY]))):
            raise ValueError("parts of it are gone")
        return Variant(
            path=path,
            name=str(body["name"]),
            key=str(body["key"]),
            vcpus=int(body["vcpus"]),
            memory_mib=int(body["memory_mib"]),
            created_at=float(body["created_at"]),
            rootfs=rootfs,
            rootfs_digest=str(body["rootfs_digest"]),
            environment={str(k): str(v) for k, v in body["environment"].items()},
            services=[str(name) for name in body["services"]],
            contents=list(body["contents"]),
            blobs=[str(digest) for digest in body["blobs"]],
            family=body.get("family"),
            description=str(body.get("description") or ""),
            ca=body.get("ca"),
            vmm=str(body.get("vmm") or _vmm_of(path)),
            nested=bool(body.get("nested")),
            disk_format="raw" if raw else "qcow2",
            left_slots=tuple(str(slot) for slot in body.get("left_slots") or ()),
            user=body.get("user"),
            workdir=body.get("workdir"),
            start=body.get("start"),
            disk=body.get("disk"),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise VersionMismatchError(
            f"the template in {path} cannot be used: {error}", hint="llm4agents template build makes it anew"
        ) from error
