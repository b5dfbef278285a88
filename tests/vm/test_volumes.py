"""Volumes with real machines: who may have one, what is in it afterwards, and what kills of every kind leave."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from llm4agents import ConflictError, NotFoundError, Sandbox, Volume
from llm4agents.images.volumes import MIB, file_bytes
from tests.support import Node, eventually, sdk_of

pytestmark = [pytest.mark.vm, pytest.mark.filterwarnings("ignore::llm4agents.EmulationWarning")]
SMALL = {"template": "base", "memory_mib": 256}
RAW = "/dev/vdd"
"""The first volume's disk in the guest: after root, upper and the slot of protected paths."""


def volume(node: Node, name: str, size_mib: int = 16, **more: Any) -> str:
    return str(node.call("POST", "/v1/volumes", json={"name": name, "size_mib": size_mib, **more})["id"])


def at(name: str, path: str = "/data", mode: str = "rw") -> dict[str, str]:
    return {"volume": name, "path": path, "mode": mode}


def post(node: Node, where: str, /, **body: Any) -> httpx.Response:
    return node.http.post(where, json=body)


def refused(answer: httpx.Response, status: int, words: str) -> None:
    assert answer.status_code == status and words in answer.json()["detail"], answer.text


@contextlib.contextmanager
def box(node: Node, *mounts: dict[str, str], **wish: Any) -> Iterator[str]:
    ident = node.create(**{**SMALL, **wish}, volumes=list(mounts))
    try:
        yield ident
    finally:
        node.call("DELETE", f"/v1/sandboxes/{ident}")


def out(node: Node, sandbox: str, command: str, **more: Any) -> str:
    done = node.exec(sandbox, command, **more)
    assert done["exit_code"] == 0, done
    return str(done["stdout"]).strip()


def fails(node: Node, sandbox: str, command: str) -> str:
    done = node.exec(sandbox, command, user="root")
    assert done["exit_code"] != 0, done
    return str(done["stderr"])


def content(node: Node, ident: str, path: str) -> bytes:
    answer = node.http.get(f"/v1/volumes/{ident}/files", params={"path": path})
    assert answer.status_code == 200, answer.text
    return answer.content


@pytest.fixture(scope="module")
def node(shared_nodes: Callable[..., Node]) -> Node:
    return shared_nodes().start()


def test_what_is_written_is_there_for_the_next_one(node: Node) -> None:
    ident = volume(node, "keep", 16, metadata={"of": "me"})
    with box(node, at("keep")) as first:
        # As an ordinary user, in a directory that is its own and empty.
        made = out(node, first, "stat -c %u:%g /data; ls -A /data; echo a > /data/a; echo b > /data/b")
        assert made == "1000:1000"
        assert "nosuid,nodev" in out(node, first, "grep ' /data ' /proc/mounts")
        shown = node.get(first)["volumes"]
        assert shown == [{"volume": ident, "name": "keep", "path": "/data", "mode": "rw"}]
        told = node.call("GET", f"/v1/volumes/{ident}")
        assert told["attached"] == [{"sandbox": first, "mode": "rw"}]
        assert (told["name"], told["size_mib"], told["metadata"]) == ("keep", 16, {"of": "me"})
        for answer in (
            node.http.delete(f"/v1/volumes/{ident}"),
            post(node, f"/v1/volumes/{ident}/resize", size_mib=32),
            post(node, "/v1/sandboxes", **SMALL, volumes=[at("keep")]),
            post(node, "/v1/sandboxes", **SMALL, volumes=[at("keep", mode="ro")]),
            node.http.get(f"/v1/volumes/{ident}/files", params={"path": "/a"}),
        ):
            refused(answer, 409, first)
        for act, more in (("fork", {}), ("snapshot", {"name": "x"})):
            refused(post(node, f"/v1/sandboxes/{first}/{act}", **more), 409, "keep")
    # Nothing was flushed by hand: an end does it.
    with box(node, at(ident, "/elsewhere")) as second:
        assert out(node, second, "cat /elsewhere/a /elsewhere/b") == "a\nb"
    assert content(node, ident, "a") == b"a\n"
    node.call("DELETE", f"/v1/volumes/{ident}")
    assert node.http.get(f"/v1/volumes/{ident}").status_code == 404
    assert not [path for path in (node.state / "volumes").iterdir() if ident in path.name]


