"""Open a store: make it, migrate it (after a backup), or refuse it. Not here: what is in it (`store.py`).

Alembic is imported only when there is something to migrate: it is a third of a second of a server's start.
"""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.pool import StaticPool

from llm4agents.errors import HostSetupError, VersionMismatchError
from llm4agents.store.schema import HEAD
from llm4agents.store.store import Store

BACKUPS_MAX = 10
BUSY_TIMEOUT_MS = 5_000
CHECKPOINT_PAGES_MAX = 20_000
"""SQLite's own checkpoint fsyncs inside some unlucky commit; ours (`Store.checkpoint`) runs in a thread first."""


def open_store(path: Path) -> Store:
    """The store at `path`, of this version: created if absent, else backed up into `backups/` and migrated if older.

    Raises VersionMismatchError for a store a newer version has written, HostSetupError when the file
    is no SQLite database or cannot be opened.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        found = stored_version(path)
        if found is not None and found not in _known_versions(found):
            raise VersionMismatchError(
                f"{path} was written by a newer llm4agents (schema {found}; this one knows up to {HEAD})",
                hint="upgrade llm4agents, or point LLM4AGENTS_STATE at another directory",
                found=found,
                known=HEAD,
            )
        if found is not None and found != HEAD:
            backup(path, found)
        engine = _engine(path)
        if found != HEAD:
            with engine.begin() as connection:
                _migrate(connection)
        path.chmod(0o600)
    except (sqlite3.DatabaseError, OSError) as error:
        raise HostSetupError(
            f"cannot open the store {path}: {error}",
            hint=f"move it away, or copy one of {path.parent / 'backups'} back",
        ) from error
    return Store(engine, path)


def stored_version(path: Path) -> str | None:
    """The schema version of the store at `path`; None when there is none yet."""
    if not path.exists() or path.stat().st_size == 0:
        return None
    with closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_MS / 1000)) as connection:
        try:
            row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                return None
            raise
    return None if row is None else str(row[0])


def backup(path: Path, version: str) -> Path:
    """Copy a live store into `backups/` next to it, whole or not at all; the oldest beyond BACKUPS_MAX go."""
    directory = path.parent / "backups"
    directory.mkdir(mode=0o700, exist_ok=True)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    target = directory / f"{path.stem}-{version}-{stamp}-{os.getpid()}.db"
    partial = target.with_suffix(".partial")
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(partial)) as copy:
        source.backup(copy)
    partial.chmod(0o600)
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.rename(target)
    for old in sorted(directory.glob("*.db"), key=lambda entry: entry.stat().st_mtime)[:-BACKUPS_MAX]:
        old.unlink()
    return target


def _engine(path: Path) -> Engine:
    # One connection for the life of the server: it is the only writer, and calls come from one event loop.
    engine = create_engine(
        f"sqlite:///{path}", poolclass=StaticPool, connect_args={"check_same_thread": False}
    )

    @event.listens_for(engine, "connect")
    def _pragmas(connection: sqlite3.Connection, _record: object) -> None:
        for pragma in (
            f"busy_timeout={BUSY_TIMEOUT_MS}",
            "journal_mode=WAL",
            "synchronous=NORMAL",
            f"wal_autocheckpoint={CHECKPOINT_PAGES_MAX}",
            "foreign_keys=ON",
        ):
            connection.execute(f"PRAGMA {pragma}")

    return engine


def _known_versions(found: str) -> set[str]:
    if found == HEAD:
        return {HEAD}
    from alembic.script import ScriptDirectory

    return {script.revision for script in ScriptDirectory(str(_migrations())).walk_revisions()}


def _migrate(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config

    # Python's sqlite3 opens no transaction for DDL by itself; a migration that dies must leave nothing.
    connection.exec_driver_sql("BEGIN IMMEDIATE")
    config = Config()
    config.set_main_option("script_location", str(_migrations()).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _migrations() -> Path:
    return Path(__file__).parent / "migrations"
