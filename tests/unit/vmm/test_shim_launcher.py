"""The shim around a VMM's own jailer: what that is given, and that nothing of it outlives the shim."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from llm4agents.errors import BootError
from llm4agents.vmm import shim, uids
from llm4agents.vmm.waiting import readable
from tests.shims import ROOT, console, ended, run_dir, started, status_of

__all__ = ["run_dir"]
pytestmark = pytest.mark.skipif(not ROOT, reason="a jailer runs as root")
JAILED = ["/usr/bin/setpriv", f"--reuid={uids.UID_BASE}", f"--regid={uids.UID_BASE}", "--clear-groups"]
"""As a jailer does last: a change of credentials, and the VMM in the same process."""


def launch(*binds: shim.Bind) -> dict[str, object]:
    return {"uid": None, "gid": None, "launcher": shim.Launcher(binds=binds)}


async def gone(pid: int) -> None:
    fd = os.pidfd_open(pid)
    try:
        await asyncio.wait_for(readable(fd), 10)
    finally:
        os.close(fd)


def first_of(shim_pid: int, vmm_pid: int) -> int:
    """The shim's other child."""
    children = Path(f"/proc/{shim_pid}/task/{shim_pid}/children").read_text().split()
    (other,) = {int(pid) for pid in children} - {vmm_pid}
    return other


def namespace(pid: int | str, name: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{name}")


def test_a_jailer_has_every_right_and_what_it_becomes_is_the_shims_child(run_dir: Path) -> None:
    script = "grep -E 'CapEff|NoNewPrivs|NSpid' /proc/self/status; echo up; exec \"$@\""
    argv = ["/bin/sh", "-c", script, "-", *JAILED, "/bin/sleep", "100"]

    async def main() -> None:
        async with started(run_dir, argv, **launch()) as answer:
            await console(run_dir, "up")
            said = dict(line.split(":\t") for line in shim.console_tail(run_dir).splitlines()[:-1])
            assert said["CapEff"] == status_of("self")["CapEff"]
            assert said["NoNewPrivs"] == "0"
            while status_of(answer.vmm_pid)["Name"] != "sleep":
                await asyncio.sleep(0.005)
            status = status_of(answer.vmm_pid)
            assert status["PPid"] == str(answer.shim_pid)
            assert status["Uid"].split() == [str(uids.UID_BASE)] * 4
            for kind in ("pid", "mnt", "ipc", "uts", "cgroup"):
                assert namespace(answer.vmm_pid, kind) != namespace("self", kind)
            first = first_of(answer.shim_pid, answer.vmm_pid)
            assert namespace(first, "pid") == namespace(answer.vmm_pid, "pid")
            of_first = status_of(first)
            assert (of_first["NSpid"].split()[-1], of_first["CapEff"]) == ("1", "0" * 16)
            held = {os.readlink(entry) for entry in Path(f"/proc/{first}/fd").iterdir()}
            assert held == {"/dev/null"}
            # It is no shim of a machine, to who looks for those.
            assert list(shim.running(run_dir.parent)) == [answer.shim_pid]
            os.kill(answer.shim_pid, signal.SIGTERM)
            assert (await ended(answer, run_dir))["reason"] == "stopped"

    asyncio.run(main())


@pytest.mark.parametrize("killed", ["shim", "first"])
def test_all_of_it_ends_with_the_shim_or_with_its_first_process(run_dir: Path, killed: str) -> None:
    # `setpriv` has cleared the parent-death signal of the VMM; of what it left behind nobody is the parent any more.
    argv = [*JAILED, "/bin/sh", "-c", "(sleep 100 & echo child); sleep 1000"]

    async def main() -> None:
        async with started(run_dir, argv, **launch()) as answer:
            await console(run_dir, "child")
            first = first_of(answer.shim_pid, answer.vmm_pid)
            members = [
                int(entry.name)
                for entry in Path("/proc").iterdir()
                if entry.name.isdigit() and same_namespace(entry, first)
            ]
            assert len(members) >= 3
            os.kill(answer.shim_pid if killed == "shim" else first, signal.SIGKILL)
            for pid in members:
                try:
                    await gone(pid)
                except ProcessLookupError:
                    continue

    def same_namespace(entry: Path, first: int) -> bool:
        try:
            return os.readlink(entry / "ns/pid") == namespace(first, "pid")
        except OSError:
            return False

    asyncio.run(main())


def test_what_a_vmm_leaves_behind_ends_with_it(run_dir: Path) -> None:
    async def main() -> None:
        argv = [*JAILED, "/bin/sh", "-c", "sleep 1000 & echo up; read line <&3"]
        reader, writer = os.pipe()
        async with started(run_dir, argv, fds=[reader], **launch()) as answer:
            os.close(reader)
            await console(run_dir, "up")
            children = Path(f"/proc/{answer.vmm_pid}/task/{answer.vmm_pid}/children").read_text().split()
            fds = [os.pidfd_open(int(pid)) for pid in children]
            os.close(writer)
            assert (await ended(answer, run_dir))["reason"] == "exited"
            for fd in fds:
                await asyncio.wait_for(readable(fd), 10)
                os.close(fd)

    asyncio.run(main())


def test_binds_are_seen_by_the_jailer_alone(run_dir: Path) -> None:
    source, target = run_dir / "source", run_dir / "target"
    (run_dir / "dir").mkdir()
    source.write_text("of the host\n")
    target.touch()
    tries = f"cat {target}; echo x > {target}; echo y > {run_dir}/dir/made"
    script = f"{tries}; grep {run_dir} /proc/self/mountinfo; echo up; exec sleep 99"

    async def main() -> str:
        files = [os.open(path, os.O_PATH) for path in (source, run_dir)]
        binds = [shim.Bind(files[0], str(target)), shim.Bind(files[1], str(run_dir / "dir"), read_only=False)]
        async with started(run_dir, ["/bin/sh", "-c", script], **launch(*binds)):
            await console(run_dir, "up")
        for fd in files:
            os.close(fd)
        return shim.read_exit(run_dir).console_tail

    said = asyncio.run(main())
    assert said.startswith("of the host\n")
    mounts = {line.split()[4]: line.split()[5] for line in said.splitlines() if str(run_dir) in line}
    assert {"ro", "nosuid", "nodev", "noexec"} <= set(mounts[str(target)].split(","))
    assert {"rw", "nosuid", "noexec"} <= set(mounts[str(run_dir / "dir")].split(","))
    assert source.read_text() == "of the host\n"
    assert target.read_text() == ""
    assert (run_dir / "made").read_text() == "y\n"
    assert str(target) not in Path("/proc/self/mountinfo").read_text()


@pytest.mark.parametrize("path", ["/nowhere", "link", "kept"])
def test_a_bind_that_cannot_be_made_says_which(run_dir: Path, path: str) -> None:
    (run_dir / "link").symlink_to("/etc/passwd")
    (run_dir / "kept").mkdir()  # a directory cannot take a file

    async def main() -> None:
        with Path("/bin/true").open("rb") as file:
            binds = launch(shim.Bind(file.fileno(), str(run_dir / path)))
            async with started(run_dir, ["/bin/true"], **binds):
                raise AssertionError

    with pytest.raises(BootError, match=f"binding {run_dir / path}: "):
        asyncio.run(main())
    assert not list(shim.running(run_dir.parent))
