"""What tests of the guest's side share: a node of each driver, and what a guest of it is meant to see, as data.

SECURITY.md tells of what is listed here as seen (`View`); a driver whose devices change changes its entry.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from llm4agents import limits
from tests.support import PATIENCE, Node, eventually

DRIVERS = tuple(os.environ.get("LLM4AGENTS_TEST_DRIVERS", "qemu").split(","))
SLOTS = ("root", "upper", *(f"vol{number}" for number in range(limits.VOLUME_SLOTS)))
NET, BLOCK, CONSOLE, ENTROPY, BALLOON, VSOCK = 1, 2, 3, 4, 5, 19


@dataclass(frozen=True)
class View:
    """What the guests of one driver find. Identifiers are the VMM's own and the same on every host."""

    virtio: tuple[int, ...]
    """Device types, sorted."""
    serial: re.Pattern[str] | None
    """What disks have for serial numbers; None: their slots' names."""
    ports: tuple[str, ...] = ()
    """Names of virtio-serial ports."""
    pci: frozenset[str] = frozenset()
    """`vendor:device` of what is on a PCI bus."""
    acpi: frozenset[str] = frozenset()
    """Hardware ids that ACPI tells of, without those of the bus and the processors."""
    dmi: bool = False
    """Whether there is an SMBIOS at all."""
    clock: bool = False
    """Whether a real-time clock shows the host's wall clock."""


DISKS = (BLOCK,) * len(SLOTS)
VIEWS = {
    "qemu": View(
        virtio=(NET, *DISKS, CONSOLE),
        serial=None,
        ports=("llm4agents.agent",),
        # virtio-mmio, serial line, clock, power button, and the firmware configuration of QEMU.
        acpi=frozenset({"LNRO0005", "PNP0501", "PNP0B00", "PNP0C0C", "QEMU0002"}),
        clock=True,
    ),
    "firecracker": View(
        virtio=tuple(sorted((NET, *DISKS, ENTROPY, BALLOON, VSOCK))),
        # Device and inode numbers of the file behind each disk, as the host's kernel counts them.
        serial=re.compile(r"\d{1,20}"),
        # virtio-mmio, four serial lines of which one is there, keyboard controller (it resets), generation counter.
        acpi=frozenset({"LNRO0005", "PNP0501", "PNP0303", "FCVMGID"}),
    ),
    # From what it is asked for (`tests/unit/vmm/test_cloud_hypervisor_pure.py` holds that against this) and its source:
    # no guest of it was looked at so yet, and what ACPI tells of there is not known.
    "cloud-hypervisor": View(
        virtio=tuple(sorted((NET, *DISKS, ENTROPY, VSOCK))),
        serial=None,
        # virtio's, each 0x1040 above its type, behind a bridge of its own.
        pci=frozenset(
            {"0x8086:0x0d57", *(f"0x1af4:{0x1040 + kind:#06x}" for kind in (NET, BLOCK, ENTROPY, VSOCK))}
        ),
    ),
}


def create(node: Node, driver: str) -> str:
    """A sandbox of base on that driver; asked for again where the host is so slow that the server says so."""

    def ask() -> str | None:
        answer = node.http.post("/v1/sandboxes", json={"template": "base", "vmm": driver})
        if PATIENCE > 1 and answer.status_code == 503 and "try again" in answer.text:
            return None
        assert answer.status_code < 300, answer.text
        return str(answer.json()["id"])

    sandbox = str(eventually(ask, 60))
    assert node.get(sandbox)["vmm"] == driver
    return sandbox


def root(node: Node, sandbox: str, script: str, **more: object) -> str:
    """What a shell of root's says in the guest; it must end well."""
    done = node.exec(sandbox, script, user="root", **more)
    assert done["exit_code"] == 0, done
    return str(done["stdout"]).strip()


def sections(node: Node, sandbox: str, commands: dict[str, str]) -> dict[str, str]:
    """The output of each command, by name, all in one call; what fails says less."""
    mark = "=====l4a "
    script = "\n".join(
        f"echo; echo '{mark}{name}'\n{{ {command}\n}} 2>&1" for name, command in commands.items()
    )
    parts = root(node, sandbox, script + "\ntrue").split(mark)[1:]
    return {name: text.strip("\n") for name, _, text in (part.partition("\n") for part in parts)}
