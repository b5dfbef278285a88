"""A server process of a test's own, and what tests ask of it. Fixtures that make one are in conftest.py.

Templates come from (and stay in) the cache of whoever runs the tests, so that they are built once; state and
sockets are the test's own.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from llm4agents import config
from llm4agents.barrier import workers
from llm4agents.errors import HostSetupError
from llm4agents.vmm import shim
from llm4agents.vmm.firecracker import jail
from llm4agents.vmm.jail import cgroups

PATIENCE = float(os.environ.get("LLM4AGENTS_TEST_PATIENCE", "1"))
"""How many times slower this host is than an ordinary one (the laboratory): tests say how long in its seconds."""


def eventually(check: Callable[[], Any], timeout_s: float = 15.0) -> Any:
    """The first true answer of `check`; fails the test when there is none in time."""
    pause, end = threading.Event(), time.monotonic() + timeout_s * PATIENCE
    while not (answer := check()):
        assert time.monotonic() < end, f"not within {timeout_s * PATIENCE:g} s: {check}"
        pause.wait(0.02)
    return answer


PASSED_ON = ("LLM4AGENTS_BIN_DIR", "LLM4AGENTS_ACCEL", "LLM4AGENTS_CGROUP")
"""Of the environment's settings: what says where things are on this host, or forces what all tests run on."""


