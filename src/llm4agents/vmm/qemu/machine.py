"""A live QEMU process as a `Machine`: its monitor, its channel, what is frozen and loaded.

Not here: how it is started (driver), what it is told on its command line (command), its life as a process
(`vmm.process`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from llm4agents import limits
from llm4agents.errors import (
    ConflictError,
    CorruptSnapshotError,
    LLM4AgentsError,
    SandboxDiedError,
    VmmError,
)
from llm4agents.vmm import checkpoint, given, memory, pages, snapshot
from llm4agents.vmm.base import Checkpoint, Disk, MachineEvent, MachineRecord, MachineSpec, Snapshot
from llm4agents.vmm.process import LiveMachine, connect, printable
from llm4agents.vmm.qemu import disks
from llm4agents.vmm.qemu.qmp import Event, Qmp

AGENT_SOCKET, QMP_SOCKET = "agent.sock", "qmp.sock"
_WORDS_MAX = 300
_ANNOUNCEMENT = {"announce-rounds": 1, "announce-initial": 100_000}
"""Where a clone's address is, its host knows: as few packets and interrupts to tell it as can be, and late.
None at all (0 rounds) and QEMU 7.2 dies of a reset of the NIC (seen), which a guest's root can ask for."""
_IGNORE_SHARED = [{"capability": "x-ignore-shared", "state": True}, {"capability": "events", "state": True}]
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _doubting(
    act: Callable[Concatenate[QemuMachine, _P], Coroutine[Any, Any, _R]],
) -> Callable[Concatenate[QemuMachine, _P], Coroutine[Any, Any, _R]]:
    """For what reads QEMU's answers: one of another shape than QEMU's is VmmError, and no error of ours."""

    @functools.wraps(act)
    async def doubted(machine: QemuMachine, /, *args: _P.args, **words: _P.kwargs) -> _R:
        try:
            return await act(machine, *args, **words)
        except LLM4AgentsError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise VmmError(
                f"the monitor of {machine.record.id} gave an answer that makes no sense",
                hint="end the sandbox",
            ) from error

    return doubted


