"""Resource limits of a process that runs already."""

from __future__ import annotations

import ctypes
import os
import resource
import threading
from pathlib import Path

_KEEP = -1


def limit_files(pid: int, bytes_max: int) -> None:
    """Lower RLIMIT_FSIZE of a process of ours. Raises ProcessLookupError, PermissionError."""
    try:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (bytes_max, bytes_max))
    except PermissionError:
        # A root without CAP_SYS_RESOURCE (a container's) may do it only under the process's own real uid and gid.
        if os.geteuid() != 0:
            raise
        _as_its_owner(pid, bytes_max)


def _as_its_owner(pid: int, bytes_max: int) -> None:
    """The same in a thread that takes that real uid and gid and ends with them: to the kernel they are a thread's."""
    uid, gid = _ids(pid)
    failed: list[OSError] = []

    def act() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            for name, ident in (("SYS_setresgid", gid), ("SYS_setresuid", uid)):
                if libc.syscall(_NUMBERS[os.uname().machine][name], ident, _KEEP, _KEEP) != 0:
                    raise OSError(ctypes.get_errno(), f"{name} {ident}")
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (bytes_max, bytes_max))
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=act, name="limit a VMM's files")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


_NUMBERS = {
    "x86_64": {"SYS_setresuid": 117, "SYS_setresgid": 119},
    "aarch64": {"SYS_setresuid": 147, "SYS_setresgid": 149},
}
"""Of the system calls themselves: libc's wrappers would change every thread of this process."""


def _ids(pid: int) -> tuple[int, int]:
    """Real uid and gid of a process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError as error:
        raise ProcessLookupError(f"there is no process {pid}") from error
    found = {line.partition(":")[0]: line.split()[1] for line in lines if line.startswith(("Uid:", "Gid:"))}
    return int(found["Uid"]), int(found["Gid"])
