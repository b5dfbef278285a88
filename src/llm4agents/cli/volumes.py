"""`volume …`: disks that outlive sandboxes, and their files while no sandbox writes to them."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from llm4agents.cli import options

Name = Annotated[str, typer.Argument(metavar="NAME", help="The volume's name, or its id.")]
NewName = Annotated[str, typer.Argument(metavar="NEW", help="The new one's name.")]
Size = Annotated[str, typer.Option("--size", "-s", help="MiB, or with M, G, T after it: 512, 20G.")]
MaybeSize = Annotated[str | None, typer.Option("--size", "-s", help="Larger than what it is made of.")]
STARTS: Final = "starting a machine that reads the volume"
Metadata = Annotated[list[str] | None, typer.Option(metavar="K=V", help="Repeatable.")]


def create(
    name: Name,
    size: Size = "1024",
    metadata: Metadata = None,
    json: options.Json = False,
) -> None:
    """Create an empty volume, and print its id."""
    from llm4agents import Volume

    _made(Volume.create(name, mib(size), metadata=options.pairs(metadata, "--metadata")), json)


def ls(json: options.Json = False) -> None:
    """List volumes and snapshots of volumes."""
    from llm4agents import Volume
    from llm4agents.cli import output

    found = Volume.list()
    if json:
        output.emit({"volumes": [_plain(info) for info in found]})
        return
    rows = [
        (
            info.name,
            info.kind if info.state == "ready" else info.state,
            f"{info.size_mib} MiB",
            output.size(info.allocated_bytes),
            output.when(info.created_at),
            ", ".join(f"{one.sandbox} ({one.mode})" for one in info.attached[:3]) or "-",
        )
        for info in found
    ]
    output.table(("NAME", "KIND", "SIZE", "ON DISK", "CREATED", "ATTACHED TO"), rows)


def show(name: Name, json: options.Json = False) -> None:
    """Show one volume, and who has it."""
    from llm4agents import Volume
    from llm4agents.cli import output

    info = _plain(Volume.get(name).info())
    if json:
        output.emit(info)
        return
    for key, value in info.items():
        print(f"{key}: {value}")


def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names or ids.")],
    json: options.Json = False,
) -> None:
    """Remove volumes and what is in them. Refused, all of them, while a sandbox has one, also a paused one."""
    from llm4agents import Volume
    from llm4agents.cli import output
    from llm4agents.errors import ConflictError

    # Each is looked at before any is removed, as `kill` does.
    wanted = {volume.id: (name, volume) for name in names for volume in (Volume.get(name),)}
    for name, volume in wanted.values():
        if attached := volume.info().attached:
            raise ConflictError(
                f"{name} is attached to {attached[0].sandbox}: nothing is removed",
                hint="detach it, or kill the sandbox",
            )
    for name, volume in wanted.values():
        volume.delete()
        output.say(f"{name} is removed")
    if json:
        output.emit({"removed": [name for name, _ in wanted.values()]})


def snapshot(name: Name, new: NewName, metadata: Metadata = None, json: options.Json = False) -> None:
    """Record a volume as it is now: to be read, and cloned."""
    from llm4agents import Volume

    _made(Volume.get(name).snapshot(new, metadata=options.pairs(metadata, "--metadata")), json)


def clone(
    name: Name, new: NewName, size: MaybeSize = None, metadata: Metadata = None, json: options.Json = False
) -> None:
    """Make a volume that begins as this one (or this snapshot) is now."""
    from llm4agents import Volume

    size_mib = None if size is None else mib(size)
    made = Volume.get(name).clone(new, size_mib=size_mib, metadata=options.pairs(metadata, "--metadata"))
    _made(made, json)


def resize(name: Name, size: Size, json: options.Json = False) -> None:
    """Make a volume larger, while no sandbox has it."""
    from llm4agents import Volume
    from llm4agents.cli import output

    info = Volume.get(name).resize(mib(size))
    output.emit(_plain(info)) if json else output.say(f"{info.name} has {info.size_mib} MiB now")


def files(
    where: Annotated[str, typer.Argument(metavar="NAME[:PATH]", help="Default: the volume's root.")],
    depth: Annotated[int, typer.Option(help="Levels.")] = 1,
    json: options.Json = False,
) -> None:
    """List the files of a volume that no sandbox writes to."""
    from llm4agents import Volume
    from llm4agents.cli import output
    from llm4agents.cli.trees import _shown

    name, path = _split(where)
    with output.waiting(STARTS):
        found = Volume.get(name).files.list(path, depth=depth)
    if json:
        output.emit({"files": [dataclasses.asdict(info) for info in found]})
        return
    for info in found:
        print(_shown(info.path) + ("/" if info.kind == "directory" else ""))


def cat(where: Annotated[str, typer.Argument(metavar="NAME:PATH", help="A file of a volume.")]) -> None:
    """Print a file of a volume that no sandbox writes to."""
    from llm4agents import Volume
    from llm4agents.cli import output

    name, path = _split(where)
    with output.waiting(STARTS) as came, Volume.get(name).files.read(path, "stream") as stream:
        for piece in stream:
            came()
            sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()


def cp(
    where: Annotated[str, typer.Argument(metavar="NAME:PATH", help="A file or directory of a volume.")],
    target: Annotated[Path, typer.Argument(metavar="LOCAL", help="A path of this machine.")],
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Left out of a directory; repeatable.")
    ] = None,
    allow_protected: options.AllowProtected = False,
    json: options.Json = False,
) -> None:
    """Copy out of a volume that no sandbox writes to.

    What this machine would obey without being asked (.bashrc, .git/hooks, .vscode/tasks.json…) is not copied, and
    named; the exit code is 5 then.
    """
    from llm4agents import Volume
    from llm4agents.cli import output

    name, path = _split(where)
    with output.waiting(STARTS) as came, output.Progress() as progress:
        copied = progress.copied(where)

        def step(done: int, total: int | None) -> None:
            came()
            copied(done, total)

        got = Volume.get(name).files.download(
            path, target, exclude=exclude or (), allow_protected=allow_protected, on_progress=step
        )
    code = output.left_out(got)
    if json:
        protected = [dataclasses.asdict(found) for found in got.protected]
        output.emit({"copied": str(got), "protected": protected})
    else:
        output.say(f"copied to {got}")
    if code:
        raise typer.Exit(code)


def attach(
    id: Annotated[
        str, typer.Argument(metavar="ID", help="A paused sandbox, or a unique beginning of its id.")
    ],
    volume: Annotated[str, typer.Argument(metavar="NAME:/PATH[:ro]", help="The volume, and where.")],
    json: options.Json = False,
) -> None:
    """Give a paused sandbox a volume."""
    from llm4agents import Sandbox
    from llm4agents.cli import ids, output

    ((path, (name, mode)),) = (options.volumes([volume]) or {}).items()
    found = Sandbox.connect(ids.resolve(id)).volumes.attach(path, name, mode=mode)
    output.emit({"volumes": found}) if json else output.say(f"{name} will be at {path}")


def detach(
    id: Annotated[
        str, typer.Argument(metavar="ID", help="A paused sandbox, or a unique beginning of its id.")
    ],
    name: Name,
    json: options.Json = False,
) -> None:
    """Take a volume from a paused sandbox: others can have it at once."""
    from llm4agents import Sandbox
    from llm4agents.cli import ids, output

    found = Sandbox.connect(ids.resolve(id)).volumes.detach(name)
    output.emit({"volumes": found}) if json else output.say(f"{name} is detached")


def mib(text: str) -> int:
    """`512`, `512M`, `20G`, `1T` in MiB."""
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "M")
    if not digits.isdecimal() or unit not in "MGT":
        raise typer.BadParameter(f"{text!r} is no size: 512, 20G", param_hint="--size")
    return int(digits) * {"M": 1, "G": 1024, "T": 1024 * 1024}[unit]


def _split(where: str) -> tuple[str, str]:
    name, _, path = where.partition(":")
    return name, path or "/"


def _made(volume: Any, json: bool) -> None:
    from llm4agents.cli import output

    if json:
        output.emit(_plain(volume.info()))
    else:
        print(volume.id)


def _plain(info: Any) -> dict[str, Any]:
    return dataclasses.asdict(info)
