"""A sandbox that would show any loss, and what must hold for a node whatever has happened to it. Not tests."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.support import Node, eventually

ENDED = ("killed", "failed")
SHAPE: dict[str, Any] = {"memory_mib": 256, "vcpus": 1}


def out(node: Node, sandbox: str, command: str, **more: Any) -> str:
    answer = node.exec(sandbox, command, **more)
    assert answer["exit_code"] == 0, answer
    return str(answer["stdout"]).strip()


def post(node: Node, sandbox: str, act: str, **body: Any) -> dict[str, Any]:
    return dict(node.call("POST", f"/v1/sandboxes/{sandbox}/{act}", json=body))


def kill(node: Node, *sandboxes: str) -> None:
    for sandbox in sandboxes:
        node.call("DELETE", f"/v1/sandboxes/{sandbox}")


def stored(node: Node, sandbox: str) -> dict[str, Any]:
    """Its row, read from the store's file: also of a server that is dead."""
    with contextlib.closing(sqlite3.connect(f"file:{node.state / 'store.db'}?mode=ro", uri=True)) as store:
        store.row_factory = sqlite3.Row
        row = store.execute("select * from sandboxes where id = ?", (sandbox,)).fetchone()
        return dict(row)


class Call:
    """A request under way in a thread of its own. `answer` is None when its connection broke."""

    def __init__(self, node: Node, method: str, path: str, **options: Any) -> None:
        self.answer: httpx.Response | None = None
        self.took_s = 0.0

        def run() -> None:
            began = time.monotonic()
            with node.connect() as client, contextlib.suppress(httpx.TransportError):
                self.answer = client.request(method, path, timeout=120, **options)
            self.took_s = time.monotonic() - began

        self._thread = threading.Thread(target=run)
        self._thread.start()

    @classmethod
    def act(cls, node: Node, sandbox: str, act: str, **body: Any) -> Call:
        if act == "kill":
            return cls(node, "DELETE", f"/v1/sandboxes/{sandbox}")
        return cls(node, "POST", f"/v1/sandboxes/{sandbox}/{act}", json=body)

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout_s: float = 130) -> httpx.Response | None:
        self._thread.join(timeout_s)
        assert self.over, "the call hangs"
        return self.answer


class Witness:
    """A sandbox with memory, a file, a variable and a process that counts in memory and on disk at once."""

    def __init__(self, node: Node, **wish: Any) -> None:
        self.node = node
        self.id = node.create("base", env={"TOLD": "at create"}, **{**SHAPE, **wish})
        self.count = 0
        self.sums = out(
            node,
            self.id,
            "head -c 4000000 /dev/urandom > /dev/shm/memory; head -c 4000000 /dev/urandom > disk; "
            "sha256sum /dev/shm/memory disk; "
            "(i=0; while :; do i=$((i+1)); echo $i >> counted; echo $i > /dev/shm/count; sleep 0.05; done) "
            ">/dev/null 2>&1 & ",
        )

    def look(self, sandbox: str | None = None) -> None:
        """Everything is there, its process goes on, and memory and disk are of one moment."""
        sandbox = sandbox or self.id
        said = out(
            self.node,
            sandbox,
            "sha256sum /dev/shm/memory disk; echo $TOLD; sleep 0.2; "
            'head -n -1 counted | awk \'$1 != NR {print "line", NR, "is", $1; exit}\'; '
            # Empty while it is being written. The last line is that of the count, or its successor's.
            "until c=$(cat /dev/shm/count); [ $c ]; do :; done; echo $c $(wc -l < counted)",
            timeout_s=60,
        )
        *rest, counts = said.splitlines()
        assert "\n".join(rest) == f"{self.sums}\nat create"
        count, lines = map(int, counts.split())
        assert count <= lines <= count + 20 and count > self.count, (self.count, counts)
        if sandbox == self.id:
            self.count = count


def forked_layers(node: Node) -> set[str]:
    with contextlib.closing(sqlite3.connect(f"file:{node.state / 'store.db'}?mode=ro", uri=True)) as store:
        found = store.execute("select disk from sandboxes where state not in ('killed', 'failed')").fetchall()
    return {name for (disk,) in found if disk for name in (json.loads(disk) or {}).get("layers", [])}


def no_orphans(node: Node) -> None:
    """Machines, directories and layers are exactly those of sandboxes that have not ended."""

    def strange() -> list[str]:
        rows = node.call("GET", "/v1/sandboxes")["data"]
        running = {row["id"] for row in rows if row["state"] == "running"}
        alive = {row["id"] for row in rows if row["state"] not in ENDED}
        wrong = [f"{row['id']} is {row['state']}" for row in rows if row["state"].endswith("ing")]
        wrong = [words for words in wrong if not words.endswith("running")]
        for what, found, wanted in (
            ("VMMs", set(node.machines()), running),
            ("run directories", _names(node.run / "vm"), running),
            ("directories", _names(node.state / "sandboxes"), alive),
            ("layers", _names(node.state / "layers"), forked_layers(node)),
            ("photographs", _names(node.state / "photographs"), set()),
        ):
            if found != wanted:
                wrong.append(f"{what}: {sorted(found - wanted)} too many, {sorted(wanted - found)} missing")
        for ident in alive:
            pauses = _names(node.state / "sandboxes" / ident) & {"pause", "pause.used"}
            if pauses != (set() if ident in running else {"pause"}):
                wrong.append(f"{ident} has {pauses}")
        return wrong

    last: list[str] = []

    def none() -> bool:
        last[:] = strange()
        return not last

    try:
        eventually(none, 10)
    except AssertionError:
        raise AssertionError(last) from None


def _names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} if directory.is_dir() else set()


def refused(answer: httpx.Response | None, code: str, *words: str) -> dict[str, Any]:
    assert answer is not None
    body: dict[str, Any] = answer.json()
    assert body.get("code") == code, body
    assert all(word in body["detail"] + str(body["hint"]) for word in words), body
    return body


def soon(check: Callable[[], Any], call: Call) -> None:
    """Wait for `check`, or until `call` is over: what was waited for was then too short to be seen."""
    end = time.monotonic() + 60
    while not call.over and not check():
        assert time.monotonic() < end, "neither seen nor over"
