"""A server's state in one file, and a state directory made of such a file.

In it: the store as it was at one moment (SQLite's own online backup, so the server goes on), the keys that what is in
it is sealed and signed with, the certificates; with disks also what paused sandboxes and volumes consist of. Not in
it: machines that run, templates (they are built again, or exported), logs, audits, captures. Whoever has the file has
the secrets: it is as readable as the key of the vault.

A sparse tar: its first member is a manifest, and what has no manifest, or not what the manifest says, is no backup.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import shutil
import sqlite3
import subprocess
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from llm4agents.config import Settings
from llm4agents.engine import clock
from llm4agents.engine.node import chain_of
from llm4agents.errors import ConflictError, HostSetupError, InvalidRequestError, VersionMismatchError
from llm4agents.images import process
from llm4agents.store import open_store, volumes
from llm4agents.store.opening import stored_version
from llm4agents.store.schema import HEAD

if TYPE_CHECKING:
    from llm4agents.engine.engine import Engine

FORMAT: Final = 1
MANIFEST, STORE, VAULT, CA, ACCESS, TLS = (
    "manifest.json",
    "store.db",
    "vault.key",
    "ca",
    "access.key",
    "tls",
)
SANDBOXES, LAYERS, VOLUMES = "sandboxes", "layers", "volumes"
_LOST: Final = "restored from a backup that has not its disk"


async def write(engine: Engine, file: Path, *, with_disks: bool) -> dict[str, Any]:
    """Write the backup `file` (absolute), whole or not at all; {"file", "bytes", "sandboxes", "volumes"}.

    With disks, paused sandboxes cannot be resumed meanwhile; a volume that is attached is copied as a power cut would
    leave it. Raises ConflictError when there is such a file, InvalidRequestError when none can be
    written there, HostSetupError, CapacityError.
    """
    if file.exists():
        raise ConflictError(f"there is a {file} already", hint="another name, or remove it")
    if not file.parent.is_dir():
        raise InvalidRequestError(f"there is no directory {file.parent}")
    staging = engine.settings.state / f".backup-{secrets.token_hex(6)}"
    partial = file.with_name(f".{file.name}.{secrets.token_hex(6)}")
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, staging, ignore_errors=True)
        stack.callback(partial.unlink, missing_ok=True)
        paused: list[str] = []
        names: list[str] = []
        if with_disks:
            for row in engine.store.paused():
                await stack.enter_async_context(engine.still(row.id))
                now = engine.store.get(row.id)
                if now is not None and now.state == "paused":
                    paused.append(row.id)
                    names.append(f"{SANDBOXES}/{row.id}")
                    names += [f"{LAYERS}/{layer}" for layer in chain_of(now).layers]
            if (engine.settings.state / VOLUMES).is_dir():
                names.append(VOLUMES)
        await asyncio.to_thread(_stage, engine.settings, staging, paused)
        names = [name for name in dict.fromkeys(names) if (engine.settings.state / name).exists()]
        try:
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidRequestError(f"{file} cannot be written: {error.strerror}") from error
        os.close(fd)
        small = sorted(path.name for path in staging.iterdir() if path.name != MANIFEST)
        argv = ["tar", "--create", "--sparse", "--numeric-owner", f"--file={partial}", "--exclude=*.sock"]
        argv += [f"--directory={staging}", MANIFEST, *small]
        if names:
            argv += [f"--directory={engine.settings.state}", *names]
        await process.run(argv, cwd=file.parent)
        with partial.open("rb") as made:
            os.fsync(made.fileno())
        try:
            os.link(partial, file)  # not a rename, which would replace another's
        except FileExistsError as error:
            raise ConflictError(f"there is a {file} by now", hint="another name, or remove it") from error
    disks = (engine.settings.state / VOLUMES).glob("*.raw") if with_disks else ()
    return {
        "file": str(file),
        "bytes": file.stat().st_size,
        "sandboxes": len(paused),
        "volumes": len(list(disks)),
    }


def _stage(settings: Settings, staging: Path, paused: list[str]) -> None:
    """Everything but the disks, beside each other, and the manifest of it."""
    staging.mkdir(mode=0o700)
    with (
        closing(sqlite3.connect(settings.state / STORE)) as source,
        closing(sqlite3.connect(staging / STORE)) as copy,
    ):
        source.backup(copy)
        copy.execute("PRAGMA journal_mode=DELETE")
    (staging / STORE).chmod(0o600)
    for name, path in _keys(settings).items():
        if path.is_dir():
            shutil.copytree(path, staging / name)
        elif path.exists():
            shutil.copy2(path, staging / name)
    manifest = {
        "format": FORMAT,
        "schema": HEAD,
        "made_at": clock.wall_s(),
        "paused": paused,
        "sha256": dict(_digests(staging)),
    }
    (staging / MANIFEST).write_text(json.dumps(manifest))


def _keys(settings: Settings) -> dict[str, Path]:
    """Files and directories beside the store, by their name in a backup."""
    return {
        VAULT: settings.vault_key or settings.state / VAULT,
        CA: settings.ca_directory,
        TLS: settings.state / TLS,
        ACCESS: settings.state / ACCESS,
    }


def _digests(directory: Path) -> Iterable[tuple[str, str]]:
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            with path.open("rb") as file:
                yield str(path.relative_to(directory)), hashlib.file_digest(file, "sha256").hexdigest()


def _same(one: Path, other: Path) -> bool:
    if one.is_dir() != other.is_dir():
        return False
    if one.is_dir():
        return dict(_digests(one)) == dict(_digests(other))
    return one.read_bytes() == other.read_bytes()


def restore(settings: Settings, file: Path) -> dict[str, Any]:
    """Make `settings.state`, which is empty but for its lock, of a backup. Blocks; the caller holds the lock.

    Returns {"sandboxes", "lost", "volumes", "volumes_lost"}: sandboxes whose disks are not in it end as `failed`, with
    that as their reason; volumes that are not in it are gone. Raises ConflictError, InvalidRequestError,
    VersionMismatchError, HostSetupError; nothing is changed then.
    """
    state = settings.state
    if found := sorted(path.name for path in state.iterdir() if path.name not in ("lock", "server.log")):
        raise ConflictError(
            f"{state} is not empty (it has {found[0]})", hint="set LLM4AGENTS_STATE to a new directory"
        )
    keys = _keys(settings)
    new = state / f".restore-{secrets.token_hex(6)}"
    new.mkdir(mode=0o700)
    try:
        _unpack(file, new)
        manifest = _checked(file, new)
        for name, target in keys.items():
            if target.exists() and (new / name).exists() and not _same(new / name, target):
                raise ConflictError(
                    f"there is another {target} already", hint="move it away, or name another place for it"
                )
        alive = _settle(new, set(manifest["paused"]))
        for name in (
            SANDBOXES,
            LAYERS,
            VOLUMES,
            VAULT,
            CA,
            TLS,
            ACCESS,
            STORE,
        ):  # the store last: then it is one
            target = keys.get(name, state / name)
            if (new / name).exists() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                shutil.move(new / name, target)
        os.sync()
        return alive
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _unpack(file: Path, directory: Path) -> None:
    """GNU tar writes nothing outside of where it is told to, and follows no link that it has made itself."""
    argv = ["tar", "--extract", "--sparse", "--numeric-owner", f"--file={file}", f"--directory={directory}"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise HostSetupError(f"tar cannot be run: {error}", hint="llm4agents setup") from error
    if done.returncode != 0:
        raise InvalidRequestError(f"{file} is no whole backup: {done.stderr.strip()[-300:]}")


def _checked(file: Path, new: Path) -> dict[str, Any]:
    """The manifest, when what was unpacked is what it says. Links are in no backup."""
    try:
        manifest = json.loads((new / MANIFEST).read_text())
        said, form = dict(manifest["sha256"]), manifest["format"]
        schema, _ = str(manifest["schema"]), list(manifest["paused"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequestError(
            f"{file} is no backup of a server", hint="llm4agents server backup"
        ) from error
    if form != FORMAT or schema > HEAD or (stored_version(new / STORE) or "") > HEAD:
        raise VersionMismatchError(
            f"{file} was made by a newer llm4agents (schema {schema}; this one knows up to {HEAD})",
            hint="upgrade llm4agents",
        )
    known = {MANIFEST, STORE, VAULT, CA, TLS, ACCESS, SANDBOXES, LAYERS, VOLUMES}
    for path in new.rglob("*"):
        if path.is_symlink() or path.relative_to(new).parts[0] not in known:
            raise InvalidRequestError(f"{file} has {path.relative_to(new)}, which no backup has")
    for name, digest in said.items():
        try:
            with (new / name).open("rb") as part:
                same = hashlib.file_digest(part, "sha256").hexdigest() == digest
        except OSError:
            same = False
        if not same:
            raise InvalidRequestError(f"{file} is damaged: {name} is not what was written")
    return dict(manifest)


def _settle(new: Path, paused: set[str]) -> dict[str, Any]:
    """Rows that nothing is there for any more end here, and not in the next server, which would look for machines."""
    store = open_store(new / STORE)
    try:
        kept = lost = 0
        for row in store.alive():
            if row.state == "paused" and row.id in paused:
                kept += 1
                continue
            now = clock.stamp()
            store.transition(row, "failed", _LOST, now, ended_at=now.wall_s, record=None)
            lost += 1
        there = {path.stem for path in (new / VOLUMES).glob("*.raw")}
        gone = [row.id for row in volumes.rows(store) if row.id not in there]
        for ident in gone:
            volumes.forget(store, ident)
        store.checkpoint()
    finally:
        store.close()
    return {"sandboxes": kept, "lost": lost, "volumes": len(there), "volumes_lost": len(gone)}
