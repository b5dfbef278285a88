"""Terminals over a WebSocket, with a real microVM: a shell one types into, from any client, again and again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, unix_connect

from ..support import Node, eventually

pytestmark = pytest.mark.vm


@pytest.fixture(scope="module")
def box(shared_node: Node) -> Iterator[tuple[Node, str]]:
    sandbox = shared_node.create()
    yield shared_node, sandbox
    shared_node.call("DELETE", f"/v1/sandboxes/{sandbox}")


class Seen:
    """A client of a terminal, and what it has seen."""

    def __init__(self, node: Node, sandbox: str, process: str, query: str = "stdin=1") -> None:
        path = f"/v1/sandboxes/{sandbox}/processes/{process}/attach?{query}"
        self.socket: ClientConnection = unix_connect(
            str(node.run / "server.sock"), f"ws://local{path}", legacy=True
        )
        self.said, self.offset = b"", -1
        self.texts: list[dict[str, Any]] = []

    def until(self, seen: Callable[[], Any], timeout: float = 30) -> Any:
        while not (answer := seen()):
            message = self.socket.recv(timeout)
            if isinstance(message, str):
                self.texts.append(json.loads(message))
                continue
            offset = int.from_bytes(message[1:9], "little")
            assert self.offset in (-1, offset)
            self.offset = offset + len(message) - 9
            self.said += message[9:]
        return answer

    def type(self, text: str) -> None:
        self.socket.send(text.encode())

    def tell(self, **what: Any) -> None:
        self.socket.send(json.dumps(what))

    def last(self, key: str) -> Any:
        return self.until(lambda: next((text[key] for text in self.texts if key in text), None))


def shell(node: Node, sandbox: str, **more: Any) -> str:
    body = {"argv": ["/bin/sh"], "tty": {"rows": 30, "cols": 90, "term": "xterm"}, **more}
    return str(node.call("POST", f"/v1/sandboxes/{sandbox}/processes", json=body)["id"])


def test_a_shell_one_types_into(box: tuple[Node, str]) -> None:
    node, sandbox = box
    terminal = Seen(node, sandbox, shell(node, sandbox))
    started = terminal.last("started")
    assert started["tty"] and started["gap"] == 0
    terminal.type("stty size; echo $TERM; id -un; tty\n")
    terminal.until(lambda: b"/dev/pts/" in terminal.said)
    assert b"30 90\r\n" in terminal.said and b"xterm\r\n" in terminal.said and b"user\r\n" in terminal.said
    terminal.tell(resize=[50, 132])
    terminal.type("stty size\n")
    terminal.until(lambda: b"50 132\r\n" in terminal.said)
    terminal.type("sleep 100; echo status $?\n")
    terminal.until(lambda: b"sleep 100" in terminal.said)
    eventually(lambda: node.exec(sandbox, "pgrep -x sleep")["exit_code"] == 0)
    terminal.type("\x03")
    # The shell goes on after a Ctrl-C; its prompt comes again.
    terminal.type("echo still $((40+2))\n")
    terminal.until(lambda: b"still 42\r\n" in terminal.said)
    terminal.type("exit 7\n")
    assert terminal.last("exit")["exit_code"] == 7
    terminal.socket.close()


def test_a_terminal_goes_on_without_its_client_and_is_joined_by_two(box: tuple[Node, str]) -> None:
    node, sandbox = box
    process = shell(node, sandbox)
    first = Seen(node, sandbox, process)
    first.type("echo begin $((1+1)); sleep 0.5; echo later $((2+2))\n")
    first.until(lambda: b"begin 2\r\n" in first.said)
    first.socket.socket.close()  # without a word
    again = Seen(node, sandbox, process, f"stdin=1&from={first.offset}")
    again.until(lambda: b"later 4\r\n" in again.said)
    assert b"begin 2" not in again.said
    watcher = Seen(node, sandbox, process, "from=now")
    watcher.last("started")
    again.type("echo both $((3+3))\n")
    for client in (again, watcher):
        client.until(lambda client=client: b"both 6\r\n" in client.said)
    again.tell(signal="KILL")
    for client in (again, watcher):
        assert client.last("exit")["signal"] == 9
        client.socket.close()


def test_an_open_terminal_holds_the_sandbox_open(nodes: Callable[..., Node]) -> None:
    node = nodes().start()
    sandbox = node.create(timeout_s=2)
    terminal = Seen(node, sandbox, shell(node, sandbox))
    terminal.type("i=0; while [ $i -lt 5 ]; do sleep 1; i=$((i+1)); done; echo held $i\n")
    terminal.until(lambda: b"held 5\r\n" in terminal.said)
    terminal.socket.close()
    assert node.ended(sandbox)["reason"] == "idle_timeout"


def test_errors_are_told_over_the_socket(box: tuple[Node, str]) -> None:
    node, sandbox = box
    assert Seen(node, sandbox, "none").last("error")["code"] == "not_found"
    assert Seen(node, sandbox, "none", "from=x").last("error")["code"] == "invalid_request"
    process = shell(node, sandbox)
    terminal = Seen(node, sandbox, process)
    terminal.tell(nonsense=1)
    assert terminal.last("error")["code"] == "invalid_request"
    assert Seen(node, "sbx_" + "0" * 20, process).last("error")["code"] == "sandbox_not_found"
    node.call("DELETE", f"/v1/sandboxes/{sandbox}/processes/{process}")
    with pytest.raises(InvalidStatus):
        unix_connect(str(node.run / "server.sock"), "ws://local/v1/nothing")


def test_the_sandboxs_end_is_told(shared_node: Node) -> None:
    sandbox = shared_node.create()
    terminal = Seen(shared_node, sandbox, shell(shared_node, sandbox))
    terminal.last("started")
    shared_node.call("DELETE", f"/v1/sandboxes/{sandbox}")
    assert terminal.last("error")["code"] == "sandbox_died"
