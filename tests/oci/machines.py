"""A machine of an image's root file system, booted cold and looked at, without a server."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from llm4agents import binaries, limits
from llm4agents.config import settings
from llm4agents.engine import contact
from llm4agents.guest.verbs import Agent
from llm4agents.images import disk
from llm4agents.images.cache import Cache
from llm4agents.images.initramfs import build_initrd
from llm4agents.images.kernel import build_kernel
from llm4agents.vmm.base import Disk, MachineSpec, Placement
from llm4agents.vmm.qemu.driver import QemuDriver

Visit = Callable[[Agent], Awaitable[None]]


def visit(rootfs: Path, home: Path, visitor: Visit, *, memory_mib: int = 256) -> None:
    """Boot `rootfs`, let `visitor` look around, end it."""

    async def main() -> None:
        cache = Cache(settings().cache)
        async with cache.building():
            kernel = await build_kernel(cache)
            initrd = build_initrd(kernel, binaries.path(binaries.AGENT), cache)
        await disk.make_upper(home / "upper.raw", limits.DISK_GIB << 30)
        run_dir = home / "run"
        run_dir.mkdir(mode=0o700)
        disks = (Disk("root", rootfs, "raw", True), Disk("upper", home / "upper.raw", "raw", False))
        machine = await QemuDriver(settings()).boot(
            MachineSpec(1, memory_mib, kernel.vmlinux, initrd.path, disks, kernel_release=kernel.release),
            Placement(f"oci-{os.getpid()}", run_dir, time.time() + 600),
        )
        try:
            await visitor(await contact.greet(machine, timeout=limits.BOOT_TIMEOUT_S))
        finally:
            await machine.stop()

    asyncio.run(main())


async def run(
    agent: Agent, *argv: str, user: str | int = "root", timeout_s: float = 60, **more: object
) -> str:
    """What a program says; it must end well."""
    process = await agent.exec(list(argv), user=user, timeout_s=timeout_s, **more)  # type: ignore[arg-type]
    said = b""
    async for _, data in process:
        said += bytes(data)
    text = said.decode(errors="replace").strip()
    status = await process.wait()
    assert status.exit_code == 0, f"{argv}: {status}: {text}"
    return text
