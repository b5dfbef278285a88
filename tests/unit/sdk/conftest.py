"""A state of its own for each test, and the contract's server in it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llm4agents import config
from llm4agents.sdk import _local, _wire

SERVER = Path(__file__).with_name("contract_server.py")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[config.Settings]:
    """The environment of a process that was never here; what it starts is ended afterwards."""
    for name in [name for name in os.environ if name.startswith("LLM4AGENTS_")]:
        monkeypatch.delenv(name)
    for name in ("state", "cache", "run"):
        monkeypatch.setenv(f"LLM4AGENTS_{name.upper()}", str(tmp_path / name[0]))
    monkeypatch.setenv("CONTRACT_STARTS", str(tmp_path / "starts"))
    monkeypatch.setattr(_local, "server_command", lambda: [sys.executable, str(SERVER)])
    monkeypatch.setattr(_wire, "warned", True)
    _fresh()
    yield config.settings()
    _fresh()
    for pid in started(tmp_path):
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)


def _fresh() -> None:
    config.settings.cache_clear()
    _local._known.clear()


def started(tmp_path: Path) -> list[int]:
    """The pids of all servers that got the state in this test, in order."""
    try:
        return [int(line) for line in (tmp_path / "starts").read_text().split()]
    except FileNotFoundError:
        return []


@pytest.fixture
def starts(tmp_path: Path) -> Callable[[], list[int]]:
    return lambda: started(tmp_path)
