"""The shim around harmless programs instead of a VMM: its jail, its deadline, its record of the end."""

import asyncio
import ctypes
import errno
import fcntl
import os
import shutil
import signal
import socket
import tempfile
import time
import traceback
from pathlib import Path

import pytest

from llm4agents import binaries, limits
from llm4agents.errors import BootError
from llm4agents.vmm import procfs, shim, uids
from llm4agents.vmm.waiting import readable
from tests.shims import ROOT, SLEEP, console, ended, run_dir, started, status_of

__all__ = ["run_dir"]


def test_end_is_recorded_with_code_and_output(run_dir: Path) -> None:
    async def main() -> dict[str, object]:
        async with started(run_dir, ["/bin/sh", "-c", 'echo "out $A"; echo err >&2; exit 3']) as answer:
            return await ended(answer, run_dir)

    body = asyncio.run(main())
    assert (body["code"], body["signal"], body["reason"]) == (3, None, "exited")
    assert (body["console_tail"], body["stderr_tail"]) == ("out b\n", "err\n")
    assert shim.read_exit(run_dir).console_tail == "out b\n\n[vmm] err\n"


def test_sigterm_stops_the_vmm_and_its_names_are_removed(run_dir: Path) -> None:
    (run_dir / "agent.sock").touch()
    (run_dir / "kept").touch()

    async def main() -> dict[str, object]:
        async with started(run_dir, SLEEP, unlink=["agent.sock"]) as answer:
            os.kill(answer.shim_pid, signal.SIGTERM)
            return await ended(answer, run_dir)

    body = asyncio.run(main())
    assert (body["code"], body["signal"], body["reason"]) == (None, 9, "stopped")
    assert not (run_dir / "agent.sock").exists()
    assert (run_dir / "kept").exists()


