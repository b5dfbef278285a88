"""Who may have a volume: one that writes or many that read, and nobody takes it away from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llm4agents.errors import ConflictError, NotFoundError, QuotaError
from llm4agents.store import Store, open_store
from llm4agents.store import volumes as table
from llm4agents.store.volumes import Hold, VolumeRow

MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = open_store(tmp_path / "store.db")
    yield store
    store.close()


def made(
    store: Store, name: str = "one", *, ready: bool = True, project: str = "default", size: int = 8
) -> str:
    row = VolumeRow(f"vol_{project}_{name}", project, name, "volume", size * MIB, 1.0, None, "creating")
    table.add(store, row, most=3, most_bytes=64 * MIB)
    if ready:
        table.ready(store, row.id)
    return row.id


def test_one_writes_or_many_read(store: Store) -> None:
    one = made(store)
    assert table.hold(store, one, "sbx_a", "rw", 1.0).name == "one"
    for mode in ("rw", "ro"):
        with pytest.raises(ConflictError, match="held by sbx_a"):
            table.hold(store, one, "sbx_b", mode, 2.0)  # type: ignore[arg-type]
    table.hold(store, one, "vol_copy", "copy", 2.0)
    table.release(store, "sbx_a")
    with pytest.raises(ConflictError, match="vol_copy"):
        table.hold(store, one, "sbx_b", "rw", 3.0)
    table.release(store, "vol_copy")
    for holder in ("sbx_b", "sbx_c"):
        table.hold(store, one, holder, "ro", 4.0)
    with pytest.raises(ConflictError) as refused:
        table.hold(store, one, "sbx_d", "rw", 5.0)
    assert [held["holder"] for held in refused.value.details["holders"]] == ["sbx_b", "sbx_c"]
    assert table.holds(store, one) == [Hold(one, "sbx_b", "ro", 4.0), Hold(one, "sbx_c", "ro", 4.0)]


def test_nothing_is_done_to_one_that_is_held(store: Store) -> None:
    one = made(store)
    table.hold(store, one, "sbx_a", "ro", 1.0)
    with pytest.raises(ConflictError, match="cannot be deleted"):
        table.deleting(store, one)
    with pytest.raises(ConflictError, match="cannot be resized"):
        table.resized(store, one, 16 * MIB, most_bytes=None)
    table.release(store, "sbx_a", one)
    table.resized(store, one, 16 * MIB, most_bytes=None)
    table.deleting(store, one)
    for act in (lambda: table.hold(store, one, "sbx_a", "ro", 1.0), lambda: table.deleting(store, one)):
        with pytest.raises(NotFoundError):
            act()
    table.forget(store, one)
    assert table.get(store, one) is None


def test_one_that_is_being_made_and_a_snapshot(store: Store) -> None:
    half = made(store, "half", ready=False)
    with pytest.raises(ConflictError, match="still being made"):
        table.hold(store, half, "sbx_a", "rw", 1.0)
    row = VolumeRow("vol_s", "default", "s", "snapshot", MIB, 2.0, half, "creating")
    table.add(store, row, most=3, most_bytes=None)
    table.ready(store, "vol_s")
    with pytest.raises(ConflictError, match="is a snapshot"):
        table.hold(store, "vol_s", "sbx_a", "rw", 1.0)
    table.hold(store, "vol_s", "sbx_a", "ro", 1.0)


def test_names_and_quotas_are_a_projects(store: Store) -> None:
    made(store)
    made(store, project="other")
    with pytest.raises(ConflictError, match="a volume one already"):
        table.add(
            store,
            VolumeRow("vol_x", "default", "one", "volume", MIB, 1.0, None, "creating"),
            most=3,
            most_bytes=None,
        )
    made(store, "two", size=40)
    with pytest.raises(QuotaError) as refused:
        made(store, "three", size=17)
    assert refused.value.details == {"quota": "volumes_mib", "limit": 64, "used": 48}
    with pytest.raises(QuotaError):
        table.resized(store, "vol_default_two", 57 * MIB, most_bytes=64 * MIB)
    made(store, "three", size=16)
    with pytest.raises(QuotaError, match="as many"):
        made(store, "four", size=8)


def test_lists_go_on_where_they_ended(store: Store) -> None:
    for name in ("a", "b", "c"):
        made(store, name)
    first = table.rows(store, "default", limit=2)
    rest = table.rows(store, "default", limit=2, after=first[-1].id)
    assert [row.name for row in (*first, *rest)] == ["c", "b", "a"]
    assert [row.name for row in table.rows(store, "default", name="b")] == ["b"]
    named = table.named(store, "default", "b")
    assert named is not None and table.named(store, "other", "b") is None