def test_one_of_eight_gets_it(node: Node) -> None:
    ident = volume(node, "race", 8)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(post, node, "/v1/sandboxes", **SMALL, volumes=[at("race")]) for _ in range(8)]
        answers = [one.result() for one in asked]
    made = [answer.json()["id"] for answer in answers if answer.status_code == 201]
    assert len(made) == 1, [answer.text for answer in answers]
    assert {answer.status_code for answer in answers} == {201, 409}
    assert node.call("GET", f"/v1/volumes/{ident}")["attached"] == [{"sandbox": made[0], "mode": "rw"}]
    node.call("DELETE", f"/v1/sandboxes/{made[0]}")
    node.call("DELETE", f"/v1/volumes/{ident}")


def test_all_of_its_size_can_be_written_and_it_grows(node: Node) -> None:
    ident, size = volume(node, "full", 24), 24
    path = node.state / "volumes" / f"{ident}.raw"
    for grown in (None, 300):
        if grown is not None:
            size = grown
            assert (
                node.call("POST", f"/v1/volumes/{ident}/resize", json={"size_mib": size})["size_mib"] == size
            )
        with box(node, at("full")) as sandbox:
            fill = f"dd if=/dev/zero of=/data/f bs=1M count={size} conv=fsync 2>&1"
            out(node, sandbox, fill)
            assert "No space left" in fails(node, sandbox, "dd if=/dev/zero of=/data/g bs=1M")
            # The host has all of it and no more, whatever the guest does.
            assert path.stat().st_size == file_bytes(size * MIB) >= path.stat().st_blocks * 512
            beyond = path.stat().st_size // MIB
            assert fails(node, sandbox, f"dd if=/dev/zero of={RAW} bs=1M seek={beyond} count=1")
            out(node, sandbox, "rm /data/g")
            assert out(node, sandbox, "stat -c %s /data/f") == str(size * MIB)
    for answer, words in (
        (post(node, f"/v1/volumes/{ident}/resize", size_mib=24), "only grows"),
        (post(node, "/v1/volumes", name="huge", size_mib=1_048_576), "room for"),
        (post(node, "/v1/volumes", name="full", size_mib=8), "there is a volume full"),
        (post(node, "/v1/volumes", name="Bad", size_mib=8), "no name"),
        (post(node, "/v1/volumes", name="more", size_mib=8, what=1), "no such field"),
    ):
        assert answer.status_code in (400, 409, 503) and words in answer.text, answer.text
    node.call("DELETE", f"/v1/volumes/{ident}")


def test_no_reader_changes_it(node: Node) -> None:
    ident = volume(node, "read", 16)
    with box(node, at("read")) as writer:
        out(node, writer, "echo text > /data/a; dd if=/dev/urandom of=/data/r bs=1M count=2 2>&1")
        # Its journal has things to replay, which each reader does for itself.
        os.kill(node.vmm(writer), signal.SIGKILL)
        node.ended(writer)
    path = node.state / "volumes" / f"{ident}.raw"
    before = path.read_bytes()
    with box(node, at("read", "/r", "ro")) as one, box(node, at("read", "/r", "ro")) as two:
        out(node, two, "ls /r")
        assert "Read-only" in fails(node, one, "echo x > /r/b")
        # As root, past everything the guest has: its own disk it can spoil, the volume it cannot.
        spoil = (
            f"umount /r; blockdev --setrw {RAW}; dd if=/dev/urandom of={RAW} bs=1M count=8 conv=fsync,notrunc"
        )
        said = node.exec(one, spoil, user="root")
        assert said["exit_code"] == 0, said  # or nothing would have been tried
        node.exec(two, "sync; echo 3 > /proc/sys/vm/drop_caches", user="root")
        listed = out(node, two, "ls /r")
        for holder in (one, two):
            refused(node.http.delete(f"/v1/volumes/{ident}"), 409, holder)
        # What it has replayed for itself comes back with its memory; a fork reads on, too.
        post(node, f"/v1/sandboxes/{two}/pause")
        assert out(node, two, "ls /r") == listed
        (child,) = node.call("POST", f"/v1/sandboxes/{two}/fork", json={})["data"]
        node.exec(child["id"], "echo 3 > /proc/sys/vm/drop_caches", user="root")
        assert out(node, child["id"], "ls /r") == listed
        assert child["volumes"] == node.get(two)["volumes"]
        node.call("DELETE", f"/v1/sandboxes/{child['id']}")
    assert path.read_bytes() == before
    node.call("DELETE", f"/v1/volumes/{ident}")


