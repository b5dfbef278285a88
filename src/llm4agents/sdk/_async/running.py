"""What runs in a sandbox: cells of code, commands, terminals. The half of `AsyncSandbox` that is called most.

Not here: processes by their ids (`processes`), the contexts of cells (`contexts`), the sandbox itself (`sandbox`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from llm4agents import limits
from llm4agents.sdk import _process, _wire, results
from llm4agents.sdk._async.commands import AsyncExecStream
from llm4agents.sdk._async.contexts import AsyncContexts
from llm4agents.sdk._async.processes import AsyncProcesses
from llm4agents.sdk._async.terminal import AsyncTerminal
from llm4agents.sdk._async.transport import AsyncTransport
from llm4agents.sdk._runtime import async_call

_CODE_END = frozenset({"end"})
_EXEC_END = frozenset({"exit"})

OnText = Callable[[str], Any]
OnResult = Callable[[results.Result], Any]


class AsyncRunning(ABC):
    """What a sandbox has, for what runs in it."""

    processes: AsyncProcesses
    contexts: AsyncContexts
    _transport: AsyncTransport

    @property
    @abstractmethod
    def id(self) -> str:
        """Of the sandbox."""

    async def run_code(
        self,
        code: str,
        *,
        language: str | None = None,
        context: str | results.CodeContext = "default",
        env: Mapping[str, str] | None = None,
        timeout: float | None = limits.CODE_TIMEOUT_S,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
        on_result: OnResult | None = None,
    ) -> results.Execution:
        """Runs a cell; its state is kept for the next one of the same `context` (see `contexts`).

        `language` is `python`, `javascript`, `typescript` or `bash`; None means that of the context, or what
        the template is for. A bash cell's value is its exit status: not 0 is the error `ExitStatus`.
        `timeout` in seconds, 0 for none: a cell that runs longer is interrupted and says so in `.error`.
        The callbacks get output and rich results as they come. Leaving this call early (Ctrl-C,
        cancellation) interrupts the cell. An exception in the cell is a result, see `Execution.check`.
        """
        stream = any((on_stdout, on_stderr, on_result))
        body = _wire.code_body(
            code, context=context, language=language, env=env, timeout=timeout, stream=stream
        )
        path, wait_s = f"/v1/sandboxes/{self.id}/code", _wire.wait_s(timeout)
        if not stream:
            answer = await self._transport.json("POST", path, body, wait_s=wait_s, sandbox=self.id)
            return results.execution(answer)
        callbacks = {"stdout": on_stdout, "stderr": on_stderr, "result": on_result}
        built = _wire.ExecutionBuilder()
        stream_of = await self._transport.events(path, body, ends=_CODE_END, wait_s=wait_s, sandbox=self.id)
        end: dict[str, Any] = {}
        async with stream_of as events:
            async for event in events:
                value = built.feed(event)
                if value is not None:
                    await async_call(callbacks[event["type"]], value)
                end = event
        return built.build(end)

    async def interrupt(
        self, context: str | results.CodeContext = "default", *, language: str | None = None
    ) -> None:
        """Interrupts the cell that runs in `context`, as Ctrl-C would; nothing when none runs."""
        body = _wire.without_none({"context": results.context_id(context), "language": language})
        await self._transport.json("POST", f"/v1/sandboxes/{self.id}/code/interrupt", body, sandbox=self.id)

    async def restart(
        self, context: str | results.CodeContext = "default", *, language: str | None = None
    ) -> None:
        """Gives `context` a fresh interpreter; its variables are gone, files stay."""
        await self.contexts.restart(context, language=language)

    async def exec(
        self,
        cmd: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        timeout: float | None = limits.EXEC_TIMEOUT_S,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
        id: str | None = None,
        tag: str | None = None,
        on_disconnect: Literal["detach", "kill"] = "detach",
    ) -> results.ExecResult:
        """Runs a command and waits: a string in a shell, a sequence as it is.

        `cwd` defaults to the home of `user` (default `user`; `root` is allowed: it is the guest's own).
        `timeout` in seconds, 0 for none: then it is killed and `.timed_out` is set. A non-zero exit is a
        result, see `ExecResult.check`.

        Leaving this call early (Ctrl-C, cancellation, a lost connection) leaves the command running, unless
        `on_disconnect="kill"`: `processes.connect(id)` reads on. SandboxPausedError has its id and the offset to
        read on from in `details`.
        """
        if on_stdout is None and on_stderr is None:
            body = _wire.exec_body(
                cmd, env=env, cwd=cwd, user=user, stdin=stdin, timeout=timeout, stream=False
            )
            body.update(_process.manner(id, tag, on_disconnect))
            path = f"/v1/sandboxes/{self.id}/exec"
            answer = await self._transport.json(
                "POST", path, body, wait_s=_wire.wait_s(timeout), sandbox=self.id
            )
            return results.exec_result(answer)
        stream = await self.exec_stream(
            cmd,
            env=env,
            cwd=cwd,
            user=user,
            stdin=stdin,
            timeout=timeout,
            id=id,
            tag=tag,
            on_disconnect=on_disconnect,
        )
        callbacks = {"stdout": on_stdout, "stderr": on_stderr}
        kept = {name: _wire.Collector(limits.EXEC_OUTPUT_BYTES_MAX) for name in callbacks}
        async with stream:
            async for output in stream:
                text = kept[output.channel].feed(output.data)
                if text:
                    await async_call(callbacks[output.channel], text)
        for name, collector in kept.items():
            if rest := collector.flush():
                await async_call(callbacks[name], rest)
        return results.exec_end(
            stream.end or {},
            kept["stdout"].bytes(),
            kept["stderr"].bytes(),
            truncated=kept["stdout"].truncated or kept["stderr"].truncated,
        )

    async def exec_stream(
        self,
        cmd: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        timeout: float | None = limits.EXEC_TIMEOUT_S,
        id: str | None = None,
        tag: str | None = None,
        on_disconnect: Literal["detach", "kill"] = "detach",
    ) -> AsyncExecStream:
        """Starts a command: an iterator of `Output`, which then has `.result`. Arguments as of `exec`.

        Use it as a context manager. Leaving it early leaves the command running, unless
        `on_disconnect="kill"`; `processes.connect(stream.id, stream.offset)` reads on.
        """
        body = _wire.exec_body(cmd, env=env, cwd=cwd, user=user, stdin=stdin, timeout=timeout, stream=True)
        body.update(_process.manner(id, tag, on_disconnect))
        path = f"/v1/sandboxes/{self.id}/exec"
        events = await self._transport.events(
            path, body, ends=_EXEC_END, wait_s=_wire.wait_s(timeout), sandbox=self.id
        )
        stream = AsyncExecStream(events)
        try:
            await stream._start()
        except BaseException:
            await stream.aclose()
            raise
        return stream

    async def terminal(
        self,
        rows: int = 24,
        cols: int = 80,
        cmd: str | Sequence[str] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        term: str | None = None,
        id: str | None = None,
        tag: str | None = None,
        timeout: float | None = None,
    ) -> AsyncTerminal:
        """A terminal in the sandbox, with a login shell in it or `cmd`; see `AsyncTerminal`."""
        process = await self.processes.start(
            _process.SHELL if cmd is None else cmd,
            env=env,
            cwd=cwd,
            user=user,
            tty=(rows, cols),
            term=term,
            id=id,
            tag=tag,
            timeout=timeout,
        )
        return await AsyncTerminal._attach(self._transport, self.id, process.id, 0, stdin=True, owned=True)
