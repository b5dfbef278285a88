"""The sandboxes that an MCP client acts on: the default one, those it names, and ports it had exposed.

The default one is made when a call needs it and belongs to the conversation: it ends with it. Sandboxes made on
request are found again by their id, and end by their own timeouts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from llm4agents import AsyncSandbox
from llm4agents.errors import ConflictError, LLM4AgentsError, SandboxDiedError, SandboxNotFoundError
from llm4agents.sdk._async.ports import AsyncForward
from llm4agents.sdk._async.transport import AsyncTransport, bound
from llm4agents.sdk.results import SandboxInfo

OnProgress = Callable[[str, str, "float | None"], Awaitable[None]]
KEEP_S = 86_400.0
"""How long one that was paused because its agent was silent is kept. An agent that was killed comes back to none."""
_GONE = (SandboxDiedError, SandboxNotFoundError, ConflictError)


class Boxes:
    """Safe to use from many calls at once."""

    def __init__(
        self,
        *,
        template: str,
        given: str | None,
        keep: bool,
        timeout: float,
        env: Mapping[str, str] | None = None,
        memory_mib: int | None = None,
        vcpus: int | None = None,
        network: Mapping[str, Any] | None = None,
        way: AsyncTransport | None = None,
        say: Callable[[str], None] = lambda said: None,
    ) -> None:
        """`way`: to the server, if it is not the one of the environment. `say`: to the user, at the end."""
        self.template = template
        self._way, self._say = way, say
        self.busy = 0
        """Calls under way."""
        self._given, self._keep = given, keep
        self._wish: dict[str, Any] = {
            "timeout": timeout,
            "on_timeout": "pause",
            "keep": KEEP_S,
            "env": env,
            "memory_mib": memory_mib,
            "vcpus": vcpus,
            "network": network,  # the user's to say: no tool has it
        }
        self._handles: dict[str, AsyncSandbox] = {}
        self._default: str | None = given
        self._making = asyncio.Lock()
        self._forwards: dict[tuple[str, int], AsyncForward] = {}

    async def create(self, template: str | None, on_progress: OnProgress, **wish: Any) -> AsyncSandbox:
        """A new sandbox; what `wish` leaves out is as for the default one."""
        wish = {**self._wish, **{name: value for name, value in wish.items() if value is not None}}
        with self._bound():
            made = await AsyncSandbox.create(template or self.template, on_progress=on_progress, **wish)
        self._handles[made.id] = made
        return made

    @contextlib.asynccontextmanager
    async def use(self, id: str | None, on_progress: OnProgress) -> AsyncIterator[AsyncSandbox]:
        """The sandbox of a call; the default one, made now if need be, when it names none.

        When the default one turns out to have ended, the error says so, and the next call has a new one.
        """
        self.busy += 1
        try:
            async with self._used(id, on_progress) as sandbox:
                yield sandbox
        finally:
            self.busy -= 1

    @contextlib.asynccontextmanager
    async def _used(self, id: str | None, on_progress: OnProgress) -> AsyncIterator[AsyncSandbox]:
        sandbox = await self._of(id, on_progress)
        try:
            yield sandbox
        except _GONE as error:
            if await self._ended(sandbox):
                await self._forget(sandbox.id)
                if id is None and self._given is None:
                    error.hint = "its files and variables are gone; the next call gets a new sandbox"
            raise

    async def _of(self, id: str | None, on_progress: OnProgress) -> AsyncSandbox:
        if id is None and self._default is None:
            async with self._making:
                if self._default is None:
                    metadata = {"made_by": "llm4agents mcp"}
                    self._default = (await self.create(None, on_progress, metadata=metadata)).id
        wanted = id or self._default
        assert wanted is not None
        if wanted not in self._handles:
            with self._bound():
                found = await AsyncSandbox.connect(wanted)
            if self._handles.setdefault(wanted, found) is not found:
                await found.close()  # another call was faster
        return self._handles[wanted]

    async def list(self) -> list[SandboxInfo]:
        with self._bound():
            return await AsyncSandbox.list()

    def _bound(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._way is None else bound(self._way)

    async def _ended(self, sandbox: AsyncSandbox) -> bool:
        try:
            return (await sandbox.info()).state in ("killed", "failed")
        except SandboxNotFoundError:
            return True
        except LLM4AgentsError:
            return False

    async def _forget(self, id: str) -> None:
        """Let go of a sandbox that has ended, or is about to."""
        await self._unexpose(id)
        if self._default == id:
            self._default = self._given if self._given != id else None
        handle = self._handles.pop(id, None)
        if handle is not None:
            await handle.close()

    async def expose(self, sandbox: AsyncSandbox, port: int, local: int) -> AsyncForward:
        """A local port that leads to one of the sandbox's; the same one when it is asked for again."""
        made = self._forwards.get((sandbox.id, port))
        if made is None:
            made = await sandbox.ports.forward(port, local)
            self._forwards[sandbox.id, port] = made
        return made

    async def _unexpose(self, id: str) -> None:
        for key in [key for key in self._forwards if key[0] == id]:
            await self._forwards.pop(key).aclose()

    async def kill(self, sandbox: AsyncSandbox) -> None:
        await self._unexpose(sandbox.id)
        await sandbox.kill()
        await self._forget(sandbox.id)

    async def pause(self, sandbox: AsyncSandbox) -> None:
        await self._unexpose(sandbox.id)
        await sandbox.pause()

    async def close(self) -> None:
        """The client has gone: the default sandbox ends, or is paused."""
        for id in {key[0] for key in self._forwards}:
            await self._unexpose(id)
        default = self._handles.get(self._default or "")
        if default is not None and self._given is None:
            with contextlib.suppress(*_GONE):
                if self._keep:
                    await default.pause()
                    self._say(f"paused: {default.id} (llm4agents mcp --sandbox {default.id} goes on with it)")
                else:
                    await default.kill()
        await self.let_go()

    async def let_go(self) -> None:
        """Leave all sandboxes to their own timeouts."""
        for handle in list(self._handles.values()):
            await handle.close()
        self._handles.clear()
