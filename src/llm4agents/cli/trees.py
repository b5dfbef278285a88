"""`find`, `grep`, `watch`: the files of a sandbox, searched and watched."""

from __future__ import annotations

import dataclasses
import json as json_
import sys
from typing import Annotated

import typer

from llm4agents.cli import options

NO_MATCH = 1
Id = Annotated[str, typer.Argument(metavar="ID", help="A sandbox, or a unique beginning of its id.")]
Where = Annotated[str, typer.Argument(metavar="PATH", help="Default: the user's home.")]
Most = Annotated[int, typer.Option("--max", help="Stop after so many.")]
Hidden = Annotated[bool, typer.Option("--hidden/--no-hidden", help="Also names that begin with a dot.")]


def find(
    id: Id,
    path: Where = ".",
    name: Annotated[str | None, typer.Option("--name", "-n", metavar="GLOB", help="Only such names.")] = None,
    hidden: Hidden = True,
    max: Most = 1_000,
    user: options.User = None,
    json: options.Json = False,
) -> None:
    """List the files below a directory of a sandbox, by name."""
    from llm4agents import Sandbox
    from llm4agents.cli import ids, output

    sandbox = Sandbox.connect(ids.resolve(id))
    found = sandbox.files.search(path, name=name, hidden=hidden, max=max, user=user)
    if json:
        output.emit({"matches": [_slim(match) for match in found], "truncated": found.truncated})
        return
    for match in found:
        print(_shown(match.path) + ("/" if match.kind == "directory" else ""))
    if found.truncated:
        output.say(f"there are more than {max} (--max)")


def grep(
    id: Id,
    pattern: Annotated[
        str, typer.Argument(metavar="PATTERN", help="A regular expression (without look-around).")
    ],
    path: Where = ".",
    fixed: Annotated[bool, typer.Option("--fixed", "-F", help="PATTERN is plain text.")] = False,
    ignore_case: Annotated[bool, typer.Option("--ignore-case", "-i")] = False,
    name: Annotated[str | None, typer.Option("--name", "-n", metavar="GLOB", help="Only such files.")] = None,
    hidden: Hidden = True,
    max: Most = 1_000,
    user: options.User = None,
    json: options.Json = False,
) -> None:
    """Search the lines of a sandbox's files; exit code 1 when none is found."""
    from llm4agents import Sandbox
    from llm4agents.cli import ids, output

    sandbox = Sandbox.connect(ids.resolve(id))
    found = sandbox.files.search(
        path,
        name=name,
        content=pattern,
        regex=not fixed,
        ignore_case=ignore_case,
        hidden=hidden,
        max=max,
        user=user,
    )
    if json:
        output.emit({"matches": [_slim(match) for match in found], "truncated": found.truncated})
    else:
        for match in found:
            print(f"{_shown(match.path)}:{match.line}:{_shown(match.text or '')}")
        if found.truncated:
            output.say(f"there are more than {max} (--max)")
    if not found.matches:
        raise typer.Exit(NO_MATCH)


def watch(
    id: Id,
    path: Where = ".",
    recursive: Annotated[bool, typer.Option("--recursive/--no-recursive")] = True,
    user: options.User = None,
    json: options.Json = False,
) -> None:
    """Print what changes in a directory of a sandbox, until it is interrupted (Ctrl-C)."""
    from llm4agents import Sandbox
    from llm4agents.cli import ids, output

    sandbox = Sandbox.connect(ids.resolve(id))
    with sandbox.files.watch(path, recursive=recursive, user=user) as changes:
        output.say(f"watching {path}")
        for change in changes:
            if json:
                line = json_.dumps(dataclasses.asdict(change))
            else:
                to = "" if change.to is None else f" -> {_shown(change.to)}"
                line = f"{change.event} {_shown(change.path)}{to}"
            print(line, flush=True)


def _slim(match: object) -> dict[str, object]:
    values = {
        field: getattr(match, field) for field in ("path", "kind", "size", "mtime", "line", "column", "text")
    }
    if values["line"] is not None:
        del values["kind"]
    return {name: value for name, value in values.items() if value is not None}


def _shown(text: str) -> str:
    """Names and lines are the guest's: on a terminal nothing of them is obeyed."""
    if sys.stdout.isatty():
        return "".join(
            char if char.isprintable() or char == "\t" else "\N{REPLACEMENT CHARACTER}" for char in text
        )
    return text
