"""The isolation report: what /proc says of how one VMM and its keeper are confined. Reads, changes nothing.

A VMM that its guest has taken over is a process like any other here, only one that lies where it can: nothing of it is
followed, opened for writing, or believed where the kernel can be asked instead, and every part is bounded. All of a
process is read below one descriptor of its /proc directory, so that no other process is ever looked at under its pid.

Not here: what is promised and whether it holds (`promises`), how the text is read (`seen`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import platform
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from llm4agents import limits
from llm4agents.errors import ConflictError
from llm4agents.vmm import given, procfs
from llm4agents.vmm.base import MachineRecord
from llm4agents.vmm.jail import seen
from llm4agents.vmm.jail.promises import Difference, compare, expected
from llm4agents.vmm.jail.seen import Cgroup, Descriptor, Host, Isolation, Mount, Namespace, Process, Root

__all__ = ["Isolation", "compare", "describe", "expected", "report", "worker"]

_T = TypeVar("_T")
CGROUP_FILES = ("memory.max", "memory.high", "memory.swap.max", "pids.max", "cpu.max", "io.max")
_TABLES = ("tcp", "tcp6", "udp", "udp6", "udplite", "udplite6", "raw", "raw6", "icmp", "icmp6")
_NOT_LISTED = ("fuse", "nfs", "cifs", "9p", "autofs")
"""File systems (beginnings of their types) that can keep a reader waiting as long as they like."""


def describe(seen_: Isolation) -> dict[str, Any]:
    """A report with what was promised of it, JSON-able: `ok`, `differences`, `missing` (of the host), `processes`…

    `ok`: everything that this version promises on such a host holds.
    """
    found = compare(seen_, expected(seen_.driver, seen_.as_root))
    broken = [difference for difference in found if not difference.host]
    return {
        "ok": not broken,
        "differences": [_said(difference) for difference in broken],
        "missing": [_said(difference) for difference in found if difference.host],
        **seen_.to_json(),
    }


def _said(difference: Difference) -> dict[str, str]:
    return {"process": difference.process, "name": difference.name, "words": difference.words}


def report(record: MachineRecord, own: Iterable[Path] = ()) -> Isolation:
    """How the VMM of `record` and its shim are confined now. Blocks for some 10 ms: for a thread.

    `own`: files of its disks now, beside those it was started with (the first is written to).
    Raises ConflictError when the machine has ended.
    """
    server = _Server()
    files = given.of(record)
    known = dict(files or {})
    for place, path in enumerate(own):
        with contextlib.suppress(OSError):
            known.setdefault(given.key(path.stat()), "read" if place else "read-write")
    found = [
        _process("vmm", record.vmm_pid, record.vmm_start_ticks, server, known),
        _process("shim", record.shim_pid, record.shim_start_ticks, server),
    ]
    processes = tuple(process for process in found if process is not None)
    if len(processes) < len(found):
        raise ConflictError(f"the virtual machine {record.id} has ended")
    said = record.extra.get("jail")
    return Isolation(
        driver=record.driver,
        as_root=os.geteuid() == 0,
        said=dict(said) if isinstance(said, Mapping) else {},
        run_dir=str(record.run_dir),
        host=_host(server),
        processes=processes,
        clone="base" in record.extra,
        files_known=files is not None,
    )


def worker(role: str, pid: int) -> Process | None:
    """The same of a process of the server's that serves sandboxes; None when it is gone."""
    return _process(role, pid, None, _Server())


class _Server:
    """This process: what a VMM must not share."""

    def __init__(self) -> None:
        self.namespaces = {name: _link(f"/proc/self/ns/{name}") for name in seen.NAMESPACES}
        root = Path("/").stat()
        self.root = (root.st_dev, root.st_ino)
        self.cgroups = seen.cgroup_paths(_text_of(Path("/proc/self/cgroup")))
        self.sockets = _Sockets()
        self.sockets.add(lambda name: _text_of(Path("/proc/self/net") / name))
        self.cgroup2 = next(
            (
                Path(m.point)
                for m in seen.mounts(_text_of(Path("/proc/self/mountinfo")))
                if m.type == "cgroup2"
            ),
            None,
        )


class _Sockets:
    """Which socket is of which kind, from the tables of network namespaces. What was added first counts."""

    def __init__(self) -> None:
        self._kinds: dict[int, str] = {}
        self._paths: dict[int, str] = {}

    def add(self, table: Callable[[str], str | None]) -> None:
        # A process that has the namespace to itself can forge lines of `unix` (by line feeds in paths), so last.
        for name in (*_TABLES, "netlink", "packet"):
            kind = name if name in ("netlink", "packet") else "inet"
            for inode in seen.socket_inodes(table(name) or "", name):
                self._kinds.setdefault(inode, kind)
        for inode, path in seen.unix_sockets(table("unix") or "").items():
            if self._kinds.setdefault(inode, "unix") == "unix":
                self._paths.setdefault(inode, path)

    def of(self, inode: int) -> tuple[str, str]:
        return self._kinds.get(inode, "socket"), self._paths.get(inode, "")


