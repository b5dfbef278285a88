"""Audits of sandboxes that have ended take a bounded part of the disk, however many there were."""

from __future__ import annotations

import os
from pathlib import Path

from llm4agents.engine.network import trim_audits


def test_the_oldest_of_those_that_have_ended_go(tmp_path: Path) -> None:
    for number in range(6):
        for name in (f"sbx_{number}.jsonl", f"sbx_{number}.1.jsonl"):
            (tmp_path / name).write_bytes(b"x" * 100)
            os.utime(tmp_path / name, (number, number))
    trim_audits(tmp_path, {"sbx_0"}, bytes_max=450)
    left = {path.name.partition(".")[0] for path in tmp_path.iterdir()}
    assert left == {"sbx_0", "sbx_4", "sbx_5"}
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 600
    trim_audits(tmp_path, {"sbx_0"}, bytes_max=450)
    trim_audits(tmp_path / "none", set(), bytes_max=0)
    assert len(list(tmp_path.iterdir())) == 6
