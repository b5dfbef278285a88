"""What an isolation report says of a process, and how the text of /proc is read. Pure.

Everything a process can choose itself (its name, command line, the names of its descriptors, sockets and mounts) is
hostile here: it is cut, and what is not plain text in it is escaped, so that it can be shown on a terminal.

Not here: reading /proc (`isolation`), what is promised (`promises`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from llm4agents import limits

CAPABILITIES = (
    *("chown", "dac_override", "dac_read_search", "fowner", "fsetid", "kill", "setgid", "setuid", "setpcap"),
    *(
        "linux_immutable",
        "net_bind_service",
        "net_broadcast",
        "net_admin",
        "net_raw",
        "ipc_lock",
        "ipc_owner",
    ),
    *(
        "sys_module",
        "sys_rawio",
        "sys_chroot",
        "sys_ptrace",
        "sys_pacct",
        "sys_admin",
        "sys_boot",
        "sys_nice",
    ),
    *("sys_resource", "sys_time", "sys_tty_config", "mknod", "lease", "audit_write", "audit_control"),
    *("setfcap", "mac_override", "mac_admin", "syslog", "wake_alarm", "block_suspend", "audit_read"),
    *("perfmon", "bpf", "checkpoint_restore"),
)
"""By number."""
CAPABILITY_SETS = {
    "CapInh": "inheritable",
    "CapPrm": "permitted",
    "CapEff": "effective",
    "CapBnd": "bounding",
    "CapAmb": "ambient",
}
NAMESPACES = ("mnt", "pid", "net", "ipc", "uts", "cgroup", "user", "time")
RLIMITS = {
    "Max core file size": "core",
    "Max file size": "fsize",
    "Max open files": "nofile",
    "Max processes": "nproc",
    "Max address space": "as",
    "Max locked memory": "memlock",
    "Max cpu time": "cpu",
}
SECCOMP = {0: "off", 1: "strict", 2: "filter"}
SEALS = {1: "seal", 2: "shrink", 4: "grow", 8: "write", 16: "future_write", 32: "exec"}
DEVICES = {
    (1, 3): "null",
    (1, 5): "zero",
    (1, 8): "random",
    (1, 9): "urandom",
    (10, 126): "userfaultfd",
    (10, 200): "net/tun",
    (10, 229): "fuse",
    (10, 232): "kvm",
    (10, 238): "vhost-net",
    (10, 241): "vhost-vsock",
}
"""By (major, minor): the name under /dev that a node of any name stands for."""
_ESCAPED = {"\\": "\\\\", "\n": "\\n", "\t": "\\t"}
_ACCESS = {0: "read", 1: "write", 2: "read-write", 3: "none"}
_O_PATH = 0o10000000


@dataclass(frozen=True, slots=True)
class Thread:
    tid: int
    name: str
    seccomp: str | None
    """`off`, `strict` or `filter`."""
    seccomp_filters: int | None
    """How many lie over each other; None before Linux 5.9."""
    no_new_privs: bool | None
    effective: tuple[str, ...] | None
    """Capabilities; None where they cannot be read."""
    apart: tuple[str, ...] = ()
    """Namespaces in which it is not where its process is."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    number: int
    kind: str
    """`file`, `memory` (memfd), `directory`, `device NAME`, `block device`, `pipe`, `unix`, `inet`, `netlink`,
    `packet`, `socket` (of a kind not found), or the kernel's name of an anonymous one: `eventfd`, `kvm-vm`…"""
    access: str
    """`read`, `write`, `read-write`, `path` (no access to what is in it) or `none`."""
    target: str
    """As the kernel names it, escaped; never what is in it."""
    seals: tuple[str, ...] = ()
    given: str | None = None
    """Of a `file` or `memory`: `read`, `write` or `read-write` as the server gave it, `root` when it was opened within
    a mount namespace of its own; None: neither."""


@dataclass(frozen=True, slots=True)
class Namespace:
    id: str
    shared: bool
    """It is the server's own."""


@dataclass(frozen=True, slots=True)
class Mount:
    point: str
    type: str
    options: tuple[str, ...]
    propagates: bool
    """Mounts made here or elsewhere appear in the other place too."""


