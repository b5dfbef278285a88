"""What is promised of the processes around a guest, as data, and how it compares with what a report has seen. Pure.

SPECIFICATION.md (*Isolation*) says the same in words. What cannot be seen does not hold: a report that could not read
something is no proof.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from llm4agents.config import VMMS
from llm4agents.vmm.jail.seen import Descriptor, Isolation, Process, Thread

EVERY_SET = ("effective", "permitted", "inheritable", "ambient", "bounding")
HELD_SETS = ("effective", "permitted", "inheritable", "ambient")
"""Without the bounding set, which only bounds what an exec could gain: with `no_new_privs` that is nothing."""
ISOLATED = ("mnt", "pid", "net", "ipc", "uts", "cgroup")
QUIET_KINDS = frozenset({"file", "memory", "pipe", "unix", "eventfd", "eventpoll", "signalfd", "timerfd"})
"""Of descriptors that lead nowhere but to what was handed over, or to the process itself."""
KVM_KINDS = frozenset({"device kvm", "kvm-vm", "kvm-vcpu", "kvm-vcpu-stats", "kvm-vm-stats", "kvm-device"})


@dataclass(frozen=True, slots=True)
class Part:
    """What is promised of one process."""

    own_uid: bool
    """Neither root's nor the server's, all four alike, no group of root's, no supplementary one."""
    empty_sets: tuple[str, ...]
    """Capability sets with nothing in them but `capabilities`."""
    capabilities: tuple[str, ...] = ()
    no_new_privs: bool = True
    filters_min: int = 0
    """Seccomp filters over each thread."""
    filters_first: int | None = None
    """Over the first one, where it may have less: it waits for the others."""
    namespaces: tuple[str, ...] = ()
    """Of its own."""
    user_namespace: bool = False
    alone: bool = False
    """No process in its pid namespace but itself and that namespace's first."""
    own_root: bool = False
    root_read_only: bool = False
    places: tuple[str, ...] = ()
    """Directories in its root, each with a `/` at its end, below which lies what is this machine's own to write to."""
    devices: frozenset[str] = frozenset()
    """Device nodes in its root."""
    kinds: frozenset[str] | None = None
    """Of descriptors; None = not promised."""
    unix_below_run: bool = False
    """Unix sockets with a path are those of its own run directory."""
    own_files: tuple[str, ...] | None = None
    """What `Descriptor.given` of a file may be; None = not promised."""
    sealed: bool = False
    """All memory it has is what it was given. A template's, which a clone runs on, is sealed against everybody."""
    limits: Mapping[str, int] | None = None
    """Hard resource limits: not above these."""
    limited: tuple[str, ...] = ()
    """Resource limits that are not unlimited."""
    cgroup: tuple[str, ...] = ()
    """Bounds of a cgroup of its own, where the host has cgroup v2."""
    landlock: bool = False
    """Where the kernel has it."""
    undumpable: bool = False


@dataclass(frozen=True, slots=True)
class Difference:
    process: str
    name: str
    """Stable: `uid`, `capabilities`, `seccomp`, `namespaces`, `root`, `descriptors`, `limits`, `cgroup`, `landlock`…"""
    words: str
    host: bool = False
    """The host cannot give it (or only to root): not a broken promise, and still missing."""

    def __str__(self) -> str:
        return f"{self.process}: {self.words}"


Found = Iterator[tuple[str, str]]
_GIVEN = ("read", "write", "read-write")
_SEALED = frozenset({"write", "shrink", "grow"})
_VMM_LIMITS = {"core": 0, "nofile": 4096}
REFUSED = {
    "ns": "the host allows it no namespaces of its own",
    "root": "the host allows it no root of its own",
    "landlock": "landlock was refused",
    "seccomp": "our seccomp filter was refused",
}
"""What the shim could not do (`no-NAME=WHY`), in words."""
EXCUSED = {"ns": ("namespaces", "root", "processes"), "root": ("root",)}
"""What follows from that for the rest."""
_BOUNDS = ("memory.max", "memory.swap.max", "pids.max", "cpu.max")


