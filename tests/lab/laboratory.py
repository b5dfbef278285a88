"""The laboratory: a nested sandbox of ours in which our own tests run on Firecracker, whatever KVM there is here.

`laboratory()` gives one: a clone of the template `lab-DIGEST`, which is made when there is none. `Lab.run` runs pytest
in it and watches it (`watch`). Everything goes through the public SDK. What is in it: `parts`; what runs in there:
`inside`; the whole suite, in pieces: `course`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm4agents import Sandbox
from llm4agents.config import settings
from llm4agents.errors import LLM4AgentsError, TimedOutError, VersionMismatchError
from llm4agents.sdk._sync.processes import Process

from ..support import Node, sdk_of
from . import parts
from .binaries import Binary
from .parts import HOME
from .watch import PATIENCE, Patience, Pulse, Trouble, Verdict, symptoms

VCPUS, MEMORY_MIB = int(os.environ.get("LLM4AGENTS_LAB_VCPUS", "1")), 4096
BAKE_TIMEOUT_S, COMMAND_TIMEOUT_S = 600.0, 900.0
LOOK_S = 5.0
"""The longest that one look at what a run says waits for more."""
LAST_WORDS_S = 60.0
"""For a run that was given up to say where it is, and to end."""
KEEP_BYTES = 16 << 20
"""Of its output, until it is read."""
PLUGINS = ("-p", "tests.lab.inside", "-p", "no:cacheprovider")
CGROUP = "/sys/fs/cgroup/sandbox/lab"
ENVIRONMENT = {
    "PATH": f"{HOME}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "PYTHONPATH": f"{HOME}/tree/src:{HOME}/site",
    "PYTHONDONTWRITEBYTECODE": "1",
    "LLM4AGENTS_CACHE": f"{HOME}/cache",
    "LLM4AGENTS_CA": f"{HOME}/ca",
    "LLM4AGENTS_BIN_DIR": f"{HOME}/own",
    "LLM4AGENTS_CGROUP": CGROUP,
    "LLM4AGENTS_TEST_DRIVERS": "firecracker",
    "LLM4AGENTS_TEST_PATIENCE": "6",
}

DELEGATE = (
    f"cd /sys/fs/cgroup; echo +memory +pids +cpu +io > cgroup.subtree_control;"
    f" echo +memory +pids +cpu +io > sandbox/cgroup.subtree_control; mkdir -p {CGROUP};"
    f" echo +memory +pids +cpu +io > {CGROUP}/cgroup.subtree_control"
)
"""A cgroup below the sandbox's own, in which those of VMMs are made: what a host's service manager delegates."""

Say = Callable[[str], None]


def _quiet(_: str) -> None:
    pass


def to_stderr(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


@dataclass
class Outcome:
    """Of one test file of the inner run, or of what never came to be a test."""

    id: str
    when: str
    outcome: str
    seconds: float
    text: str


@dataclass
class Report:
    """What came back from one inner run."""

    exit_code: int | None
    tests: list[Outcome] = field(default_factory=list)
    vmms: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By SHA-256 of `/proc/PID/exe`: what it says of its version, in how many processes it was seen."""
    seconds: float = 0.0
    output: str = ""
    trouble: Trouble | None = None
    """Why it was given up, if it was."""

    def of(self, file: str) -> list[Outcome]:
        return [test for test in self.tests if test.id.partition("::")[0] == file]

    def failures(self, file: str) -> str:
        """The inner tests of `file` that failed, with all they said."""
        bad = [test for test in self.of(file) if test.outcome == "failed"]
        return "\n\n".join(f"===== {test.id} ({test.when})\n{test.text}" for test in bad)


def _last(output: str) -> str:
    """The line in which a verbose pytest has named the test that runs."""
    return (output.splitlines() or ["nothing was said"])[-1][-300:]


