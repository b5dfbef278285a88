"""What Cloud Hypervisor is told over its REST API, as pure functions of what is wanted; and how it says no.

Paths are those inside the jail (`command`), the same in each, so that a snapshot's are any clone's. What a snapshot
depends on is in `shape` and `net`, whose digest is part of its identity: change them and old snapshots are refused.
Field names and values are those of the API's own description (vmm/src/api/openapi, v53).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llm4agents import limits
from llm4agents.errors import InvalidRequestError
from llm4agents.vmm import cmdline, slots
from llm4agents.vmm.base import Disk, MachineSpec

ROOT = "/api/v1/"
PING, INFO = "vmm.ping", "vm.info"
CREATE, BOOT, PAUSE, RESUME = "vm.create", "vm.boot", "vm.pause", "vm.resume"
ADD_NET, SNAPSHOT, RESTORE, RESIZE_DISK, COUNTERS = (
    "vm.add-net",
    "vm.snapshot",
    "vm.restore",
    "vm.resize-disk",
    "vm.counters",
)

IO, BOOT_DIRECTORY, DISKS, MEMORY, URANDOM = "/io", "/boot", "/disks", "/memory", "/dev/urandom"
"""The one directory that it may write to; what it boots; its disks; a clone's memory. All of the jail."""
KERNEL, INITRD, VSOCK = "kernel", "initrd", "agent.sock"
"""Names below IO. The first two are links that are gone once it has booted: a guest that resets finds no kernel to
start again, and its monitor ends, as every other driver's does."""
ZONE, NIC = "ram", "nic"
GUEST_CID = 3
VOLUME_SLOTS = tuple(f"vol{number}" for number in range(limits.VOLUME_SLOTS))
SLOTS = ("root", "upper", *VOLUME_SLOTS)
"""Block devices in the order the guest sees them (vda, vdb, vdc…); the slot is also the serial number."""
_MIB = 1 << 20


def shape(spec: MachineSpec) -> dict[str, Any]:
    """Processors and devices: the same for a template and all its clones."""
    return {
        "cpus": {
            "boot_vcpus": spec.vcpus,
            "max_vcpus": spec.vcpus,
            "nested": spec.nested,
            # Siblings of a core are shared by the threads of one machine alone, where the host's kernel can.
            "core_scheduling": "Vm",
        },
        "disks": [
            {
                "id": slot,
                "serial": slot,
                "path": disk_path(slot),
                "readonly": slot == "root",
                "image_type": "Raw",
                "backing_files": False,
                "sparse": True,
            }
            for slot in SLOTS
        ],
        "rng": {"src": URANDOM},
        "vsock": {"id": "vsock", "cid": GUEST_CID, "socket": f"{IO}/{VSOCK}"},
        # Standard output, of which the shim keeps a bounded log.
        "serial": {"mode": "Tty"},
        "console": {"mode": "Off"},
    }


def disk_path(slot: str) -> str:
    """Inside the jail. Volume slots that hold nothing are files of the machine's own."""
    return f"{DISKS}/{slot}"


def net() -> dict[str, Any]:
    """The NIC, without its descriptor (that travels beside the request): no offload, for frames of one MTU."""
    return {
        "id": NIC,
        "mac": limits.GUEST_MAC,
        "num_queues": 2,
        "offload_tso": False,
        "offload_ufo": False,
        "offload_csum": False,
    }


def _memory(spec: MachineSpec, file: str | None) -> dict[str, Any]:
    """One zone: memory of its own that a snapshot has with holes, or (`file`) a private mapping of a template's."""
    zone: dict[str, Any] = {"id": ZONE, "size": spec.memory_mib * _MIB, "shared": file is None}
    if file is not None:
        zone["file"] = file
    # Huge pages would make a clone pay 2 MiB for each byte it touches.
    return {"size": 0, "zones": [zone], "thp": False}


def _walls() -> dict[str, Any]:
    """Landlock: beside what the configuration names, only IO, for snapshots."""
    return {"landlock_enable": True, "landlock_rules": [{"path": IO, "access": "rw"}]}


def boot(spec: MachineSpec, command_line: str, *, landlock: bool = True) -> dict[str, Any]:
    """The body of `vm.create`; its NIC comes after it (`net`, `vm.add-net`), since only there a descriptor may."""
    payload = {"kernel": f"{IO}/{KERNEL}", "initramfs": f"{IO}/{INITRD}", "cmdline": command_line}
    walls = _walls() if landlock else {}
    return {**shape(spec), "memory": _memory(spec, None), "payload": payload, **walls}


def clone(spec: MachineSpec, *, landlock: bool = True) -> dict[str, Any]:
    """`config.json` beside the state that is restored: the same machine over a private mapping of MEMORY.

    The NIC has one descriptor, which `restore` brings; that written here stands for it.
    """
    walls = _walls() if landlock else {}
    return {
        **shape(spec),
        "net": [{**net(), "fds": [-1]}],
        "memory": _memory(spec, MEMORY),
        "payload": {"kernel": f"{IO}/{KERNEL}"},
        **walls,
    }


def snapshot() -> dict[str, Any]:
    """Three files below IO: config.json, state.json, memory-ranges, none of which may be there yet."""
    return {"destination_url": f"file://{IO}"}


def restore() -> dict[str, Any]:
    """From the files below IO; paused. One descriptor goes with it: the NIC's.

    `Copy` writes what memory-ranges holds and leaves its holes alone, which is all that differs from MEMORY.
    `OnDemand` (userfaultfd) would be slower: it cannot be laid over a private mapping, so that clones share nothing.
    """
    return {
        "source_url": f"file://{IO}",
        "memory_restore_mode": "Copy",
        "net_fds": [{"id": NIC, "num_fds": 1}],
    }


def resize_disk(slot: str, size: int) -> dict[str, Any]:
    """Tells the guest that this slot holds a volume of `size` bytes now."""
    return {"id": slot, "desired_size": size}


def kernel_args(spec: MachineSpec) -> str:
    """The kernel command line. A triple fault is the reset that needs no device; its clock is KVM's."""
    return " ".join([*cmdline.COMMON, "reboot=t", *spec.kernel_args])


def layout_digest(spec: MachineSpec) -> str:
    """Changes when a machine built by this code could not load a snapshot of one built by other code, or would be
    booted otherwise."""
    body = [shape(spec), net(), _memory(spec, None), kernel_args(replace(spec, kernel_args=()))]
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


def check_disks(disks: Sequence[Disk]) -> None:
    """Raises InvalidRequestError when they do not fit the slots."""
    slots.check(disks, SLOTS)
    for disk in disks:
        if disk.format != "raw" or disk.backing:
            raise InvalidRequestError(
                f"disk {disk.slot}: Cloud Hypervisor is given raw files that lie over nothing"
            )


def words(body: bytes) -> str:
    """What an error's answer says: a list of causes, the last the nearest; without the traces it may hold."""
    try:
        causes = json.loads(body)
    except ValueError:
        causes = [body.decode(errors="replace")]
    if not isinstance(causes, list):
        causes = [causes]
    told = [str(cause).partition("\n")[0].strip() for cause in causes]
    return (
        ": ".join(cause for cause in told if cause and cause != "Error from API")[:1000] or "no reason given"
    )
