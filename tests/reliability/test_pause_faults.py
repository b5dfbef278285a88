"""Pause, resume, fork and snapshot when servers die, disks fill, files rot and two want different things at once.

Every test ends with the fixture's proof that no process, socket or file is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llm4agents import limits
from tests.reliability.whole import (
    SHAPE,
    Call,
    Witness,
    kill,
    no_orphans,
    out,
    post,
    refused,
    soon,
    stored,
)
from tests.support import Node, eventually, lines

pytestmark = pytest.mark.vm

Make = Callable[..., Node]
MIB = 1 << 20

# -- servers that die ---------------------------------------------------------------------------------------

Seen = Callable[[Node, str], bool]


def state_is(state: str) -> Seen:
    return lambda node, sandbox: stored(node, sandbox)["state"] == state


def there(name: str) -> Seen:
    """A file below the sandbox's directory."""
    return lambda node, sandbox: (node.state / "sandboxes" / sandbox / name).exists()


def some(pattern: str) -> Seen:
    """A file below the state directory."""
    return lambda node, _: any(node.state.glob(pattern))


def after(delay_s: float) -> Seen:
    end: list[float] = []

    def seen(node: Node, sandbox: str) -> bool:
        end.append(time.monotonic() + delay_s)
        return time.monotonic() >= end[0]

    return seen


def chance(longest_s: float) -> Seen:
    return after(random.random() * longest_s)


INSTANTS: dict[str, list[Seen]] = {
    "pause": [state_is("pausing"), there("pause"), there("pause/pages"), there("pause/manifest.json")],
    "resume": [state_is("resuming"), lambda n, s: (n.run / "vm" / s).exists(), there("pause.used")],
    "fork": [
        some("photographs/*"),
        some("layers/*"),
        lambda n, s: len(list((n.state / "sandboxes").iterdir())) > 1,
    ],
    "snapshot": [some("photographs/*"), some("layers/*")],
}


def die_in(node: Node, sandbox: str, act: str, seen: Seen, **body: Any) -> None:
    """SIGKILL to the server in the middle of an act, and its successor."""
    call = Call.act(node, sandbox, act, **body)
    soon(lambda: seen(node, sandbox), call)
    node.kill9()
    call.wait()
    node.start()


@pytest.mark.parametrize("act", ["pause", "resume"])
def test_a_server_killed_in_a_pause_or_resume_loses_nothing(node: Node, act: str) -> None:
    witness = Witness(node)
    for seen in [*INSTANTS[act], chance(0.3), chance(1)]:
        if act == "resume":
            post(node, witness.id, "pause")
        die_in(node, witness.id, act, seen)
        assert node.get(witness.id)["state"] in ("running", "paused")
        no_orphans(node)
        witness.look()
        no_orphans(node)
    kill(node, witness.id)


def test_a_server_killed_in_a_fork_leaves_the_parent_whole_and_able_to_fork(node: Node) -> None:
    witness = Witness(node)
    for seen in [*INSTANTS["fork"], chance(0.5)]:
        die_in(node, witness.id, "fork", seen, count=2)
        no_orphans(node)
        witness.look()
        for row in node.call("GET", "/v1/sandboxes?state=running")["data"]:
            if row["id"] != witness.id:  # nobody was told of it: it is whole all the same
                witness.look(row["id"])
                kill(node, row["id"])
        out(node, witness.id, "echo once more >> more")
        child = post(node, witness.id, "fork")["data"][0]["id"]
        witness.look(child)
        assert out(node, child, "md5sum more") == out(node, witness.id, "md5sum more")
        kill(node, child)
        no_orphans(node)
    post(node, witness.id, "pause")
    witness.look()
    kill(node, witness.id)
    no_orphans(node)


