"""`ps`, `logs`, `attach`, `shell`: processes of a sandbox that outlive calls, and terminals."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llm4agents.cli import options
from llm4agents.errors import InvalidRequestError, LLM4AgentsError, NotFoundError

if TYPE_CHECKING:
    from llm4agents import Sandbox
    from llm4agents.sdk._sync.processes import Process

Id = Annotated[str, typer.Argument(metavar="ID", help="A sandbox, or a unique beginning of its id.")]
Proc = Annotated[
    str | None,
    typer.Argument(
        metavar="PROCESS", help="Its id, a unique beginning of it, or its tag; else the only one."
    ),
]


def ps(
    id: Annotated[str | None, typer.Argument(metavar="ID", help="A sandbox; without it, as ls.")] = None,
    json: options.Json = False,
) -> None:
    """List the processes of a sandbox (without ID: the sandboxes, as ls)."""
    from llm4agents.cli import output, sandboxes

    if id is None:
        sandboxes.ls(all=False, state=None, metadata=None, json=json)
        return
    sandbox = _sandbox(id)
    found = [process.info for process in sandbox.processes.list()]
    if json:
        output.emit({"processes": [_as_dict(info) for info in found]})
        return
    rows = [
        (
            info.id,
            None if info.tag is None else _plain(info.tag),
            info.pid,
            _state(info),
            output.when(info.started_at),
            output.size(info.offset),
            _line(info.argv),
        )
        for info in found
    ]
    output.table(("PROCESS", "TAG", "PID", "STATE", "STARTED", "OUTPUT", "COMMAND"), rows)


def logs(
    id: Id,
    process: Proc = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until it ends.")] = False,
    offset: Annotated[int, typer.Option("--from", metavar="OFFSET", help="Begin at this byte of it.")] = 0,
) -> None:
    """Show what a process has said; with -f also what it goes on to say."""
    from llm4agents.cli import output

    sandbox = _sandbox(id)
    found = _find(sandbox, process)
    found.offset = offset
    if follow:
        for piece in found:
            _show(piece.channel, piece.data)
        gap = found.gap
    else:
        gap, more = 0, True
        while more:
            read = found.read()
            found.offset, more, gap = read.offset, read.more, gap + read.gap
            for piece in read.pieces:
                _show(piece.channel, piece.data)
    if gap:
        output.say(f"{output.size(gap)} of it were no longer kept")


def attach(
    id: Id,
    process: Proc = None,
    offset: Annotated[
        int | None,
        typer.Option("--from", metavar="OFFSET", help="Show it from this byte on; default: from now on."),
    ] = None,
) -> None:
    """Attach this terminal to a process; Ctrl-] leaves it to itself. Its exit code is passed on."""
    sandbox = _sandbox(id)
    found = _find(sandbox, process)
    stdin = found.info.stdin
    _lend(sandbox, found, offset, stdin=stdin, raw=found.info.tty and _is_terminal(), forget=False)


def shell(
    id: Id,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- CMD...]", help="Instead of a login shell.")
    ] = None,
    user: options.User = None,
    cwd: Annotated[str | None, typer.Option(help="Default: the user's home.")] = None,
    env: options.Env = None,
    tag: Annotated[str | None, typer.Option(help="To find it again by.")] = None,
) -> None:
    """Open a terminal in a sandbox; Ctrl-] leaves it running. The shell's exit code is passed on.

    Without a terminal here (a pipe) the shell reads what comes and has none either.
    """
    words = [word for at, word in enumerate(command or []) if at or word != "--"]
    run_in_terminal(_sandbox(id), words, user=user, cwd=cwd, env=options.pairs(env, "--env"), tag=tag)


def run_in_terminal(
    sandbox: Sandbox, words: list[str], *, timeout: float | None = None, **wanted: Any
) -> None:
    """Start a shell or a command with this terminal as its own, and exit as it does."""
    from llm4agents.cli import terminal as screen
    from llm4agents.sdk._process import SHELL

    raw = _is_terminal()
    cmd: str | list[str] = SHELL if not words else words[0] if len(words) == 1 else words
    process = sandbox.processes.start(
        cmd,
        tty=screen.size() if raw else None,
        term=os.environ.get("TERM", "xterm-256color") if raw else None,
        stdin=True,
        timeout=timeout,
        **wanted,
    )
    _lend(sandbox, process, 0, stdin=True, raw=raw, forget=True)


def _lend(
    sandbox: Sandbox, process: Process, offset: int | None, *, stdin: bool, raw: bool, forget: bool
) -> None:
    from llm4agents.cli import output
    from llm4agents.cli import terminal as screen

    terminal = process.attach(offset=offset, stdin=stdin)
    try:
        status = screen.lend(sandbox, terminal, raw=raw)
    except KeyboardInterrupt:
        if forget:
            process.kill()  # Ctrl-C without a terminal of its own: the one who pressed it means it
        raise
    if status is None:
        output.say(f"detached; llm4agents attach {sandbox.id} {process.id}")
        raise typer.Exit(0)
    if forget:
        with contextlib.suppress(LLM4AgentsError):
            process.kill()  # it has ended: this removes it from the list
    raise typer.Exit(status)


def _sandbox(id: str) -> Sandbox:
    from llm4agents import Sandbox
    from llm4agents.cli import ids

    return Sandbox.connect(ids.resolve(id))


def _find(sandbox: Sandbox, given: str | None) -> Process:
    """The process that `given` means. Raises NotFoundError, InvalidRequestError when it may be several."""
    known = sandbox.processes.list()
    if given is None:
        found = [process for process in known if process.info.running] or known
    else:
        exact = [process for process in known if process.id == given]
        by_tag = [process for process in known if process.tag == given]
        starts = (given, f"proc_{given}")
        found = exact or by_tag or [process for process in known if process.id.startswith(starts)]
    hint = f"llm4agents ps {sandbox.id} shows them"
    if not found:
        raise NotFoundError(f"no process {given}" if given else "there is no process", hint=hint)
    if len(found) > 1:
        raise InvalidRequestError(f"{given or 'it'} may be {', '.join(p.id for p in found[:5])}", hint=hint)
    return found[0]


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def _show(channel: str, data: bytes) -> None:
    to = sys.stdout.buffer if channel == "stdout" else sys.stderr.buffer
    to.write(data)
    to.flush()


def _state(info: Any) -> str:
    if info.running:
        return "running"
    if info.timed_out:
        return "timed out"
    return f"signal {info.signal}" if info.signal else f"exit {info.exit_code}"


def _line(argv: list[str]) -> str:
    """A command in one line that no terminal takes for anything else."""
    text = argv[-1] if argv[:2] == ["/bin/sh", "-c"] and len(argv) == 5 else " ".join(argv)
    return _plain(text)


def _plain(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text[:60])


def _as_dict(info: Any) -> dict[str, Any]:
    body = dataclasses.asdict(info)
    body["started_at"] = None if info.started_at is None else info.started_at.isoformat()
    return body
