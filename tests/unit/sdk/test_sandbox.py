"""Sandbox and AsyncSandbox against a server that keeps the contract."""

from __future__ import annotations

import asyncio
import base64
import os
import stat
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

import llm4agents
from llm4agents import (
    AsyncSandbox,
    BootError,
    ConflictError,
    ConnectionLostError,
    HostSetupError,
    InvalidRequestError,
    PathNotFoundError,
    ProgramFailedError,
    Sandbox,
    SandboxNotFoundError,
    TemplateNotFoundError,
)
from llm4agents.config import Settings
from llm4agents.errors import ProtocolError
from llm4agents.sdk._sync.sandbox import transport


@pytest.fixture
def sandbox(settings: Settings) -> Any:
    with Sandbox() as made:
        yield made


def test_a_cell_gives_value_output_and_state(sandbox: Sandbox) -> None:
    sandbox.run_code("a = 6")
    done = sandbox.run_code("print('hi'); a * 7")
    assert (done.text, done.stdout, done.error, done.status) == ("42", "hi\n", None, "ok")
    assert done.check() is done


def test_a_failing_cell_is_a_result_until_checked(sandbox: Sandbox) -> None:
    done = sandbox.run_code("1 / 0")
    assert done.error is not None
    assert done.error.name == "ZeroDivisionError"
    assert "1 / 0" in done.error.traceback or "Traceback" in done.error.traceback
    with pytest.raises(ProgramFailedError, match="ZeroDivisionError"):
        done.check()


def test_callbacks_get_what_the_result_has(sandbox: Sandbox) -> None:
    out: list[str] = []
    shown: list[Any] = []
    done = sandbox.run_code("print('Grüße ☃'); 7", on_stdout=out.append, on_result=shown.append)
    assert "".join(out) == done.stdout == "Grüße ☃\n"
    assert shown == done.results
    assert done.text == "7"


def test_rich_results_are_decoded(sandbox: Sandbox) -> None:
    png = base64.b64encode(b"\x89PNG").decode()
    code = f"{{'image/png': {png!r}, 'text/html': '<b>', 'application/json': '[1]', 'text/plain': 'x'}}"
    done = sandbox.run_code(code)
    (result,) = done.results
    assert (result.png, result.html, result.json, result.text) == (b"\x89PNG", "<b>", [1], "x")
    assert result.svg is None
    bundle = done._repr_mimebundle_()
    assert bundle["image/png"] == png
    assert bundle["application/json"] == [1]


def test_exec_waits_and_passes_everything_on(sandbox: Sandbox) -> None:
    done = sandbox.exec("cat; echo $A >&2; exit 3", stdin=b"\xff\x00", env={"A": "b"})
    assert (done.exit_code, done.stdout_bytes, done.stderr) == (3, b"\xff\x00", "b\n")
    assert done.stdout == "\ufffd\x00"
    with pytest.raises(ProgramFailedError, match="exited with 3: b"):
        done.check()
    assert sandbox.exec(["printf", "%s", "a b"]).stdout == "a b"
    assert sandbox.exec("kill -9 $$").signal == 9


def test_a_command_past_its_time_is_a_result(sandbox: Sandbox) -> None:
    done = sandbox.exec(["sleep", "60"], timeout=0.2)
    assert done.timed_out
    assert not done.ok


def test_exec_streams_whole_characters(sandbox: Sandbox) -> None:
    text: list[str] = []
    done = sandbox.exec("printf 'äöü☃'; exit 1", on_stdout=text.append)
    assert "".join(text) == done.stdout == "äöü☃"
    assert "\ufffd" not in "".join(text)
    assert done.exit_code == 1
    with sandbox.exec_stream("printf abcdef") as stream:
        pieces = list(stream)
        assert b"".join(piece.data for piece in pieces) == b"abcdef"
        assert stream.result.exit_code == 0
        assert stream.pid


def test_files(sandbox: Sandbox) -> None:
    assert sandbox.files.write("data.txt", "é") == 2
    assert sandbox.files.read("/home/user/data.txt") == "é"
    assert sandbox.files.read("~/data.txt", "bytes", offset=1) == "é".encode()[1:]
    with sandbox.files.read("data.txt", "stream") as stream:
        assert b"".join(stream) == "é".encode()
    assert sandbox.files.stat("data.txt").size == 2
    sandbox.files.mkdir("d/e")
    sandbox.files.move("data.txt", "d/e/f")
    assert [entry.path for entry in sandbox.files.list("d", depth=2)] == [
        "/home/user/d/e",
        "/home/user/d/e/f",
    ]
    sandbox.files.write("d/g", iter([b"a", b"b"]))
    assert sandbox.files.read("d/g") == "ab"
    sandbox.files.remove("d", recursive=True)
    assert not sandbox.files.exists("d")


def test_text_that_is_none_says_use_bytes(sandbox: Sandbox) -> None:
    sandbox.files.write("b", b"\xff\xfe")
    with pytest.raises(InvalidRequestError, match=r"not UTF-8.*bytes"):
        sandbox.files.read("b")


def test_upload_and_download_trees(sandbox: Sandbox, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "empty").mkdir(parents=True)
    (tree / "run.sh").write_bytes(b"x" * 600_000)
    (tree / "run.sh").chmod(0o755)
    seen: list[tuple[int, int | None]] = []
    assert (
        sandbox.files.upload(tree, on_progress=lambda done, total: seen.append((done, total)))
        == "/home/user/tree"
    )
    assert seen[-1] == (600_000, 600_000)
    (tmp_path / "back").mkdir()
    back = sandbox.files.download("tree", tmp_path / "back")
    assert back == tmp_path / "back" / "tree"
    assert (back / "run.sh").read_bytes() == b"x" * 600_000
    assert os.access(back / "run.sh", os.X_OK)
    assert (back / "empty").is_dir()
    assert sandbox.files.upload(tree / "run.sh", "bin/") == "/home/user/bin/run.sh"
    with pytest.raises(InvalidRequestError, match="cannot be written"):
        sandbox.files.download("tree/run.sh", tmp_path / "no" / "such")
    assert not list(tmp_path.rglob("*.part"))


