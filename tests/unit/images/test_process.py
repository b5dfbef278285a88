"""Host tools: what they print is in the error, what they start ends with them, what is missing is named."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from llm4agents.errors import HostSetupError
from llm4agents.images import process


def test_stdout_is_the_answer_and_stderr_comes_by_line(tmp_path: Path) -> None:
    lines: list[str] = []
    out = asyncio.run(
        process.run(
            ["sh", "-c", "echo out; echo one >&2; printf 'two\\rthree\\n' >&2"],
            cwd=tmp_path,
            on_line=lines.append,
        )
    )
    assert out == b"out\n"
    assert lines == ["one", "two", "three"]


def test_a_failure_carries_its_last_words(tmp_path: Path) -> None:
    script = (
        "for i in $(seq 5000); do echo noise; done >&2; echo 'E: no such package' >&2; echo bye >&2; exit 7"
    )
    with pytest.raises(HostSetupError, match=r"sh failed \(exit code 7\): E: no such package") as raised:
        asyncio.run(process.run(["sh", "-c", script], cwd=tmp_path))
    assert raised.value.details["log"].endswith("bye\n")
    assert len(raised.value.details["log"]) <= process.LOG_TAIL_BYTES


def test_an_unreachable_source_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(HostSetupError, match="check the network"):
        asyncio.run(process.run(["sh", "-c", "echo 'E: Failed to fetch x' >&2; exit 100"], cwd=tmp_path))


def test_missing_tools_name_the_packages_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "PATH", "/nonexistent")
    with pytest.raises(HostSetupError, match="apt-get install erofs-utils mmdebstrap qemu-utils") as raised:
        process.require(["mmdebstrap", "mkfs.erofs", "qemu-img"])
    assert raised.value.details["packages"] == ["erofs-utils", "mmdebstrap", "qemu-utils"]


def _gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


def processes_of(directory: Path) -> list[int]:
    """Everything that works in `directory`; by that, since a tool has pids of its own."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (path / "cwd").readlink() == directory:
                found.append(int(path.name))
    return found


SLEEPERS = "sleep 1000 & (trap '' TERM; exec sleep 1000) & echo started >&2; wait"


def test_cancelling_ends_the_whole_group_and_waits_for_it(tmp_path: Path) -> None:
    async def main() -> None:
        started = asyncio.Event()
        task = asyncio.create_task(
            process.run(["sh", "-c", SLEEPERS], cwd=tmp_path, on_line=lambda _: started.set())
        )
        await asyncio.wait_for(started.wait(), 10)
        assert processes_of(tmp_path)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(main())
    assert processes_of(tmp_path) == []


def test_a_killed_builder_takes_its_tool_along(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys; from pathlib import Path; from llm4agents.images import process\n"
        "asyncio.run(process.run(['sh', '-c', sys.argv[2]], cwd=Path(sys.argv[1]), on_line=print))"
    )
    command = [sys.executable, "-u", "-c", code, str(tmp_path), SLEEPERS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as builder:
        assert builder.stdout and builder.stdout.readline() == "started\n"
        fds = [os.pidfd_open(pid) for pid in processes_of(tmp_path)]
        builder.kill()
    assert fds
    for fd in fds:
        assert select.select([fd], [], [], 10)[0], "the tool outlived its builder"
        os.close(fd)


def test_work_in_a_thread_has_let_go_when_the_caller_is_cancelled() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        started = asyncio.Event()
        ended = []

        def work(cancel: process.Cancel) -> None:
            loop.call_soon_threadsafe(started.set)
            try:
                while True:
                    cancel.check()
            finally:
                ended.append(True)

        task = asyncio.create_task(process.in_thread(work))
        await asyncio.wait_for(started.wait(), 10)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled() and ended == [True]

    asyncio.run(main())
