"""`net`: what a sandbox may reach, changed while it runs, and explained."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llm4agents.cli import options

if TYPE_CHECKING:
    from llm4agents import Sandbox
    from llm4agents.sdk._sync.network import Network, Verdict
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
    """Change what a sandbox may reach, while it runs.

    `net set ID 'allow api.github.com'`. The whole of it: what is not said any more is not allowed any more, and
    connections that rest on it end.
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
    """Say whether a sandbox may reach a URL, and why.

    By which rule, and what else was looked at. Exit code 1: it may not.
    """
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


def log(
    id: Id,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="And what comes, until it ends.")] = False,
    denied: Annotated[bool, typer.Option("--denied", help="Only what was denied.")] = False,
    kind: Annotated[
        str | None,
        typer.Option(
            metavar="KIND", help="dns, connection, request, packet, policy, gateway; several by commas."
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", help="So many, the newest.")] = 1_000,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Show what a sandbox tried, and what became of it.

    Also of one that has ended.
    """
    from llm4agents.cli import output

    verdict: Verdict | None = "deny" if denied else None
    with _looked_at(id) as network:
        for record in network.log(follow=follow, verdict=verdict, kind=kind, limit=limit):
            print(output.as_json(record) if json else line_of(record), flush=True)


def line_of(record: dict[str, Any]) -> str:
    """A record for people. What a guest said in it stays within the line."""
    from llm4agents.cli import output

    def clean(name: str) -> str:
        text = str(record.get(name) or "")
        return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)

    where = clean("name") or clean("address")
    if record.get("port") is not None and record.get("kind") != "dns":
        where += f":{clean('port')}"
    if record.get("says"):
        where += f" (says {clean('says')})"
    asked = " ".join(filter(None, (clean("method"), clean("path"), clean("status"))))
    moved = [
        f"{words} {output.size(record[name])}"
        for name, words in (("bytes_out", "out"), ("bytes_in", "in"))
        if record.get(name)
    ]
    told = (
        output.when(record.get("at")) or "-",
        f"{clean('verdict') or '-':5}",
        clean("kind") or "-",
        clean("protocol"),
        where,
        asked,
        ", ".join(moved),
        f"{clean('repeated')} times" if record.get("repeated") else "",
        f"[{clean('rule')}]" if record.get("rule") else "",
        clean("reason"),  # of what was allowed too: why it came to nothing all the same
    )
    return "  ".join(part for part in told if part)


def capture(
    id: Id,
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="FILE", help="Write what was captured so far; - is stdout."),
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="End it.")] = False,
    bytes_max: Annotated[
        int | None, typer.Option(help="Of the server's disk; past it the oldest packets go.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Capture a sandbox's packets on the host, as pcap.

    `net capture ID`, later `net capture ID -o it.pcap`. Without -o or --stop it begins, or says how it goes on.
    """
    from llm4agents.cli import output

    with _looked_at(id) as network:
        state: dict[str, Any] = {}
        if stop:
            state = network.stop_capture()
        elif out is None:
            state = network.capture(bytes_max)
        if out == "-":
            with tempfile.TemporaryDirectory() as directory:
                path = network.download_capture(Path(directory) / "capture.pcap")
                with path.open("rb") as file:
                    shutil.copyfileobj(file, sys.stdout.buffer)
            return
        if out is not None:
            state = {**state, "saved": str(network.download_capture(out))}
    if json:
        output.emit(state)
    elif "saved" in state:
        output.say(f"saved {state['saved']}: tcpdump -r, or Wireshark")
    elif state:
        going = "capturing" if state.get("running") else "ended, -o FILE saves it"
        output.say(f"{going}: {output.size(state['bytes'])} since {output.when(state['since'])}")
    else:
        output.say("nothing was captured")


@contextlib.contextmanager
def _looked_at(id: str) -> Iterator[Network]:
    from llm4agents import Observer
    from llm4agents.cli import ids

    id = ids.resolve(id)
    with Observer() as observer:
        yield observer.network(id)


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
    for warning in info.warnings:
        output.say(f"note: {warning}")
    if info.problem:
        output.say(f"problem: {info.problem}")
    if info.cut:
        output.say(f"{info.cut} connections were ended")


def _sandbox(id: str) -> Sandbox:
    from llm4agents import Sandbox
    from llm4agents.cli import ids

    return Sandbox.connect(ids.resolve(id))