def test_a_download_to_a_device_or_a_pipe_goes_into_it(sandbox: Sandbox, tmp_path: Path) -> None:
    sandbox.files.write("note", "hello")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        sandbox.files.download("note", pipe)
        assert os.read(reader, 100) == b"hello"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert not list(tmp_path.glob(".*.part"))


def test_errors_name_the_sandbox_and_say_what_to_do(sandbox: Sandbox) -> None:
    with pytest.raises(PathNotFoundError) as caught:
        sandbox.files.read("/no/such")
    assert sandbox.id in str(caught.value)
    assert caught.value.hint
    assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(SandboxNotFoundError, match="sbx_nope"):
        Sandbox.connect("sbx_nope")
    with pytest.raises(TemplateNotFoundError, match="template ls"):
        Sandbox("nope")


def test_an_error_in_the_stream_of_a_create_is_raised(settings: Settings) -> None:
    with pytest.raises(BootError, match="did not boot"):
        Sandbox(metadata={"fail": "1"})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"network": 3}, "is no network"),
        ({"template": ""}, "not a name"),
        ({"timeout": 0}, "must end some time"),
        ({"timeout": float("nan")}, "not a number"),
        ({"env": {"A": 1}}, "strings"),
    ],
)
def test_wrong_arguments_start_nothing(settings: Settings, starts: Any, arguments: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        Sandbox(**arguments)
    assert starts() == []


def test_life_cycle(settings: Settings) -> None:
    steps: list[str] = []
    sandbox = Sandbox(
        "base", metadata={"a": "b"}, on_progress=lambda step, detail, fraction: steps.append(step)
    )
    assert steps == ["clone"]
    info = sandbox.info()
    assert (info.template, info.metadata, info.created_at and info.created_at.year) == (
        "base",
        {"a": "b"},
        2026,
    )
    assert sandbox.set_timeout(9).idle_timeout_s == 9
    others = [Sandbox() for _ in range(3)]
    assert {item.id for item in Sandbox.list()} >= {sandbox.id, *(other.id for other in others)}
    assert len(Sandbox.list(limit=2)) == 2
    again = Sandbox.connect(sandbox.id)
    assert again.run_code("1").text == "1"
    assert sandbox.kill().state == "killed"
    assert sandbox.kill().state == "killed"
    with pytest.raises(ConflictError, match="has ended"):
        Sandbox.connect(sandbox.id)


def test_emulation_is_told_once_and_can_be_refused(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llm4agents.sdk._wire.warned", False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Sandbox().kill()
        Sandbox().kill()
    assert [w.category for w in caught if w.category is not ResourceWarning] == [llm4agents.EmulationWarning]
    with pytest.raises(HostSetupError, match="a test"):
        Sandbox(require_kvm=True)


def test_a_server_that_dies_in_mid_call_is_an_unknown_outcome(sandbox: Sandbox, settings: Settings) -> None:
    with pytest.raises(ConnectionLostError) as caught:
        sandbox.run_code("die")
    assert caught.value.outcome == "unknown"
    assert str(settings.server_log) in str(caught.value)
    assert sandbox.id in str(caught.value)
    with pytest.raises(SandboxNotFoundError):  # a new server, which never knew it
        sandbox.info()


def test_a_stream_that_breaks_off_is_no_success(sandbox: Sandbox) -> None:
    with pytest.raises(ConnectionLostError, match="broke off"):
        sandbox.run_code("cut", on_stdout=lambda text: None)


def test_what_is_not_our_protocol_is_said(sandbox: Sandbox) -> None:
    with pytest.raises(ProtocolError, match="not a JSON object"):
        transport().json("GET", "/v1/odd")


def test_threads_share_one_client(sandbox: Sandbox) -> None:
    answers: list[str | None] = []

    def work(n: int) -> None:
        answers.append(sandbox.exec(["echo", str(n)]).stdout)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers, key=str) == [f"{n}\n" for n in range(8)]


def test_a_fork_uses_connections_of_its_own(sandbox: Sandbox) -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, (sandbox.run_code("1 + 1").text or "none").encode())
        finally:
            os._exit(0)
    os.close(write)
    assert sandbox.run_code("2 + 2").text == "4"
    os.waitpid(pid, 0)
    assert os.read(read, 9) == b"2"
    os.close(read)


@pytest.mark.filterwarnings("error")
def test_async_is_the_same(settings: Settings) -> None:
    async def main() -> None:
        async with AsyncSandbox() as one, await AsyncSandbox.create() as two:
            a, b = await asyncio.gather(one.run_code("1 + 1"), two.exec("printf 2"))
            assert (a.text, b.stdout) == ("2", "2")
            out: list[str] = []

            async def keep(text: str) -> None:
                out.append(text)

            await one.run_code("print('x')", on_stdout=keep)
            assert out == ["x\n"]
            await one.files.write("f", b"data")
            assert await one.files.read("f") == "data"
            async with await one.exec_stream("printf abc") as stream:
                assert b"".join([piece.data async for piece in stream]) == b"abc"
        with pytest.raises(ConflictError):
            await AsyncSandbox.connect(one.id)
        with pytest.raises(InvalidRequestError, match="not created yet"):
            _ = AsyncSandbox().id

    asyncio.run(main())
    asyncio.run(main())  # another loop, other connections
