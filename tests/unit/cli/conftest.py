"""The command line as a process, with a state of its own and the contract's server (tests/unit/sdk) up."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SERVER = Path(__file__).parents[1] / "sdk" / "contract_server.py"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Nothing of ours from outside, and no autostart: a test that needs a server asks for one."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("LLM4AGENTS_")}
    for name in ("state", "cache", "run"):
        env[f"LLM4AGENTS_{name.upper()}"] = str(tmp_path / name[0])
    return {**env, "LLM4AGENTS_AUTOSTART": "0", "COLUMNS": "100"}


@pytest.fixture
def cli(environment: dict[str, str]) -> Run:
    def run(*args: str, stdin: str = "", **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "llm4agents", *args]
        return subprocess.run(
            command, input=stdin, env={**environment, **more}, capture_output=True, text=True, timeout=60
        )

    return run


@pytest.fixture
def server(environment: dict[str, str], tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The contract's server, answering."""
    (tmp_path / "s").mkdir()
    (tmp_path / "r").mkdir(mode=0o700)
    process = subprocess.Popen([sys.executable, str(SERVER)], env=environment)
    socket = tmp_path / "r" / "server.sock"
    while not socket.exists():
        assert process.poll() is None
        os.sched_yield()
    yield process
    process.kill()
    process.wait()
