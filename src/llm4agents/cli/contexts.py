"""`context`: the code contexts of a sandbox."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from llm4agents.cli import options

if TYPE_CHECKING:
    from llm4agents import Sandbox

Id = Annotated[str, typer.Argument(metavar="ID", help="A sandbox, or a unique beginning of its id.")]
Which = Annotated[str, typer.Argument(metavar="CONTEXT", help="As `context ls` shows it.")]


def create(
    id: Id,
    language: Annotated[
        str | None, typer.Option("--language", "-l", help="python, javascript, typescript or bash.")
    ] = None,
    cwd: Annotated[str | None, typer.Option(help="Where its cells begin.")] = None,
    env: options.Env = None,
    json: options.Json = False,
) -> None:
    """Create a code context and print its id.

    `run --in ID --context CONTEXT` uses it.
    """
    from llm4agents.cli import output

    made = _sandbox(id).contexts.create(language, cwd=cwd, env=options.pairs(env, "--env"))
    if json:
        output.emit(dataclasses.asdict(made))
    else:
        print(made.id)


def ls(id: Id, json: options.Json = False) -> None:
    """List the code contexts of a sandbox."""
    from llm4agents.cli import output

    found = _sandbox(id).contexts.list()
    if json:
        output.emit({"contexts": [dataclasses.asdict(context) for context in found]})
    else:
        output.table(("CONTEXT", "LANGUAGE", "CWD"), [(c.id, c.language, c.cwd) for c in found])


def restart(
    id: Id,
    context: Which,
    language: Annotated[str | None, typer.Option("--language", "-l", help="Of a `default` one.")] = None,
) -> None:
    """Give a code context a fresh interpreter."""
    _sandbox(id).contexts.restart(context, language=language)


def rm(id: Id, context: Which) -> None:
    """End a code context."""
    _sandbox(id).contexts.remove(context)


def _sandbox(id: str) -> Sandbox:
    from llm4agents import Sandbox
    from llm4agents.cli import ids

    return Sandbox.connect(ids.resolve(id))
