"""Which disks a machine can have: the rule of every driver. Not here: formats and layers (each driver)."""

from __future__ import annotations

import fcntl
from collections.abc import Sequence

from llm4agents.errors import ConflictError, InvalidRequestError
from llm4agents.vmm.base import Disk


def lock(disk: Disk, fd: int) -> None:
    """Of a disk that `lasts`: its file (open as `fd`) for this machine alone, or to be read by many if the disk lies
    over it; until everybody has closed `fd`. Raises ConflictError: what the engine's records allowed, a VMM still
    has."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if disk.backing else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        path = disk.backing[-1] if disk.backing else disk.path
        raise ConflictError(f"{path.name} is in use by another virtual machine") from None


def check(disks: Sequence[Disk], allowed: Sequence[str]) -> None:
    """Raises InvalidRequestError when they do not fit the slots `allowed`."""
    slots = [disk.slot for disk in disks]
    for slot in slots:
        if slot not in allowed or slots.count(slot) > 1:
            raise InvalidRequestError(
                f"disk slot {slot!r}: expected each of {', '.join(allowed)} at most once"
            )
    if not {"root", "upper"} <= set(slots):
        raise InvalidRequestError("a machine needs the disks `root` and `upper`")
    for disk in disks:
        if (disk.slot == "root") != disk.read_only:
            # Read-only is a feature the guest has negotiated: the template's slots are writable but for root.
            raise InvalidRequestError(
                f"disk {disk.slot}: `root` is read-only and every other slot is writable"
            )
