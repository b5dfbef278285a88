"""What goes wrong, for real: guests that run amok, processes killed at any moment, time that runs out, full disks.

Every test ends with the fixture's proof that no process, socket or file is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..support import Node, copied_cache, eventually, lines

pytestmark = pytest.mark.vm

MIB = 1 << 20
Make = Callable[..., Node]


def refused(answer: httpx.Response, code: str, *words: str) -> dict[str, Any]:
    body: dict[str, Any] = answer.json()
    assert body["code"] == code, body
    assert all(word in body["detail"] + str(body["hint"]) for word in words), body
    return body


def in_thread(work: Callable[[], httpx.Response]) -> Callable[[], httpx.Response]:
    """Start `work`; the function returned waits for its answer."""
    got: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: got.append(work()))
    thread.start()

    def wait() -> httpx.Response:
        thread.join(60)
        assert got, "the call hangs"
        return got[0]

    return wait


# -- guests that run amok -----------------------------------------------------------------------------------


def test_a_guest_that_panics_ends_with_its_last_words(node: Node) -> None:
    sandbox = node.create()
    path = f"/v1/sandboxes/{sandbox}/exec"
    answer = node.http.post(path, json={"command": "echo c > /proc/sysrq-trigger", "user": "root"})
    assert answer.status_code == 410
    refused(answer, "sandbox_died", "panic")
    row = node.ended(sandbox)
    assert row["state"] == "failed" and "panic" in row["reason"]
    refused(node.http.post(path, json={"command": "true"}), "sandbox_died", "panic")


def test_a_guest_that_powers_off_ends(node: Node) -> None:
    sandbox = node.create()
    node.http.post(
        f"/v1/sandboxes/{sandbox}/exec",
        json={"command": "echo o > /proc/sysrq-trigger; sleep 9", "user": "root"},
    )
    assert node.ended(sandbox)["state"] == "failed"


def test_a_fork_bomb_is_one_guests_trouble(node: Node) -> None:
    bomb, other = node.create(), node.create()
    fork = "bomb() { bomb | bomb & }; bomb"
    done = node.exec(bomb, fork, timeout_s=5)
    assert node.exec(other, "echo fine")["stdout"] == "fine\n"
    assert done["timed_out"] or done["exit_code"] is not None
    # Its own agent is alive as well: it is in no process limit of the user's.
    after = node.exec(bomb, "echo still here", user="root", timeout_s=30)
    assert after["stdout"] == "still here\n"
    for sandbox in (bomb, other):
        assert node.call("DELETE", f"/v1/sandboxes/{sandbox}")["state"] == "killed"


def test_memory_that_runs_out_kills_the_program_and_not_the_sandbox(node: Node) -> None:
    sandbox = node.create(memory_mib=512)
    done = node.exec(sandbox, "tail /dev/zero", timeout_s=240)
    assert done["signal"] == 9 or done["exit_code"] not in (0, None)
    assert not done["timed_out"]
    assert node.exec(sandbox, "echo fine")["stdout"] == "fine\n"


def test_an_endless_loop_is_ended_by_its_timeout(node: Node) -> None:
    sandbox = node.create()
    began = time.monotonic()
    done = node.exec(sandbox, "while :; do :; done", timeout_s=1)
    assert done["timed_out"] and time.monotonic() - began < 10
    assert node.exec(sandbox, "echo fine")["stdout"] == "fine\n"


def test_output_that_nobody_reads_holds_up_nobody_else(node: Node) -> None:
    sandbox = node.create()
    body = {"command": "head -c 200000000 /dev/zero", "stream": True, "timeout_s": 0, "on_disconnect": "kill"}
    before = _rss(node)
    with node.http.stream("POST", f"/v1/sandboxes/{sandbox}/exec", json=body) as answer:
        assert next(lines(answer))["type"] == "started"
        assert node.exec(sandbox, "echo beside")["stdout"] == "beside\n"
        assert _rss(node) - before < 40 * MIB
    eventually(
        lambda: node.exec(sandbox, "pgrep -fx 'head -c 200000000 /dev/zero' | wc -l")["stdout"].strip() == "0"
    )


def test_output_that_is_waited_for_is_bounded_and_said_to_be(node: Node) -> None:
    sandbox = node.create()
    done = node.exec(sandbox, "head -c 40000000 /dev/zero | tr '\\0' x; echo end >&2")
    assert done["stdout_truncated"] and len(done["stdout"]) == 16 * MIB
    assert done["stderr"] == "end\n" and done["exit_code"] == 0 and not done["stderr_truncated"]


STEAL = r"""
my ($fd) = grep { readlink("/proc/1/fd/$_") =~ /vport/ } 0 .. 99;
my $ours = syscall(438, syscall(434, 1, 0), $fd, 0);  # pidfd_getfd of pidfd_open(1): the agent's own channel
open(my $out, ">&=", $ours) or die "no channel: $!";
open(my $in, "<", "/dev/urandom");
while (1) { sysread($in, my $bytes, 65536); syswrite($out, $bytes); }
"""


def test_random_bytes_on_the_channel_end_that_sandbox_alone(node: Node) -> None:
    bad, good = node.create(), node.create()
    body = {"argv": ["perl", "-e", STEAL], "user": "root", "timeout_s": 20}
    answer = node.http.post(f"/v1/sandboxes/{bad}/exec", json=body)
    assert answer.status_code in (410, 502), answer.text
    assert answer.json()["code"] in ("sandbox_died", "protocol_error")
    row = node.ended(bad)
    assert row["state"] == "failed" and "protocol error" in row["reason"]
    assert node.exec(good, "echo fine")["stdout"] == "fine\n"


@pytest.mark.parametrize("size", [3 << 30])
def test_a_file_of_3_gib_goes_in_with_flat_memory(node: Node, size: int) -> None:
    sandbox = node.create()
    piece = os.urandom(MIB)
    before = _rss(node)
    peak = [0]

    def pieces() -> Iterator[bytes]:
        for number in range(size // MIB):
            yield piece
            if number % 256 == 0:
                peak[0] = max(peak[0], _rss(node))

    where = f"/v1/sandboxes/{sandbox}/files"
    put = node.call("PUT", where, params={"path": "/home/user/big"}, content=pieces())
    assert put["size"] == size
    assert peak[0] - before < 64 * MIB
    assert not [
        p
        for p in Path("/tmp").glob("tmp*")
        if p.is_file() and p.stat().st_size > 256 * MIB and p.stat().st_mtime > time.time() - 300
    ]
    tail = node.http.get(where, params={"path": "/home/user/big", "offset": size - 1000})
    assert tail.content == piece[-1000:]


def test_a_file_larger_than_the_disk_is_refused_whole(node: Node) -> None:
    sandbox = node.create()
    node.exec(
        sandbox,
        "fallocate -l 4800M /home/user/ballast || head -c 4800M /dev/zero > /home/user/ballast",
        timeout_s=300,
    )
    where = f"/v1/sandboxes/{sandbox}/files"
    answer = node.http.put(where, params={"path": "/home/user/big"}, content=(bytes(MIB) for _ in range(600)))
    assert answer.json()["details"]["code"] == "no_space", answer.text
    assert node.exec(sandbox, "ls -A /home/user | grep -c big")["stdout"] == "0\n"


# -- processes killed ---------------------------------------------------------------------------------------


def test_a_vmm_killed_in_mid_call_is_told_and_cleaned_up(node: Node) -> None:
    sandbox = node.create()
    call = in_thread(
        lambda: node.connect().post(f"/v1/sandboxes/{sandbox}/exec", json={"command": "sleep 60"})
    )
    eventually(lambda: node.exec(sandbox, "pgrep -fx 'sleep 60'")["exit_code"] == 0)
    os.kill(node.vmm(sandbox), signal.SIGKILL)
    refused(call(), "sandbox_died", "killed by signal 9")
    assert node.ended(sandbox)["state"] == "failed"


def test_a_kill_in_mid_call_is_told(node: Node) -> None:
    sandbox = node.create()
    call = in_thread(
        lambda: node.connect().post(f"/v1/sandboxes/{sandbox}/exec", json={"command": "sleep 60"})
    )
    eventually(lambda: node.exec(sandbox, "pgrep -fx 'sleep 60'")["exit_code"] == 0)
    assert node.call("DELETE", f"/v1/sandboxes/{sandbox}")["state"] == "killed"
    refused(call(), "sandbox_died", "killed by request")


def test_a_killed_server_loses_no_sandbox(node: Node) -> None:
    sandbox = node.create()
    node.exec(sandbox, "echo kept > /home/user/file; (sleep 4713 &) ; cat /proc/sys/kernel/random/boot_id")
    vmm = node.vmm(sandbox)
    # Killed while output streams, so that half a frame is on its way.
    body = {"command": "yes", "stream": True}
    with node.http.stream("POST", f"/v1/sandboxes/{sandbox}/exec", json=body) as answer:
        events = lines(answer)
        for _ in range(20):
            next(events)
        node.kill9()
    node.start()
    assert node.get(sandbox)["state"] == "running" and node.vmm(sandbox) == vmm
    assert node.exec(sandbox, "cat file")["stdout"] == "kept\n"
    # A command belongs to the guest: it goes on, and its next output is where it was left.
    known = node.call("GET", f"/v1/sandboxes/{sandbox}/processes")["data"]
    (left,) = [process for process in known if process["running"]]
    assert left["argv"][-1] == "yes" and left["offset"] > 0, known
    node.call("DELETE", f"/v1/sandboxes/{sandbox}/processes/{left['id']}")
    assert node.exec(sandbox, "pgrep -x yes | wc -l")["stdout"].strip() == "0"
    assert node.call("GET", "/v1/server")["sandboxes"] == 1


def test_a_stop_that_keeps_leaves_them_to_the_next(node: Node) -> None:
    sandbox = node.create()
    node.exec(sandbox, "echo kept > file")
    vmm = node.vmm(sandbox)
    node.stop(keep=True)
    assert node.vmm(sandbox) == vmm
    node.start()
    assert node.exec(sandbox, "cat file")["stdout"] == "kept\n"


def test_sigterm_leaves_sandboxes_and_stop_ends_them(node: Node) -> None:
    sandbox = node.create()
    assert node.process is not None
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(30) == 0
    node.process = None
    node.start()
    assert node.exec(sandbox, "echo fine")["stdout"] == "fine\n"
    node.stop()
    assert node.processes() == []
    assert not (node.run / "server.sock").exists()
    node.start()
    row = node.get(sandbox)
    assert (row["state"], row["reason"]) == ("killed", "server stopped")


def test_a_vmm_that_ends_while_no_server_runs_is_accounted_for(node: Node) -> None:
    sandbox = node.create()
    node.kill9()
    vmm = node.vmm(sandbox)
    os.kill(vmm, signal.SIGKILL)
    node.start()
    row = node.get(sandbox)
    assert row["state"] == "failed" and "signal 9" in row["reason"]


def test_a_server_killed_at_any_moment_of_a_create_leaves_no_orphan(node: Node) -> None:
    random.seed(2)
    kept = node.create()
    for _ in range(6):
        client = node.connect()
        thread = threading.Thread(
            target=lambda client=client: _quietly(
                lambda: client.post("/v1/sandboxes", json={"template": "base"})
            )
        )
        thread.start()
        threading.Event().wait(random.uniform(0.0, 0.25))
        node.kill9()
        thread.join()
        client.close()
        node.start()
        alive = [row["id"] for row in node.call("GET", "/v1/sandboxes", params={"state": "running"})["data"]]
        assert set(node.machines()) == set(alive) and kept in alive
        assert not node.call("GET", "/v1/sandboxes", params={"state": "creating"})["data"]
        assert {path.name for path in (node.run / "vm").iterdir()} == set(alive)
    assert node.exec(kept, "echo fine")["stdout"] == "fine\n"


def _quietly(work: Callable[[], object]) -> None:
    with contextlib.suppress(httpx.TransportError):
        work()


# -- time ---------------------------------------------------------------------------------------------------


def test_idle_time_ends_it_at_its_time_and_a_call_holds_it_open(node: Node) -> None:
    sandbox = node.create(timeout_s=1.5)
    done = node.exec(sandbox, "sleep 3; echo survived")
    idle_since = time.monotonic()
    assert done["stdout"] == "survived\n"
    row = node.ended(sandbox, 10)
    waited = time.monotonic() - idle_since
    assert (row["state"], row["reason"]) == ("killed", "idle_timeout")
    assert 1.4 < waited < 4


def test_life_ends_it_whatever_runs(node: Node) -> None:
    sandbox = node.create(life_s=3)
    began = time.monotonic()
    answer = node.http.post(f"/v1/sandboxes/{sandbox}/exec", json={"command": "sleep 60"})
    refused(answer, "sandbox_died", "life_end")
    assert 2 < time.monotonic() - began < 6
    assert node.ended(sandbox)["reason"] == "life_end"


def test_more_time_can_be_asked_for(node: Node) -> None:
    sandbox = node.create(timeout_s=2)
    assert (
        node.call("POST", f"/v1/sandboxes/{sandbox}/timeout", json={"timeout_s": 300})["idle_timeout_s"]
        == 300
    )
    threading.Event().wait(3)
    assert node.get(sandbox)["state"] == "running"


def test_a_deadline_holds_while_the_server_is_dead(node: Node) -> None:
    sandbox = node.create(timeout_s=3)
    vmm = node.vmm(sandbox)
    due = time.time() + 3
    # What the shim knows follows at most a second behind.
    eventually(lambda: float((node.run / "vm" / sandbox / "deadline").read_text()) < due + 0.5)
    node.kill9()
    threading.Event().wait(max(0.0, due - time.time()))
    assert Path(f"/proc/{vmm}").exists(), "not before its time"
    eventually(lambda: not Path(f"/proc/{vmm}").exists(), 10)
    node.start()
    row = node.get(sandbox)
    assert (row["state"], row["reason"]) == ("killed", "deadline")


def test_idle_time_goes_on_under_a_new_server(node: Node) -> None:
    sandbox = node.create(timeout_s=20)
    began = time.monotonic()
    eventually(lambda: float((node.run / "vm" / sandbox / "deadline").read_text()) < time.time() + 21)
    node.kill9()
    node.start()
    assert node.ended(sandbox, 40)["reason"] == "idle_timeout"
    assert 15 < time.monotonic() - began < 26


# -- servers ------------------------------------------------------------------------------------------------


def test_there_is_one_server_per_state_directory(node: Node) -> None:
    assert node.process is not None
    second = node.spawn()
    assert second.wait(30) == 3
    last = node.log().strip().splitlines()[-1]
    assert last.startswith("LLM4AGENTS-START-FAILED ")
    body = json.loads(last.partition(" ")[2])
    assert body["code"] == "conflict" and str(node.process.pid) in body["detail"]
    assert node.call("GET", "/v1/server")["pid"] == node.process.pid


def test_there_is_one_server_per_run_directory(node: Node, nodes: Make) -> None:
    """Whoever has the sockets ends machines it does not know: another state directory must not share them."""
    sandbox = node.create()
    other = nodes(LLM4AGENTS_RUN=str(node.run))
    assert other.spawn().wait(30) == 3
    assert "LLM4AGENTS_RUN" in other.log()
    assert node.exec(sandbox, "echo fine")["stdout"] == "fine\n"


def test_an_idle_server_leaves(nodes: Make) -> None:
    node = nodes(LLM4AGENTS_SERVER_IDLE_EXIT_S="1").start()
    sandbox = node.create()
    assert node.process is not None
    threading.Event().wait(3)
    assert node.process.poll() is None, "something lives"
    node.call("DELETE", f"/v1/sandboxes/{sandbox}")
    assert node.process.wait(15) == 0
    node.process = None
    assert not (node.run / "server.sock").exists()


def test_sockets_are_ours_alone_and_a_strangers_directory_is_refused(node: Node, nodes: Make) -> None:
    assert (node.run / "server.sock").stat().st_mode & 0o777 == 0o600
    assert node.run.stat().st_mode & 0o777 == 0o700
    if os.geteuid() != 0:
        pytest.skip("needs root to own a directory as somebody else")
    other = nodes()
    other.run.mkdir()
    os.chown(other.run, 12345, 12345)
    assert other.spawn().wait(30) == 1
    assert "not a directory of ours" in other.log()
    other.run.rmdir()


def test_without_qemu_the_doctor_says_what_to_install(nodes: Make) -> None:
    node = nodes(LLM4AGENTS_QEMU="/nonexistent/qemu").start()
    report = node.call("GET", "/v1/doctor")
    assert report["ok"] is False
    answer = node.http.post("/v1/sandboxes", json={"template": "base"})
    assert answer.status_code == 503
    refused(answer, "host_setup", "qemu")
    assert node.call("GET", "/v1/server")["accelerator"] is None


def test_kvm_can_be_required(nodes: Make) -> None:
    node = nodes(LLM4AGENTS_REQUIRE_KVM="1").start()
    if node.call("GET", "/v1/server")["accelerator"] == "kvm":
        pytest.skip("KVM works here")
    refused(
        node.http.post("/v1/sandboxes", json={"template": "base"}), "host_setup", "KVM", "software emulation"
    )


# -- disks that are full ------------------------------------------------------------------------------------


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 700 MiB, unmounted at the end."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small disk")
    place = Path(tempfile.mkdtemp(prefix=f"l4a-disk-{os.getpid()}-"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700m", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
        place.rmdir()


def _fill(path: Path, leave: int) -> None:
    with path.open("wb") as file:
        while (size := shutil.disk_usage(path.parent).free - leave) > 0:
            # The server writes too, between the question and the act.
            with contextlib.suppress(OSError):
                os.posix_fallocate(file.fileno(), 0, size)
                return


@pytest.mark.root
def test_a_disk_that_fills_while_running_stops_the_guest_and_not_the_server(
    nodes: Make, small_disk: Path
) -> None:
    node = nodes(state=small_disk / "s").start()
    sandbox = node.create()
    node.exec(sandbox, "echo kept > file; sync")
    ballast = small_disk / "ballast"
    _fill(ballast, 8 * MIB)
    path = f"/v1/sandboxes/{sandbox}/exec"
    write = "head -c 60000000 /dev/urandom > data; sync; echo written"
    answer = node.http.post(path, json={"command": write, "timeout_s": 50})
    assert answer.status_code >= 500
    assert "disk is full" in answer.text
    refused(node.http.post(path, json={"command": "true"}), "capacity", "disk is full")
    refused(node.http.post("/v1/sandboxes", json={"template": "base"}), "capacity", "disk")
    assert node.get(sandbox)["state"] == "running"
    ballast.unlink()
    assert node.exec(sandbox, "cat file")["stdout"] == "kept\n"
    assert node.exec(sandbox, write, timeout_s=60)["stdout"] == "written\n"
    _fill(ballast, 0)
    assert node.call("DELETE", f"/v1/sandboxes/{sandbox}")["state"] in ("killed", "running")
    assert node.processes() == [], "a full disk holds up no kill"
    ballast.unlink()
    assert node.create() and node.get(sandbox)["state"] == "killed"


@pytest.mark.root
def test_a_disk_that_fills_costs_a_volume_nothing(nodes: Make, small_disk: Path) -> None:
    node = nodes(state=small_disk / "s").start()
    ident = node.call("POST", "/v1/volumes", json={"name": "kept", "size_mib": 48})["id"]
    wish = {"memory_mib": 256, "volumes": [{"volume": "kept", "path": "/data"}]}
    sandbox = node.create(**wish)
    node.exec(sandbox, "echo kept > /data/file; sync")
    ballast = small_disk / "ballast"
    _fill(ballast, 8 * MIB)
    write = "head -c 40000000 /dev/urandom > /data/more; sync; echo written"
    answer = node.http.post(f"/v1/sandboxes/{sandbox}/exec", json={"command": write, "timeout_s": 50})
    assert answer.status_code >= 500 and "disk is full" in answer.text
    for path, body in (
        ("/v1/volumes", {"name": "more", "size_mib": 8}),
        (f"/v1/volumes/{ident}/snapshot", {"name": "copy"}),
    ):
        refused(node.http.post(path, json=body), "capacity", "room for")
    # The machine is ended while it waits for room, in mid-write.
    node.call("DELETE", f"/v1/sandboxes/{sandbox}")
    assert node.call("GET", f"/v1/volumes/{ident}")["attached"] == []
    ballast.unlink()
    after = node.create(**wish)
    assert node.exec(after, "cat /data/file")["stdout"] == "kept\n"
    assert node.exec(after, write, timeout_s=60)["stdout"] == "written\n"
    node.call("DELETE", f"/v1/sandboxes/{after}")
    assert [path.name for path in (node.state / "volumes").iterdir()] == [f"{ident}.raw"]


@pytest.mark.root
def test_a_disk_that_fills_while_building_leaves_no_half_template(nodes: Make, small_disk: Path) -> None:
    """A copy of the cache below, 40 MiB of room above: enough to begin a build and not to end it."""
    with copied_cache("blobs", "index", "probe", "build/bin", "templates/base") as below:
        _fills_while_building(nodes, small_disk, below)


def _fills_while_building(nodes: Make, small_disk: Path, below: Path) -> None:
    (small_disk / "up").mkdir()
    (small_disk / "work").mkdir()
    place = Path(tempfile.mkdtemp(prefix=f"l4a-cache-{os.getpid()}-"))
    options = f"lowerdir={below},upperdir={small_disk / 'up'},workdir={small_disk / 'work'}"
    if subprocess.run(
        ["mount", "-t", "overlay", "overlay", "-o", options, str(place)], capture_output=True
    ).returncode:
        place.rmdir()
        pytest.skip("no overlay mounts here")
    try:
        node = nodes(cache=place).start()
        ballast = small_disk / "ballast"
        _fill(ballast, 40 * MIB)
        wish = {"template": "base", "memory_mib": 384}
        shutil.rmtree(place / "templates" / "base", ignore_errors=True)
        answer = node.http.post("/v1/sandboxes", json=wish)
        assert answer.status_code == 503, answer.text
        refused(answer, "capacity", "pace")
        assert not list((place / "templates").glob("base/keys/*"))
        assert not list((small_disk / "up").glob("tmp/*"))
        ballast.unlink()
        sandbox = node.call("POST", "/v1/sandboxes", json=wish)["id"]
        assert node.exec(sandbox, "echo fine")["stdout"] == "fine\n"
        node.stop()
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
        place.rmdir()


def _rss(node: Node) -> int:
    assert node.process is not None
    for line in Path(f"/proc/{node.process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")
