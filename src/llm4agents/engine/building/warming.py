"""What a booted machine does before it is frozen: its services start, commands and cells run once.

Not here: booting and freezing it (`freezing`).
"""

from __future__ import annotations

import asyncio
import contextlib

from llm4agents.errors import BootError, GuestError, LLM4AgentsError
from llm4agents.guest import code
from llm4agents.guest.verbs import Agent, Service
from llm4agents.images.progress import Progress, silent
from llm4agents.images.spec import TemplateSpec


async def warm_up(
    agent: Agent, wanted: TemplateSpec, progress: Progress = silent, *, services_only: bool = False
) -> None:
    """Start the services of a template in a booted machine, and (unless `services_only`) run what warms it."""
    await agent.set_env(dict(wanted.environment))
    for service in wanted.warm_up.services:
        progress("warm", f"starting {service.name}", None)
        await agent.exec(
            list(service.argv),
            env=dict(service.env),
            user=service.user,
            cwd=service.cwd,
            service=Service(service.name, service.restore_signal),
        )
        if service.ready_socket is not None:
            await ready(agent, service.ready_socket, service.ready_timeout_s)
    if services_only:
        return
    steps = wanted.warm_up.steps
    for index, step in enumerate(steps):
        progress("warm", " ".join(step.argv)[:60], index / max(1, len(steps)))
        process = await agent.exec(list(step.argv), user=step.user, timeout_s=step.timeout_s)
        said = b""
        async for _, data in process:
            said = (said + data)[-2000:]
        status = await process.wait()
        if status.exit_code != 0 and not step.may_fail:
            words = (
                said.decode(errors="replace").strip() or f"it ended with {status.exit_code or status.signal}"
            )
            raise GuestError(f"`{' '.join(step.argv)[:80]}` failed: {words}")
    for index, cell in enumerate(wanted.warm_up.cells):
        progress("warm", "running Python", index / len(wanted.warm_up.cells))
        async with contextlib.aclosing(code.run(agent, cell, context="warm-up", timeout_s=120)) as events:
            async for _ in events:
                pass
    if wanted.warm_up.cells:
        await code.restart(agent, "warm-up")
        # The first cell of the context that people use; its answer must be in the frozen page cache too.
        async with contextlib.aclosing(code.run(agent, "None", timeout_s=120)) as events:
            async for _ in events:
                pass
        await code.restart(agent)


async def ready(agent: Agent, path: str, timeout_s: float) -> None:
    """Wait until something listens on the unix socket `path` in the guest."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        try:
            (await agent.connect(unix=path)).close()
            return
        except LLM4AgentsError as error:
            if loop.time() > deadline or agent.session.closed.done():
                raise BootError(f"nothing listens on {path} in the guest after {timeout_s:g} s") from error
        await asyncio.sleep(0.2)
