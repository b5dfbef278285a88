"""A machine of an ordinary user: `-m tests.contract.unprivileged CASE FROZEN ROOT BOX`, a process of its own, as root.

Prints its isolation report as JSON. It becomes an ordinary user itself, after it has made what such a user has: a copy
of the frozen machine (directory FROZEN, root disk ROOT) and of our binaries in BOX, and a root that is no chroot, below
which user namespaces may be made (CASE `works`; `chroot`: they may not; `lost`: they may not any more).
"""

import asyncio
import dataclasses
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from llm4agents import binaries, config
from llm4agents.errors import BootError
from llm4agents.vmm import snapshot
from llm4agents.vmm.jail import isolation
from llm4agents.vmm.qemu.driver import QemuDriver
from tests.barrier.unprivileged import USER, become_user, prepare

from .lab import Frozen, lab, run, wake


def own(box: Path, frozen: Path, root_disk: Path) -> Frozen:
    """The machine and the binaries as files of that user's."""
    home, ours = box / "frozen", box / "bin"
    shutil.copytree(frozen, home)
    shutil.copyfile(root_disk, home / "root")
    for name in (binaries.AGENT, binaries.SHIM):
        ours.mkdir(exist_ok=True)
        shutil.copy(binaries.path(name), ours / name)
    binaries.path.cache_clear()
    os.environ.update(
        LLM4AGENTS_BIN_DIR=str(ours),
        LLM4AGENTS_CACHE=str(box / "cache"),
        LLM4AGENTS_STATE=str(box / "state"),
        LLM4AGENTS_RUN=str(box / "run"),
        TMPDIR=str(box),
    )
    config.settings.cache_clear()
    tempfile.tempdir = None
    for directory, _, names in os.walk(box):
        for path in (Path(directory), *(Path(directory) / name for name in names)):
            os.chown(path, USER, USER, follow_symlinks=False)
    spec = snapshot.load(home / "snapshot").spec
    disks = (dataclasses.replace(spec.disks[0], path=home / "root"), *spec.disks[1:])
    return Frozen("qemu", home, dataclasses.replace(spec, disks=disks))


async def look(frozen: Frozen, case: str) -> dict[str, object]:
    async with lab(frozen) as it:
        if case == "lost":
            assert isinstance(it.driver, QemuDriver)
            await it.driver.capabilities()
            it.driver._cells._need = ("ns",)  # as after a trial that had them
            try:
                await it.restore()
            except BootError as error:
                return {"error": error.message}
        machine = await it.restore()
        await machine.resume()
        agent = await wake(machine)
        assert await run(agent, "cat /dev/shm/state") == (0, "template")
        return isolation.describe(isolation.report(machine.record))


def main() -> None:
    case, frozen, root_disk, box = sys.argv[1:]
    mine = own(Path(box), Path(frozen), Path(root_disk))
    place = Path(box) / "root"
    place.mkdir()
    prepare("works" if case == "works" else "chroot", str(place))
    os.environ["HOME"] = box
    become_user()
    sys.stdout.write(json.dumps(asyncio.run(look(mine, case))))


if __name__ == "__main__":
    main()
