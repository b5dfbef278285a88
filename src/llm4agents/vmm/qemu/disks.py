"""Changing the disk of a live machine: a new layer on top, what was there becomes what lies under it.

Everything goes by descriptor, as on the command line: QEMU may open no file by name.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Any, Protocol

from llm4agents.errors import ConflictError, HostSetupError, InvalidRequestError, VmmError
from llm4agents.vmm.base import Disk
from llm4agents.vmm.qemu import command

Given = dict[str, int]
"""A descriptor QEMU was given: `fdset-id` and `fd`, its own numbers."""


class Execute(Protocol):
    async def __call__(self, command: str, **arguments: Any) -> Any: ...


async def switch(execute: Execute, slot: str, overlay: Disk) -> list[Given]:
    """Let `slot` write to `overlay` from now on. The machine stands still and its images are flushed.

    Returns descriptors that QEMU needs no more; it lets go of such only while its machine runs.
    When a step fails the slot writes where it did. Raises InvalidRequestError, HostSetupError (a file cannot be
    opened) and VmmError.
    """
    if overlay.slot != slot or overlay.format != "qcow2" or overlay.read_only or slot not in command.SLOTS:
        raise InvalidRequestError(f"a writable qcow2 for the slot {slot!r} is wanted, not {overlay}")
    top = await _top(execute, slot)
    await execute("stop")  # writes out what QEMU holds of the image
    # A name of its own: that of the slot stays with the layer that had it first.
    name = f"{slot}-{secrets.token_hex(4)}"
    added = await _add(execute, overlay.path, os.O_RDWR)
    unused: list[Given] = []
    await execute("blockdev-add", **command.node(name, added["fdset-id"], "qcow2", read_only=False))
    try:
        if overlay.backing:
            # QEMU reopens the former top for reading alone, which needs a descriptor that can do no more.
            fdset_of_top = await _fdset(execute, top)
            if fdset_of_top is not None:
                unused = [given for given in await _given(execute) if given["fdset-id"] == fdset_of_top]
                await _add(execute, overlay.backing[0], os.O_RDONLY, fdset_of_top)
        await execute("blockdev-snapshot", node=top, overlay=name)
    except BaseException:
        with contextlib.suppress(VmmError):
            await execute("blockdev-del", node_name=name)
            await execute("remove-fd", fdset_id=added["fdset-id"])
        raise
    return unused


async def inode(execute: Execute, pid: int, slot: str) -> int | None:
    """Of the image `slot` writes to, as the monitor `pid` has it open; None when it is a raw one or cannot be seen."""
    fdset = await _fdset(execute, await _top(execute, slot))
    for given in await _given(execute):
        if given["fdset-id"] == fdset:
            with contextlib.suppress(OSError):
                return Path(f"/proc/{pid}/fd/{given['fd']}").stat().st_ino
    return None


async def _top(execute: Execute, slot: str) -> str:
    """The node the guest's device writes to now."""
    for device in await execute("query-block"):
        if f"/{slot}-dev/" in f"/{device.get('qdev', '')}/":  # with a path before it or not
            name = device.get("inserted", {}).get("node-name")
            if isinstance(name, str):
                return name
    raise ConflictError(f"the machine has no disk in the slot {slot}")


async def _fdset(execute: Execute, top: str) -> int | None:
    """The set of descriptors the file of node `top` was opened from; None for a raw one or an earlier version's."""
    for node in await execute("query-named-block-nodes", flat=True):
        if node.get("node-name") == top + command.FILE:
            path, _, number = str(node.get("file", "")).rpartition("/")
            if path == "/dev/fdset" and number.isdigit():
                return int(number)
    return None


async def _given(execute: Execute) -> list[Given]:
    """Every descriptor QEMU was given for its images."""
    return [
        {"fdset-id": int(fdset["fdset-id"]), "fd": int(fd["fd"])}
        for fdset in await execute("query-fdsets")
        for fd in fdset["fds"]
    ]


async def _add(execute: Execute, path: os.PathLike[str], flags: int, fdset: int | None = None) -> Given:
    """Give QEMU the file `path`."""
    try:
        fd = os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise HostSetupError(f"the disk {os.fspath(path)} cannot be opened: {error.strerror}") from error
    try:
        given = {} if fdset is None else {"fdset_id": fdset}
        answer = await execute("add-fd", fd=fd, **given)
        return {"fdset-id": int(answer["fdset-id"]), "fd": int(answer["fd"])}
    finally:
        os.close(fd)
