"""`net`: what a sandbox may reach, changed while it runs, and explained."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from llm4agents.cli import options

if TYPE_CHECKING:
    from llm4agents import Sandbox
    from llm4agents.sdk.results import NetworkInfo

Id = Annotated[str, typer.Argument(metavar="ID", help="A sandbox, or a unique beginning of its id.")]
DENIED = 1


def show(id: Id, json: options.Json = False) -> None:
    """Show what a sandbox may reach."""
    _print(_sandbox(id).network.get(), json)


def set_(
    id: Id,
    net: Annotated[
        list[str] | None, typer.Argument(metavar="[PROFILE|RULE]...", help="As --net of create.")
    ] = None,
    credential: options.Credential = None,
    rewrite: options.Rewrite = None,
    json: options.Json = False,
) -> None:
    """Change what a sandbox may reach, while it runs: `net set ID 'allow api.github.com'`.

    The whole of it: what is not said any more is not allowed any more, and connections that rest on it end.
    """
    wanted = options.network(net, credential, rewrite)
    if wanted is None:
        raise typer.BadParameter("say what: a profile or rules (`none` for nothing at all)", param_hint="NET")
    _print(_sandbox(id).update_network(wanted), json)


def why(
    id: Id,
    url: Annotated[str, typer.Argument(metavar="URL", help="Or HOST:PORT.")],
    json: options.Json = False,
) -> None:
    """Say whether a sandbox may reach a URL, by which rule, and what else was looked at. Exit code 1: it may not."""
    from llm4agents.cli import output

    said = _sandbox(id).network.why(url)
    if json:
        output.emit(said)
    else:
        rows = [(step["matched"], step["rule"], step["why"]) for step in said["steps"]]
        output.table(("MATCHES", "RULE", "WHY"), rows)
        via = f" ({said['via']})" if said.get("via") else ""
        print(f"\n{'allowed' if said['allowed'] else 'denied'} by {said['rule']}{via}: {said['reason']}")
    raise typer.Exit(0 if said["allowed"] else DENIED)


def _print(info: NetworkInfo, json: bool) -> None:
    from llm4agents.cli import output

    if json:
        output.emit(dataclasses.asdict(info))
        return
    network = info.network
    print(f"profile {network.get('profile')}")
    for rule in network.get("rules") or ():
        print(rule)
    for rewrite in network.get("rewrite") or ():
        print(f"rewrite {rewrite}")
    for binding in network.get("credentials") or ():
        print(f"credential {binding['secret']} as {binding['as']} at {binding['host']}:{binding['port']}")
    if info.problem:
        output.say(f"problem: {info.problem}")
    if info.cut:
        output.say(f"{info.cut} connections were ended")


def _sandbox(id: str) -> Sandbox:
    from llm4agents import Sandbox
    from llm4agents.cli import ids

    return Sandbox.connect(ids.resolve(id))
