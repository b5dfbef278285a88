"""Where a Firecracker process has its guest's memory. Of a clone it is a private mapping of the snapshot's file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from llm4agents.errors import VmmError
from llm4agents.vmm import pages
from llm4agents.vmm.pages import Place

_COMMAND_LINE: Final = 0x2_0000
"""Where in the guest Firecracker puts the kernel's command line, and Linux leaves it."""


def of_clone(pid: int, size: int) -> list[Place]:
    """Raises ConflictError, SandboxDiedError (as `pages.save`), VmmError."""
    found = pages.of_file(_maps(pid), size)
    if found is None:
        raise VmmError(f"process {pid} has no memory of {size} bytes that is a machine's")
    return found


def of_booted(pid: int, size: int, low: int, line: str) -> list[Place]:
    """Of one that was booted: anonymous memory, told from other such by the kernel's command line in it.

    `low`: how much lies below the devices' addresses (the rest is another part). `line`: how the command line
    begins. Raises as `of_clone`.
    """
    maps = _maps(pid)
    candidates = [
        [Place(address, size)]
        if size <= low
        # Each mapping is put below the one before, and the kernel joins them.
        else [Place(address + size - low, low), Place(address, size - low)]
        for address in pages.anonymous(maps, size)
    ]
    if size > low:
        candidates += [
            [Place(first, low), Place(second, size - low)]
            for first in pages.anonymous(maps, low)
            for second in pages.anonymous(maps, size - low)
        ]
    wanted = line.encode()
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise pages.unreadable(error) from error
    try:
        fit = [
            places
            for places in candidates
            if os.pread(memory, len(wanted), places[0].address + _COMMAND_LINE) == wanted
        ]
    finally:
        os.close(memory)
    if len(fit) != 1:
        raise VmmError(f"process {pid} has {len(fit)} memories of {size} bytes that could be its machine's")
    return fit[0]


def _maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError as error:
        raise pages.unreadable(error) from error
