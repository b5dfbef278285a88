"""Time as the engine uses it: wall clock for people and files, CLOCK_BOOTTIME for durations. Not for sleeping."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

from llm4agents.store.store import Stamp


def boottime_s() -> float:
    """Seconds since the host booted, counting sleep; what a deadline is measured on."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def wall_s() -> float:
    return time.time()


@cache
def host_boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def stamp() -> Stamp:
    return Stamp(time.time_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME), host_boot_id())
