"""Runs as root in a guest, which has cgroup v2 and is nobody's host: the shim's cgroups for real. Prints JSON.

`llm4agents` is beside it (a copy of the source), the shim in LLM4AGENTS_BIN_DIR.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from llm4agents.vmm import shim
from llm4agents.vmm.jail import cgroups, isolation
from llm4agents.vmm.jail.closure import Closure, closure
from llm4agents.vmm.waiting import readable

HOME = Path(sys.argv[1])
SHELL = os.path.realpath("/bin/sh")
TOOLS = [os.path.realpath(shutil.which(tool) or tool) for tool in ("yes", "tr", "tail", "sleep")]
MIB = 1 << 20


async def gone(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        await asyncio.wait_for(readable(fd), 60)
        os.close(fd)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


@contextlib.contextmanager
def launch(
    root: Closure, parent: cgroups.Parent, name: str, script: str, bounds: cgroups.Bounds
) -> Iterator[tuple[shim.Launch, cgroups.Made]]:
    run_dir = HOME / name
    run_dir.mkdir(mode=0o700)
    made = cgroups.make(parent, name, bounds)
    fd = os.open(root.path, os.O_PATH)
    env = {"PATH": ":".join({str(Path(tool).parent) for tool in TOOLS})}
    jail = shim.Jail(fd, cgroup=made.fd)
    try:
        yield (
            shim.Launch(
                [SHELL, "-c", script], env, [], run_dir, {"core": 0}, uid=70_000, gid=70_000, jail=jail
            ),
            made,
        )
    finally:
        os.close(fd)
        cgroups.let_go(made)


async def main() -> dict[str, object]:
    wanted_parents = ("l4a-test", None)
    foreseen = [cgroups.foreseen(name) for name in wanted_parents]
    parent = cgroups.parent("l4a-test")
    found: dict[str, object] = {
        "foreseen": [saw == cgroups.parent(name) for saw, name in zip(foreseen, wanted_parents, strict=True)],
        "controllers": sorted(parent.controllers),
        "default": str(cgroups.parent(None).path),
    }
    root = await closure(SHELL, HOME, modules=[Path(tool) for tool in TOOLS])
    roomy = cgroups.Bounds(200 * MIB, 32, 0.5)

    async def ended(name: str, script: str, bounds: cgroups.Bounds) -> dict[str, object]:
        with launch(root, parent, name, script, bounds) as (wanted, made):
            started = await shim.start(wanted)
        await gone(started.shim_pid)
        body = shim.read_exit(wanted.run_dir)
        return {
            "code": body.code,
            "signal": body.signal,
            "said": body.console_tail,
            "left": made.path.exists(),
        }

    found["hog"] = await ended(
        "hog", "yes | tr -d '\\n' | tail; echo survived", cgroups.Bounds(12 * MIB, 32, 1)
    )
    many = "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 100 & done; echo survived"
    found["many"] = await ended("many", many, cgroups.Bounds(200 * MIB, 8, 1))
    with launch(root, parent, "lives", "read x < /proc/self/cgroup; echo $x; exec sleep 100", roomy) as (
        wanted,
        made,
    ):
        started = await shim.start(wanted)
    while "::" not in shim.console_tail(wanted.run_dir):
        await asyncio.sleep(0.01)
    names = ("memory.max", "memory.swap.max", "pids.max", "cpu.max", "cgroup.procs")
    found["files"] = {
        name: (made.path / name).read_text().strip() for name in names if (made.path / name).exists()
    }
    found["pid"] = started.vmm_pid
    seen = isolation.worker("vmm", started.vmm_pid)
    group = None if seen is None else seen.cgroup
    found["reported"] = None if group is None else [group.version, group.shared, dict(group.limits)]
    found["lacking"] = dict(made.lacking)
    found["seen_inside"] = shim.console_tail(wanted.run_dir).strip()
    found["jail"] = started.jail
    found["swept_alive"] = cgroups.sweep(parent)
    # Nobody is left to remove it.
    os.kill(started.shim_pid, signal.SIGKILL)
    await gone(started.shim_pid)
    while (made.path / "cgroup.procs").read_text():
        await asyncio.sleep(0.01)
    found["swept_dead"] = cgroups.sweep(parent)
    found["left"] = [entry.name for entry in (parent.path or HOME).iterdir() if entry.is_dir()]
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(main())))
