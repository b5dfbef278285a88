"""Quotas and keys as decisions: bounds, rates, who may make what."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm4agents import limits
from llm4agents.engine import clock
from llm4agents.engine.invites import network_of
from llm4agents.engine.keys import Keys
from llm4agents.engine.principal import DEFAULT, ORDINARY, SCOPES, Principal
from llm4agents.engine.projects import Projects
from llm4agents.engine.quotas import Bucket, Quotas, checked, exceeded
from llm4agents.errors import (
    AuthenticationError,
    CapacityError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    QuotaError,
)
from llm4agents.store import SandboxRow, audit, idempotency, open_store


def test_what_is_not_set_has_no_bound() -> None:
    assert exceeded({}, {"vcpus": 9e9}, {"vcpus": 1}) is None
    assert exceeded({"vcpus": 2}, {"vcpus": 1}, {"vcpus": 1}) is None
    assert exceeded({"vcpus": 2}, {"vcpus": 2}, {"vcpus": 1}) == ("vcpus", 2, 2)
    assert exceeded({"vcpus": 2}, {"vcpus": 5}, {"vcpus": 0}) is None  # lowered below what there is
    assert exceeded({"disk_mib": 0}, {}, {"disk_mib": 64}) == ("disk_mib", 0, 0)


def test_no_project_s_audit_pushes_out_another_s(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store.db")

    def add(project: str, count: int) -> None:
        row = {"actor": "a", "origin": "o", "request": "r", "action": "x", "target": "t", "status": 200}
        audit.add(store, [{**row, "at": 1.0, "project": project, "code": None, "duration_ms": 1.0}] * count)

    add("quiet", 10)
    for _ in range(5):
        add("loud", 100)
        add("busy", 30)
        audit.trim(store, before=0.0, keep=100)
    found = Counter(row["project"] for row in audit.page(store, project=None, before=None, limit=1_000))
    assert found == {"quiet": 10, "loud": 45, "busy": 45}
    assert audit.trim(store, before=2.0, keep=100) == 100
    store.close()


def test_answers_that_are_kept_for_a_repeat_take_a_bounded_part_of_the_disk(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store.db")
    for project in ("large", "small"):
        for at in range(10):
            assert idempotency.begin(store, project, f"k{at}", b"r", float(at), since=0.0) is None
            idempotency.end(store, project, f"k{at}", 200, bytes(100 if project == "large" else 1))
    idempotency.trim(store, before=0.0, keep=50, bytes_max=350)
    kept = [
        idempotency.begin(store, "large", f"k{at}", b"r", 20.0, since=0.0) is not None for at in range(10)
    ]
    assert kept == [False] * 7 + [True] * 3
    assert idempotency.begin(store, "small", "k0", b"r", 20.0, since=0.0) is not None
    store.close()


def test_a_build_is_charged_as_what_it_takes(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store.db")
    projects = Projects(store)
    project = projects.create("team", {"memory_mib": 1024, "sandboxes": 0}).id
    quotas = Quotas(store, projects)
    with quotas.building(project, 1, 1024):
        assert quotas.used(project)["memory_mib"] == 1024
        with pytest.raises(QuotaError), quotas.building(project, 1, 256):
            pass
    assert quotas.used(project)["memory_mib"] == 0
    other = projects.create("unbounded").id
    with contextlib.ExitStack() as held:
        for _ in range(limits.BUILDS_PER_PROJECT_MAX):
            held.enter_context(quotas.building(other, 1, 256))
        with pytest.raises(CapacityError, match="8 builds under way"):
            held.enter_context(quotas.building(other, 1, 256))
        held.enter_context(quotas.building(project, 1, 256))
    store.close()


@pytest.mark.parametrize(
    "bad", [{"x": 1}, {"vcpus": 1.5}, {"vcpus": True}, {"vcpus": -1}, {"creates_per_s": float("inf")}]
)
def test_a_quota_is_a_number_of_a_known_name(bad: dict[str, float]) -> None:
    with pytest.raises(InvalidRequestError):
        checked(bad)
    assert checked({"vcpus": 2, "memory_mib": None, "creates_per_s": 0.5}) == {
        "vcpus": 2,
        "creates_per_s": 0.5,
    }


@given(
    rate=st.floats(0.01, 100),
    steps=st.lists(st.tuples(st.floats(0, 20), st.integers(1, 5)), max_size=60),
)
def test_a_bucket_gives_no_more_than_its_rate_and_burst(rate: float, steps: list[tuple[float, int]]) -> None:
    burst, now, given_ = max(1.0, 2 * rate), 0.0, 0
    bucket = Bucket(burst, now)
    for pause, count in steps:
        now += pause
        if (wait := bucket.take(rate, now, count)) == 0:
            given_ += count
        else:
            assert wait > 0
        assert (
            given_ <= burst + rate * now + max(0.0, 5 - burst) + 1e-6
        )  # one taker may be larger than the burst


def test_a_rate_of_nothing_lets_the_burst_through() -> None:
    bucket = Bucket(1.0, 0.0)
    assert bucket.take(0, 0.0) == 0 and bucket.take(0, 1e9) == 3_600


def test_rates_keys_and_projects_over_a_store(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store.db")
    try:
        projects = Projects(store)
        keys, quotas = Keys(store, projects), Quotas(store, projects)
        row = projects.create("slow", {"creates_per_s": 1})
        quotas.check_rate(row.id)
        quotas.check_rate(row.id)
        with pytest.raises(QuotaError) as caught:
            quotas.check_rate(row.id)
        assert caught.value.details["quota"] == "creates_per_s" and caught.value.details["retry_after_s"] >= 1
        quotas.check_rate(DEFAULT, 1_000)
        assert quotas.volumes_bytes(row.id) is None
        projects.set_quotas(row.id, {"volumes_mib": 3})
        quotas.check_rate(row.id, 100)
        assert quotas.volumes_bytes(row.id) == 3 << 20

        operator = Principal.operator()
        made, text = keys.create(operator, "k", project="slow")
        assert set(made.scopes) == ORDINARY and keys.known(text) is made
        assert projects.get("slow") is projects.get(row.id)
        for name in ("slow", "default"):
            with pytest.raises(ConflictError):
                projects.create(name)
        for name in ("", "prj_x", "a/b", " a", "x" * 65):
            with pytest.raises(InvalidRequestError):
                projects.create(name)
        with pytest.raises(ConflictError):
            projects.disable("default")
        with pytest.raises(NotFoundError):
            keys.create(operator, "k", project="none")

        again = Keys(store, Projects(store))  # as the next server reads it
        assert again.known(text).id == made.id and text not in repr(again.known(text))
        for bad in ("", text.upper(), text + "0", text[:-1], "l4a_" + "é" * 50, "\ud800"):
            with pytest.raises(AuthenticationError):
                again.known(bad)
    finally:
        store.close()


def test_nobody_may_anything_and_the_operator_everything() -> None:
    nobody, operator = Principal.nobody("192.0.2.1"), Principal.operator()
    assert not any(map(nobody.may, SCOPES)) and not nobody.sees("") and not nobody.sees(DEFAULT)
    assert all(map(operator.may, SCOPES)) and operator.visible is None and operator.sees("prj_x")
    one = Principal("prj_x", "key_x", frozenset({"read"}), "192.0.2.1")
    assert one.visible == "prj_x" and one.sees("prj_x") and not one.sees(DEFAULT) and not one.may("node")


def test_of_ipv6_everybody_has_many_addresses() -> None:
    assert network_of("192.0.2.1") == "192.0.2.1" and network_of("unknown") == "unknown"
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1") != network_of("2001:db8:0:1::1")


def test_the_memory_of_a_pause_is_on_the_project_s_disk_until_it_runs_again(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store.db")
    projects = Projects(store)
    project = projects.create("team", {"disk_mib": 150}).id
    rows = [
        SandboxRow(
            name, "base", "running", 0.0, 9e9, 300, 1, 256, 5, project=project, limits={"disk_mib": 64}
        )
        for name in ("sbx_a", "sbx_b")
    ]
    for row in rows:
        store.add(row, clock.stamp())
    first, second = rows
    quotas = Quotas(store, projects)
    disk = lambda: quotas.used(project)["disk_mib"]  # noqa: E731
    assert disk() == 128
    with pytest.raises(
        QuotaError, match=r"sbx_a runs on, its memory takes 23 MiB of disk: .* 150 .* 128"
    ) as full:
        quotas.pause(first, (22 << 20) + 1)
    assert full.value.details["quota"] == "disk_mib" and disk() == 128
    # Two at once have no more than one after the other; one that fails gives it back.
    store.transition(first, "pausing", None, clock.stamp())
    quotas.pause(first, 22 << 20)
    assert disk() == 150
    with pytest.raises(QuotaError, match="sbx_b runs on: "):
        quotas.pause(second, 0)
    store.transition(first, "running", "pause failed", clock.stamp())
    assert disk() == 128
    for act in ("paused", "again"):  # a server that starts reads it from the store
        if act == "again":
            quotas = Quotas(store, projects)
        else:
            body = {"pages_bytes": (9 << 20) + 1, "memory": True}
            store.transition(first, "pausing", None, clock.stamp())
            quotas.pause(first, (9 << 20) + 1)
            store.transition(first, "paused", None, clock.stamp(), pause=body)
        assert disk() == 138
    quotas.check_pause(second, 12 << 20)
    with quotas.resuming(first):
        assert disk() == 138
    store.transition(first, "resuming", None, clock.stamp())
    store.transition(first, "paused", None, clock.stamp(), pause={"pages_bytes": 10 << 20, "memory": False})
    assert disk() == 128, "its memory is gone"
    store.close()


def test_a_sandbox_has_its_place_until_it_is_paused(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store.db")
    row = SandboxRow("sbx_a", "base", "running", 0.0, 9e9, 300, 1, 256, 5, project="p")
    store.add(row, clock.stamp())
    quotas = Quotas(store, Projects(store))
    for state, counted in (("pausing", 1), ("running", 1), ("pausing", 1), ("paused", 0)):
        store.transition(row, state, "a test's", clock.stamp())
        assert quotas.used("p")["sandboxes"] == counted, state
    store.close()
