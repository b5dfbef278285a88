"""The package as its user gets it: a wheel, installed outside the checkout, doing the main job, phoning nobody.

The wheel is built from this checkout and installed with its locked dependencies into a venv of its own. State and
sockets are this file's own; templates are the cache's of whoever runs the tests: since the wheel carries the very
binaries the checkout uses, it must find the checkout's templates and build none.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from llm4agents import __version__, binaries, config, limits

pytestmark = pytest.mark.vm

ROOT = Path(__file__).resolve().parents[2]
MAIN_JOB = ("run", "-c", "print(6*7)")
# Put first on PYTHONPATH: says of each interpreter that it is watched, and what it tried with the network.
WATCH = """
import os, socket, sys
_log = os.open(os.environ["WATCH_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
def _say(*words):
    os.write(_log, (" ".join(map(str, words)) + chr(10)).encode())
def _hook(event, args):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.bind"):
        if args[0].family not in (socket.AF_UNIX, socket.AF_NETLINK):
            _say("tried", event, args[1:])
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.getnameinfo"):
        _say("tried", event, args)
sys.addaudithook(_hook)
_say("watched", *sys.orig_argv)
"""


@dataclass(frozen=True)
class Installed:
    wheel: Path
    bin: Path
    env: dict[str, str]

    def cli(self, *args: str, prefix: tuple[str, ...] = (), **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*prefix, str(self.bin / "llm4agents"), *args],
            env={**self.env, **env},
            cwd=self.env["HOME"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=900,
        )


def checked(command: list[str], env: dict[str, str], cwd: Path) -> None:
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"


@pytest.fixture(scope="module")
def installed() -> Iterator[Installed]:
    top = Path(tempfile.mkdtemp(prefix=f"l4a-pkg-{os.getpid()}-"))
    home = top / "home"
    home.mkdir()
    outer = {
        k: v for k, v in os.environ.items() if not k.startswith(("LLM4AGENTS_", "PYTHON", "VIRTUAL_ENV"))
    }
    cache = str(config.settings().cache)
    try:
        build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(top), str(ROOT)]
        checked(build, {**outer, "LLM4AGENTS_CACHE": cache}, ROOT)
        (wheel,) = top.glob("*.whl")
        venv = top / "venv"
        checked([sys.executable, "-m", "venv", str(venv)], outer, home)
        install = ["-m", "pip", "install", "-q", "--only-binary=:all:", str(wheel), "-c", str(_pins(top))]
        checked([str(venv / "bin" / "python"), *install], outer, home)
        env = {
            **outer,
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "LLM4AGENTS_CACHE": cache,
            "LLM4AGENTS_CA": str(config.settings().ca_directory),
            "LLM4AGENTS_STATE": str(top / "s"),
            "LLM4AGENTS_RUN": str(top / "r"),
        }
        here = Installed(wheel, venv / "bin", env)
        yield here
        assert here.cli("server", "stop").returncode == 0
        assert not list((top / "r" / "vm").glob("*")), "a stopped server leaves no VM"
    finally:
        shutil.rmtree(top, ignore_errors=True)


def _pins(top: Path) -> Path:
    """The lock file as constraints: pip wants no hashes next to a wheel that has none."""
    pins = top / "pins.txt"
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins.write_text("".join(line.split(" \\")[0] + "\n" for line in lines if line and line[0] not in " #"))
    return pins


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_the_wheel_holds_the_package_and_both_binaries_and_nothing_else(installed: Installed) -> None:
    assert installed.wheel.name == f"llm4agents-{__version__}-py3-none-manylinux_2_17_x86_64.whl"
    source = ROOT / "src"
    package = {
        str(path.relative_to(source))
        for path in (source / "llm4agents").rglob("*")
        if path.is_file() and not {"__pycache__", "_bin"} & set(path.parts)
    }
    with zipfile.ZipFile(installed.wheel) as wheel:
        names = set(wheel.namelist())
        metadata = {name for name in names if ".dist-info/" in name}
        assert names - metadata == package | {
            f"llm4agents/_bin/{binary}" for binary in (binaries.AGENT, binaries.SHIM)
        }
        assert {name.split("/", 1)[1] for name in metadata} == {
            "METADATA",
            "WHEEL",
            "RECORD",
            "entry_points.txt",
            "licenses/LICENSE",
            "licenses/NOTICE",
        }
        for binary in (binaries.AGENT, binaries.SHIM):
            carried = wheel.read(f"llm4agents/_bin/{binary}")
            used = (binaries.build_dir(ROOT) / binary).read_bytes()
            assert sha256(carried) == sha256(used), f"{binary}: the checkout runs another one"


def test_the_binaries_need_nothing_of_the_host(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as wheel:
        for binary in (binaries.AGENT, binaries.SHIM):
            data = wheel.read(f"llm4agents/_bin/{binary}")
            assert data[:5] == b"\x7fELF\x02"
            offset, size, count = (int.from_bytes(data[at : at + n], "little") for at, n in _HEADER)
            kinds = {int.from_bytes(data[offset + size * i :][:4], "little") for i in range(count)}
            assert 3 not in kinds, f"{binary} names a dynamic loader"  # PT_INTERP


_HEADER = ((32, 8), (54, 2), (56, 2))  # e_phoff, e_phentsize, e_phnum


def test_both_commands_are_installed(installed: Installed) -> None:
    for name in ("llm4agents", "l4a"):
        done = subprocess.run(
            [str(installed.bin / name), "--version"], env=installed.env, capture_output=True, text=True
        )
        assert done.returncode == 0
        assert __version__ in done.stdout


def test_the_main_job_from_the_wheel_with_the_checkouts_template(installed: Installed) -> None:
    checkout = [sys.executable, "-m", "llm4agents"]
    checked([*checkout, "template", "build", "python"], installed.env, ROOT)
    checked([*checkout, "server", "stop"], installed.env, ROOT)
    before = _built()
    done = installed.cli(*MAIN_JOB)
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
    where = installed.cli("doctor", "--json")
    (agent,) = [c["detail"] for c in json.loads(where.stdout)["checks"] if c["name"] == binaries.AGENT]
    assert Path(agent).is_relative_to(installed.bin.parent), "this is the wheel's own agent"
    assert _built() == before, "the wheel built templates of its own"


def _built() -> dict[str, int]:
    """When each variant of `python` in the default shape was built (other tests may build other shapes meanwhile)."""
    keys = (config.settings().cache / "templates" / "python" / "keys").glob("*/template.json")
    shapes = {path: json.loads(path.read_text()) for path in keys}
    default = (limits.DEFAULT_VCPUS, limits.DEFAULT_MEMORY_MIB)
    return {
        path.parent.name: path.stat().st_mtime_ns
        for path, shape in shapes.items()
        if (shape["vcpus"], shape["memory_mib"]) == default
    }


def test_the_main_job_needs_no_network_and_tries_none(installed: Installed, tmp_path: Path) -> None:
    checked([str(installed.bin / "llm4agents"), "template", "build", "python"], installed.env, tmp_path)
    assert installed.cli("server", "stop").returncode == 0
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    log = tmp_path / "watch.log"
    # A network namespace of its own: no interface but a loopback that is down.
    alone = ("unshare", "--net") if os.geteuid() == 0 else ("unshare", "--map-current-user", "--net")
    watched = {"PYTHONPATH": str(tmp_path), "WATCH_LOG": str(log)}
    done = installed.cli(*MAIN_JOB, prefix=alone, **watched)
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
    # The server, its shims and its VMMs live on in that namespace: none of them has an internet socket.
    held = installed.cli("create", prefix=alone, **watched)
    assert held.returncode == 0, held.stderr
    pid = json.loads(installed.cli("server", "status", "--json").stdout)["pid"]
    assert Path(f"/proc/{pid}/ns/net").stat().st_ino != Path("/proc/self/ns/net").stat().st_ino
    for table in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        rows = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        assert not rows, f"{table}: {rows}"
    assert installed.cli("server", "stop").returncode == 0
    said = log.read_text().splitlines()
    assert any("llm4agents.api.server" in line for line in said if line.startswith("watched")), said
    assert any("print(6*7)" in line for line in said if line.startswith("watched")), said
    assert not [line for line in said if line.startswith("tried")]
