"""`pool`: machines kept ready."""

from __future__ import annotations

from typing import Annotated

import typer

from llm4agents.cli import options


def pool(
    template: Annotated[
        str | None, typer.Argument(metavar="[TEMPLATE]", help="Of which template; none: show.")
    ] = None,
    wanted: Annotated[int | None, typer.Argument(metavar="N", help="How many; 0 ends them.")] = None,
    memory_mib: options.Memory = None,
    vcpus: options.Vcpus = None,
    json: options.Json = False,
) -> None:
    """Show what is kept ready, or keep N machines of a template ready.

    A create of that template and shape then takes milliseconds. They are made in the background, count as no
    sandboxes, and end with the server; LLM4AGENTS_POOL="python=2" has every server keep them.
    """
    from llm4agents.cli import output
    from llm4agents.sdk._sync.client import Client

    if (template is None) != (wanted is None):
        raise typer.BadParameter("give both a template and how many, or neither", param_hint="N")
    client = Client()
    if template is not None and wanted is not None:
        found = client.set_pool(template, wanted, vcpus=vcpus, memory_mib=memory_mib)
    else:
        found = client.pool()
    if json:
        output.emit(found)
        return
    rows = [
        (
            one.get("template"),
            one.get("vcpus"),
            f"{one.get('memory_mib')} MiB",
            one.get("wanted"),
            one.get("ready"),
            one.get("problem") or "",
        )
        for one in found["data"]
    ]
    output.table(("TEMPLATE", "VCPUS", "MEMORY", "WANTED", "READY", "PROBLEM"), rows)
