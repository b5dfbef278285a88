"""`server start|run|stop|status`. Only `start` and `run` may start one."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from llm4agents.cli import options


def start(vmm: options.Vmm = None, json: options.Json = False) -> None:
    """Start the local server, if it does not run.

    Also with LLM4AGENTS_AUTOSTART=0.
    """
    _choose(vmm)
    from llm4agents.config import settings
    from llm4agents.sdk import _local, _wire

    _wire.check_platform(None)
    _show(_local.start(settings()), json)


def run(vmm: options.Vmm = None) -> None:
    """Run the server in the foreground, logging to this terminal."""
    _choose(vmm)
    from llm4agents.config import settings
    from llm4agents.sdk import _local, _wire

    _wire.check_platform(None)
    _local.make_private(settings().run_dir)
    settings().state.mkdir(mode=0o700, parents=True, exist_ok=True)
    command = _local.server_command()
    os.execv(command[0], command)  # noqa: S606 (it becomes this process, so that signals reach it)


def _choose(vmm: str | None) -> None:
    """`--vmm` is LLM4AGENTS_VMM of the server about to start."""
    from llm4agents.config import settings

    if vmm is not None:
        os.environ["LLM4AGENTS_VMM"] = vmm
        settings.cache_clear()


def stop(
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave sandboxes running for the next server.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Stop the local server and end its sandboxes (--keep: leave them)."""
    from llm4agents.cli import output
    from llm4agents.config import settings
    from llm4agents.sdk import _local

    ran = _local.stop(settings(), keep=keep)
    if json:
        output.emit({"stopped": ran})
    else:
        output.say("stopped" if ran else "no server runs")


def status(json: options.Json = False) -> None:
    """Say whether the local server runs, and what it does. Exit code 3 when it does not."""
    from llm4agents.cli import output
    from llm4agents.config import settings
    from llm4agents.sdk import _local

    info = _local.probe(settings())
    if info is None:
        if json:
            output.emit({"running": False, "log": str(settings().server_log)})
        else:
            output.say(f"no server runs (its log: {settings().server_log})")
        raise typer.Exit(output.NOT_STARTED)
    _show(info, json)


def _show(info: dict[str, Any], as_json: bool) -> None:
    from llm4agents.cli import output

    if as_json:
        output.emit({"running": True, **info})
        return
    names = ("version", "pid", "started_at", "sandboxes", "vmm", "accelerator", "why_not_kvm", "state", "log")
    for name in names:
        if info.get(name) is not None:
            value = output.when(info[name]) if name == "started_at" else info[name]
            print(f"{name.replace('_', ' ')}: {value}")
