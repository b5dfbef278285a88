"""`key create|ls|revoke`, `whoami`: API keys of a server."""

from __future__ import annotations

from typing import Annotated

import typer

from llm4agents.cli import options

Expires = Annotated[
    float | None, typer.Option("--expires", metavar="DAYS", min=0, help="It is no good after that.")
]


def create(
    name: Annotated[str, typer.Option(help="What it is for; people read it.")],
    project: Annotated[
        str | None, typer.Option(help="Of which project (id or name); none: your own.")
    ] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(help="What it may do: read, sandboxes, templates, volumes, secrets, project, node."),
    ] = None,
    expires: Expires = None,
    json: options.Json = False,
) -> None:
    """Make an API key and print it, this once.

    Without --scope it may do all but make keys (project) and run the server (node)."""
    from llm4agents.cli import output
    from llm4agents.sdk._sync.client import Client

    made = Client().create_key(name, project=project, scopes=scope or None, expires_days=expires)
    if json:
        output.emit(made)
        return
    print(made["key"])
    output.say(
        f"{made['id']} ({', '.join(made['scopes'])}) of project {made['project']}: it is not shown again"
    )


def ls(json: options.Json = False) -> None:
    """List API keys, without the keys themselves."""
    from llm4agents.cli import output
    from llm4agents.sdk._sync.client import Client

    found = Client().keys()
    if json:
        output.emit({"keys": found})
        return
    rows = [
        (
            one["id"],
            one["name"],
            one["project"],
            ",".join(one["scopes"]),
            output.when(one["created_at"]),
            output.when(one["used_at"]),
            output.when(one["expires_at"]),
            "revoked" if one["revoked_at"] else "",
        )
        for one in found
    ]
    output.table(("ID", "NAME", "PROJECT", "SCOPES", "CREATED", "USED", "EXPIRES", ""), rows)


def revoke(
    keys: Annotated[
        list[str], typer.Argument(metavar="ID...", help="Ids of keys (key_…), as `key ls` has them.")
    ],
    json: options.Json = False,
) -> None:
    """Revoke API keys: from now on they are none."""
    from llm4agents.cli import output
    from llm4agents.sdk._sync.client import Client

    client = Client()
    gone = []
    for key in keys:
        gone.append(client.revoke_key(key))
        output.say(f"{key} is revoked")
    if json:
        output.emit({"keys": gone})


def whoami(json: options.Json = False) -> None:
    """Say who you are to the server: project, scopes, quotas."""
    from llm4agents.cli import output
    from llm4agents.sdk._sync.client import Client

    found = Client().whoami()
    if json:
        output.emit(found)
        return
    print(f"{found['actor']} of project {found['project_name']} ({found['project']})")
    print(f"scopes: {', '.join(found['scopes'])}")
    for name, bound in sorted(found["quotas"].items()):
        print(f"{name}: {output.count(found['used'].get(name))} of {output.count(bound)}")
