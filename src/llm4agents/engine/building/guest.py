"""The machine that a build's steps run in: booted from a disk, behind the barrier, and what is done in it.

Not here: which steps run (`builds`), the machine that is frozen (`freezing`): of this one only its disk is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from llm4agents import limits
from llm4agents.engine import contact, creation
from llm4agents.engine.building.commands import argv
from llm4agents.engine.building.copies import owned
from llm4agents.engine.building.freezing import Workshop
from llm4agents.engine.network import Asked, Networks
from llm4agents.errors import (
    BootError,
    CapacityError,
    GuestError,
    InvalidRequestError,
    LLM4AgentsError,
    PathNotFoundError,
)
from llm4agents.guest import trees
from llm4agents.guest.results import ExitStatus
from llm4agents.guest.verbs import Agent
from llm4agents.images import disk
from llm4agents.images.process import check_room, in_thread
from llm4agents.recipe import Run
from llm4agents.vmm.base import Driver, Machine, MachineSpec

T = TypeVar("T")
Output = Callable[[int, bytes], None]
"""Told of each piece of what a command says: channel, bytes."""
_PASSWD_BYTES_MAX: Final = 1_048_576
_QUIET_S: Final = 3.0
"""How long what a step has left running has to end by itself once it is asked to."""
_LOOK_S: Final = 0.05
_GRACE_S: Final = 300.0


@dataclass(slots=True)
class Guest:
    machine: Machine
    agent: Agent
    upper: Path
    asked: Asked
    base_env: Mapping[str, str]
    """Of what the build begins with; what the barrier's package profile needs comes over it, and the recipe's over
    both."""
    ident: str
    _furnished: dict[str, bytes | None] = field(default_factory=dict)

    # -- commands -----------------------------------------------------------------------------------------

    async def run(
        self,
        run: Run,
        *,
        user: str,
        cwd: str | None,
        env: Mapping[str, str],
        timeout_s: float,
        output: Output = lambda _channel, _data: None,
    ) -> ExitStatus:
        """Run a command to its end; what it has left running is ended too. `env`: the recipe's, with the base's.

        Raises CapacityError when the host's disk is full, BootError when the machine ends under it, GuestError and
        InvalidRequestError when it cannot be started.
        """
        own = {name: value for name, value in env.items() if self.base_env.get(name) != value}
        variables = {**self.base_env, **self.asked.environment, **own}
        await self.machine.set_deadline(time.time() + timeout_s + _GRACE_S)

        async def work() -> ExitStatus:
            process = await self.agent.exec(
                argv(run), env=variables, cwd=cwd, user=_number(user), timeout_s=timeout_s
            )
            async with process:
                async with contextlib.aclosing(aiter(process)) as pieces:
                    async for channel, data in pieces:
                        output(channel, data)
                return await process.wait()

        try:
            return await self._watched(work())
        finally:
            if not self.agent.session.closed.done():
                with contextlib.suppress(LLM4AgentsError):
                    await self._quiet()

    async def _quiet(self) -> None:
        """End what the step has left running: from the cache it would not be there either."""
        if (await self.agent.metrics()).processes == 0:
            return
        for signal in ("-TERM", "-KILL"):
            ending = await self.agent.exec(["/bin/sh", "-c", f"kill {signal} -1"], user="root", timeout_s=10)
            await ending.wait()
            for _ in range(round(_QUIET_S / _LOOK_S)):
                if (await self.agent.metrics()).processes == 0:
                    return
                await asyncio.sleep(_LOOK_S)

    async def _watched(self, work: Awaitable[T]) -> T:
        """The result of `work`, unless the machine stops for a full disk or ends meanwhile."""
        task = asyncio.ensure_future(work)
        trouble = asyncio.ensure_future(self._trouble())
        try:
            await asyncio.wait({task, trouble}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() or (task.exception() is not None and trouble.done()):
                raise trouble.result()
            return task.result()
        except LLM4AgentsError as error:
            if error is trouble_of(trouble) or isinstance(error, GuestError | InvalidRequestError):
                raise
            with contextlib.suppress(TimeoutError):  # a channel that broke: the machine may be ending
                async with asyncio.timeout(1.0):
                    raise await asyncio.shield(trouble) from error
            raise
        finally:
            for one in (task, trouble):
                one.cancel()
            await asyncio.gather(task, trouble, return_exceptions=True)

    async def _trouble(self) -> LLM4AgentsError:
        events = self.machine.events()
        async for event in events:
            if event.kind == "disk_full":
                return CapacityError(
                    "the host's disk is full: the build stopped",
                    hint="free space (llm4agents prune), and build again",
                )
            if event.kind == "ended":
                break
        ended = await self.machine.wait()
        return BootError(
            f"the machine of the build {contact.exit_words(ended)}", console=ended.console_tail[-2000:]
        )

    # -- files --------------------------------------------------------------------------------------------

    async def copy(self, tar: Path, to: str, user: str) -> trees.Unpacked:
        """Unpack a checked tar into the directory `to`, everything in it the user's."""
        uid, gid = await ids(self.agent, user)
        await make_directory(self.agent, to, user)
        await self.machine.set_deadline(time.time() + limits.BUILD_TIMEOUT_S)
        pieces = owned(tar, uid, gid)
        return await self._watched(trees.tar_in(self.agent, to, pieces, preserve_owner=True, user="root"))

    # -- what its package tools need, which no template keeps ----------------------------------------------

    async def furnish(self, networks: Networks) -> None:
        """Write the files in which package tools look for this host's registries."""
        self._furnished = {path: await _read(self.agent, path) for path in self.asked.files}
        await networks.furnish(self.ident, self.agent, self.asked)

    async def _unfurnish(self) -> None:
        for path, before in self._furnished.items():
            if await _read(self.agent, path) != self.asked.files[path].encode():
                continue  # not written, or a step has another there
            if before is None:
                await self.agent.remove(path, user="root", missing_ok=True)
            else:
                await self.agent.write(path, before, mode=None, user="root")

    # -- its disk -----------------------------------------------------------------------------------------

    async def copy_disk(self, path: Path, networks: Networks) -> None:
        """Copy the disk as it is now, whole by itself, to `path`, durably. Raises CapacityError."""
        check_room(path.parent, limits.DISK_FREE_BYTES_MIN)
        await self._unfurnish()
        await self.agent.freeze(fs=True)
        try:
            await self.machine.flush_disks()
            await in_thread(lambda _: disk.copy_sparse(self.upper, path))
        finally:
            await self.agent.thaw()
        await networks.furnish(self.ident, self.agent, self.asked)


