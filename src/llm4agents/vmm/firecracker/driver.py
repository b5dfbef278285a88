"""The Firecracker driver: boots, clones and adopts machines, each through the jailer. See `vmm.base.Driver`.

Holds nothing of a machine: a clone maps its template's memory from the file itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from llm4agents import limits
from llm4agents.config import Settings
from llm4agents.errors import (
    CapacityError,
    HostSetupError,
    LLM4AgentsError,
    VersionMismatchError,
)
from llm4agents.vmm import given, host, pages, process, procfs, slots, snapshot, uids
from llm4agents.vmm import shim as shim_
from llm4agents.vmm.base import Capabilities, Disk, MachineRecord, MachineSpec, Placement, Snapshot
from llm4agents.vmm.checkpoint import Parts
from llm4agents.vmm.firecracker import api, darkness, jail, jailer, probe, versions
from llm4agents.vmm.firecracker.jailer import Layout
from llm4agents.vmm.firecracker.machine import FirecrackerMachine
from llm4agents.vmm.jail.cell import joined
from llm4agents.vmm.jail.cgroups import Bounds
from llm4agents.vmm.waiting import watched

_log = logging.getLogger(__name__)
_MIB: Final = 1 << 20
_SLACK_BYTES: Final = 64 << 20
"""More than the largest disk that a VMM may write: the state of its devices, the copy of its program."""
_REBUILD: Final = "build the template again"


class FirecrackerDriver:
    """One per server. Belongs to the event loop it is used in."""

    name = "firecracker"

    def __init__(self, settings: Settings, *, rates: api.Rates | None = None) -> None:
        """`rates`: bounds of every machine's devices; None: those of the settings."""
        self._settings = settings
        self._rates = rates or api.Rates(
            disk=api.Rate(*settings.disk_rate), network=api.Rate(*settings.network_rate)
        )
        self._capabilities: Capabilities | None = None
        self._probing = asyncio.Lock()
        self._digests = snapshot.Digests()
        self._traits: versions.Traits | None = None

    # -- what this host can do ----------------------------------------------------------------------------

    async def capabilities(self) -> Capabilities:
        async with self._probing:
            if self._capabilities is None:
                self._capabilities = await self._probe()
            return self._capabilities

    async def _probe(self) -> Capabilities:
        firecracker = probe.find(self._settings.firecracker)
        program, jailing = firecracker, probe.find(self._settings.jailer)
        if os.geteuid() != 0:
            raise HostSetupError(
                "Firecracker's jailer needs root", hint="run the server as root, or use QEMU as a user"
            )
        self._traits = versions.traits(await probe.version(program, jailing))
        if self._traits.named_exec and "firecracker" not in Path(firecracker).name:
            raise HostSetupError(
                f"the jailer of Firecracker {self._traits.text} takes no program called {Path(firecracker).name}",
                hint="give it a name with `firecracker` in it",
            )
        cache = self._settings.cache / "probe"
        if self._settings.accel == "tcg":
            raise HostSetupError(
                "LLM4AGENTS_ACCEL=tcg asks for software emulation", hint="Firecracker has none"
            )
        why = await probe.why_not_kvm(firecracker, cache)
        if why is not None:
            raise HostSetupError(why, hint="Firecracker runs on KVM alone; QEMU can do without")
        if warning := versions.advice(self._traits.version):
            _log.warning(warning)
        await asyncio.to_thread(jail.sweep, self._settings.state)
        return Capabilities(
            vmm=self.name,
            version=self._traits.text,
            accelerator="kvm",
            why_not_kvm=None,
            private_memory_clone=True,
            differential_pause=await asyncio.to_thread(pages.readable_children, uids.some_uid()),
            nested=False,
            cpu=f"host {host.cpu_identity()}",
            tsc_khz=await host.tsc_khz(cache),
            disk_format="raw",
            bounds_files=False,
            stops_when_full=False,
        )

    def identity(self, spec: MachineSpec, capabilities: Capabilities) -> dict[str, str]:
        return snapshot.identity(self.name, spec, capabilities, api.layout_digest(spec))

    def refuses(self, kernel_release: str, capabilities: Capabilities) -> str | None:
        return None

    # -- machines -----------------------------------------------------------------------------------------

    async def boot(self, spec: MachineSpec, placement: Placement) -> FirecrackerMachine:
        can = await self.capabilities()
        api.check(spec, spec.disks)
        files = {api.KERNEL: spec.kernel, api.INITRD: spec.initrd}
        machine = await self._start(spec, spec.disks, placement, can, files)
        try:
            await machine.start(api.configure(spec, self._rates))
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
    ) -> FirecrackerMachine:
        can = await self.capabilities()
        snapshot.check_identity(frozen, self.identity(frozen.spec, can))
        base = self._digests.of(frozen.path)
        if diff is not None:
            snapshot.check_diff(diff, frozen, base)
        api.check(frozen.spec, disks)
        size = frozen.spec.memory_mib * _MIB
        memory = frozen.path / snapshot.MEMORY
        _check_size(memory, size)
        async with contextlib.AsyncExitStack() as stack:
            parts = await stack.enter_async_context(Parts(diff)) if diff is not None else None
            state = _whole(parts.state) if parts is not None else _state(frozen)
            machine = await self._start(
                frozen.spec, disks, placement, can, {api.MEMORY: memory}, base=base, state=state
            )
            volumes = [disk.slot for disk in disks if disk.slot in api.VOLUME_SLOTS]
            also = [*map(api.replace_drive, volumes), *api.limit(self._rates)]
            try:
                await machine.load(parts, size, also)
            except BaseException:
                await asyncio.shield(machine.stop())
                raise
        return machine

    async def adopt(self, record: MachineRecord) -> FirecrackerMachine | None:
        # By its run_dir, as it was made: a record of something else leads to no other's jail.
        base = jail.base_of(record.run_dir, self._settings.state)
        layout = Layout(base, str(record.extra["program"]))

        def find() -> FirecrackerMachine:
            return FirecrackerMachine(
                record, layout, versions.traits(versions.parse(str(record.extra["version"])))
            )

        machine = await process.adopted(record, find, FirecrackerMachine.reattach)
        if machine is None:
            await process.end_remains(record, ())
            await asyncio.to_thread(jail.remove, layout.base)
        return machine

    async def release(self, snapshot_path: Path) -> None:
        self._digests.forget(snapshot_path)

    async def close(self) -> None:
        """Nothing is held; machines live on."""

    # -- parts --------------------------------------------------------------------------------------------

    async def _start(
        self,
        spec: MachineSpec,
        disks: tuple[Disk, ...],
        placement: Placement,
        can: Capabilities,
        files: Mapping[str, Path],
        *,
        base: str | None = None,
        state: bytes | None = None,
    ) -> FirecrackerMachine:
        """Start Firecracker through shim and jailer, up to its API. `files`, read-only, and `disks` are in its jail by
        their names; of a clone also `state`, and `base` is the digest of what it is a clone of."""
        assert self._traits is not None
        program, run_dir = probe.find(self._settings.firecracker), placement.run_dir
        layout = Layout(jail.base_of(run_dir, self._settings.state), Path(program).name)
        for name in (shim_.EXIT, shim_.DEADLINE, shim_.LINK_SOCKET):
            (run_dir / name).unlink(missing_ok=True)
        if placement.deadline_unix is not None:
            shim_.write_deadline(run_dir, placement.deadline_unix)
        with contextlib.ExitStack() as stack:
            lease = uids.lease(placement.id)
            stack.callback(os.close, lease.fd)
            binds, disk_bytes_max, locked = _bound(layout, disks, files, lease.uid, stack)
            slots = [disk.slot for disk in disks]
            empty = [slot for slot in api.VOLUME_SLOTS if slot not in slots]
            try:
                jail.make(layout, run_dir, [*slots, *files], empty, lease.uid)
                if state is not None:
                    jail.put(layout, api.STATE, state, lease.uid)
                netns = await _namespace(placement, lease.uid, stack)
                asked = None
                if placement.serve:
                    asked = stack.enter_context(
                        process.listen(run_dir, shim_.LINK_SOCKET, socket.SOCK_SEQPACKET)
                    )
                    asked.setblocking(False)
                bounds = Bounds(
                    (spec.memory_mib + limits.VMM_MEMORY_MIB) * _MIB,
                    limits.VMM_PROCESSES_MAX,
                    spec.vcpus,
                    self._settings.io_max,
                )
                cgroup, notes = joined(self._settings, stack, placement.id, bounds)
                made = stack.enter_context(watched(layout.root))
                launch = shim_.Launch(
                    argv=jailer.argv(
                        probe.find(self._settings.jailer),
                        program,
                        layout,
                        uid=lease.uid,
                        netns=f"/proc/{os.getpid()}/fd/{netns}",
                        file_bytes_max=disk_bytes_max + _SLACK_BYTES,
                    ),
                    env={},
                    fds=[],
                    run_dir=run_dir,
                    rlimits={"core": 0, "nofile": jailer.FILES_MAX},
                    hold=[lease.fd, *locked],
                    serve=placement.serve,
                    serve_socket=asked.fileno() if asked is not None else None,
                    unlink=[shim_.DEADLINE, shim_.LINK_SOCKET],
                    launcher=shim_.Launcher(binds, cgroup),
                )
                machine = await self._machine(
                    await shim_.start(launch),
                    placement,
                    layout,
                    lease.uid,
                    self.identity(spec, can),
                    spec,
                    base,
                    notes,
                )
            except BaseException as error:
                jail.remove(layout.base)
                for name in shim_.LOGS:
                    (run_dir / name).unlink(missing_ok=True)
                if isinstance(error, OSError) and not isinstance(error, LLM4AgentsError):
                    raise CapacityError(
                        f"the jail of {placement.id} cannot be made: {error.strerror or error}"
                    ) from error
                raise
            try:
                # Up to here the jailer has opened the namespace by our descriptor's name.
                await machine.attach(made)
            except BaseException:
                await asyncio.shield(machine.stop())
                raise
        return machine

    async def _machine(
        self,
        started: shim_.Started,
        placement: Placement,
        layout: Layout,
        uid: int,
        identity: dict[str, str],
        spec: MachineSpec,
        base: str | None,
        notes: Mapping[str, str],
    ) -> FirecrackerMachine:
        assert self._traits is not None
        record = MachineRecord(
            driver=self.name,
            id=placement.id,
            run_dir=placement.run_dir,
            shim_pid=started.shim_pid,
            shim_start_ticks=started.shim_start_ticks,
            vmm_pid=started.vmm_pid,
            vmm_start_ticks=started.vmm_start_ticks,
            uid=uid,
            extra={
                "host_boot_id": procfs.host_boot_id(),
                "jail": {**started.jail, **notes},
                given.FILES: {},  # all it has it opens in its root
                "program": layout.program,
                "version": self._traits.text,
                **({"base": base} if base is not None else {"identity": identity}),
            },
        )
        try:
            if base is not None:
                return FirecrackerMachine(record, layout, self._traits, identity=identity)
            return FirecrackerMachine(record, layout, self._traits, spec=spec, identity=identity)
        except ProcessLookupError as error:
            raise await process.ended_at_once(record) from error


