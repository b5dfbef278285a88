"""`template ls|build|init|show|logs|cancel|rm|export|import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from llm4agents.cli import options

Name = Annotated[str, typer.Argument(metavar="NAME", help="A template's name.")]
EXAMPLE: Final = """\
# A template of your own: llm4agents template build .
# Every key is told of in docs/reference/template-toml.md; what is not known there is refused.
name = "{name}"
description = "what is in it, for who looks at template ls"
# memory_mib = 1024
# network = "packages"          # of the build: what its steps may reach
ignore = [".git", "node_modules", "__pycache__"]

[from]
template = "python"             # or debian = ["postgresql"], or image = "registry.example.org/app:1"

[[steps]]
apt = ["jq"]

[[steps]]
pip = ["humanize"]

[[steps]]
workdir = "/app"

# [[steps]]
# copy = "."
# to = "/app"

[[steps]]
run = "echo hello > greeting"

# What lives in the frozen machine, and so runs already in every sandbox.
# [start]
# run = "python3 -m http.server 8000"
# ready = 8000                  # or a file, or a command that ends with 0
"""


def ls(json: options.Json = False) -> None:
    """List templates: size, age, memory, what is in them."""
    from llm4agents.cli import output
    from llm4agents.sdk._sync.client import Client

    found = Client().templates()
    if json:
        output.emit({"templates": found})
        return
    rows = [
        (
            item.get("name"),
            "yes" if item.get("built") else "no",
            item.get("vcpus"),
            f"{item['memory_mib']} MiB" if item.get("memory_mib") else None,
            output.vmm(item.get("vmm"), bool(item.get("nested"))),
            # The root file system is there once for all variants; `bytes` is what this one takes beside it.
            output.size(item.get("bytes", 0) + item.get("rootfs_bytes", 0)) if item.get("built") else None,
            output.age(item.get("created_at")),
            item.get("description") or None,
        )
        for item in found
    ]
    output.table(("NAME", "BUILT", "VCPUS", "MEMORY", "VMM", "SIZE", "AGE", "WHAT IS IN IT"), rows)


def build(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT", help="A directory with a template.toml, such a file, or a template's name."
        ),
    ],
    name: Annotated[str | None, typer.Option(help="What to call it, instead of what its file says.")] = None,
    vcpus: Annotated[int | None, typer.Option(help="vCPUs of this variant.")] = None,
    memory_mib: Annotated[int | None, typer.Option(help="Memory of this variant.")] = None,
    vmm: options.Vmm = None,
    nested: options.Nested = False,
    force: Annotated[bool, typer.Option(help="Also when it is built: every step again.")] = False,
    registry_user: Annotated[
        str | None, typer.Option(help="For an image's registry; its password is read from stdin.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Build a template of your own, or a built-in one ahead of time."""
    from llm4agents.cli import output
    from llm4agents.errors import InvalidRequestError
    from llm4agents.sdk._sync.client import Client
    from llm4agents.sdk._sync.template import Template

    path = Path(what)
    if what.endswith(".toml") or "/" in what or what == "." or (path / "template.toml").is_file():
        recipe = Template.from_file(path).size(vcpus=vcpus, memory_mib=memory_mib)
        auth = None if registry_user is None else {"username": registry_user, "password": _password()}
        done = recipe.build(
            name, force=force, vmm=vmm, nested=nested, auth=auth, on_log=lambda event: output.say(str(event))
        )
        if json:
            output.emit({**done.raw, "steps": [_step(step) for step in done.steps]})
        else:
            output.say(f"{done.name} is built ({output.size(done.bytes)}): llm4agents create -t {done.name}")
        return
    if name is not None:
        raise InvalidRequestError(
            f"{what} is no directory with a template.toml", hint="--name goes with one of your own"
        )
    with output.Progress() as progress:
        built = Client().build_template(
            what,
            vcpus=vcpus,
            memory_mib=memory_mib,
            vmm=vmm,
            nested=nested,
            force=force,
            on_progress=progress,
        )
    if json:
        output.emit(built)
    else:
        output.say(f"{what} is built ({output.size(built.get('bytes'))})")


def _password() -> str:
    import sys

    return sys.stdin.readline().rstrip("\n")


