"""What a driver puts its VMM into: the root made once (`closure`), the binds, the cgroup, tried out before it counts.

One `Cells` per driver. What this host cannot give is known from a trial (the VMM's own `--version`, in the jail) and
said once; machines run with what is left. Not here: what a VMM reads, how much it may use (its driver says).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llm4agents import binaries
from llm4agents.config import Settings
from llm4agents.errors import BootError, HostSetupError
from llm4agents.vmm import procfs, shim, uids
from llm4agents.vmm.jail import cgroups
from llm4agents.vmm.jail.closure import Closure, closure, touch
from llm4agents.vmm.waiting import readable

_log = logging.getLogger(__name__)
_TRIAL_TIMEOUT_S = 20.0
_NO = "no-"
_SETTINGS = (
    "/proc/sys/user/max_user_namespaces",
    "/proc/sys/user/max_net_namespaces",
    "/proc/sys/kernel/unprivileged_userns_clone",
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
    "/proc/self/attr/current",
)
"""Of the host, what allows or forbids a jail."""
_PARTS = ("ns", "root", "landlock", "seccomp")


@dataclass(frozen=True, slots=True)
class Cell:
    """For one VMM. Its descriptors are closed with the stack it was made with; the shim has its own by then."""

    jail: shim.Jail
    notes: Mapping[str, str]
    """Belong into `MachineRecord.extra["jail"]`, beside what the shim says."""


class Cells:
    """See the module. `prepare` first; `cell` costs well below a millisecond."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._closure: Closure | None = None
        self._need: tuple[str, ...] = ()
        self._user = os.geteuid() != 0

    async def prepare(
        self,
        program: str,
        *,
        modules: Sequence[Path] = (),
        files: Sequence[Path] = (),
        places: Sequence[str] = (),
    ) -> dict[str, str]:
        """Make the root (see `closure`) and run `program --version` in it; returns what the shim said of the jail.

        Tried once for each state of the host that it depends on. Raises HostSetupError when that does not run.
        """
        made = await closure(
            program, self._settings.cache / "build", modules=modules, files=files, places=places
        )
        self._closure = made
        path = self._settings.cache / "probe" / f"jail-{_circumstances(program, made.digest)}.json"
        said = _kept(path)
        if said is None:
            said = await self._trial([program, "--version"])
            _keep(path, said)
        # What could be had once every machine must have: a host that has run out of namespaces starts none without.
        self._need = tuple(name for name in _PARTS if name in said)
        if words := missing(said):
            _log.warning("the jail of %s lacks here: %s", program, "; ".join(words))
        return said

    def cell(
        self,
        stack: contextlib.ExitStack,
        name: str,
        bounds: cgroups.Bounds,
        devices: Sequence[str] = (),
    ) -> Cell:
        """For the machine `name`. `devices`: paths of the host that it uses, and among the `places` of its root.

        Raises HostSetupError.
        """
        binds = [shim.Bind(_open(stack, Path(path)), path, read_only=False) for path in devices]
        cgroup, notes = joined(self._settings, stack, name, bounds)
        return Cell(self._jail(stack, binds, cgroup), notes)

    def _jail(self, stack: contextlib.ExitStack, binds: Sequence[shim.Bind], cgroup: int | None) -> shim.Jail:
        if self._closure is None:
            raise HostSetupError("the root for virtual machine monitors was not made: capabilities() first")
        touch(self._closure.path)
        return shim.Jail(_open(stack, self._closure.path), binds, cgroup, self._user, self._need)

    async def _trial(self, argv: Sequence[str]) -> dict[str, str]:
        with contextlib.ExitStack() as stack:
            run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llm4agents-trial-")))
            lease = None if self._user else uids.lease("trial")
            if lease is not None:
                stack.callback(os.close, lease.fd)
            launch = shim.Launch(
                argv=argv,
                env={"LANG": "C"},
                fds=[],
                run_dir=run_dir,
                rlimits={"core": 0},
                hold=[] if lease is None else [lease.fd],
                uid=None if lease is None else lease.uid,
                gid=None if lease is None else lease.uid,
                jail=self._jail(stack, [], None),
            )
            try:
                started = await shim.start(launch)
                await _gone(started.shim_pid)
            except BootError as error:
                raise HostSetupError(f"{argv[0]} does not start in its jail: {error.message}") from error
            ended = shim.read_exit(run_dir)
        if ended.code != 0:
            words = ended.console_tail.strip()[-500:] or "without a word"
            raise HostSetupError(f"{argv[0]} does not run in its jail (status {ended.code}): {words}")
        return started.jail


