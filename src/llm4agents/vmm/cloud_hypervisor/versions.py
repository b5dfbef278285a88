"""Which Cloud Hypervisor will do, and what an older one lacks. Pure."""

from __future__ import annotations

import re

from llm4agents.errors import HostSetupError

Version = tuple[int, int]
OLDEST: Version = (53, 0)
NAME = "cloud-hypervisor"
_SAID = re.compile(r"^cloud-hypervisor v?(\d+)\.(\d+)([^\s]*)", re.MULTILINE)
SINCE: tuple[tuple[Version, str], ...] = (
    ((40, 0), "a restored NIC's descriptor (net_fds)"),
    ((41, 0), "landlock"),
    ((50, 0), "machines without nested virtualisation (nested=off), and disks that grow while they are used"),
    ((51, 0), "a disk's format said and not guessed (image_type)"),
    (
        (52, 0),
        "restores that leave the holes of a memory file alone, and one VMM's threads on cores of their own",
    ),
    ((53, 0), "a guest clock that is kept over a snapshot, and pauses that wait for I/O under way"),
)
"""What this driver stands on, by the version it came with."""


def parse(said: str) -> tuple[Version, str]:
    """From what `--version` prints: (53, 0) and `53.0.0`, or whatever else it calls itself in full.

    Raises HostSetupError for another program's words.
    """
    found = _SAID.search(said)
    if found is None:
        raise HostSetupError(
            f"this is no Cloud Hypervisor: asked for its version, it said {said.strip()[:200]!r}",
            hint="set LLM4AGENTS_CLOUD_HYPERVISOR to the binary",
        )
    return (int(found[1]), int(found[2])), f"{found[1]}.{found[2]}{found[3]}"


def lacks(version: Version) -> list[str]:
    """What this driver needs and `version` is too old for; nothing when it will do."""
    return [what for since, what in SINCE if version < since]


def check(version: Version, full: str) -> None:
    """Raises HostSetupError, in words, when `version` is older than `OLDEST`."""
    missing = lacks(version)
    if missing or version < OLDEST:
        raise HostSetupError(
            f"Cloud Hypervisor {full} is too old: it lacks {'; '.join(missing)}",
            hint=f"install Cloud Hypervisor {OLDEST[0]}.{OLDEST[1]} or newer",
            version=full,
        )
