"""The QEMU command line, as a pure function of what is wanted. No I/O, no paths: QEMU opens nothing by name.

Every file is a descriptor: disks through `/dev/fdset/N`, memory, kernel and initrd through `/proc/self/fd/N`,
sockets as listening descriptors. So the process needs no right to any directory and its uid can be its own.

The options are design.md's ("Facts that cost time to find"); what a snapshot depends on is in `device_args`
and `machine_args`, whose digest is part of its identity: change them and old snapshots are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from llm4agents import limits
from llm4agents.errors import InvalidRequestError
from llm4agents.vmm import slots
from llm4agents.vmm.base import Accelerator, Disk, MachineSpec

FIRST_FD = 3
AGENT_PORT = "llm4agents.agent"
"""Name of the virtio-serial port: /sys/class/virtio-ports/*/name in the guest."""
VOLUME_SLOTS = tuple(f"vol{number}" for number in range(limits.VOLUME_SLOTS))
FILE = "-file"
"""Ends the name of the node that is the file of a qcow2 node."""
SLOTS = ("root", "upper", *VOLUME_SLOTS)
"""Block devices in the order the guest sees them (vda, vdb, vdc…); the slot is also the serial number."""
_TRANSPORTS = 24
"""Of a microvm with ACPI. Filled from the top as QEMU itself does: the guest counts them downwards, and with
the lowest eight in use (seen, 7.2 and Linux 6.1) it got no interrupt of its serial line and never came up."""
SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"


@dataclass(frozen=True, slots=True)
class Command:
    """`fds` names the descriptors the process must have, as 3, 4, 5… in this order."""

    argv: tuple[str, ...]
    fds: tuple[str, ...]


class _Fds:
    """Hands out descriptor numbers by name."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getitem__(self, name: str) -> int:
        if name not in self.names:
            self.names.append(name)
        return FIRST_FD + self.names.index(name)


def machine_args(spec: MachineSpec, accelerator: Accelerator) -> list[str]:
    """Machine, accelerator, processor and memory size: fixed for a template and all its clones."""
    cpu = "host" if accelerator == "kvm" else "max"
    accel = "kvm"
    if accelerator == "tcg":
        # One thread for one vCPU: `thread=multi` costs memory barriers and boots less reliably.
        threads = "single" if spec.vcpus == 1 else "multi"
        accel = f"tcg,thread={threads},tb-size={limits.TB_SIZE_MIB}"
        # Told that `rep movsb` is fast, kernel and libc copy with it; emulated it goes byte by byte, four times slower.
        cpu += ",erms=off"
    return [
        "-M",
        "microvm,acpi=on,pic=off,pit=off,rtc=on,isa-serial=on,pcie=off,usb=off,memory-backend=ram,"
        "mem-merge=off,dump-guest-core=off",
        "-accel",
        accel,
        "-cpu",
        cpu if spec.nested else f"{cpu},svm=off,vmx=off",
        "-smp",
        str(spec.vcpus),
        "-m",
        f"{spec.memory_mib}M",
    ]


def netdev_args(tap: int | None) -> list[str]:
    """The NIC's other end: a tap (without vnet_hdr: the guest has agreed to none), or a hub port with nothing on it."""
    return ["-netdev", "hubport,id=nic0,hubid=0" if tap is None else f"tap,id=nic0,fd={tap},vhost=off"]


def device_args(tap: int | None = None) -> list[str]:
    """Every device of every machine, each on a transport of its own so that the guest's order never changes.

    The NIC's backend is `netdev_args`, the volumes are empty: slots for a clone to fill.
    """
    args: list[str] = []
    bus = [f"virtio-mmio-bus.{_TRANSPORTS - 1 - place}" for place in range(len(SLOTS) + 2)]
    for place, slot in enumerate(SLOTS):
        # A host without room stops the VM before the write and says so; other errors are the guest's.
        policy = "" if slot == "root" else ",werror=enospc,rerror=report"
        device = f"virtio-blk-device,bus={bus[place]},drive={slot},id={slot}-dev,serial={slot}{policy}"
        args += ["-device", device]
    # Port 0 is reserved for a console; the default of 31 ports costs the guest 64 queues.
    serial = f"virtio-serial-device,bus={bus[-2]},id=serial0,max_ports=2"
    nic = f"virtio-net-device,bus={bus[-1]},netdev=nic0,id=nic0-dev,mac={limits.GUEST_MAC}"
    return [
        *args,
        *("-device", serial),
        *("-device", f"virtserialport,bus=serial0.0,nr=1,chardev=agent,name={AGENT_PORT}"),
        *netdev_args(tap),
        *("-device", nic),
    ]


def kernel_args(spec: MachineSpec, accelerator: Accelerator, tsc_khz: int) -> str:
    """The kernel command line."""
    args = ["console=ttyS0", "earlyprintk=ttyS0", "loglevel=4", "8250.nr_uarts=1", "reboot=t", "panic=-1"]
    args += ["tsc=reliable", f"tsc_early_khz={tsc_khz}", "no_timer_check", "random.trust_cpu=on"]
    # What is on every system call's path, or ticks in an idle clone, for nobody: profiles and audit rules that are
    # not there, pressure figures. Huge pages only for who asks: a clone would pay 2 MiB for each it touches.
    args += ["lsm=landlock,yama", "audit=0", "psi=0", "nowatchdog", "transparent_hugepage=madvise"]
    # Freezing file systems waits for grace periods: 30 ms of a pause's standstill if they come by the tick.
    args += ["rcupdate.rcu_expedited=1"]
    if accelerator == "tcg":
        # The processor that mitigations are for is not there; zeroing what is then overwritten is a tenth of a write.
        args += ["mitigations=off", "init_on_alloc=0"]
    return " ".join([*args, *spec.kernel_args])


def build(
    spec: MachineSpec,
    disks: Sequence[Disk],
    *,
    qemu: str,
    accelerator: Accelerator,
    tsc_khz: int,
    clone: bool,
    bare: bool = False,
    tap: bool = False,
) -> Command:
    """The command that boots `spec` with `disks`, or (`clone`) waits for the state of a snapshot of it.

    `tap`: the NIC is connected to the descriptor `tap`, which changes nothing a snapshot depends on.
    `bare`: that state is of the devices alone (`xen-save-devices-state`), without what a whole migration has around it.
    Descriptor names: `qmp`, `agent` (listening sockets), `memory`, `kernel`, `initrd`, and for each disk its
    slot and `slot.backing`, `slot.backing1`… (nearest first). Raises InvalidRequestError when
    the disks do not fit the slots.
    """
    _check_disks(disks)
    fds = _Fds()
    args = [qemu, "-name", "llm4agents", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
    args += ["-sandbox", SANDBOX]
    args += machine_args(spec, accelerator)
    share = "off" if clone else "on"
    path = f"/proc/self/fd/{fds['memory']}"
    args += ["-object", f"memory-backend-file,id=ram,size={spec.memory_mib}M,mem-path={path},share={share}"]
    # The shim's pipe: it keeps a bounded log of it.
    args += ["-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"]
    for name in ("qmp", "agent"):
        args += ["-chardev", f"socket,id={name},fd={fds[name]},server=on,wait=off"]
    args += ["-mon", "chardev=qmp,mode=control"]
    by_slot = {disk.slot: disk for disk in disks}
    for slot in SLOTS:
        for name in _files(by_slot.get(slot)):
            args += ["-add-fd", f"fd={fds[name]},set={fds[name]}"]
        for node in _nodes(slot, by_slot.get(slot), fds):
            args += ["-blockdev", json.dumps(node, separators=(",", ":"))]
    args += device_args(fds["tap"] if tap else None)
    if clone:
        args += ["-S", "-incoming", "defer"]
        if bare:
            args += ["-M", "suppress-vmdesc=on", "-global", "migration.send-configuration=off"]
    else:
        args += ["-kernel", f"/proc/self/fd/{fds['kernel']}", "-initrd", f"/proc/self/fd/{fds['initrd']}"]
        args += ["-append", kernel_args(spec, accelerator, tsc_khz)]
    return Command(tuple(args), tuple(fds.names))


def _check_disks(disks: Sequence[Disk]) -> None:
    slots.check(disks, SLOTS)
    for disk in disks:
        if disk.backing and disk.format != "qcow2":
            raise InvalidRequestError(f"disk {disk.slot}: only a qcow2 lies over another file")


def _files(disk: Disk | None) -> list[str]:
    if disk is None:
        return []
    return [disk.slot, *(backing_name(disk.slot, depth) for depth in range(len(disk.backing)))]


def backing_name(slot: str, depth: int) -> str:
    """The descriptor of the layer `depth` below the one right under the disk's own file."""
    return f"{slot}.backing{depth or ''}"


def _nodes(slot: str, disk: Disk | None, fds: _Fds) -> list[dict[str, Any]]:
    """The block nodes of a slot; an empty one swallows writes and reads as zeros, and shares nothing."""
    if disk is None:
        # Without read-zeroes a read would show whatever is in QEMU's heap.
        size = limits.VOLUME_SLOT_BYTES
        return [{"driver": "null-co", "node-name": slot, "size": size, "read-zeroes": True}]
    nodes: list[dict[str, Any]] = []
    # From the bottom up, by reference, and never by the name the image's header holds: a header is not trusted
    # with a path.
    under: str | None = None
    for depth in reversed(range(len(disk.backing))):
        name = backing_name(slot, depth)
        bottom = depth == len(disk.backing) - 1
        format_ = disk.base_format if bottom else "qcow2"
        nodes.append(node(name.replace(".", "-"), fds[name], format_, read_only=True, backing=under))
        under = str(nodes[-1]["node-name"])
    top = node(slot, fds[slot], disk.format, read_only=disk.read_only, backing=under, lasts=disk.lasts)
    return [*nodes, top]


def node(
    name: str,
    fdset: int,
    format_: Literal["raw", "qcow2"],
    *,
    read_only: bool,
    backing: str | None = None,
    lasts: bool = False,
) -> dict[str, Any]:
    """A block node over the file that descriptor set `fdset` holds; `backing` is the node under it."""
    # A sandbox's disk ends with its host; who keeps one (template, pause) syncs the file himself.
    cache = {"direct": False, "no-flush": not lasts or backing is not None}
    common = {} if read_only else {"discard": "unmap", "cache": cache}
    # Without QEMU's locks: whoever can read a file that machines share (a template's disk) could take one that lets no
    # other of them start. Who writes to what is the engine's to know.
    file = {"driver": "file", "filename": f"/dev/fdset/{fdset}", "locking": "off", **common}
    if format_ == "raw":
        return {**file, "node-name": name, "read-only": read_only}
    own = {"driver": "qcow2", "node-name": name, "read-only": read_only, **common}
    # Without a word about reading alone the file follows its image, also when that becomes a layer under another.
    return {**own, "file": {**file, "node-name": f"{name}{FILE}"}, "backing": backing}


def layout_digest(spec: MachineSpec, accelerator: Accelerator) -> str:
    """Changes when a machine built by this code could not load a snapshot of one built by other code, or would be
    booted otherwise."""
    kernel = kernel_args(replace(spec, kernel_args=()), accelerator, 0)
    args = [*machine_args(spec, accelerator), *device_args(), kernel]
    return hashlib.sha256("\0".join(args).encode()).hexdigest()[:16]