@dataclass(frozen=True, slots=True)
class Root:
    shared: bool
    """It is the server's own root directory."""
    entries: tuple[str, ...]
    """Paths of what lies in it, escaped, sorted, at most ISOLATION_ENTRIES_MAX."""
    more: bool
    devices: tuple[str, ...]
    special: tuple[str, ...]
    """Of `entries` those with set-user-id or set-group-id bits."""
    writable: tuple[str, ...]
    """Of `entries` those its uid may write by their mode, and whose mount lets it."""
    working_directory_inside: bool | None


@dataclass(frozen=True, slots=True)
class Cgroup:
    version: int
    path: str
    shared: bool
    """It is the server's own group."""
    limits: Mapping[str, str]
    """`memory.max`, `pids.max`…: as the kernel says them; only those that are there."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process. A field that could not be read is None, and `unseen` says why."""

    role: str
    """`vmm`, `shim`, `gateway`, `intercept`."""
    pid: int
    name: str
    executable: str | None
    executable_sha256: str | None
    uids: tuple[int, ...] | None
    """Real, effective, saved, of the file system."""
    gids: tuple[int, ...] | None
    groups: tuple[int, ...] | None
    dumpable: bool | None
    """Whether another process of its uid may look into it; cannot be told of root's."""
    capabilities: Mapping[str, tuple[str, ...]] | None
    """By set: inheritable, permitted, effective, bounding, ambient."""
    threads: tuple[Thread, ...] | None
    namespaces: Mapping[str, Namespace] | None
    pid_inside: int | None
    """Its pid in its own pid namespace."""
    companions: tuple[int, ...] | None
    """Other processes in its pid namespace (unless that is the server's) but that namespace's first."""
    root: Root | None
    mounts: tuple[Mount, ...] | None
    descriptors: tuple[Descriptor, ...] | None
    limits: Mapping[str, int | None] | None
    """Hard resource limits; None = unlimited. Bytes, processes, files."""
    cgroup: Cgroup | None
    oom_score_adj: int | None
    unseen: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Host:
    """What this host can give at all."""

    kernel: str
    cgroup2: bool
    """A cgroup v2 hierarchy with the controllers memory and pids is there."""
    landlock: bool
    swap: bool


@dataclass(frozen=True, slots=True)
class Isolation:
    driver: str
    as_root: bool
    """Whether the server that started it is root."""
    said: Mapping[str, Any]
    """What the shim said of the jail it made (`MachineRecord.extra["jail"]`): `landlock` the ABI, `no-NAME` why not."""
    run_dir: str
    host: Host
    processes: tuple[Process, ...]
    clone: bool = True
    """It runs on the memory of a template; else it was booted, and its memory is its own."""
    files_known: bool = True
    """Which files it was given was written down when it started."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plain(text: str | bytes, characters_max: int = limits.ISOLATION_TEXT_CHARACTERS_MAX) -> str:
    """Text that a terminal and a log can be given: what is not printable is escaped, what is too long is cut."""
    if isinstance(text, bytes):
        text = text.decode(errors="surrogateescape")
    cut = text[: characters_max + 1]
    shown = "".join(letter if letter.isprintable() and letter != "\\" else _escape(letter) for letter in cut)
    return shown if len(shown) <= characters_max else shown[: characters_max - 1] + "…"


def _escape(letter: str) -> str:
    code = ord(letter)
    if letter in _ESCAPED:
        return _ESCAPED[letter]
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is no UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def status(text: str) -> dict[str, str]:
    """/proc/PID/status. `Name` comes first and is the process's own to choose, but the kernel escapes its newlines."""
    found: dict[str, str] = {}
    for line in text.split("\n"):
        name, _, value = line.partition(":")
        found.setdefault(name, value.strip())
    return found


def numbers(words: str | None) -> tuple[int, ...] | None:
    try:
        return None if words is None else tuple(int(word) for word in words.split())
    except ValueError:
        return None


def capability_names(hexadecimal: str) -> tuple[str, ...]:
    """Of a set as /proc writes it. Numbers we have no name for are `cap_N`."""
    bits = int(hexadecimal, 16)
    return tuple(
        CAPABILITIES[bit] if bit < len(CAPABILITIES) else f"cap_{bit}"
        for bit in range(bits.bit_length())
        if bits >> bit & 1
    )


def capabilities(of: Mapping[str, str]) -> dict[str, tuple[str, ...]] | None:
    try:
        return {name: capability_names(of[key]) for key, name in CAPABILITY_SETS.items()}
    except (KeyError, ValueError):
        return None


