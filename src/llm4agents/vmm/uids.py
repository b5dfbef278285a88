"""A uid of its own for every VMM, when we are root: two VMs never share one, so neither can touch the other.

A uid is *leased* by a lock on one byte of a host-wide file. The shim holds the lock's descriptor for as long
as the VMM lives, so a lease ends with the VM and never because a server died; there is nothing to clean up.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from llm4agents.errors import CapacityError, HostSetupError

UID_BASE = 0x7000_0000
"""Far above what distributions, directories and container runtimes hand out."""
UID_COUNT = 65_536
LEASES = Path("/run/llm4agents-uids")
_FLOCK = "=hhxxxxqqixxxx"


@dataclass(frozen=True, slots=True)
class Lease:
    uid: int
    fd: int
    """Close it when the shim has its copy."""


def uid_range(uid_map: str) -> range:
    """The uids to hand out, given /proc/self/uid_map. Pure.

    In a user namespace only some are mapped: then the upper half of the largest mapped stretch.
    Raises HostSetupError when there are too few to give every VM its own.
    """
    stretches = [
        (int(inside), int(count)) for inside, _, count in (line.split() for line in uid_map.splitlines())
    ]
    if any(first <= UID_BASE and first + count >= UID_BASE + UID_COUNT for first, count in stretches):
        return range(UID_BASE, UID_BASE + UID_COUNT)
    first, count = max(stretches, key=lambda stretch: stretch[1], default=(0, 0))
    if count < 8192:
        raise HostSetupError(
            f"root here has {count} uids to give, too few for one per virtual machine",
            hint="run the server as an ordinary user, or map at least 65,536 uids into this container",
        )
    return range(first + count // 2, first + count)


def some_uid() -> int:
    """One of those that are handed out, of nobody in particular. Raises as `uid_range`."""
    return uid_range(Path("/proc/self/uid_map").read_text())[0]


def lease(key: str, directory: Path = LEASES) -> Lease:
    """A uid no live VM has; the same `key` gets the same one if it can.

    Raises CapacityError when all are taken.
    """
    uids = uid_range(Path("/proc/self/uid_map").read_text())
    directory.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(directory / "leases", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    start = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") % len(uids)
    for step in range(len(uids)):
        place = (start + step) % len(uids)
        wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, uids[place] - uids[0], 1, 0)
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, wanted)
        except (BlockingIOError, PermissionError):
            continue
        return Lease(uids[place], fd)
    os.close(fd)
    raise CapacityError("every uid for virtual machines is in use on this host")
