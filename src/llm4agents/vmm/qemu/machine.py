"""A live QEMU process as a `Machine`: its monitor, its channel, its end.

Not here: how it is started (driver), what it is told on its command line (command).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

from llm4agents import limits
from llm4agents.errors import (
    BootError,
    CapacityError,
    ConflictError,
    CorruptSnapshotError,
    LLM4AgentsError,
    SandboxDiedError,
    VmmError,
)
from llm4agents.vmm import memory, pages, procfs, rlimits, snapshot
from llm4agents.vmm import shim as shim_
from llm4agents.vmm.base import (
    Checkpoint,
    Disk,
    Exit,
    MachineEvent,
    MachineRecord,
    MachineSpec,
    Snapshot,
    Stats,
)
from llm4agents.vmm.qemu import checkpoint, disks
from llm4agents.vmm.qemu.qmp import Event, Qmp
from llm4agents.vmm.waiting import readable

AGENT_SOCKET, QMP_SOCKET = "agent.sock", "qmp.sock"
EVENTS_KEPT_MAX = 64
_ANNOUNCEMENT = {"announce-rounds": 1, "announce-initial": 100_000}
"""Where a clone's address is, its host knows: as few packets and interrupts to tell it as can be, and late.
None at all (0 rounds) and QEMU 7.2 dies of a reset of the NIC (seen), which a guest's root can ask for."""
_IGNORE_SHARED = [{"capability": "x-ignore-shared", "state": True}, {"capability": "events", "state": True}]