class _Reader:
    """One process, below a descriptor of its directory in /proc."""

    def __init__(self, fd: int, server: _Server, files: Mapping[str, str]) -> None:
        self.fd, self.server, self.files = fd, server, files
        self.unseen: list[str] = []

    def path(self, name: str) -> str:
        return f"/proc/self/fd/{self.fd}/{name}"

    def text(self, name: str) -> str | None:
        return self.attempt(name, lambda: _text(self.fd, name))

    def attempt(self, name: str, act: Callable[[], _T]) -> _T | None:
        """None, and a word in `unseen`, when it may not be read."""
        try:
            return act()
        except OSError as error:
            if error.errno != errno.ESRCH and len(self.unseen) < limits.ISOLATION_MOUNTS_MAX:
                self.unseen.append(f"{name}: {os.strerror(error.errno or 0)}")
        except ValueError:
            self.unseen.append(f"{name}: not understood")
        return None


def _process(
    role: str, pid: int, ticks: int | None, server: _Server, files: Mapping[str, str] | None = None
) -> Process | None:
    """`files`: what it was given, as `vmm.given` has it."""
    try:
        fd = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # Looked at after it is held: from here on the descriptor leads to that process or nowhere.
        if ticks is not None and not procfs.alive(pid, ticks):
            return None
        return _read(role, pid, _Reader(fd, server, files or {}))
    except ProcessLookupError:
        return None
    finally:
        os.close(fd)


def _read(role: str, pid: int, reader: _Reader) -> Process:
    status = seen.status(reader.text("status") or "")
    mounts = reader.attempt("mountinfo", lambda: seen.mounts(_text(reader.fd, "mountinfo")))
    namespaces = _namespaces(reader)
    limits_text = reader.text("limits")
    oom = seen.numbers(reader.text("oom_score_adj"))
    inside = seen.numbers(status.get("NSpid"))
    uids = seen.numbers(status.get("Uid"))
    return Process(
        role=role,
        pid=pid,
        name=seen.plain(status.get("Name", "")),
        executable=reader.attempt("exe", lambda: seen.plain(os.readlink("exe", dir_fd=reader.fd))),
        executable_sha256=reader.attempt("exe", lambda: _digest(reader.path("exe"))),
        uids=uids,
        gids=seen.numbers(status.get("Gid")),
        groups=seen.numbers(status.get("Groups")),
        dumpable=_dumpable(reader, uids),
        capabilities=seen.capabilities(status),
        threads=reader.attempt("task", lambda: _threads(reader, namespaces or {})),
        namespaces=namespaces,
        pid_inside=inside[-1] if inside else None,
        companions=_companions(pid, namespaces),
        root=reader.attempt(
            "root", lambda: _root(reader, mounts or [], uids, seen.numbers(status.get("Gid")))
        ),
        mounts=None if mounts is None else tuple(mounts),
        descriptors=reader.attempt("fd", lambda: _descriptors(reader, namespaces or {})),
        limits=None if limits_text is None else seen.rlimits(limits_text),
        cgroup=reader.attempt("cgroup", lambda: _cgroup(reader)),
        oom_score_adj=oom[0] if oom else None,
        unseen=tuple(dict.fromkeys(reader.unseen)),
    )


# -- parts ----------------------------------------------------------------------------------------------------


def _dumpable(reader: _Reader, uids: tuple[int, ...] | None) -> bool | None:
    """The kernel gives the files of one that is not to root; of a process of root's that cannot be told."""
    if uids is None or uids[1] == 0:
        return None
    return reader.attempt("status", lambda: os.stat("status", dir_fd=reader.fd).st_uid == uids[1])


def _threads(reader: _Reader, namespaces: Mapping[str, Namespace]) -> tuple[seen.Thread, ...]:
    found = []
    for name in _numbered(reader.path("task"))[: limits.ISOLATION_THREADS_MAX]:
        try:
            status = seen.status(_text(reader.fd, f"task/{name}/status"))
            apart = [
                kind
                for kind, of in namespaces.items()
                if os.readlink(f"task/{name}/ns/{kind}", dir_fd=reader.fd) != of.id
            ]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        found.append(seen.thread(int(name), status, apart))
    return tuple(found)