class Lab:
    """One live laboratory."""

    def __init__(self, sandbox: Sandbox, vmms: Mapping[str, Binary], node: Node) -> None:
        self.sandbox, self.node = sandbox, node
        self.vmms = dict(vmms)
        """What is on PATH in there."""

    def shell(
        self, command: str | Sequence[str], *, say: Say = _quiet, timeout: float = COMMAND_TIMEOUT_S
    ) -> Any:
        """A command as root, in the tree, in the environment of the tests."""
        return self.sandbox.exec(
            command,
            cwd=f"{HOME}/tree",
            env=ENVIRONMENT,
            user="root",
            timeout=timeout,
            on_stdout=say,
            on_stderr=say,
            on_disconnect="kill",
        )

    def refresh(self) -> None:
        """Put this checkout's source and binaries into it, over what is there."""
        with parts.stream(parts.source) as archive:
            self.sandbox.files.untar(HOME, archive, preserve_owner=True, user="root")

    def run(self, arguments: Sequence[str], *, say: Say = _quiet, patience: Patience = PATIENCE) -> Report:
        """`pytest ARGUMENTS` in there. One that is given up says why (`trouble`), and its laboratory is to be left."""
        began = time.monotonic()
        try:
            self.shell(
                f"rm -rf {HOME}/out; mkdir -p {HOME}/out; {DELEGATE}", timeout=patience.silence_s
            ).check()
            # With its handler of faults from the first moment: it says where it is also before pytest has begun.
            argv = ["python3", "-X", "faulthandler", "-m", "pytest", *PLUGINS, *arguments]
            process = self.sandbox.processes.start(
                argv, cwd=f"{HOME}/tree", env=ENVIRONMENT, user="root", keep_bytes=KEEP_BYTES
            )
        except TimedOutError as error:
            return Report(None, trouble=self._lost("silent", error))
        report = self.follow(process, patience, say=say)
        if report.trouble is None or report.trouble.verdict in ("stalled", "late"):
            for line in self._out("tests.jsonl").splitlines():
                report.tests.append(Outcome(**json.loads(line)))
            report.vmms = json.loads(self._out("vmms.json") or "{}").get("vmms", {})
        report.seconds = time.monotonic() - began
        return report

    def follow(self, process: Process, patience: Patience, *, say: Say = _quiet) -> Report:
        """A process in there to its end, or to that of patience: exit code, output, trouble.

        Not `exec` with a timeout: its agent keeps that, and says nothing when its machine stands still.
        """
        pulse, report, error = Pulse(patience, time.monotonic()), Report(None), None

        def look() -> bool:
            """Whether it has ended; what it has said since is in the report."""
            found = process.read(wait=LOOK_S)
            process.offset = found.offset
            report.output += found.text
            if found.text:
                say(found.text)
            pulse.beat(time.monotonic(), said=bool(found.text))
            return not found.running and not found.more

        while report.trouble is None:
            try:
                if look():
                    report.exit_code = process.refresh().exit_code
                    return report
                now = pulse.answered
            except LLM4AgentsError as failed:
                error, now = failed, time.monotonic()
                if self.sandbox.id not in self.node.machines():
                    report.trouble = self._lost("gone", error)
                    break
                time.sleep(1)  # an answer that came at once is no reason to ask as quickly
            verdict = pulse.verdict(now)
            if verdict == "silent":
                report.trouble = self._lost(verdict, error)
            elif verdict is not None:
                report.trouble = Trouble(
                    verdict, f"after {now - pulse.began:.0f} s; last: {_last(report.output)}"
                )
                self._end(process, look)
        say(f"\n{report.trouble}\n")
        return report

    def _end(self, process: Process, look: Callable[[], bool]) -> None:
        """Of a run that goes on too long: it is asked where it is, which ends a Python, then killed."""
        try:
            process.signal("ABRT")
            until = time.monotonic() + LAST_WORDS_S
            while not look() and time.monotonic() < until:
                pass
            process.kill()
        except LLM4AgentsError:
            pass  # its laboratory is left in any case

    def _lost(self, verdict: Verdict, error: LLM4AgentsError | None) -> Trouble:
        serial = self.node.run / "vm" / self.sandbox.id / "serial.log"
        seen = symptoms(self.node.machines().get(self.sandbox.id), serial)
        row = self.node.get(self.sandbox.id)
        return Trouble(verdict, f"{error}; the sandbox: {row['state']}, {row.get('reason')}; {seen}")

    def _out(self, name: str) -> str:
        try:
            return self.sandbox.files.read(f"{HOME}/out/{name}", "bytes", user="root").decode()
        except LLM4AgentsError:
            return ""


@contextmanager
def laboratory(*, rebuild: bool = False, say: Say = _quiet) -> Iterator[Lab]:
    """A laboratory with this checkout's source in it, ended afterwards; its template stays in the cache."""
    made = parts.collect()
    name = f"lab-{made.digest}-{VCPUS}"
    home = Path(tempfile.mkdtemp(prefix=f"l4a-{os.getpid()}-"))
    node = Node(home, settings().cache).start()
    try:
        with sdk_of(node), _sandbox(node, name, made, rebuild, say) as sandbox:
            lab = Lab(sandbox, made.vmms, node)
            lab.refresh()
            yield lab
    except LLM4AgentsError:
        say(f"the server's last words:\n{node.log()[-4_000:]}\n")
        raise
    finally:
        node.stop()
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def _sandbox(node: Node, name: str, made: parts.Ingredients, rebuild: bool, say: Say) -> Iterator[Sandbox]:
    there = {template["name"] for template in node.call("GET", "/v1/templates")["data"]}
    if name in there and not rebuild:
        try:
            with _create(name) as sandbox:
                yield sandbox
            return
        except VersionMismatchError as error:
            say(f"the laboratory {name} cannot be loaded any more: {error}\n")
    for old in there:
        if old.startswith("lab-"):
            node.http.delete(f"/v1/templates/{old}")
    _bake(name, made, say)
    with _create(name) as sandbox:
        yield sandbox


def _create(template: str, **more: Any) -> Sandbox:
    return Sandbox(
        template, nested=True, vcpus=VCPUS, memory_mib=MEMORY_MIB, timeout=3_600, pids=8_192, **more
    )


def _bake(name: str, made: parts.Ingredients, say: Say) -> None:
    """Make the template."""
    began = time.monotonic()

    def tell(what: str) -> None:
        say(f"[lab {time.monotonic() - began:5.1f} s] {what}\n")

    tell(f"a nested sandbox, {VCPUS} vCPUs, {MEMORY_MIB} MiB")
    with _create("python", on_progress=lambda step, detail, _: tell(f"{step}: {detail}")) as sandbox:

        def root(command: str) -> str:
            return str(sandbox.exec(command, user="root", timeout=BAKE_TIMEOUT_S).check().stdout)

        status = sandbox.files.read("/var/lib/dpkg/status", "bytes", user="root")
        with parts.debian_packages(status) as debs:
            tell(f"{len(debs)} Debian packages")
            with parts.stream(lambda archive: parts.unpacked(archive, debs)) as archive:
                sandbox.files.untar("/", archive, preserve_owner=True, user="root")
        tell("Python packages, root file systems, Firecracker")
        with parts.stream(lambda archive: parts.baked(archive, made)) as archive:
            sandbox.files.untar(HOME, archive, preserve_owner=True, user="root")
        root("nft --version && mke2fs -V && qemu-img --version && ip -V")
        root("sync; echo 3 > /proc/sys/vm/drop_caches")
        tell("freezing")
        sandbox.snapshot(name, description="the laboratory of the test suite")
    tell(f"{name} is made")