def connect(run_dir: Path, name: str) -> socket.socket:
    """A connection to a socket of `run_dir`, non-blocking; OSError when nobody listens."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    directory = os.open(run_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sock.setblocking(False)
        # Through the descriptor: a socket's path has 107 bytes at most, a run_dir may be longer.
        sock.connect(f"/proc/self/fd/{directory}/{name}")
    except BaseException:
        sock.close()
        raise
    finally:
        os.close(directory)
    return sock


class QemuMachine:
    """See `vmm.base.Machine`. Belongs to the event loop it was made in."""

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
        self.record = record
        self._spec, self._identity = spec, identity
        self._channel, self._memory_fd = channel, memory_fd
        self._queues: list[asyncio.Queue[MachineEvent]] = []
        self._found: deque[MachineEvent] = deque(maxlen=EVENTS_KEPT_MAX)
        self._migration: asyncio.Future[str] | None = None
        self._stopping = False
        self._unused: list[disks.Given] = []
        self._pidfds = [os.pidfd_open(record.shim_pid), os.pidfd_open(record.vmm_pid)]
        self._qmp = Qmp(qmp_socket, self._on_event)
        self._end = asyncio.create_task(self._watch(), name=f"watch {record.id}")

    # -- life ---------------------------------------------------------------------------------------------

    async def _watch(self) -> Exit:
        for fd in self._pidfds:  # the VMM after the shim: when that was killed, the kernel ends this one
            await readable(fd)
        with contextlib.suppress(ChildProcessError):  # not our child when adopted: init reaps it
            os.waitpid(self.record.shim_pid, os.WNOHANG)  # noqa: ASYNC222
        ended = shim_.read_exit(self.record.run_dir)
        if ended.reason == "lost":
            for name in (AGENT_SOCKET, QMP_SOCKET, shim_.DEADLINE, shim_.LINK_SOCKET):
                (self.record.run_dir / name).unlink(missing_ok=True)
        self._close()
        self._publish(MachineEvent("ended", describe(ended)))
        return ended

    def _close(self) -> None:
        self._qmp.close("the virtual machine ended")
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._memory_fd is not None:
            os.close(self._memory_fd)
            self._memory_fd = None
        for fd in self._pidfds:
            os.close(fd)
        self._pidfds = []

    async def wait(self) -> Exit:
        return await asyncio.shield(self._end)

    async def stop(self) -> Exit:
        if not self._end.done():
            self._stopping = True
            self._signal(0, signal.SIGTERM)
            try:
                await asyncio.wait_for(self.wait(), limits.VM_STOP_TIMEOUT_S)
            except TimeoutError:
                # The shim does not answer: with it the kernel kills the VMM.
                self._signal(0, signal.SIGKILL)
                self._signal(1, signal.SIGKILL)
        ended = await self.wait()
        for name in shim_.LOGS:
            (self.record.run_dir / name).unlink(missing_ok=True)
        return ended

    def _signal(self, which: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, IndexError):
            signal.pidfd_send_signal(self._pidfds[which], number)

    async def detach(self) -> None:
        self._end.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._end
        self._close()

    async def set_deadline(self, unix: float | None, *, act: shim_.Act = "kill") -> None:
        self._check_alive("move the deadline of")
        shim_.write_deadline(self.record.run_dir, unix, act)

    def limit_files(self, bytes_max: int) -> None:
        self._check_alive("limit the files of")
        # SIGXFSZ is ignored in the VMM (the shim does it), so that the write fails; that EFBIG is the guest's to
        # hear and no reason to stand still is `werror=enospc`.
        try:
            rlimits.limit_files(self.record.vmm_pid, bytes_max)
        except ProcessLookupError as error:
            raise ConflictError(f"the virtual machine {self.record.id} has ended") from error

    # -- running and standing still -----------------------------------------------------------------------

    async def pause(self) -> None:
        await self._command("stop")

    async def resume(self) -> None:
        await self._command("cont")
        while self._unused:
            given = self._unused.pop()
            self._qmp.send("remove-fd", fdset_id=given["fdset-id"], fd_=given["fd"])

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

    async def stats(self) -> Stats:
        found = procfs.stats(self.record.vmm_pid) if not self._end.done() else None
        if found is None:
            raise ConflictError(f"the virtual machine {self.record.id} has ended")
        return found

    def _check_alive(self, act: str) -> None:
        if self._end.done():
            ended = "it was let go of" if self._end.cancelled() else describe(self._end.result())
            raise ConflictError(f"cannot {act} the virtual machine {self.record.id}: {ended}")

    async def _command(self, command: str, **arguments: Any) -> Any:
        """One monitor command; ConflictError when the VM has ended, SandboxDiedError when it does now."""
        self._check_alive(command)
        try:
            return await self._qmp.execute(command, **arguments)
        except VmmError:
            raise
        except LLM4AgentsError as error:
            ended = await self._ended_within(1.0)
            if ended is None:
                raise
            raise SandboxDiedError(
                f"the virtual machine {self.record.id} ended: {describe(ended)}"
            ) from error

    async def _ended_within(self, seconds: float) -> Exit | None:
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self.wait(), seconds)
        return None

    # -- events -------------------------------------------------------------------------------------------

    def events(self) -> AsyncIterator[MachineEvent]:
        queue: asyncio.Queue[MachineEvent] = asyncio.Queue(EVENTS_KEPT_MAX)
        for event in self._found:
            queue.put_nowait(event)
        if self._end.done():
            _put(queue, MachineEvent("ended"))
        self._queues.append(queue)
        return self._read(queue)

    async def _read(self, queue: asyncio.Queue[MachineEvent]) -> AsyncIterator[MachineEvent]:
        try:
            while True:
                event = await queue.get()
                yield event
                if event.kind == "ended":
                    return
        finally:
            self._queues.remove(queue)

    def _publish(self, event: MachineEvent) -> None:
        for queue in self._queues:
            _put(queue, event)

    def _on_event(self, event: Event) -> None:
        name, data = event["event"], event.get("data", {})
        if name == "STOP":
            self._publish(MachineEvent("paused"))
        elif name == "RESUME":
            self._publish(MachineEvent("resumed"))
        elif name == "BLOCK_IO_ERROR":
            stopped = data.get("action") == "stop"
            node = data.get("node-name") or data.get("device")
            words = f"{data.get('operation')} of {node}: {data.get('reason')}"
            self._publish(MachineEvent("disk_full" if stopped else "io_error", words))
        elif name == "MIGRATION":
            self._migration_is(data.get("status"))

    def _migration_is(self, status: object) -> None:
        over = status in ("completed", "failed", "cancelled")
        if over and self._migration is not None and not self._migration.done():
            self._migration.set_result(str(status))

    def wake(self) -> None:
        """Let a VMM go on that its deadline stopped (SIGSTOP) when no server lived."""
        self._signal(1, signal.SIGCONT)

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

    async def announce(self, slots: list[str]) -> None:
        """Tell the guest that these slots hold a volume now: it was frozen with empty ones of another size."""
        for slot in slots:
            nodes = await self._command("query-named-block-nodes", flat=True)
            size = next(node["image"]["virtual-size"] for node in nodes if node.get("node-name") == slot)
            await self._command("block_resize", node_name=slot, size=size)

    async def _migrated(self) -> str:
        """How the migration under way went, `completed` or another word; also when the VM ends in it."""
        assert self._migration is not None
        both: set[asyncio.Future[Any]] = {self._migration, self._end}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        return self._migration.result() if self._migration.done() else "the process ended"

    async def _boot_error(self, what: str, why: object) -> BootError:
        ended = await self._ended_within(0.5)
        tail = ended.console_tail if ended is not None else shim_.console_tail(self.record.run_dir)
        words = f"{describe(ended)}" if ended is not None else str(why) or "no answer in time"
        return BootError(
            f"the virtual machine {self.record.id} {what}: {words}", console_tail=printable(tail)[-4000:]
        )

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
        try:
            await asyncio.to_thread(directory.mkdir, 0o700)
        except FileExistsError:
            raise ConflictError(f"{directory} exists already") from None
        try:
            await self._save_state(directory / snapshot.STATE)
            size = await asyncio.to_thread(memory.save, self._memory_fd, directory / snapshot.MEMORY)
            frozen = Snapshot(directory, self._spec, self._identity, size)
            await asyncio.to_thread(snapshot.write_manifest, frozen)
        except BaseException as error:
            shutil.rmtree(directory, ignore_errors=True)
            if isinstance(error, OSError) and not isinstance(error, LLM4AgentsError):
                raise CapacityError(f"the snapshot could not be written: {error}") from error
            raise
        return frozen

    async def checkpoint(self, directory: Path, *, base: Snapshot) -> Checkpoint:
        await self._check_still("copy")
        digest = await asyncio.to_thread(snapshot.digest, base.path)
        if self.record.extra.get("base", digest) != digest:
            raise ConflictError(f"the machine {self.record.id} is no clone of {base.path}")
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

            # A booted one may be of another QEMU than its base was; its kernel is in its pages.
            own = self._identity or self.record.extra.get("identity") or base.identity
            identity = {**own, "kernel": base.identity.get("kernel", "")}
            frozen = Snapshot(directory, base.spec, identity, 0, kind="diff", base=digest)
            return await checkpoint.make(directory, frozen, self._save_devices, save_pages)

    async def _save_devices(self, target: int) -> None:
        """Write the state of all devices but memory into the file `target`."""
        # QEMU wants a descriptor that can write and nothing else.
        writer = os.open(f"/proc/self/fd/{target}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            given = await self._command("add-fd", fd=writer)
        finally:
            os.close(writer)
        self._unused.append({"fdset-id": int(given["fdset-id"]), "fd": int(given["fd"])})
        filename = f"/dev/fdset/{self._unused[-1]['fdset-id']}"
        await self._command("xen-save-devices-state", filename=filename, live=False)

    async def _check_still(self, act: str) -> None:
        if (await self._command("query-status")).get("running"):
            raise ConflictError(
                f"cannot {act} the virtual machine {self.record.id} while it runs: pause it first"
            )

    # -- disks --------------------------------------------------------------------------------------------

    async def switch_disk(self, slot: str, overlay: Disk) -> None:
        await self._check_still("switch a disk of")
        self._unused += await disks.switch(self._command, slot, overlay)

    async def disk_inode(self, slot: str) -> int | None:
        return await disks.inode(self._command, self.record.vmm_pid, slot)

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


def _put(queue: asyncio.Queue[MachineEvent], event: MachineEvent) -> None:
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(event)


def describe(ended: Exit) -> str:
    """How a VMM ended, in words."""
    if ended.reason == "deadline":
        return "its time was over"
    if ended.reason == "stopped":
        return "it was stopped"
    if ended.reason == "lost":
        return "its keeper was killed"
    if ended.signal is not None:
        return f"the virtual machine monitor was killed by signal {ended.signal}"
    lines = [line for line in printable(ended.console_tail).splitlines() if line.strip()]
    last = lines[-1][-300:] if lines else "without a word"
    return f"the guest or its monitor ended (status {ended.code}): {last}"


def printable(text: str) -> str:
    """A console's text without what would move a reader's terminal."""
    return "".join(letter for letter in text if letter == "\n" or letter == "\t" or letter.isprintable())
