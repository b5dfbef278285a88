"""The real parts: kernel, initramfs and root file systems of both templates, booted, and looked at from inside.

What needs no machine is in tests/unit/images.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from llm4agents import binaries, limits
from llm4agents.barrier.ca import Authority
from llm4agents.config import settings
from llm4agents.engine import contact, templates
from llm4agents.guest.verbs import Agent
from llm4agents.images import disk, spec
from llm4agents.images.cache import Cache
from llm4agents.images.initramfs import build_initrd
from llm4agents.images.kernel import build_kernel
from llm4agents.images.overlay import EPOCH
from llm4agents.images.rootfs import Rootfs, build_rootfs
from llm4agents.images.trust import host_certificates
from llm4agents.vmm.base import Disk, MachineSpec, Placement
from llm4agents.vmm.qemu.driver import QemuDriver
from tests.support import eventually

pytestmark = pytest.mark.vm

Visit = Callable[[Agent], Awaitable[None]]


@pytest.fixture
def home() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix=f"l4a-images-{os.getpid()}-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


async def parts(name: str) -> tuple[MachineSpec, Rootfs]:
    cache = Cache(settings().cache)
    # That of the tests' servers: their templates' root file systems, built once for all.
    authority = Authority.open(settings().ca_directory).certificate_pem
    async with cache.building():
        kernel = await build_kernel(cache)
        initrd = build_initrd(kernel, binaries.path(binaries.AGENT), cache)
        rootfs = await build_rootfs(spec.get(name), cache, authority=authority)
    return MachineSpec(1, 1024, kernel.vmlinux, initrd.path, (), kernel_release=kernel.release), rootfs


def visit(name: str, home: Path, visitor: Visit) -> float:
    """Cold boot `name`, let `visitor` look around; returns how long the boot took, in seconds."""

    async def main() -> float:
        machine_spec, rootfs = await parts(name)
        await disk.make_upper(home / "upper.raw", limits.DISK_GIB << 30)
        disks = (Disk("root", rootfs.path, "raw", True), Disk("upper", home / "upper.raw", "raw", False))
        whole = MachineSpec(
            1,
            1024,
            machine_spec.kernel,
            machine_spec.initrd,
            disks,
            kernel_release=machine_spec.kernel_release,
        )
        run_dir = home / "run"
        run_dir.mkdir(mode=0o700)
        began = time.monotonic()
        machine = await QemuDriver(settings()).boot(
            whole, Placement(f"images-{os.getpid()}", run_dir, time.time() + 600)
        )
        try:
            agent = await contact.greet(machine, timeout=limits.BOOT_TIMEOUT_S)
            took = time.monotonic() - began
            await agent.set_env(dict(spec.get(name).environment))
            await visitor(agent)
            return took
        finally:
            await machine.stop()

    return asyncio.run(main())


async def sh(agent: Agent, script: str, *, user: str = "user", timeout_s: float = 120) -> str:
    process = await agent.exec(["/bin/bash", "-c", script], user=user, timeout_s=timeout_s)
    said = b""
    async for _, data in process:
        said += bytes(data)
    text = said.decode(errors="replace").strip()
    status = await process.wait()
    assert status.exit_code == 0, f"{script}: {status}: {text}"
    return text


def test_base_is_a_small_debian(home: Path) -> None:
    async def look(agent: Agent) -> None:
        assert (
            await sh(agent, "id; echo $HOME $SHELL")
            == "uid=1000(user) gid=1000(user) groups=1000(user)\n/home/user /bin/bash"
        )
        assert await sh(agent, "touch ~/x && stat -c %U ~/x") == "user"
        assert await sh(agent, "locale charmap") == "UTF-8"
        assert "git version" in await sh(
            agent, "git --version && curl --version && nano --version && less --version"
        )
        assert "nameserver 198.19.255.1" in await sh(agent, "cat /etc/resolv.conf")
        assert await sh(agent, "ls /sys/class/net") == "eth0\nlo"
        assert await sh(agent, "ls /sys/bus/virtio/drivers/virtio_net | grep -c virtio") == "1"
        assert "overlay / overlay rw" in await sh(agent, "grep ' / ' /proc/mounts")
        # apt: sources there, lists not, works on what is installed.
        assert "deb " in await sh(agent, "cat /etc/apt/sources.list")
        assert await sh(agent, "find /var/lib/apt/lists -type f ! -name lock | wc -l", user="root") == "0"
        assert "bash" in await sh(agent, "apt-cache policy bash | head -1; dpkg --audit", user="root")
        assert "no packages found" not in await sh(agent, "dpkg -S /bin/bash")
        # No documentation but the licences; every file has one time.
        assert int(await sh(agent, "ls /usr/share/man /usr/share/locale 2>/dev/null | wc -l")) < 12
        assert await sh(agent, "find /usr/share/doc -type f ! -name copyright | wc -l") == "0"
        assert await sh(agent, "stat -c %Y /usr/bin/git") == str(EPOCH)
        if certificates := host_certificates():
            name = next(iter(certificates))
            await sh(agent, f"test -e /usr/local/share/ca-certificates/{name}")
            tail = certificates[name].strip().splitlines()[-2].decode()
            await sh(agent, f"grep -qF '{tail}' /etc/ssl/certs/ca-certificates.crt")

    took = visit("base", home, look)
    assert took < limits.BOOT_TIMEOUT_S


LIBRARIES = [
    *("numpy", "pandas", "matplotlib", "scipy", "openpyxl", "pyarrow", "requests", "sqlalchemy", "psycopg"),
    *("pymysql", "duckdb", "IPython", "PIL", "lxml"),
]
USE = """
import io, importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
import duckdb, numpy as np, pandas as pd, pyarrow.parquet as pq, scipy.stats, sqlalchemy as sa, openpyxl
frame = pd.DataFrame({"a": np.arange(5), "b": list("xyzxy")})
assert duckdb.sql("select sum(a) from frame").fetchall() == [(10,)]
engine = sa.create_engine("sqlite://")
frame.to_sql("t", engine, index=False)
assert pd.read_sql("select count(*) n from t", engine).n[0] == 5
buffer = io.BytesIO(); frame.to_parquet(buffer); assert len(pd.read_parquet(buffer)) == 5
buffer = io.BytesIO(); frame.to_excel(buffer); assert len(pd.read_excel(buffer)) == 5
assert abs(scipy.stats.norm.cdf(0) - 0.5) < 1e-9
for url in ("postgresql+psycopg://h/d", "mysql+pymysql://h/d"):
    assert sa.create_engine(url).dialect.dbapi
