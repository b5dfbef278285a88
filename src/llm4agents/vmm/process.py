"""A live machine as a process of ours and its shim: watched, stopped, let go of, found again. What every driver shares.

Not here: what is said to a VMM (each driver's `machine`), how it is started (`vmm.shim`). `LiveMachine` is what a
driver's machine is made from: it adds `pause`, `resume`, `snapshot` and the rest of `vmm.base.Machine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from llm4agents import limits
from llm4agents.errors import (
    BootError,
    ConflictError,
    LLM4AgentsError,
    SandboxDiedError,
    VmmError,
)
from llm4agents.vmm import procfs, rlimits
from llm4agents.vmm import shim as shim_
from llm4agents.vmm.base import Exit, MachineEvent, MachineRecord, Stats
from llm4agents.vmm.waiting import readable

EVENTS_KEPT_MAX = 64


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


def listen(run_dir: Path, name: str, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """A listening socket in `run_dir` only we may connect to."""
    sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
    directory = os.open(run_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sock.bind(f"/proc/self/fd/{directory}/{name}")
        (run_dir / name).chmod(0o600)
        sock.listen(4)
    except BaseException:
        sock.close()
        raise
    finally:
        os.close(directory)
    return sock


class LiveMachine:
    """What `vmm.base.Machine` promises of a process, whatever VMM it is. Belongs to the event loop it was made in."""

    sockets: tuple[str, ...] = ()
    """Names in `run_dir` that go with the VMM; the shim removes them, we where it was killed."""

    channel_cut = False
    """A driver whose snapshots end the guest's connections says so from then on until `channel`."""

    def __init__(self, record: MachineRecord) -> None:
        """Raises ProcessLookupError when shim or VMM is gone. Call it last: from here on its end is watched."""
        self.record = record
        self._queues: list[asyncio.Queue[MachineEvent]] = []
        self._found: deque[MachineEvent] = deque(maxlen=EVENTS_KEPT_MAX)
        self._pidfds = [os.pidfd_open(record.shim_pid)]
        try:
            self._pidfds.append(os.pidfd_open(record.vmm_pid))
        except BaseException:
            os.close(self._pidfds.pop())
            raise
        self._end = asyncio.create_task(self._watch(), name=f"watch {record.id}")

    def _let_go(self) -> None:
        """Close what is held of the machine: it has ended, or another server has it from now on."""

    def _clear_away(self) -> None:
        """Remove what it had on this host beside its `run_dir`. Idempotent; must not raise."""

    # -- life ---------------------------------------------------------------------------------------------

    async def _watch(self) -> Exit:
        for fd in self._pidfds:  # the VMM after the shim: when that was killed, the kernel ends this one
            await readable(fd)
        with contextlib.suppress(ChildProcessError):  # not our child when adopted: init reaps it
            os.waitpid(self.record.shim_pid, os.WNOHANG)  # noqa: ASYNC222
        ended = shim_.read_exit(self.record.run_dir)
        if ended.reason == "lost":
            for name in (*self.sockets, shim_.DEADLINE, shim_.LINK_SOCKET):
                (self.record.run_dir / name).unlink(missing_ok=True)
        self._close()
        self._clear_away()
        self._publish(MachineEvent("ended", describe(ended)))
        return ended

    def _close(self) -> None:
        self._let_go()
        for fd in self._pidfds:
            os.close(fd)
        self._pidfds = []

    async def wait(self) -> Exit:
        return await asyncio.shield(self._end)

    async def stop(self) -> Exit:
        if not self._end.done():
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

    def wake(self) -> None:
        """Let a VMM go on that its deadline stopped (SIGSTOP) when no server lived."""
        self._signal(1, signal.SIGCONT)

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
        # hear and no reason to stand still is the driver's to arrange.
        try:
            rlimits.limit_files(self.record.vmm_pid, bytes_max)
        except ProcessLookupError as error:
            raise ConflictError(f"the virtual machine {self.record.id} has ended") from error

    async def stats(self) -> Stats:
        found = procfs.stats(self.record.vmm_pid) if not self._end.done() else None
        if found is None:
            raise ConflictError(f"the virtual machine {self.record.id} has ended")
        return found

    def _check_alive(self, act: str) -> None:
        if self._end.done():
            ended = "it was let go of" if self._end.cancelled() else describe(self._end.result())
            raise ConflictError(f"cannot {act} the virtual machine {self.record.id}: {ended}")

    async def _answer(self, act: str, answer: Awaitable[Any]) -> Any:
        """What the VMM answers; ConflictError when it has ended, SandboxDiedError when it does now."""
        try:
            self._check_alive(act)
        except ConflictError:
            if asyncio.iscoroutine(answer):
                answer.close()
            raise
        try:
            return await answer
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

    async def _boot_error(self, what: str, why: object) -> BootError:
        ended = await self._ended_within(0.5)
        tail = ended.console_tail if ended is not None else shim_.console_tail(self.record.run_dir)
        words = f"{describe(ended)}" if ended is not None else str(why) or "no answer in time"
        return BootError(
            f"the virtual machine {self.record.id} {what}: {words}", console_tail=printable(tail)[-4000:]
        )

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