async def _namespace(placement: Placement, uid: int, stack: contextlib.ExitStack) -> int:
    """The network namespace the VMM is to be in, whose tap it may open: the placement's, or one with nothing in it."""
    if placement.netns is None or placement.tap is None:
        netns = await darkness.make(uid)
        stack.callback(os.close, netns)
        return netns
    darkness.own(placement.tap, uid)
    if placement.release_tap is not None:
        placement.release_tap()
    return placement.netns


def _bound(
    layout: Layout,
    disks: Iterable[Disk],
    files: Mapping[str, Path],
    uid: int,
    stack: contextlib.ExitStack,
) -> tuple[list[shim_.Bind], int, list[int]]:
    """What is seen in the jail, open until `stack` ends: `files` read-only, `disks` as they say; writable ones become
    the VMM's own. And the bytes of the largest of those, and descriptors whose locks are to last as long as the VMM."""
    binds, size_max, locked = [], 0, []
    for name, path in files.items():
        binds.append(shim_.Bind(_readable(path, stack), str(layout.inside(name))))
    for disk in disks:
        if disk.read_only:
            binds.append(shim_.Bind(_readable(disk.path, stack), str(layout.inside(disk.slot))))
            continue
        try:
            fd = os.open(disk.path, os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            os.fchown(fd, uid, -1)
        except OSError as error:
            raise HostSetupError(f"the disk {disk.path} cannot be opened: {error.strerror}") from error
        if disk.lasts:
            slots.lock(disk, fd)
            locked.append(fd)
        size_max = max(size_max, os.fstat(fd).st_size)
        binds.append(shim_.Bind(fd, str(layout.inside(disk.slot)), read_only=False))
    return binds, size_max, locked


def _readable(path: Path, stack: contextlib.ExitStack) -> int:
    """The file, open, with the right for the VMM's uid to read it. Raises HostSetupError.

    A VMM of its own uid opens it by name. What only root may read is made readable to everybody where nobody else
    may enter its directory.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        mode = os.fstat(fd).st_mode
        if not mode & stat.S_IROTH:
            if path.parent.stat().st_mode & (stat.S_IXOTH | stat.S_IXGRP):
                raise HostSetupError(
                    f"{path} may be read by root alone, and its directory entered by others",
                    hint=f"chmod o+r {path}, if everybody here may read it",
                )
            os.fchmod(fd, stat.S_IMODE(mode) | stat.S_IRGRP | stat.S_IROTH)
        return fd
    except OSError as error:
        if isinstance(error, LLM4AgentsError):
            raise
        raise HostSetupError(f"{path} cannot be read: {error.strerror}", hint=_REBUILD) from error


def _state(frozen: Snapshot) -> bytes:
    try:
        return (frozen.path / snapshot.STATE).read_bytes()
    except OSError as error:
        raise HostSetupError(f"{frozen.path} is not whole: {error.strerror}", hint=_REBUILD) from error


def _whole(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def _check_size(memory: Path, size: int) -> None:
    try:
        found = memory.stat().st_size
    except OSError as error:
        raise HostSetupError(f"{memory} cannot be read: {error.strerror}", hint=_REBUILD) from error
    if found != size:
        raise VersionMismatchError(
            f"{memory} is {found} bytes, not the {size} its manifest says",
            hint="remove the template and build it again",
        )
