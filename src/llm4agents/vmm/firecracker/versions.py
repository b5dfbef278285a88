"""What each version of Firecracker lacks, in one place. Pure.

Read from its change log and its sources at the tags v1.12.0 to v1.16.1; only 1.12.1 has run. Patch releases matter:
what was mended in 1.15.0 came to 1.14 and 1.13 as well, at the versions below.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from llm4agents.errors import HostSetupError

Version = tuple[int, int, int]
OLDEST: Final[Version] = (1, 12, 0)
NEWEST_READ: Final[Version] = (1, 16, 1)
"""Later ones are used, with a warning."""
ADVISED: Final = "1.14.4"


@dataclass(frozen=True, slots=True)
class Traits:
    """What the driver does otherwise for this version."""

    version: Version
    named_exec: bool
    """Its jailer takes no program whose name lacks `firecracker`."""
    waits_for_reset: bool
    """After a snapshot the guest gets nothing by vsock until it has reset its connections: the first one made then is
    good. Before 1.16.0 one made too early is accepted by the guest and lost with the others."""
    low_memory_mib: int
    """How much memory lies below the devices'; what is more is a mapping of its own."""
    resume_needs_snapshot: bool
    """Resuming waits for that reset too where no snapshot asked the guest for one; so one is made and thrown away."""

    @property
    def text(self) -> str:
        return ".".join(map(str, self.version))


_LACKS: Final[tuple[tuple[tuple[Version, ...], str], ...]] = (
    # The releases from which on it is mended, oldest branch first; then what is wrong before.
    (
        ((1, 13, 2), (1, 14, 1), (1, 15, 0)),
        "its jailer follows links when it copies the program into the jail",
    ),
    (((1, 14, 0),), "a restored guest may report soft lockups"),
    (((1, 14, 4), (1, 15, 1), (1, 16, 0)), "a guest can make its VMM use more memory by its entropy device"),
    (((1, 14, 4), (1, 15, 1), (1, 16, 0)), "a guest can hold up its own VMM by balloon statistics"),
    (
        ((1, 14, 4), (1, 15, 1), (1, 16, 0)),
        "on hosts from Linux 5.16 on, a restored guest's monotonic clock jumps by the time since the snapshot",
    ),
    (
        ((1, 16, 0),),
        "the serial console of a restored guest stays silent if the snapshot was taken while it wrote",
    ),
)


def parse(text: str) -> Version:
    """Of `Firecracker v1.12.1` (what `--version` says first). Raises HostSetupError when there is none in it."""
    found = re.search(r"\bv?(\d+)\.(\d+)\.(\d+)", text)
    if found is None:
        raise HostSetupError(
            f"this Firecracker does not say its version: {text.strip()[:200] or 'nothing'}",
            hint="install a release of Firecracker",
        )
    return int(found[1]), int(found[2]), int(found[3])


def traits(version: Version) -> Traits:
    """Raises HostSetupError for one that cannot be used."""
    name = ".".join(map(str, version))
    if version < OLDEST:
        raise HostSetupError(
            f"Firecracker {name} is too old: it cannot boot a distribution's kernel, or move a tap at a restore",
            hint=f"install Firecracker {ADVISED} or later",
        )
    if version == (1, 16, 0):
        raise HostSetupError(
            "the jailer of Firecracker 1.16.0 cannot join a network namespace that has no name",
            hint="install Firecracker 1.16.1, which can again",
        )
    return Traits(
        version=version,
        named_exec=version < (1, 13, 0),
        low_memory_mib=3328 if version < (1, 13, 0) else 3072,
        waits_for_reset=version >= (1, 16, 0),
        resume_needs_snapshot=version >= (1, 16, 0),
    )


def lacks(version: Version) -> tuple[str, ...]:
    """What is wrong with it that later ones have mended, in words for `doctor`; () for one that is advised."""
    return tuple(words for mended, words in _LACKS if not _has(version, mended))


def _has(version: Version, mended: tuple[Version, ...]) -> bool:
    """A version has it if it is of a branch and not before that branch's release, or of a later branch than all."""
    branch = [release for release in mended if release[:2] == version[:2]]
    return version >= branch[0] if branch else version >= mended[-1]


def advice(version: Version) -> str | None:
    """A warning in words, None when there is nothing to say."""
    missing = lacks(version)
    name = ".".join(map(str, version))
    if missing:
        return f"Firecracker {name}: {'; '.join(missing)}; {ADVISED} or later is better"
    if version[:2] > NEWEST_READ[:2]:
        return f"Firecracker {name} is newer than what this driver was written for ({NEWEST_READ[0]}.{NEWEST_READ[1]})"
    return None
