"""`template ls|build|rm|export|import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llm4agents.cli import options

Name = Annotated[str, typer.Argument(help="A template's name.")]


def ls(json: options.Json = False) -> None:
    """List templates, built or not."""
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
            output.size(item.get("bytes")) if item.get("built") else None,
            output.when(item.get("created_at")),
        )
        for item in found
    ]
    output.table(("NAME", "BUILT", "VCPUS", "MEMORY", "VMM", "SIZE", "CREATED"), rows)


def build(
    name: Name,
    vcpus: Annotated[int | None, typer.Option(help="vCPUs of this variant.")] = None,
    memory_mib: Annotated[int | None, typer.Option(help="Memory of this variant.")] = None,
    vmm: options.Vmm = None,
    nested: options.Nested = False,
    force: Annotated[bool, typer.Option(help="Also when it is built.")] = False,
    json: options.Json = False,
) -> None:
    """Build a template now instead of at the first create."""
    from llm4agents.cli import output
    from llm4agents.sdk._sync.client import Client

    with output.Progress() as progress:
        built = Client().build_template(
            name,
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
        output.say(f"{name} is built ({output.size(built.get('bytes'))})")


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
    file: Annotated[Path, typer.Argument(help="The file to write.")],
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
    file: Annotated[Path, typer.Argument(help="What `template export` wrote.", exists=True, dir_okay=False)],
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
