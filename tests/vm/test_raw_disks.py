"""Sandboxes whose disks are whole files and not layers, as on Firecracker: QEMU with raw disks stands in for it.

And two VMMs on one node: the same QEMU under two names, of which each has its own templates.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llm4agents import config
from llm4agents.config import Settings
from llm4agents.engine.bounds import Bounds
from llm4agents.engine.engine import Engine
from llm4agents.engine.wish import Wish
from llm4agents.errors import LLM4AgentsError, VersionMismatchError
from llm4agents.store import open_store
from llm4agents.vmm.base import Capabilities
from llm4agents.vmm.choice import Drivers
from llm4agents.vmm.qemu.driver import QemuDriver
from tests.support import copied_cache

pytestmark = pytest.mark.vm


class Raw(QemuDriver):
    """QEMU as a VMM that has no layers, and whose files cannot be bounded."""

    name = "firecracker"

    async def capabilities(self) -> Capabilities:
        return replace(await super().capabilities(), disk_format="raw", bounds_files=False, vmm=self.name)


class Newer(Raw):
    """The same of another version."""

    async def capabilities(self) -> Capabilities:
        return replace(await super().capabilities(), version="99.0")


WISH = Wish("base", memory_mib=256)
RAW = replace(WISH, vmm="firecracker")
MAKERS: dict[str, Callable[[Settings], QemuDriver]] = {"firecracker": Raw, "qemu": QemuDriver}


@asynccontextmanager
async def engine_on(home: Path, keep: bool = False, **makers: Any) -> AsyncIterator[Engine]:
    ours = config.settings()
    settings = replace(
        ours, state=home / "s", run_dir=home / "r", barrier="off", ca=ours.ca_directory, cache=home / "c"
    )
    (home / "r" / "vm").mkdir(parents=True, exist_ok=True)
    (home / "s").mkdir(exist_ok=True)
    store = open_store(settings.state / "store.db")
    engine = Engine(settings, store, Drivers(settings, makers or MAKERS))
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close(keep=keep)
        store.close()


async def out(engine: Engine, sandbox: str, script: str) -> str:
    async with engine.use(sandbox, "test") as agent:
        process = await agent.exec(["/bin/sh", "-c", script], user="root", timeout_s=60)
        said = b""
        async for _, data in process:
            said += bytes(data)
        status = await process.wait()
    assert status.exit_code == 0, said
    return said.decode().strip()


@pytest.fixture(scope="module")
def cache() -> Iterator[Path]:
    """One of our own, with what templates are made of: what is built here is of no VMM that there is."""
    with copied_cache("blobs", "index", "probe") as place:
        yield place


def in_home(cache: Path, test: Callable[[Path], Coroutine[Any, Any, None]]) -> None:
    home = Path(tempfile.mkdtemp(prefix="l4a-raw-"))
    try:
        (home / "c").symlink_to(cache)
        asyncio.run(test(home))
    finally:
        shutil.rmtree(home)


def test_the_life_of_a_sandbox_on_a_whole_file(cache: Path) -> None:
    async def test(home: Path) -> None:
        async with engine_on(home) as engine:
            told: list[str] = []
            row = await engine.create(
                replace(RAW, bounds=Bounds(disk_mib=200)), lambda *step: told.append(step[0])
            )
            assert "boot" in told and (row.vmm, row.disk) == (
                "firecracker",
                {"top": "upper.raw", "layers": []},
            )
            box, here = row.id, engine.places.sandboxes
            variant, _ = await engine.templates.by_key(row.template, row.template_key)
            assert variant.disk_format == "raw" and not variant.empty.exists()
            top = here / box / "upper.raw"
            assert top.stat().st_size == 5 << 30 and top.stat().st_blocks * 512 < 64 << 20
            assert top.stat().st_mode & 0o777 == 0o600

            # Paused and back, with what it wrote.
            await out(engine, box, "echo before > /root/f; head -c 3000000 /dev/urandom > /root/big; sync")
            sums = await out(engine, box, "sha256sum /root/big")
            await engine.pause(box)
            assert await out(engine, box, "cat /root/f; sha256sum /root/big") == f"before\n{sums}"

            # Forks of a running one, and of a paused one: whole copies, and nobody sees what the others write.
            children = [child.id for child in await engine.fork(box, 2)]
            await out(engine, box, "echo parent > /root/f; sync")
            await engine.pause(box)
            children += [child.id for child in await engine.fork(box, 1)]
            for number, child in enumerate(children):
                assert await out(engine, child, "cat /root/f") == ("before" if number < 2 else "parent")
                assert await out(engine, child, "sha256sum /root/big") == sums
                await out(engine, child, f"echo {number} > /root/f; sync; echo 3 > /proc/sys/vm/drop_caches")
            assert await out(engine, box, "cat /root/f") == "parent"
            assert [await out(engine, child, "cat /root/f") for child in children] == ["0", "1", "2"]
            assert not list(engine.places.photographs.iterdir()) and not engine.places.layers.exists()

            # A template of it, whose clones are whole files too.
            made = await engine.snapshot(box, "of-raw")
            assert made.disk_format == "raw" and made.vmm == "firecracker"
            for sandbox in children:
                await engine.kill(sandbox)
            again = await engine.create(replace(WISH, template="of-raw"))
            assert again.vmm == "firecracker" and await out(engine, again.id, "cat /root/f") == "parent"
            with pytest.raises(VersionMismatchError, match="was made with Firecracker"):
                await engine.create(replace(WISH, template="of-raw", vmm="qemu"))

            # Its disk as it was, its processes not.
            await engine.pause(again.id)
            await engine.resume(again.id, cold=True)
            assert await out(engine, again.id, "cat /root/f") == "parent"

            # Passed on as a file, it comes back as it was, and without an empty layer.
            await engine.kill(again.id)
            await engine.templates.export(made.shape, home / "bundle", lambda *_: None)
            await engine.templates.remove("of-raw")
            back = await engine.templates.import_(home / "bundle", lambda *_: None)
            assert back.shape == made.shape and back.disk_format == "raw" and not back.empty.exists()
            again = await engine.create(replace(WISH, template="of-raw"))
            assert await out(engine, again.id, "cat /root/f") == "parent"

            # What is protected is read-only in the guest; its root can write to a disk of its own at most.
            held = await engine.create(replace(RAW, protect=("/etc/hosts", "/usr/share/doc")))
            assert (here / held.id / "protect.raw").exists()
            assert "read-only" in await out(engine, held.id, "echo x >> /etc/hosts 2>&1 || echo read-only")
            image = next((home / "c" / "protect").glob("*/image.erofs"))
            before = image.read_bytes()
            await out(
                engine,
                held.id,
                "dd if=/dev/zero of=/dev/disk/by-id/x 2>/dev/null; head -c 4096 /dev/zero > /dev/vdc; sync",
            )
            await engine.kill(held.id)
            assert image.read_bytes() == before

            # The two VMMs' variants are beside each other.
            both = {(one.vmm, one.disk_format) for one in engine.templates.list() if one.name == "base"}
            plain = await engine.create(replace(WISH, vmm="qemu"))
            assert plain.vmm == "qemu" and both == {("firecracker", "raw")}
            both = {(one.vmm, one.disk_format) for one in engine.templates.list() if one.name == "base"}
            assert both == {("firecracker", "raw"), ("qemu", "qcow2")}

    in_home(cache, test)


def test_no_vmm_loads_anothers_and_a_disk_goes_with_its_sandbox(cache: Path) -> None:
    async def test(home: Path) -> None:
        async with engine_on(home, keep=True) as engine:
            paused = (await engine.create(RAW)).id
            await out(engine, paused, "echo kept > /root/f; sync")
            await engine.pause(paused)
            layered = (await engine.create(replace(WISH, vmm="qemu"))).id
            await out(engine, layered, "echo layered > /root/f; sync")
            await engine.fork(layered, 1)
            await engine.pause(layered)
            running = (await engine.create(RAW)).id
        # A server with another version of it: memory is refused with what can be done, the template built anew.
        async with engine_on(home, keep=True, firecracker=Newer, qemu=QemuDriver) as engine:
            with pytest.raises(VersionMismatchError, match="made with") as told:
                await engine.resume(paused)
            assert "--cold" in str(told.value.hint) and engine.get(paused).state == "paused"
            steps: list[str] = []
            row = await engine.create(RAW, lambda step, detail, _: steps.append(f"{step}: {detail}"))
            assert any(
                "build: base is built again for this host (vmm: made with" in step for step in steps
            ), steps
            await engine.kill(row.id)
        # One that has it no more: the machine that ran is ended, and the disks go to the VMM that is there.
        async with engine_on(home, qemu=QemuDriver) as engine:
            assert engine.get(running).state == "failed" and "no driver for Firecracker" in str(
                engine.get(running).reason
            )
            with pytest.raises(VersionMismatchError, match="cannot be used here: this version"):
                await engine.resume(paused)
            await engine.resume(paused, cold=True)
            assert engine.get(paused).vmm == "qemu" and await out(engine, paused, "cat /root/f") == "kept"
            await engine.pause(paused)  # it lies on a template of this VMM now
            assert await out(engine, paused, "cat /root/f") == "kept"
            await engine.resume(layered)
            assert await out(engine, layered, "cat /root/f") == "layered"
            await engine.pause(layered)
        async with engine_on(home, firecracker=Raw) as engine:
            await engine.resume(layered, cold=True)
            assert engine.get(layered).vmm == "firecracker"
            assert await out(engine, layered, "cat /root/f") == "layered"
            with pytest.raises(LLM4AgentsError):
                await engine.create(replace(WISH, vmm="qemu"))

    in_home(cache, test)
