"""Jobs and runs as stored: what is due, what was left open, what is kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llm4agents.errors import ConflictError
from llm4agents.store import Store, open_store
from llm4agents.store.jobs import JobRow, JobStore, RunRow


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path / "store.db")
    yield opened
    opened.close()


def job(name: str = "job_a", **more: object) -> JobRow:
    made = JobRow(name, "sbx_1", {"command": "true"}, "waiting", 10.0, next_at=100.0)
    for key, value in more.items():
        setattr(made, key, value)
    return made


def run(of: str = "job_a") -> RunRow:
    return RunRow(of, 0, 100.0, "starting")


def test_what_is_due_is_found_in_order(store: Store) -> None:
    jobs = JobStore(store)
    for name, at in (("job_a", 100.0), ("job_b", 90.0), ("job_c", 101.0)):
        jobs.add(job(name, next_at=at))
    assert [found.id for found in jobs.due(100.0)] == ["job_b", "job_a"]
    assert jobs.next_due() == 90.0
    assert jobs.busy() and jobs.count("sbx_1") == 3
    for found in jobs.find():
        jobs.change(found, state="cancelled", ended_at=120.0)
    assert jobs.next_due() is None and not jobs.busy()


def test_a_run_begins_once(store: Store) -> None:
    jobs = JobStore(store)
    made = job()
    jobs.add(made)
    stale = jobs.get("job_a")
    assert stale is not None
    first = run()
    jobs.begin(made, first, keep=100)
    assert (made.state, made.next_at, first.process) == ("running", None, "job_a.1")
    with pytest.raises(ConflictError):
        jobs.begin(stale, run(), keep=100)
    assert [(j.id, r.sequence) for j, r in jobs.open_runs("sbx_1")] == [("job_a", 1)]
    assert jobs.open_runs("sbx_2") == []


def test_runs_are_kept_in_numbers(store: Store) -> None:
    jobs = JobStore(store)
    made = job()
    jobs.add(made)
    for _ in range(5):
        one = run()
        jobs.begin(made, one, keep=3)
        jobs.change_run(
            one, made, state="done", result={"exit_code": 0}, job_state="waiting", job_next_at=1.0
        )
    assert [found.sequence for found in jobs.runs("job_a")] == [5, 4, 3]
    assert jobs.get("job_a") == made
    assert jobs.runs("job_a")[0].result == {"exit_code": 0}


def test_what_must_still_be_told_is_found_again(store: Store) -> None:
    jobs = JobStore(store)
    made = job()
    jobs.add(made)
    told = [None, {"tries": 1, "next_at": 5.0}, {"tries": 2, "next_at": None}]
    for what in told:
        one = run()
        jobs.begin(made, one, keep=100)
        jobs.change_run(one, made, state="done", told=what, job_state="waiting")
    assert [found.sequence for found in jobs.to_tell()] == [2]


def test_what_is_long_over_is_forgotten_with_its_runs(store: Store) -> None:
    jobs = JobStore(store)
    made, other = job(), job("job_b")
    for each in (made, other):
        jobs.add(each)
        jobs.begin(each, run(each.id), keep=100)
    jobs.change(made, state="ended", ended_at=50.0)
    jobs.forget_ended(before=51.0)
    assert jobs.get("job_a") is None and jobs.runs("job_a") == []
    assert jobs.get("job_b") is not None and len(jobs.runs("job_b")) == 1
