"""Secrets over a real store and vault: what is kept, what is told, what a lost key means."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from llm4agents import limits
from llm4agents.barrier.vault import Vault
from llm4agents.engine.secrets import Secrets, names_of
from llm4agents.errors import HostSetupError, InvalidRequestError, NotFoundError
from llm4agents.store import SandboxRow, Store, open_store
from llm4agents.store.store import Stamp

VALUE = "tok-5f2c91d0a7"
AWS = {"access_key_id": "AKIAX", "secret_access_key": "K/E+Y"}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = open_store(tmp_path / "store.db")
    yield found
    found.close()


@pytest.fixture
def secrets(store: Store, tmp_path: Path) -> Secrets:
    return Secrets(store, Vault(tmp_path))


def put(secrets: Secrets, name: str, value: object = VALUE) -> int:
    return int(asyncio.run(secrets.set(name, value))["version"])


def test_a_new_value_is_a_new_version_and_the_only_one(secrets: Secrets) -> None:
    assert (put(secrets, "A"), put(secrets, "B", AWS), put(secrets, "A", "new")) == (1, 1, 2)
    assert secrets.resolve(["A", "B", "A", "C"]) == {"A": "new", "B": AWS}
    assert [(one["name"], one["version"]) for one in secrets.list()] == [("A", 2), ("B", 1)]
    assert all(set(one) == {"name", "version", "created_at", "updated_at"} for one in secrets.list())


def test_the_stores_files_hold_sealed_bytes(secrets: Secrets, store: Store, tmp_path: Path) -> None:
    put(secrets, "A")
    put(secrets, "A", VALUE + "-2")
    store.checkpoint()
    files = [path for path in tmp_path.iterdir() if path.name.startswith("store.db")]
    assert files and all(VALUE.encode() not in path.read_bytes() for path in files)


def test_whoever_holds_values_is_told_before_the_call_ends(secrets: Secrets) -> None:
    told: list[tuple[str, object]] = []

    async def change(_: str, name: str) -> None:
        await asyncio.sleep(0)
        told.append((name, secrets.resolve([name]).get(name)))

    async def broken(_: str, name: str) -> None:
        raise RuntimeError(f"with {VALUE} in its words")

    secrets.on_change += [broken, change]
    put(secrets, "A", "one")
    put(secrets, "A", "two")
    asyncio.run(secrets.remove("A"))
    assert told == [("A", "one"), ("A", "two"), ("A", None)]


def test_logs_say_names_alone(secrets: Secrets, capsys: pytest.CaptureFixture[str]) -> None:
    async def broken(_: str, name: str) -> None:
        raise RuntimeError(f"with {VALUE} in its words")

    secrets.on_change.append(broken)
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
    )
    try:
        put(secrets, "A")
        with pytest.raises(InvalidRequestError):
            put(secrets, "A", [VALUE])
    finally:
        structlog.reset_defaults()
    said = "".join(capsys.readouterr())
    assert "secret_not_passed_on" in said and "RuntimeError" in said and VALUE not in said


def test_a_missing_secret_is_named_before_it_is_needed(secrets: Secrets) -> None:
    put(secrets, "A")
    secrets.check(["A"])
    with pytest.raises(InvalidRequestError, match=r"there is no secret B, C .*secret set"):
        secrets.check(["A", "C", "B"])
    with pytest.raises(InvalidRequestError) as caught:
        secrets.check(["ghp_" + "x" * 40])  # a value where a name belongs
    assert "ghp_" not in str(caught.value)


def test_what_does_not_fit_into_one_message_is_refused_early(secrets: Secrets) -> None:
    names = [f"S{index}" for index in range(4)]
    for name in names:
        put(secrets, name, "x" * limits.SECRET_BYTES_MAX)
    secrets.check(names[:2])
    with pytest.raises(InvalidRequestError, match="together"):
        secrets.check(names)


def test_a_lost_key_names_what_must_be_set_again(secrets: Secrets, store: Store, tmp_path: Path) -> None:
    put(secrets, "A")
    put(secrets, "B")
    key = (tmp_path / "vault.key").rename(tmp_path / "kept")
    later = Secrets(store, Vault(tmp_path))
    for act in (
        lambda: later.resolve(["A"]),
        lambda: later.check(["B"]),
        lambda: put(later, "C"),
        lambda: put(later, "A"),
    ):
        with pytest.raises(HostSetupError, match=r"cannot be read: A, B") as caught:
            act()
        assert "llm4agents secret rm A B" in str(caught.value.hint) and caught.value.details == {
            "secrets": ["A", "B"]
        }
    assert not (tmp_path / "vault.key").exists(), (
        "a new key in place of the lost one would end the old secrets"
    )
    key.rename(tmp_path / "vault.key")
    assert later.resolve(["A"]) == {"A": VALUE}

    # With another key: what was sealed with it works, the others are named.
    (tmp_path / "vault.key").unlink()
    Vault(tmp_path).make()
    other = Secrets(store, Vault(tmp_path))
    put(other, "A", "anew")
    assert other.resolve(["A"]) == {"A": "anew"}
    with pytest.raises(HostSetupError, match=r"cannot be read: B: .*another key"):
        other.resolve(["A", "B"])
    assert [one["name"] for one in other.list()] == ["A", "B"]


def test_what_else_is_sealed_needs_the_same_key(secrets: Secrets, tmp_path: Path, store: Store) -> None:
    sealed = secrets.seal("answer/a", b"told once")  # the first that needs a key
    assert secrets.unseal("answer/a", sealed) == b"told once" and b"told once" not in sealed
    with pytest.raises(HostSetupError, match="does not open"):
        secrets.unseal("answer/b", sealed)
    put(secrets, "A")
    (tmp_path / "vault.key").unlink()
    later = Secrets(store, Vault(tmp_path))
    with pytest.raises(HostSetupError, match="is lost"):
        later.seal("answer/a", b"more")
    with pytest.raises(HostSetupError):
        later.unseal("answer/a", sealed)
    assert not (tmp_path / "vault.key").exists()


def test_one_that_is_removed_is_told_with_who_used_it(secrets: Secrets, store: Store) -> None:
    put(secrets, "A")
    binding = {"secret": "A", "host": "api.example.com", "as": "bearer"}
    row = SandboxRow(
        id="sbx_x", template="base", state="running", created_at=0, life_ends_at=0, idle_timeout_s=1, vcpus=1,
        memory_mib=256, disk_gib=5, network={"profile": "none", "rules": [], "credentials": [binding]},
    )  # fmt: skip
    store.add(row, Stamp(0, 0, "boot"))
    assert names_of(row) == {"A"} and secrets.used_by("A") == ["sbx_x"]
    assert asyncio.run(secrets.remove("A")) == {"name": "A", "removed": True, "used_by": ["sbx_x"]}
    with pytest.raises(NotFoundError, match="there is no secret A"):
        asyncio.run(secrets.remove("A"))
    assert secrets.resolve(["A"]) == {} and put(secrets, "A") == 1


@pytest.mark.parametrize(
    "network", [None, "none", ["allow x"], {}, {"credentials": None}, {"credentials": [1, {}]}]
)
def test_networks_without_bindings_name_no_secret(network: object) -> None:
    row = SandboxRow(
        id="sbx_x", template="base", state="running", created_at=0, life_ends_at=0, idle_timeout_s=1, vcpus=1,
        memory_mib=256, disk_gib=5, network=network,
    )  # fmt: skip
    assert names_of(row) == set()