async def ids(agent: Agent, user: str) -> tuple[int, int]:
    """uid and gid of a user, as the guest's /etc/passwd has them. Raises InvalidRequestError."""
    text = await _read(agent, "/etc/passwd") or b""
    for line in text.decode("utf-8", "replace").splitlines():
        fields = line.split(":")
        if len(fields) > 3 and user in (fields[0], fields[2]) and (fields[2] + fields[3]).isdecimal():
            return int(fields[2]), int(fields[3])
    if user.isdecimal():
        return int(user), int(user)
    raise InvalidRequestError(
        f"there is no user {user} in it", hint="make one in a step before: run = 'useradd …', as = 'root'"
    )


async def make_directory(agent: Agent, path: str, user: str) -> None:
    """Make `path` for the user, if nothing is there."""
    try:
        await agent.stat(path, user="root")
    except PathNotFoundError:
        uid, gid = await ids(agent, user)
        await agent.mkdir(path, user="root")
        await trees.set_attributes(agent, path, owner=uid, group=gid, user="root")


async def _read(agent: Agent, path: str) -> bytes | None:
    """A small file of the guest; None when there is none that can be read."""
    try:
        stream = await agent.read(path, length=_PASSWD_BYTES_MAX, user="root")
        return b"".join([bytes(piece) async for piece in stream])
    except (PathNotFoundError, GuestError):
        return None


def trouble_of(trouble: asyncio.Future[LLM4AgentsError]) -> LLM4AgentsError | None:
    return (
        trouble.result() if trouble.done() and not trouble.cancelled() and not trouble.exception() else None
    )


def _number(user: str) -> str | int:
    return int(user) if user.isdecimal() and len(user) < 10 else user


@contextlib.asynccontextmanager
async def booted(
    workshop: Workshop,
    networks: Networks,
    driver: Driver,
    boot: Callable[[Path], MachineSpec],
    source: Callable[[Path], Awaitable[None]],
    asked: Asked,
    base_env: Mapping[str, str],
    project: str,
    told: Callable[[str], Any],
) -> AsyncIterator[Guest]:
    """A machine on a disk of its own that `source` makes; both are gone at the end. `told` of a second try.

    Raises BootError, CapacityError, HostSetupError.
    """
    async with workshop.cache.workdir() as tmp:
        upper = tmp / "upper.raw"
        for attempt in range(1, limits.BOOT_TRIES + 1):
            await source(upper)
            upper.chmod(0o600)
            try:
                async with contextlib.AsyncExitStack() as stack:
                    guest = await stack.enter_async_context(
                        _running(workshop, networks, driver, boot(upper), upper, asked, base_env, project)
                    )
                    up = stack.pop_all()
                break
            except BootError:
                if attempt == limits.BOOT_TRIES:
                    raise
                told("the machine did not come up; trying once more")
                upper.unlink()
        async with up:
            yield guest


@contextlib.asynccontextmanager
async def _running(
    workshop: Workshop,
    networks: Networks,
    driver: Driver,
    boot: MachineSpec,
    upper: Path,
    asked: Asked,
    base_env: Mapping[str, str],
    project: str,
) -> AsyncIterator[Guest]:
    ident = f"build-{secrets.token_hex(6)}"
    run_dir = workshop.machines / ident
    machine: Machine | None = None
    async with contextlib.AsyncExitStack() as stack:
        if workshop.admission is not None:
            await stack.enter_async_context(workshop.admission.building(ident, boot.memory_mib))
        run_dir.mkdir(parents=True, mode=0o700)
        stack.callback(shutil.rmtree, run_dir, ignore_errors=True)
        try:
            link = await networks.link(needed=asked.needs_link)
            # Past this deadline the shim ends a build whose server has died.
            placement = creation.placed(ident, run_dir, time.time() + limits.BUILD_TIMEOUT_S, link)
            with contextlib.nullcontext() if link is None else contextlib.closing(link):
                machine = await driver.boot(boot, placement)
            agent = await contact.greet(machine, timeout=limits.BOOT_TIMEOUT_S)
            await creation.identify(agent, ident, {}, linked=link is not None)
            if link is not None:
                await networks.enter_machine(ident, machine.record, asked, project)
            guest = Guest(machine, agent, upper, asked, base_env, ident)
            await guest.furnish(networks)
            yield guest
        finally:
            networks.leave_machine(ident)
            if machine is not None:
                await asyncio.shield(machine.stop())
