"""Options that several commands share, and how their text becomes values."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Template = Annotated[str, typer.Option("--template", "-t", help="What to clone.")]
Env = Annotated[list[str] | None, typer.Option("--env", "-e", metavar="K=V", help="Repeatable.")]
Memory = Annotated[int | None, typer.Option("--memory-mib", help="Memory; builds a variant if new.")]
Vcpus = Annotated[int | None, typer.Option("--vcpus", help="vCPUs; builds a variant if new.")]
RequireKvm = Annotated[bool, typer.Option("--require-kvm", help="Refuse software emulation.")]
Vmm = Annotated[
    str | None, typer.Option("--vmm", help="firecracker, cloud-hypervisor or qemu (default: by proof).")
]
Nested = Annotated[bool, typer.Option("--nested", help="With a /dev/kvm that works in the sandbox.")]
Net = Annotated[
    list[str] | None,
    typer.Option(
        "--net", metavar="PROFILE|RULE", help="none, packages, public, or 'allow HOST'. Repeatable."
    ),
]
Credential = Annotated[
    list[str] | None,
    typer.Option("--credential", metavar="NAME=FORM@HOST", help="A secret put into requests. Repeatable."),
]
Rewrite = Annotated[
    list[str] | None,
    typer.Option("--rewrite", metavar="'NAME -> TARGET'", help="Lead a name elsewhere. Repeatable."),
]
User = Annotated[str | None, typer.Option("--user", "-u", help="As whom in the guest (default: user).")]
Protect = Annotated[
    list[str] | None,
    typer.Option(
        "--protect", metavar="PATH", help="Of the template, read-only but for the guest's root; repeatable."
    ),
]
Volume = Annotated[
    list[str] | None,
    typer.Option(
        "--volume", "-v", metavar="NAME:/PATH[:ro]", help="A volume, to write to or (ro) read; repeatable."
    ),
]
AllowProtected = Annotated[
    bool,
    typer.Option(
        "--allow-protected", help="Also what this machine would obey: .bashrc, .git/hooks, .mcp.json…"
    ),
]


def network(
    net: list[str] | None, credential: list[str] | None, rewrite: list[str] | None
) -> dict[str, Any] | None:
    """`--net`, `--credential`, `--rewrite` as a `network=`; None when there were none. A word is a profile, several
    are a rule: what they say is the server's to judge."""
    if not (net or credential or rewrite):
        return None
    profiles = [word.strip() for word in net or () if len(word.split()) == 1]
    if {"allow", "deny"} & set(profiles):
        raise typer.BadParameter("a rule goes in quotes: 'allow api.example.com'", param_hint="--net")
    if len(set(profiles)) > 1:
        raise typer.BadParameter(f"{' and '.join(profiles)}: only one profile", param_hint="--net")
    found: dict[str, Any] = {
        "profile": profiles[0] if profiles else "none",
        "rules": [word for word in net or () if len(word.split()) != 1],
        "rewrite": rewrite,
        "credentials": credential,
    }
    return {name: value for name, value in found.items() if value}


def volumes(given: list[str] | None) -> dict[str, tuple[str, Literal["rw", "ro"]]] | None:
    """`--volume` options as a `volumes=`; None when there were none."""
    found: dict[str, tuple[str, Literal["rw", "ro"]]] = {}
    for item in given or ():
        name, _, path = item.partition(":")
        mode: Literal["rw", "ro"] = "rw"
        if path.endswith(":ro"):
            path, mode = path[:-3], "ro"
        path = path.removesuffix(":rw")
        if not name or not path.startswith("/"):
            raise typer.BadParameter(f"{item!r} is not NAME:/PATH or NAME:/PATH:ro", param_hint="--volume")
        if path in found:
            raise typer.BadParameter(f"{path} is given twice", param_hint="--volume")
        found[path] = (name, mode)
    return found or None


def pairs(given: list[str] | None, option: str) -> dict[str, str] | None:
    """`K=V` options as a dict, or None when there were none."""
    found = {}
    for item in given or ():
        name, sign, value = item.partition("=")
        if not sign or not name:
            raise typer.BadParameter(f"{item!r} is not NAME=VALUE", param_hint=option)
        found[name] = value
    return found or None
