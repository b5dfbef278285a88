"""The store: transitions with their events, the append-only trigger, opening, backups, versions."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine
from sqlalchemy.exc import DatabaseError

from llm4agents.errors import ConflictError, HostSetupError, VersionMismatchError
from llm4agents.store import SandboxRow, Store, open_store, opening
from llm4agents.store.schema import HEAD, metadata
from llm4agents.store.store import Stamp


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path / "store.db")
    yield opened
    opened.close()


def row(number: int = 1, **changes: object) -> SandboxRow:
    made = SandboxRow(
        id=f"sbx_{number:020}",
        template="base",
        state="creating",
        created_at=1000.0 + number,
        life_ends_at=5000.0,
        idle_timeout_s=300.0,
        vcpus=1,
        memory_mib=1024,
        disk_gib=5,
        metadata={"n": str(number)},
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def at(second: int) -> Stamp:
    return Stamp(second * 10**9, second * 10**9 // 2, "boot-of-host")


def test_a_transition_and_its_event_are_one_thing(store: Store) -> None:
    made = row()
    store.add(made, at(1))
    store.transition(made, "running", None, at(2), boot_id="b1", record={"vmm_pid": 7})
    store.transition(made, "killed", "idle", at(3), ended_at=3.0)
    assert store.get(made.id) == made
    seen = [
        (e["sequence"], e["boot_id"], e["from_state"], e["to_state"], e["reason"])
        for e in store.events(made.id)
    ]
    assert seen == [
        (1, None, None, "creating", None),
        (2, "b1", "creating", "running", None),
        (3, "b1", "running", "killed", "idle"),
    ]
    assert store.events(made.id)[1]["monotonic_ns"] == 10**9


def test_a_state_that_someone_else_moved_is_a_conflict_and_leaves_no_event(store: Store) -> None:
    made = row()
    store.add(made, at(1))
    stale = store.get(made.id)
    assert stale is not None
    store.transition(made, "running", None, at(2))
    with pytest.raises(ConflictError):
        store.transition(stale, "failed", "late", at(3))
    assert len(store.events(made.id)) == 2


@pytest.mark.parametrize("act", ["UPDATE events SET reason='x'", "DELETE FROM events"])
def test_events_are_append_only(store: Store, act: str) -> None:
    store.add(row(), at(1))
    with pytest.raises(DatabaseError, match="append-only"), store._connection.begin():
        store._connection.exec_driver_sql(act)


def test_list_pages_newest_first_and_filters(store: Store) -> None:
    for number in range(5):
        store.add(row(number), at(number))
    first = store.list(limit=2)
    assert [r.metadata["n"] for r in first] == ["4", "3"]
    assert [r.metadata["n"] for r in store.list(limit=9, after=first[-1].id)] == ["2", "1", "0"]
    assert [r.id for r in store.list(limit=9, metadata={"n": "2"})] == [row(2).id]
    assert store.list(limit=9, states=("running",)) == []
    hostile = "a'; DROP TABLE sandboxes; --"
    assert store.list(limit=9, metadata={hostile: hostile}) == []
    assert len(store.alive()) == 5


def test_forgetting_keeps_events_and_the_living(store: Store) -> None:
    dead, alive = row(1, state="killed", ended_at=50.0), row(2)
    store.add(dead, at(1))
    store.add(alive, at(1))
    assert store.forget_ended(before=51.0) == 1
    assert store.get(dead.id) is None
    assert store.get(alive.id) is not None
    assert len(store.events(dead.id)) == 1


def test_reopening_finds_what_was_written_without_alembic(tmp_path: Path) -> None:
    first = open_store(tmp_path / "store.db")
    first.add(row(), at(1))
    first.set_meta("k", "v")
    first.set_meta("k", "w")
    first.checkpoint()
    first.close()
    second = open_store(tmp_path / "store.db")
    assert second.get(row().id) == row()
    assert second.meta("k") == "w"
    second.close()
    assert not (tmp_path / "backups").exists()
    assert (tmp_path / "store.db").stat().st_mode & 0o777 == 0o600


def test_the_migrations_make_what_the_schema_says(tmp_path: Path) -> None:
    open_store(tmp_path / "store.db").close()
    engine = create_engine(f"sqlite:///{tmp_path / 'store.db'}")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()
    assert opening.stored_version(tmp_path / "store.db") == HEAD


def test_an_older_store_is_backed_up_before_it_is_migrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.db"
    first = open_store(path)
    first.add(row(), at(1))
    first.close()
    seen: list[bool] = []

    def migrate(_connection: object) -> None:
        seen.append(any((tmp_path / "backups").glob(f"store-{HEAD}-*.db")))

    # Pretend that this version knows a later schema.
    monkeypatch.setattr(opening, "HEAD", "9999")
    monkeypatch.setattr(opening, "_migrate", migrate)
    open_store(path).close()
    assert seen == [True]
    copy = next((tmp_path / "backups").glob("*.db"))
    rows = sqlite3.connect(copy).execute("SELECT id FROM sandboxes").fetchall()
    assert rows == [(row().id,)]
    assert not list((tmp_path / "backups").glob("*.partial"))


def test_a_newer_store_is_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    open_store(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(VersionMismatchError, match="9999"):
        open_store(path)
    assert path.read_bytes() == before


def test_what_is_no_database_is_refused_with_words(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(b"this is not a database at all, not even close to one" * 100)
    with pytest.raises(HostSetupError, match="backups"):
        open_store(path)


def test_a_migration_that_died_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.db"
    real = opening._migrate

    def dies(connection: object) -> None:
        real(connection)  # type: ignore[arg-type]
        raise OSError("disk full")

    monkeypatch.setattr(opening, "_migrate", dies)
    with pytest.raises(HostSetupError, match="disk full"):
        open_store(path)
    monkeypatch.setattr(opening, "_migrate", real)
    open_store(path).close()
