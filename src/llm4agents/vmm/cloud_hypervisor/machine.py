"""A live Cloud Hypervisor process as a `Machine`: its API, its channel, its snapshots.

Not here: how it is started (driver), what it is told (api), what the files of a snapshot are (frozen).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llm4agents import limits
from llm4agents.errors import (
    ConflictError,
    ConnectionLostError,
    LLM4AgentsError,
    SandboxDiedError,
    VmmError,
)
from llm4agents.vmm import checkpoint, clearing, pages, snapshot
from llm4agents.vmm.base import (
    Checkpoint,
    Disk,
    MachineEvent,
    MachineRecord,
    MachineSpec,
    Snapshot,
)
from llm4agents.vmm.cloud_hypervisor import api, frozen, vsock
from llm4agents.vmm.cloud_hypervisor.place import API_SOCKET, IO
from llm4agents.vmm.process import LiveMachine, connect, describe
from llm4agents.vmm.unixhttp import UnixHttp

NAME = "cloud-hypervisor"
_RAM = "/memfd:ch_ram"


class CloudHypervisorMachine(LiveMachine):
    """See `vmm.base.Machine`. Belongs to the event loop it was made in."""

    sockets = (API_SOCKET,)

    def __init__(
        self,
        record: MachineRecord,
        *,
        spec: MachineSpec | None = None,
        identity: dict[str, str] | None = None,
        volumes: Sequence[tuple[str, int]] = (),
    ) -> None:
        """`volumes`: slot and bytes of each disk that its template had nothing in.

        Raises ProcessLookupError when shim or VMM is gone, OSError when it has no API socket.
        """
        self._spec, self._identity = spec, identity
        self._volumes = list(volumes)
        self._running: bool | None = None
        self._api = UnixHttp(connect(record.run_dir, API_SOCKET), "Cloud Hypervisor")
        try:
            super().__init__(record)
        except BaseException:
            self._api.close("the virtual machine ended")
            raise

    def _let_go(self) -> None:
        self._api.close("the virtual machine ended")

    def _clear_away(self) -> None:
        clear_away(self.record)

    # -- what it is asked -----------------------------------------------------------------------------------

    async def ask(
        self,
        endpoint: str,
        body: Any = None,
        *,
        method: str = "PUT",
        fds: Sequence[int] = (),
        timeout: float = limits.RESTORE_TIMEOUT_S,
    ) -> Any:
        """One request; ConflictError when the VM has ended, SandboxDiedError when it does now, VmmError when it
        refuses.

        One that does not answer in time has no use any more, and is ended: a guest can bring its monitor to that
        (seen: after a frame that its tap refuses, the NIC's thread is gone and a pause waits for it for ever).
        """
        self._check_alive(endpoint)
        answer = self._api.request(method, api.ROOT + endpoint, body, timeout=timeout, fds=fds)
        try:
            return await self._answer(endpoint, answer)
        except ConnectionLostError as error:
            await asyncio.shield(self.stop())
            raise SandboxDiedError(
                f"the virtual machine {self.record.id} was ended: {error.message}", hint="its monitor hangs"
            ) from error

    async def started(self, config: dict[str, Any], tap: int) -> None:
        """Boot what `config` describes, its NIC on `tap`. Raises BootError with its words when it does not."""
        try:
            async with asyncio.timeout(limits.BOOT_TIMEOUT_S):
                await self.ask(api.CREATE, config)
                await self.ask(api.ADD_NET, api.net(), fds=[tap])
                await self.ask(api.BOOT, timeout=limits.BOOT_TIMEOUT_S)  # it reads the kernel
        except (LLM4AgentsError, TimeoutError) as error:
            raise await self._boot_error("did not start", error) from error
        self._running = True
        for name in (api.KERNEL, api.INITRD):
            # So that a guest that resets is not booted again (`api`).
            (self.record.run_dir / IO / name).unlink(missing_ok=True)

    async def load(self, tap: int) -> None:
        """Restore what lies below its IO, its NIC on `tap`; afterwards it is paused. Raises BootError."""
        try:
            async with asyncio.timeout(limits.RESTORE_TIMEOUT_S):
                await self.ask(api.RESTORE, api.restore(), fds=[tap])
                if self._spec is not None:
                    frozen.mapped(self.record.vmm_pid, self._spec.memory_mib << 20)
        except (LLM4AgentsError, TimeoutError) as error:
            raise await self._boot_error("did not load its snapshot", error) from error
        self._running = False
        with self._io() as io:
            frozen.clear(io)

    async def greet(self) -> None:
        """An adopted machine's first question: does it run?"""
        await self._state()

    async def _state(self) -> bool:
        """Whether its vCPUs run; VmmError when it is in neither of both states."""
        info = await self.ask(api.INFO, method="GET")
        state = info.get("state") if isinstance(info, dict) else None
        if state not in ("Running", "Paused"):
            raise VmmError(f"the virtual machine {self.record.id} is in the state {state!r}")
        self._running = state == "Running"
        return self._running

    # -- running and standing still --------------------------------------------------------------------------

    async def pause(self) -> None:
        self._check_alive("pause")
        if self._running is None:
            await self._state()
        if self._running:
            await self.ask(api.PAUSE)
            self._running = False
            self._publish(MachineEvent("paused"))

    async def resume(self) -> None:
        self._check_alive("resume")
        if self._running is None:
            await self._state()
        if self._running:
            return
        await self.ask(api.RESUME)
        self._running = True
        self._publish(MachineEvent("resumed"))
        # Not before: a device that stands still cannot be stopped again to be resized (it would wait for ever).
        while self._volumes:
            await self.ask(api.RESIZE_DISK, api.resize_disk(*self._volumes.pop()))

    async def channel(self) -> socket.socket:
        self._check_alive("connect to")
        path = self.record.run_dir / IO / api.VSOCK
        patience = limits.RESTORE_TIMEOUT_S if "base" in self.record.extra else limits.BOOT_TIMEOUT_S
        try:
            return await vsock.connect(path, self._end.done, timeout=patience)
        except ConnectionLostError as error:
            if (ended := await self._ended_within(0.5)) is not None:
                raise SandboxDiedError(
                    f"the virtual machine {self.record.id} ended: {describe(ended)}"
                ) from error
            raise ConflictError(
                f"the agent channel of {self.record.id} cannot be connected: {error.message}"
            ) from error

    # -- freezing --------------------------------------------------------------------------------------------

    async def snapshot(self, directory: Path) -> Snapshot:
        self._check_alive("freeze")
        if self._spec is None or self._identity is None or "base" in self.record.extra:
            raise ConflictError("only a machine this server booted can be frozen: a clone's is a checkpoint")
        await self._check_still("freeze")
        async with snapshot.making(directory, "the snapshot"):
            with self._io() as io:
                frozen.clear(io)
                try:
                    await self.ask(api.SNAPSHOT, api.snapshot(), timeout=limits.BUILD_TIMEOUT_S)
                    state = await asyncio.to_thread(frozen.read_state, io)
                    state = frozen.in_one_file(state, self._spec.memory_mib << 20)
                    size = await asyncio.to_thread(frozen.save_memory, io, directory / snapshot.MEMORY)
                    await asyncio.to_thread(snapshot.write_part, directory / snapshot.STATE, state)
                finally:
                    frozen.clear(io)
            made = Snapshot(directory, self._spec, self._identity, size)
            await asyncio.to_thread(snapshot.write_manifest, made)
        return made

    async def checkpoint(self, directory: Path, *, base: Snapshot) -> Checkpoint:
        await self._check_still("copy")
        wanted = await checkpoint.over(base, directory, self.record, self._identity)
        size, pid = base.spec.memory_mib << 20, self.record.vmm_pid
        with (base.path / snapshot.MEMORY).open("rb") as under:

            async def save_pages(out: int) -> pages.Copied:
                if "base" in self.record.extra:
                    return await frozen.save_pages(pid, under.fileno(), out)
                # Booted, not cloned (a cold resume): its memory is a file of its own.
                ram = _ram_of(pid, size)
                try:
                    return await pages.save_shared(ram, size, under.fileno(), out)
                finally:
                    os.close(ram)

            return await checkpoint.make(directory, wanted, self._save_devices, save_pages)

    async def _save_devices(self, target: int) -> None:
        """Write the state of all devices but memory into the file `target`."""
        with self._io() as io:
            frozen.clear(io)
            frozen.forbid_memory(io)
            try:
                refused = None
                try:
                    await self.ask(api.SNAPSHOT, api.snapshot())
                except VmmError as error:
                    refused = error
                frozen.check_forbidden(io)
                try:
                    state = await asyncio.to_thread(frozen.read_state, io)
                except VmmError as error:
                    raise refused or error from error
            finally:
                frozen.clear(io)
        with os.fdopen(os.dup(target), "wb") as file:
            file.write(state)

    async def _check_still(self, act: str) -> None:
        self._check_alive(act)
        if await self._state():
            raise ConflictError(
                f"cannot {act} the virtual machine {self.record.id} while it runs: pause it first"
            )

    @contextlib.contextmanager
    def _io(self) -> Iterator[int]:
        """The open directory the VMM may write to."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self.record.run_dir / IO, flags)
        try:
            yield fd
        finally:
            os.close(fd)

    # -- disks ------------------------------------------------------------------------------------------------

    async def switch_disk(self, slot: str, overlay: Disk) -> None:
        self._check_alive("switch a disk of")
        raise ConflictError(
            "Cloud Hypervisor's disks are whole files: they are copied while the machine stands still, not layered"
        )

    async def disk_inode(self, slot: str) -> int | None:
        self._check_alive("look at a disk of")
        inode = self.record.extra.get("disks", {}).get(slot)
        return None if inode is None else int(inode)

    async def flush_disks(self) -> None:
        """A pause waits for writes under way, and nothing is kept back: they are in the files."""
        running = await self._state()
        await self.pause()
        if running:
            await self.resume()


def clear_away(record: MachineRecord) -> None:
    """Remove the directory the VMM wrote to: links in it are removed, not followed."""
    clearing.remove(record.run_dir / IO)


def _ram_of(pid: int, size: int) -> int:
    """The memfd of a booted machine's memory; the caller closes it. Raises ConflictError when it is in two."""
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if not str(entry.readlink()).startswith(_RAM):
                    continue
                fd = os.open(entry, os.O_RDONLY | os.O_CLOEXEC)
                if os.fstat(fd).st_size == size:
                    return fd
                os.close(fd)
    except OSError as error:
        raise pages.unreadable(error) from error
    # Above 3 GiB there are two, on either side of the hole for devices.
    raise ConflictError(
        f"the {size >> 20} MiB of a machine that was booted from its disk cannot be looked through for what changed",
        hint="under Cloud Hypervisor a cold resume can be paused again up to 3072 MiB",
    )