class Node:
    """A server process with its own state and sockets, and a plain HTTP client of it."""

    def __init__(self, home: Path, cache: Path, *, within: Sequence[str] = (), **env: str) -> None:
        """`within`: what the server's command begins with, if it is to run elsewhere (`barrier.lab.Lab.enter`)."""
        self.within = tuple(within)
        self.home, self.state, self.run, self.tmp = home, home / "s", home / "r", home / "t"
        self.tmp.mkdir(exist_ok=True)
        self.cache = cache
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("LLM4AGENTS_")},
            **{k: v for k, v in os.environ.items() if k in PASSED_ON},
            "LLM4AGENTS_STATE": str(self.state),
            "LLM4AGENTS_RUN": str(self.run),
            "LLM4AGENTS_CACHE": str(cache),
            # Templates trust it: with a CA of its own every node would build its own.
            "LLM4AGENTS_CA": str(config.settings().ca_directory),
            "TMPDIR": str(self.tmp),
            **env,
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.pids: set[int] = set()
        """Of all servers this has started."""
        self.http = self.connect()

    def connect(self) -> httpx.Client:
        transport = httpx.HTTPTransport(uds=str(self.run / "server.sock"))
        return httpx.Client(transport=transport, base_url="http://local", timeout=600)

    # -- the process

    def spawn(self) -> subprocess.Popen[bytes]:
        self.home.mkdir(exist_ok=True)
        with (self.home / "stderr").open("ab") as log:
            process = subprocess.Popen(
                [*self.within, sys.executable, "-P", "-m", "llm4agents.api.server"],
                env=self.env,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.pids.add(process.pid)
        return process

    def start(self) -> Node:
        process = self.process = self.spawn()

        def up() -> bool:
            assert process.poll() is None, self.log()[-3000:]
            try:
                return self.http.get("/v1/server").status_code == 200
            except httpx.TransportError:
                return False

        eventually(up, 60)
        return self

    def log(self) -> str:
        return (self.home / "stderr").read_text()

    def stop(self, *, keep: bool = False) -> None:
        if self.process is None:
            return
        if self.process.poll() is None:
            self.http.post("/v1/server/stop", json={"keep": keep})
        self.process.wait(60)
        self.process = None
        self.http.close()
        self.http = self.connect()

    def kill9(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None
        self.http.close()
        self.http = self.connect()

    # -- calls

    def call(self, method: str, path: str, **options: Any) -> Any:
        """The decoded answer of a call that must succeed."""
        answer = self.http.request(method, path, **options)
        assert answer.status_code < 300, answer.text
        return answer.json()

    def create(self, template: str = "base", **wish: Any) -> str:
        return str(self.call("POST", "/v1/sandboxes", json={"template": template, **wish})["id"])

    def get(self, sandbox: str) -> dict[str, Any]:
        return dict(self.call("GET", f"/v1/sandboxes/{sandbox}"))

    def exec(self, sandbox: str, command: str | list[str], **more: Any) -> dict[str, Any]:
        what = {"command": command} if isinstance(command, str) else {"argv": command}
        return dict(self.call("POST", f"/v1/sandboxes/{sandbox}/exec", json={**what, **more}))

    def code(self, sandbox: str, code: str, **more: Any) -> dict[str, Any]:
        return dict(self.call("POST", f"/v1/sandboxes/{sandbox}/code", json={"code": code, **more}))

    def ended(self, sandbox: str, timeout_s: float = 20) -> dict[str, Any]:
        """The sandbox, once it has ended."""

        def seen() -> dict[str, Any] | None:
            row = self.get(sandbox)
            return row if row["state"] in ("killed", "failed") else None

        return dict(eventually(seen, timeout_s))

    # -- what is there

    def rss(self) -> int:
        """Bytes of memory the server process holds."""
        assert self.process is not None
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no VmRSS")

    def processes(self) -> list[tuple[int, str]]:
        """(pid, command) of every shim and VMM of this node."""
        shims = shim.running(self.run / "vm")
        return [(pid, shim.NAME) for pid in shims] + [(pid, "vmm") for pid in self.machines().values()]

    def workers(self) -> dict[str, int]:
        """The barrier's processes that live: pid by name. Namespaces and taps are gone with them and the shims."""
        return {name: pid for pid, name in workers.running(self.run).items()}

    def machines(self) -> dict[str, int]:
        """The pid of the VMM of every sandbox that has one."""
        shims = shim.running(self.run / "vm")
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent in shims:
                    found[shims[parent].name] = int(entry.name)
        return found

    def vmm(self, sandbox: str) -> int:
        """The pid of a sandbox's VMM."""
        return self.machines()[sandbox]

    def half_made(self) -> list[str]:
        """What dead servers of this node have left in the cache where things are made. Others use that cache too."""
        pids = {str(pid) for pid in self.pids}
        with contextlib.suppress(OSError):  # one that the SDK has started is only here
            pids.add((self.state / "lock").read_text().strip())
        pids = {pid for pid in pids if not Path(f"/proc/{pid}").exists()}
        return [path.name for path in (self.cache / "tmp").glob("*") if path.name.split("-")[0] in pids]

    def traces(self, sandbox: str) -> list[Path]:
        """What the host has of a sandbox: its directories, its VMM's jail and cgroup."""
        run_dir = self.run / "vm" / sandbox
        found = [place for place in (run_dir, self.state / "sandboxes" / sandbox) if place.exists()]
        return found or traces(run_dir, self.state, sandbox)

    def leftovers(self) -> list[str]:
        left = [f"process {pid} {name}" for pid, name in self.processes()]
        left += [f"worker {pid} {name}" for name, pid in self.workers().items()]
        for directory in (self.run / "vm", self.state / "sandboxes", self.state / "jails"):
            left += [str(path) for path in directory.glob("*")]
        left += [str(path) for path in (*self.run.glob("**/*.sock"), *self.tmp.iterdir())]
        return left


def traces(run_dir: Path, state: Path, name: str) -> list[Path]:
    """What a VMM has outside its `run_dir`: its jail (Firecracker's) and its cgroup, which is called after `name`."""
    with contextlib.suppress(HostSetupError):
        if (base := jail.base_of(run_dir, state)).exists():
            return [base]
    top = cgroups.hierarchy(Path("/proc/self/mountinfo").read_text())
    own = f"{cgroups.PREFIX}{name}"
    return [Path(at) / own for at, below, _ in os.walk(top) if own in below] if top else []


@contextlib.contextmanager
def copied_cache(*parts: str) -> Iterator[Path]:
    """A cache of a test's own, to be spoilt, with (hard links to) those parts of the tests' cache."""
    real = config.settings().cache
    (real / "locks").mkdir(parents=True, exist_ok=True)
    # Beside it: hard links reach no further than a file system.
    place = Path(tempfile.mkdtemp(prefix=f"l4a-cache-{os.getpid()}-", dir=real.parent))
    try:
        # Other tests build in the real one meanwhile: as a prune does, wait until nobody is at it.
        with (real / "locks" / "cache.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for part in parts:
                if (real / part).exists():
                    shutil.copytree(real / part, place / part, copy_function=os.link, symlinks=True)
        yield place
    finally:
        shutil.rmtree(place)


def lines(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        yield json.loads(line)


def unb64(text: str) -> bytes:
    return base64.b64decode(text)


@contextlib.contextmanager
def stranger(pid: int) -> Iterator[int]:
    """A process in the pid namespace of `pid` that is not its child; for root."""
    script = "echo up; exec sleep 99"
    argv = ["nsenter", "--target", str(pid), "--pid", "sh", "-c", script]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as outer:
        try:
            assert outer.stdout is not None
            outer.stdout.readline()
            inner = int(Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()[0])
            yield inner
        finally:
            for child in Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)  # whose parent then ends, having reaped it


@contextlib.contextmanager
def sdk_of(node: Node) -> Iterator[config.Settings]:
    """Within it the SDK of this process uses that node, and starts its server when none runs."""
    patch = pytest.MonkeyPatch()
    for name in list(os.environ):
        if name.startswith("LLM4AGENTS_") and name not in node.env:
            patch.delenv(name)
    for name, value in node.env.items():
        if os.environ.get(name) != value:
            patch.setenv(name, value)
    config.settings.cache_clear()
    try:
        yield config.settings()
    finally:
        patch.undo()
        config.settings.cache_clear()
