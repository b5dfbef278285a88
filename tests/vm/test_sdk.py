"""The SDK against the real server and real microVMs: the main job, as a user does it.

Templates come from (and stay in) the cache of whoever runs this; state and sockets are the test's own.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llm4agents import (
    AsyncSandbox,
    GuestError,
    InvalidRequestError,
    PathNotFoundError,
    Sandbox,
    SandboxDiedError,
    SandboxNotFoundError,
    TemplateNotFoundError,
    config,
)
from llm4agents.errors import ConflictError
from llm4agents.sdk import _local

pytestmark = [pytest.mark.vm, pytest.mark.filterwarnings("ignore::llm4agents.EmulationWarning")]


@pytest.fixture(scope="module")
def server() -> Iterator[config.Settings]:
    """A server of this file's own, started by the first call, stopped at the end."""
    home = Path(tempfile.mkdtemp(prefix=f"l4a-sdk-{os.getpid()}-"))
    patch = pytest.MonkeyPatch()
    settings = config.settings()
    patch.setenv("LLM4AGENTS_CACHE", str(settings.cache))
    patch.setenv(
        "LLM4AGENTS_CA", str(settings.ca_directory)
    )  # with another it would build templates of its own
    patch.setenv("LLM4AGENTS_STATE", str(home / "s"))
    patch.setenv("LLM4AGENTS_RUN", str(home / "r"))
    for name in ("URL", "AUTOSTART"):
        patch.delenv(f"LLM4AGENTS_{name}", raising=False)
    config.settings.cache_clear()
    try:
        yield config.settings()
        _local.stop(config.settings(), keep=False)
        assert not list((home / "r" / "vm").iterdir()), "a stopped server leaves no VM"
    finally:
        patch.undo()
        config.settings.cache_clear()
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="module")
def python(server: config.Settings) -> Iterator[Sandbox]:
    """One sandbox of the python template, shared by tests that leave no trace in it."""
    with Sandbox() as sandbox:
        yield sandbox


@pytest.fixture
def base(server: config.Settings) -> Iterator[Sandbox]:
    with Sandbox("base") as sandbox:
        yield sandbox


def test_data_frames_stay_in_memory_between_cells(python: Sandbox) -> None:
    first = python.run_code("import pandas as pd\ndf = pd.DataFrame({'a': [1, 2, 3]})\ndf")
    assert first.results[-1].main
    assert "<table" in (first.results[-1].html or "")
    assert python.run_code("int(df.a.sum())").text == "6"


def test_charts_are_pictures(python: Sandbox) -> None:
    done = python.run_code("import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()").check()
    (png,) = [result.png for result in done.results if result.png]
    assert png.startswith(b"\x89PNG")


def test_output_comes_while_the_cell_runs(python: Sandbox) -> None:
    seen: list[tuple[float, str]] = []
    code = "import time\nfor i in range(2):\n    print(i, flush=True)\n    time.sleep(1)\n'end'"
    done = python.run_code(code, on_stdout=lambda text: seen.append((time.monotonic(), text)))
    assert "".join(text for _, text in seen) == done.stdout == "0\n1\n"
    assert seen[-1][0] - seen[0][0] > 0.5
    assert done.text == "'end'"


def test_errors_timeouts_and_deaths_are_results(python: Sandbox) -> None:
    wrong = python.run_code("1/0")
    assert wrong.error is not None
    assert (wrong.status, wrong.error.name) == ("error", "ZeroDivisionError")
    slow = python.run_code("while True: pass", timeout=1)
    assert slow.status == "timed_out"
    assert slow.error is not None
    dead = python.run_code("import os; os._exit(3)", context="other")
    assert (dead.status, dead.error and dead.error.name) == ("died", "InterpreterDied")
    assert python.run_code("1 + 1", context="other").text == "2"


def test_interrupt_from_another_thread(python: Sandbox) -> None:
    begun = threading.Event()
    done: list[Any] = []

    def cell() -> None:
        code = "print('begun', flush=True)\nwhile True: pass"
        done.append(python.run_code(code, timeout=60, on_stdout=lambda text: begun.set()))

    thread = threading.Thread(target=cell)
    thread.start()
    assert begun.wait(30)
    python.interrupt()
    thread.join(30)
    assert done
    assert done[0].status == "interrupted"
    assert python.run_code("2 + 2").text == "4"


def test_restart_forgets(python: Sandbox) -> None:
    python.run_code("gone = 1", context="third")
    python.restart("third")
    error = python.run_code("gone", context="third").error
    assert error is not None
    assert error.name == "NameError"


def test_commands(base: Sandbox) -> None:
    done = base.exec("id -un; pwd; cat; echo err >&2; exit 7", stdin=b"\xff", env={"A": "1"})
    assert (done.exit_code, done.stdout_bytes, done.stderr) == (7, b"user\n/home/user\n\xff", "err\n")
    assert base.exec(["id", "-u"], user="root", cwd="/etc").stdout == "0\n"
    assert base.exec("kill -9 $$").signal == 9
    late = base.exec(["sleep", "60"], timeout=1)
    assert late.timed_out
    with pytest.raises(InvalidRequestError, match="no-such-command"):
        base.exec(["no-such-command"])
    with base.exec_stream("for i in 1 2 3; do echo $i; done; exit 2") as stream:
        assert b"".join(piece.data for piece in stream) == b"1\n2\n3\n"
    assert stream.result.exit_code == 2


