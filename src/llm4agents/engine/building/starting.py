"""What lives in a frozen machine of a template of one's own: started, waited for, warmed.

It is a managed process called `start`, so that its output can be read in every clone. Not here: the services of
built-in templates (`warming`).
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import shlex
from typing import Final

from llm4agents import limits
from llm4agents import recipe as recipes
from llm4agents.engine.building.commands import argv
from llm4agents.engine.parts import Variant
from llm4agents.errors import (
    GuestError,
    InvalidRequestError,
    LLM4AgentsError,
    PathNotFoundError,
    TemplateBuildError,
)
from llm4agents.guest.processes import ProcessInfo
from llm4agents.guest.verbs import Agent
from llm4agents.images.progress import Progress
from llm4agents.recipe import Ready, Run, Start, State

PROCESS: Final = "start"
_LOOK_S: Final = (0.05, 0.5)
"""Between two looks whether it is ready: first, and at most."""


def words(run: Run) -> str:
    return run if isinstance(run, str) else shlex.join(run)


def failed(what: str, command: str, why: str, output: bytes = b"", **more: object) -> TemplateBuildError:
    """The error of a part of the recipe, with what was said last."""
    said = output[-limits.STEP_OUTPUT_TAIL_BYTES :].decode("utf-8", "replace").strip()
    last = telling(said)
    return TemplateBuildError(
        f"{what} failed: {command[:200]}: {why}" + (f": {last[:300]}" if last else ""),
        hint="the steps before it are kept: mend it and build again" if what != "start" else None,
        command=command[:2_000],
        output=said,
        **more,
    )


def telling(said: str) -> str:
    """Of what a failed command has said the line that says most: the last one, or of npm, which ends with advice, the
    first that is more than a code. Pure."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("npm error ")]
    if errors and lines[-1].startswith("npm "):
        return next((line for line in errors if not line.startswith("npm error code ")), errors[0])
    return lines[-1] if lines else ""


async def start(agent: Agent, wanted: Start, run: Run, state: State, progress: Progress) -> None:
    """Start it and wait until it is ready. `run`: its command. Raises TemplateBuildError with what it said."""
    command = words(run)
    progress("start", command[:160], None)
    try:
        attached = await agent.start(
            argv(run),
            id=PROCESS,
            tag="template",
            env=dict(state.env),
            cwd=state.workdir,
            user=wanted.user or state.user,
            init=await _is_systemd(agent, run),
        )
        attached.detach()
    except (GuestError, InvalidRequestError) as error:
        raise failed("start", command, error.message, step="start") from error
    if wanted.ready is None:
        return
    loop = asyncio.get_running_loop()
    until, pause = loop.time() + wanted.timeout_s, _LOOK_S[0]
    while True:
        ready = await _is(agent, wanted.ready, state)
        info = await _info(agent)
        if info is None or not info.running:
            ended = "it ended" if info is None else f"it ended with {_how(info)}"
            if not ready:
                raise failed(
                    "start", command, f"{ended} before it was ready", await _said(agent), step="start"
                )
        if ready:
            return
        if loop.time() > until:
            why = f"not ready ({wanted.ready.kind} {wanted.ready.value}) within {wanted.timeout_s:g} s"
            raise failed("start", command, why, await _said(agent), step="start", timed_out=True)
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, _LOOK_S[1])


async def again(agent: Agent, variant: Variant, progress: Progress) -> None:
    """Start what lives in the machines of `variant`, in one that was booted anew. It may fail: a cold boot is for the
    files."""
    if variant.start is None:
        return
    wanted = recipes.read_start(variant.start)
    if wanted.run is True:
        return
    state = State({}, variant.workdir, variant.user or "user")  # the agent knows the environment
    with contextlib.suppress(LLM4AgentsError):
        await start(agent, wanted, wanted.run, state, progress)


async def warm(agent: Agent, commands: tuple[Run, ...], state: State, progress: Progress) -> None:
    """Run each once. Raises TemplateBuildError when one fails."""
    for at, run in enumerate(commands):
        progress("warm", words(run)[:160], None)
        said = bytearray()
        try:
            process = await agent.exec(
                argv(run),
                env=dict(state.env),
                cwd=state.workdir,
                user=state.user,
                timeout_s=limits.READY_TIMEOUT_S_MAX,
            )
            async for _, data in process:
                said += data
                del said[: -limits.STEP_OUTPUT_TAIL_BYTES]
            status = await process.wait()
        except (GuestError, InvalidRequestError) as error:
            raise failed(f"warm[{at}]", words(run), error.message, step=f"warm[{at}]") from error
        if status.exit_code != 0:
            how = f"signal {status.signal}" if status.exit_code is None else f"exit code {status.exit_code}"
            raise failed(
                f"warm[{at}]", words(run), how, bytes(said), step=f"warm[{at}]", exit_code=status.exit_code
            )


async def _is_systemd(agent: Agent, run: Run) -> bool:
    """Whether that is systemd, by the file it is: it wants to be process 1, of a namespace of its own."""
    if isinstance(run, str) or posixpath.basename(run[0]) not in ("init", "systemd"):
        return False
    path = run[0] if run[0].startswith("/") else f"/sbin/{run[0]}"
    with contextlib.suppress(LLM4AgentsError):
        found = await agent.stat(path, user="root", follow=False)
        return posixpath.basename(found.target or path) == "systemd"
    return False


async def _is(agent: Agent, ready: Ready, state: State) -> bool:
    if ready.kind == "port":
        return any(port.port == ready.value for port in await agent.ports())
    if ready.kind == "file":
        try:
            await agent.stat(str(ready.value), user="root")
        except PathNotFoundError:
            return False
        return True
    assert not isinstance(ready.value, int)
    with contextlib.suppress(GuestError, InvalidRequestError):
        process = await agent.exec(
            argv(ready.value),
            env=dict(state.env),
            cwd=state.workdir,
            user=state.user,
            timeout_s=limits.READY_TIMEOUT_S,
        )
        return (await process.wait()).exit_code == 0
    return False


async def _info(agent: Agent) -> ProcessInfo | None:
    return next((info for info in await agent.processes() if info.id == PROCESS), None)


def _how(info: ProcessInfo) -> str:
    return f"signal {info.signal}" if info.exit_code is None else f"exit code {info.exit_code}"


async def _said(agent: Agent) -> bytes:
    """What it has said so far."""
    said = bytearray()
    with contextlib.suppress(LLM4AgentsError, TimeoutError):
        async with asyncio.timeout(2.0), await agent.attach(PROCESS, from_offset=0) as attached:
            async for _, _, data in attached:
                said += data
                del said[: -limits.STEP_OUTPUT_TAIL_BYTES]
                if not attached.pending():
                    break
    return bytes(said)
