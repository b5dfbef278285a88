"""The table of commands, and the typer application made from it for one command line.

typer reads the signature of every command it knows, some 2 ms each; so only the command that is called is
given to it whole, and the others as a name and a line of help. Shell completion gets all of them whole.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer

# name → (module, function, first line of its docstring; a test compares)
COMMANDS = {
    "run": ("run", "run", "Run code in a microVM: prints its output as it comes, then the last value."),
    "create": ("sandboxes", "create", "Create a sandbox, leave it running, print its id."),
    "exec": (
        "sandboxes",
        "exec_",
        "Run a command in a sandbox; its output, and its exit code, are passed on.",
    ),
    "cp": ("sandboxes", "cp", "Copy files into a sandbox (LOCAL ID:PATH) or out of one (ID:PATH LOCAL)."),
    "find": ("trees", "find", "List the files below a directory of a sandbox, by name."),
    "grep": (
        "trees",
        "grep",
        "Search the lines of a sandbox's files; exit code 1 when none is found.",
    ),
    "watch": (
        "trees",
        "watch",
        "Print what changes in a directory of a sandbox, until it is interrupted (Ctrl-C).",
    ),
    "ls": ("sandboxes", "ls", "List sandboxes."),
    "ps": ("processes", "ps", "List the processes of a sandbox (without ID: the sandboxes, as ls)."),
    "logs": ("processes", "logs", "Show what a process has said; with -f also what it goes on to say."),
    "attach": (
        "processes",
        "attach",
        "Attach this terminal to a process; Ctrl-] leaves it to itself. Its exit code is passed on.",
    ),
    "shell": (
        "processes",
        "shell",
        "Open a terminal in a sandbox; Ctrl-] leaves it running. The shell's exit code is passed on.",
    ),
    "kill": ("sandboxes", "kill", "Kill sandboxes; their memory and files are gone."),
    "forward": (
        "forward",
        "forward",
        "Make ports of a sandbox ports of this machine (127.0.0.1), until Ctrl-C.",
    ),
    "pool": ("pool", "pool", "Show what is kept ready, or keep N machines of a template ready."),
    "mcp": ("mcp", "mcp", "Serve sandboxes as tools to an agent over stdin and stdout (MCP)."),
    "console": ("observe", "console", "Show what a sandbox's server and console have said."),
    "events": ("observe", "events", "Show what happened to sandboxes; with --follow as it happens."),
    "usage": ("observe", "usage", "Show what sandboxes have used: time running and paused."),
    "top": ("observe", "top", "Show what sandboxes take now, live (q quits)."),
    "pause": (
        "states",
        "pause",
        "Put a sandbox to disk: it costs no memory and no time until it is resumed.",
    ),
    "resume": (
        "states",
        "resume",
        "Let a paused sandbox run on where it was. (A call does that too, unless auto-resume is off.)",
    ),
    "fork": (
        "states",
        "fork",
        "Make sandboxes that are what this one is now, memory, processes and files; it goes on.",
    ),
    "snapshot": (
        "states",
        "snapshot",
        "Make a template of a sandbox as it is now; `create --template NAME` clones it.",
    ),
    "whoami": ("keys", "whoami", "Say who you are to the server: project, scopes, quotas."),
    "audit": ("audit", "audit", "Show who changed what, when and from where, and what was refused."),
    "register": (
        "invites",
        "register",
        "Have a project made for an invite's code (at LLM4AGENTS_URL), and print its first API key, this once.",
    ),
    "prune": ("host", "prune", "Remove from the cache what nothing needs."),
    "du": ("host", "du", "Say what lies on disk."),
    "setup": ("host", "setup", "Install the host packages that are missing, after asking."),
    "doctor": ("host", "doctor", "Check whether sandboxes can run here, and say what to do if not."),
}
GROUPS = {
    "template": (
        "templates",
        ("ls", "build", "init", "show", "logs", "cancel", "rm", "export", "import_"),
        "Templates: what sandboxes are cloned from.",
    ),
    "context": (
        "contexts",
        ("create", "ls", "restart", "rm"),
        "Code contexts: states of their own for the code of a sandbox.",
    ),
    "job": (
        "jobs",
        ("start", "ls", "show", "output_", "wait", "run", "cancel"),
        "Jobs: commands that are started, or scheduled, and left.",
    ),
    "net": (
        "network",
        ("show", "set_", "why", "log", "capture"),
        "What a sandbox may reach: shown, changed while it runs, explained; what it tried, and its packets.",
    ),
    "volume": (
        "volumes",
        (
            "create",
            "ls",
            "show",
            "rm",
            "snapshot",
            "clone",
            "resize",
            "files",
            "cat",
            "cp",
            "attach",
            "detach",
        ),
        "Volumes: disks that outlive sandboxes.",
    ),
    "secret": (
        "secrets",
        ("set_", "ls", "rm"),
        "Secrets: put into requests after these have left a sandbox, and in no sandbox ever.",
    ),
    "ports": (
        "ports",
        ("ls", "url", "traffic"),
        "Ports of a sandbox: which listen, their URLs, and who may reach them through the server.",
    ),
    "key": ("keys", ("create", "ls", "revoke"), "API keys: who may call a server that listens."),
    "project": (
        "projects",
        ("create", "ls", "show", "set_", "disable", "enable"),
        "Projects: whose sandboxes, templates, volumes, secrets and keys are whose, and how much of them.",
    ),
    "invite": (
        "invites",
        ("create", "ls", "revoke"),
        "Invites: codes that people without a key have a project made for.",
    ),
    "server": (
        "server",
        ("start", "run", "stop", "status", "ca", "backup", "restore"),
        "The local server (started when needed), or one for others.",
    ),
}
# rich_markup_mode None: help and usage errors in plain text, since importing rich costs 80 ms.
_PLAIN: dict[str, Any] = {
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "no_args_is_help": True,
}
_HELP = {"help_option_names": ["-h", "--help"]}


def build(called: str | None) -> typer.Typer:
    """The application for a command line whose command is `called`; None gives every command whole."""
    app = typer.Typer(
        name="llm4agents",
        help="Run an agent's code in microVMs. Start with: llm4agents run -c 'print(6*7)'",
        context_settings=_HELP,
        **_PLAIN,
    )
    app.callback()(_root)
    for name, (module, function, line) in COMMANDS.items():
        # After the id of `exec` and `shell`, options are the command's.
        settings = {**_HELP, "allow_interspersed_args": False} if name in ("exec", "shell") else _HELP
        command = _load(module, function) if called in (name, None) else _unused
        app.command(name, short_help=line, context_settings=settings)(command)
    for name, (module, functions, line) in GROUPS.items():
        group = typer.Typer(context_settings=_HELP, **_PLAIN)
        for function in functions if called in (name, None) else ():
            group.command(function.rstrip("_"))(_load(module, function))
        if not group.registered_commands:
            group.command("unused")(_unused)
            group.command("unused2")(_unused)  # a group of one would be taken for a command
        app.add_typer(group, name=name, short_help=line, help=line)
    return app


def _load(module: str, function: str) -> Any:
    return getattr(import_module(f"llm4agents.cli.{module}"), function)


def _unused() -> None:
    raise AssertionError("a command that is not called")


def _version(value: bool) -> None:
    if value:
        from llm4agents import __version__

        typer.echo(f"llm4agents {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Print the version.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    pass