def test_deadline_moved_nearer_ends_it_at_once(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEEPER_GRACE_S", 0.1)

    async def main() -> tuple[dict[str, object], float]:
        shim.write_deadline(run_dir, time.time() + 3600)
        async with started(run_dir, SLEEP) as answer:
            await console(run_dir, "up")
            began = time.monotonic()
            shim.write_deadline(run_dir, time.time())
            return await ended(answer, run_dir), time.monotonic() - began

    body, took = asyncio.run(main())
    assert (body["signal"], body["reason"]) == (9, "deadline")
    assert 0.05 < took < 5


def state_of(pid: int) -> str:
    return status_of(pid)["State"][0]


async def until(pid: int, states: str) -> None:
    async with asyncio.timeout(10):
        while state_of(pid) not in states:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("how", ["moved", "lifted", "killed", "asked"])
def test_a_deadline_that_stops_lets_the_vmm_stand_still(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(limits, "KEEPER_GRACE_S", 0.05)

    async def main() -> dict[str, object]:
        shim.write_deadline(run_dir, time.time(), "stop")
        assert (shim.read_deadline(run_dir) or (0, ""))[1] == "stop"
        async with started(run_dir, SLEEP) as answer:
            await until(answer.vmm_pid, "T")
            if how == "moved":
                shim.write_deadline(run_dir, time.time() + 3600, "stop")
                await until(answer.vmm_pid, "SR")
            elif how == "lifted":
                shim.write_deadline(run_dir, None)
                await until(answer.vmm_pid, "SR")
            elif how == "killed":
                shim.write_deadline(run_dir, time.time())
                return await ended(answer, run_dir)
            os.kill(answer.shim_pid, signal.SIGTERM)
            return await ended(answer, run_dir)

    body = asyncio.run(main())
    assert (body["signal"], body["reason"]) == (9, "deadline" if how == "killed" else "stopped")


def test_a_killed_keeper_ends_a_vmm_that_stands_still(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEEPER_GRACE_S", 0.05)

    async def main() -> None:
        shim.write_deadline(run_dir, time.time(), "stop")
        async with started(run_dir, SLEEP) as answer:
            await until(answer.vmm_pid, "T")
            fd = os.pidfd_open(answer.vmm_pid)
            os.kill(answer.shim_pid, signal.SIGKILL)
            await asyncio.wait_for(readable(fd), 10)
            os.close(fd)

    asyncio.run(main())


def test_a_lifted_deadline_ends_nothing(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEEPER_GRACE_S", 0.3)

    async def main() -> dict[str, object]:
        shim.write_deadline(run_dir, time.time())
        async with started(run_dir, ["/bin/sh", "-c", "sleep 0.8; exit 7"]) as answer:
            shim.write_deadline(run_dir, None)
            return await ended(answer, run_dir)

    assert asyncio.run(main())["code"] == 7


def test_a_deadline_that_makes_no_sense_changes_nothing(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "KEEPER_GRACE_S", 0.3)

    async def main() -> dict[str, object]:
        shim.write_deadline(run_dir, time.time())
        async with started(run_dir, SLEEP) as answer:
            await console(run_dir, "up")
            (run_dir / "deadline").write_bytes(b"tomorrow\xff")
            return await ended(answer, run_dir)

    assert asyncio.run(main())["reason"] == "deadline"


def test_killing_the_shim_kills_the_vmm(run_dir: Path) -> None:
    async def main() -> shim.Started:
        async with started(run_dir, SLEEP) as answer:
            fd = os.pidfd_open(answer.vmm_pid)
            os.kill(answer.shim_pid, signal.SIGKILL)
            await asyncio.wait_for(readable(fd), 10)
            os.close(fd)
            return answer

    asyncio.run(main())
    assert shim.read_exit(run_dir).reason == "lost"


def test_losing_run_dir_ends_the_vmm() -> None:
    async def main() -> None:
        path = Path(tempfile.mkdtemp(prefix="l4a-shim-"))
        # With logs in it and more to come: nothing the shim holds may hide the loss.
        async with started(path, ["/bin/sh", "-c", "echo up; echo err >&2; exec sleep 100"]) as answer:
            await console(path, "up")
            fd = os.pidfd_open(answer.vmm_pid)
            shutil.rmtree(path)
            await asyncio.wait_for(readable(fd), 10)
            os.close(fd)

    asyncio.run(main())


def test_jail(run_dir: Path) -> None:
    async def main() -> None:
        with socket.socket(socket.AF_UNIX) as given, socket.socket(socket.AF_UNIX) as other:
            os.set_inheritable(other.fileno(), True)
            limits_ = {"core": 0, "nofile": 64, "fsize": 1 << 30, "as": 1 << 32}
            async with started(run_dir, SLEEP, fds=[given.fileno()], rlimits=limits_) as answer:
                check(answer.vmm_pid, given)
                assert status_of(answer.shim_pid)["CapEff"] == ("0000000000000020" if ROOT else "0" * 16)
                assert os.getsid(answer.shim_pid) == answer.shim_pid != os.getsid(0)
                assert procfs.start_ticks(answer.vmm_pid) == answer.vmm_start_ticks

    def check(pid: int, given: socket.socket) -> None:
        status = status_of(pid)
        sets = {name: value for name, value in status.items() if name.startswith("Cap")}
        if not ROOT:
            del sets["CapBnd"]  # an ordinary user may not empty it; no_new_privs makes it moot
        assert set(sets.values()) == {"0" * 16}
        assert status["NoNewPrivs"] == "1"
        assert status["Umask"] == "0077"
        assert os.getsid(pid) == pid
        if ROOT:
            assert status["Uid"].split() == [str(uids.UID_BASE)] * 4
            assert status["Gid"].split() == [str(uids.UID_BASE)] * 4
            assert status["Groups"] == ""
        fds = {int(fd): os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
        assert set(fds) == {0, 1, 2, 3}
        assert fds[0] == "/dev/null"
        assert fds[3] == os.readlink(f"/proc/self/fd/{given.fileno()}")
        bounds = {
            line[:25].strip(): line[26:].split()[:2]
            for line in Path(f"/proc/{pid}/limits").read_text().splitlines()
        }
        assert bounds["Max core file size"] == ["0", "0"]
        assert bounds["Max open files"] == ["64", "64"]
        assert bounds["Max file size"] == [str(1 << 30)] * 2
        assert bounds["Max address space"] == [str(1 << 32)] * 2

    asyncio.run(main())


def test_console_that_never_ends_is_bounded(run_dir: Path) -> None:
    size = 3 * limits.SERIAL_LOG_BYTES_MAX

    async def main() -> dict[str, object]:
        script = f"head -c {size} /dev/zero | tr '\\0' x; echo the end"
        async with started(run_dir, ["/bin/sh", "-c", script], env={"PATH": "/bin:/usr/bin"}) as answer:
            return await ended(answer, run_dir)

    assert str(asyncio.run(main())["console_tail"]).endswith("xxx" + "the end\n")
    logs = sum((run_dir / name).stat().st_size for name in ("serial.log", "serial.log.1"))
    assert limits.SERIAL_LOG_BYTES_MAX / 2 <= logs <= limits.SERIAL_LOG_BYTES_MAX


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["/no/such/program"], "executing /no/such/program: No such file"),
        (["relative"], "absolute path"),
    ],
)
def test_what_cannot_start_says_why_and_leaves_nothing(run_dir: Path, argv: list[str], words: str) -> None:
    async def main() -> None:
        async with started(run_dir, argv):
            raise AssertionError

    with pytest.raises(BootError) as caught:
        asyncio.run(main())
    # Of a configuration it cannot read, the shim can only speak on the server's own standard error.
    assert words in str(caught.value) or "without an answer" in str(caught.value)
    assert not (run_dir / "exit").exists()


def test_shim_holds_the_lease_and_not_the_vmm_descriptors(run_dir: Path) -> None:
    async def main() -> None:
        lock = run_dir / "lock"
        held = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(held, fcntl.LOCK_EX)
        with socket.socket(socket.AF_UNIX) as listening:
            async with started(run_dir, SLEEP, fds=[listening.fileno()], hold=[held]) as answer:
                os.close(held)
                links = [os.readlink(entry) for entry in Path(f"/proc/{answer.shim_pid}/fd").iterdir()]
                assert str(lock) in links
                assert os.readlink(f"/proc/self/fd/{listening.fileno()}") not in links
                again = os.open(lock, os.O_RDWR)
                with pytest.raises(BlockingIOError):
                    fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.kill(answer.shim_pid, signal.SIGTERM)
                await ended(answer, run_dir)
                fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.close(again)

    asyncio.run(main())


def use_up_inotify() -> None:
    """Take every instance that this user may have."""
    libc = ctypes.CDLL(None, use_errno=True)
    while libc.inotify_init1(os.O_CLOEXEC) >= 0:
        pass
    assert ctypes.get_errno() == errno.EMFILE


@pytest.mark.skipif(not ROOT, reason="the other tests run as an ordinary user already")
@pytest.mark.parametrize("watches", [True, False], ids=["", "no inotify left"])
def test_as_an_ordinary_user(monkeypatch: pytest.MonkeyPatch, watches: bool) -> None:
    """In a child that has become another, with a shim it may execute; also where the user may watch nothing more."""
    uid = 65534 if watches else 60_923
    with tempfile.TemporaryDirectory(prefix="l4a-user-") as home:
        Path(home).chmod(0o777)
        binary = Path(home) / binaries.SHIM
        binary.write_bytes(binaries.path(binaries.SHIM).read_bytes())
        binary.chmod(0o755)
        run_dir = Path(home) / "run"

        async def main() -> None:
            launch = shim.Launch(
                argv=["/bin/sleep", "100"], env={}, fds=[], run_dir=run_dir, rlimits={"core": 0}
            )
            answer = await shim.start(launch)
            status = status_of(answer.vmm_pid)
            assert (status["NoNewPrivs"], status["CapPrm"], status["CapEff"]) == ("1", "0" * 16, "0" * 16)
            shim.write_deadline(run_dir, time.time() - 100)
            os.waitpid(answer.shim_pid, 0)

        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
                if not watches:
                    use_up_inotify()
                monkeypatch.setattr(binaries, "path", lambda name: binary)
                run_dir.mkdir(mode=0o700)
                asyncio.run(main())
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert shim.read_exit(run_dir).reason == "deadline"


def test_a_record_of_another_make_is_lost_not_believed(run_dir: Path) -> None:
    for body in ("", "[]", '{"reason": "bribed"}', "{"):
        (run_dir / "exit").write_text(body)
        assert shim.read_exit(run_dir).reason == "lost"


@pytest.mark.parametrize("count", [1, 7, 8, 9, 10, 11, 40])
def test_every_descriptor_arrives_in_its_place(run_dir: Path, count: int) -> None:
    async def main() -> None:
        fds = [os.memfd_create(f"given-{number}", os.MFD_CLOEXEC) for number in range(count)]
        try:
            argv = ["/bin/sh", "-c", "for f in /proc/$$/fd/*; do echo ${f##*/} $(readlink $f); done"]
            async with started(run_dir, argv, fds=fds) as answer:
                said = str((await ended(answer, run_dir))["console_tail"])
        finally:
            for fd in fds:
                os.close(fd)
        places = dict(line.split(maxsplit=1) for line in said.splitlines() if "given-" in line)
        assert places == {str(3 + number): f"/memfd:given-{number} (deleted)" for number in range(count)}

    asyncio.run(main())


def told(fd: int) -> bytes:
    return os.read(fd, 99)


def test_what_it_serves_is_had_again_as_often_as_asked_and_ends_with_the_vmm(run_dir: Path) -> None:
    reader, writer = os.pipe()
    other = os.open("/dev/null", os.O_RDONLY)

    async def main() -> None:
        asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        asked.bind(str(run_dir / shim.LINK_SOCKET))
        asked.listen(4)
        options = {
            "serve": {"pipe": writer, "null": other},
            "serve_socket": asked.fileno(),
            "unlink": [shim.LINK_SOCKET],
        }
        assert await shim.fetch(run_dir / "nothing") == {}
        async with started(run_dir, SLEEP, **options) as answer:
            os.close(writer)
            os.close(other)
            asked.close()
            # Who connects and never reads, or has gone before he is answered, is in nobody's way.
            idle = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(20)]
            for number, sock in enumerate(idle):
                sock.connect(str(run_dir / shim.LINK_SOCKET))
                if number % 2:
                    sock.close()
            for _ in range(3):
                had = await shim.fetch(run_dir)
                assert list(had) == ["pipe", "null"]
                assert os.readlink(f"/proc/self/fd/{had['null']}") == "/dev/null"
                assert not any(os.get_inheritable(fd) for fd in had.values())
                os.write(had["pipe"], b"hello")
                assert told(reader) == b"hello"
                for fd in had.values():
                    os.close(fd)
            names = [os.readlink(entry) for entry in Path(f"/proc/{answer.vmm_pid}/fd").iterdir()]
            assert len(names) == 3  # the VMM has none of it
            for sock in idle:
                sock.close()
            os.kill(answer.shim_pid, signal.SIGTERM)
            await ended(answer, run_dir)
        assert not (run_dir / shim.LINK_SOCKET).exists()
        assert await shim.fetch(run_dir) == {}

    asyncio.run(main())
    assert told(reader) == b""  # the last copy of the other end is closed
    os.close(reader)


@pytest.mark.skipif(not ROOT, reason="connecting as another user needs root")
def test_another_user_is_served_nothing(run_dir: Path) -> None:
    run_dir.chmod(0o755)

    async def main() -> None:
        asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        asked.bind(str(run_dir / shim.LINK_SOCKET))
        (run_dir / shim.LINK_SOCKET).chmod(0o666)
        asked.listen(4)
        with open("/dev/null") as null:
            options = {"serve": {"null": null.fileno()}, "serve_socket": asked.fileno()}
            async with started(run_dir, SLEEP, **options):
                asked.close()
                pid = os.fork()
                if pid == 0:
                    os.setresuid(65534, 65534, 65534)
                    os._exit(9 if asyncio.run(shim.fetch(run_dir)) else 0)
                assert os.waitpid(pid, 0)[1] == 0
                had = await shim.fetch(run_dir)
                os.close(had["null"])

    asyncio.run(main())