def test_a_machine_that_was_never_told_of_its_new_disk_keeps_the_one_it_writes_to(node: Node) -> None:
    """The store hears of a fork's new top before the machine does; a server that dies in between is made up for."""
    witness = Witness(node)
    out(node, witness.id, "head -c 60000000 /dev/urandom > /dev/shm/big")
    call = Call.act(node, witness.id, "fork")
    soon(lambda: any(node.state.glob("photographs/*/pages")), call)
    vmm = node.vmm(witness.id)
    os.kill(vmm, signal.SIGSTOP)  # it can be copied, and takes no commands
    soon(lambda: json.loads(stored(node, witness.id)["disk"] or "null"), call)
    node.kill9()
    call.wait()
    node.start()
    assert node.vmm(witness.id) == vmm
    no_orphans(node)
    assert not json.loads(stored(node, witness.id)["disk"])["layers"], "not caught in between"
    for turn in range(2):
        out(node, witness.id, f"echo {turn} >> more; sync")
        child = post(node, witness.id, "fork")["data"][0]["id"]
        witness.look(child)
        witness.look()
        kill(node, child)
        post(node, witness.id, "pause")
        assert out(node, witness.id, "cat more").split() == [str(n) for n in range(turn + 1)]
        witness.look()
    kill(node, witness.id)
    no_orphans(node)


def test_a_server_killed_in_a_snapshot_leaves_no_half_template_and_the_variables(node: Node) -> None:
    witness = Witness(node)
    places = node.cache / "templates"
    for number, seen in enumerate([*INSTANTS["snapshot"], chance(1)]):
        name = f"half-{os.getpid()}-{number}"
        try:
            die_in(node, witness.id, "snapshot", seen, name=name)
            no_orphans(node)
            witness.look()
            names = {row["name"] for row in node.call("GET", "/v1/templates")["data"]}
            if name not in names:  # and the name is free
                post(node, witness.id, "snapshot", name=name)
            made = node.create(name, **SHAPE)
            assert out(node, made, "sha256sum /dev/shm/memory disk; echo [$TOLD]") == f"{witness.sums}\n[]"
            kill(node, made)
            node.call("DELETE", f"/v1/templates/{name}")
        finally:
            shutil.rmtree(places / name, ignore_errors=True)
        no_orphans(node)
    kill(node, witness.id)


def test_a_server_that_is_stopped_in_an_act_ends_what_the_act_makes(node: Node) -> None:
    for act in ("fork", "resume", "pause"):
        sandbox = node.create("base", **SHAPE)
        if act == "resume":
            post(node, sandbox, "pause")
        call = Call.act(node, sandbox, act)
        soon(lambda sandbox=sandbox: _moving(node, sandbox), call)
        node.stop()
        assert call.wait() is not None, "it is answered before the server ends"
        assert node.processes() == [], act
        node.start()
        no_orphans(node)
        state = node.get(sandbox)["state"]
        assert state in ("killed", "paused"), act
        if state == "paused":
            assert out(node, sandbox, "echo fine") == "fine"
        kill(node, sandbox)
        no_orphans(node)


def _moving(node: Node, sandbox: str) -> bool:
    return stored(node, sandbox)["state"] in ("pausing", "resuming") or any(node.state.glob("photographs/*"))


# -- callers that go away -----------------------------------------------------------------------------------


def test_a_caller_that_goes_away_breaks_no_resume_off(node: Node) -> None:
    """From the moment a machine runs its pause is used up: a resume that was left half done would be a loss."""
    witness = Witness(node)
    for wait_s in (0.02, 0.1, 0.25, 0.5):
        post(node, witness.id, "pause")
        with node.connect() as client, pytest.raises(httpx.TimeoutException):
            path = f"/v1/sandboxes/{witness.id}/exec"
            client.post(path, json={"command": "sleep 30"}, timeout=wait_s)
        witness.look()
    kill(node, witness.id)


