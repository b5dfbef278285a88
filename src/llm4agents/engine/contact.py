"""First contact with a machine's agent: the channel, the session, and a machine that ends meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final

from llm4agents.errors import BootError, LLM4AgentsError, SandboxDiedError, TimedOutError
from llm4agents.guest.channel import Session
from llm4agents.guest.verbs import Agent
from llm4agents.vmm.base import Exit, Machine
from llm4agents.vmm.process import printable

_PANIC_MAX: Final = 200


def exit_words(ended: Exit) -> str:
    """How a machine ended, in words that stand after "the machine "."""
    if ended.reason == "deadline":
        return "was ended at its deadline"
    if ended.reason == "stopped":
        return "was stopped"
    if "Kernel panic" in ended.console_tail:
        # The guest's words, or whoever's had its console: they end in a reason, and on a terminal.
        line = next(line for line in ended.console_tail.splitlines() if "Kernel panic" in line)
        said = printable(line.partition("Kernel panic")[2])[:_PANIC_MAX].strip(" -:")
        return f"ended: its kernel panicked ({said})"
    if ended.signal is not None:
        return f"ended: its VMM was killed by signal {ended.signal}"
    if ended.code == 0:
        return "ended: the guest powered off or rebooted"
    return f"ended: its VMM exited with {ended.code}" if ended.code is not None else "ended without a trace"


async def greet(machine: Machine, *, timeout: float, dirty: bool = False) -> Agent:
    """Open a session with the machine's agent, on a machine that runs.

    Raises BootError with the tail of the console when the machine ends or stays silent.
    """
    opening = asyncio.create_task(_opened(machine, timeout, dirty))
    ending = asyncio.create_task(machine.wait())
    try:
        await asyncio.wait({opening, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not opening.done() or opening.exception() is not None:
            # A channel that breaks is how a dying machine is seen first; give its end a moment to be known.
            await asyncio.wait({ending}, timeout=0.5 if opening.done() else 0)
        if ending.done() and not (opening.done() and opening.exception() is None):
            ended = ending.result()
            raise BootError(
                f"the machine {exit_words(ended)} before its agent answered",
                hint="its console's last lines are in the details",
                console=ended.console_tail[-2000:],
            )
        try:
            return Agent(opening.result())
        except LLM4AgentsError as error:
            raise BootError(
                f"the machine's agent did not answer: {error.message}", hint=error.hint
            ) from error
    finally:
        ending.cancel()
        if not opening.done():
            opening.cancel()
            with contextlib.suppress(asyncio.CancelledError, LLM4AgentsError):
                await opening


async def _opened(machine: Machine, timeout: float, dirty: bool) -> Session:
    """A session, its connection made first: with some VMMs that waits for the guest as well."""
    began = time.monotonic()
    try:
        channel = await asyncio.wait_for(machine.channel(), timeout)
    except TimeoutError:
        raise TimedOutError(f"the guest took no connection within {timeout:g} s") from None
    return await Session.open(channel, timeout=max(1.0, timeout - (time.monotonic() - began)), dirty=dirty)


async def died(machine: Machine, error: LLM4AgentsError, what: str) -> LLM4AgentsError:
    """The error to show for one that came with the end of the machine: why it ended, if it has."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            ended = await machine.wait()
            return SandboxDiedError(
                f"{what}: the machine {exit_words(ended)}", console=ended.console_tail[-2000:]
            )
    return error
