"""`server start|run|stop|status|ca|backup|restore`. Only `start` and `run` may start one."""

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
    wanted, info = settings().listen, _local.start(settings())
    if wanted is not None and not info.get("listen"):
        from llm4agents.cli import output

        output.say(
            f"warning: a server runs already, and listens on its socket alone, not on {wanted}; for that: "
            "llm4agents server stop --keep, and start it again"
        )
    _show(info, json)


def run(
    vmm: options.Vmm = None,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen",
            metavar="HOST:PORT",
            help="Also listen there, for clients that have a key (key create).",
        ),
    ] = None,
    domain: Annotated[
        str | None,
        typer.Option("--domain", help="Ports of sandboxes are PORT-ID.DOMAIN, for example sbx.localhost."),
    ] = None,
    tls_cert: Annotated[
        str | None, typer.Option("--tls-cert", metavar="FILE", help="Certificate chain (PEM).")
    ] = None,
    tls_key: Annotated[str | None, typer.Option("--tls-key", metavar="FILE", help="Its key (PEM).")] = None,
    tls_local: Annotated[
        bool,
        typer.Option(
            "--tls-local", help="Make a certificate of a CA of the server's own (server ca shows it)."
        ),
    ] = False,
    insecure_http: Annotated[
        bool,
        typer.Option("--insecure-http", help="Listen without TLS where others can reach it: behind a proxy."),
    ] = False,
) -> None:
    """Run the server in the foreground, logging to this terminal.

    It serves this host over a unix socket; with --listen others too, by TCP. Each option is also a setting, such as
    LLM4AGENTS_LISTEN. A server that listens stays until it is stopped. See docs/howto/run-a-server.md.
    """
    from pathlib import Path

    _choose(vmm)
    chosen = {
        "LISTEN": listen,
        "DOMAIN": domain,
        "TLS_CERT": tls_cert and str(Path(tls_cert).absolute()),
        "TLS_KEY": tls_key and str(Path(tls_key).absolute()),
        "TLS_LOCAL": "1" if tls_local else None,
        "INSECURE_HTTP": "1" if insecure_http else None,
    }
    os.environ.update({f"LLM4AGENTS_{name}": value for name, value in chosen.items() if value})
    from llm4agents.config import settings
    from llm4agents.sdk import _local, _wire

    settings.cache_clear()
    _wire.check_platform(None)
    _local.make_private(settings().run_dir)
    settings().state.mkdir(mode=0o700, parents=True, exist_ok=True)
    command = [*_local.server_command(), "--foreground"]
    os.execv(command[0], command)  # noqa: S606 (it becomes this process, so that signals reach it)


def ca(
    pem: Annotated[bool, typer.Option("--pem", help="Print the certificate itself.")] = False,
    json: options.Json = False,
) -> None:
    """Say where the certificate of the local CA is (--tls-local).

    Clients are given it: as LLM4AGENTS_CA_FILE for the SDK and this command line, as SSL_CERT_FILE for most other
    programs.
    """
    import hashlib
    import ssl

    from llm4agents.cli import output
    from llm4agents.config import settings
    from llm4agents.errors import NotFoundError

    path = settings().state / "tls" / "ca.pem"
    try:
        text = path.read_text()
    except OSError:
        raise NotFoundError(
            f"there is no local CA in {path.parent}",
            hint="llm4agents server run --listen … --tls-local makes it",
        ) from None
    if json:
        digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(text)).hexdigest()
        output.emit({"path": str(path), "sha256": digest, "pem": text})
    else:
        print(text.strip() if pem else path)


def backup(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A new file; it will have every secret of the server.")
    ],
    with_disks: Annotated[
        bool,
        typer.Option("--with-disks", help="Also paused sandboxes and volumes, with all that is on them."),
    ] = False,
    json: options.Json = False,
) -> None:
    """Write the state of the running server into a file.

    The store, the keys, the certificates; not templates, logs, and sandboxes that run. See docs/howto/run-a-server.md.
    """
    from pathlib import Path

    from llm4agents.cli import output
    from llm4agents.sdk._sync.transport import transport

    with transport() as way:
        body = {"file": str(Path(file).absolute()), "with_disks": with_disks}
        done = way.json("POST", "/v1/server/backup", body, wait_s=None)
    if json:
        output.emit(done)
    else:
        disks = f"; {done['sandboxes']} paused sandboxes, {done['volumes']} volumes" if with_disks else ""
        output.say(f"{done['file']}: {done['bytes']} bytes{disks}")


def restore(
    file: Annotated[str, typer.Argument(metavar="FILE", help="What `server backup` has written.")],
    json: options.Json = False,
) -> None:
    """Make the state directory, which must be empty, of a backup."""
    import json as codec
    import subprocess
    import sys
    from pathlib import Path

    from llm4agents.cli import output
    from llm4agents.config import settings
    from llm4agents.errors import HostSetupError, from_wire
    from llm4agents.sdk import _local, _wire

    _wire.check_platform(None)
    settings().state.mkdir(mode=0o700, parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-m", "llm4agents.api.restoring", str(Path(file).absolute())]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        for line in done.stderr.splitlines():
            if line.startswith(_local.START_FAILED):
                body = codec.loads(line.removeprefix(_local.START_FAILED))
                raise from_wire(body, int(body["status"]))
        raise HostSetupError(f"it could not be restored: {done.stderr.strip()[-500:]}")
    found = codec.loads(done.stdout.splitlines()[-1])
    if json:
        output.emit(found)
    else:
        output.say(
            f"restored into {settings().state}: {found['sandboxes']} paused sandboxes, {found['volumes']} volumes; "
            f"not in the backup, and gone: {found['lost']} sandboxes, {found['volumes_lost']} volumes"
        )


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
    from llm4agents.config import settings

    info = {**info, "socket": str(settings().socket_path)}
    if as_json:
        output.emit({"running": True, **info})
        return
    names = (
        "version",
        "pid",
        "listen",
        "started_at",
        "sandboxes",
        "vmm",
        "accelerator",
        "why_not_kvm",
        "state",
        "log",
        "socket",
    )
    for name in names:
        if info.get(name) is not None:
            value = output.when(info[name]) if name == "started_at" else str(info[name]).partition("\n")[0]
            print(f"{name.replace('_', ' ')}: {value}")
