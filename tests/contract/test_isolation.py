"""How each driver's processes are confined, as the kernel tells it, against what SPECIFICATION.md promises."""

from __future__ import annotations

import fcntl
import os
import struct

import pytest

from .lab import Frozen, Lab, in_lab, run

pytestmark = pytest.mark.vm
_LOCK = "=hhxxxxqqixxxx"


def test_a_lock_on_what_machines_share_holds_up_no_other(frozen: Frozen) -> None:
    """A VMM that its guest has taken over can lock what it was given to read: its template's disks."""
    shared = [next(disk.path for disk in frozen.spec.disks if disk.slot == "root"), frozen.home / "upper.raw"]
    held = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in shared]
    try:
        for fd in held:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_LOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 4096, 0))

        async def test(lab: Lab) -> None:
            _, agent = await lab.clone()
            assert await run(agent, "cat /dev/shm/state") == (0, "template")

        in_lab(frozen, test)
    finally:
        for fd in held:
            os.close(fd)
