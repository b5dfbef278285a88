"""A cgroup (version 2) for each VMM, below a parent that is ours to divide: memory, swap, processes, cpu, disk rates.

The parent is the one `LLM4AGENTS_CGROUP` names; else the one delegated to us (systemd's `Delegate=yes`), or a
container's own; else, for root, `llm4agents` at the top. Where none can be had, VMMs run without, and `why_not` says
why. The shim joins a VMM to its cgroup and removes that when the VMM has ended; what a killed shim left, `sweep` does.

Not here: what a VMM may use (its driver says). Reads and writes small files of the kernel's: microseconds each.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llm4agents.errors import HostSetupError

_log = logging.getLogger(__name__)
NEEDED, WELCOME = ("memory", "pids"), ("cpu", "io")
PREFIX = "vm-"
_OWN = "llm4agents"
_LEAF = "server"
_PERIOD_US = 100_000
_DELEGATED = ("user.delegate", "trusted.delegate")


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one VMM may use at most. `io`: lines of `io.max`."""

    memory_bytes: int
    processes: int
    cpus: float
    io: tuple[str, ...] = ()

    def files(self) -> dict[str, tuple[str, ...]]:
        """The lines written into each file. Pure."""
        return {
            "memory.max": (str(self.memory_bytes),),
            "memory.swap.max": ("0",),
            # All of a machine or nothing: half a VMM is of no use to anybody.
            "memory.oom.group": ("1",),
            "pids.max": (str(self.processes),),
            "cpu.max": (f"{round(self.cpus * _PERIOD_US)} {_PERIOD_US}",),
            "io.max": self.io,
        }


@dataclass(frozen=True, slots=True)
class Parent:
    """Where VMMs' cgroups are made; `path` is None where that is not possible here."""

    path: Path | None
    controllers: frozenset[str] = frozenset()
    why_not: str | None = None

    @property
    def missing(self) -> str | None:
        """What does not hold here, in words; None when everything does."""
        if self.path is None:
            return self.why_not
        if lacking := [name for name in (*NEEDED, *WELCOME) if name not in self.controllers]:
            return f"the cgroup {self.path} has no controller {', '.join(lacking)}"
        return None


# -- where: pure ------------------------------------------------------------------------------------------


def hierarchy(mountinfo: str) -> Path | None:
    """Where the cgroup v2 hierarchy is mounted, given /proc/self/mountinfo; None when it is not. Pure.

    The newest mount of it: what was mounted over (a namespace with a /sys of its own) is still in the list.
    """
    for line in reversed(mountinfo.splitlines()):
        before, _, after = line.partition(" - ")
        if after.split(" ")[0] == "cgroup2":
            return Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), before.split(" ")[4]))
    return None


def own(cgroup: str) -> str | None:
    """Our cgroup's path in that hierarchy, given /proc/self/cgroup. Pure."""
    for line in cgroup.splitlines():
        number, _, rest = line.partition("::")
        if number == "0" and rest.startswith("/"):
            return rest
    return None


def none_here(top: Path | None) -> str | None:
    """Why no VMM can have a cgroup on this host at all, given where the hierarchy is; None: one might. Only reads."""
    if top is None:
        return "this host has no cgroup v2 mounted"
    if lacking := [name for name in NEEDED if name not in _words(top / "cgroup.controllers")]:
        names = ", ".join(lacking)
        return f"the host's cgroup v2 has no controller {names} (cgroup v1 has it, or it is switched off)"
    return None


# -- where: looked for ------------------------------------------------------------------------------------


class _Useless(Exception):
    """Why a cgroup is no parent."""


def parent(wanted: str | None, *, proc: Path = Path("/proc")) -> Parent:
    """The parent of VMMs' cgroups here, with its controllers switched on for its children.

    `wanted`: `LLM4AGENTS_CGROUP`, a path in the hierarchy or of its directory. Raises HostSetupError when that
    one cannot be used: who names one wants it.
    """
    try:
        return _looked_for(wanted, proc, _prepare)
    except _Useless as why:
        if wanted is not None:
            raise HostSetupError(
                f"LLM4AGENTS_CGROUP={wanted} is of no use: {why}",
                hint="name a cgroup that is delegated to this user and has no processes of its own, or unset it",
            ) from None
        return Parent(None, why_not=str(why))