def expected(driver: str, root: bool) -> dict[str, Part]:
    """The promise by process role, for a VMM of that driver started by root, or by an ordinary user."""
    if driver not in VMMS:
        raise ValueError(f"nothing is promised of a driver {driver!r}")
    vmm = Part(
        own_uid=root,
        empty_sets=EVERY_SET if root else HELD_SETS,
        # Its own and ours over it; Firecracker, whose jailer's jail it is, brings one for each kind of thread.
        filters_min=1 if driver == "firecracker" else 2,
        namespaces=ISOLATED,
        user_namespace=not root,
        alone=True,
        own_root=True,
        root_read_only=True,
        devices=frozenset({"device null", "device kvm", "device urandom"}),
        kinds=QUIET_KINDS | KVM_KINDS | {"device null", "device net/tun", "device urandom"},
        unix_below_run=True,
        # QEMU opens none by name, and the others what is bound into their roots.
        own_files=_GIVEN if driver == "qemu" else (*_GIVEN, "root"),
        sealed=driver == "qemu",
        limits=_VMM_LIMITS,
        limited=("fsize", "as", "nproc") if root else ("fsize", "as"),
        cgroup=_BOUNDS,
        landlock=driver != "firecracker",
    )
    if driver == "firecracker":
        # Its jailer drops ids and not the bounding set; the root is a directory of this machine's alone, into which
        # it binds its sockets, and where its tap is opened by name.
        vmm = replace(
            vmm,
            empty_sets=HELD_SETS,
            root_read_only=False,
            devices=vmm.devices | {"device net/tun", "device userfaultfd"},
            kinds=(vmm.kinds or frozenset()) | {"device userfaultfd", "userfaultfd"},
            limited=("fsize",),
        )
    if driver == "cloud-hypervisor":
        # It opens its disks by name, makes its vsock socket and writes its snapshots: where they are bound, and nowhere
        # else in a root that is read-only itself.
        # Its first thread starts those that have filters of their own, and waits.
        vmm = replace(vmm, places=("/io/", "/disks/"), filters_first=1)
    return {
        "vmm": vmm,
        "shim": Part(
            own_uid=False,
            # It ends a VMM of another uid, and takes its cgroup away.
            empty_sets=("effective", "permitted", "inheritable", "ambient"),
            capabilities=("kill",) if root else (),
        ),
        "gateway": Part(own_uid=root, empty_sets=HELD_SETS, limits={"core": 0}, undumpable=True),
        "intercept": Part(own_uid=root, empty_sets=HELD_SETS, limits={"core": 0}, undumpable=True),
    }


def compare(report: Isolation, promised: Mapping[str, Part]) -> list[Difference]:
    """What of `promised` does not hold, in words, in the order of the report's processes. Empty: all of it holds."""
    found: list[Difference] = []
    for process in report.processes:
        part = promised.get(process.role)
        if part is not None:
            found += _compare(process, part, report)
    refused = {
        name.removeprefix("no-"): words for name, words in report.said.items() if name.startswith("no-")
    }
    for name, words in refused.items():
        if name in REFUSED:
            said = f"{REFUSED[name]}: {str(words).replace('_', ' ')}"
            found.append(Difference("vmm", name, said, host=not report.as_root))
    if report.said.get("proc") == "shared":
        found.append(
            Difference("vmm", "proc", "its /proc shows the server's processes too", host=not report.as_root)
        )
    if not report.as_root:
        # What the shim was refused as an ordinary user is why these differ; of root it would be a promise broken.
        excused = {name for of in refused for name in EXCUSED.get(of, ())}
        found = [replace(one, host=True) if one.name in excused else one for one in found]
        found.append(
            Difference(
                "vmm",
                "uid",
                "it has no uid of its own: only a server that is root's can give it one",
                host=True,
            )
        )
    why = None if report.host.cgroup2 else "this host has no cgroup v2 with those controllers"
    if (refusal := report.said.get("no-cgroup")) is not None:
        why = str(refusal).replace("_", " ")
    if why is not None and any(part.cgroup for part in promised.values()):
        found = [one for one in found if one.name != "cgroup"]
        words = f"no cgroup bounds its memory, processes and cpu: {why} (rlimits and the guest's shape hold)"
        found.append(Difference("vmm", "cgroup", words, host=True))
    if any(part.landlock for part in promised.values()) and not report.host.landlock:
        found.append(Difference("vmm", "landlock", "the host's kernel has no landlock", host=True))
    return found


def _compare(process: Process, part: Part, report: Isolation) -> Iterator[Difference]:
    def differs(name: str, words: str) -> Difference:
        return Difference(process.role, name, words)

    for check in (_ids, _rights, _spaces, _rooted, _descriptors, _bounds):
        for name, words in check(process, part, report):
            yield differs(name, words)
    if part.undumpable and process.dumpable:
        yield differs("dumpable", "processes of its uid may look into it")
    needed = _needed(part)
    for words in process.unseen:
        if words.partition(":")[0].partition("/")[0] in needed:
            yield differs("unseen", f"not seen, so not known to hold: {words}")


