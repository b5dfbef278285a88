"""What a real sandbox tried is told by its audit and is in its capture: over pauses, the server's death and its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llm4agents import NotFoundError, Observer, Sandbox
from llm4agents.barrier import workers
from tests.support import Node, eventually, sdk_of

pytestmark = [
    pytest.mark.vm,
    pytest.mark.filterwarnings("ignore::llm4agents.EmulationWarning"),
    pytest.mark.skipif(shutil.which("tcpdump") is None, reason="tcpdump is not installed"),
]
ASK = "(echo >/dev/tcp/{name}/{port}) 2>/dev/null; true"


@pytest.fixture(scope="module")
def sdk(shared_node: Node) -> Iterator[Node]:
    with sdk_of(shared_node):
        yield shared_node


def cli(node: Node, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llm4agents", *args]
    return subprocess.run(command, env=node.env, capture_output=True, text=True, timeout=300, check=False)


def read(path: Path) -> str:
    done = subprocess.run(["tcpdump", "-nn", "-r", str(path)], capture_output=True, text=True, check=True)
    return done.stdout


def ask(box: Sandbox, name: str) -> None:
    box.exec(ASK.format(name=name, port=80))


def test_the_audit_is_read_followed_and_kept(sdk: Node, tmp_path: Path) -> None:
    with Sandbox("base", memory_mib=256) as box:
        followed: list[str] = []

        def follow() -> None:
            with Observer() as observer:
                for record in observer.network(box.id).log(follow=True, verdict="deny"):
                    followed.append(record.get("name") or record.get("address") or "")

        listener = threading.Thread(target=follow)
        listener.start()
        command = [sys.executable, "-m", "llm4agents", "net", "log", box.id, "--follow", "--denied"]
        told = tmp_path / "told"
        with told.open("w") as out:
            watcher = subprocess.Popen(command, env=sdk.env, stdout=out, stderr=subprocess.STDOUT)
        ask(box, "first.example")
        eventually(lambda: "first.example" in followed, 30)
        ask(box, "192.0.2.7")
        found = eventually(
            lambda: [r for r in box.network.log(kind="connection,packet") if r.get("address") == "192.0.2.7"],
            30,
        )
        assert found[0]["verdict"] == "deny" and found[0]["sandbox"] == box.id
        eventually(lambda: "192.0.2.7" in followed, 30)
        # The command tells of each as it comes, and goes on.
        eventually(lambda: "first.example" in told.read_text() and "192.0.2.7" in told.read_text(), 30)
        assert watcher.poll() is None
        said = cli(sdk, "net", "log", box.id, "--denied", "--kind", "dns")
        assert said.returncode == 0 and "deny" in said.stdout and "first.example" in said.stdout
        assert "192.0.2.7" not in said.stdout
        line = cli(sdk, "net", "log", box.id, "--json", "-n", "1").stdout
        assert json.loads(line)["sandbox"] == box.id
        assert cli(sdk, "net", "log", box.id, "--kind", "nonsense").returncode == 2
    listener.join(30)
    assert not listener.is_alive()  # the sandbox has ended, and so has its log
    assert watcher.wait(30) == 0, told.read_text()
    assert "first.example" in cli(sdk, "net", "log", box.id).stdout


def test_a_capture_goes_on_over_a_pause_and_stays_when_all_has_ended(sdk: Node, tmp_path: Path) -> None:
    with Sandbox("base", memory_mib=256) as box:
        with pytest.raises(NotFoundError):
            box.network.download_capture(tmp_path)
        ask(box, "before.example")
        assert box.network.capture()["running"]
        assert "capturing" in cli(sdk, "net", "capture", box.id).stderr
        ask(box, "during.example")

        def has(name: str) -> bool:
            return name in read(box.network.download_capture(tmp_path / "it.pcap"))

        eventually(lambda: has("during.example"), 30)
        assert not has("before.example")
        box.pause()
        assert has("during.example") and not (box.network.get().capture or {})["running"]
        box.resume()
        eventually(lambda: (box.network.get().capture or {})["running"], 30)
        ask(box, "after.example")
        eventually(lambda: has("after.example") and has("during.example"), 30)
        state = box.network.stop_capture()
        assert not state["running"] and state["bytes"] > 0
        ask(box, "stopped.example")
        assert not has("stopped.example")
        assert box.network.capture()["running"]  # anew
        ask(box, "anew.example")
        eventually(lambda: has("anew.example"), 30)
        assert not has("after.example")
    saved = cli(sdk, "net", "capture", box.id, "-o", str(tmp_path / "end.pcap"))
    assert saved.returncode == 0 and "anew.example" in read(tmp_path / "end.pcap"), saved.stderr
    assert cli(sdk, "net", "capture", box.id).returncode == 3  # it has ended
    eventually(lambda: "capture" not in str(workers.running(sdk.run)), 30)


def test_a_capture_outlives_its_server(nodes: Callable[..., Node], tmp_path: Path) -> None:
    node = nodes().start()
    id = node.create(memory_mib=256)
    with sdk_of(node):
        box = Sandbox.connect(id)
        box.network.capture(bytes_max=1 << 20)
        node.kill9()
        node.start()
        eventually(lambda: (box.network.get().capture or {})["running"], 30)
        ask(box, "later.example")
        eventually(lambda: "later.example" in read(box.network.download_capture(tmp_path / "it.pcap")), 30)
        box.kill()
