"""The unit in `deploy/`, under systemd itself: process 1 of namespaces of its own, with no other unit of the host.

What it mounts, makes and starts goes with its process; the cgroups below one of ours are removed at the end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llm4agents.vmm import shim
from llm4agents.vmm.jail import cgroups
from tests.barrier.authority import Authority
from tests.barrier.lab import within
from tests.support import PASSED_ON, Node, eventually

SYSTEMD = Path("/lib/systemd/systemd")
pytestmark = [
    pytest.mark.vm,
    pytest.mark.skipif(not SYSTEMD.exists(), reason=f"there is no {SYSTEMD}"),
]
ROOT = Path(__file__).resolve().parents[2]
SMALL = {"memory_mib": 256}
ADDRESS = ("127.0.0.1", 7400)

# Of the host it sees files and devices and no more: what systemd sets up (mounts, sysctls, /etc/machine-id, links in
# /dev) is its own. $1: the test's directory, $2: the cache of templates. Namespaces that other tests have named are
# let go of, or they would last as long as this does.
_BOOT = r"""
set -eu
home=$1
for old in /run/netns /sys; do umount -R -l $old 2>/dev/null || true; done
mount --bind /proc/sys/net /proc/sys/net
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
mount -t sysfs sysfs /sys
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs "$home/dev"
for node in null zero full random urandom tty kvm net/tun; do
  [ -e "/dev/$node" ] || continue
  mkdir -p "$(dirname "$home/dev/$node")"
  : > "$home/dev/$node"
  mount --bind "/dev/$node" "$home/dev/$node"
done
mkdir "$home/dev/pts" "$home/dev/shm"
mount -t devpts -o newinstance,ptmxmode=666 devpts "$home/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$home/dev/shm"
ln -s pts/ptmx "$home/dev/ptmx"
mount --bind "$2" "$home/cache/llm4agents"
mount --rbind "$home/dev" /dev
mount --rbind "$home/cache" /var/cache
mount --bind "$home/lib" /var/lib
mount --bind "$home/etc" /etc
mount -t tmpfs -o mode=755 tmpfs /run
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin SYSTEMD_UNIT_PATH=/etc/systemd/system \
  SYSTEMD_GENERATOR_PATH=/nowhere SYSTEMD_ENVIRONMENT_GENERATOR_PATH=/nowhere "$3"
