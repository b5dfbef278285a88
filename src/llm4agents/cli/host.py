"""`prune`, `du`, `setup`, `doctor`: this machine, not one sandbox."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from typing import Annotated, Any

import typer

from llm4agents.cli import options
from llm4agents.errors import HostSetupError


def prune(
    all: Annotated[bool, typer.Option("--all", help="Also built templates that no sandbox uses.")] = False,
    json: options.Json = False,
) -> None:
    """Remove from the cache what nothing needs."""
    from llm4agents.cli import output
    from llm4agents.sdk._sync.client import Client

    done = Client().prune(all=all)
    if json:
        output.emit(done)
        return
    for name in done.get("removed") or ():
        print(name)
    output.say(f"{output.size(done.get('bytes') or 0)} freed")


def du(json: options.Json = False) -> None:
    """Say what lies on disk."""
    from llm4agents.cli import output
    from llm4agents.sdk._sync.client import Client

    found = Client().du()
    if json:
        output.emit(found)
        return
    rows = [
        (item.get("name"), output.size(item.get("bytes")), item.get("path"))
        for item in found.get("data") or ()
    ]
    output.table(("WHAT", "SIZE", "PATH"), [*rows, ("total", output.size(found.get("total_bytes") or 0), "")])


def doctor(
    isolation: Annotated[
        str | None,
        typer.Option("--isolation", metavar="ID", help="Of a running sandbox: how its VMM is confined."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Check whether sandboxes can run here, and say what to do if not.

    Needs no server; exit code 1 when they cannot. With --isolation: 1 when something promised does not hold.
    """
    from llm4agents.cli import output

    if isolation is not None:
        _isolation(isolation, json)
    from llm4agents.sdk import doctor as sdk_doctor

    found = sdk_doctor.report()
    if json:
        output.emit(found)
    else:
        _show(found)
    raise typer.Exit(0 if found.get("ok") else output.CODE_FAILED)


def _isolation(given: str, json: bool) -> None:
    from llm4agents import Sandbox
    from llm4agents.cli import confinement, ids, output

    found = Sandbox.connect(ids.resolve(given)).isolation()
    if json:
        output.emit(found.report)
    else:
        for line in confinement.lines(found):
            print(line)
    raise typer.Exit(0 if found.ok else output.CODE_FAILED)


def _show(found: dict[str, Any]) -> None:
    for check in found.get("checks") or ():
        mark = "ok  " if check.get("ok") else "FAIL" if check.get("required") else "warn"
        print(f"{mark}  {check.get('name')}: {check.get('detail') or ''}".rstrip(": "))
        if not check.get("ok") and check.get("hint"):
            print(f"      → {check['hint']}")
    if found.get("accelerator"):
        why = f" (not KVM: {found['why_not_kvm']})" if found.get("why_not_kvm") else ""
        print(f"accelerator: {found['accelerator']}{why}")
    if found.get("slowdown_note"):
        print(f"note: {found['slowdown_note']}")
    print("this host can run sandboxes" if found.get("ok") else "this host cannot run sandboxes yet")


def setup(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: options.Json = False,
) -> None:
    """Install the host packages that are missing, after asking."""
    from llm4agents.cli import output
    from llm4agents.sdk import doctor as sdk_doctor

    missing = list(sdk_doctor.report().get("packages_missing") or ())
    if not missing:
        if json:
            output.emit({"packages_missing": [], "command": None, "installed": []})
        else:
            output.say("nothing is missing")
        return
    command = apt_command(missing)
    line = shlex.join(command)
    if shutil.which("apt-get") is None:
        raise HostSetupError(
            f"missing: {', '.join(missing)}", hint="install them with this system's package manager"
        )
    output.say(f"missing: {', '.join(missing)}\n{line}")
    if not yes and not json and not typer.confirm("Run this?", default=False, err=True):
        raise typer.Exit(output.NOT_STARTED)
    if json and not yes:
        output.emit({"packages_missing": missing, "command": line, "installed": []})
        raise typer.Exit(output.NOT_STARTED)
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # stdout belongs to --json: what apt-get says goes to stderr.
    if subprocess.run(command, env=env, stdout=2, check=False).returncode != 0:
        raise HostSetupError("apt-get failed; what it said is above", hint=f"try: apt-get update && {line}")
    if json:
        output.emit({"packages_missing": [], "command": line, "installed": missing})
    else:
        output.say("installed; llm4agents doctor checks the rest")


def apt_command(packages: list[str]) -> list[str]:
    """The command that installs `packages`: with sudo when we are not root and there is one."""
    sudo = ["sudo"] if os.geteuid() != 0 and shutil.which("sudo") else []
    return [*sudo, "apt-get", "install", "-y", "--no-install-recommends", *packages]
