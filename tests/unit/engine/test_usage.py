"""Usage rows: each moment of a metered state once, whatever dies when, whoever steps the clock."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm4agents.engine import usage
from llm4agents.engine.usage import EVERY_S, Meter
from llm4agents.errors import CapacityError, ConflictError
from llm4agents.store import SandboxRow, open_store
from llm4agents.store import usage as rows
from llm4agents.store.store import Stamp
from tests.support import eventually

NS = 10**9
NEXT = {
    "creating": ["running", "failed", "killed"],
    "running": ["pausing", "killed", "failed"],
    "pausing": ["paused", "running", "failed"],
    "paused": ["resuming", "killed"],
    "resuming": ["running", "paused", "failed"],
}


class Dies(Exception):
    pass


class World:
    """A host with a clock, one server after the other, and a plain account of what really was."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "store.db"
        self.wall, self.boottime, self.boot = 1_000_000 * NS, 5 * NS, 0
        self.rows: dict[str, SandboxRow] = {}
        self.lived: dict[tuple[str, str], int] = defaultdict(int)
        self.dies_after: int | None = None
        self.made = 0
        self.open()

    def open(self) -> None:
        self.store = open_store(self.path)
        self.meter = Meter(self.store, lambda _: 4096, self.now)
        self.store.in_transition.append(lambda *_: self._perhaps_die())
        self.meter.start()
        self.rows = {row.id: row for row in self.store.alive()}

    def _perhaps_die(self) -> None:
        if self.dies_after is not None:
            self.dies_after = None
            raise Dies

    def now(self) -> Stamp:
        return Stamp(self.wall, self.boottime, f"boot{self.boot}")

    def pass_time(self, ns: int) -> None:
        self.wall += ns
        self.boottime += ns
        for row in self.rows.values():
            self.lived[row.id, row.state] += ns

    def crash(self) -> None:
        self.store.close()
        self.open()

    def reboot(self) -> None:
        """Machines that ran are gone, paused ones are not; the wall clock goes on."""
        self.store.close()
        self.boot += 1
        self.boottime = 3 * NS
        self.open()
        for row in list(self.rows.values()):
            if row.state != "paused":
                self.move(row, "failed", ran_until=Stamp(self.wall, 0, "another"))

    def create(self) -> None:
        self.made += 1
        row = SandboxRow(f"sbx_{self.made}", "base", "creating", self.wall / NS, 1e12, 60.0, 2, 512, 5)
        self.store.add(row, self.now())
        self.rows[row.id] = row
        self.lived[row.id, "creating"] += 0

    def move(self, row: SandboxRow, to: str, ran_until: Stamp | None = None) -> None:
        changes: dict[str, Any] = {"ended_at": 1.0} if to in ("killed", "failed") else {}
        if to == "running" and row.state in ("creating", "resuming"):
            changes["boot_id"] = f"b{self.wall}"
        self.store.transition(row, to, None, self.now(), ran_until=ran_until, **changes)
        if to in ("killed", "failed"):
            del self.rows[row.id]

    def check(self) -> None:
        seen: dict[tuple[str, str], int] = defaultdict(int)
        ends: dict[tuple[str, str], int] = {}
        keys = set()
        for row in rows.rows(self.store, sandbox=None, after=0, limit=100_000):
            seen[row["sandbox"], row["state"]] += row["duration_ns"]
            keys.add(row["key"])
            where = (row["sandbox"], row["host_boot_id"])
            begin = row["end_boottime_ns"] - row["duration_ns"]
            assert where not in ends or begin >= ends[where], "overlaps"
            ends[where] = row["end_boottime_ns"]
            assert row["key"] == f"{row['sandbox']}:{row['boot_id']}:{row['sequence']}"
        assert len(keys) == len(rows.rows(self.store, sandbox=None, after=0, limit=100_000))
        assert {state for _, state in seen} <= set(EVERY_S)
        lived = {who: ns for who, ns in self.lived.items() if who[1] in EVERY_S and ns}
        assert {who: ns for who, ns in seen.items() if ns} == lived


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


step = st.one_of(
    st.tuples(st.just("create"), st.just(0)),
    st.tuples(st.just("move"), st.integers(0, 1000)),
    st.tuples(st.just("move"), st.integers(0, 1000)),
    st.tuples(st.just("move and die"), st.integers(0, 1000)),
    st.tuples(st.just("time"), st.integers(1, 200 * NS)),
    st.tuples(st.just("time"), st.integers(1, 9000 * NS)),
    st.tuples(st.just("tick"), st.just(0)),
    st.tuples(st.just("crash"), st.just(0)),
    st.tuples(st.just("step"), st.integers(-400 * NS, 400 * NS)),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(step, min_size=5, max_size=50))
