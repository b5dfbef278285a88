"""What Firecracker is told: its requests as pure functions of what is wanted. No I/O.

Every file has the same relative name in every jail, since a snapshot has them baked in. What a snapshot depends on is
in `configure`, whose digest is part of its identity: change it and old snapshots are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from llm4agents import limits
from llm4agents.errors import InvalidRequestError
from llm4agents.vmm import cmdline, slots
from llm4agents.vmm.base import TAP_NAME, Disk, MachineSpec

API_SOCKET, VSOCK_SOCKET = "api.sock", "v.sock"
KERNEL, INITRD, MEMORY, STATE = "vmlinux", "initrd", "memory", "state"
STATE_OUT, NOWHERE = "state.out", "none/memory"
"""Where device state is written, and a place that is not there (`MachineState`)."""
VOLUME_SLOTS: Final = tuple(f"vol{number}" for number in range(limits.VOLUME_SLOTS))
SLOTS: Final = ("root", "upper", *VOLUME_SLOTS)
"""Drives in the order the guest sees them (vda, vdb, vdc…); the slot is the drive's id and its file's name."""
GUEST_CID: Final = 3
AGENT_PORT: Final = 1024
NIC: Final = "nic0"
VCPUS_MAX: Final = 32
LINE_BEGINS: Final = "earlyprintk=ttyS0 reboot=k"
"""How every kernel's command line begins."""
_BALLOON_POLL_S: Final = 60

Request = tuple[str, str, Any]
"""Method, path, body."""

PAUSE: Final[Request] = ("PATCH", "/vm", {"state": "Paused"})
RESUME: Final[Request] = ("PATCH", "/vm", {"state": "Resumed"})
START: Final[Request] = ("PUT", "/actions", {"action_type": "InstanceStart"})
INFO: Final[Request] = ("GET", "/", None)
BALLOON_STATISTICS: Final[Request] = ("GET", "/balloon/statistics", None)


@dataclass(frozen=True, slots=True)
class Rate:
    """A bound of one device, each per second; None: none."""

    bytes: int | None = None
    operations: int | None = None

    def limiter(self) -> dict[str, Any] | None:
        """As Firecracker takes it: buckets of one second. None when there is nothing to bound."""
        buckets = {
            name: {"size": value, "refill_time": 1000}
            for name, value in (("bandwidth", self.bytes), ("ops", self.operations))
            if value is not None
        }
        return buckets or None


@dataclass(frozen=True, slots=True)
class Rates:
    """Bounds of a machine's devices: every writable drive, the NIC in each direction."""

    disk: Rate = Rate()
    network: Rate = Rate()


NO_RATES: Final = Rates()


def kernel_args(spec: MachineSpec) -> str:
    """The kernel's command line. ACPI finds the devices; KVM's clock tells the TSC's frequency, so nothing is measured
    against timers (which hang in a guest of a guest)."""
    # A reset by the keyboard controller is how a guest ends its machine here.
    return " ".join([LINE_BEGINS, *cmdline.COMMON, *spec.kernel_args])


def check(spec: MachineSpec, disks: Sequence[Disk]) -> None:
    """Raises InvalidRequestError when the shape or the disks do not fit."""
    if not 1 <= spec.vcpus <= VCPUS_MAX:
        raise InvalidRequestError(f"{spec.vcpus} vCPUs: Firecracker has 1 to {VCPUS_MAX}")
    if spec.nested:
        raise InvalidRequestError("Firecracker passes no virtualisation on to its guest")
    slots.check(disks, SLOTS)
    for disk in disks:
        if disk.format != "raw" or disk.backing:
            raise InvalidRequestError(
                f"disk {disk.slot}: Firecracker has raw disks, not {disk.format}, and no layers"
            )


_VIRTUALISATION: Final = ((0x1, 5), (0x8000_0001, 2))
"""(leaf, bit of ECX) of VMX and SVM, which KVM offers its guests where it can nest: none of ours is nested."""


def _without(leaf: int, bit: int) -> dict[str, Any]:
    """A modifier of CPUID that clears one bit of ECX and leaves the others."""
    bitmap = "0b" + "".join("0" if place == bit else "x" for place in reversed(range(32)))
    modifiers = [{"register": "ecx", "bitmap": bitmap}]
    return {"leaf": hex(leaf), "subleaf": "0x0", "flags": 0, "modifiers": modifiers}


