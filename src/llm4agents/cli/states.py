"""`pause`, `resume`, `fork`, `snapshot`."""

from __future__ import annotations

from typing import Annotated

import typer

from llm4agents.cli import options

Id = Annotated[str, typer.Argument(metavar="ID", help="A sandbox, or a unique beginning of its id.")]
LeaveVolumes = Annotated[bool, typer.Option("--leave-volumes", help="Without the volumes it writes to.")]


def pause(id: Id, json: options.Json = False) -> None:
    """Put a sandbox to disk: it costs no memory and no time until it is resumed."""
    from llm4agents import Sandbox
    from llm4agents.cli import ids, output
    from llm4agents.cli.sandboxes import as_dict

    info = Sandbox.connect(ids.resolve(id)).pause()
    output.emit(as_dict(info)) if json else print(info.id)


def resume(
    id: Id,
    cold: Annotated[
        bool, typer.Option("--cold", help="Boot its disk: files are kept, processes are not.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds without a call before its time is up.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Let a paused sandbox run on where it was. (A call does that too, unless auto-resume is off.)"""
    from llm4agents import Sandbox
    from llm4agents.cli import ids, output
    from llm4agents.cli.sandboxes import as_dict

    info = Sandbox.connect(ids.resolve(id)).resume(cold=cold, timeout=timeout)
    output.emit(as_dict(info)) if json else print(info.id)


def fork(
    id: Id,
    count: Annotated[int, typer.Option("--count", "-n", help="How many.")] = 1,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds without a call before their time is up.")
    ] = None,
    leave_volumes: LeaveVolumes = False,
    json: options.Json = False,
) -> None:
    """Make sandboxes that are what this one is now, memory, processes and files; it goes on."""
    from llm4agents import Sandbox
    from llm4agents.cli import ids, output
    from llm4agents.cli.sandboxes import as_dict

    children = Sandbox.connect(ids.resolve(id)).fork(
        count, timeout=timeout, volumes="leave" if leave_volumes else "refuse"
    )
    if json:
        output.emit({"sandboxes": [as_dict(child.info()) for child in children]})
    else:
        for child in children:
            print(child.id)


def snapshot(
    id: Id,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The template's name.")],
    description: Annotated[str, typer.Option(help="What it is for.")] = "",
    leave_volumes: LeaveVolumes = False,
    json: options.Json = False,
) -> None:
    """Make a template of a sandbox as it is now; `create --template NAME` clones it."""
    from llm4agents import Sandbox
    from llm4agents.cli import ids, output

    made = Sandbox.connect(ids.resolve(id)).snapshot(
        name, description=description, volumes="leave" if leave_volumes else "refuse"
    )
    output.emit(made) if json else print(made["name"])