# -- machines that die --------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["vmm", "shim"])
def test_a_vmm_killed_in_an_act_is_an_end_or_a_pause_and_no_hang(node: Node, who: str) -> None:
    other = Witness(node)

    def end_machine(sandbox: str) -> None:
        pid = node.machines().get(sandbox)
        if pid is not None and who == "shim":
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if pid is not None:
            os.kill(pid, signal.SIGKILL)

    name = f"died-{os.getpid()}"
    acts: tuple[tuple[str, Seen, dict[str, Any]], ...] = (
        ("pause", there("pause"), {}),
        ("fork", some("photographs/*"), {}),
        ("snapshot", some("photographs/*"), {"name": name}),
    )
    for act, seen, body in acts:
        sandbox = node.create("base", **SHAPE)
        call = Call.act(node, sandbox, act, **body)
        soon(lambda seen=seen, sandbox=sandbox: seen(node, sandbox), call)
        end_machine(sandbox)
        answer = call.wait()
        assert answer is not None
        if answer.status_code >= 300:  # else it was over already
            refused(answer, "sandbox_died")
            assert node.ended(sandbox)["state"] == "failed"
        else:
            kill(node, sandbox, *(row["id"] for row in answer.json().get("data", [])))
            if act == "snapshot":
                node.call("DELETE", f"/v1/templates/{name}")
        no_orphans(node)
    sandbox = node.create("base", **SHAPE)
    out(node, sandbox, "echo kept > file; echo kept > /dev/shm/file")
    post(node, sandbox, "pause")
    call = Call.act(node, sandbox, "resume")
    soon(lambda: sandbox in node.machines(), call)
    end_machine(sandbox)
    call.wait()
    row = eventually(lambda: (row := node.get(sandbox))["state"] in ("paused", "failed", "running") and row)
    if row["state"] == "paused":
        cold = not (json.loads(stored(node, sandbox)["pause"]) or {})["memory"]
        post(node, sandbox, "resume", cold=cold)
        assert out(node, sandbox, "cat file") == "kept"
    kill(node, sandbox)
    no_orphans(node)
    other.look()
    kill(node, other.id)


# -- disks that are full ------------------------------------------------------------------------------------

MS_REMOUNT = 32


