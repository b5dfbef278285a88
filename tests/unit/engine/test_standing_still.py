"""An act on a sandbox as a whole whose machine ends in it: what went wrong is told as that end, and as nothing else."""

from __future__ import annotations

import asyncio
import errno
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llm4agents.engine import clock, pausing
from llm4agents.engine.live import Live
from llm4agents.errors import CapacityError, HostSetupError, SandboxDiedError
from llm4agents.guest.verbs import Agent
from llm4agents.store import SandboxRow
from llm4agents.vmm import checkpoint, pages
from llm4agents.vmm.base import Machine, MachineSpec, Snapshot


class Obeys:
    """A machine, and the agent in it, that do nothing when they are told."""

    session: Any
    channel_cut = False

    def __init__(self) -> None:
        self.session = self
        self.hello = SimpleNamespace(capabilities=frozenset({"fsfreeze"}))
        self.said: list[str] = []

    def __getattr__(self, name: str) -> Any:
        async def told(*_: Any, **__: Any) -> None:
            self.said.append(name)

        return told


def standing(machine: Obeys) -> Live:
    now = clock.wall_s()
    return Live(
        SandboxRow("sbx_x", "base", "running", now, now + 1000, 300.0, 1, 256, 5),
        cast(Machine, machine),
        cast(Agent, machine),
        lambda *_: None,
        lambda: 1 << 40,
    )


async def copied(directory: Path) -> checkpoint.MachineCheckpoint:
    """A checkpoint all of whose parts are there, and not yet durable."""

    async def save_state(out: int) -> None:
        (Path("/proc/self/fd") / str(out)).write_bytes(b"devices")

    async def save_pages(out: int) -> pages.Copied:
        return pages.Copied(1, 0, 1, 1)

    spec = MachineSpec(vcpus=1, memory_mib=1, kernel=Path("/k"), initrd=Path("/i"), disks=())
    frozen = Snapshot(directory, spec, {}, 0, kind="diff", base="x")
    return await checkpoint.make(directory, frozen, save_state, save_pages)


def test_a_checkpoint_whose_directory_goes_is_no_full_disk(tmp_path: Path) -> None:
    async def test() -> None:
        made = await copied(tmp_path / "pause")
        shutil.rmtree(tmp_path / "pause")
        with pytest.raises(HostSetupError, match=r"checkpoint could not be written.*No such file"):
            await made.durable()
        with pytest.raises(HostSetupError, match="No such file"):
            await copied(tmp_path / "gone" / "pause")

    asyncio.run(test())


def test_what_breaks_since_the_sandbox_ended_is_told_as_its_end(tmp_path: Path) -> None:
    async def test() -> None:
        for ended in (True, False):
            machine = Obeys()
            live = standing(machine)
            expected = SandboxDiedError if ended else HostSetupError
            with pytest.raises(expected, match="its VMM was killed" if ended else "No such file"):
                async with pausing.standing_still(live, "a pause", sync=True):
                    made = await copied(tmp_path / "pause")
                    if ended:  # as the engine does when it sees its machine go
                        live.ending = True
                        live.end_error = SandboxDiedError("sbx_x ended: its VMM was killed by signal 9")
                    shutil.rmtree(tmp_path / "pause")
                    await made.durable()
            assert ("thaw" in machine.said) != ended
            live.stop_watching()

    asyncio.run(test())


@pytest.mark.parametrize("ended", [True, False])
def test_a_full_disk_is_one_only_while_the_sandbox_lives(ended: bool) -> None:
    async def test() -> None:
        live = standing(Obeys())
        with pytest.raises(SandboxDiedError if ended else CapacityError):
            async with pausing.told_as_end(live, "a pause"):
                live.ending = ended
                raise CapacityError("the host's disk is full")
        with pytest.raises(SandboxDiedError if ended else OSError):
            async with pausing.told_as_end(live, "a photograph of it"):
                raise OSError(errno.ENOENT, "No such file or directory")

    asyncio.run(test())
