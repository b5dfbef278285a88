"""Which QEMU runs which guest kernel: what was tried, and how it went. Pure.

Seen (design.md): 54 of 54 boots with QEMU 7.2 + Linux 6.1 and QEMU 10.0 + 6.1 and 6.12; QEMU 7.2 + Linux 6.12
in emulation dies of memory corruption in two boots of three.
"""

from __future__ import annotations

import re
from typing import Final, Literal

from llm4agents.errors import HostSetupError
from llm4agents.vmm.base import Accelerator

Verdict = Literal["good", "bad", "untried"]
Version = tuple[int, int]

KNOWN: Final[dict[tuple[Version, Version, Accelerator], Verdict]] = {
    ((7, 2), (6, 1), "tcg"): "good",
    ((10, 0), (6, 1), "tcg"): "good",
    ((10, 0), (6, 12), "tcg"): "good",
    ((7, 2), (6, 12), "tcg"): "bad",
}


def version_of(text: str) -> Version:
    """(major, minor) of `7.2.22 (Debian …)` or `6.1.0-57-cloud-amd64`; (0, 0) when there is none."""
    found = re.match(r"\D*(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def verdict(qemu: str, kernel: str, accelerator: Accelerator) -> Verdict:
    """What is known of the pair. QEMU's minor releases from 10 on count as 10.0."""
    major, minor = version_of(qemu)
    known_qemu = (10, 0) if major == 10 else (major, minor)
    return KNOWN.get((known_qemu, version_of(kernel), accelerator), "untried")


def check(qemu: str, kernel: str, accelerator: Accelerator) -> str | None:
    """None for a good pair, a warning in words for an untried one; HostSetupError for a bad one."""
    found = verdict(qemu, kernel, accelerator)
    if found == "bad":
        raise HostSetupError(
            f"QEMU {qemu.split()[0]} corrupts the memory of Linux {kernel} in software emulation",
            hint="use Debian 12's 6.1 kernel for the template, or QEMU 10 or later",
            qemu=qemu,
            kernel=kernel,
        )
    if found == "untried":
        return f"QEMU {qemu.split()[0]} with Linux {kernel} ({accelerator}) is a pair nobody has tried here"
    return None
