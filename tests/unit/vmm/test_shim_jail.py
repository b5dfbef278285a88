"""The jail the shim makes, around a shell instead of a VMM: what is seen from outside, and from inside."""

import asyncio
import contextlib
import os
import shutil
import signal
import stat
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from llm4agents.errors import BootError
from llm4agents.vmm import shim, uids
from llm4agents.vmm.jail.closure import Closure, closure
from llm4agents.vmm.waiting import readable
from tests.shims import ROOT, USER, as_user, console, ended, run_dir, started, status_of

__all__ = ["run_dir"]
SHELL = os.path.realpath("/bin/sh")
BOUND = ["/var/own", "/dev/null"]
TOOLS = ["chmod", "cat", "ls", "mount", "unshare", "sleep", "nsenter", "chroot", "mknod", "dd", "ipcmk"]
NAMESPACES = ("mnt", "pid", "net", "ipc", "uts", "cgroup")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Closure]:
    cache = tmp_path_factory.mktemp("cache")
    paths = [Path(os.path.realpath(shutil.which(tool) or tool)) for tool in TOOLS]
    yield asyncio.run(closure(SHELL, cache, modules=paths, places=["/dev/null", "/etc/given", "/var/own/"]))
    for directory, _, _ in os.walk(cache):
        Path(directory).chmod(0o700)


@contextlib.asynccontextmanager
async def jailed(
    run_dir: Path, root: Closure, script: str, *binds: shim.Bind, **options: object
) -> AsyncIterator[shim.Started]:
    fd = os.open(root.path, os.O_PATH | os.O_DIRECTORY)
    jail = shim.Jail(fd, binds, user=not ROOT)
    path = ":".join(sorted({os.path.dirname(os.path.realpath(shutil.which(tool) or tool)) for tool in TOOLS}))
    try:
        env = {"PATH": path}
        async with started(run_dir, [SHELL, "-c", script], env=env, jail=jail, **options) as answer:
            yield answer
    finally:
        os.close(fd)