def _step(step: Any) -> dict[str, Any]:
    return {"step": step.step, "words": step.text, "status": step.status, "ms": step.ms}


def init(
    directory: Annotated[Path, typer.Argument(metavar="[DIRECTORY]", help="Where to write it.")] = Path(),
    name: Annotated[str | None, typer.Option(help="Of the template; default: the directory's.")] = None,
) -> None:
    """Write an example of a template.toml."""
    import re

    from llm4agents import recipe
    from llm4agents.cli import output
    from llm4agents.errors import ConflictError

    path = directory / recipe.FILE
    if path.exists():
        raise ConflictError(f"{path} exists", hint="another directory, or remove it")
    guess = re.sub(r"[^a-z0-9]+", "-", directory.resolve().name.lower()).strip("-")
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(EXAMPLE.replace("{name}", recipe.check_name(name or guess or "mine")))
    output.say(f"{path} is written: edit it, then llm4agents template build {directory}")


def show(name: Name, json: options.Json = False) -> None:
    """Show what a template is, and its recipe."""
    from llm4agents.cli import output
    from llm4agents.sdk._sync.template import Templates

    found = Templates().show(name)
    if json:
        output.emit(found)
        return
    for one in found["variants"]:
        defaults, start = one.get("defaults") or {}, one.get("start") or {}
        rows = [
            ("name", found["name"]),
            ("description", one.get("description") or None),
            ("built", "yes" if one.get("built") else "no"),
            ("shape", f"{one['vcpus']} vCPU, {one['memory_mib']} MiB" if one.get("built") else None),
            ("size", output.size(one.get("bytes")) if one.get("built") else None),
            ("created", output.when(one.get("created_at"))),
            ("user", defaults.get("user")),
            ("workdir", defaults.get("workdir")),
            ("start", start.get("run")),
        ]
        output.table(("", ""), [row for row in rows if row[1] is not None])
    if found.get("recipe"):
        output.emit(found["recipe"])


def logs(
    name: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Also what comes, to its end.")] = False,
    json: options.Json = False,
) -> None:
    """Show what a template's build says or has said."""
    from llm4agents.cli import output
    from llm4agents.sdk._recipes import BuildEvent
    from llm4agents.sdk._sync.template import Templates

    if follow:
        state = Templates().follow(name, lambda event: print(event, flush=True))
        output.say(f"the build of {name}: {state}")
        return
    found = Templates().build_state(name)
    if json:
        output.emit(found)
        return
    for event in found["events"]:
        if (told := BuildEvent.of(event, len(found["steps"]))) is not None:
            print(told)
        elif event.get("type") == "end" and event.get("error"):
            output.say(f"error: {event['error'].get('detail')}")
    output.say(f"the build of {name}: {found['state']}")


def cancel(name: Name) -> None:
    """End a template's build; what was done is kept."""
    from llm4agents.cli import output
    from llm4agents.sdk._sync.template import Templates

    Templates().cancel(name)
    output.say(f"the build of {name} is ended")


def rm(name: Name, json: options.Json = False) -> None:
    """Remove a template's built variants."""
    from llm4agents.cli import output
    from llm4agents.sdk._sync.client import Client

    removed = Client().remove_template(name)
    if json:
        output.emit(removed)
    else:
        output.say(f"{name} is removed; a built-in one is built again by the next create, a snapshot is gone")


def export(
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")],
    json: options.Json = False,
) -> None:
    """Write a built template into one file, with digests."""
    from llm4agents.cli import output
    from llm4agents.sdk._sync.client import Client

    written = Client().export_template(name, file)
    if json:
        output.emit(written)
    else:
        output.say(f"{name} is in {file} ({output.size(written.get('bytes'))})")


def import_(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="What `template export` wrote.", exists=True, dir_okay=False),
    ],
    json: options.Json = False,
) -> None:
    """Take in an exported template.

    Refuses what does not match its digests.
    """
    from llm4agents.cli import output
    from llm4agents.sdk._sync.client import Client

    taken = Client().import_template(file)
    if json:
        output.emit(taken)
    else:
        output.say(f"{taken.get('name', 'the template')} is in the cache")