def thread(tid: int, of: Mapping[str, str], apart: Iterable[str] = ()) -> Thread:
    mode, filters = numbers(of.get("Seccomp")), numbers(of.get("Seccomp_filters"))
    caps = capabilities(of)
    return Thread(
        tid=tid,
        name=plain(of.get("Name", "")),
        seccomp=SECCOMP.get(mode[0], str(mode[0])) if mode else None,
        seccomp_filters=filters[0] if filters else None,
        no_new_privs={"0": False, "1": True}.get(of.get("NoNewPrivs", "")),
        effective=None if caps is None else caps["effective"],
        apart=tuple(apart),
    )


def rlimits(text: str) -> dict[str, int | None]:
    """/proc/PID/limits: the hard limits; None = unlimited."""
    found: dict[str, int | None] = {}
    for line in text.split("\n"):
        words = re.split(r"\s{2,}", line.strip())
        name = RLIMITS.get(words[0])
        if name is not None and len(words) >= 3:
            found[name] = None if words[2] == "unlimited" else int(words[2])
    return found


def mounts(text: str) -> list[Mount]:
    """/proc/PID/mountinfo, at most ISOLATION_MOUNTS_MAX."""
    found = []
    for line in text.split("\n")[: limits.ISOLATION_MOUNTS_MAX]:
        before, separator, after = line.partition(" - ")
        words = before.split()
        if not separator or len(words) < 6:
            continue
        propagates = any(word.startswith(("shared:", "master:", "propagate_from:")) for word in words[6:])
        # Of the mount itself and of the file system: either can forbid writing.
        options = dict.fromkeys(
            [*words[5].split(","), *(["ro"] if "ro" in after.split()[-1].split(",") else [])]
        )
        options.pop("relatime", None)
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), words[4])
        found.append(Mount(plain(point), plain(after.split()[0]), tuple(options), propagates))
    return found


def cgroup_paths(text: str) -> dict[str, str]:
    """/proc/PID/cgroup: path by controllers; that of version 2 under the empty name."""
    found = {}
    for line in text.split("\n"):
        number, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if separator:
            found["" if number == "0" else controllers] = path
    return found


def access(fdinfo: str) -> str:
    flags = next((line.split()[1] for line in fdinfo.split("\n") if line.startswith("flags:")), "0")
    value = int(flags, 8)
    return "path" if value & _O_PATH else _ACCESS[value & 3]


def mount_ids(text: str) -> frozenset[str]:
    """/proc/PID/mountinfo: those of all its mounts."""
    return frozenset(line.partition(" ")[0] for line in text.split("\n"))


def mount_id(fdinfo: str) -> str | None:
    """Of the mount that it was opened through, which may be one of another namespace."""
    return next((line.split()[1] for line in fdinfo.split("\n") if line.startswith("mnt_id:")), None)


def seals(bits: int) -> tuple[str, ...]:
    return tuple(name for bit, name in SEALS.items() if bits & bit)


def device(major: int, minor: int) -> str:
    name = DEVICES.get((major, minor))
    return f"device {name}" if name else f"device {major}:{minor}"


def anonymous(target: str) -> str:
    """The kind of a descriptor that has neither a file nor a socket under it.

    `anon_inode:[eventfd]` is `eventfd`, `anon_inode:kvm-vcpu:0` is `kvm-vcpu`.
    """
    name = re.sub(r":\d+$", "", target.partition(":")[2].strip("[]"))
    return plain(name or target, 32)


def unix_sockets(text: str) -> dict[int, str]:
    """/proc/PID/net/unix: the path each is bound to ('' for none; @ begins an abstract one), by inode.

    A path may hold line feeds, and so look like lines of its own: what the table says first of an inode counts.
    """
    found: dict[int, str] = {}
    for line in text.split("\n")[1:]:
        words = line.split(None, 7)
        if len(words) >= 7 and words[6].isdigit():
            found.setdefault(int(words[6]), words[7] if len(words) > 7 else "")
    return found


def socket_inodes(text: str, table: str) -> set[int]:
    """Of /proc/PID/net/{tcp,udp,raw}[6] (`inet`), `netlink` and `packet`."""
    column = 8 if table == "packet" else 9
    rows = (line.split() for line in text.split("\n")[1:])
    return {int(words[column]) for words in rows if len(words) > column and words[column].isdigit()}