def test_snapshots_and_clones_of_one_in_use(node: Node) -> None:
    ident = volume(node, "source", 16)
    with box(node, at("source")) as writer:
        out(node, writer, "echo 1 > /data/a; (while :; do date >> /data/log; done) >/dev/null 2>&1 &")
        taken = node.call("POST", f"/v1/volumes/{ident}/snapshot", json={"name": "snap"})
        assert (taken["kind"], taken["source"], taken["attached"]) == ("snapshot", ident, [])
        out(node, writer, "echo 2 > /data/a; sync")
        cloned = node.call("POST", f"/v1/volumes/{taken['id']}/clone", json={"name": "copy", "size_mib": 40})
        refused(post(node, "/v1/sandboxes", **SMALL, volumes=[at("snap")]), 409, "is a snapshot")
        refused(post(node, f"/v1/volumes/{taken['id']}/resize", size_mib=40), 409, "does not change")
        refused(post(node, f"/v1/volumes/{ident}/clone", name="less", size_mib=8), 400, "no less")
        assert content(node, taken["id"], "/a") == b"1\n"
        with box(node, at("copy"), at("snap", "/snap", "ro")) as other:
            assert out(node, other, "cat /data/a /snap/a; echo 3 > /data/a") == "1\n1"
            out(node, other, "dd if=/dev/zero of=/data/f bs=1M count=38 2>&1")
        assert out(node, writer, "cat /data/a") == "2"
        # A fork that leaves it has nothing at its place, and its parent goes on.
        (child,) = node.call("POST", f"/v1/sandboxes/{writer}/fork", json={"volumes": "leave"})["data"]
        assert child["volumes"] == []
        assert out(node, child["id"], "ls -A /data; grep -c ' /data ' /proc/mounts || :") == "0"
        node.call("DELETE", f"/v1/sandboxes/{child['id']}")
        assert out(node, writer, "cat /data/a") == "2"
    # What a template is made of has the volume in its memory; a clone of it does not.
    name = f"vol-{os.getpid()}"
    with box(node, at("source")) as writer:
        node.call("POST", f"/v1/sandboxes/{writer}/snapshot", json={"name": name, "volumes": "leave"})
        with box(node, at("copy", "/data"), template=name) as clone:
            assert out(node, clone, "cat /data/a") == "3"
    node.call("DELETE", f"/v1/templates/{name}")
    names = [one["name"] for one in node.call("GET", "/v1/volumes", params={"limit": 2})["data"]]
    assert names == ["copy", "snap"]
    for one in (taken["id"], cloned["id"], ident):
        node.call("DELETE", f"/v1/volumes/{one}")


def test_a_paused_sandbox_keeps_gets_and_gives(node: Node) -> None:
    first, second = volume(node, "first", 8), volume(node, "second", 8)
    with box(node, at("first"), auto_resume=False) as sandbox:
        refused(
            post(node, f"/v1/sandboxes/{sandbox}/volumes", **at("second", "/b")), 409, "attached to a paused"
        )
        out(node, sandbox, "echo one > /data/a; (sleep 1000 > /data/held) >/dev/null 2>&1 &")
        base = f"/v1/sandboxes/{sandbox}"
        node.call("POST", f"{base}/pause", json={})
        refused(node.http.delete(f"/v1/volumes/{first}"), 409, sandbox)
        refused(post(node, "/v1/sandboxes", **SMALL, volumes=[at("first")]), 409, sandbox)
        for mount, words in (
            (at("second", "/data/x"), "in the way"),
            (at("first", "/c"), "attached already"),
            (at("none", "/c"), "no volume"),
        ):
            answer = post(node, f"{base}/volumes", **mount)
            assert answer.status_code in (404, 409) and words in answer.text, answer.text
        told = node.call("POST", f"{base}/volumes", json=at("second", "/b"))["volumes"]
        assert [(one["name"], one["path"]) for one in told] == [("first", "/data"), ("second", "/b")]
        node.call("POST", f"{base}/resume", json={})
        assert out(node, sandbox, "cat /data/a; echo two > /b/a; ls -A /b") == "one\na"
        # Taken away, changed by another, and given back while its memory has the former one.
        node.call("POST", f"{base}/pause", json={})
        node.call("POST", f"{base}/volumes/detach", json={"volume": "first"})
        with box(node, at("first")) as other:
            out(node, other, "cat /data/a; echo changed > /data/a")
        node.call("POST", f"{base}/volumes", json=at("first", "/data"))
        node.call("POST", f"{base}/resume", json={})
        assert out(node, sandbox, "cat /data/a /b/a") == "changed\ntwo"
        # Booted anew it has both, too.
        node.call("POST", f"{base}/pause", json={})
        node.call("POST", f"{base}/volumes/detach", json={"volume": second})
        node.call("POST", f"{base}/resume", json={"cold": True})
        assert out(node, sandbox, "cat /data/a; ls /b") == "changed"
    for ident in (first, second):
        node.call("DELETE", f"/v1/volumes/{ident}")


