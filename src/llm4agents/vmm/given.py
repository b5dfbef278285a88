"""Which files a VMM was given, kept in its record: what a report of it calls its own.

By device and inode, not by name: a top that becomes a layer is renamed, and names in a VMM's own root are its own. One
that is open cannot be another's by number. Memory (memfd) is such a file too.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterable
from typing import Final, Literal

from llm4agents.vmm.base import MachineRecord

Access = Literal["read", "write", "read-write"]
FILES: Final = "files"
"""In `MachineRecord.extra`: Access by `key`. A record of an earlier version has none."""
_ACCESS: Final[dict[int, Access]] = {os.O_RDONLY: "read", os.O_WRONLY: "write", os.O_RDWR: "read-write"}


def key(about: os.stat_result) -> str:
    return f"{about.st_dev}:{about.st_ino}"


def files(fds: Iterable[int]) -> dict[str, Access]:
    """Of descriptors that are handed to a VMM the files among them, for its record."""
    found: dict[str, Access] = {}
    for fd in fds:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            continue
        access = _ACCESS[fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE]
        if found.setdefault(key(about), access) != access:
            found[key(about)] = "read-write"
    return found


def of(record: MachineRecord) -> dict[str, Access] | None:
    """Those of a live machine, to be read and changed; None: they were not written down."""
    found = record.extra.get(FILES)
    return found if isinstance(found, dict) else None


def note(record: MachineRecord, about: os.stat_result, access: Access) -> None:
    """It is about to be given that one, too."""
    if (found := of(record)) is not None:
        found[key(about)] = access


def forget_written(record: MachineRecord) -> None:
    """It has let go of what it was given to write its state to."""
    for name in [name for name, access in (of(record) or {}).items() if access == "write"]:
        del record.extra[FILES][name]
