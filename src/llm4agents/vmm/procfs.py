"""What /proc says of a process: who it is (pid and start time), what it costs. Changes nothing."""

from __future__ import annotations

import os
from pathlib import Path

from llm4agents.vmm.base import Stats

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def start_ticks(pid: int) -> int | None:
    """When `pid` started, in clock ticks since boot (field 22 of stat); None when it is dead or was never.

    A pid is used again; a pid with its start time is not, within one boot of the host.
    """
    fields = _stat(pid)
    if fields is None or fields[0] in ("Z", "X"):
        return None
    return int(fields[19])


def alive(pid: int, ticks: int) -> bool:
    """Whether the process that had `pid` and started at `ticks` still runs."""
    return start_ticks(pid) == ticks


def uid(pid: int) -> int | None:
    """The real uid of a process; None when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("Uid:")), None)


def stats(pid: int) -> Stats | None:
    """CPU time and memory of `pid`; None when it is gone.

    Pss needs the right to trace the process; without it (an adopted VMM under Yama) it is counted as Rss.
    """
    fields = _stat(pid)
    if fields is None:
        return None
    cpu_ns = (int(fields[11]) + int(fields[12])) * (1_000_000_000 // _TICKS_PER_S)
    rss = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    pss = rss
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                pss = int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        return None
    except PermissionError:
        pass
    return Stats(cpu_ns=cpu_ns, pss_bytes=pss, rss_bytes=rss)


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name, so field N of the manual is `[N - 3]`."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def host_boot_id() -> str:
    """Differs after every boot of the host: pids and start times of another boot mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