@pytest.fixture
def shrinkable() -> Iterator[Path]:
    """A file system whose size `resize` changes."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small disk")
    place = Path(tempfile.mkdtemp(prefix=f"l4a-disk-{os.getpid()}-"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=900m", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
        place.rmdir()


def resize(place: Path, size: int) -> None:
    done = ctypes.CDLL(None, use_errno=True).mount(
        b"tmpfs", str(place).encode(), b"tmpfs", MS_REMOUNT, f"size={size}".encode()
    )
    assert done == 0, os.strerror(ctypes.get_errno())


def fill(place: Path, spare: int) -> None:
    """Leave `spare` bytes, of a file system that something is being written to at the same time."""
    for _ in range(100):
        with contextlib.suppress(AssertionError):  # smaller than what is in it by now
            resize(place, used(place) + spare)
            return
    raise AssertionError("it grows faster than it can be measured")


def used(place: Path) -> int:
    return shutil.disk_usage(place).used


@pytest.mark.root
def test_a_disk_that_is_full_keeps_it_running_until_there_is_room(nodes: Make, shrinkable: Path) -> None:
    node = nodes(state=shrinkable / "s").start()
    witness = Witness(node)
    out(node, witness.id, "head -c 60000000 /dev/urandom > /dev/shm/big")
    name = f"full-{os.getpid()}"
    acts: tuple[tuple[str, dict[str, Any]], ...] = (("pause", {}), ("fork", {}), ("snapshot", {"name": name}))
    # Full before: refused, and nothing has happened.
    resize(shrinkable, used(shrinkable) + limits.DISK_FREE_BYTES_MIN // 2)
    for act, body in acts:
        refused(Call.act(node, witness.id, act, **body).wait(), "capacity", "disk", "free space")
        assert node.get(witness.id)["state"] == "running"
    # Full in the middle of it.
    for act, body in acts:
        resize(shrinkable, 900 * MIB)
        call = Call.act(node, witness.id, act, **body)
        pattern = f"sandboxes/{witness.id}/pause" if act == "pause" else "photographs/*"
        soon(lambda pattern=pattern: any(node.state.glob(pattern)), call)
        resize(shrinkable, used(shrinkable) + MIB)
        refused(call.wait(), "capacity", "disk is full")
        assert node.get(witness.id)["state"] == "running"
        resize(shrinkable, used(shrinkable) + 64 * MIB)
        witness.look()
    resize(shrinkable, 900 * MIB)
    no_orphans(node)
    post(node, witness.id, "pause")
    witness.look()
    kill(node, witness.id)


# -- files that rot -----------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)


ROT: dict[str, Callable[[Path], object]] = {
    "pages cut off": lambda pause: os.truncate(pause / "pages", (pause / "pages").stat().st_size // 2),
    "a bit of the state": lambda pause: flip(pause / "state"),
    "no pages": lambda pause: (pause / "pages").unlink(),
    "no state": lambda pause: (pause / "state").unlink(),
    "no manifest": lambda pause: (pause / "manifest.json").unlink(),
    "a bit of the manifest": lambda pause: flip(pause / "manifest.json"),
    "half of a manifest": lambda pause: os.truncate(pause / "manifest.json", 100),
    "nothing at all": shutil.rmtree,
}


def test_a_pause_that_rots_is_refused_and_its_disk_boots(node: Node) -> None:
    sandbox = node.create("base", **SHAPE)
    out(node, sandbox, "echo kept > file; echo gone > /dev/shm/file")
    post(node, sandbox, "pause")
    pause = node.state / "sandboxes" / sandbox / "pause"
    whole = node.state / "whole"
    shutil.copytree(pause, whole)
    name = f"rotten-{os.getpid()}"
    for what, rot in ROT.items():
        rot(pause)
        for act, body in (("resume", {}), ("fork", {}), ("snapshot", {"name": name})):
            told = refused(Call.act(node, sandbox, act, **body).wait(), "corrupt_snapshot", "--cold")
            assert node.get(sandbox)["state"] == "paused", (what, told)
        shutil.rmtree(pause, ignore_errors=True)
        shutil.copytree(whole, pause)
    assert not (node.cache / "templates" / name).exists()
    no_orphans(node)
    assert out(node, sandbox, "cat file /dev/shm/file") == "kept\ngone"  # the whole one is fine
    post(node, sandbox, "pause")
    flip(pause / "pages")
    assert post(node, sandbox, "resume", cold=True)["state"] == "running"
    assert out(node, sandbox, "cat file; ls /dev/shm") == "kept"
    kill(node, sandbox)
    shutil.rmtree(whole)


# -- the keeper ---------------------------------------------------------------------------------------------


def test_its_keeper_stops_it_or_kills_it_at_its_time_and_never_before(node: Node) -> None:
    wish: dict[str, Any] = {"timeout_s": 3}
    kept, let_go = Witness(node, on_timeout="pause", **wish), Witness(node, on_timeout="kill", **wish)

    def deadline(sandbox: str) -> float:
        return float((node.run / "vm" / sandbox / "deadline").read_text().split()[0])

    # Its keeper hears of the end of a call within a second; until then it may take it for one in use.
    eventually(lambda: max(deadline(kept.id), deadline(let_go.id)) < time.time() + 60)
    last = min(deadline(kept.id), deadline(let_go.id)) - time.time() - 3 + time.monotonic()
    node.kill9()
    machines = node.machines()
    assert set(machines) == {kept.id, let_go.id}

    def standing(pid: int) -> bool:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"

    def before_its_time() -> bool:
        assert set(node.machines()) == set(machines) and not standing(machines[kept.id])
        return time.monotonic() > last + 3

    eventually(before_its_time, 10)
    eventually(lambda: set(node.machines()) == {kept.id}, 30)
    eventually(lambda: standing(machines[kept.id]), 30)
    node.start()
    assert node.get(let_go.id)["state"] == "killed"
    eventually(lambda: node.get(kept.id)["state"] == "paused", 20)
    assert kept.id not in node.machines()
    kept.look()
    kill(node, kept.id)


@pytest.mark.parametrize("on_timeout", ["pause", "kill"])
def test_a_server_that_dies_in_a_pause_leaves_the_machine_all_of_its_time(
    node: Node, on_timeout: str
) -> None:
    """The keeper is told to wait longer while a machine stands still, never shorter."""
    witness = Witness(node, timeout_s=3000, on_timeout=on_timeout)
    call = Call.act(node, witness.id, "pause")
    soon(lambda: any(node.state.glob(f"sandboxes/{witness.id}/pause")), call)
    node.kill9()
    call.wait()
    text = (node.run / "vm" / witness.id / "deadline").read_text().split()
    assert float(text[0]) > time.time() + 2000
    assert text[1:] == (["stop"] if on_timeout == "pause" else [])
    node.start()
    witness.look()
    kill(node, witness.id)


# -- templates that go --------------------------------------------------------------------------------------


def test_a_template_somebody_lies_on_is_not_removed_and_one_that_is_gone_is_named(node: Node) -> None:
    maker = node.create("base", **SHAPE)
    name = f"frail-{os.getpid()}"
    directory = node.cache / "templates" / name
    try:
        post(node, maker, "snapshot", name=name)
        kill(node, maker)
        sandbox, base = node.create(name, **SHAPE), node.create("base", **SHAPE)
        for each in (sandbox, base):
            post(node, each, "pause")
        refused(node.http.delete(f"/v1/templates/{name}"), "conflict", sandbox)
        force = {"force": True, **SHAPE}
        answer = node.http.post("/v1/templates/base/build", json=force)
        (told,) = lines(answer)
        assert told["code"] == "conflict" and base in told["detail"], told
        assert out(node, base, "echo fine") == "fine"
        shutil.rmtree(directory)
        for act in ("resume", "fork"):
            told = Call.act(node, sandbox, act).wait()
            refused(told, "not_found", name, "gone from the cache")
            assert node.get(sandbox)["state"] == "paused"
        refused(node.http.post(f"/v1/sandboxes/{sandbox}/exec", json={"argv": ["true"]}), "not_found", name)
        kill(node, sandbox, base)
        no_orphans(node)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


# -- two things at once -------------------------------------------------------------------------------------

PAIRS = [
    ("pause", "pause"),
    ("pause", "kill"),
    ("resume", "kill"),
    ("fork", "pause"),
    ("fork", "kill"),
    ("fork", "fork"),
    ("snapshot", "kill"),
    ("snapshot", "pause"),
    ("resume", "fork"),
]


def test_two_acts_at_once_both_end_and_the_state_is_one_of_theirs(node: Node) -> None:
    name = f"twice-{os.getpid()}"
    try:
        for first, second in PAIRS:
            sandbox = node.create("base", **SHAPE)
            out(node, sandbox, "echo kept > file")
            if first == "resume":
                post(node, sandbox, "pause")
            body = {"name": name} if first == "snapshot" else {}
            calls = [Call.act(node, sandbox, first, **body), Call.act(node, sandbox, second)]
            answers = [call.wait() for call in calls]
            for answer in answers:
                assert answer is not None, (first, second)
                assert answer.status_code < 300 or answer.status_code in (409, 410), (
                    first,
                    second,
                    answer.text,
                )
            state = node.get(sandbox)["state"]
            if second == "kill":
                assert state == "killed", (first, second)
            else:
                assert state in ("running", "paused"), (first, second)
                assert out(node, sandbox, "cat file") == "kept"
            for row in node.call("GET", "/v1/sandboxes?state=running")["data"]:
                assert out(node, row["id"], "cat file") == "kept", (first, second)
                kill(node, row["id"])
            no_orphans(node)
            if (node.cache / "templates" / name).exists():
                node.call("DELETE", f"/v1/templates/{name}")
    finally:
        shutil.rmtree(node.cache / "templates" / name, ignore_errors=True)