def foreseen(wanted: str | None, *, proc: Path = Path("/proc")) -> Parent:
    """What `parent` would find for a server started where we are. Only reads."""
    try:
        return _looked_for(wanted, proc, _foresee)
    except _Useless as why:
        named = "" if wanted is None else f"LLM4AGENTS_CGROUP={wanted} is of no use: "
        return Parent(None, why_not=f"{named}{why}")


@functools.cache
def shared(wanted: str | None) -> Parent:
    """As `parent`, once per process, what ended VMMs have left below it removed; says in the log what it lacks."""
    found = parent(wanted)
    if found.missing is not None:
        _log.warning("virtual machines are not bounded by cgroups as they should be: %s", found.missing)
    sweep(found)
    return found


def _looked_for(wanted: str | None, proc: Path, attempt: Callable[[Path, Path], Parent]) -> Parent:
    """The first that `attempt(top, path)` has nothing against. Raises _Useless."""
    top = hierarchy((proc / "self/mountinfo").read_text())
    mine = own((proc / "self/cgroup").read_text())
    if (why_none := none_here(top)) is not None or top is None or mine is None:
        raise _Useless(why_none or "our own cgroup is not known")
    if wanted is not None:
        inside = Path(wanted)
        return attempt(top, inside if inside.is_relative_to(top) else top / str(inside).lstrip("/"))
    return _found(top, top / mine.lstrip("/"), attempt)


def _found(top: Path, mine: Path, attempt: Callable[[Path, Path], Parent]) -> Parent:
    """The parent where none is named."""
    why: _Useless | None = None
    for path in _candidates(top, mine):
        try:
            return attempt(top, path)
        except _Useless as reason:
            why = why or reason
    raise why or _Useless(
        f"our cgroup {mine} is not delegated to us, and other processes are in it"
        if os.access(mine / "cgroup.procs", os.W_OK)
        else f"our cgroup {mine} is not delegated to this user"
    )


def _candidates(top: Path, mine: Path) -> Iterator[Path]:
    # In a leaf below the one to divide: systemd's `DelegateSubgroup`, or where an earlier server has put itself.
    if mine != top and (_delegated(mine.parent) or (mine.name == _LEAF and os.access(mine.parent, os.W_OK))):
        yield mine.parent
    if _delegated(mine) or _alone(mine):
        yield mine
    if os.geteuid() == 0 and not (top / "cgroup.type").exists():
        yield top / _OWN


def _prepare(top: Path, path: Path) -> Parent:
    """Make `path` fit to be divided. Raises _Useless."""
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir()
        if inside := _inside(top, path):
            leaf = path / _LEAF
            leaf.mkdir(exist_ok=True)
            for pid in inside:
                with contextlib.suppress(ProcessLookupError):
                    (leaf / "cgroup.procs").write_text(pid)
        if path.parent == top and not (top / "cgroup.type").exists():
            _switch_on(top)
        controllers = _switch_on(path)
    except OSError as error:
        raise _Useless(f"{path}: {error.strerror}") from error
    return _fit(path, controllers)


def _foresee(top: Path, path: Path) -> Parent:
    """What `_prepare` would say of `path`. Raises _Useless."""
    try:
        has: frozenset[str] = frozenset()
        if path.exists():
            _inside(top, path)
            has = frozenset(_words(path / "cgroup.subtree_control"))
        above = path.parent / "cgroup.subtree_control"
        if path.parent == top and not (top / "cgroup.type").exists():
            above = top / "cgroup.controllers"  # which it switches on
        gets = frozenset(_words(path / "cgroup.controllers" if path.exists() else above))
        if os.access(path / "cgroup.subtree_control" if path.exists() else path.parent, os.W_OK):
            has |= gets & {*NEEDED, *WELCOME}
        elif not has:
            raise _Useless(f"{path}: {os.strerror(errno.EACCES)}")
    except OSError as error:
        raise _Useless(f"{path}: {error.strerror}") from error
    return _fit(path, has)


