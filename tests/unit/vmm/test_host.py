"""How long an answer about KVM is believed."""

import asyncio
import os
from pathlib import Path

import pytest

from llm4agents import limits
from llm4agents.vmm import host

SILENCE = f"a kernel {host.SILENT} in 5 s"


@pytest.mark.parametrize("answer, asked_again", [(None, False), ("it failed", False), (SILENCE, True)])
def test_only_silence_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str | None, asked_again: bool
) -> None:
    monkeypatch.setattr(host, "device_problem", lambda: None)
    asked = 0

    async def boot() -> str | None:
        nonlocal asked
        asked += 1
        return answer

    def ask(*depends: str) -> str | None:
        return asyncio.run(host.why_not_kvm(tmp_path, "vmm", list(depends), boot))

    assert [ask("a"), ask("a")] == [answer, answer]
    assert asked == 1
    (kept,) = tmp_path.iterdir()
    past = kept.stat().st_mtime - limits.KVM_PROBE_KEPT_S - 1
    os.utime(kept, (past, past))
    assert ask("a") == answer
    assert asked == (2 if asked_again else 1)
    assert ask("another version") == answer
    assert asked == (3 if asked_again else 2)


def test_a_file_that_is_replaced_is_another(tmp_path: Path) -> None:
    path = tmp_path / "vmm"
    path.write_text("1")
    before = host.file_identity(path)
    path.write_text("22")
    assert host.file_identity(path) != before
