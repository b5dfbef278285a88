"""A live Firecracker process as a `Machine`: its API, its vsock channel, what is frozen and loaded.

Memory is never written by Firecracker: it says the state of its devices, and the pages are read from its process
(docs/adr/0014). Not here: how it is started (driver), what it is told (api), its life as a process (`vmm.process`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from llm4agents import limits
from llm4agents.errors import (
    ConflictError,
    ConnectionLostError,
    CorruptSnapshotError,
    LLM4AgentsError,
    SandboxDiedError,
    TimedOutError,
    VmmError,
)
from llm4agents.vmm import checkpoint, pages, snapshot, unixhttp
from llm4agents.vmm.base import Checkpoint, Disk, Exit, MachineEvent, MachineRecord, MachineSpec, Snapshot
from llm4agents.vmm.firecracker import api, guestmemory, jail, vsock
from llm4agents.vmm.firecracker.jailer import Layout
from llm4agents.vmm.firecracker.versions import Traits
from llm4agents.vmm.process import LiveMachine, describe
from llm4agents.vmm.unixhttp import UnixHttp
from llm4agents.vmm.waiting import readable

_REFUSED_PAUSE_S: Final = 0.02
"""Between two connections while a guest that boots has its vsock but not yet its agent: it refuses at once."""
_SOCKET_PAUSE_S: Final = 0.001
_SOCKET_TRIES: Final = 100
_RESET_WAIT_S: Final = 15.0
"""Met by none but a guest that is held up: given up too early, the next connection is the one that is lost."""
_MEMORY_WORDS: Final = "memory backing file"


class FirecrackerMachine(LiveMachine):
    """See `vmm.base.Machine`."""

    def __init__(
        self,
        record: MachineRecord,
        layout: Layout,
        traits: Traits,
        *,
        spec: MachineSpec | None = None,
        identity: dict[str, str] | None = None,
    ) -> None:
        """`attach` is next. Raises ProcessLookupError when shim or VMM is gone."""
        self._layout, self._traits = layout, traits
        self._spec, self._identity = spec, identity
        self._api: UnixHttp | None = None
        self._running = False
        self._reset_due = False
        """Whether the guest will reset its connections when it runs again."""
        self._paused_once = False
        self._probe: socket.socket | None = None
        super().__init__(record)

    def _let_go(self) -> None:
        if self._api is not None:
            self._api.close("the virtual machine ended")
        self._drop_probe()

    def _clear_away(self) -> None:
        jail.remove(self._layout.base)

    # -- the API ------------------------------------------------------------------------------------------

    async def attach(self, made: int) -> None:
        """Connect to the API of a process that is starting; `made` watches its directory. Raises BootError."""
        try:
            async with asyncio.timeout(limits.RESTORE_TIMEOUT_S):
                while self._api is None:
                    try:
                        self._connect()
                    except FileNotFoundError:
                        await self._or_end(readable(made))
                        with contextlib.suppress(BlockingIOError):
                            os.read(made, 4096)
                    except OSError:
                        await asyncio.sleep(_SOCKET_PAUSE_S)  # made, and not yet listened at
        except TimeoutError as error:
            raise await self._boot_error("did not start", "its API did not appear") from error

    async def reattach(self) -> None:
        """Connect to the API of one that another server started. Raises ConnectionLostError, VmmError."""
        try:
            self._connect()
        except OSError as error:
            raise ConnectionLostError(f"Firecracker's API cannot be connected: {error.strerror}") from error
        found = await self._request(api.INFO)
        self._running = isinstance(found, dict) and found.get("state") == "Running"
        # What was asked of it while it stood still is not known.
        self._reset_due = self.channel_cut = not self._running

    def _connect(self) -> None:
        self._api = UnixHttp(unixhttp.connect(self._layout.inside(api.API_SOCKET)), "Firecracker")

    async def _or_end(self, waiting: Any) -> None:
        """Wait for `waiting`, or raise BootError when the process ends."""
        waited = asyncio.ensure_future(waiting)
        try:
            await asyncio.wait({waited, self._end}, return_when=asyncio.FIRST_COMPLETED)
            if not waited.done():
                raise await self._boot_error("did not start", "")
            await waited
        finally:
            waited.cancel()

    async def _request(self, request: api.Request, timeout: float = unixhttp.REQUEST_TIMEOUT_S) -> Any:
        """One request; ConflictError when the VM has ended, SandboxDiedError when it does now."""
        method, path, body = request
        assert self._api is not None
        return await self._answer(f"{method} {path}", self._api.request(method, path, body, timeout=timeout))

    async def start(self, requests: Iterable[api.Request]) -> None:
        """Configure it and let it boot. Raises BootError with Firecracker's words."""
        assert self._api is not None
        # Sent ahead in one go: it takes one after the other, and none waits for us.
        sent = [self._api.send(*request) for request in (*requests, api.START)]
        try:
            async with asyncio.timeout(limits.RESTORE_TIMEOUT_S):
                for answer in sent:
                    await answer
        except (LLM4AgentsError, TimeoutError) as error:
            raise await self._boot_error("did not start", error) from error
        self._running = True

    async def load(self, parts: checkpoint.Parts | None, size: int, also: Iterable[api.Request]) -> None:
        """Load `state` over `memory`, write the pages of `parts` into it, and send `also`. Raises BootError,
        CorruptSnapshotError. Afterwards it stands still."""
        assert self._api is not None
        try:
            async with asyncio.timeout(limits.RESTORE_TIMEOUT_S):
                await self._api.send(*api.load())
                sent = [self._api.send(*request) for request in also]
                if parts is not None:
                    # Queues of devices were looked into when they were loaded; what they hold is read as they run.
                    await parts.fill(self.record.vmm_pid, guestmemory.of_clone(self.record.vmm_pid, size))
                for answer in sent:
                    await answer
        except CorruptSnapshotError:
            raise
        except (LLM4AgentsError, TimeoutError) as error:
            if parts is not None:
                await parts.checked()  # damage is a better reason than what it led to
            raise await self._boot_error("did not load its snapshot", error) from error
        self._reset_due = True

    # -- running and standing still -----------------------------------------------------------------------

    async def pause(self) -> None:
        self._check_alive("pause")
        if self._running:
            await self._request(api.PAUSE)
            self._running = False
            self._paused_once = True
            self._publish(MachineEvent("paused"))

    async def resume(self) -> None:
        self._check_alive("resume")
        if self._running:
            return
        if self._traits.resume_needs_snapshot and self._paused_once and not self._reset_due:
            await self._saved_state()
        if self._reset_due and not self._traits.waits_for_reset:
            # Taken by the guest in the moment in which it resets its connections: that one is told by it, and lost.
            with contextlib.suppress(ConnectionLostError):
                self._probe = vsock.ask(self._layout.inside(api.VSOCK_SOCKET), api.AGENT_PORT)
        await self._request(api.RESUME)
        self._running, self._reset_due = True, False
        self._publish(MachineEvent("resumed"))

    async def channel(self) -> socket.socket:
        self._check_alive("connect to")
        opening = asyncio.ensure_future(self._channel())
        try:
            await asyncio.wait({opening, self._end}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                assert self._end.done()
                raise SandboxDiedError(
                    f"the virtual machine {self.record.id} ended: {describe(self._end.result())}"
                )
            channel = await opening
        except TimeoutError:
            raise TimedOutError(
                f"the guest of {self.record.id} took no connection in {limits.BOOT_TIMEOUT_S:g} s",
                hint="the sandbox's serial log says how far the guest came",
            ) from None
        finally:
            opening.cancel()
        self.channel_cut = False
        return channel

    async def _channel(self) -> socket.socket:
        if self._probe is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(vsock.taken(self._probe), _RESET_WAIT_S)
            self._drop_probe()
        async with asyncio.timeout(limits.BOOT_TIMEOUT_S):
            while True:
                sock = vsock.ask(self._layout.inside(api.VSOCK_SOCKET), api.AGENT_PORT)
                try:
                    if await vsock.taken(sock):
                        return sock
                except BaseException:
                    sock.close()
                    raise
                sock.close()
                await asyncio.sleep(_REFUSED_PAUSE_S)

    def _drop_probe(self) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    async def balloon(self) -> dict[str, Any]:
        """Statistics of the guest's memory by its balloon, as Firecracker names them."""
        found = await self._request(api.BALLOON_STATISTICS)
        return found if isinstance(found, dict) else {}

    # -- freezing -----------------------------------------------------------------------------------------

    async def snapshot(self, directory: Path) -> Snapshot:
        self._check_alive("freeze")
        if self._spec is None or self._identity is None:
            raise ConflictError(
                "only a machine this server booted can be frozen: a clone's memory is private"
            )
        self._check_still("freeze")
        async with snapshot.making(directory, "the snapshot"):
            state = await self._saved_state()
            await asyncio.to_thread(snapshot.write_part, directory / snapshot.STATE, state)
            places = self._booted_places(self._spec.memory_mib << 20)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            # Readable to the uids of clones, in a directory that nobody else may enter.
            out = os.open(directory / snapshot.MEMORY, flags, 0o644)
            try:
                os.fchmod(out, 0o644)
                written = await pages.save_whole(self.record.vmm_pid, places, out)
                await asyncio.to_thread(os.fsync, out)
            finally:
                os.close(out)
            frozen = Snapshot(directory, self._spec, self._identity, written * pages.PAGE)
            await asyncio.to_thread(snapshot.write_manifest, frozen)
        return frozen

    async def checkpoint(self, directory: Path, *, base: Snapshot) -> Checkpoint:
        self._check_alive("copy")
        self._check_still("copy")
        wanted = await checkpoint.over(base, directory, self.record, self._identity)
        pid, size = self.record.vmm_pid, base.spec.memory_mib << 20
        with contextlib.ExitStack() as stack:
            under = stack.enter_context((base.path / snapshot.MEMORY).open("rb"))

            async def save_state(target: int) -> None:
                _pwrite(target, await self._saved_state())

            async def save_pages(out: int) -> pages.Copied:
                # After the state: saving that has told the guest, in its memory, to reset its connections.
                cloned = "base" in self.record.extra
                places = guestmemory.of_clone(pid, size) if cloned else self._booted_places(size)
                return await pages.save_at(pid, places, under.fileno(), out)

            return await checkpoint.make(directory, wanted, save_state, save_pages)

    def _booted_places(self, size: int) -> list[pages.Place]:
        low = self._traits.low_memory_mib << 20
        return guestmemory.of_booted(self.record.vmm_pid, size, low, api.LINE_BEGINS)

    async def _saved_state(self) -> bytes:
        """The state of all devices but memory. The guest will reset its connections when it runs on."""
        try:
            await self._request(api.save_state(), limits.RESTORE_TIMEOUT_S)
        except VmmError as error:
            # It writes the state, then finds no place for the memory, which is what we asked for.
            if _MEMORY_WORDS not in error.message:
                raise
        self._reset_due = self.channel_cut = True
        return await asyncio.to_thread(jail.take, self._layout, api.STATE_OUT, checkpoint.STATE_BYTES_MAX)

    def _check_still(self, act: str) -> None:
        if self._running:
            raise ConflictError(
                f"cannot {act} the virtual machine {self.record.id} while it runs: pause it first"
            )

    # -- disks --------------------------------------------------------------------------------------------

    async def switch_disk(self, slot: str, overlay: Disk) -> None:
        raise ConflictError(
            f"the disk {slot} of {self.record.id} cannot get a layer: Firecracker's disks are raw files",
            hint="copy the file while the machine stands still",
        )

    async def disk_inode(self, slot: str) -> int | None:
        self._check_alive("look at a disk of")
        if slot not in api.SLOTS:
            raise ConflictError(f"the machine has no disk in the slot {slot}")
        with contextlib.suppress(OSError):
            path = f"/proc/{self.record.vmm_pid}/root/{slot}"
            return (await asyncio.to_thread(os.stat, path, follow_symlinks=False)).st_ino
        return None

    async def flush_disks(self) -> None:
        # Nothing is held back: a request of the guest is one of the file before it is answered.
        self._check_alive("flush the disks of")

    def limit_files(self, bytes_max: int) -> None:
        """Nothing: raw disks have the size they have, and a VMM that meets its limit would end."""
        self._check_alive("limit the files of")

    async def stop(self) -> Exit:
        ended = await super().stop()
        jail.remove(self._layout.base)
        return ended


def _pwrite(fd: int, body: bytes) -> None:
    rest = memoryview(body)
    while rest:
        rest = rest[os.write(fd, rest) :]