def _inside(top: Path, path: Path) -> list[str]:
    """The processes that must go into a leaf: a cgroup that gives controllers to its children has none of its own, but
    for the root of all. Ours (workers of the server among them) can; raises _Useless for anybody else's."""
    if path == top and not (top / "cgroup.type").exists():
        return []
    found = _words(path / "cgroup.procs")
    if others := [pid for pid in found if not _ours(int(pid))]:
        raise _Useless(f"{len(others)} processes that are not ours are in {path} itself")
    return found


def _fit(path: Path, controllers: frozenset[str]) -> Parent:
    if lacking := [name for name in NEEDED if name not in controllers]:
        raise _Useless(f"{path} has no controller {', '.join(lacking)} for its children")
    return Parent(path, controllers)


def _switch_on(path: Path) -> frozenset[str]:
    """Give its children what there is; returns what they have."""
    has = _words(path / "cgroup.subtree_control")
    for name in (*NEEDED, *WELCOME):
        if name not in has and name in _words(path / "cgroup.controllers"):
            with contextlib.suppress(OSError):
                (path / "cgroup.subtree_control").write_text(f"+{name}")
    return frozenset(_words(path / "cgroup.subtree_control"))


def _delegated(path: Path) -> bool:
    for name in _DELEGATED:
        with contextlib.suppress(OSError):
            return os.getxattr(path, name) == b"1" and os.access(path / "cgroup.procs", os.W_OK)
    return False


def _alone(path: Path) -> bool:
    """Whether it is ours to divide since nobody else is in it: a container's, or one somebody made for us."""
    with contextlib.suppress(OSError):
        inside = _words(path / "cgroup.procs")
        return os.access(path, os.W_OK) and bool(inside) and all(_ours(int(pid)) for pid in inside)
    return False


def _ours(pid: int) -> bool:
    """Whether that process is we or below us."""
    while pid > 1 and pid != os.getpid():
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            return True  # it has ended meanwhile
    return pid == os.getpid()


def _words(path: Path) -> list[str]:
    return path.read_text().split()


# -- one for each VMM -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Made:
    """A VMM's cgroup. `fd` (its directory) marks it as being used: close it when the shim has its own."""

    path: Path
    fd: int
    lacking: Mapping[str, str] = field(default_factory=dict)
    """Files of bounds that could not be set, and why."""


def make(parent: Parent, name: str, bounds: Bounds) -> Made:
    """The cgroup `name` below `parent` (whose path is not None). Raises HostSetupError when it cannot be made."""
    assert parent.path is not None
    path = parent.path / f"{PREFIX}{name}"
    try:
        fd = _opened(path)
    except OSError as error:
        raise HostSetupError(
            f"the cgroup {path} cannot be made: {error.strerror}",
            hint="LLM4AGENTS_CGROUP names one that is delegated to this user",
        ) from error
    lacking = {}
    for file, lines in bounds.files().items():
        for line in lines:
            try:
                _write(fd, file, line)
            except OSError as error:
                # Also without the controller, or (of swap) in a kernel without swap.
                lacking[file] = error.strerror or ""
    return Made(path, fd, lacking)


def _opened(path: Path) -> int:
    """Make the directory and mark it as used, before a `sweep` takes it for a leftover."""
    while True:
        with contextlib.suppress(FileExistsError):
            path.mkdir()
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_SH)
            if path.exists():
                return fd
            os.close(fd)


def _write(directory: int, name: str, text: str) -> None:
    fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def let_go(made: Made) -> None:
    """Close it; one that no VMM has joined is removed (the kernel keeps one that has)."""
    with contextlib.suppress(OSError):
        made.path.rmdir()
    os.close(made.fd)


def sweep(parent: Parent) -> int:
    """Remove the cgroups of VMMs that have ended where no shim did; returns how many. Live ones stay."""
    removed = 0
    for path in parent.path.glob(f"{PREFIX}*") if parent.path is not None else ():
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                removed += _remove(path)
            finally:
                os.close(fd)
    return removed


def _remove(path: Path) -> bool:
    """An ended VMM's cgroup with what is below it; the kernel keeps one that has processes."""
    for below in path.iterdir():
        if below.is_dir():
            _remove(below)
    try:
        path.rmdir()
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise
        return False
    return True