def configure(spec: MachineSpec, rates: Rates = NO_RATES) -> list[Request]:
    """Everything before START, each device on a transport of its own, so that the guest's order never changes.

    A volume's slot that is empty is a small file of its own: for a clone to replace.
    """
    requests: list[Request] = [
        (
            "PUT",
            "/machine-config",
            {"vcpu_count": spec.vcpus, "mem_size_mib": spec.memory_mib, "smt": False},
        ),
        (
            "PUT",
            "/boot-source",
            {
                "kernel_image_path": KERNEL,
                "initrd_path": INITRD,
                "boot_args": kernel_args(spec),
            },
        ),
        ("PUT", "/cpu-config", {"cpuid_modifiers": [_without(*bit) for bit in _VIRTUALISATION]}),
    ]
    for slot in SLOTS:
        drive: dict[str, Any] = {
            "drive_id": slot,
            "path_on_host": slot,
            "is_root_device": False,
            "is_read_only": slot == "root",
            # A sandbox's disk ends with its host; who keeps one (template, pause) syncs the file himself. A volume
            # lasts.
            "cache_type": "Writeback" if slot in VOLUME_SLOTS else "Unsafe",
            "io_engine": "Sync",
        }
        if slot != "root" and (limiter := rates.disk.limiter()):
            drive["rate_limiter"] = limiter
        requests.append(("PUT", f"/drives/{slot}", drive))
    requests.append(("PUT", "/vsock", {"guest_cid": GUEST_CID, "uds_path": VSOCK_SOCKET}))
    entropy = {"rate_limiter": Rate(bytes=limits.ENTROPY_BYTES_PER_S).limiter()}
    requests.append(("PUT", "/entropy", entropy))
    balloon = {"amount_mib": 0, "deflate_on_oom": True, "stats_polling_interval_s": _BALLOON_POLL_S}
    requests.append(("PUT", "/balloon", balloon))
    nic: dict[str, Any] = {"iface_id": NIC, "guest_mac": limits.GUEST_MAC, "host_dev_name": TAP_NAME}
    if limiter := rates.network.limiter():
        nic |= {"rx_rate_limiter": limiter, "tx_rate_limiter": limiter}
    requests.append(("PUT", f"/network-interfaces/{NIC}", nic))
    return requests


def load() -> Request:
    """Load `state` over `memory`, which is mapped privately; it stands still afterwards."""
    body = {
        "snapshot_path": STATE,
        "mem_backend": {"backend_type": "File", "backend_path": MEMORY},
        "resume_vm": False,
    }
    return "PUT", "/snapshot/load", body


def save_state() -> Request:
    """Write the devices' state to STATE_OUT and then fail, having no place for the memory."""
    body = {"snapshot_type": "Full", "snapshot_path": STATE_OUT, "mem_file_path": NOWHERE}
    return "PUT", "/snapshot/create", body


def replace_drive(slot: str) -> Request:
    """Open the file of `slot` again and tell the guest its size."""
    return "PATCH", f"/drives/{slot}", {"drive_id": slot, "path_on_host": slot}


def limit(rates: Rates) -> list[Request]:
    """The same bounds as `configure`, of a machine that was loaded; [] when there are none."""
    requests: list[Request] = []
    if limiter := rates.disk.limiter():
        requests += [
            ("PATCH", f"/drives/{slot}", {"drive_id": slot, "rate_limiter": limiter}) for slot in SLOTS[1:]
        ]
    if limiter := rates.network.limiter():
        body = {"iface_id": NIC, "rx_rate_limiter": limiter, "tx_rate_limiter": limiter}
        requests.append(("PATCH", f"/network-interfaces/{NIC}", body))
    return requests


def layout_digest(spec: MachineSpec) -> str:
    """Changes when a machine built by this code could not load a snapshot of one built by other code, or would be
    booted otherwise."""
    requests = configure(replace(spec, kernel_args=()))
    return hashlib.sha256(json.dumps(requests, sort_keys=True).encode()).hexdigest()[:16]