"""

_NAMESPACES = "--mount --uts --ipc --net --pid --cgroup --fork --kill-child --mount-proc"

# Only what differs here: where the program is, where its output goes (there is no journal), how long a test waits.
_DROP_IN = f"""[Service]
ExecStart=
ExecStart={sys.executable} -P -m llm4agents server run
StandardOutput=append:/var/lib/server.log
WatchdogSec=10
"""


class Booted:
    """A host that systemd has booted, with our unit installed. Entered, it runs; left, nothing of it is there."""

    def __init__(self, home: Path, cache: Path) -> None:
        self.home = home
        self.node = Node(home, cache)
        self.settings = {name: value for name, value in self.node.env.items() if name in PASSED_ON} | {
            "LLM4AGENTS_CA": self.node.env["LLM4AGENTS_CA"],
            "LLM4AGENTS_LISTEN": "{}:{}".format(*ADDRESS),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(ROOT / "src"),
            "TMPDIR": str(self.node.tmp),
        }
        top = cgroups.hierarchy(Path("/proc/self/mountinfo").read_text())
        assert top is not None, "no cgroup v2"
        self.cgroup = top / home.name

    def __enter__(self) -> Booted:
        for name in ("dev", "lib", "cache/llm4agents"):
            (self.home / name).mkdir(parents=True)
        etc = self.home / "etc"
        shutil.copytree("/etc", etc, symlinks=True)
        shutil.rmtree(etc / "systemd" / "system", ignore_errors=True)
        units = etc / "systemd" / "system"
        units.mkdir(parents=True)
        for name in ("sysinit", "basic", "multi-user", "network-online", "shutdown"):
            (units / f"{name}.target").write_text("[Unit]\nDefaultDependencies=no\n")
        (units / "default.target").symlink_to("multi-user.target")
        shutil.copy(ROOT / "deploy" / "llm4agents.service", units)
        (units / "llm4agents.service.d").mkdir()
        (units / "llm4agents.service.d" / "test.conf").write_text(_DROP_IN)
        (etc / "llm4agents").mkdir()
        self.configure()
        self.cgroup.mkdir()
        enter = f'echo 0 > "$0/cgroup.procs"; exec unshare {_NAMESPACES} sh -c "$@"'
        # Whatever becomes of this process, that one does not outlive it, nor does anything below it.
        command = ["setpriv", "--pdeathsig=KILL", "sh", "-c", enter, str(self.cgroup), _BOOT, "boot"]
        command += [str(self.home), str(self.node.cache), str(SYSTEMD)]
        self.outer = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        try:
            self.init = int(eventually(self._children().read_text).split()[0])
            self.root = Path(f"/proc/{self.init}/root")
            self.node.run = self.root / "run" / "llm4agents"
            self.node.http = self.node.connect()
            eventually(lambda: (self.root / "run/systemd/private").is_socket(), 30)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _children(self) -> Path:
        return Path(f"/proc/{self.outer.pid}/task/{self.outer.pid}/children")

    def __exit__(self, *_: object) -> None:
        self.node.http.close()
        self.outer.kill()
        self.outer.wait()
        eventually(lambda: not self.pids(self.cgroup))
        for path, _, _ in os.walk(self.cgroup, topdown=False):
            Path(path).rmdir()
        assert str(self.home) not in Path("/proc/self/mountinfo").read_text()

    def configure(self, **settings: str) -> None:
        """/etc/llm4agents/server.env."""
        wanted = self.settings | {f"LLM4AGENTS_{name}": value for name, value in settings.items()}
        lines = "".join(f"{name}={value}\n" for name, value in wanted.items())
        (self.home / "etc/llm4agents/server.env").write_text(lines)

    def systemctl(self, *words: str) -> str:
        command = ["nsenter", f"--target={self.init}", "--all", "systemctl", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={"PATH": os.defpath})
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}{self.log()}"
        return done.stdout

    def show(self) -> dict[str, str]:
        lines = self.systemctl("show", "llm4agents").splitlines()
        return {name: value for name, _, value in (line.partition("=") for line in lines)}

    def log(self) -> str:
        file = self.home / "lib" / "server.log"
        return file.read_text()[-3000:] if file.exists() else ""

    @staticmethod
    def pids(cgroup: Path) -> list[int]:
        """Of all processes in it and below, as this side of the namespaces sees them."""
        found = []
        for file in cgroup.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                found += [int(pid) for pid in file.read_text().split()]
        return found

    def service(self) -> dict[int, str]:
        """The processes in the unit's cgroup, as pid to command line."""
        found = {}
        for pid in self.pids(self.cgroup / "system.slice" / "llm4agents.service"):
            with contextlib.suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def main(self) -> int:
        """The server's pid, as this side sees it."""
        (pid,) = [pid for pid, words in self.service().items() if "llm4agents.api.server" in words]
        return pid

    def machine(self) -> tuple[int, str]:
        """The one VMM: its pid and when it started, which no other process has both of."""
        service = self.service()
        shims = {pid for pid, words in service.items() if words.startswith(shim.NAME)}
        stats = {pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in service}
        ((pid, stat),) = [(pid, stat) for pid, stat in stats.items() if int(stat[1]) in shims]
        return pid, stat[19]

    def certificate(self, authority: Authority) -> bytes:
        """What the listener shows, which must be of that authority."""
        context = ssl.create_default_context(cafile=str(authority.certificate))
        plain = within(Path(f"/proc/{self.init}/ns/net"), lambda: socket.create_connection(ADDRESS, 30))
        with plain, context.wrap_socket(plain, server_hostname="localhost") as sock:
            shown = sock.getpeercert(binary_form=True)
        assert shown is not None
        return shown


@pytest.fixture
def booted(nodes: Callable[..., Node]) -> Iterator[Booted]:
    # In there is no network: so that there is a template.
    before = nodes().start()
    before.call("DELETE", f"/v1/sandboxes/{before.create(**SMALL)}")
    before.stop()
    home = Path(tempfile.mkdtemp(prefix=f"l4a-{os.getpid()}-"))
    try:
        with Booted(home, before.cache) as booted:
            yield booted
    finally:
        shutil.rmtree(home)


