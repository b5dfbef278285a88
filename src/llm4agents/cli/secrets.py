"""`secret set|ls|rm`. A value comes from stdin, a file or a variable: an argument would be in `ps` and in histories."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from llm4agents.cli import options

_PARTS = (
    ("access_key_id", "access key id", True),
    ("secret_access_key", "secret access key", True),
    ("session_token", "session token (none: Enter)", False),
)


def set_(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The secret's name, for bindings.")],
    never: Annotated[str | None, typer.Argument(metavar="< FILE", hidden=True)] = None,
    from_env: Annotated[
        str | None, typer.Option(metavar="VAR", help="Take the value of this environment variable.")
    ] = None,
    from_file: Annotated[Path | None, typer.Option(help="Take what is in this file.")] = None,
    aws: Annotated[
        bool,
        typer.Option(
            "--aws", help="It is AWS credentials: JSON as `aws sts assume-role` prints it, or asked for here."
        ),
    ] = False,
    json: options.Json = False,
) -> None:
    """Set a secret: asked for without echo, or read from stdin. A new value is used from now on.

    One newline at the end of stdin or of a file is not part of it. Nobody can read it again.
    """
    from llm4agents.cli import output
    from llm4agents.sdk._sync.secrets import Secrets

    if never is not None:
        raise typer.BadParameter(
            "a value is never an argument: it would be in `ps` and in your shell's history; give it on stdin",
            param_hint="VALUE",
        )
    if from_env is not None and from_file is not None:
        raise typer.BadParameter("give one of --from-env and --from-file", param_hint="--from-env")
    info = Secrets().set(name, _value(from_env, from_file, aws))
    if json:
        output.emit(_plain(info))
    else:
        output.say(f"{info.name} is set (version {info.version})")


def _value(from_env: str | None, from_file: Path | None, aws: bool) -> str | dict[str, str]:
    import getpass
    import os
    import sys

    if from_env is not None:
        if from_env not in os.environ:
            raise typer.BadParameter(f"there is no variable {from_env}", param_hint="--from-env")
        text = os.environ[from_env]
    elif from_file is not None:
        try:
            text = _text(from_file.read_bytes())
        except OSError as error:
            raise typer.BadParameter(
                f"{from_file} cannot be read: {error.strerror}", param_hint="--from-file"
            ) from None
    elif not sys.stdin.isatty():
        text = _text(sys.stdin.buffer.read())
    elif aws:
        asked = {part: getpass.getpass(f"{label}: ") for part, label, _ in _PARTS}
        return {part: asked[part] for part, _, needed in _PARTS if needed or asked[part]}
    else:
        return getpass.getpass("value: ")
    return _aws(text) if aws else text


def _text(raw: bytes) -> str:
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise typer.BadParameter("the value is not UTF-8 text", param_hint="VALUE") from None
    return text.removesuffix("\n").removesuffix("\r")


def _aws(text: str) -> dict[str, str]:
    import json as codec

    try:
        found: Any = codec.loads(text)
    except ValueError:
        found = None
    if isinstance(found, dict) and isinstance(found.get("Credentials"), dict):
        found = found["Credentials"]
    if not isinstance(found, dict):
        raise typer.BadParameter(
            "that is no JSON object of AWS credentials (access_key_id, secret_access_key, session_token)",
            param_hint="VALUE",
        )
    return found


def ls(json: options.Json = False) -> None:
    """List secrets by name; nobody is told their values."""
    from llm4agents.cli import output
    from llm4agents.sdk._sync.secrets import Secrets

    found = Secrets().list()
    if json:
        output.emit({"secrets": [_plain(info) for info in found]})
        return
    rows = [(i.name, i.version, output.when(i.created_at), output.when(i.updated_at)) for i in found]
    output.table(("NAME", "VERSION", "CREATED", "UPDATED"), rows)


def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="The secrets' names.")],
    json: options.Json = False,
) -> None:
    """Remove secrets. Sandboxes that use one go on; their requests that need it are refused from now on."""
    from llm4agents.cli import output
    from llm4agents.sdk._sync.secrets import Secrets

    secrets = Secrets()
    removed = []
    for name in names:
        used_by = secrets.remove(name)
        removed.append({"name": name, "removed": True, "used_by": used_by})
        output.say(f"{name} is removed")
        if used_by:
            said = ", ".join(used_by[:5]) + ("…" if len(used_by) > 5 else "")
            output.say(f"note: requests of {said} that need it are refused from now on")
    if json:
        output.emit({"secrets": removed})


def _plain(info: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(info)
