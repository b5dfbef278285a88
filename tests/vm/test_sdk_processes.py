"""Processes, terminals and ports through the SDK, with a real microVM; one test through the asynchronous one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import pytest

from llm4agents import (
    AsyncSandbox,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    ProgramFailedError,
    Sandbox,
    TimedOutError,
)

from ..support import Node, sdk_of

pytestmark = [pytest.mark.vm, pytest.mark.filterwarnings("ignore::llm4agents.EmulationWarning")]


@pytest.fixture(scope="module")
def sandbox(shared_node: Node) -> Iterator[Sandbox]:
    with sdk_of(shared_node), Sandbox("base") as made:
        yield made


def test_a_background_process_is_found_again(sandbox: Sandbox) -> None:
    process = sandbox.processes.start("echo one; read x; echo $x; exit 3", stdin=True, tag="t")
    first = next(iter(process))
    assert (first.data, first.offset, process.offset) == (b"one\n", 0, 4)
    process.close()
    assert [(found.id, found.tag) for found in sandbox.processes.list()] == [(process.id, "t")]
    again = sandbox.processes.connect(process.id, process.offset)
    with pytest.raises(TimedOutError):
        again.wait(timeout=0.1)
    again.write_stdin("two\n")
    assert b"".join(output.data for output in again) == b"two\n"
    ended = again.wait()
    assert ended.exit_code == 3
    with pytest.raises(ProgramFailedError):
        ended.check()
    assert again.read(0).text == "one\ntwo\n"
    assert again.kill().exit_code == 3
    with pytest.raises(NotFoundError):
        sandbox.processes.get(process.id)


def test_a_line_of_a_log_is_waited_for(sandbox: Sandbox) -> None:
    process = sandbox.processes.start("echo booting; sleep 0.3; echo listening on 8080; sleep 100")
    assert process.wait_for_log(r"listening on (\d+)", timeout=20) == "listening on 8080"
    assert process.wait_for_log(re.compile("BOOT", re.I)) == "booting"
    with pytest.raises(TimedOutError, match="did not say"):
        process.wait_for_log("never", timeout=0.3)
    with pytest.raises(InvalidRequestError):
        process.wait_for_log("(")
    process.signal("term")
    with pytest.raises(ProgramFailedError, match="ended before"):
        process.wait_for_log("never", timeout=20)
    assert process.wait().signal == 15
    with pytest.raises(ConflictError):
        process.signal("TERM")
    process.kill()


def test_a_terminal(sandbox: Sandbox) -> None:
    with sandbox.terminal(31, 97) as terminal:
        terminal.write("stty size\n")
        said = b""
        for piece in terminal:
            said += piece
            if b"31 97\r\n" in said:
                break
        terminal.resize(40, 80)
        terminal.write("stty size; exit 6\n")
        said = b"".join(terminal)
        assert b"40 80\r\n" in said
        assert terminal.exit_code == 6
    with sandbox.terminal(cmd=["/bin/cat"]) as left:
        left.write("typed\n")
        output = left.read(timeout=20)
        assert output is not None and output.data.startswith(b"typed")
        id = left.id
    with pytest.raises(NotFoundError):  # leaving it was its end
        sandbox.processes.get(id)


def test_a_command_that_is_left_goes_on(sandbox: Sandbox) -> None:
    with sandbox.exec_stream("echo a; sleep 0.5; echo b") as stream:
        assert next(iter(stream)).data == b"a\n"
        assert stream.id is not None and stream.offset == 2
        id, offset = stream.id, stream.offset
    process = sandbox.processes.connect(id, offset)
    assert b"".join(output.data for output in process) == b"b\n"
    process.kill()
    with sandbox.exec_stream("sleep 100", on_disconnect="kill", id="gone") as stream:
        assert stream.id == "gone"
    assert sandbox.processes.get("gone").wait(20).signal == 9
    sandbox.processes.get("gone").kill()


def test_ports(sandbox: Sandbox) -> None:
    listen = "$s = IO::Socket::INET->new(Listen=>1,LocalAddr=>'127.0.0.1:8125') or die; sleep 100"
    process = sandbox.processes.start(["perl", "-MIO::Socket::INET", "-e", listen])
    assert sandbox.ports.wait(8125, timeout=30).address == "127.0.0.1"
    assert 8125 in {port.port for port in sandbox.ports.list()}
    process.kill()
    with pytest.raises(TimedOutError):
        sandbox.ports.wait(8126, timeout=0.1)


def test_iterating_goes_on_over_a_new_server(nodes: object) -> None:
    node: Node = nodes().start()  # type: ignore[operator]
    with sdk_of(node), Sandbox("base") as sandbox:
        script = "i=0; while [ $i -lt 3000 ]; do echo $i; i=$((i+1)); done; read x; echo $x"
        process = sandbox.processes.start(script, full="block", stdin=True)
        said = b""
        for output in process:
            said += output.data
            if said.endswith(b"2999\n"):
                node.kill9()
                node.start()
                process.write_stdin("end\n")
        assert said == b"".join(b"%d\n" % n for n in range(3000)) + b"end\n"
        assert process.gap == 0


def test_the_asynchronous_one(shared_node: Node) -> None:
    async def whole() -> None:
        async with AsyncSandbox("base") as sandbox:
            process = await sandbox.processes.start("cat", stdin=True)
            await process.write_stdin("x\n")
            assert await process.wait_for_log("x", timeout=20) == "x"
            await process.close_stdin()
            assert [output.data async for output in process] == [b"x\n"]
            assert (await process.wait()).exit_code == 0
            async with await sandbox.terminal(20, 70) as terminal:
                await terminal.write("stty size; exit 2\n")
                said = b"".join([piece async for piece in terminal])
                assert b"20 70\r\n" in said and terminal.exit_code == 2

    with sdk_of(shared_node):
        asyncio.run(whole())
