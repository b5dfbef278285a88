"""`forward`: local ports that lead to ports of a sandbox, until Ctrl-C."""

from __future__ import annotations

import contextlib
import threading
from typing import Annotated

import typer

from llm4agents.cli import options
from llm4agents.errors import ConflictError, LLM4AgentsError

_OVER = frozenset({"sandbox_not_found", "sandbox_died", "conflict"})
"""What a connection is told when there is no sandbox to lead to any more."""


def forward(
    id: Annotated[str, typer.Argument(metavar="ID", help="A sandbox, or a unique beginning of its id.")],
    ports: Annotated[
        list[str],
        typer.Argument(
            metavar="PORT[:LOCAL]...", help="LOCAL: the same number if it is free; 0: any free one."
        ),
    ],
    json: options.Json = False,
) -> None:
    """Make ports of a sandbox ports of this machine (127.0.0.1), until Ctrl-C."""
    from llm4agents import Sandbox
    from llm4agents.cli import ids, output

    wanted = [_ports(text) for text in ports]
    sandbox = Sandbox.connect(ids.resolve(id))
    over = threading.Event()
    errors: list[LLM4AgentsError] = []

    def refused(error: LLM4AgentsError) -> None:
        if error.code in _OVER:
            errors.append(error)
            over.set()
        else:
            output.report(error)

    with contextlib.ExitStack() as stack:
        made = []
        for port, local in wanted:
            try:
                opened = sandbox.ports.forward(port, port if local is None else local, on_error=refused)
            except ConflictError:
                if local is not None:
                    raise
                opened = sandbox.ports.forward(port, 0, on_error=refused)
            made.append(stack.enter_context(opened))
        if json:
            shown = [{"port": one.port, "local": one.local, "url": one.url} for one in made]
            output.emit({"sandbox": sandbox.id, "forwards": shown})
        else:
            for one in made:
                print(f"{one.url} -> port {one.port} of {sandbox.id}", flush=True)
            output.say("Ctrl-C ends it")
        while not over.wait(3600):
            pass
    if errors:
        raise errors[0]


def _ports(text: str) -> tuple[int, int | None]:
    """`8000` or `8000:9000`: the sandbox's, and the local one if it was said."""
    first, sign, second = text.partition(":")
    numbers = [first, second] if sign else [first]
    if not all(number.isdecimal() and len(number) <= 5 and int(number) <= 65_535 for number in numbers):
        raise typer.BadParameter(f"{text!r} is not PORT or PORT:LOCAL", param_hint="PORT[:LOCAL]")
    return int(first), int(second) if sign else None
