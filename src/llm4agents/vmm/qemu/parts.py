"""What QEMU reads by name when it runs a microvm: firmware and accelerator modules, wherever a distribution puts them.

For the root it is jailed in (`vmm.jail.closure`). What is not found is left out: whether QEMU needs it, it says itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

FIRMWARE = ("bios-microvm.bin", "pvh.bin", "linuxboot_dma.bin", "kvmvapic.bin")
"""The machine's own, and the option ROMs that put a kernel into it."""
_MODULES = ("accel-tcg-x86_64.so", "accel-kvm-x86_64.so")
_HELP_TIMEOUT_S = 20.0


async def firmware(qemu: str) -> list[Path]:
    """The firmware files QEMU would read, from the first of its data directories that has each."""
    process = await asyncio.create_subprocess_exec(
        qemu, "-L", "help", stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), _HELP_TIMEOUT_S)
    except TimeoutError:
        out = b""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return first_of_each(FIRMWARE, [Path(line) for line in out.decode(errors="replace").splitlines() if line])


def first_of_each(names: Sequence[str], directories: Sequence[Path]) -> list[Path]:
    """For each name the first of these directories' files of that name."""
    places = ([directory / name for directory in directories] for name in names)
    found = (next((place for place in each if place.is_file()), None) for each in places)
    return [place for place in found if place is not None]


def modules(qemu: str) -> list[Path]:
    """Modules of the accelerators; none where they are built in."""
    library = Path(qemu).parent.parent
    places = [library / name / "qemu" for name in ("lib/x86_64-linux-gnu", "lib64", "lib")]
    return first_of_each(_MODULES, places)