def _namespaces(reader: _Reader) -> dict[str, Namespace] | None:
    found = {}
    for name in seen.NAMESPACES:
        theirs = reader.attempt(f"ns/{name}", lambda name=name: os.readlink(f"ns/{name}", dir_fd=reader.fd))  # type: ignore[misc]
        if theirs is not None:
            found[name] = Namespace(theirs, theirs == reader.server.namespaces[name])
    return found or None


def _companions(pid: int, namespaces: Mapping[str, Namespace] | None) -> tuple[int, ...] | None:
    own = (namespaces or {}).get("pid")
    if own is None or own.shared:
        return None
    found = []
    for name in _numbered("/proc"):
        if int(name) == pid or _link(f"/proc/{name}/ns/pid") != own.id:
            continue
        inside = seen.numbers(seen.status(_text_of(Path(f"/proc/{name}/status"))).get("NSpid"))
        if (inside or (0,))[-1] != 1 and procfs.start_ticks(int(name)) is not None:
            found.append(int(name))
    return tuple(sorted(found)[: limits.ISOLATION_THREADS_MAX])


def _root(
    reader: _Reader, mounts: list[Mount], uids: tuple[int, ...] | None, gids: tuple[int, ...] | None
) -> Root:
    own = Path(reader.path("root")).stat()
    shared = (own.st_dev, own.st_ino) == reader.server.root
    inside: bool | None = None
    try:
        cwd = Path(reader.path("cwd")).stat()
        inside = (cwd.st_dev, cwd.st_ino) == (own.st_dev, own.st_ino)
    except OSError as error:
        reader.unseen.append(f"cwd: {os.strerror(error.errno or 0)}")
    walk = _Walk({mount.point: mount for mount in mounts}, (uids or (0,))[-1], (gids or (0,))[-1])
    # Of the server's own root there is nothing to say but that.
    if not shared and not any(kind.startswith(_NOT_LISTED) for kind in walk.types("/")):
        fd = os.open(reader.path("root"), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            walk.directory(fd, "", 0)
        finally:
            os.close(fd)
    return Root(
        shared=shared,
        entries=tuple(sorted(walk.entries)),
        more=walk.more,
        devices=tuple(sorted(walk.devices)),
        special=tuple(sorted(walk.special)),
        writable=tuple(sorted(walk.writable)),
        working_directory_inside=inside,
    )


class _Walk:
    """Through a root that is another's: links are not followed, nothing is opened but directories."""

    def __init__(self, mounts: Mapping[str, Mount], uid: int, gid: int) -> None:
        self._mounts, self._uid, self._gid = mounts, uid, gid
        self.entries: list[str] = []
        self.devices: list[str] = []
        self.special: list[str] = []
        self.writable: list[str] = []
        self.more = False

    def types(self, path: str) -> list[str]:
        mount = self._mounts.get(path)
        return [mount.type] if mount is not None else []

    def directory(self, fd: int, path: str, depth: int) -> None:
        for name in sorted(os.listdir(fd)):
            if len(self.entries) >= limits.ISOLATION_ENTRIES_MAX:
                self.more = True
                return
            here = f"{path}/{name}"
            try:
                found = os.stat(name, dir_fd=fd, follow_symlinks=False)
            except OSError:
                continue
            self._note(seen.plain(here), found)
            kinds = self.types(seen.plain(here))
            if not stat.S_ISDIR(found.st_mode) or any(
                kind.startswith((*_NOT_LISTED, "proc")) for kind in kinds
            ):
                continue
            if depth + 1 >= limits.ISOLATION_DEPTH_MAX:
                self.more = True
                continue
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            try:
                self.directory(below, here, depth + 1)
            finally:
                os.close(below)

    def _note(self, path: str, found: os.stat_result) -> None:
        self.entries.append(path)
        mode = found.st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            self.devices.append(f"{path} ({seen.device(os.major(found.st_rdev), os.minor(found.st_rdev))})")
            return
        if mode & (stat.S_ISUID | stat.S_ISGID):
            self.special.append(path)
        bit = 0o200 if found.st_uid == self._uid else 0o020 if found.st_gid == self._gid else 0o002
        if mode & bit and not stat.S_ISLNK(mode) and not self._read_only(path):
            self.writable.append(path)

    def _read_only(self, path: str) -> bool:
        while path not in self._mounts and path != "/":
            path = path.rpartition("/")[0] or "/"
        mount = self._mounts.get(path)
        return mount is not None and "ro" in mount.options


def _descriptors(reader: _Reader, namespaces: Mapping[str, Namespace]) -> tuple[Descriptor, ...]:
    sockets = reader.server.sockets
    space = namespaces.get("mnt")
    within = frozenset[str]()
    if space is not None and not space.shared:
        within = seen.mount_ids(reader.text("mountinfo") or "")
    own = _Sockets()
    own.add(lambda name: reader.text(f"net/{name}"))
    found = []
    for name in _numbered(reader.path("fd"))[: limits.ISOLATION_DESCRIPTORS_MAX]:
        try:
            found.append(_descriptor(reader, int(name), sockets, own, within))
        except FileNotFoundError:
            continue  # closed meanwhile
    return tuple(found)


def _descriptor(
    reader: _Reader, number: int, server: _Sockets, own: _Sockets, within: frozenset[str]
) -> Descriptor:
    """`within`: ids of the mounts of a namespace of its own."""
    # Held without being opened: what is asked of it is asked of one and the same thing.
    held = os.open(reader.path(f"fd/{number}"), os.O_PATH | os.O_CLOEXEC)
    try:
        target = _link(f"/proc/self/fd/{held}")
        about = os.fstat(held)
        fdinfo = _text(reader.fd, f"fdinfo/{number}")
        kind, shown = "file", target
        seals: tuple[str, ...] = ()
        whose: str | None = None
        if stat.S_ISSOCK(about.st_mode):
            kind, path = server.of(about.st_ino)
            if kind == "socket":
                kind, path = own.of(about.st_ino)
            shown = path or target
        elif stat.S_ISFIFO(about.st_mode):
            kind = "pipe"
        elif stat.S_ISDIR(about.st_mode):
            kind = "directory"
        elif stat.S_ISBLK(about.st_mode):
            kind = "block device"
        elif stat.S_ISCHR(about.st_mode):
            kind = seen.device(os.major(about.st_rdev), os.minor(about.st_rdev))
        elif target.startswith("anon_inode:"):
            kind = seen.anonymous(target)
        else:
            if target.startswith("/memfd:") and (bits := _seals(held)) is not None:
                kind, seals = "memory", seen.seals(bits)
            whose = reader.files.get(given.key(about))
            if whose is None and seen.mount_id(fdinfo) in within:
                whose = "root"
        return Descriptor(number, kind, seen.access(fdinfo), seen.plain(shown), seals, whose)
    finally:
        os.close(held)


def _seals(held: int) -> int | None:
    """None of a file on a disk, whose path may look like a memfd's."""
    fd = os.open(f"/proc/self/fd/{held}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return None
    finally:
        os.close(fd)


def _cgroup(reader: _Reader) -> Cgroup:
    paths = seen.cgroup_paths(_text(reader.fd, "cgroup"))
    mount, path = reader.server.cgroup2, paths.get("")
    if mount is None or path is None:
        first = next(iter(paths.items()), ("", "/"))
        return Cgroup(1, seen.plain(first[1]), paths == reader.server.cgroups, {})
    directory = mount / path.lstrip("/")
    values = {
        name: _text_of(directory / name).strip() for name in CGROUP_FILES if (directory / name).exists()
    }
    return Cgroup(2, seen.plain(path), path == reader.server.cgroups.get(""), values)


def _host(server: _Server) -> Host:
    controllers: set[str] = set()
    if server.cgroup2 is not None:
        controllers = set(_text_of(server.cgroup2 / "cgroup.controllers").split())
    return Host(
        kernel=platform.release(),
        cgroup2={"memory", "pids"} <= controllers,
        landlock=landlock_abi() > 0,
        swap=len(_text_of(Path("/proc/swaps")).splitlines()) > 1,
    )


def landlock_abi() -> int:
    """0 where the kernel has none, or has it switched off."""
    create_ruleset, version = 444, 1
    return max(0, int(ctypes.CDLL(None).syscall(create_ruleset, None, 0, version)))


# -- reading --------------------------------------------------------------------------------------------------


def _text(directory: int, name: str) -> str:
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory)
    with os.fdopen(fd, "rb") as file:
        return file.read(limits.ISOLATION_READ_BYTES_MAX).decode(errors="surrogateescape")


def _text_of(path: Path) -> str:
    """'' for what is not there or not ours to read."""
    try:
        with path.open("rb") as file:
            return file.read(limits.ISOLATION_READ_BYTES_MAX).decode(errors="surrogateescape")
    except OSError:
        return ""


def _numbered(directory: str) -> list[str]:
    """The entries of a directory of /proc whose names are numbers, in their order."""
    return sorted((path.name for path in Path(directory).iterdir() if path.name.isdigit()), key=int)


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""


def _digest(path: str) -> str:
    """SHA-256 of a regular file that may be another's to choose."""
    held = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(held).st_mode):
            raise ValueError("no regular file")
        if os.fstat(held).st_size > limits.ISOLATION_EXECUTABLE_BYTES_MAX:
            raise ValueError("too large")
        with Path(f"/proc/self/fd/{held}").open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    finally:
        os.close(held)