def test_leaving_a_stream_ends_the_command_that_was_started_so(base: Sandbox) -> None:
    with base.exec_stream("exec sleep 1234", timeout=0, on_disconnect="kill") as stream:
        pid = stream.pid
    deadline = time.monotonic() + 20
    while base.exec(["test", "-d", f"/proc/{pid}"]).ok:
        assert time.monotonic() < deadline, "the command outlived its stream"


def test_output_nobody_could_keep_is_cut_and_said(base: Sandbox) -> None:
    done = base.exec("head -c 40000000 /dev/zero")
    assert (len(done.stdout_bytes), done.stdout_truncated, done.exit_code) == (16_777_216, True, 0)


def test_files_go_in_and_out_intact(base: Sandbox, tmp_path: Path) -> None:
    data = secrets.token_bytes(9_000_001)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "run.sh").write_bytes(data)
    (tmp_path / "in" / "run.sh").chmod(0o755)
    assert base.files.upload(tmp_path / "in", "tree") == "/home/user/tree"
    assert base.files.stat("tree/run.sh").size == len(data)
    assert base.exec(["test", "-x", "tree/run.sh"]).ok
    back = base.files.download("tree", tmp_path / "out")
    assert (back / "run.sh").read_bytes() == data
    with base.files.read("tree/run.sh", "stream") as stream:
        assert sum(len(piece) for piece in stream) == len(data)
    assert base.files.read("tree/run.sh", "bytes", offset=5, length=7) == data[5:12]


def test_files_that_cannot_be(base: Sandbox) -> None:
    base.files.write("bytes", b"\xff\xfe")
    with pytest.raises(InvalidRequestError, match="bytes"):
        base.files.read("bytes")
    with pytest.raises(PathNotFoundError, match=base.id):
        base.files.read("/no/such")
    with pytest.raises(InvalidRequestError, match="directory"):
        base.files.read("/etc")
    with pytest.raises(GuestError, match="denied"):
        base.files.write("/etc/x", "no")
    base.files.write("/etc/x", "yes", user="root")
    assert base.files.read("/etc/x") == "yes"
    assert not base.files.exists("/no/such")
    base.files.mkdir("d/e")
    base.files.move("bytes", "d/e/b")
    assert [entry.path for entry in base.files.list("d", depth=2)] == ["/home/user/d/e", "/home/user/d/e/b"]
    base.files.remove("d", recursive=True)
    assert not base.files.exists("d")


def test_each_step_of_a_write_has_the_rights_of_its_user(base: Sandbox) -> None:
    for n in range(8):  # whichever of the agent's workers does which step
        base.files.write(f"/etc/root-{n}", "r", user="root")
        base.files.write(f"mine-{n}", "u")
        with pytest.raises(GuestError):
            base.files.write(f"/etc/mine-{n}", "u")
    assert base.exec("stat -c %U /etc/root-* mine-* | sort | uniq -c").stdout.split() == [
        "8",
        "root",
        "8",
        "user",
    ]


def test_what_cannot_be_created(server: config.Settings) -> None:
    with pytest.raises(TemplateNotFoundError, match="nope"):
        Sandbox("nope")
    for wrong in ({"memory_mib": 7}, {"vcpus": 900}, {"timeout": 10**9}):
        with pytest.raises(InvalidRequestError):
            Sandbox("base", **wrong)  # type: ignore[arg-type]


def test_after_kill(server: config.Settings) -> None:
    sandbox = Sandbox("base", metadata={"job": "7"})
    assert [info.id for info in Sandbox.list(metadata={"job": "7"})] == [sandbox.id]
    assert sandbox.info().state == "running"
    sandbox.kill()
    assert sandbox.kill().state == "killed"
    with pytest.raises((ConflictError, SandboxDiedError), match=sandbox.id):
        sandbox.exec("true")
    with pytest.raises(ConflictError):
        Sandbox.connect(sandbox.id)
    with pytest.raises(SandboxNotFoundError):
        Sandbox.connect("sbx_" + "0" * 20)


def test_environment_of_a_sandbox(server: config.Settings) -> None:
    with Sandbox(env={"TOKEN": "t"}) as sandbox:
        assert sandbox.exec("echo $TOKEN").stdout == "t\n"
        assert sandbox.run_code("import os; os.environ['TOKEN']").text == "'t'"
        assert sandbox.run_code("os.environ['TOKEN']", env={"TOKEN": "u"}).text == "'u'"
        assert _local.stop(server, keep=True)
        assert sandbox.run_code("os.environ['TOKEN']").text == "'t'"


def test_async_sandboxes_side_by_side(server: config.Settings) -> None:
    async def one(n: int) -> str:
        async with AsyncSandbox("base") as sandbox:
            await sandbox.files.write("n", str(n))
            return (await sandbox.exec("cat n; cat /etc/machine-id")).stdout

    async def main() -> list[str]:
        return await asyncio.gather(*(one(n) for n in range(3)))

    said = asyncio.run(main())
    assert [text[0] for text in said] == ["0", "1", "2"]
    assert len({text[1:] for text in said}) == 3


def test_a_sandbox_outlives_its_server(server: config.Settings) -> None:
    with Sandbox("base") as sandbox:
        sandbox.files.write("kept", "yes")
        assert _local.stop(server, keep=True)
        assert sandbox.files.read("kept") == "yes"  # a new server, which adopted it
        info = _local.probe(server)
        assert info is not None
        handle = os.pidfd_open(info["pid"])
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)
        assert sandbox.files.read("kept") == "yes"
        assert sandbox.exec("cat kept").stdout == "yes"