def _needed(part: Part) -> set[str]:
    names = {"status", "task"}
    names |= {"ns"} if part.namespaces or part.user_namespace else set()
    names |= {"root", "mountinfo", "cwd"} if part.own_root else set()
    names |= {"fd", "fdinfo"} if part.kinds is not None else set()
    names |= {"limits"} if part.limits or part.limited else set()
    return names | ({"cgroup"} if part.cgroup else set())


def _ids(process: Process, part: Part, report: Isolation) -> Found:
    if not part.own_uid:
        return
    if process.uids is None or process.gids is None or process.groups is None:
        yield "uid", "its uids and gids cannot be seen"
        return
    if 0 in process.uids:
        yield "uid", "it has root's uid"
    elif len(set(process.uids)) != 1:
        yield "uid", f"its uids differ: {_join(process.uids)}"
    if 0 in process.gids or 0 in process.groups:
        yield "gid", "it is of root's group"
    if process.groups:
        yield "gid", f"it has supplementary groups: {_join(process.groups)}"


def _rights(process: Process, part: Part, report: Isolation) -> Found:
    if process.capabilities is None:
        yield "capabilities", "its capabilities cannot be seen"
    else:
        for name in part.empty_sets:
            if extra := [cap for cap in process.capabilities[name] if cap not in part.capabilities]:
                all_of = len(extra) > 8
                yield (
                    "capabilities",
                    f"its {name} set has {f'{len(extra)} capabilities' if all_of else _join(extra)}",
                )
    if not process.threads:
        yield "seccomp", "its threads cannot be seen"
    said: dict[tuple[str, str], list[Thread]] = {}
    for thread in process.threads or ():
        for name, words in _of_thread(thread, part, first=thread.tid == process.pid):
            said.setdefault((name, words), []).append(thread)
    for (name, words), threads in said.items():
        which = _join(f"{thread.tid} ({thread.name})" for thread in threads[:2])
        if len(threads) == len(process.threads or ()) > 1:
            which = f"all {len(threads)} threads"
        elif len(threads) > 2:
            which = f"{len(threads)} threads, {which}, …"
        yield name, f"{which}: {words}"


def _of_thread(thread: Thread, part: Part, *, first: bool) -> Found:
    wanted = part.filters_min
    if first and part.filters_first is not None:
        wanted = part.filters_first
    if part.no_new_privs and thread.no_new_privs is not True:
        yield "no_new_privs", "without no_new_privs"
    if thread.effective is None or set(thread.effective) - set(part.capabilities):
        yield "capabilities", "effective capabilities"
    if wanted and thread.seccomp != "filter":
        yield "seccomp", f"no seccomp filter: {thread.seccomp or 'not seen'}"
    elif wanted and (count := thread.seccomp_filters) is not None and count < wanted:
        yield "seccomp", f"{count} of {wanted} seccomp filters"
    if thread.apart:
        yield "namespaces", f"in other namespaces than its process: {_join(thread.apart)}"


def _spaces(process: Process, part: Part, report: Isolation) -> Found:
    spaces = process.namespaces or {}
    for name in (*part.namespaces, *(["user"] if part.user_namespace else [])):
        if name not in spaces:
            yield "namespaces", f"its {name} namespace cannot be seen"
        elif spaces[name].shared:
            yield "namespaces", f"it is in the server's {name} namespace"
    # The namespace's first may be a process of ours that holds it (`Launcher`).
    if part.alone and (others := process.companions):
        more = "process lives" if len(others) == 1 else "processes live"
        yield "processes", f"{len(others)} more {more} in its pid namespace: {_join(others[:8])}"


def _rooted(process: Process, part: Part, report: Isolation) -> Found:
    root = process.root
    if not part.own_root:
        return
    if root is None:
        yield "root", "its root cannot be seen"
        return
    if root.shared:
        yield "root", "its root is the server's: every file of the host has a name for it"
        return
    if root.working_directory_inside is not True:
        yield "root", "its working directory is not its root"
    if root.more:
        yield "root", "more lies in its root than is looked at"
    if root.special:
        yield "root", f"set-user-id files lie in its root: {_join(root.special[:4])}"
    if odd := [node for node in root.devices if node.rpartition("(")[2].rstrip(")") not in part.devices]:
        yield "root", f"devices lie in its root that it does not need: {_join(odd[:4])}"
    if part.root_read_only and (open_to := [path for path in root.writable if not _own_place(path, part)]):
        yield "root", f"it can write in its root: {_join(open_to[:4])}"
    mounts = process.mounts or ()
    if not any(mount.point == "/" for mount in mounts):
        yield "root", "its root is no mount of its own"
    elif part.root_read_only and not any(m.point == "/" and "ro" in m.options for m in mounts):
        yield "root", "its root is not mounted read-only"
    if flowing := [mount.point for mount in mounts if mount.propagates]:
        yield "root", f"mounts are not private: {_join(flowing[:4])}"
    for mount in mounts:
        if mount.type == "proc" and "ro" not in mount.options:
            yield "root", f"{mount.point} is a writable /proc"
        if mount.type in ("sysfs", "cgroup", "cgroup2", "debugfs", "tracefs", "securityfs", "bpf"):
            yield "root", f"{mount.point} is a {mount.type}, which it does not need"


