"""Images people bring, in machines: one of static programs and nothing else, and a Debian whose init is systemd."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from llm4agents import Sandbox, Template
from llm4agents.barrier.ca import Authority
from llm4agents.config import settings
from llm4agents.errors import InvalidRequestError, LLM4AgentsError
from llm4agents.guest.verbs import Agent, Service
from llm4agents.images import debian
from llm4agents.images.cache import Cache
from llm4agents.images.oci import OciRootfs, rootfs
from tests.oci.machines import run, visit
from tests.oci.make import Entry, Layout, folder, hard, layer, link
from tests.support import Node, sdk_of

pytestmark = [pytest.mark.vm, pytest.mark.filterwarnings("ignore::llm4agents.EmulationWarning")]

_HELLO = """
.globl _start
_start: mov $1, %eax; mov $1, %edi; lea text(%rip), %rsi; mov $6, %edx; syscall
        mov $60, %eax; mov $7, %edi; syscall
text:   .ascii "hello\\n"
"""
_READER = """
.globl _start
_start: mov $2, %eax; lea path(%rip), %rdi; xor %esi, %esi; syscall
        mov $1, %edi; test %eax, %eax; js end; mov %eax, %edi
        sub $64, %rsp; mov %rsp, %rsi; mov $64, %edx; xor %eax, %eax; syscall
        mov %eax, %edx; mov %rsp, %rsi; mov $1, %edi; mov $1, %eax; syscall
        xor %edi, %edi
end:    mov $60, %eax; syscall
path:   .asciz "/secret"
"""
_MAY_READ_ALL = struct.pack("<IIIII", 0x02000001, 1 << 1, 0, 0, 0).decode("latin-1")
"""security.capability: CAP_DAC_OVERRIDE, permitted and effective."""


@pytest.fixture
def home() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix=f"l4a-{os.getpid()}-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def made(image: str) -> OciRootfs:
    authority = Authority.open(settings().ca_directory).certificate_pem
    return asyncio.run(rootfs(image, Cache(settings().cache), authority=authority))


def program(source: str, home: Path) -> bytes:
    """A static ELF without a libc."""
    out = home / "a"
    subprocess.run(["as", "-o", f"{out}.o", "-"], input=source.encode(), check=True)
    subprocess.run(["ld", "-static", "-o", str(out), f"{out}.o"], check=True)
    return out.read_bytes()


async def said(
    agent: Agent, *argv: str, user: str | int = "user", **more: object
) -> tuple[int | None, bytes]:
    process = await agent.exec(list(argv), user=user, timeout_s=60, **more)  # type: ignore[arg-type]
    text = b""
    async for _, data in process:
        text += bytes(data)
    return (await process.wait()).exit_code, text


def test_an_image_of_static_programs_alone(home: Path) -> None:
    hello, reader, big = program(_HELLO, home), program(_READER, home), os.urandom(300_000)
    below = layer(
        Entry("hello", hello, mode=0o755),
        Entry("reader", reader, mode=0o755),
        Entry("may-read", reader, mode=0o755, records={"SCHILY.xattr.security.capability": _MAY_READ_ALL}),
        Entry("set-uid", reader, mode=0o4755),
        Entry("secret", b"only root's\n", mode=0o600),
        folder("data", 0o750, uid=1000, gid=1000),
        Entry("data/big", big, uid=1000),
        Entry("data/gone", b"x"),
        folder("old"),
        Entry("old/x"),
    )
    above = layer(
        Entry("data/.wh.gone"),
        Entry("old/.wh..wh..opq"),
        Entry("old/new", b"new"),
        hard("data/same", "data/big"),
        link("outside", "/../../../data/big"),
    )
    config = {
        "Entrypoint": ["/hello"],
        "Env": ["A=b"],
        "WorkingDir": "/data/work",
        "ExposedPorts": {"80/tcp": {}},
    }
    image = made(Layout(home / "layout").image(below, above, config=config))
    assert image.config.argv == ("/hello",) and image.config.shell is None and image.config.ports == (80,)

    async def look(agent: Agent) -> None:
        for user in ("user", "root", 4242):
            assert await said(agent, "/hello", user=user) == (7, b"hello\n")
        assert await said(agent, "/hello", user="root", cwd=image.config.workdir) == (7, b"hello\n")
        with pytest.raises(InvalidRequestError, match="sh"):
            await said(agent, "/bin/sh", "-c", "true")
        # Owners, modes and capabilities are those of the layers.
        assert await said(agent, "/reader") == (1, b"")
        assert await said(agent, "/may-read") == (0, b"only root's\n")
        assert await said(agent, "/set-uid") == (0, b"only root's\n")
        # Bytes: of many blocks, through a hard link and through a link that leads out and stays in.
        for path in ("/data/big", "/data/same", "/outside"):
            content = b""
            async for piece in await agent.read(path, user="root"):
                content += bytes(piece)
            assert content == big
        entries = {entry.name for entry in (await agent.list("/data", user="root")).entries}
        assert entries == {"big", "same", "work"}
        assert {entry.name for entry in (await agent.list("/old", user="root")).entries} == {"new"}
        found = await agent.stat("/home/user", user="user")
        assert (found.uid, found.user) == (1000, "user")
        await agent.write("/home/user/f", b"mine", user="user")
        assert (await agent.stat("/home/user/f", user="user")).size == 4

    visit(image.path, home, look)


async def _debian(home: Path) -> Path:
    """The tar of a small Debian with systemd, of the host's release and sources."""
    here = debian.host()
    sources = [source for source in await debian.sources(here, home) if source.suite == here.codename]
    argv = [
        *("mmdebstrap", "--quiet", "--variant=essential", "--include=systemd-sysv", "--skip=output/dev"),
        *('--aptopt=APT::Install-Recommends "0";', "--dpkgopt=force-unsafe-io"),
        *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale", "info")),
        *(f"--aptopt={line}" for line in await debian.apt_options(home)),
        *(here.codename, str(home / "debian.tar"), *(source.line() for source in sources)),
    ]
    await debian.run(argv, cwd=home, env={"TMPDIR": str(home)} if os.geteuid() == 0 else {})
    return home / "debian.tar"