def _put(queue: asyncio.Queue[MachineEvent], event: MachineEvent) -> None:
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(event)


M = TypeVar("M", bound=LiveMachine)


def _same_boot(record: MachineRecord) -> bool:
    return bool(record.extra.get("host_boot_id") == procfs.host_boot_id())


async def adopted(
    record: MachineRecord, find: Callable[[], M], greet: Callable[[M], Awaitable[None]]
) -> M | None:
    """The machine that `record` is of, if its processes live and it answers; one that does not answer is stopped.

    `find` raises OSError for one that has ended since, or whose sockets are gone; `greet` an LLM4AgentsError.
    """
    shim = _same_boot(record) and procfs.alive(record.shim_pid, record.shim_start_ticks)
    if not shim or not procfs.alive(record.vmm_pid, record.vmm_start_ticks):
        return None
    try:
        machine = find()
    except OSError:
        return None
    try:
        machine.wake()
        await greet(machine)
    except LLM4AgentsError:
        await machine.stop()
        return None
    return machine


async def end_remains(record: MachineRecord, sockets: Iterable[str]) -> None:
    """End what is left of a machine that cannot be adopted, and its `sockets` (names in its `run_dir`)."""
    same_boot = _same_boot(record)
    if same_boot and not procfs.alive(record.vmm_pid, record.vmm_start_ticks):
        await _gone(record.shim_pid, record.shim_start_ticks)  # it is writing down how the VMM ended
    if same_boot:
        for pid, ticks in (
            (record.shim_pid, record.shim_start_ticks),
            (record.vmm_pid, record.vmm_start_ticks),
        ):
            with contextlib.suppress(ProcessLookupError):
                fd = os.pidfd_open(pid)
                try:
                    if procfs.alive(pid, ticks):
                        signal.pidfd_send_signal(fd, signal.SIGKILL)
                finally:
                    os.close(fd)
    for name in (*sockets, shim_.DEADLINE, shim_.LINK_SOCKET, *shim_.LOGS):
        (record.run_dir / name).unlink(missing_ok=True)


async def ended_at_once(record: MachineRecord) -> BootError:
    """To be raised of a VMM that had ended before there was a machine of it: with its words, once they are written."""
    await _gone(record.shim_pid, record.shim_start_ticks)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(record.shim_pid, os.WNOHANG)  # noqa: ASYNC222
    words = shim_.read_exit(record.run_dir).console_tail
    return BootError(f"the virtual machine monitor ended at once: {words}")


async def _gone(pid: int, ticks: int) -> None:
    """Wait until that process has ended, VM_STOP_TIMEOUT_S at most."""
    with contextlib.suppress(ProcessLookupError, TimeoutError):
        fd = os.pidfd_open(pid)
        try:
            if procfs.alive(pid, ticks):
                await asyncio.wait_for(readable(fd), limits.VM_STOP_TIMEOUT_S)
        finally:
            os.close(fd)


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
