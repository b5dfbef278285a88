"""A pytest plugin for runs inside the laboratory (`-p tests.lab.inside`): what it is given, and the proof of what ran.

Writes two files into /lab/out: `tests.jsonl`, a line for each test as it ends, and `vmms.json`, the executables of all
virtual machine monitors that were seen alive, by `/proc/PID/exe`. Not for the host.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llm4agents.barrier.ca import Authority
from llm4agents.config import settings
from llm4agents.images import debian, kernel, kmod, rootfs, spec, trust
from llm4agents.images.cache import Cache, digest_of

OUT = Path("/lab/out")
VMMS = ("firecracker", "qemu-system", "cloud-hypervisor", "jailer")
LOOK_S = 0.5


def seed() -> None:
    """Tell this machine's cache what there is, so that nothing asks apt or a network for it.

    The keys are those of the code that is being tested, on this machine: whatever goes into them.
    """
    made = json.loads(Path("/lab/parts.json").read_text())
    cache, system = Cache(settings().cache), debian.host()
    key = digest_of(
        [kernel._BUILDER, system.codename, system.architecture, kmod.WANTED, kmod.OPTIONAL, kmod.NESTED]
    )
    cache.remember("kernel", key, made["kernel"])
    own = Authority.open(settings().ca_directory).certificate_pem
    for name, body in made["rootfs"].items():
        for authority in (None, own):
            certificates = trust.certificates(authority)
            cache.remember("rootfs", rootfs._key(spec.get(name), system, certificates), body)


class Watch:
    """Looks at /proc for VMMs until told to stop."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, Any]] = {}
        """By digest of the executable."""
        self._known: dict[tuple[int, int], str] = {}
        self._pids: set[tuple[str, int]] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            for entry in os.listdir("/proc"):
                if entry.isdigit():
                    try:
                        self._look(entry)
                    except OSError:
                        continue  # it has just ended

    def _look(self, pid: str) -> None:
        exe = f"/proc/{pid}/exe"
        if not os.path.basename(os.readlink(exe)).startswith(VMMS):
            return
        # Opened, so that all that is said is of one executable: a jailer becomes the monitor under our eyes.
        file = os.open(exe, os.O_RDONLY)
        try:
            self._count(pid, file)
        finally:
            os.close(file)

    def _count(self, pid: str, file: int) -> None:
        stat = os.fstat(file)
        digest = self._known.get((stat.st_dev, stat.st_ino))
        if digest is None:
            with open(file, "rb", closefd=False) as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            self._known[stat.st_dev, stat.st_ino] = digest
        if digest not in self.seen:
            argv = [f"/proc/self/fd/{file}", "--version"]
            said = subprocess.run(argv, pass_fds=[file], capture_output=True, text=True, check=False)
            version = said.stdout.partition("\n")[0].strip()
            self.seen[digest] = {"version": version, "processes": 0}
        if (pid, stat.st_ino) not in self._pids:
            self._pids.add((pid, stat.st_ino))
            self.seen[digest]["processes"] += 1


class Report:
    def __init__(self) -> None:
        OUT.mkdir(exist_ok=True)
        self._file = (OUT / "tests.jsonl").open("a", buffering=1)
        self._began: dict[str, float] = {}

    def _line(self, **body: Any) -> None:
        self._file.write(json.dumps(body) + "\n")

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._line(
                id=report.nodeid,
                when=report.when,
                outcome=report.outcome,
                seconds=round(report.duration, 2),
                text="" if report.outcome == "passed" else str(report.longrepr),
            )
        elif report.duration > 1:
            self._line(
                id=report.nodeid,
                when=report.when,
                outcome="passed",
                seconds=round(report.duration, 2),
                text="",
            )

    @pytest.hookimpl
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._line(
                id=report.nodeid, when="collect", outcome=report.outcome, seconds=0, text=str(report.longrepr)
            )


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    began = time.monotonic()
    with Watch() as watch:
        try:
            return (yield)
        finally:
            OUT.mkdir(exist_ok=True)
            body = {"vmms": watch.seen, "seconds": round(time.monotonic() - began, 1)}
            (OUT / "vmms.json").write_text(json.dumps(body))


def pytest_configure(config: pytest.Config) -> None:
    seed()
    config.pluginmanager.register(Report(), "lab-report")


if __name__ == "__main__":
    seed()
