"""`mcp`: the sandbox as tools for agents, over stdio (Model Context Protocol).

Only the command line is here; `llm4agents.tools` has the tools, `stdio` serves them. The `mcp` package is imported
when the command runs: it takes a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llm4agents import limits
from llm4agents.cli import options

IDLE_S = 900.0
"""How long an agent may think between two calls before its sandbox is paused; the next one resumes it."""


def mcp(
    template: options.Template = limits.DEFAULT_TEMPLATE,
    sandbox: Annotated[
        str | None, typer.Option(help="Use this one when a call names none; it is left as it is at the end.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Pause the default sandbox at the end instead of killing it.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds without a call before a sandbox is paused.")
    ] = IDLE_S,
    allow_host_paths: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Let tools copy between sandboxes and this directory.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    env: options.Env = None,
    memory_mib: options.Memory = None,
    vcpus: options.Vcpus = None,
    net: options.Net = None,
    credential: options.Credential = None,
    rewrite: options.Rewrite = None,
) -> None:
    """Serve sandboxes as tools to an agent over stdin and stdout (MCP).

    A sandbox is created when the first call needs one, and killed when the agent goes away.
    """
    from llm4agents.cli import ids, output
    from llm4agents.cli.mcp.stdio import serve
    from llm4agents.tools.boxes import Boxes

    network = options.network(net, credential, rewrite)
    if sandbox is not None and network is not None:
        raise typer.BadParameter(
            "--sandbox keeps its own network: llm4agents net set changes it", param_hint="--net"
        )
    output.quiet_warnings()
    boxes = Boxes(
        template=template,
        given=None if sandbox is None else ids.resolve(sandbox),
        keep=keep,
        timeout=timeout,
        env=options.pairs(env, "--env"),
        memory_mib=memory_mib,
        vcpus=vcpus,
        network=network,
        say=output.say,
    )
    serve(boxes, allow_host_paths)
