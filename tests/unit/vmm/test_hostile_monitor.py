"""A QEMU that its guest has taken over: what its monitor answers is rubbish, and no error of the server's own."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llm4agents import limits
from llm4agents.config import Settings
from llm4agents.engine import adoption
from llm4agents.errors import LLM4AgentsError
from llm4agents.store import SandboxRow
from llm4agents.vmm import procfs
from llm4agents.vmm.base import MachineRecord
from llm4agents.vmm.qemu.driver import QemuDriver
from llm4agents.vmm.qemu.machine import QMP_SOCKET, QemuMachine

RUBBISH: list[Any] = [
    None,
    7,
    "x",
    [],
    [7],
    [{}],
    {"status": []},
    {"fdset-id": "x"},
    [{"fdset-id": {}}],
    {"fds": 1},
]


@pytest.fixture
def record(tmp_path: Path) -> Iterator[MachineRecord]:
    """Of two processes that stand for shim and VMM."""
    stand_ins = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    ticks = [procfs.start_ticks(process.pid) for process in stand_ins]
    assert None not in ticks
    try:
        yield MachineRecord(
            driver="qemu",
            id="sbx_hostile",
            run_dir=tmp_path,
            shim_pid=stand_ins[0].pid,
            shim_start_ticks=ticks[0] or 0,
            vmm_pid=stand_ins[1].pid,
            vmm_start_ticks=ticks[1] or 0,
            uid=os.geteuid(),
            extra={"host_boot_id": procfs.host_boot_id()},
        )
    finally:
        for process in stand_ins:
            process.send_signal(signal.SIGKILL)
            process.wait()


@contextlib.asynccontextmanager
async def monitor(run_dir: Path, answer: Any) -> AsyncIterator[list[str]]:
    """A monitor at its socket that answers everything alike; the commands it was sent."""
    sent: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                body = json.loads(line)
                sent.append(body["execute"])
                writer.write(json.dumps({"id": body["id"], "return": answer}).encode() + b"\n")
        writer.close()

    server = await asyncio.start_unix_server(serve, run_dir / QMP_SOCKET)
    try:
        yield sent
    finally:
        server.close()


@pytest.mark.parametrize("answer", RUBBISH, ids=repr)
def test_answers_of_another_shape_are_errors_in_our_words(record: MachineRecord, answer: Any) -> None:
    async def main() -> None:
        async with monitor(record.run_dir, answer):
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(str(record.run_dir / QMP_SOCKET))
            machine = QemuMachine(record, sock)
            acts: list[Callable[[], Awaitable[Any]]] = [
                machine.greet,
                machine.flush_disks,
                lambda: machine.disk_inode("upper"),
                lambda: machine.announce(["vol0"]),
            ]
            for act in acts:
                with contextlib.suppress(LLM4AgentsError):  # or nothing: some of it is an answer after all
                    await act()
            await machine.detach()

    asyncio.run(main())


def test_a_monitor_that_answers_rubbish_is_ended_and_the_server_starts(
    record: MachineRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "VM_STOP_TIMEOUT_S", 0.2)  # no kernel ends this VMM with its shim

    async def main() -> None:
        driver = QemuDriver(Settings(*(record.run_dir / name for name in ("state", "cache", "run"))))
        async with monitor(record.run_dir, 7) as sent:
            assert await driver.adopt(record) is None
            assert "query-status" in sent
        assert not procfs.alive(record.vmm_pid, record.vmm_start_ticks)

    asyncio.run(main())


def test_whatever_happens_while_one_is_adopted_the_others_are(record: MachineRecord) -> None:
    class Driver:
        async def adopt(self, record: MachineRecord) -> None:
            raise RecursionError(record.id)

    class Drivers:
        def of(self, name: str) -> Driver:
            return Driver()

    row = SandboxRow("sbx_hostile", "base", "running", 0.0, 0.0, 300.0, 1, 256, 5)
    row.record = record.to_json()
    assert asyncio.run(adoption._machine(row, Drivers())) == (None, None)  # type: ignore[arg-type]


def test_what_a_monitor_says_of_a_disk_is_short_and_prints(record: MachineRecord) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        machine = QemuMachine(record, ours)
        events = machine.events()
        data = {"action": "stop", "reason": "\x1b[2J" + "x" * 900_000}
        event = json.dumps({"event": "BLOCK_IO_ERROR", "data": data}).encode() + b"\n"
        theirs.setblocking(False)
        await asyncio.get_running_loop().sock_sendall(theirs, event)
        async with asyncio.timeout(10):
            found = await anext(events)
        assert found.kind == "disk_full"
        assert found.detail.isprintable()
        assert len(found.detail) < 1000
        await machine.detach()
        theirs.close()

    asyncio.run(main())
