"""The tools. Each is thin: arguments to a call of the SDK, its result to content, its errors to tool errors.

Not here: how they are served (`cli.mcp` over stdio, `api.mcp` over HTTP).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

from mcp.server.mcpserver import Context, MCPServer
from mcp_types import CallToolResult, ContentBlock, ToolAnnotations
from pydantic import Field

from llm4agents import AsyncSandbox, __version__, limits
from llm4agents.errors import InvalidRequestError, LLM4AgentsError, ProtectedPathError
from llm4agents.sdk._landing import Downloaded
from llm4agents.tools import content, host_paths
from llm4agents.tools.boxes import Boxes, OnProgress

Ctx = Context[Any, Any]
BoxesOf = Callable[[Ctx], Boxes]
"""The sandboxes of whoever makes a call."""
P = ParamSpec("P")
R = TypeVar("R")

READ_BYTES = 262_144
INSTRUCTIONS = """\
Runs code, commands and servers in a Linux microVM of its own: a Debian system with its own kernel, disk and
processes, apart from the user's machine, and with no network access but what the user has allowed, usually none: what
is refused says why. Calls that name no sandbox_id share one default sandbox, which is made when it is first needed and
ends with this conversation; variables, files and processes stay in it between calls. Relative paths start at
/home/user. Copy results that must outlive it out of it.\
"""
_REMOTE_INSTRUCTIONS = INSTRUCTIONS.replace(
    "ends with this conversation", "is paused when it is not used, and kept for a day"
)

Which = Annotated[str | None, Field(description="A sandbox's id; leave it out for the default sandbox.")]
_READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
_ACTS = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=False)
_ENDS = ToolAnnotations(read_only_hint=False, destructive_hint=True, open_world_hint=False)


def make(of: BoxesOf, host_root: Path | None = None, *, remote: bool = False) -> MCPServer:
    """The server, with the tools for host paths only if there is a directory for them.

    `remote`: its user is on another machine; ports are URLs of the server's then, not of his machine.
    """
    said = _REMOTE_INSTRUCTIONS if remote else INSTRUCTIONS
    server = MCPServer("llm4agents", version=__version__, instructions=said, log_level="WARNING")
    _life(server, of)
    _running(server, of)
    _remote_ports(server, of) if remote else _local_ports(server, of)
    _files(server, of)
    if host_root is not None:
        _host_files(server, of, host_root)
    return server


def _tool(
    server: MCPServer, annotations: ToolAnnotations, note: str = ""
) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Awaitable[R]]]:
    """Registers a tool; its docstring is what agents read, its errors are told as they are meant to be read."""

    def register(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
        @functools.wraps(function)
        async def told(*args: P.args, **kwargs: P.kwargs) -> R | CallToolResult:
            try:
                return await function(*args, **kwargs)
            except LLM4AgentsError as error:
                return CallToolResult(content=[content.text(content.problem(error))], is_error=True)

        described = f"{inspect.cleandoc(function.__doc__ or '')} {note}".rstrip()
        server.tool(description=described, annotations=annotations, structured_output=False)(told)
        return function

    return register


def _progress(ctx: Ctx) -> OnProgress:
    """Tells the client how the build of a template goes: a first call may wait for one for minutes."""
    count = 0

    async def tell(step: str, detail: str, fraction: float | None) -> None:
        nonlocal count
        count += 1  # it must grow with each notification, which fractions of several steps do not
        await ctx.report_progress(count, None, f"{step} {detail}".strip())

    return tell


def _life(server: MCPServer, of: BoxesOf) -> None:
    @_tool(server, _ACTS)
    async def create_sandbox(
        ctx: Ctx,
        template: Annotated[str | None, Field(description="For example base or python.")] = None,
        timeout_s: Annotated[float | None, Field(description="Idle seconds before it is paused.")] = None,
        env: Annotated[dict[str, str] | None, Field(description="For every command and cell.")] = None,
        memory_mib: int | None = None,
        vcpus: int | None = None,
        metadata: dict[str, str] | None = None,
    ) -> str:
        """Create a further sandbox and return its id. Not needed for the default one: just run something."""
        made = await of(ctx).create(
            template,
            _progress(ctx),
            timeout=timeout_s,
            env=env,
            memory_mib=memory_mib,
            vcpus=vcpus,
            metadata=metadata,
        )
        return made.id

    @_tool(server, _READS)
    async def list_sandboxes(
        ctx: Ctx,
        all: Annotated[bool, Field(description="Also those that have ended.")] = False,
    ) -> str:
        """List the sandboxes of this server: id, state, template."""
        found = await of(ctx).list()
        return content.cut(
            content.sandboxes([info for info in found if all or info.state not in ("killed", "failed")])
        )

    @_tool(server, _ACTS)
    async def pause_sandbox(ctx: Ctx, sandbox_id: Which = None) -> str:
        """Pause a sandbox: memory, processes and files are kept on disk, and cost no memory until it is resumed."""
        async with of(ctx).use(sandbox_id, _progress(ctx)) as sandbox:
            await of(ctx).pause(sandbox)
            return f"{sandbox.id} is paused; the next call that needs it resumes it"

    @_tool(server, _ACTS)
    async def resume_sandbox(ctx: Ctx, sandbox_id: Which = None) -> str:
        """Resume a paused sandbox, where it was."""
        async with of(ctx).use(sandbox_id, _progress(ctx)) as sandbox:
            await sandbox.resume()
            return f"{sandbox.id} is running"

    @_tool(server, _ENDS)
    async def kill_sandbox(ctx: Ctx, sandbox_id: Which = None) -> str:
        """End a sandbox; its memory and files are gone."""
        async with of(ctx).use(sandbox_id, _progress(ctx)) as sandbox:
            await of(ctx).kill(sandbox)
            return f"{sandbox.id} is gone"


def _running(server: MCPServer, of: BoxesOf) -> None:
    @_tool(server, _ACTS)
    async def run_code(
        ctx: Ctx,
        code: str,
        sandbox_id: Which = None,
        language: Annotated[
            Literal["python", "javascript", "typescript", "bash"] | None,
            Field(description="Default: what the template is for, mostly python."),
        ] = None,
        context: Annotated[str, Field(description="Cells of one context share variables.")] = "default",
        timeout_s: Annotated[float, Field(description="0: no limit.")] = limits.CODE_TIMEOUT_S,
    ) -> list[ContentBlock]:
        """Run code as a cell of a notebook: what it prints and the value of its last expression are returned.

        Variables and imports are kept for the next cell. Charts (matplotlib) are returned as pictures.
        """
        async with of(ctx).use(sandbox_id, _progress(ctx)) as sandbox:
            done = await sandbox.run_code(code, language=language, context=context, timeout=timeout_s)
            return content.execution(done)

    @_tool(server, _ACTS)
    async def exec(
        ctx: Ctx,
        command: Annotated[str, Field(description="A shell command line.")],
        sandbox_id: Which = None,
        cwd: Annotated[str | None, Field(description="Default: /home/user.")] = None,
        env: dict[str, str] | None = None,
        user: Annotated[str | None, Field(description="Default: user; root is allowed.")] = None,
        stdin: str | None = None,
        timeout_s: Annotated[float, Field(description="0: no limit.")] = limits.EXEC_TIMEOUT_S,
    ) -> list[ContentBlock]:
        """Run a shell command and wait for its end. A server: start it with `nohup … >log 2>&1 &`."""
        async with of(ctx).use(sandbox_id, _progress(ctx)) as sandbox:
            done = await sandbox.exec(command, cwd=cwd, env=env, user=user, stdin=stdin, timeout=timeout_s)
            return content.command(done)


def _local_ports(server: MCPServer, of: BoxesOf) -> None:
    @_tool(server, _ACTS)
    async def expose_port(
        ctx: Ctx,
        port: Annotated[int, Field(ge=1, le=65_535)],
        sandbox_id: Which = None,
        local_port: Annotated[
            int, Field(ge=0, le=65_535, description="Of the user's machine; 0: any that is free.")
        ] = 0,
    ) -> str:
        """Make a TCP port of the sandbox reachable on the user's machine; returns its URL.

        For a web page, a dev server or an API that runs in the sandbox. It holds while this conversation lasts.
        """
        async with of(ctx).use(sandbox_id, _progress(ctx)) as sandbox:
            return (await of(ctx).expose(sandbox, port, local_port)).url


def _remote_ports(server: MCPServer, of: BoxesOf) -> None:
    @_tool(server, _ACTS)
    async def expose_port(
        ctx: Ctx,
        port: Annotated[int, Field(ge=1, le=65_535)],
        sandbox_id: Which = None,
        path: Annotated[str, Field(description="Of the page.")] = "/",
        expires_s: Annotated[
            float, Field(ge=1, le=limits.PORT_URL_S_MAX, description="How long the URL opens the port.")
        ] = limits.PORT_URL_S,
    ) -> str:
        """Return a URL under which whoever has it can reach a TCP port of the sandbox that speaks HTTP.

        For a web page, a dev server or an API that runs in the sandbox.
        """
        async with of(ctx).use(sandbox_id, _progress(ctx)) as sandbox:
            return await sandbox.ports.url(port, path=path, expires=expires_s)


def _files(server: MCPServer, of: BoxesOf) -> None:
    @_tool(server, _READS)
    async def read_file(
        ctx: Ctx,
        path: str,
        sandbox_id: Which = None,
        offset: Annotated[int, Field(ge=0, description="In bytes.")] = 0,
        length: Annotated[int, Field(ge=1, le=4_194_304, description="In bytes.")] = READ_BYTES,
        encoding: Annotated[
            Literal["auto", "base64"],
            Field(description="auto: text as text, pictures as pictures; base64: any bytes."),
        ] = "auto",
    ) -> list[ContentBlock]:
        """Read a file of the sandbox, or a part of it."""
        async with of(ctx).use(sandbox_id, _progress(ctx)) as sandbox:
            return await _read(sandbox, path, offset, length, encoding)

    @_tool(server, _ENDS)
    async def write_file(
        ctx: Ctx,
        path: str,
        text: Annotated[str, Field(description="The whole content, as `encoding` says.")],
        sandbox_id: Which = None,
        encoding: Literal["text", "base64"] = "text",
        executable: bool = False,
    ) -> str:
        """Write a file of the sandbox, in place of what was there; missing directories are made."""
        async with of(ctx).use(sandbox_id, _progress(ctx)) as sandbox:
            mode = 0o755 if executable else None
            size = await sandbox.files.write(path, _decoded(text, encoding), mode=mode)
            return f"{size} bytes written to {path}"

    @_tool(server, _READS)
    async def list_files(
        ctx: Ctx,
        path: Annotated[str, Field(description="A directory.")] = "/home/user",
        sandbox_id: Which = None,
        depth: Annotated[int, Field(ge=1, le=16, description="Levels below it.")] = 1,
    ) -> str:
        """List the files of a directory of the sandbox."""
        async with of(ctx).use(sandbox_id, _progress(ctx)) as sandbox:
            return content.cut(
                content.entries(await sandbox.files.list("~" if path == "." else path, depth=depth))
            )


async def _read(
    sandbox: AsyncSandbox, path: str, offset: int, length: int, encoding: str
) -> list[ContentBlock]:
    size = (await sandbox.files.stat(path)).size
    data = await sandbox.files.read(path, format="bytes", offset=offset, length=length)
    end = offset + len(data)
    rest = [content.text(f"[bytes {offset} to {end} of {size}]")] if offset or end < size else []
    if encoding == "base64":
        return [content.text(base64.b64encode(data).decode("ascii")), *rest]
    if not offset and (mime := content.image_type(data)) is not None:
        if end < size <= content.IMAGE_BYTES_MAX:
            data = await sandbox.files.read(path, format="bytes")
        return [content.image(data, mime)] if len(data) == size else [content.text(f"[{mime}, {size} bytes]")]
    try:
        # A part may begin or end in the middle of a character.
        said = data.decode(errors="replace" if rest else "strict")
    except UnicodeDecodeError:
        return [
            content.text(
                f"[a binary file of {size} bytes: read it with encoding base64, or run a tool on it]"
            )
        ]
    return [content.text(said), *rest]


def _decoded(said: str, encoding: str) -> bytes:
    if encoding == "text":
        return said.encode()
    try:
        return base64.b64decode(said, validate=True)
    except binascii.Error as error:
        raise InvalidRequestError(f"this is not base64: {error}") from error


def _host_files(server: MCPServer, of: BoxesOf, root: Path) -> None:
    note = f"On the user's machine only paths below {root.resolve()} are allowed; relative ones start there."

    @_tool(server, _ACTS, note)
    async def upload(
        ctx: Ctx,
        host_path: Annotated[str, Field(description="A file or directory of the user's machine.")],
        path: Annotated[str, Field(description="Where to in the sandbox.")],
        sandbox_id: Which = None,
    ) -> str:
        """Copy a file or directory of the user's machine into the sandbox."""
        source = host_paths.inside(root, host_path)
        await asyncio.to_thread(host_paths.check_tree, root, source)
        async with of(ctx).use(sandbox_id, _progress(ctx)) as sandbox:
            return f"copied to {await sandbox.files.upload(source, path)}"

    @_tool(server, _ENDS, note)
    async def download(
        ctx: Ctx,
        path: Annotated[str, Field(description="A file or directory of the sandbox.")],
        host_path: Annotated[str, Field(description="Where to on the user's machine.")],
        sandbox_id: Which = None,
    ) -> str:
        """Copy a file or directory of the sandbox to the user's machine.

        What that machine would obey without being asked (.bashrc, .git/hooks, .vscode/tasks.json…) is left out.
        """
        target = host_paths.inside(root, host_path)
        async with of(ctx).use(sandbox_id, _progress(ctx)) as sandbox:
            return content.downloaded(await _download(sandbox, path, target))


async def _download(sandbox: AsyncSandbox, path: str, target: Path) -> Downloaded:
    try:
        return await sandbox.files.download(path, target)
    except ProtectedPathError as error:
        error.hint = content.ASK_THE_USER
        raise
