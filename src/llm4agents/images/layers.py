"""A disk in layers: what a fork freezes, and what merges them when they have become many.

Every format is said, and the order of layers is ours to say: names and formats in an image's own header are the guest
disk's business at best, and are never followed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from llm4agents.errors import ConflictError
from llm4agents.images import process
from llm4agents.images.cache import fsync
from llm4agents.images.disk import clone_overlay


def new_overlay(empty: Path, path: Path) -> None:
    """An empty top of a disk: a copy of the template's empty overlay. Raises ConflictError when `path` exists."""
    clone_overlay(empty, path)


def chain(layers: Sequence[Path], base: Path) -> str:
    """How qemu-img is told of qcow2 `layers` (nearest first) over the raw `base`. Pure."""
    node: dict[str, object] = {"driver": "raw", "file": {"driver": "file", "filename": str(base)}}
    for layer in reversed(layers):
        file = {"driver": "file", "filename": str(layer)}
        node = {"driver": "qcow2", "file": file, "backing": node}
    return "json:" + json.dumps(node, separators=(",", ":"))


async def to_raw(layers: Sequence[Path], base: Path, dest: Path) -> None:
    """The whole disk as one sparse raw file, durably. `dest` must not exist, and appears whole.

    Raises ConflictError, CapacityError, HostSetupError.
    """
    if dest.exists():
        raise ConflictError(f"{dest} exists")
    tmp = dest.with_name(f".{dest.name}.{os.getpid()}")
    try:
        await _convert(chain(layers, base), tmp, dest.parent)
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
        await _convert(chain(layers, base), whole, dest.parent)
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


async def _convert(source: str, dest: Path, where: Path) -> None:
    await process.run(["qemu-img", "convert", "-q", "-O", "raw", "-S", "4k", source, str(dest)], cwd=where)