import matplotlib.pyplot as plt
plt.plot([1, 2]); buffer = io.BytesIO(); plt.savefig(buffer); assert buffer.getvalue()[:4] == b"\\x89PNG"
print("fine", sys.version_info[:2])
"""


def test_python_has_what_it_says_and_warms_up(home: Path) -> None:
    async def look(agent: Agent) -> None:
        await agent.write("/tmp/use.py", USE.encode())
        said = await sh(agent, f"python3 /tmp/use.py {' '.join(LIBRARIES)}", timeout_s=300)
        assert said.startswith("fine")
        assert "pip" in await sh(agent, "pip --version && ipython --version", timeout_s=120)
        # Nothing was compiled again: all byte code of the image is valid as it is.
        found = await sh(
            agent, "find / -xdev -name '*.pyc' -newer /etc/hostname 2>/dev/null | grep -v ^/proc | wc -l"
        )
        assert found == "0"
        await templates.warm_up(agent, spec.get("python"))
        assert json.loads(await sh(agent, f"cat {spec.PYTHON_READY}")) == {"problems": []}

    visit("python", home, look)


def test_a_template_states_what_it_contains() -> None:
    _, rootfs = asyncio.run(parts("python"))
    have = {(item.kind, item.name.lower()): item for item in rootfs.contents}
    for name in ("numpy", "pandas", "ipython", "sqlalchemy"):
        assert have["python", name].version and have["python", name].licence
    assert have["debian", "bash"].licence
    silent = [item.name for item in rootfs.contents if item.licence is None]
    assert len(silent) < len(rootfs.contents) / 4, silent


def test_equal_inputs_make_an_equal_image(home: Path) -> None:
    """base twice, in caches of their own: the digest that everything is keyed by does not depend on the hour.

    One input is drawn and not computed, the salt of NSS's data bases, so the second cache is given the first's.
    """

    async def build(cache: Cache) -> str:
        return (await build_rootfs(spec.BASE, cache)).digest

    first, second = Cache(home / "a"), Cache(home / "b")
    digests = {asyncio.run(build(first))}
    if (first.index / "nss").exists():
        shutil.copytree(first.index / "nss", second.index / "nss")
        for line in (first.index / "nss").iterdir():
            for digest in json.loads(line.read_text()).values():
                second.ingest_bytes(first.blob_path(digest).read_bytes())
    digests.add(asyncio.run(build(second)))
    assert len(digests) == 1


def test_a_killed_build_leaves_nothing_and_no_process(home: Path) -> None:
    code = (
        "import asyncio, sys; from pathlib import Path\n"
        "from llm4agents.images import spec; from llm4agents.images.cache import Cache\n"
        "from llm4agents.images.rootfs import build_rootfs\n"
        "asyncio.run(build_rootfs(spec.BASE, Cache(Path(sys.argv[1])), lambda s, d, f: print(d, flush=True)))"
    )
    cache = Cache(home / "cache")
    with subprocess.Popen(
        [sys.executable, "-c", code, str(cache.root)], stdout=subprocess.PIPE, text=True
    ) as builder:
        assert builder.stdout
        for line in builder.stdout:
            if line.startswith("Unpacking"):
                builder.kill()
                break

    def users() -> list[str]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(cache.root) in text:
                found.append(text)
        return found

    eventually(lambda: not users(), 30)
    cache.sweep()
    assert list(cache.tmp.iterdir()) == []
    # What it had finished by then is kept (browsers' data bases, where the host makes them); no image is.
    kept = (
        {path.parent.name for path in cache.index.rglob("*") if path.is_file()}
        if cache.index.exists()
        else set()
    )
    assert kept <= {"nss"}
    assert sum(path.stat().st_size for path in cache.blobs.rglob("*") if path.is_file()) < 1_000_000