async def first(agent: Agent) -> str:
    """Process 1 as commands see it; nothing while an init ends, in whose namespace nothing starts any more."""
    with contextlib.suppress(LLM4AgentsError):
        return (await said(agent, "cat", "/proc/1/comm", user="root"))[1].decode().strip()
    return ""


@pytest.fixture(scope="module")
def systemd(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image of a Debian with a unit of ours, as an OCI layout."""
    home = tmp_path_factory.mktemp("debian")
    tar = asyncio.run(_debian(home))
    unit = "[Service]\nExecStart=/bin/sh -c 'cat /proc/self/cgroup > /run/tick; exec sleep infinity'\n"
    ours = layer(
        Entry("etc/systemd/system/tick.service", unit.encode()),
        link("etc/systemd/system/multi-user.target.wants/tick.service", "/etc/systemd/system/tick.service"),
        # No login prompts: nobody is there to log in.
        link("etc/systemd/system/console-getty.service", "/dev/null"),
        link("etc/systemd/system/getty.target", "/dev/null"),
    )
    return Layout(home / "layout").image(tar.read_bytes(), ours, how="tar", config={"Cmd": ["/sbin/init"]})


def test_a_debian_whose_init_is_systemd(home: Path, systemd: str) -> None:
    """It is an ordinary image until its init is started, which then has a PID namespace and a cgroup of its own."""
    image = made(systemd)
    assert image.config.systemd and image.config.shell == "/bin/bash"
    assert "systemd" in dict(image.packages) and not image.notes

    async def look(agent: Agent) -> None:
        assert await run(agent, "/bin/bash", "-c", "id -un; cd; pwd", user="user") == "user\n/home/user"
        assert "install ok installed" in await run(agent, "dpkg", "-s", "systemd")
        assert await run(agent, "cat", "/proc/1/comm") == "init"
        with pytest.raises(InvalidRequestError, match="for root"):
            await agent.exec(["/sbin/init"], user="user", init=True)
        await agent.exec(["/sbin/init"], user="root", service=Service("init"), init=True)
        wait = "until [ -S /run/systemd/private ]; do sleep 0.1; done; systemctl is-system-running --wait"
        assert await run(agent, "/bin/sh", "-c", wait) == "running"
        # What is run from now on is among its processes; the machine's own process 1 is out of sight.
        assert await run(agent, "cat", "/proc/1/comm", user="user") == "systemd"
        assert await run(agent, "systemctl", "is-active", "tick") == "active"
        assert await run(agent, "cat", "/run/tick") == "0::/system.slice/tick.service"
        assert "tick.service" in await run(agent, "journalctl", "-b", "--no-pager", "-u", "tick")
        await run(agent, "systemctl", "stop", "tick")
        outside = await agent.exec(["cat", "/proc/1/comm"], user="root", inside=False)
        assert [bytes(data) async for _, data in outside] == [b"init\n"]
        # With its end everything in it ends, and commands see the machine again.
        await said(agent, "/bin/sh", "-c", "systemctl poweroff --force --force", user="root")
        async with asyncio.timeout(60):
            while await first(agent) != "init":
                await asyncio.sleep(0.05)

    visit(image.path, home, look, memory_mib=384)


def test_a_template_whose_systemd_runs_already(shared_node: Node, systemd: str) -> None:
    """Frozen with its units up; clones go on with it, also after a pause."""
    node = shared_node
    recipe = Template().from_image(systemd).size(memory_mib=384).network([]).run("echo built > /etc/built")
    ready = "[ -S /run/systemd/private ] && systemctl is-system-running --wait"
    try:
        with sdk_of(node):
            recipe.start(ready=ready).build("t-systemd")
            with Sandbox(template="t-systemd") as sandbox:
                for _ in range(2):
                    done = sandbox.exec(
                        "systemctl is-active tick; cat /proc/1/comm /etc/built /run/tick", user="root"
                    )
                    assert done.stdout.split() == [
                        "active",
                        "systemd",
                        "built",
                        "0::/system.slice/tick.service",
                    ]
                    sandbox.pause()
                    sandbox.resume()
                assert (
                    sandbox.exec("systemctl restart tick; systemctl is-system-running", user="root").stdout
                    == "running\n"
                )
    finally:
        node.http.delete("/v1/templates/t-systemd")
