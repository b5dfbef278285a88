"""`create`, `exec`, `cp`, `ls`, `kill`."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llm4agents import limits
from llm4agents.cli import options
from llm4agents.errors import LLM4AgentsError, PathNotFoundError

if TYPE_CHECKING:
    from llm4agents import ExecResult, Sandbox

TIMED_OUT, NOT_FOUND = 124, 127


def create(
    template: options.Template = limits.DEFAULT_TEMPLATE,
    timeout: Annotated[
        float, typer.Option(help="Seconds without a call before it ends.")
    ] = limits.IDLE_TIMEOUT_S,
    life: Annotated[float, typer.Option(help="Seconds before it ends in any case.")] = limits.LIFE_S_MAX,
    env: options.Env = None,
    memory_mib: options.Memory = None,
    vcpus: options.Vcpus = None,
    disk_mib: Annotated[int | None, typer.Option(help="MiB of the disk that can be in use.")] = None,
    pids: Annotated[int | None, typer.Option(help="Processes and threads it can have.")] = None,
    output_rate: Annotated[int | None, typer.Option(help="Bytes a second of a command's output.")] = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for room on a full node.")] = 0.0,
    metadata: Annotated[list[str] | None, typer.Option(metavar="K=V", help="Repeatable.")] = None,
    on_timeout: Annotated[str, typer.Option(help="When its time is up: kill or pause.")] = "kill",
    keep: Annotated[float, typer.Option(help="Seconds a pause is kept.")] = limits.KEEP_S,
    net: options.Net = None,
    credential: options.Credential = None,
    rewrite: options.Rewrite = None,
    protect: options.Protect = None,
    volume: options.Volume = None,
    require_kvm: options.RequireKvm = False,
    vmm: options.Vmm = None,
    nested: options.Nested = False,
    public: Annotated[
        bool, typer.Option("--public", help="Anybody may reach its ports through the server.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Create a sandbox, leave it running, print its id."""
    from llm4agents import Sandbox
    from llm4agents.cli import output

    output.quiet_warnings()
    with output.Progress() as progress:
        sandbox = Sandbox.create(
            template,
            timeout=timeout,
            life=life,
            env=options.pairs(env, "--env"),
            memory_mib=memory_mib,
            vcpus=vcpus,
            disk_mib=disk_mib,
            pids=pids,
            output_rate=output_rate,
            wait=wait,
            metadata=options.pairs(metadata, "--metadata"),
            on_timeout=on_timeout,  # type: ignore[arg-type]  # the server says what there is
            keep=keep,
            network=options.network(net, credential, rewrite),
            protect=protect or (),
            volumes=options.volumes(volume),
            require_kvm=require_kvm,
            vmm=vmm,
            nested=nested,
            traffic={"public": True} if public else None,
            on_progress=progress,
        )
    if json:
        output.emit(as_dict(sandbox.info()))
    else:
        print(sandbox.id)


def exec_(
    id: Annotated[str, typer.Argument(metavar="ID", help="A sandbox, or a unique beginning of its id.")],
    command: Annotated[
        list[str], typer.Argument(metavar="-- CMD...", help="One word runs in a shell; several as they are.")
    ],
    user: options.User = None,
    cwd: Annotated[str | None, typer.Option(help="Default: the user's home.")] = None,
    env: options.Env = None,
    timeout: Annotated[float, typer.Option(help="Seconds; 0: no limit.")] = limits.EXEC_TIMEOUT_S,
    tty: Annotated[
        bool, typer.Option("--tty", "-t", help="With this terminal as its own, and no limit of time.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Leave it running, without a limit, and print its id.")
    ] = False,
    tag: Annotated[str | None, typer.Option(help="To find it again by: ps, logs, attach.")] = None,
    json: options.Json = False,
) -> None:
    """Run a command in a sandbox; its output, and its exit code, are passed on.

    stdin is passed in when it is not a terminal. A command that is killed for its timeout exits with 124. Ctrl-C
    kills it.
    """
    from llm4agents import Sandbox
    from llm4agents.cli import ids, output

    id = ids.resolve(id)
    sandbox = Sandbox.connect(id)
    if tty or detach:
        _unwatched(
            sandbox, command, tty, {"env": options.pairs(env, "--env"), "cwd": cwd, "user": user, "tag": tag}
        )
        return
    stdin = None if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer.read()
    command = command[1:] if command[0] == "--" else command
    if not command:
        raise typer.BadParameter("what to run is missing", param_hint="CMD")
    cmd: str | list[str] = command[0] if len(command) == 1 else command
    wanted: dict[str, Any] = {
        "env": options.pairs(env, "--env"),
        "cwd": cwd,
        "user": user,
        "stdin": stdin or None,
        "timeout": timeout,
        "tag": tag,
        "on_disconnect": "kill",
    }
    try:
        result = _exec(sandbox, cmd, wanted, json)
    except LLM4AgentsError as error:
        if error.details.get("code") != "exec_failed":
            raise
        output.report(error)
        raise typer.Exit(NOT_FOUND) from None
    if result.timed_out:
        output.say(f"killed: it ran longer than {timeout:g} s (--timeout)")
        raise typer.Exit(TIMED_OUT)
    raise typer.Exit(128 + (result.signal or 0) if result.exit_code is None else result.exit_code)


def _unwatched(sandbox: Sandbox, command: list[str], tty: bool, wanted: dict[str, Any]) -> None:
    """`exec --tty`, `exec --detach`."""
    from llm4agents.cli import processes

    words = command[1:] if command[0] == "--" else command
    if not words:
        raise typer.BadParameter("what to run is missing", param_hint="CMD")
    if tty:
        processes.run_in_terminal(sandbox, words, **wanted)
    print(sandbox.processes.start(words[0] if len(words) == 1 else words, **wanted).id)


