"""The table of commands. Importing it may import typer and nothing heavier."""

from __future__ import annotations

from typing import Annotated

import typer

from llm4agents.cli import host, run, sandboxes, server, templates

app = typer.Typer(
    name="llm4agents",
    help="Run an agent's code in microVMs. Start with: llm4agents run -c 'print(6*7)'",
    rich_markup_mode=None,  # help in plain text: importing rich costs 80 ms
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        from llm4agents import __version__

        typer.echo(f"llm4agents {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Print the version.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    pass


_templates = typer.Typer(rich_markup_mode=None, no_args_is_help=True)
_templates.command("ls")(templates.ls)
_templates.command("build")(templates.build)
_templates.command("rm")(templates.rm)
_templates.command("export")(templates.export)
_templates.command("import")(templates.import_)

_server = typer.Typer(rich_markup_mode=None, no_args_is_help=True)
_server.command("start")(server.start)
_server.command("run")(server.run)
_server.command("stop")(server.stop)
_server.command("status")(server.status)

app.command("run")(run.run)
app.command("create")(sandboxes.create)
app.command("exec", context_settings={"allow_interspersed_args": False})(sandboxes.exec_)
app.command("cp")(sandboxes.cp)
app.command("ls")(sandboxes.ls)
app.command("ps", hidden=True)(sandboxes.ls)
app.command("kill")(sandboxes.kill)
app.add_typer(_templates, name="template", help="Templates: what sandboxes are cloned from.")
app.command("prune")(host.prune)
app.command("du")(host.du)
app.command("setup")(host.setup)
app.command("doctor")(host.doctor)
app.add_typer(_server, name="server", help="The local server (started when needed).")
