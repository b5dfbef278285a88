"""What one machine gets on the host before its VMM starts: a uid, a directory to write to, sockets, its jail's binds.

Everything is a descriptor of an open file that the jail shows at the place `command` names; nothing is opened by the
VMM that is not one of these.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llm4agents import limits
from llm4agents.errors import HostSetupError
from llm4agents.vmm import clearing, shim, slots, uids
from llm4agents.vmm.base import Disk, Placement
from llm4agents.vmm.cloud_hypervisor import api, tap
from llm4agents.vmm.process import listen

API_SOCKET, IO = "api.sock", "io"
"""Names in `run_dir`: the API's socket, and the directory that the VMM sees as `api.IO`."""
_SLOT = "slot"


@dataclass(frozen=True, slots=True)
class Place:
    lease: uids.Lease
    io: int
    """The open directory IO."""
    api: int
    """The API's listening socket."""
    nic: int
    """A tap with vnet_hdr."""
    binds: tuple[shim.Bind, ...]
    """All but the devices'."""
    serve_socket: int | None
    inodes: dict[str, int]
    """Of each disk, by slot."""
    largest: int
    """Bytes of the largest file it may write to."""
    volumes: tuple[tuple[str, int], ...]
    """Slot and bytes of each disk that is a volume."""
    locked: tuple[int, ...]
    """Descriptors whose locks are to last as long as the VMM."""
    temporary: tuple[Path, ...]
    """Files that are not wanted under their names once they are bound."""


async def make(
    placement: Placement, disks: Sequence[Disk], files: dict[str, Path], stack: contextlib.ExitStack
) -> Place:
    """`files`: places in the jail, and what is seen there to be read. `stack` closes every descriptor.

    Raises HostSetupError (what cannot be opened), CapacityError (no uid is left).
    """
    run_dir = placement.run_dir
    for name in (shim.EXIT, shim.DEADLINE, API_SOCKET, shim.LINK_SOCKET):
        (run_dir / name).unlink(missing_ok=True)
    clearing.remove(run_dir / IO)
    lease = uids.lease(placement.id)
    stack.callback(os.close, lease.fd)
    (run_dir / IO).mkdir(0o700)
    os.chown(run_dir / IO, lease.uid, lease.uid)
    io = os.open(run_dir / IO, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, io)
    binds = [shim.Bind(io, api.IO, read_only=False)]
    binds += [shim.Bind(_readable(path, stack), inside) for inside, path in files.items()]
    by_slot = {disk.slot: disk for disk in disks}
    inodes, temporary, locked, largest = {}, [], [], 0
    for slot in api.SLOTS:
        disk = by_slot.get(slot)
        path = disk.path if disk is not None else run_dir / f"{_SLOT}-{slot}"
        if disk is None:
            temporary.append(path)
            _empty(path)
        read_only = disk is not None and disk.read_only
        fd = _readable(path, stack) if read_only else _owned(path, lease.uid, stack)
        binds.append(shim.Bind(fd, api.disk_path(slot), read_only=read_only))
        if disk is not None and disk.lasts:
            slots.lock(disk, fd)
            locked.append(fd)
        found = os.fstat(fd)
        inodes[slot] = found.st_ino
        largest = max(largest, 0 if read_only else found.st_size)
    asked = None
    if placement.serve:
        link = stack.enter_context(listen(run_dir, shim.LINK_SOCKET, socket.SOCK_SEQPACKET))
        link.setblocking(False)
        asked = link.fileno()
    return Place(
        lease=lease,
        io=io,
        api=stack.enter_context(listen(run_dir, API_SOCKET)).fileno(),
        nic=await _nic(placement, stack),
        binds=tuple(binds),
        serve_socket=asked,
        inodes=inodes,
        largest=largest,
        volumes=tuple(
            (slot, disk.path.stat().st_size) for slot, disk in by_slot.items() if slot in api.VOLUME_SLOTS
        ),
        locked=tuple(locked),
        temporary=tuple(temporary),
    )


async def _nic(placement: Placement, stack: contextlib.ExitStack) -> int:
    """The sandbox's tap is without vnet_hdr, which this VMM cannot do without: it is opened anew."""
    if placement.tap is None:
        fd = await asyncio.to_thread(tap.nowhere)
    elif placement.netns is None or placement.release_tap is None:
        raise HostSetupError("Cloud Hypervisor needs the sandbox's network namespace to open its tap in")
    else:
        placement.release_tap()
        fd = await asyncio.to_thread(tap.in_namespace, placement.netns)
    stack.callback(os.close, fd)
    return fd


def _open(path: Path, stack: contextlib.ExitStack, flags: int = os.O_RDONLY) -> int:
    try:
        fd = os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise HostSetupError(f"{path} cannot be opened: {error.strerror}") from error
    stack.callback(os.close, fd)
    return fd


def _readable(path: Path, stack: contextlib.ExitStack) -> int:
    """A file that any VMM may read: who may reach it is decided by the directories above it, and by binds."""
    fd = _open(path, stack)
    mode = os.fstat(fd).st_mode
    if mode & 0o444 != 0o444:
        os.fchmod(fd, stat.S_IMODE(mode) | 0o444)
    return fd


def _owned(path: Path, uid: int, stack: contextlib.ExitStack) -> int:
    """A file that this VMM alone may read and write."""
    fd = _open(path, stack)
    os.fchown(fd, uid, uid)
    os.fchmod(fd, 0o600)
    return fd


def _empty(path: Path) -> None:
    """The file of a slot that holds no volume: it swallows a little of what the guest writes, and ends with the VMM."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, limits.VOLUME_SLOT_BYTES)
    finally:
        os.close(fd)
