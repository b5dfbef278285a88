"""The QEMU driver: boots, clones and adopts machines. See `vmm.base.Driver` for the contract.

Holds nothing of a machine but the sealed memory of templates that are being cloned.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from pathlib import Path

from llm4agents import limits
from llm4agents.config import Settings
from llm4agents.errors import HostSetupError, InvalidRequestError, LLM4AgentsError
from llm4agents.vmm import given as given_
from llm4agents.vmm import host, memory, pages, process, procfs, slots, snapshot, uids
from llm4agents.vmm import shim as shim_
from llm4agents.vmm.base import (
    Accelerator,
    Capabilities,
    Disk,
    MachineRecord,
    MachineSpec,
    Placement,
    Snapshot,
)
from llm4agents.vmm.checkpoint import Parts
from llm4agents.vmm.jail.cell import Cells
from llm4agents.vmm.jail.cgroups import Bounds
from llm4agents.vmm.qemu import command, parts, probe, table
from llm4agents.vmm.qemu.machine import AGENT_SOCKET, QMP_SOCKET, QemuMachine

_log = logging.getLogger(__name__)
_MIB = 1 << 20
_VMM_BYTES = 4 << 30
"""Address space of QEMU itself: code, translation cache, thread stacks and arenas."""
_REBUILD = "build the template again"


class QemuDriver:
    """One per server. Belongs to the event loop it is used in."""

    name = "qemu"

    def __init__(self, settings: Settings, *, probe_kernel: Path | None = None) -> None:
        """`probe_kernel`: the vmlinux the KVM probe boots, when there is one already."""
        self._settings = settings
        self._probe_kernel = probe_kernel
        self._capabilities: Capabilities | None = None
        self._probing = asyncio.Lock()
        self._cells = Cells(settings)
        self._digests = snapshot.Digests()
        self._memories: dict[Path, tuple[int, asyncio.Task[int]]] = {}

    # -- what this host can do ----------------------------------------------------------------------------

    async def capabilities(self) -> Capabilities:
        async with self._probing:
            if self._capabilities is None:
                self._capabilities = await self._probe()
            return self._capabilities

    async def _probe(self) -> Capabilities:
        qemu = probe.find_qemu(self._settings.qemu)
        version = await probe.qemu_version(qemu)
        cache = self._settings.cache / "probe"
        accelerator: Accelerator = "tcg"
        if self._settings.accel == "tcg":
            why: str | None = "LLM4AGENTS_ACCEL=tcg asks for software emulation"
        else:
            why = await probe.why_not_kvm(qemu, version, cache, self._probe_kernel)
            if why is None:
                accelerator = "kvm"
            elif self._settings.accel == "kvm":
                raise HostSetupError(
                    f"LLM4AGENTS_ACCEL=kvm, but {why}", hint="unset it to use software emulation"
                )
        kvm = [str(host.KVM_DEVICE)] if accelerator == "kvm" else []
        jail = await self._cells.prepare(
            qemu, modules=parts.modules(qemu), files=await parts.firmware(qemu), places=kvm
        )
        return Capabilities(
            vmm=self.name,
            version=version,
            accelerator=accelerator,
            why_not_kvm=why,
            private_memory_clone=True,
            differential_pause=await asyncio.to_thread(
                pages.readable_children, uids.some_uid() if os.geteuid() == 0 else None
            ),
            nested=accelerator == "tcg" or host.kvm_nests(),
            cpu="max" if accelerator == "tcg" else f"host {host.cpu_identity()}",
            tsc_khz=await host.tsc_khz(cache),
            jail=jail,
        )

    def identity(self, spec: MachineSpec, capabilities: Capabilities) -> dict[str, str]:
        return snapshot.identity(
            self.name, spec, capabilities, command.layout_digest(spec, capabilities.accelerator)
        )

    def refuses(self, kernel_release: str, capabilities: Capabilities) -> str | None:
        try:
            table.check(capabilities.version, kernel_release, capabilities.accelerator)
        except HostSetupError as error:
            return error.message
        return None

    # -- machines -----------------------------------------------------------------------------------------

    async def boot(self, spec: MachineSpec, placement: Placement) -> QemuMachine:
        can = await self.capabilities()
        if warning := table.check(can.version, spec.kernel_release, can.accelerator):
            _log.warning(warning)
        with contextlib.ExitStack() as stack:
            fds = {"memory": memory.create(spec.memory_mib * _MIB)}
            stack.callback(os.close, fds["memory"])
            for name, path in (("kernel", spec.kernel), ("initrd", spec.initrd)):
                fds[name] = await _reading(asyncio.to_thread(memory.of_file, path), path)
                stack.callback(os.close, fds[name])
            machine = await self._start(spec, spec.disks, placement, can, fds, clone=False)
        try:
            await machine.started()
        except BaseException:
            await asyncio.shield(machine.stop())
            raise
        return machine

    async def restore(
        self,
        frozen: Snapshot,
        placement: Placement,
        disks: tuple[Disk, ...],
        *,
        diff: Snapshot | None = None,
    ) -> QemuMachine:
        can = await self.capabilities()
        snapshot.check_identity(frozen, self.identity(frozen.spec, can))
        base = self._digests.of(frozen.path)
        if diff is not None:
            snapshot.check_diff(diff, frozen, base)
        async with contextlib.AsyncExitStack() as stack:
            ram = await self._memory(frozen)
            stack.callback(os.close, ram)
            if diff is None:
                parts, state = None, _state(frozen)
                stack.callback(os.close, state)
            else:
                parts = await stack.enter_async_context(Parts(diff))
                state = parts.state
            machine = await self._start(
                frozen.spec,
                disks,
                placement,
                can,
                {"memory": ram},
                clone=True,
                base=base,
                bare=diff is not None or frozen.bare,
            )
            try:
                await machine.load(state, parts.fill(machine.record.vmm_pid) if parts is not None else None)
                await machine.announce([disk.slot for disk in disks if disk.slot in command.VOLUME_SLOTS])
            except BaseException:
                await asyncio.shield(machine.stop())
                raise
        return machine

    async def adopt(self, record: MachineRecord) -> QemuMachine | None:
        machine = await process.adopted(
            record,
            lambda: QemuMachine(record, process.connect(record.run_dir, QMP_SOCKET)),
            QemuMachine.greet,
        )
        if machine is None:
            await process.end_remains(record, QemuMachine.sockets)
        return machine

    async def release(self, snapshot_path: Path) -> None:
        self._digests.forget(snapshot_path)
        held = self._memories.pop(snapshot_path, None)
        if held is not None:
            with contextlib.suppress(LLM4AgentsError, OSError):
                os.close(await held[1])

    async def close(self) -> None:
        """Let go of everything held; machines live on."""
        for path in list(self._memories):
            await self.release(path)

    # -- parts --------------------------------------------------------------------------------------------

    async def _memory(self, frozen: Snapshot) -> int:
        """A descriptor (the caller closes it) of a snapshot's sealed memory.

        Two restores at once load it once; a failed load is forgotten, and so is one whose file was replaced.
        """
        path = frozen.path / snapshot.MEMORY
        try:
            inode = path.stat().st_ino
        except OSError as error:
            raise HostSetupError(f"{path} cannot be read: {error.strerror}", hint=_REBUILD) from error
        held = self._memories.get(frozen.path)
        if held is not None and held[0] != inode:
            await self.release(frozen.path)
            held = None
        if held is None:
            size = frozen.spec.memory_mib * _MIB
            task = asyncio.create_task(asyncio.to_thread(memory.load_sealed, path, size))
            held = self._memories[frozen.path] = (inode, task)
        try:
            # A copy: a release in the middle of a restore must not close what is about to be passed on.
            return os.dup(await _reading(asyncio.shield(held[1]), path))
        except LLM4AgentsError:
            if self._memories.get(frozen.path) is held:
                del self._memories[frozen.path]
            raise

    async def _start(
        self,
        spec: MachineSpec,
        disks: tuple[Disk, ...],
        placement: Placement,
        can: Capabilities,
        fds: Mapping[str, int],
        *,
        clone: bool,
        base: str | None = None,
        bare: bool = False,
    ) -> QemuMachine:
        """Start QEMU through the shim, with both sockets connected before it runs.

        `base`: the digest of what it is a clone of. `bare`: its state will be that of devices alone.
        """
        qemu = probe.find_qemu(self._settings.qemu)
        built = command.build(
            spec,
            disks,
            qemu=qemu,
            accelerator=can.accelerator,
            tsc_khz=can.tsc_khz,
            clone=clone,
            bare=bare,
            tap=placement.tap is not None,
        )
        run_dir = placement.run_dir
        for name in (shim_.EXIT, shim_.DEADLINE, AGENT_SOCKET, QMP_SOCKET, shim_.LINK_SOCKET):
            (run_dir / name).unlink(missing_ok=True)
        if placement.deadline_unix is not None:
            shim_.write_deadline(run_dir, placement.deadline_unix)
        with contextlib.ExitStack() as stack:
            given = dict(fds) if placement.tap is None else {**fds, "tap": placement.tap}
            for name, socket_name in (("qmp", QMP_SOCKET), ("agent", AGENT_SOCKET)):
                given[name] = stack.enter_context(process.listen(run_dir, socket_name)).fileno()
            asked = None
            if placement.serve:
                asked = stack.enter_context(process.listen(run_dir, shim_.LINK_SOCKET, socket.SOCK_SEQPACKET))
                asked.setblocking(False)
            size_max = _open_disks(disks, given, stack)
            root = os.geteuid() == 0
            lease = uids.lease(placement.id) if root else None
            if lease is not None:
                stack.callback(os.close, lease.fd)
            rlimits = {"core": 0, "nofile": 1024, "as": spec.memory_mib * _MIB + _VMM_BYTES}
            rlimits["fsize"] = max(size_max + size_max // 8 + 64 * _MIB, spec.memory_mib * _MIB)
            if lease is not None:
                rlimits["nproc"] = (
                    limits.VMM_PROCESSES_MAX
                )  # counted per uid: only where the uid is the VM's own
            memory_bytes = (spec.memory_mib + limits.VMM_MEMORY_MIB) * _MIB
            bounds = Bounds(memory_bytes, limits.VMM_PROCESSES_MAX, spec.vcpus, self._settings.io_max)
            devices = [str(host.KVM_DEVICE)] if can.accelerator == "kvm" else []
            cell = self._cells.cell(stack, placement.id, bounds, devices)
            launch = shim_.Launch(
                argv=built.argv,
                env={"LANG": "C", "MALLOC_ARENA_MAX": "2"},
                fds=[given[name] for name in built.fds],
                run_dir=run_dir,
                rlimits=rlimits,
                hold=[lease.fd] if lease is not None else [],
                uid=lease.uid if lease is not None else None,
                gid=_gid(can.accelerator, lease),
                serve=placement.serve,
                serve_socket=asked.fileno() if asked is not None else None,
                unlink=[AGENT_SOCKET, QMP_SOCKET, shim_.DEADLINE, shim_.LINK_SOCKET],
                jail=cell.jail,
            )
            qmp = stack.enter_context(process.connect(run_dir, QMP_SOCKET))
            channel = stack.enter_context(process.connect(run_dir, AGENT_SOCKET))
            started = await shim_.start(launch)
            record = MachineRecord(
                driver=self.name,
                id=placement.id,
                run_dir=run_dir,
                shim_pid=started.shim_pid,
                shim_start_ticks=started.shim_start_ticks,
                vmm_pid=started.vmm_pid,
                vmm_start_ticks=started.vmm_start_ticks,
                uid=lease.uid if lease is not None else os.geteuid(),
                extra={
                    "host_boot_id": procfs.host_boot_id(),
                    "jail": {**started.jail, **cell.notes},
                    given_.FILES: given_.files(launch.fds),
                    **({"base": base} if base is not None else {"identity": self.identity(spec, can)}),
                },
            )
            try:
                return QemuMachine(
                    record,
                    qmp.dup(),
                    spec=spec,
                    identity=self.identity(spec, can),
                    channel=channel.dup(),
                    memory_fd=None if clone else os.dup(fds["memory"]),
                )
            except ProcessLookupError as error:
                raise await process.ended_at_once(record) from error


_DATA_ELSEWHERE = 1 << 2
"""The feature of a qcow2 that names another file to have its data."""


def _state(frozen: Snapshot) -> int:
    try:
        return os.open(frozen.path / snapshot.STATE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise HostSetupError(f"{frozen.path} is not whole: {error.strerror}", hint=_REBUILD) from error


async def _reading(work: Awaitable[int], path: Path) -> int:
    try:
        return await work
    except OSError as error:
        if isinstance(error, LLM4AgentsError):
            raise
        raise HostSetupError(
            f"{path} cannot be read: {error.strerror}", hint="build the template again"
        ) from error


def _open_disks(disks: tuple[Disk, ...], given: dict[str, int], stack: contextlib.ExitStack) -> int:
    """Open every file of every disk into `given`; returns the bytes of the largest writable one."""
    size_max = 0
    for disk in disks:
        files = [(disk.slot, disk.path, disk.read_only)]
        for depth, path in enumerate(disk.backing):
            files.append((command.backing_name(disk.slot, depth), path, True))
        for name, path, read_only in files:
            flags = (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC
            try:
                given[name] = os.open(path, flags)
            except OSError as error:
                raise HostSetupError(f"the disk {path} cannot be opened: {error.strerror}") from error
            stack.callback(os.close, given[name])
        if disk.lasts:
            # The lock is the open file's, which the VMM has from here on.
            slots.lock(
                disk,
                given[command.backing_name(disk.slot, len(disk.backing) - 1) if disk.backing else disk.slot],
            )
        if not disk.read_only:
            bottom = given[files[-1][0]] if disk.backing and disk.base_format == "raw" else None
            for name, path, _ in files if bottom is None else files[:-1]:
                size_max = max(size_max, virtual_size(given[name], replace(disk, path=path), bottom))
    return size_max


def virtual_size(fd: int, disk: Disk, bottom: int | None = None) -> int:
    """Bytes the guest sees. `bottom`: the open raw file that a qcow2 lies over. Raises InvalidRequestError for a qcow2
    that is none, or whose header a monitor before this one has changed: it bounds what the next may write."""
    if disk.format == "raw":
        return os.fstat(fd).st_size
    header = os.pread(fd, 80, 0)
    if len(header) < 80 or header[:4] != b"QFI\xfb":
        raise InvalidRequestError(f"{disk.path} is not a qcow2 image")
    size, features = struct.unpack_from(">Q", header, 24)[0], struct.unpack_from(">Q", header, 72)[0]
    if features & _DATA_ELSEWHERE or (bottom is not None and size > os.fstat(bottom).st_size):
        raise InvalidRequestError(
            f"the header of {disk.path} is not what was written: what wrote to it has changed it",
            hint="end the sandbox: its monitor was not to be trusted with its disk",
        )
    return int(size)


def _gid(accelerator: Accelerator, lease: uids.Lease | None) -> int | None:
    """The VMM's group: with KVM the device's, since that is the one file it opens by name."""
    if lease is None:
        return None
    if accelerator == "kvm":
        device = host.KVM_DEVICE.stat()
        if device.st_gid != 0 and device.st_mode & 0o060 == 0o060:
            return device.st_gid
    return lease.uid