def of(pid: int | str, name: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{name}")


def test_seen_from_outside(run_dir: Path, root: Closure) -> None:
    async def main() -> None:
        null = os.open("/dev/null", os.O_PATH)
        memory = os.memfd_create("m")
        bind = shim.Bind(null, "/dev/null", read_only=False)
        async with jailed(run_dir, root, "echo up; exec sleep 99", bind, fds=[memory]) as answer:
            await console(run_dir, "up")
            pid = answer.vmm_pid
            assert not {name for name in NAMESPACES if of(pid, name) == of("self", name)}
            assert (of(pid, "user") == of("self", "user")) is ROOT
            status = status_of(pid)
            assert status["PPid"] == str(answer.shim_pid)
            assert (status["Seccomp"], status["NoNewPrivs"]) == ("2", "1")
            assert status["NSpid"].split()[-1] == "1"
            assert {status[name] for name in status if name.startswith("Cap")} == {"0" * 16}
            if ROOT:
                assert status["Uid"].split() == [str(uids.UID_BASE)] * 4
            said = answer.jail
            assert said["ns"] == ("" if ROOT else "user+") + "mnt+pid+net+ipc+uts+cgroup"
            assert (said["root"], said["proc"], said["seccomp"]) == ("pivot", "subset", "1")
            assert "landlock" in said or "no-landlock" in said
            # Nothing of the host is mounted in it but the root, what is bound, and a /proc.
            mounts = [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
            assert [fields[4] for fields in mounts] == ["/", "/proc", "/dev/null"]
            flags = [set(fields[5].split(",")) for fields in mounts]
            assert {"ro", "nosuid", "nodev"} <= flags[0]
            assert {"ro", "nosuid", "nodev", "noexec"} <= flags[1]
            assert {"rw", "nosuid", "noexec"} <= flags[2]
            links = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
            assert {link for link in links if not link.startswith("pipe:")} == {
                "/null",
                "/memfd:m (deleted)",
            }
            assert str(os.path.realpath(f"/proc/{pid}/root/{SHELL}")).endswith(SHELL)
            # Its memory is still to be had from outside.
            with open(f"/proc/{pid}/mem", "rb") as memory_of:
                start = int(Path(f"/proc/{pid}/maps").read_text().partition("-")[0], 16)
                memory_of.seek(start)
                assert memory_of.read(4) == b"\x7fELF"
        os.close(null)
        os.close(memory)

    asyncio.run(main())


def test_seen_from_inside(run_dir: Path, root: Closure) -> None:
    given = run_dir / "given"
    given.write_text("given\n")
    tries = {
        "write": "echo x > /x",
        "write a library": f"echo x > {SHELL}",
        "write what is bound": "echo x > /etc/given",
        "write proc": "echo 1 > /proc/1/oom_score_adj",
        "mount": "mount -t tmpfs none /proc",
        "remount": "mount -o remount,rw /",
        "user namespace": "unshare -U sleep 0",
        "net namespace": "unshare -n sleep 0",
        "join": "nsenter -t 1 -n sleep 0",
        "chroot": f"chroot / {SHELL} -c :",
        "device": "mknod /dev/mem c 1 1",
        "look around": "cat /proc/../etc/passwd",
        "kernel": "cat /proc/kallsyms",
        "memory of nobody": "ipcmk -M 4096",
        "messages of nobody": "ipcmk -Q",
    }
    script = "echo / $(ls /); echo proc $(ls /proc); cat /etc/given; cat < /dev/null && echo null;"
    script += "".join(f"({what}) 2> /dev/null && echo DONE {name};" for name, what in tries.items())
    script += "echo end"

    async def main() -> list[str]:
        fds = [os.open(path, os.O_PATH) for path in (given, "/dev/null")]
        binds = [shim.Bind(fds[0], "/etc/given"), shim.Bind(fds[1], "/dev/null", read_only=False)]
        async with jailed(run_dir, root, script, *binds) as answer:
            await ended(answer, run_dir)
        for fd in fds:
            os.close(fd)
        return shim.read_exit(run_dir).console_tail.splitlines()

    said = asyncio.run(main())

    assert said[-1] == "end"
    tops = sorted(entry.name for entry in root.path.iterdir())
    assert said[0] == "/ " + " ".join(tops)
    assert {"1", "self", "thread-self"} <= set(said[1].split()[1:])
    assert not {"meminfo", "kallsyms", "sys"} & set(said[1].split())
    assert said[2:] == ["given", "null", "end"]


def test_in_a_directory_that_is_its_own_it_keeps_files_and_nothing_else(run_dir: Path, root: Closure) -> None:
    own = run_dir / "own"
    own.mkdir()
    script = (
        f"cd /var/own; echo kept > a && cat a; cat {SHELL} > sh; (chmod 755 sh) 2> /dev/null || echo refused;"
        " (./sh -c :) 2> /dev/null || echo refused; (mknod e c 1 1) 2> /dev/null || echo refused; echo end"
    )

    async def main() -> list[str]:
        if ROOT:
            os.chown(own, uids.UID_BASE, uids.UID_BASE)
        fds = [os.open(path, os.O_PATH) for path in (own, "/dev/null")]
        binds = [shim.Bind(fd, path, read_only=False) for fd, path in zip(fds, BOUND, strict=True)]
        async with jailed(run_dir, root, script, *binds) as answer:
            await ended(answer, run_dir)
        for fd in fds:
            os.close(fd)
        return shim.read_exit(run_dir).console_tail.splitlines()

    assert asyncio.run(main()) == ["kept", "refused", "refused", "refused", "end"]
    assert (own / "a").read_text() == "kept\n"


def test_killing_the_shim_ends_all_of_it(run_dir: Path, root: Closure) -> None:
    async def main() -> None:
        async with jailed(run_dir, root, "sleep 98 & echo up; sleep 99") as answer:
            await console(run_dir, "up")
            children = Path(f"/proc/{answer.vmm_pid}/task/{answer.vmm_pid}/children").read_text().split()
            fds = [os.pidfd_open(int(pid)) for pid in (answer.vmm_pid, *children)]
            os.kill(answer.shim_pid, signal.SIGKILL)
            for fd in fds:
                await asyncio.wait_for(readable(fd), 10)
                os.close(fd)

    asyncio.run(main())


def test_it_stands_still_and_goes_on_like_any_other(run_dir: Path, root: Closure) -> None:
    """It is the first of its pid namespace, to which not every signal gets."""

    async def main() -> None:
        async with jailed(run_dir, root, "echo up; exec sleep 99") as answer:
            await console(run_dir, "up")
            os.kill(answer.vmm_pid, signal.SIGSTOP)
            async with asyncio.timeout(10):
                while status_of(answer.vmm_pid)["State"][0] != "T":
                    await asyncio.sleep(0.005)
            os.kill(answer.vmm_pid, signal.SIGCONT)
            os.kill(answer.shim_pid, signal.SIGTERM)
            assert (await ended(answer, run_dir))["reason"] == "stopped"

    asyncio.run(main())


def test_what_is_not_in_the_root_is_not_executed(run_dir: Path, root: Closure) -> None:
    async def main() -> None:
        fd = os.open(root.path, os.O_PATH)
        try:
            async with started(run_dir, ["/bin/no-such"], jail=shim.Jail(fd, user=not ROOT)):
                raise AssertionError
        finally:
            os.close(fd)

    with pytest.raises(BootError, match="executing /bin/no-such: No such file"):
        asyncio.run(main())


def test_a_closure_is_read_only_and_made_once(tmp_path: Path) -> None:
    async def several() -> set[Closure]:
        return set(await asyncio.gather(*(closure(SHELL, tmp_path, places=["/dev/x"]) for _ in range(4))))

    (made,) = asyncio.run(several())
    assert [entry.name for entry in (tmp_path / "jail").iterdir()] == [made.digest]
    assert (made.path / SHELL.lstrip("/")).read_bytes() == Path(SHELL).read_bytes()
    for directory, names, files in os.walk(made.path):
        for entry in (Path(directory), *(Path(directory, name) for name in (*names, *files))):
            assert entry.lstat().st_mode & 0o222 == 0
    assert stat.S_ISREG((made.path / "dev/x").stat().st_mode)
    again = asyncio.run(closure(SHELL, tmp_path))
    assert again.digest != made.digest
    with tempfile.TemporaryDirectory():
        for directory, _, _ in os.walk(tmp_path):
            Path(directory).chmod(0o700)


@pytest.mark.skipif(not ROOT, reason="the other tests run as an ordinary user already")
@pytest.mark.parametrize("chrooted", [False, True])
def test_as_an_ordinary_user(chrooted: bool) -> None:
    """Through a user namespace; where the kernel allows none, with what needs none."""
    with tempfile.TemporaryDirectory(prefix="l4a-user-") as path:
        home = Path(path)
        secret, given = home / "secret", home / "given"
        secret.write_text("of another program\n")
        given.write_text("given\n")
        script = f"cat {secret}; cat /etc/given; echo x > {home}/made; echo x > /dev/null; unshare -n sleep 0"
        script += f" || echo refused; ls {home}; echo up; exec sleep 99"

        async def main() -> None:
            tools = [Path(os.path.realpath(shutil.which(tool) or tool)) for tool in TOOLS]
            made = await closure(SHELL, home / "cache", modules=tools, places=["/etc/given"])
            run_dir, fd = home / "run", os.open(made.path, os.O_PATH)
            run_dir.mkdir(mode=0o700)
            bind = shim.Bind(os.open(given, os.O_PATH), "/etc/given")
            launch = shim.Launch(
                argv=[SHELL, "-c", script],
                env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
                fds=[],
                run_dir=run_dir,
                rlimits={"core": 0},
                jail=shim.Jail(fd, [bind], user=True),
            )
            answer = await shim.start(launch)
            await console(run_dir, "up")
            said, status = answer.jail, status_of(answer.vmm_pid)
            assert status["Uid"].split() == [str(USER)] * 4
            assert (status["Seccomp"], status["NoNewPrivs"], status["CapEff"]) == ("2", "1", "0" * 16)
            lines = shim.console_tail(run_dir).splitlines()
            if chrooted:
                assert (said["no-ns"], said["seccomp"]) == ("Operation_not_permitted", "1")
                # Its root is ours: landlock is what is between it and its user's files.
                assert ("refused" in lines, "landlock" in said) == (True, lines == ["refused", "up"])
            else:
                assert said["ns"] == "user+mnt+pid+net+ipc+uts+cgroup"
                assert (said["root"], said["proc"]) == ("pivot", "subset")
                assert lines == ["given", "refused", "up"]
                assert not {
                    name for name in (*NAMESPACES, "user") if of(answer.vmm_pid, name) == of("self", name)
                }
            # Its memory is to be had by who started it, and by who owns its user namespace: as a pause needs it.
            assert os.open(f"/proc/{answer.vmm_pid}/mem", os.O_RDONLY) > 0
            os.kill(answer.shim_pid, signal.SIGTERM)
            os.waitpid(answer.shim_pid, 0)
            assert shim.read_exit(run_dir).reason == "stopped"
            for directory, _, _ in os.walk(home / "cache"):
                Path(directory).chmod(0o700)

        as_user(home, main, chrooted=chrooted)
        assert not (home / "made").exists()