def _descriptors(process: Process, part: Part, report: Isolation) -> Found:
    if part.kinds is None:
        return
    if process.descriptors is None:
        yield "descriptors", "its descriptors cannot be seen"
        return
    if part.own_files is not None and not report.files_known:
        words = "which files are its own was not written down when it started: pause and resume it"
        yield "descriptors", words
    if part.sealed and report.clone and not any(entry.kind == "memory" for entry in process.descriptors):
        yield "descriptors", "it has no memory of its template open, so none that is known to be sealed"
    for entry in process.descriptors:
        which = f"descriptor {entry.number} ({entry.target})"
        if entry.kind not in part.kinds:
            yield "descriptors", f"{which} is a {entry.kind}, which it does not need"
        elif (
            entry.kind == "unix"
            and part.unix_below_run
            and not (_own_socket(entry, report.run_dir) or _own_place(entry.target, part))
        ):
            yield "descriptors", f"{which} is a socket of somebody else's"
        elif part.sealed and entry.kind == "memory" and _unsealed(entry, report.clone):
            yield "descriptors", f"{which} is memory of a template that is not sealed"
        elif (entry.kind == "memory" and part.sealed) or (
            entry.kind == "file" and part.own_files is not None
        ):
            for words in _not_own(entry, part) if report.files_known else ():
                yield "descriptors", f"{which} {words}"


def _own_place(path: str, part: Part) -> bool:
    """Whether `path`, as the process sees it, is where this machine's own is."""
    return any(f"{path}/" == place or path.startswith(place) for place in part.places)


def _own_socket(entry: Descriptor, run_dir: str) -> bool:
    path = entry.target
    # Without a path it is one end of a pair, or of a connection; with a relative one, of its own root (jailer). Ours
    # are bound through a descriptor of the run directory.
    if not path.startswith(("/", "@")) or path.startswith(run_dir.rstrip("/") + "/"):
        return True
    return re.fullmatch(r"/proc/self/fd/\d+/(qmp|agent|api|vsock|link)[a-z0-9_.]*", path) is not None


def _not_own(entry: Descriptor, part: Part) -> Iterator[str]:
    if entry.given not in (part.own_files or ()):
        yield f"is {'memory' if entry.kind == 'memory' else 'a file'} that was not given to it"
    elif entry.kind == "file" and entry.given == "read" and entry.access in ("write", "read-write"):
        yield f"is open for {entry.access}, and was given to it to be read"


def _unsealed(entry: Descriptor, clone: bool) -> bool:
    """A clone's is sealed whole, but for what it was given to write its state to. One that was booted has a memory of
    its own without a seal; what it has that is sealed at all (kernel, initramfs) is sealed whole."""
    wanted = entry.given != "write" if clone else bool(entry.seals)
    return wanted and not set(entry.seals) >= _SEALED


def _bounds(process: Process, part: Part, report: Isolation) -> Found:
    limits = process.limits
    if limits is None and (part.limits or part.limited):
        yield "limits", "its resource limits cannot be seen"
    for name, most in (part.limits or {}).items():
        value = (limits or {}).get(name)
        if limits is not None and (value is None or value > most):
            yield "limits", f"its limit of {name} is {'unlimited' if value is None else value}, not {most}"
    for name in part.limited:
        if limits is not None and limits.get(name) is None:
            yield "limits", f"it has no limit of {name}"
    if part.cgroup and report.host.cgroup2:
        group = process.cgroup
        if group is None or group.version != 2 or group.shared:
            yield "cgroup", "it is in no cgroup of its own"
        else:
            for name in part.cgroup:
                if group.limits.get(name, "max").startswith("max"):
                    yield "cgroup", f"its cgroup has no {name}"
    if part.landlock and report.host.landlock and not report.said.get("landlock"):
        yield "landlock", "no landlock ruleset was put over it"


def _join(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in values)
