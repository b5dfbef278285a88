"""`project create|ls|show|set|disable|enable`, `invite create|ls|revoke`, `register`: whose things are whose."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from llm4agents.cli import options

Project = Annotated[str, typer.Argument(metavar="PROJECT", help="Its id or name.")]
Quota = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=N",
        help="sandboxes, vcpus, memory_mib, disk_mib, volumes_mib, templates, creates_per_s; "
        "NAME=none takes it away.",
    ),
]


def _quotas(given: list[str] | None) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        try:
            if not equals:
                raise ValueError
            number = None if value == "none" else float(value)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not NAME=N", param_hint="--quota") from None
        found[name] = int(number) if number is not None and number.is_integer() else number
    return found


def _shown(one: dict[str, Any]) -> None:
    from llm4agents.cli import output

    state = "" if one["disabled_at"] is None else " (disabled)"
    print(f"{one['id']}  {one['name']}{state}")
    for name in sorted({*one["quotas"], *one["used"]}):
        bound = output.count(one["quotas"].get(name), "any number")
        print(f"  {name}: {output.count(one['used'].get(name))} of {bound}")


def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What it is called.")],
    quota: Quota = None,
    json: options.Json = False,
) -> None:
    """Make a project, whose things are its own."""
    from llm4agents.cli import output
    from llm4agents.sdk._sync.client import Client

    quotas = {name: value for name, value in _quotas(quota).items() if value is not None}
    made = Client().create_project(name, quotas)
    if json:
        output.emit(made)
    else:
        print(made["id"])


def ls(json: options.Json = False) -> None:
    """List projects."""
    from llm4agents.cli import output
    from llm4agents.sdk._sync.client import Client

    found = Client().projects()
    if json:
        output.emit({"projects": found})
        return
    rows = [
        (
            one["id"],
            one["name"],
            output.when(one["created_at"]) if one["created_at"] else "-",
            f"{one['used'].get('sandboxes', 0):g}",
            ", ".join(f"{name}={value:g}" for name, value in sorted(one["quotas"].items())),
            "disabled" if one["disabled_at"] else "",
        )
        for one in found
    ]
    output.table(("ID", "NAME", "CREATED", "SANDBOXES", "QUOTAS", ""), rows)


def show(project: Project, json: options.Json = False) -> None:
    """Show a project: what it may have, and has."""
    from llm4agents.cli import output
    from llm4agents.sdk._sync.client import Client

    found = Client().project(project)
    if json:
        output.emit(found)
    else:
        _shown(found)


def set_(project: Project, quota: Quota = None, json: options.Json = False) -> None:
    """Set quotas of a project; what is not named stays.

    What it has already is left to it."""
    from llm4agents.cli import output
    from llm4agents.sdk._sync.client import Client

    wanted = _quotas(quota)
    if not wanted:
        raise typer.BadParameter("give at least one NAME=N", param_hint="--quota")
    found = Client().change_project(project, quotas=wanted)
    if json:
        output.emit(found)
    else:
        _shown(found)


def disable(project: Project, json: options.Json = False) -> None:
    """Disable a project: its keys work no more.

    What it has stays, and what runs goes on."""
    _able(project, True, json)


def enable(project: Project, json: options.Json = False) -> None:
    """Enable a project again."""
    _able(project, False, json)


def _able(project: str, disabled: bool, json: bool) -> None:
    from llm4agents.cli import output
    from llm4agents.sdk._sync.client import Client

    found = Client().change_project(project, disabled=disabled)
    if json:
        output.emit(found)
    else:
        output.say(f"{found['name']} is {'disabled' if disabled else 'enabled'}")