def _exec(sandbox: Sandbox, cmd: str | list[str], wanted: dict[str, Any], json: bool) -> ExecResult:
    """Runs it with its output passed on as it comes, or (`json`) said at the end."""
    from llm4agents.cli import output

    if json:
        result = sandbox.exec(cmd, **wanted)
        names = ("exit_code", "signal", "stdout", "stderr", "timed_out", "duration_ms")
        output.emit({"sandbox": sandbox.id, **{name: getattr(result, name) for name in names}})
        return result
    with sandbox.exec_stream(cmd, **wanted) as stream:
        for piece in stream:
            to = sys.stdout.buffer if piece.channel == "stdout" else sys.stderr.buffer
            to.write(piece.data)
            to.flush()
    return stream.result


def cp(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="LOCAL or ID:PATH")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="LOCAL or ID:PATH")],
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="As cp's; directories are copied whole without it, too.")
    ] = False,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Left out of a directory copied out; repeatable.")
    ] = None,
    allow_protected: options.AllowProtected = False,
    user: options.User = None,
    json: options.Json = False,
) -> None:
    """Copy files into a sandbox (LOCAL ID:PATH) or out of one (ID:PATH LOCAL).

    A directory is copied with all that is in it; links in it stay links. What this machine would obey without being
    asked (.bashrc, .git/hooks, .vscode/tasks.json…) is not copied out, and named; the exit code is 5 then.
    """
    from llm4agents import Sandbox
    from llm4agents.cli import ids, output

    out, into = _remote(source), _remote(target)
    if (out is None) == (into is None):
        raise typer.BadParameter(
            "one of the two is ID:PATH, the other a path here", param_hint="SOURCE TARGET"
        )
    got = None
    with output.Progress() as progress:
        if into is not None:
            sandbox = Sandbox.connect(ids.resolve(into[0]))
            where = _into(sandbox, into[1], source, user)
            where = sandbox.files.upload(source, where, user=user, on_progress=progress.copied(source))
            done = f"{sandbox.id}:{where}"
        else:
            assert out is not None
            sandbox = Sandbox.connect(ids.resolve(out[0]))
            step = progress.copied(source)
            got = sandbox.files.download(
                out[1] or ".",
                target,
                exclude=exclude or (),
                allow_protected=allow_protected,
                user=user,
                on_progress=step,
            )
            done = str(got)
    code = 0 if got is None else output.left_out(got)
    if json:
        protected = [] if got is None else [dataclasses.asdict(found) for found in got.protected]
        output.emit({"copied": done, "protected": protected})
    else:
        output.say(f"copied to {done}")
    if code:
        raise typer.Exit(code)


def _into(sandbox: Sandbox, where: str, source: str, user: str | None) -> str:
    """As `cp` of a shell: a file copied to what is a directory goes into it."""
    if not where or where.endswith("/") or Path(source).is_dir():
        return where or "~/"
    try:
        return f"{where}/" if sandbox.files.stat(where, user=user).is_dir else where
    except PathNotFoundError:
        return where


def _remote(text: str) -> tuple[str, str] | None:
    """`ID:PATH` as a pair; None for a path of this machine (a `/` before the colon makes it one)."""
    match = re.match(r"([a-z0-9_]+):(.*)", text, re.DOTALL)
    return (match.group(1), match.group(2)) if match else None


def ls(
    all: Annotated[bool, typer.Option("--all", "-a", help="Also those that have ended.")] = False,
    state: Annotated[str | None, typer.Option(help="Only this state.")] = None,
    metadata: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="Only with it; repeatable.")
    ] = None,
    json: options.Json = False,
) -> None:
    """List sandboxes."""
    from llm4agents import Sandbox
    from llm4agents.cli import ids, output

    found = Sandbox.list(state=state, metadata=options.pairs(metadata, "--metadata"))
    shown = [info for info in found if all or state or info.state not in ids.ENDED]
    if json:
        output.emit({"sandboxes": [as_dict(info) for info in shown]})
        return
    rows = [
        (
            info.id,
            info.template,
            info.state,
            output.vmm(info.vmm, info.nested),
            output.when(info.created_at),
            output.when(info.ends_at),
            info.reason or "",
        )
        for info in shown
    ]
    output.table(("ID", "TEMPLATE", "STATE", "VMM", "CREATED", "ENDS", "REASON"), rows)


def kill(
    sandboxes: Annotated[
        list[str] | None, typer.Argument(metavar="[ID...]", help="Unique beginnings do.")
    ] = None,
    all: Annotated[bool, typer.Option("--all", help="Every one that is alive.")] = False,
    json: options.Json = False,
) -> None:
    """Kill sandboxes; their memory and files are gone."""
    from llm4agents import Sandbox, SandboxNotFoundError
    from llm4agents.cli import ids, output
    from llm4agents.errors import ConflictError

    if bool(sandboxes) == all:
        raise typer.BadParameter("give ids, or --all", param_hint="ID")
    wanted = (
        [info.id for info in Sandbox.list() if info.state not in ids.ENDED]
        if all
        else [ids.resolve(given) for given in sandboxes or ()]
    )
    killed = []
    for id in wanted:
        try:
            Sandbox.connect(id).kill()
        except ConflictError:
            pass  # it has ended: that is what was wanted
        except SandboxNotFoundError:
            if not all:
                raise
        killed.append(id)
        if not json:
            print(id)
    if json:
        output.emit({"killed": killed})


def as_dict(info: Any) -> dict[str, Any]:
    return {
        field.name: getattr(info, field.name).isoformat()
        if hasattr(getattr(info, field.name), "isoformat")
        else getattr(info, field.name)
        for field in dataclasses.fields(info)
        if field.name != "raw"
    }
