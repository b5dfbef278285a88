"""The bounds a create may ask for beyond vCPUs and memory: disk, processes, rate of output.

Each is kept where it cannot be undone, as far as there is such a place. The disk: the file it is on the host cannot
grow past `file_bytes_max` (RLIMIT_FSIZE of the VMM: a write beyond is an I/O error in the guest, and nothing stops),
and the guest's agent makes of it a disk that is full at `disk_mib`, which its root could undo. Processes and output
are bounded in the guest, by its agent and against its root by nobody: what they protect is the guest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from llm4agents.errors import VersionMismatchError
from llm4agents.guest.verbs import Agent
from llm4agents.vmm.base import Machine

_MIB: Final = 1 << 20
_NEEDS: Final = "managed"
"""The capability of agents that have the verb `limits`."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """None: not bounded by more than the sandbox's shape."""

    disk_mib: int | None = None
    pids: int | None = None
    output_bytes_per_s: int | None = None

    def __bool__(self) -> bool:
        return self != Bounds()

    def to_json(self) -> dict[str, Any] | None:
        """As `row.limits`."""
        return {name: value for name, value in asdict(self).items() if value is not None} or None

    @classmethod
    def of(cls, stored: Mapping[str, Any] | None) -> Bounds:
        """From `row.limits`; what a later version stores beside is not ours to keep."""
        return cls(
            **{name: stored[name] for name in cls.__slots__ if stored and stored.get(name) is not None}
        )


def file_bytes_max(disk_mib: int) -> int:
    """Bytes of the overlay file that a disk with `disk_mib` in use can need: a quarter more, for blocks that lie
    apart (the file grows by 128 KiB for each first one) and the journal, and a fixed part for its own tables."""
    return (disk_mib + disk_mib // 4 + 128) * _MIB


def on_host(machine: Machine, stored: Mapping[str, Any] | None, volume_bytes: int = 0) -> None:
    """What the host bounds of a machine that runs; idempotent. Raises ConflictError when it has ended.

    One bound is for all its files, so of one that writes to a volume of `volume_bytes` it is that at least.
    """
    bounds = Bounds.of(stored)
    if bounds.disk_mib is not None:
        machine.limit_files(max(file_bytes_max(bounds.disk_mib), volume_bytes))


async def in_guest(agent: Agent, bounds: Bounds) -> None:
    """What the guest's agent bounds. Kept by a pause in memory; a cold boot needs it again.

    Raises VersionMismatchError for an agent that cannot.
    """
    check(agent, bounds)
    if bounds:
        await agent.limits(
            pids=bounds.pids,
            output_bytes_per_s=bounds.output_bytes_per_s,
            disk_bytes=None if bounds.disk_mib is None else bounds.disk_mib * _MIB,
        )


def check(agent: Agent, bounds: Bounds) -> None:
    """Raises VersionMismatchError when this guest's agent is too old for what is asked."""
    if bounds and _NEEDS not in agent.session.hello.capabilities:
        raise VersionMismatchError(
            f"the template's agent ({agent.session.hello.agent}) cannot bound disk, processes or output",
            hint="build the template again: llm4agents template build --force",
        )
