"""What the benchmarks share: percentiles, the closing line, a native Python with the template's packages."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from llm4agents import limits
from llm4agents.config import settings
from llm4agents.engine import contact, tops
from llm4agents.engine.parts import Variant
from llm4agents.engine.templates import Templates
from llm4agents.guest.verbs import Agent
from llm4agents.vmm.base import Machine, Placement, Snapshot
from llm4agents.vmm.choice import Drivers


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile: always a value that was seen."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, round(percent / 100 * len(ordered) + 0.5) - 1))]


def summary(values: Sequence[float], *, digits: int = 1) -> dict[str, float]:
    return {
        "p50": round(percentile(values, 50), digits),
        "p95": round(percentile(values, 95), digits),
        "n": len(values),
    }


def finish(result: dict[str, object]) -> None:
    """The one JSON object every benchmark ends in."""
    print(json.dumps(result))


def tiny_server(size: int, head: str = "") -> str:
    """A program that serves `size` bytes at GET /large and 2 for anything else, with as little work as a server can do.

    It listens on 127.0.0.1, on the port it is given or one that it prints. `head`: more of the small answer's head.
    """
    return f"""
import socket, sys, threading
LARGE = b"HTTP/1.1 200 OK\\r\\ncontent-length: {size}\\r\\n\\r\\n"
SMALL = b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\n" + {head.encode()!r} + b"\\r\\nok"
CHUNK = bytes(1 << 20)
def serve(sock):
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    left = b""
    while data := sock.recv(65536):
        left += data
        while (at := left.find(b"\\r\\n\\r\\n")) >= 0:
            head, left = left[:at], left[at + 4:]
            if head.startswith(b"GET /large"):
                sock.sendall(LARGE)
                for _ in range({size} >> 20):
                    sock.sendall(CHUNK)
            else:
                sock.sendall(SMALL)
listener = socket.create_server(("127.0.0.1", int(sys.argv[1]) if sys.argv[1:] else 0), backlog=512)
print(listener.getsockname()[1], flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""


def native_python() -> Path:
    """A Python on this host with the packages of the `python` template, made once in the cache.

    For comparing guest and host; the package versions are the template's own lock file.
    """
    root = Path(__file__).resolve().parents[2]
    release = "3.11" if sys.version_info < (3, 13) else "3.13"
    lock = root / "src" / "llm4agents" / "images" / "data" / f"python-{release}.lock"
    key = hashlib.sha256(lock.read_bytes() + sys.version.encode()).hexdigest()[:16]
    venv = settings().cache / "build" / f"bench-venv-{key}"
    python = venv / "bin" / "python"
    if not (venv / ".whole").exists():
        print("preparing a native Python with the template's packages", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
        pip: list[str | Path] = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "--require-hashes", "--only-binary", ":all:", "-r", lock], check=True)
        (venv / ".whole").touch()
    # Some machines pin OpenBLAS to an old kernel for old builds; a current numpy is measured as it is.
    for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
        os.environ.pop(name, None)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    return python


class Bare:
    """Clones of a template straight from the driver: no server, no store. What the product is compared with."""

    def __init__(self) -> None:
        self.settings = settings()
        self.drivers = Drivers(self.settings)
        self.driver = self.drivers.of(self.settings.vmm or "qemu")
        self.templates = Templates(self.settings, self.drivers)
        self._count = 0

    async def template(self, name: str) -> tuple[Variant, Snapshot]:
        def tell(step: str, detail: str, fraction: float | None) -> None:
            print(f"  {step} {detail}", file=sys.stderr)

        shape = await self.templates.shape(
            name, limits.DEFAULT_VCPUS, limits.DEFAULT_MEMORY_MIB, vmm=self.driver.name
        )
        return await self.templates.variant(shape, tell)

    @contextlib.asynccontextmanager
    async def clone(
        self, variant: Variant, snapshot: Snapshot
    ) -> AsyncIterator[tuple[Agent, float, Machine]]:
        """A bare clone, and the milliseconds from spawn to its agent's first frame."""
        self._count += 1
        name = f"bench-{os.getpid()}-{self._count}"
        run_dir = self.settings.run_dir / "bench" / name
        run_dir.mkdir(parents=True, mode=0o700)
        form = tops.of(variant.disk_format)
        top = run_dir / form.first
        await form.over(variant.upper, variant.empty, top)
        machine = None
        try:
            began = time.perf_counter()
            placement = Placement(name, run_dir, time.time() + 600)
            machine = await self.driver.restore(snapshot, placement, variant.disks(top))
            await machine.resume()
            agent = await contact.greet(machine, timeout=limits.RESTORE_TIMEOUT_S)
            first_ms = (time.perf_counter() - began) * 1000
            yield agent, first_ms, machine
        finally:
            if machine is not None:
                await machine.stop()
            shutil.rmtree(run_dir, ignore_errors=True)

    @staticmethod
    async def wake(agent: Agent, variant: Variant) -> None:
        """What the engine does before it hands a clone out."""
        await agent.post_restore(
            entropy=os.urandom(64),
            unix_ns=time.time_ns(),
            hostname="bench",
            machine_id="0" * 32,
            boot_id="0" * 32,
            env=variant.environment,
        )
