"""A worker for tests of `workers`: says what it is, keeps ids, gives descriptors back, hangs on request."""

import asyncio
import os
import sys
from pathlib import Path

from llm4agents.barrier import wire, worker_side

KEPT = []


async def echo(message, fds):
    return {"said": message.get("say"), "fds": len(fds)}, fds


async def join(message, fds):
    wire.close(fds)
    KEPT.append(message["sandbox"])


async def leave(message, fds):
    KEPT.remove(message["sandbox"])


async def tell(message, fds):
    for number in range(message["count"]):
        SIDE.tell("told", number=number)


async def who(message, fds):
    status = dict(
        line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line
    )
    (worker_side.DIRECTORY / "mine").write_text("x")
    return {
        "uid": os.getuid(),
        "gid": os.getgid(),
        "groups": os.getgroups(),
        "caps": status["CapEff"],
        "no_new_privs": status["NoNewPrivs"],
        "session": os.getsid(0),
        "env": sorted(os.environ),
        "fds": {
            name: os.readlink(f"/proc/self/fd/{name}")
            for name in os.listdir("/proc/self/fd")
            if int(name) > 5 and os.path.lexists(f"/proc/self/fd/{name}")
        },
        "path": sys.path,
    }


async def refuse(message, fds):
    raise worker_side.Refused("because")


async def fail(message, fds):
    raise ValueError("a bug")


async def hang(message, fds):
    await asyncio.sleep(3600)


OPS = {f.__name__: f for f in (echo, join, leave, tell, who, refuse, fail, hang)}
SIDE = worker_side.Side(
    OPS, sandboxes=lambda: KEPT, leave_after_s=float(os.environ.get("LEAVE_AFTER_S", "60"))
)
asyncio.run(SIDE.run())