def test_sums_are_the_life_whatever_dies_when(steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory))
        world.create()
        for act, value in steps:
            alive = list(world.rows.values())
            if act == "create" and len(alive) < 4:
                world.create()
            elif act.startswith("move") and alive:
                row = alive[value % len(alive)]
                choices = NEXT[row.state]
                to = choices[value // 7 % len(choices)]
                if act == "move":
                    world.move(row, to)
                else:
                    # Dies after the row was written and before the transition was committed.
                    world.dies_after = 1
                    with pytest.raises(Dies):
                        world.move(row, to)
                    world.crash()
            elif act == "time":
                world.pass_time(value)
            elif act == "tick":
                world.meter.tick()
            elif act == "crash":
                world.crash()
            elif act == "step":
                world.wall += value
        for row in list(world.rows.values()):
            world.move(row, "killed")
        world.check()
        world.store.close()


def test_a_pause_goes_on_over_a_reboot_of_the_host(world: World) -> None:
    world.create()
    (row,) = world.rows.values()
    for to in ("running", "pausing", "paused"):
        world.move(row, to)
        world.pass_time(10 * NS)
    world.pass_time(4000 * NS)
    world.meter.tick()
    world.pass_time(100 * NS)
    world.reboot()
    world.pass_time(4000 * NS)
    world.meter.tick()  # from here on this boot's clock counts, and a step of the wall clock does not
    world.wall += 777 * NS
    world.pass_time(50 * NS)
    (row,) = world.rows.values()
    world.move(row, "killed")
    world.check()


def test_the_clock_writes_a_row_a_minute_while_it_runs_and_one_an_hour_while_paused(world: World) -> None:
    world.create()
    (row,) = world.rows.values()
    world.move(row, "running")
    for _ in range(10):
        world.pass_time(61 * NS)
        assert world.meter.tick() == 1
        assert world.meter.tick() == 0
    world.move(row, "pausing")
    world.move(row, "paused")
    for _ in range(59):
        world.pass_time(60 * NS)
        assert world.meter.tick() == 0
    world.pass_time(61 * NS)
    assert world.meter.tick() == 1
    world.move(row, "killed")
    world.check()
    assert world.meter.tick() == 0


def test_what_ended_while_no_server_lived_is_charged_to_its_end(world: World, tmp_path: Path) -> None:
    world.create()
    (row,) = world.rows.values()
    world.move(row, "running")
    world.pass_time(30 * NS)
    record = tmp_path / "exit"
    record.write_text("{}")
    os.utime(record, ns=(world.wall, world.wall))
    world.wall += 500 * NS
    world.boottime += 500 * NS
    world.move(row, "failed", ran_until=usage.evidence([tmp_path / "none", record], world.now()))
    world.check()
    assert rows.totals(world.store, row.id)[0]["vcpu_ns"] == 2 * 30 * NS


@pytest.mark.parametrize("mtime_ns", [0, 10**9, 2**62])
def test_evidence_never_charges_more_than_could_have_run(world: World, tmp_path: Path, mtime_ns: int) -> None:
    world.create()
    (row,) = world.rows.values()
    world.move(row, "running")
    world.pass_time(30 * NS)
    record = tmp_path / "exit"
    record.write_text("{}")
    os.utime(record, ns=(mtime_ns, mtime_ns))
    world.move(row, "failed", ran_until=usage.evidence([record], world.now()))
    (found,) = rows.totals(world.store, row.id) or [{"duration_ns": 0}]
    assert found["duration_ns"] == (30 * NS if mtime_ns == 2**62 else 0)


def test_what_its_keeper_has_stopped_is_not_charged(world: World, tmp_path: Path) -> None:
    world.create()
    (row,) = world.rows.values()
    world.move(row, "running")
    world.pass_time(30 * NS)
    stopped_at = world.wall / NS
    world.wall += 500 * NS
    world.boottime += 500 * NS
    world.crash()
    (row,) = world.rows.values()
    world.meter.stood_still(row, stopped_at)
    world.pass_time(20 * NS)
    world.move(row, "killed")
    found = {total["state"]: total["duration_ns"] for total in rows.totals(world.store, row.id)}
    assert found == {"running": 50 * NS, "stopped": 500 * NS}


def test_a_stopped_vmm_is_known(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        (tmp_path / "deadline").write_text("123.5 stop\n")
        assert usage.stopped_since(tmp_path, process.pid) is None
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: usage.stopped_since(tmp_path, process.pid) == 123.5)
        (tmp_path / "deadline").write_text("123.5\n")
        assert usage.stopped_since(tmp_path, process.pid) is None
    finally:
        process.kill()
        process.wait()
    assert usage.stopped_since(tmp_path, process.pid) is None


def test_without_evidence_nothing_is_charged_that_was_not_seen(world: World, tmp_path: Path) -> None:
    world.create()
    (row,) = world.rows.values()
    world.move(row, "running")
    world.pass_time(61 * NS)
    world.meter.tick()
    world.pass_time(5000 * NS)
    world.move(row, "failed", ran_until=usage.evidence([tmp_path / "none"], world.now()))
    assert rows.totals(world.store, row.id)[0]["duration_ns"] == 61 * NS


def test_a_full_disk_delays_rows_and_loses_none(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.create()
    (row,) = world.rows.values()
    world.move(row, "running")
    world.pass_time(61 * NS)

    def full(*_: object) -> None:
        raise CapacityError("full")

    with monkeypatch.context() as patch:
        patch.setattr(rows, "append", full)
        assert world.meter.tick() == 0
    world.pass_time(5 * NS)
    # Its end is written late, as of when it was; no tick may charge the time in between.
    ended = world.now()
    world.meter.ending(row)
    world.wall += 500 * NS
    world.boottime += 500 * NS
    assert world.meter.tick() == 0
    world.store.transition(row, "killed", None, ended, ended_at=1.0)
    world.check()


def test_a_transition_that_is_refused_writes_no_row(world: World) -> None:
    world.create()
    (row,) = world.rows.values()
    world.move(row, "running")
    stale = world.store.get(row.id)
    assert stale is not None
    world.pass_time(10 * NS)
    world.move(row, "pausing")
    with pytest.raises(ConflictError):
        world.store.transition(stale, "killed", None, world.now())
    world.check()


@pytest.mark.parametrize("act", ["UPDATE usage SET duration_ns=0", "DELETE FROM usage"])
def test_usage_is_append_only(world: World, act: str) -> None:
    world.create()
    (row,) = world.rows.values()
    world.move(row, "running")
    world.pass_time(NS)
    world.move(row, "killed")
    with pytest.raises(Exception, match="append-only"), world.store.writing() as connection:
        connection.exec_driver_sql(act)