def test_a_spoilt_volume_costs_no_memory(node: Node) -> None:
    """One whose file system is none is no reason to lose a sandbox that is paused; a create says it."""
    ident = volume(node, "spoilt", 8)
    with (node.state / "volumes" / f"{ident}.raw").open("r+b") as file:
        file.write(b"\xff" * (2 << 20))
    refused(post(node, "/v1/sandboxes", **SMALL, volumes=[at("spoilt")]), 422, "could not be mounted")
    assert node.call("GET", f"/v1/volumes/{ident}")["attached"] == []
    with box(node) as sandbox:
        out(node, sandbox, "echo here > /dev/shm/a")
        node.call("POST", f"/v1/sandboxes/{sandbox}/pause", json={})
        node.call("POST", f"/v1/sandboxes/{sandbox}/volumes", json=at("spoilt"))
        node.call("POST", f"/v1/sandboxes/{sandbox}/resume", json={})
        assert out(node, sandbox, "cat /dev/shm/a") == "here"
        assert "mount the volume" in node.get(sandbox)["volumes"][0]["error"]
    node.call("DELETE", f"/v1/volumes/{ident}")


def test_files_are_read_while_no_machine_has_it(node: Node) -> None:
    ident = volume(node, "files", 8)
    with box(node, at("files")) as sandbox:
        plant = "mkdir -p d/.git/hooks; echo 1 > d/x; echo 2 > d/.git/hooks/pre-commit; ln -s /etc/passwd l"
        out(node, sandbox, plant, cwd="/data")
    listed = node.call("GET", f"/v1/volumes/{ident}/files/list", params={"path": "/", "depth": 2})["entries"]
    assert sorted(entry["path"] for entry in listed) == ["/d", "/d/.git", "/d/x", "/l"]
    assert content(node, ident, "d/../d/x") == b"1\n"
    assert node.call("GET", f"/v1/volumes/{ident}/files/stat", params={"path": "/d/x"})["size"] == 2
    missing = node.http.get(f"/v1/volumes/{ident}/files", params={"path": "/../../etc/hostname"})
    assert missing.status_code == 404
    # A machine that nobody waits for is in nobody's way, and is no attachment.
    assert node.call("GET", f"/v1/volumes/{ident}")["attached"] == []
    with box(node, at("files")) as sandbox:
        out(node, sandbox, "echo 3 > /data/d/x")
    assert content(node, ident, "/d/x") == b"3\n"
    node.call("DELETE", f"/v1/volumes/{ident}")
    eventually(lambda: not list((node.run / "vm").glob("volume-*")))


def test_no_kill_loses_what_was_flushed(nodes: Callable[..., Node]) -> None:
    node = nodes().start()
    ident = volume(node, "kept", 16)
    sandbox = node.create(**SMALL, volumes=[at("kept")])
    out(node, sandbox, "echo server > /data/a; sync")
    node.kill9()
    node.start()
    assert node.call("GET", f"/v1/volumes/{ident}")["attached"] == [{"sandbox": sandbox, "mode": "rw"}]
    assert out(node, sandbox, "cat /data/a; echo vmm > /data/a; sync") == "server"
    os.kill(node.vmm(sandbox), signal.SIGKILL)
    node.ended(sandbox)
    assert node.call("GET", f"/v1/volumes/{ident}")["attached"] == []
    paused = node.create(**SMALL, volumes=[at("kept")])
    assert out(node, paused, "cat /data/a; echo paused > /data/a") == "vmm"
    node.call("POST", f"/v1/sandboxes/{paused}/pause", json={})
    node.kill9()
    node.start()
    refused(node.http.delete(f"/v1/volumes/{ident}"), 409, paused)
    assert out(node, paused, "cat /data/a; echo both > /data/a; sync") == "paused"
    # Server and machine at once: the next server finds neither, and the volume is free.
    pid = node.vmm(paused)
    node.kill9()
    os.kill(pid, signal.SIGKILL)
    node.start()
    assert node.get(paused)["state"] == "failed"
    assert content(node, ident, "/a") == b"both\n"
    node.call("DELETE", f"/v1/volumes/{ident}")


