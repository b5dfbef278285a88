"""Options that several commands share, and how their text becomes values."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Template = Annotated[str, typer.Option("--template", "-t", help="What to clone.")]
Env = Annotated[list[str] | None, typer.Option("--env", "-e", metavar="K=V", help="Repeatable.")]
Memory = Annotated[int | None, typer.Option("--memory-mib", help="Memory; builds a variant if new.")]
Vcpus = Annotated[int | None, typer.Option("--vcpus", help="vCPUs; builds a variant if new.")]
RequireKvm = Annotated[bool, typer.Option("--require-kvm", help="Refuse software emulation.")]
User = Annotated[str | None, typer.Option("--user", "-u", help="As whom in the guest (default: user).")]
AllowProtected = Annotated[
    bool,
    typer.Option(
        "--allow-protected", help="Also what this machine would obey: .bashrc, .git/hooks, .mcp.json…"
    ),
]


def pairs(given: list[str] | None, option: str) -> dict[str, str] | None:
    """`K=V` options as a dict, or None when there were none."""
    found = {}
    for item in given or ():
        name, sign, value = item.partition("=")
        if not sign or not name:
            raise typer.BadParameter(f"{item!r} is not NAME=VALUE", param_hint=option)
        found[name] = value
    return found or None
