"""/health: what is in order, what does without, and what nothing does without."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from llm4agents import limits
from tests.unit.api.served import serving


def test_dead_is_told_from_degraded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEALTH_KEPT_S", 0)  # asked anew each time
    with serving(tmp_path) as here:  # whose VMM is not there
        operator = here.key(scopes=["node"])
        said = here.ask("GET", "/health", operator)
        assert (said.status_code, said.json()["status"]) == (200, "degraded")
        checks = said.json()["checks"]
        assert checks["store"] == "ok" and "doctor" in checks["vmm"]
        [store] = here.context.settings.state.glob("store.db")
        with contextlib.closing(sqlite3.connect(store, timeout=10)) as beside:
            broken = "CREATE TRIGGER broken BEFORE INSERT ON meta BEGIN SELECT RAISE(FAIL, 'a bad disk'); END"
            beside.execute(broken)
            told, stranger = here.ask("GET", "/health", operator), here.ask("GET", "/health")
            beside.execute("DROP TRIGGER broken")
        for answer in (told, stranger):
            assert (answer.status_code, answer.json()["status"]) == (503, "dead")
        assert "a bad disk" in told.json()["checks"]["store"]
        assert stranger.json()["checks"]["store"] == "failed" and "bad disk" not in stranger.text
        assert here.ask("GET", "/health").json()["status"] == "degraded", "it gets well again"
        here.on_loop(here.context.stop.set)
        last = here.ask("GET", "/health", operator)
        assert (last.status_code, last.json()["status"]) == (503, "stopping")