def test_what_a_dead_server_was_doing(nodes: Callable[..., Node]) -> None:
    node = nodes().start()
    kept, gone = volume(node, "kept", 8), volume(node, "gone", 8)
    place = node.state / "volumes"
    # A clone under way: its source has something to copy.
    with (place / f"{kept}.raw").open("r+b") as file:
        file.truncate(200 * MIB)
        for at_mib in range(20, 200):
            os.pwrite(file.fileno(), b"x" * MIB, at_mib * MIB)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(Node.connect(node).post, f"/v1/volumes/{kept}/clone", json={"name": "half"})
        eventually(lambda: list(place.glob(".*.tmp")) or asked.done())
        node.kill9()
        with contextlib.suppress(httpx.TransportError):
            asked.result()
    with sqlite3.connect(node.state / "store.db") as store:
        # A delete that had begun, a create whose file was there, and holds of nobody.
        store.execute("UPDATE volumes SET state = 'deleting' WHERE id = ?", (gone,))
        store.execute(
            "INSERT INTO volumes (id, project, name, kind, size_bytes, created_at, state, metadata)"
            " VALUES ('vol_x', 'default', 'half-made', 'volume', 1, 1, 'creating', '{}')"
        )
        store.execute("INSERT INTO volume_holds VALUES (?, 'sbx_nobody', 'rw', 1)", (kept,))
        store.execute("UPDATE volumes SET size_bytes = ? WHERE id = ?", (300 * MIB, kept))
    (place / "vol_x.raw").touch()
    (place / ".vol_y.tmp").touch()
    node.start()
    assert [one["name"] for one in node.call("GET", "/v1/volumes")["data"] if one["name"] != "half"] == [
        "kept"
    ]
    assert {path.name for path in place.iterdir()} == {f"{kept}.raw"}
    # Of a resize that had got as far as its row, the rest was done.
    assert (place / f"{kept}.raw").stat().st_size == file_bytes(300 * MIB)
    for name in ("half", "half-made", "gone"):
        node.call("DELETE", f"/v1/volumes/{volume(node, name, 8)}")
    node.call("DELETE", f"/v1/volumes/{kept}")


def test_sdk_and_command_line(node: Node, tmp_path: Path) -> None:
    def cli(*args: str, status: int = 0) -> str:
        command = [sys.executable, "-m", "llm4agents", *args]
        done = subprocess.run(
            command, env=node.env, capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False
        )
        assert done.returncode == status, done.stderr
        return done.stdout

    with sdk_of(node):
        cli("volume", "create", "sdk", "--size", "8M", "--metadata", "a=b")
        mine = Volume.get("sdk")
        assert mine.info().metadata == {"a": "b"} and [info.name for info in Volume.list()] == ["sdk"]
        with pytest.raises(NotFoundError):
            Volume.get("none")
        with Sandbox("base", memory_mib=256, volumes={"/data": mine}) as box:
            box.exec(
                "mkdir -p /data/d/.git/hooks; echo 1 > /data/d/x; echo 2 > /data/d/.git/hooks/pre-push"
            ).check()
            (held,) = mine.info().attached
            assert (held.sandbox, held.mode) == (box.id, "rw")
            with pytest.raises(ConflictError, match=box.id):
                mine.delete()
            with pytest.raises(ConflictError, match="volumes"):
                box.fork()
            taken = mine.snapshot("taken")
            box.pause()
            assert [one["name"] for one in box.volumes.attach("/taken", taken, mode="ro")] == ["sdk", "taken"]
            assert box.exec("cat /taken/d/x").stdout == "1\n"
            box.pause()
            assert [one["path"] for one in box.volumes.detach("taken")] == ["/data"]
            box.resume()
            assert box.volumes.list() == box.info().volumes
            box.kill()
        assert mine.files.read("d/x") == "1\n" and mine.files.exists("/d") and not mine.files.exists("/e")
        assert [entry.path for entry in mine.files.list("/d")] in (["/d/.git", "/d/x"], ["/d/x", "/d/.git"])
        assert cli("volume", "cat", "sdk:/d/x") == "1\n"
        assert set(cli("volume", "files", "sdk:/d").split()) == {"/d/x", "/d/.git/"}
        # What this machine would obey does not come out of a volume either.
        cli("volume", "cp", "sdk:/d", "d", status=5)
        assert (tmp_path / "d/x").read_text() == "1\n" and not list(tmp_path.glob("d/.git/hooks/*"))
        cli("volume", "cp", "sdk:/d/x", ".envrc", status=5)
        done = json.loads(
            cli("run", "-t", "base", "--volume", "taken:/t:ro", "-l", "bash", "-c", "cat /t/d/x", "--json")
        )
        assert done["stdout"] == "1\n"
        cli("volume", "resize", "sdk", "--size", "16")
        assert cli("volume", "show", "sdk").count("size_mib: 16") == 1
        cli("volume", "clone", "taken", "again")
        cli("volume", "rm", "sdk", "nope", "taken", status=3)
        cli("volume", "rm", "sdk", "taken", "again", "again")
        assert Volume.list() == []
