"""`audit`: who changed what, when and from where, and what was refused."""

from __future__ import annotations

from typing import Annotated

import typer

from llm4agents.cli import options


def audit(
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, max=1_000, help="How many, the newest.")] = 50,
    actor: Annotated[str | None, typer.Option(help="Of one key (key_…), `socket`, or `nobody`.")] = None,
    json: options.Json = False,
) -> None:
    """Show who changed what, when and from where, and what was refused."""
    from llm4agents.cli import output
    from llm4agents.sdk._sync.client import Client

    found = Client().audit(limit=limit, actor=actor)
    if json:
        output.emit({"audit": found})
        return
    rows = [
        (
            output.when(one["at"]),
            one["project"] or "-",
            one["actor"],
            one["origin"],
            one["status"],
            one["action"].partition(" ")[0],
            one["target"],
            one["code"] or "",
        )
        for one in reversed(found)
    ]
    output.table(("AT", "PROJECT", "WHO", "FROM", "STATUS", "", "WHAT", ""), rows)
