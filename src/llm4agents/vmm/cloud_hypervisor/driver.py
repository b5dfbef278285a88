"""The Cloud Hypervisor driver: boots, clones and adopts machines. See `vmm.base.Driver` for the contract.

Only for root, with KVM, in a jail: the VMM has a root of its own in which it finds, by name, one machine's files and
nothing else (`place`). The driver holds nothing of a machine: clones map their template's memory file.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from dataclasses import replace
from pathlib import Path

from llm4agents import limits
from llm4agents.config import Settings
from llm4agents.errors import (
    HostSetupError,
    VersionMismatchError,
)
from llm4agents.vmm import given, host, pages, procfs, snapshot, uids
from llm4agents.vmm import shim as shim_
from llm4agents.vmm.base import Capabilities, Disk, MachineRecord, MachineSpec, Placement, Snapshot
from llm4agents.vmm.cloud_hypervisor import api, command, frozen, place, probe
from llm4agents.vmm.cloud_hypervisor.machine import NAME, CloudHypervisorMachine, clear_away
from llm4agents.vmm.jail.cell import Cells
from llm4agents.vmm.jail.cgroups import Bounds
from llm4agents.vmm.process import adopted, end_remains, ended_at_once

_MIB = 1 << 20
_VMM_BYTES = 4 << 30
"""Address space of the VMM itself: code, thread stacks and arenas."""
_FILES_MAX = 1024
_REBUILD = "build the template again"
_RANGES_FD = command.API_FD + 1
LANDLOCK_ABI_MIN = 3
"""What Cloud Hypervisor insists on (Linux 6.2): where less is to be had it starts no machine that asks for it."""


class CloudHypervisorDriver:
    """One per server. Belongs to the event loop it is used in."""

    name = NAME

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._cells = Cells(settings)
        self._capabilities: Capabilities | None = None
        self._probing = asyncio.Lock()
        self._digests = snapshot.Digests()

    # -- what this host can do ----------------------------------------------------------------------------

    async def capabilities(self) -> Capabilities:
        async with self._probing:
            if self._capabilities is None:
                self._capabilities = await self._probe()
            return self._capabilities

    async def _probe(self) -> Capabilities:
        binary = probe.find(self._settings.cloud_hypervisor)
        version = await probe.version(binary)
        if self._settings.accel == "tcg":
            raise HostSetupError(
                "Cloud Hypervisor needs KVM, and LLM4AGENTS_ACCEL=tcg asks for software emulation",
                hint="unset it, or use LLM4AGENTS_VMM=qemu",
            )
        if os.geteuid() != 0:
            raise HostSetupError(
                "Cloud Hypervisor is started in a jail that only root can make",
                hint="run the server as root (each VMM has a uid of its own), or use LLM4AGENTS_VMM=qemu",
            )
        cache = self._settings.cache / "probe"
        why = await probe.why_not_kvm(binary, version, cache)
        if why is not None:
            raise HostSetupError(f"Cloud Hypervisor needs KVM: {why}", hint="use LLM4AGENTS_VMM=qemu")
        probe.device_gid()
        jail = await self._cells.prepare(binary, places=command.PLACES)
        return Capabilities(
            vmm=self.name,
            version=version,
            accelerator="kvm",
            why_not_kvm=None,
            private_memory_clone=True,
            differential_pause=await asyncio.to_thread(pages.readable_children, uids.some_uid()),
            nested=host.kvm_nests(),
            cpu=f"host {host.cpu_identity()}",
            tsc_khz=await host.tsc_khz(cache),
            jail=jail,
            disk_format="raw",
            # A raw disk's file has its full size from the start; what it really holds no limit of a process bounds.
            bounds_files=False,
            stops_when_full=False,
        )

    def identity(self, spec: MachineSpec, capabilities: Capabilities) -> dict[str, str]:
        return snapshot.identity(self.name, spec, capabilities, api.layout_digest(spec))

    def refuses(self, kernel_release: str, capabilities: Capabilities) -> str | None:
        return None

    # -- machines -----------------------------------------------------------------------------------------

    async def boot(self, spec: MachineSpec, placement: Placement) -> CloudHypervisorMachine:
        can = await self._able(spec)
        api.check_disks(spec.disks)
        inside = {api.KERNEL: spec.kernel, api.INITRD: spec.initrd}
        files = {f"{api.BOOT_DIRECTORY}/{name}": path for name, path in inside.items()}
        with contextlib.ExitStack() as stack:
            ground = await place.make(placement, spec.disks, files, stack)
            for name in inside:
                os.symlink(f"{api.BOOT_DIRECTORY}/{name}", name, dir_fd=ground.io)
            machine = await self._start(spec, placement, can, ground)
            try:
                config = api.boot(spec, api.kernel_args(spec), landlock=landlock())
                await machine.started(config, ground.nic)
            except BaseException:
                await asyncio.shield(machine.stop())
                raise
        return machine

    async def restore(
        self,
        base: Snapshot,
        placement: Placement,
        disks: tuple[Disk, ...],
        *,
        diff: Snapshot | None = None,
    ) -> CloudHypervisorMachine:
        can = await self._able(base.spec)
        api.check_disks(disks)
        snapshot.check_identity(base, self.identity(base.spec, can))
        digest = self._digests.of(base.path)
        if diff is not None:
            snapshot.check_diff(diff, base, digest)
        size = base.spec.memory_mib * _MIB
        with contextlib.ExitStack() as stack:
            ranges = frozen.ranges(size)
            stack.callback(os.close, ranges)
            # What was changed is read and checked while the VMM starts.
            reading = asyncio.ensure_future(asyncio.to_thread(frozen.read, base, diff, ranges))
            try:
                files = {api.MEMORY: _memory(base, size)}
                ground = await place.make(placement, disks, files, stack)
                machine = await self._start(base.spec, placement, can, ground, ranges=ranges, base=digest)
                try:
                    state = await asyncio.shield(reading)
                    config = api.clone(base.spec, landlock=landlock())
                    frozen.write_restore(ground.io, config, state, _RANGES_FD, ground.lease.uid)
                    await machine.load(ground.nic)
                    os.ftruncate(ranges, 0)  # the VMM still has it open
                except BaseException:
                    await asyncio.shield(machine.stop())
                    raise
            finally:
                # A thread cannot be cancelled, and must not write to a descriptor that is another's by then.
                await asyncio.wait([reading])
                reading.cancelled() or reading.exception()
        return machine

    async def adopt(self, record: MachineRecord) -> CloudHypervisorMachine | None:
        machine = await adopted(record, lambda: CloudHypervisorMachine(record), CloudHypervisorMachine.greet)
        if machine is None:
            await end_remains(record, CloudHypervisorMachine.sockets)
            await asyncio.to_thread(clear_away, record)
        return machine

    async def release(self, snapshot_path: Path) -> None:
        self._digests.forget(snapshot_path)

    async def close(self) -> None:
        self._digests = snapshot.Digests()

    # -- parts --------------------------------------------------------------------------------------------

    async def _able(self, spec: MachineSpec) -> Capabilities:
        can = await self.capabilities()
        if spec.nested and not can.nested:
            raise HostSetupError(
                "this host's KVM does not let its guests run guests",
                hint="load kvm_amd or kvm_intel with nested=1",
            )
        return can

    async def _start(
        self,
        spec: MachineSpec,
        placement: Placement,
        can: Capabilities,
        ground: place.Place,
        *,
        ranges: int | None = None,
        base: str | None = None,
    ) -> CloudHypervisorMachine:
        """Start the VMM through the shim, in its jail, with no machine in it yet.

        `ranges`: becomes its descriptor _RANGES_FD. `base`: the digest of what it will be a clone of.
        """
        run_dir, uid = placement.run_dir, ground.lease.uid
        if placement.deadline_unix is not None:
            shim_.write_deadline(run_dir, placement.deadline_unix)
        memory = spec.memory_mib * _MIB
        gid = probe.device_gid()
        bounds = Bounds(
            memory + limits.VMM_MEMORY_MIB * _MIB,
            limits.VMM_PROCESSES_MAX,
            spec.vcpus,
            self._settings.io_max,
        )
        with contextlib.ExitStack() as stack:
            cell = self._cells.cell(stack, placement.id, bounds, command.DEVICES)
            launch = shim_.Launch(
                argv=command.argv(probe.find(self._settings.cloud_hypervisor)),
                env={"LANG": "C", "MALLOC_ARENA_MAX": "2"},
                fds=[ground.api, *([] if ranges is None else [ranges])],
                run_dir=run_dir,
                rlimits={
                    "core": 0,
                    "nofile": _FILES_MAX,
                    # Twice: a snapshot of a booted machine maps what it writes.
                    "as": 2 * memory + _VMM_BYTES,
                    "fsize": max(ground.largest, memory) + 64 * _MIB,
                    "nproc": limits.VMM_PROCESSES_MAX,
                },
                hold=[ground.lease.fd, *ground.locked],
                serve=placement.serve,
                serve_socket=ground.serve_socket,
                uid=uid,
                gid=uid if gid is None else gid,
                unlink=[*CloudHypervisorMachine.sockets, shim_.DEADLINE, shim_.LINK_SOCKET],
                jail=replace(cell.jail, binds=(*cell.jail.binds, *ground.binds), memfd=True),
            )
            try:
                started = await shim_.start(launch)
            finally:
                for path in ground.temporary:
                    path.unlink(missing_ok=True)
        record = MachineRecord(
            driver=self.name,
            id=placement.id,
            run_dir=run_dir,
            shim_pid=started.shim_pid,
            shim_start_ticks=started.shim_start_ticks,
            vmm_pid=started.vmm_pid,
            vmm_start_ticks=started.vmm_start_ticks,
            uid=uid,
            extra={
                "host_boot_id": procfs.host_boot_id(),
                "jail": {**started.jail, **cell.notes},
                given.FILES: given.files(launch.fds),
                "disks": ground.inodes,
                **({"base": base} if base is not None else {"identity": self.identity(spec, can)}),
            },
        )
        try:
            return CloudHypervisorMachine(
                record, spec=spec, identity=self.identity(spec, can), volumes=ground.volumes
            )
        except OSError as error:  # also ProcessLookupError
            raise await ended_at_once(record) from error


def _memory(base: Snapshot, size: int) -> Path:
    path = base.path / snapshot.MEMORY
    try:
        found = path.stat().st_size
    except OSError as error:
        raise HostSetupError(f"{path} cannot be read: {error.strerror}", hint=_REBUILD) from error
    if found != size:
        raise VersionMismatchError(
            f"{path} is {found} bytes, not the {size} its manifest says",
            hint="remove the template and build it again",
        )
    return path


def landlock() -> bool:
    """Whether Cloud Hypervisor's own landlock can be asked for here; the shim's is on where there is any."""
    version = ctypes.CDLL(None, use_errno=True).syscall(444, None, 0, 1)  # landlock_create_ruleset
    return int(version) >= LANDLOCK_ABI_MIN
