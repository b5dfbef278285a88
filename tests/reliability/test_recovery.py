"""Servers that die or are missing under the public SDK and the command line: the next call finds its way.

Every test ends with the fixture's proof that no process, socket or file is left.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llm4agents import HostSetupError, Sandbox, SandboxDiedError, config
from llm4agents.errors import ConnectionLostError, LLM4AgentsError
from llm4agents.sdk import _local
from tests.support import Node, eventually, lines, sdk_of

pytestmark = [pytest.mark.vm, pytest.mark.filterwarnings("ignore::llm4agents.EmulationWarning")]

Make = Callable[..., Node]


@pytest.fixture
def local(nodes: Make) -> Iterator[Node]:
    """A node whose server the SDK starts by itself, as a user's program does."""
    node = nodes()
    with sdk_of(node) as settings:
        yield node
        _local.stop(settings, keep=False)


def kill_server() -> None:
    """SIGKILL to the server of the SDK's settings, and its end."""
    info = _local.probe(config.settings())
    assert info is not None, "no server runs"
    handle = os.pidfd_open(info["pid"])
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    finally:
        os.close(handle)
    eventually(lambda: not Path(f"/proc/{info['pid']}").exists())


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start `work`; the function returned waits for what it returned or raised."""
    got: list[Any] = []

    def run() -> None:
        try:
            got.append(work())
        except LLM4AgentsError as error:
            got.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def wait() -> Any:
        thread.join(90)
        assert got, "the call hangs"
        return got[0]

    return wait


def test_the_next_call_after_a_killed_server_adopts(local: Node) -> None:
    with Sandbox("base", metadata={"kept": "yes"}) as sandbox:
        sandbox.files.write("kept", "yes")
        vmm = local.vmm(sandbox.id)
        kill_server()  # while idle
        assert sandbox.files.read("kept") == "yes"
        call = in_thread(lambda: sandbox.exec("echo begun > begun; sleep 60"))
        eventually(lambda: sandbox.files.exists("begun"))
        kill_server()  # in mid-exec
        error = call()
        assert isinstance(error, ConnectionLostError) and str(config.settings().server_log) in str(error)
        assert sandbox.exec("cat kept").stdout == "yes"
        assert sandbox.exec("pgrep -fx 'sleep 60'").exit_code == 0, "a command belongs to the guest"
        assert local.vmm(sandbox.id) == vmm
        assert sandbox.info().metadata == {"kept": "yes"}


def test_a_server_killed_while_it_creates_and_the_call_that_follows(local: Node) -> None:
    Sandbox("base").kill()
    call = in_thread(lambda: Sandbox("base"))
    eventually(lambda: any((local.run / "vm").iterdir()))
    kill_server()
    made = call()
    # Either it was told in time, or the call failed; what nobody was told of is gone.
    assert isinstance(made, Sandbox | LLM4AgentsError)
    with Sandbox("base") as sandbox:
        assert sandbox.exec("echo fine").stdout == "fine\n"
        alive = {info.id for info in Sandbox.list(state="running")}
        assert {path.name for path in (local.run / "vm").iterdir()} == alive
        assert alive == {sandbox.id} | ({made.id} if isinstance(made, Sandbox) else set())


def test_a_killed_vm_says_so_and_the_server_goes_on(local: Node) -> None:
    with Sandbox("base") as sandbox, Sandbox("base") as other:
        call = in_thread(lambda: sandbox.exec("echo > begun; sleep 60"))
        eventually(lambda: sandbox.files.exists("begun"))
        os.kill(local.vmm(sandbox.id), signal.SIGKILL)
        error = call()
        assert isinstance(error, SandboxDiedError) and "signal 9" in str(error)
        with pytest.raises(LLM4AgentsError, match="signal 9"):
            sandbox.exec("true")
        assert sandbox.info().state == "failed"
        assert other.exec("echo fine").stdout == "fine\n"


def test_a_client_that_leaves_interrupts_its_cell(node: Node) -> None:
    sandbox = node.create("python")
    body = {"code": "import time\nprint('begun')\nwhile True: time.sleep(1)", "timeout_s": 0}
    for stream in (True, False):
        with node.connect() as client:
            if stream:
                with client.stream(
                    "POST", f"/v1/sandboxes/{sandbox}/code", json={**body, "stream": True}
                ) as answer:
                    assert next(lines(answer))["text"] == "begun\n"
            else:
                with pytest.raises(Exception, match="timed out"):
                    client.post(f"/v1/sandboxes/{sandbox}/code", json=body, timeout=1.0)
        # The context is free again: a cell that still ran would hold this one up for ever.
        assert node.code(sandbox, "6 * 7", timeout_s=30)["results"][0]["data"]["text/plain"] == "42"


@pytest.fixture
def no_qemu(nodes: Make, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    """A node on a host without QEMU: named wrongly, or not on a PATH that has everything else."""
    (tmp_path / "bin").mkdir()
    node = nodes(**(request.param if request.param else {"PATH": str(tmp_path / "bin")}))
    with sdk_of(node) as settings:
        yield node
        _local.stop(settings, keep=False)


@pytest.mark.parametrize(
    "no_qemu", [{"LLM4AGENTS_QEMU": "nonexistent"}, {}], indirect=True, ids=["name", "path"]
)
def test_without_qemu_the_package_is_named(no_qemu: Node) -> None:
    with pytest.raises(HostSetupError, match="qemu-system-x86"):
        Sandbox("base")
    done = subprocess.run(
        [sys.executable, "-m", "llm4agents", "doctor", "--json"],
        env=no_qemu.env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    vmm = next(check for check in report["checks"] if check["name"] == "vmm")
    assert not report["ok"] and not vmm["ok"]
    assert "not installed" in vmm["detail"]


# -- templates of another QEMU ------------------------------------------------------------------------------


def _other_qemu(variant: Path) -> None:
    """Make a variant look as if QEMU 6.0 had frozen it."""
    manifest = variant / "snapshot" / "manifest.json"
    body = json.loads(manifest.read_text())
    body["identity"]["vmm"] = "6.0.0"
    manifest.unlink()  # it is a hard link to the real one
    manifest.write_text(json.dumps(body))


@pytest.mark.parametrize("renamed", [False, True], ids=["same key", "its own key"])
def test_a_template_of_another_qemu_is_never_loaded(nodes: Make, own_cache: Path, renamed: bool) -> None:
    keys = own_cache / "templates" / "base" / "keys"
    for variant in list(keys.iterdir()):
        _other_qemu(variant)
        if renamed:
            variant.rename(keys / ("0" * 8 + variant.name[8:]))
    node = nodes(cache=own_cache).start()
    told = create_watched(node)
    assert told is not None
    assert told[-1]["type"] == "sandbox", told[-1]
    assert "freeze" in {line.get("step") for line in told}, "it was built anew"
    assert node.exec(told[-1]["id"], "echo fine")["stdout"] == "fine\n"
    # The cache may hold variants of another CA's root file system beside it: those are not this server's to drop.
    shapes = [json.loads((path / "template.json").read_text()) for path in keys.iterdir()]
    newest = max(shapes, key=lambda shape: shape["created_at"])
    alike = [s["key"] for s in shapes if all(s[k] == newest[k] for k in ("memory_mib", "rootfs_digest"))]
    assert alike == [newest["key"]]
    manifest = keys / newest["key"] / "snapshot" / "manifest.json"
    assert json.loads(manifest.read_text())["identity"]["vmm"] != "6.0.0"
    node.stop()


# -- building -----------------------------------------------------------------------------------------------


def test_a_build_killed_in_the_middle_and_three_who_ask_for_it_then(nodes: Make, own_cache: Path) -> None:
    keys = own_cache / "templates" / "base" / "keys"
    shutil.rmtree(keys)
    node, other = nodes(cache=own_cache).start(), nodes(cache=own_cache).start()
    call = in_thread(lambda: create_watched(node))
    eventually(lambda: node.machines(), 60)
    node.kill9()
    assert call() is None
    assert not list(keys.glob("*/template.json")), "nothing that looks finished"
    node.start()
    assert node.processes() == [], "the machine that was being built was ended by the next server"
    assert not list((own_cache / "tmp").iterdir())
    told = [wait() for wait in [in_thread(lambda at=at: create_watched(at)) for at in (node, node, other)]]
    assert [lines_[-1]["type"] for lines_ in told] == ["sandbox"] * 3, told
    # Two of one server share its build; the other server's waits for it, or is waited for.
    steps = [[line.get("step") for line in lines_] for lines_ in told]
    built = ["freeze" in heard for heard in steps]
    assert built in ([True, True, False], [False, False, True]), steps
    assert len(list(keys.iterdir())) == 1
    for at in (node, other):
        at.stop()


def create_watched(node: Node) -> list[dict[str, Any]] | None:
    """What a create tells, line by line; None when its server went away."""
    headers = {"accept": "application/x-ndjson"}
    try:
        with (
            node.connect() as client,
            client.stream("POST", "/v1/sandboxes", json={"template": "base"}, headers=headers) as got,
        ):
            return list(lines(got))
    except httpx.TransportError:
        return None


def test_two_servers_on_one_state_directory_from_two_run_directories(nodes: Make) -> None:
    first = nodes().start()
    second = nodes(state=first.state)
    assert second.spawn().wait(30) == 3
    assert first.process is not None
    assert f"pid {first.process.pid}" in second.log()
    with sdk_of(first):
        assert Sandbox.list() == []
