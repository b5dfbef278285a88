"""The figures of this host that admission decides by: memory (as a cgroup may narrow it), disk, load. Reads only."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Host:
    """Bytes. `memory_total_bytes` is what this process may use at most: the host's, or its cgroup's limit."""

    memory_total_bytes: int
    memory_available_bytes: int
    disk_free_bytes: int


def host(state: Path) -> Host:
    """The host's figures now; `state` must exist. About 50 µs, a little more in a cgroup with a limit."""
    total = available = 0
    with Path("/proc/meminfo").open("rb") as file:
        for line in file:
            if line.startswith(b"MemTotal:"):
                total = int(line.split()[1]) * 1024
            elif line.startswith(b"MemAvailable:"):
                available = int(line.split()[1]) * 1024
                break
    for limit_file, usage_file, stat_file in _limits():
        limit = _number(limit_file)
        if limit is not None and limit < total:
            total = limit
            # What the cgroup's page cache holds can be had back, as MemAvailable counts it for the whole host.
            used = (_number(usage_file) or 0) - _file_bytes(stat_file)
            available = min(available, max(0, limit - used))
    return Host(total, available, shutil.disk_usage(state).free)


def busy() -> bool:
    """Whether more than one task for each core is running or waiting to right now."""
    with Path("/proc/loadavg").open("rb") as file:
        running = int(file.read().split()[3].partition(b"/")[0])
    return running - 1 > (os.cpu_count() or 1)  # less this very process


@lru_cache(maxsize=1)
def _limits() -> list[tuple[Path, Path, Path]]:
    """Of each cgroup of ours (v1 and v2) with a memory controller, root last: the files of limit, usage, statistics."""
    found = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = _CGROUPS, ("memory.max", "memory.current", "memory.stat")
        elif "memory" in controllers.split(","):
            root = _CGROUPS / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
        else:
            continue
        at = root / path.strip("/")
        for place in (at, *at.parents):
            if not place.is_relative_to(root):
                break
            if (place / names[0]).exists():
                found.append((place / names[0], place / names[1], place / names[2]))
    return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max": no limit
        return None


def _file_bytes(path: Path) -> int:
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "inactive_file":
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
