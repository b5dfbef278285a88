"""Whether this node takes one more sandbox. Pure but for `host`, which reads the figures."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from llm4agents import limits
from llm4agents.errors import CapacityError

VMM_MIB = 64
HEADROOM_MIB = 256
"""Left to the host itself."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Host:
    memory_available_bytes: int
    disk_free_bytes: int


def host(state: Path) -> Host:
    """The host's figures now; `state` must exist."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    return Host(available, shutil.disk_usage(state).free)


def admit(now: Host, memory_mib: int) -> None:
    """Raises CapacityError when one more sandbox of `memory_mib` could not use all of its memory now.

    What the others may still touch is not reserved for them: clones share most of their memory, and most never
    touch the rest. A node that must never overcommit is issue 3's admission.
    """
    needed = (memory_mib + VMM_MIB + limits.TB_SIZE_MIB + HEADROOM_MIB) * _MIB
    if now.memory_available_bytes < needed:
        raise CapacityError(
            f"not enough memory: {memory_mib} MiB and {(needed // _MIB) - memory_mib} MiB of overhead are needed, "
            f"{now.memory_available_bytes // _MIB} MiB are available",
            hint="end sandboxes (llm4agents ls, llm4agents kill), or ask for less memory",
        )
    if now.disk_free_bytes < limits.DISK_FREE_BYTES_MIN:
        raise CapacityError(
            f"not enough disk: {now.disk_free_bytes // _MIB} MiB free, {limits.DISK_FREE_BYTES_MIN // _MIB} are needed",
            hint="free space, or llm4agents prune",
        )
