"""`invite create|ls|revoke` and `register`: how somebody without a key comes to a project of his own."""

from __future__ import annotations

from typing import Annotated

import typer

from llm4agents.cli import options
from llm4agents.cli.keys import Expires
from llm4agents.cli.projects import Quota, _quotas


def create(
    note: Annotated[str, typer.Option(help="Whom it is for; people read it.")] = "",
    uses: Annotated[int, typer.Option(min=1, help="How many may register with it.")] = 1,
    expires: Expires = None,
    quota: Quota = None,
    json: options.Json = False,
) -> None:
    """Make an invite and print its code, this once.

    --quota is of each project that comes of it."""
    from llm4agents.cli import output
    from llm4agents.sdk._sync.client import Client

    quotas = {name: value for name, value in _quotas(quota).items() if value is not None}
    made = Client().create_invite(note=note, uses=uses, expires_days=expires, quotas=quotas)
    if json:
        output.emit(made)
        return
    print(made["invite"])
    output.say(f"{made['id']}: it is not shown again")


def ls(json: options.Json = False) -> None:
    """List invites, without their codes."""
    from llm4agents.cli import output
    from llm4agents.sdk._sync.client import Client

    found = Client().invites()
    if json:
        output.emit({"invites": found})
        return
    rows = [
        (
            one["id"],
            one["note"],
            one["uses_left"],
            output.when(one["created_at"]),
            output.when(one["expires_at"]),
        )
        for one in found
    ]
    output.table(("ID", "NOTE", "USES LEFT", "CREATED", "EXPIRES"), rows)


def revoke(
    invites: Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of invites (inv_…).")],
    json: options.Json = False,
) -> None:
    """Revoke invites: nobody registers with them any more."""
    from llm4agents.cli import output
    from llm4agents.sdk._sync.client import Client

    client = Client()
    gone = []
    for invite in invites:
        gone.append(client.revoke_invite(invite))
        output.say(f"{invite} is revoked")
    if json:
        output.emit({"invites": gone})


def register(
    name: Annotated[str, typer.Option(help="What your project is to be called.")],
    invite: Annotated[
        str | None, typer.Option(metavar="CODE", help="The invite's code; else it is read from stdin.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Have a project made for an invite's code (at LLM4AGENTS_URL), and print its first API key, this once."""
    import sys

    from llm4agents.cli import output
    from llm4agents.sdk._sync.client import Client

    code = invite if invite is not None else sys.stdin.readline().strip()
    made = Client().register(code, name)
    if json:
        output.emit(made)
        return
    print(made["key"])
    output.say(f"project {made['project']['name']} ({made['project']['id']}); the key is not shown again:")
    output.say("set it as LLM4AGENTS_API_KEY")
