"""A disk in layers: what a fork freezes, and what merges them when they have become many.

Every format is said, and the order of layers is ours to say: names and formats in an image's own header are never
followed. A monitor that its guest has taken over writes that header: `readable` looks at it before a tool of ours does.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from llm4agents.errors import ConflictError, CorruptSnapshotError
from llm4agents.images import process
from llm4agents.images.cache import fsync
from llm4agents.images.disk import copy_sparse

_HEADER: Final = struct.Struct(">4sIQIIQIIQQIIQQ")
"""Of qcow2, up to the features that a reader must know."""
_FEATURES: Final = 0b10011
"""Those an image of ours has: left dirty, marked corrupt, subclusters. One that it never has is that its data lies in
another file, which the image names."""


def chain(layers: Sequence[Path], base: Path) -> str:
    """How qemu-img is told of qcow2 `layers` (nearest first) over the raw `base`. Pure."""
    node: dict[str, object] = {"driver": "raw", "file": {"driver": "file", "filename": str(base)}}
    for layer in reversed(layers):
        file = {"driver": "file", "filename": str(layer)}
        node = {"driver": "qcow2", "file": file, "backing": node}
    return "json:" + json.dumps(node, separators=(",", ":"))


def check(layer: Path, size: int) -> None:
    """Raises CorruptSnapshotError unless `layer` is a qcow2 of `size` bytes that keeps its data itself."""
    with layer.open("rb") as file:
        head = file.read(_HEADER.size).ljust(_HEADER.size, b"\0")
    magic, version, _, _, _, virtual, encrypted, *_, features = _HEADER.unpack(head)
    if magic != b"QFI\xfb" or version != 3 or encrypted or features & ~_FEATURES or virtual != size:
        raise CorruptSnapshotError(
            f"{layer} is not a disk that was made here: its header was changed by what wrote to it",
            hint="the sandbox's monitor is not to be trusted with it: end the sandbox",
            part=layer.name,
        )


@contextlib.contextmanager
def readable(layers: Sequence[Path], base: Path, where: Path) -> Iterator[tuple[Path, ...]]:
    """Files that read as `layers` do, checked, and that nobody can write to any more. Blocks.

    The machine that a live fork was taken of has had its layer open to write; a monitor that did not let go of it
    could change what was checked, so that one is copied, into the directory `where`. Raises as `check`, CapacityError.
    """
    size = base.stat().st_size
    copies: list[Path] = []
    found = []
    try:
        for number, layer in enumerate(layers):
            if _writable_somewhere(layer):
                copy = where / f".{layer.name}.{os.getpid()}.{number}.copy"
                copy_sparse(layer, copy)
                copies.append(copy)
                layer = copy
            check(layer, size)
            found.append(layer)
        yield tuple(found)
    finally:
        for copy in copies:
            copy.unlink(missing_ok=True)


def _writable_somewhere(path: Path) -> bool:
    """Whether any process may have `path` open to write: the kernel leases a file for reading only if none has."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # ignored, where SIGIO would end us
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:  # or a file system that has no leases
        return True
    finally:
        os.close(fd)
    return False


async def to_raw(layers: Sequence[Path], base: Path, dest: Path) -> None:
    """The whole disk as one sparse raw file, durably. `dest` must not exist, and appears whole.

    Raises ConflictError, CapacityError, HostSetupError, CorruptSnapshotError.
    """
    if dest.exists():
        raise ConflictError(f"{dest} exists")
    tmp = dest.with_name(f".{dest.name}.{os.getpid()}")
    try:
        await _convert(layers, base, tmp)
        fsync(tmp)
        tmp.rename(dest)
        fsync(dest.parent)
    finally:
        tmp.unlink(missing_ok=True)


async def flatten(layers: Sequence[Path], base: Path, dest: Path) -> None:
    """`layers` (nearest first) over the raw `base` as one qcow2 over the same base, durably; appears whole."""
    whole = dest.with_name(f".{dest.name}.{os.getpid()}.raw")
    try:
        # In two steps: with a backing file qemu-img copies what the *top* layer has, and would lose the others'.
        await _convert(layers, base, whole)
        await from_raw(whole, base, dest)
    finally:
        whole.unlink(missing_ok=True)


async def from_raw(whole: Path, base: Path, dest: Path) -> None:
    """What the raw `whole` has and the raw `base` has not as one qcow2 over `base`, durably; appears whole."""
    if dest.exists():
        raise ConflictError(f"{dest} exists")
    tmp = dest.with_name(f".{dest.name}.{os.getpid()}")
    try:
        options = "extended_l2=on,cluster_size=128k,lazy_refcounts=on"
        argv = ["qemu-img", "convert", "-q", "-f", "raw", "-O", "qcow2", "-B", str(base), "-F", "raw"]
        await process.run([*argv, "-o", options, str(whole), str(tmp)], cwd=dest.parent)
        fsync(tmp)
        tmp.rename(dest)
        fsync(dest.parent)
    finally:
        tmp.unlink(missing_ok=True)


async def _convert(layers: Sequence[Path], base: Path, dest: Path) -> None:
    where = dest.parent
    with contextlib.ExitStack() as stack:
        files = await process.in_thread(lambda _: stack.enter_context(readable(layers, base, where)))
        source = chain(files, base)
        await process.run(
            ["qemu-img", "convert", "-q", "-O", "raw", "-S", "4k", source, str(dest)], cwd=where
        )