class QemuMachine(LiveMachine):
    """See `vmm.base.Machine`."""

    sockets = (AGENT_SOCKET, QMP_SOCKET)

    def __init__(
        self,
        record: MachineRecord,
        qmp_socket: socket.socket,
        *,
        spec: MachineSpec | None = None,
        identity: dict[str, str] | None = None,
        channel: socket.socket | None = None,
        memory_fd: int | None = None,
    ) -> None:
        """Takes over both sockets and `memory_fd`. Raises ProcessLookupError when shim or VMM is gone."""
        self._spec, self._identity = spec, identity
        self._channel, self._memory_fd = channel, memory_fd
        self._migration: asyncio.Future[str] | None = None
        self._unused: list[disks.Given] = []
        super().__init__(record)
        self._qmp = Qmp(qmp_socket, self._on_event)

    def _let_go(self) -> None:
        self._qmp.close("the virtual machine ended")
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._memory_fd is not None:
            os.close(self._memory_fd)
            self._memory_fd = None

    # -- running and standing still -----------------------------------------------------------------------

    async def pause(self) -> None:
        await self._command("stop")

    async def resume(self) -> None:
        await self._command("cont")
        sent = None
        while self._unused:
            unused = self._unused.pop()
            sent = self._qmp.send("remove-fd", fdset_id=unused["fdset-id"], fd_=unused["fd"])
        if sent is not None:
            sent.add_done_callback(lambda _: given.forget_written(self.record))

    async def channel(self) -> socket.socket:
        self._check_alive("connect to")
        if self._channel is not None:
            channel, self._channel = self._channel, None
            return channel
        try:
            return connect(self.record.run_dir, AGENT_SOCKET)
        except OSError as error:
            raise ConflictError(
                f"the agent channel of {self.record.id} cannot be connected: {error}"
            ) from error

    async def _command(self, command: str, **arguments: Any) -> Any:
        """One monitor command; ConflictError when the VM has ended, SandboxDiedError when it does now."""
        return await self._answer(command, self._qmp.execute(command, **arguments))

    def _on_event(self, event: Event) -> None:
        name, data = event["event"], event.get("data", {})
        if name == "STOP":
            self._publish(MachineEvent("paused"))
        elif name == "RESUME":
            self._publish(MachineEvent("resumed"))
        elif name == "BLOCK_IO_ERROR":
            stopped = data.get("action") == "stop"
            node = data.get("node-name") or data.get("device")
            words = printable(f"{data.get('operation')} of {node}: {data.get('reason')}"[:_WORDS_MAX])
            self._publish(MachineEvent("disk_full" if stopped else "io_error", words))
        elif name == "MIGRATION":
            self._migration_is(data.get("status"))

    def _migration_is(self, status: object) -> None:
        over = status in ("completed", "failed", "cancelled")
        if over and self._migration is not None and not self._migration.done():
            self._migration.set_result(str(status))

    @_doubting
    async def greet(self) -> None:
        """First words to a monitor that is new to us; for an adopted machine also: what state is it in."""
        self._qmp.send("qmp_capabilities")
        status = await self._command("query-status")
        if status.get("status") == "io-error":
            self._found.append(MachineEvent("disk_full", "the host had no room for a write of the guest"))

    # -- freezing and loading -----------------------------------------------------------------------------

    async def load(self, state_fd: int, filled: Awaitable[object] | None = None) -> None:
        """Load the device state a snapshot kept; afterwards it is paused. Raises BootError when it cannot.

        `filled` is waited for first: the guest's memory, which devices look into when they are loaded.
        """
        self._migration = asyncio.get_running_loop().create_future()
        # Sent ahead in one go: each answer waited for would cost a turn of QEMU's main loop.
        sent = [
            self._qmp.send("qmp_capabilities"),
            self._qmp.send("migrate-set-capabilities", capabilities=_IGNORE_SHARED),
            self._qmp.send("migrate-set-parameters", **_ANNOUNCEMENT),
            self._qmp.send("getfd", fd=state_fd, fdname="state"),
        ]
        try:
            async with asyncio.timeout(limits.RESTORE_TIMEOUT_S):
                if filled is not None:
                    await filled
                sent.append(self._qmp.send("migrate-incoming", uri="fd:state"))
                await asyncio.gather(*sent)
                done = await self._migrated()
        except CorruptSnapshotError:
            raise
        except (LLM4AgentsError, TimeoutError) as error:
            raise await self._boot_error("did not load its snapshot", error) from error
        if done != "completed":
            raise await self._boot_error("did not load its snapshot", done)

    @_doubting
    async def announce(self, slots: list[str]) -> None:
        """Tell the guest that these slots hold a volume now: it was frozen with empty ones of another size."""
        for slot in slots:
            nodes = await self._command("query-named-block-nodes", flat=True)
            sizes = [int(node["image"]["virtual-size"]) for node in nodes if node.get("node-name") == slot]
            await self._command("block_resize", node_name=slot, size=sizes.pop(0) if sizes else None)

    async def _migrated(self) -> str:
        """How the migration under way went, `completed` or another word; also when the VM ends in it."""
        assert self._migration is not None
        both: set[asyncio.Future[Any]] = {self._migration, self._end}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        return self._migration.result() if self._migration.done() else "the process ended"

    async def started(self) -> None:
        """Wait for the monitor of a VM that boots. Raises BootError with QEMU's words when it ends."""
        capabilities = self._qmp.send("qmp_capabilities")
        events = self._qmp.send("migrate-set-capabilities", capabilities=_IGNORE_SHARED)
        try:
            async with asyncio.timeout(limits.RESTORE_TIMEOUT_S):
                await asyncio.gather(capabilities, events)
        except (LLM4AgentsError, TimeoutError) as error:
            raise await self._boot_error("did not start", error) from error

    async def snapshot(self, directory: Path) -> Snapshot:
        self._check_alive("freeze")
        if self._memory_fd is None or self._spec is None or self._identity is None:
            raise ConflictError(
                "only a machine this server booted can be frozen: a clone's memory is private"
            )
        await self._check_still("freeze")
        async with snapshot.making(directory, "the snapshot"):
            await self._save_state(directory / snapshot.STATE)
            size = await asyncio.to_thread(memory.save, self._memory_fd, directory / snapshot.MEMORY)
            frozen = Snapshot(directory, self._spec, self._identity, size)
            await asyncio.to_thread(snapshot.write_manifest, frozen)
        return frozen

    async def checkpoint(self, directory: Path, *, base: Snapshot) -> Checkpoint:
        await self._check_still("copy")
        wanted = await checkpoint.over(base, directory, self.record, self._identity)
        size = base.spec.memory_mib << 20
        with contextlib.ExitStack() as stack:
            file, private = pages.file_of(self.record.vmm_pid, size)
            stack.callback(os.close, file)

            async def save_pages(out: int) -> pages.Copied:
                if private:
                    return await pages.save(self.record.vmm_pid, size, file, out)
                # Booted, not cloned (a cold resume): it is compared with the base as it lies on disk.
                with (base.path / snapshot.MEMORY).open("rb") as under:
                    return await pages.save_shared(file, size, under.fileno(), out)

            return await checkpoint.make(directory, wanted, self._save_devices, save_pages)

    @_doubting
    async def _save_devices(self, target: int) -> None:
        """Write the state of all devices but memory into the file `target`."""
        # QEMU wants a descriptor that can write and nothing else.
        writer = os.open(f"/proc/self/fd/{target}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            given.note(self.record, os.fstat(writer), "write")
            added = await self._command("add-fd", fd=writer)
        finally:
            os.close(writer)
        self._unused.append({"fdset-id": int(added["fdset-id"]), "fd": int(added["fd"])})
        filename = f"/dev/fdset/{self._unused[-1]['fdset-id']}"
        await self._command("xen-save-devices-state", filename=filename, live=False)

    @_doubting
    async def _check_still(self, act: str) -> None:
        if (await self._command("query-status")).get("running"):
            raise ConflictError(
                f"cannot {act} the virtual machine {self.record.id} while it runs: pause it first"
            )

    # -- disks --------------------------------------------------------------------------------------------

    @_doubting
    async def switch_disk(self, slot: str, overlay: Disk) -> None:
        await self._check_still("switch a disk of")
        with contextlib.suppress(OSError):  # said by who opens it
            given.note(self.record, overlay.path.stat(), "read-write")
        self._unused += await disks.switch(self._command, slot, overlay)

    @_doubting
    async def disk_inode(self, slot: str) -> int | None:
        return await disks.inode(self._command, self.record.vmm_pid, slot)

    @_doubting
    async def flush_disks(self) -> None:
        running = (await self._command("query-status")).get("running")
        await self._command("stop")  # stopping, also again, writes out what QEMU holds of every image
        if running:
            await self._command("cont")

    async def _save_state(self, path: Path) -> None:
        self._migration = asyncio.get_running_loop().create_future()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            await self._command("getfd", fd=fd, fdname="state")
            await self._command("migrate", uri="fd:state")
            async with asyncio.timeout(limits.RESTORE_TIMEOUT_S):
                done = await self._migrated()
            if done != "completed":
                raise SandboxDiedError(f"QEMU could not write the state of {self.record.id}: {done}")
            await asyncio.to_thread(os.fsync, fd)
        finally:
            os.close(fd)
