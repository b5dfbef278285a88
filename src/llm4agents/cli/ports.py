"""`ports`: which ports of a sandbox listen, their URLs, and who may reach them through the server."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from llm4agents import limits
from llm4agents.cli import options

Id = Annotated[str, typer.Argument(metavar="ID", help="A sandbox, or a unique beginning of its id.")]


def ls(id: Id, json: options.Json = False) -> None:
    """List the TCP ports on which something in a sandbox listens."""
    from llm4agents import Sandbox
    from llm4agents.cli import ids, output

    found = Sandbox.connect(ids.resolve(id)).ports.list()
    if json:
        output.emit({"data": [dataclasses.asdict(one) for one in found]})
        return
    for one in found:
        print(f"{one.port}\t{one.address}")


def url(
    id: Id,
    port: Annotated[int, typer.Argument(metavar="PORT", min=1, max=65_535, help="Of the sandbox.")],
    path: Annotated[str, typer.Option(help="Of the page.")] = "/",
    expires: Annotated[
        float, typer.Option(help="Seconds for which it opens the port; 0: it opens nothing by itself.")
    ] = limits.PORT_URL_S,
    json: options.Json = False,
) -> None:
    """Print the URL of a port, signed.

    Whoever has it can open it, until it expires or the sandbox's tokens are rotated.
    """
    from llm4agents import Sandbox
    from llm4agents.cli import ids, output

    made = Sandbox.connect(ids.resolve(id)).ports.url(port, path=path, expires=expires or None)
    output.emit({"url": made}) if json else print(made)


def traffic(
    id: Id,
    public: Annotated[
        bool | None, typer.Option("--public/--private", help="Whether anybody may reach its ports.")
    ] = None,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="End its token and every signed URL; a new token is made.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Show or change who may reach a sandbox's ports.

    Through the server; also shows its token (X-Traffic-Token).
    """
    from llm4agents import Sandbox
    from llm4agents.cli import ids, output

    found = Sandbox.connect(ids.resolve(id)).traffic(public=public, rotate=rotate)
    if json:
        output.emit(dataclasses.asdict(found))
        return
    print(f"{'public: anybody may reach its ports' if found.public else 'private'}")
    print(f"X-Traffic-Token: {found.token}")