def test_the_unit_under_systemd(booted: Booted) -> None:
    node, etc = booted.node, booted.home / "etc/llm4agents"
    authority = Authority(booted.home)

    def certified() -> None:
        authority.context(booted.home, ["localhost"])
        for name in ("chain.pem", "key.pem"):
            (etc / name).touch(0o600)
            (etc / name).write_bytes((booted.home / "localhost.pem").read_bytes())

    # Type=notify: when `start` has returned, it serves.
    certified()
    booted.configure(TLS_CERT="/etc/llm4agents/chain.pem", TLS_KEY="/etc/llm4agents/key.pem")
    booted.systemctl("start", "llm4agents")
    assert node.http.get("/health").json()["status"] == "ok"
    first, shown = booted.show(), booted.certificate(authority)
    assert (first["ActiveState"], first["SubState"], first["StatusText"]) == ("active", "running", "serving")
    sandbox = node.create(**SMALL)
    inside = node.exec(sandbox, "echo kept > kept; sleep 9999 >/dev/null 2>&1 & echo $!")["stdout"].strip()
    machine = booted.machine()

    def goes_on() -> None:
        assert booted.machine() == machine
        assert node.exec(sandbox, f"cat kept /proc/{inside}/comm")["stdout"] == "kept\nsleep\n"

    # WatchdogSec: it is heard.
    heard = int(booted.show()["WatchdogTimestampMonotonic"])
    eventually(lambda: int(booted.show()["WatchdogTimestampMonotonic"]) > heard, 20)

    # ExecReload: the same process, with the new certificate.
    certified()
    booted.systemctl("reload", "llm4agents")
    eventually(lambda: booted.certificate(authority) != shown)
    assert booted.show()["MainPID"] == first["MainPID"]

    booted.systemctl("restart", "llm4agents")
    second = booted.show()
    assert second["MainPID"] != first["MainPID"] and second["NRestarts"] == "0"
    goes_on()

    # Restart=always, after a death and after a silence.
    def replaced(server: int, restarts: str) -> None:
        node.http.close()
        node.http = node.connect()
        eventually(lambda: not Path(f"/proc/{server}").exists(), 60)
        eventually(lambda: booted.show()["ActiveState"] == "active", 30)
        assert booted.show()["NRestarts"] == restarts
        goes_on()

    for number, restarts in ((signal.SIGKILL, "1"), (signal.SIGSTOP, "2")):
        server = booted.main()
        os.kill(server, number)
        replaced(server, restarts)

    # stop: STOPPING=1, the call under way ends, nobody else is let in, the machine stays.
    late: list[str] = []
    call = threading.Thread(target=lambda: late.append(node.exec(sandbox, "sleep 5; echo late")["stdout"]))
    call.start()
    eventually(lambda: [row for row in node.call("GET", "/v1/top")["data"] if row["calls"]], 20)
    booted.systemctl("stop", "--no-block", "llm4agents")
    draining = eventually(lambda: (now := booted.show())["StatusText"] != "serving" and now)
    assert (draining["ActiveState"], draining["SubState"]) == ("deactivating", "stop-sigterm")
    assert node.http.post("/v1/sandboxes", json={"template": "base"}).status_code == 503
    call.join(60)
    assert late == ["late\n"], booted.log()
    stopped = eventually(lambda: (now := booted.show())["ActiveState"] == "inactive" and now, 30)
    assert (stopped["Result"], stopped["ExecMainStatus"]) == ("success", "0")
    assert booted.machine() == machine

    # Without TLS a reload has nothing to read, and is no end either.
    booted.configure()
    node.http = node.connect()
    booted.systemctl("start", "llm4agents")
    goes_on()
    server = booted.main()
    booted.systemctl("reload", "llm4agents")
    goes_on()
    assert booted.main() == server

    # With the last machine all that a stop leaves is gone.
    node.call("DELETE", f"/v1/sandboxes/{sandbox}")
    booted.systemctl("stop", "llm4agents")
    eventually(lambda: not booted.service())
    assert not list((booted.root / "run/llm4agents/vm").iterdir())
    assert not list((booted.home / "lib/llm4agents/sandboxes").iterdir())