def joined(
    settings: Settings, stack: contextlib.ExitStack, name: str, bounds: cgroups.Bounds
) -> tuple[int | None, dict[str, str]]:
    """A cgroup for the machine `name` (its directory; None where there is none), and what of it this host lacks."""
    parent = cgroups.shared(settings.cgroup)
    if parent.path is None:
        return None, {"no-cgroup": _word(parent.why_not or "")}
    made = cgroups.make(parent, name, bounds)
    stack.callback(cgroups.let_go, made)
    return made.fd, {f"{_NO}{file}": _word(why) for file, why in made.lacking.items()}


def missing(said: Mapping[str, str]) -> list[str]:
    """What this host does not give to a VMM, in words, from what the shim said (or a record's `jail`). Pure."""
    found = []
    for name, what in (
        ("ns", "namespaces"),
        ("root", "a root of its own"),
        ("landlock", "landlock"),
        ("seccomp", "a filter of system calls"),
        ("cgroup", "a cgroup"),
    ):
        if (why := said.get(f"{_NO}{name}")) is not None:
            found.append(f"{what} ({why.replace('_', ' ')})")
    if said.get("proc") == "shared":
        found.append("a /proc of its own processes alone")
    return found


def _circumstances(program: str, digest: str) -> str:
    """A name for everything the trial's outcome depends on: what is run, by whom, on which host, as it is set now."""
    shim_binary = binaries.path(binaries.SHIM)
    found = shim_binary.stat()
    parts = [program, digest, str(shim_binary), found.st_size, found.st_mtime_ns]
    parts += [os.geteuid(), platform.release(), procfs.host_boot_id()]
    for name in _SETTINGS:
        with contextlib.suppress(OSError):
            parts.append(f"{name} {Path(name).read_text().strip()}")
    own = Path("/proc/self/status").read_text().splitlines()
    parts += [line for line in own if line.startswith(("CapEff", "CapBnd", "NoNewPrivs", "Seccomp:"))]
    root = Path("/").stat()
    parts += [root.st_dev, root.st_ino, str(Path("/proc/self/ns/user").readlink())]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _kept(path: Path) -> dict[str, str] | None:
    with contextlib.suppress(OSError, ValueError):
        body = json.loads(path.read_text())
        if isinstance(body, dict) and all(isinstance(value, str) for value in body.values()):
            return body
    return None


def _keep(path: Path, said: Mapping[str, str]) -> None:
    # A cache that cannot be written costs the next server a trial, no more.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(dict(said)))
        temporary.rename(path)


def _word(words: str) -> str:
    return words.replace(" ", "_").replace(",", "")


def _open(stack: contextlib.ExitStack, path: Path) -> int:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise HostSetupError(f"{path} cannot be opened: {error.strerror}") from error
    stack.callback(os.close, fd)
    return fd


async def _gone(pid: int) -> None:
    """Wait until a child of ours has ended; it is killed when it takes too long."""
    fd = os.pidfd_open(pid)
    try:
        async with asyncio.timeout(_TRIAL_TIMEOUT_S):
            await readable(fd)
    except TimeoutError:
        os.kill(pid, 9)
    finally:
        os.close(fd)
        os.waitpid(pid, 0)  # noqa: ASYNC222 (it has ended)
