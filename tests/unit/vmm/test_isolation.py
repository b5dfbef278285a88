"""The isolation report: what a hostile process shows of itself, and that each broken promise is told, in words."""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from llm4agents import limits
from llm4agents.cli import confinement
from llm4agents.errors import ConflictError
from llm4agents.sdk import results
from llm4agents.vmm import given, procfs
from llm4agents.vmm.base import MachineRecord
from llm4agents.vmm.jail import isolation, promises, seen
from llm4agents.vmm.jail.seen import (
    Cgroup,
    Descriptor,
    Host,
    Isolation,
    Mount,
    Namespace,
    Process,
    Root,
    Thread,
)

# -- text that a hostile process chooses --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("qemu-system-x86", "qemu-system-x86"),
        ("\x1b[2J\x1b]0;root\x07", r"\x1b[2J\x1b]0;root\x07"),
        ("a\nok: all well\tb", r"a\nok: all well\tb"),
        (b"caf\xc3\xa9 \xff", r"café \xff"),
        ("\u202egnp.exe\u2028", r"\u202egnp.exe\u2028"),
        ("back\\slash", r"back\\slash"),
        ("\U000e0041", r"\U000e0041"),
    ],
)
def test_what_would_move_a_terminal_is_escaped(given: str | bytes, shown: str) -> None:
    assert seen.plain(given) == shown
    assert seen.plain(given).isprintable()


def test_what_is_long_is_cut() -> None:
    for text in ("x" * 10_000, "\n" * 10_000):
        assert len(seen.plain(text)) == limits.ISOLATION_TEXT_CHARACTERS_MAX


def test_lines_of_a_status_are_the_kernels() -> None:
    found = seen.status("Name:\tx\\nUid:\t0\nUid:\t7\t7\t7\t7\nSeccomp:\t2\n\rSeccomp:\t0\n")
    assert (found["Uid"], found["Seccomp"]) == ("7\t7\t7\t7", "2")


def test_sockets_that_a_path_with_line_feeds_claims_are_not_believed() -> None:
    table = (
        "Num RefCount Protocol Flags Type St Inode Path\n"
        "0000000000000000: 00000002 00000000 00010000 0001 01    11 /run/a\n"
        "0000000000000000: 00000002 00000000 00010000 0001 01    12 @x\n"
        "0000000000000000: 00000002 00000000 00010000 0001 01    11 /forged\n"
        "0000000000000000: 00000003 00000000 00000000 0001 03    13\n"
        "not a line\n"
    )
    assert seen.unix_sockets(table) == {11: "/run/a", 12: "@x", 13: ""}


def test_mounts() -> None:
    text = (
        "1 0 8:1 /cache/jail / ro,nosuid,nodev,relatime - ext4 /dev/sda rw\n"
        "2 1 0:5 / /a\\040b\\012c rw shared:4 - tmpfs none ro,size=1k\n"
        "short line\n"
    )
    assert seen.mounts(text) == [
        Mount("/", "ext4", ("ro", "nosuid", "nodev"), False),
        Mount(r"/a b\nc", "tmpfs", ("rw", "ro"), True),
    ]


def test_limits_and_capabilities() -> None:
    text = (
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max core file size        0                    0                    bytes     \n"
        "Max processes             128                  unlimited            processes \n"
    )
    assert seen.rlimits(text) == {"core": 0, "nproc": None}
    assert seen.capability_names("0000000000000021") == ("chown", "kill")
    assert seen.capability_names("8000000000000000") == ("cap_63",)
    assert len(seen.capability_names("000001ffffffffff")) == 41


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("anon_inode:[eventfd]", "eventfd"),
        ("anon_inode:kvm-vm", "kvm-vm"),
        ("anon_inode:kvm-vcpu:12", "kvm-vcpu"),
        ("anon_inode:", "anon_inode:"),
    ],
)
def test_kinds_of_what_is_no_file(target: str, kind: str) -> None:
    assert seen.anonymous(target) == kind


# -- a real process -----------------------------------------------------------------------------------------

HOSTILE = textwrap.dedent(
    """
    import ctypes, os, socket, sys, threading
    libc = ctypes.CDLL(None)
    def renamed(name):
        libc.prctl(15, name, 0, 0, 0)
    renamed(b"\\x1b[31mok\\nUid:\\t0")
    memory = os.memfd_create("\\x1b]0;owned\\x07", os.MFD_ALLOW_SEALING)
    directory = os.open("/", os.O_RDONLY)
    unix, pair = socket.socketpair()
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(sys.argv[1])
    inet = socket.socket()
    inet.listen()
    stop = threading.Event()
    thread = threading.Thread(target=lambda: (renamed(b"\\x1b[2Jvcpu"), print("up", flush=True), stop.wait()))
    thread.start()
    sys.stdin.read()
    stop.set()
    """
)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    path = tmp_path_factory.mktemp("s") / "evil\n\x1b[2J.sock"
    argv = [sys.executable, "-c", HOSTILE, str(path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process, path
        assert process.stdin is not None
        process.stdin.close()


def test_a_process_as_it_is(hostile: tuple[subprocess.Popen[str], Path]) -> None:
    process, path = hostile
    found = isolation.worker("vmm", process.pid)
    assert found is not None
    assert found.unseen == ()
    assert found.name == r"\x1b[31mok\\nUid:\t0"
    assert found.uids == (*os.getresuid(), os.geteuid())
    assert found.pid_inside is not None
    assert found.namespaces is not None
    assert all(space.shared for space in found.namespaces.values())
    assert found.root is not None
    assert (found.root.shared, found.root.entries) == (True, ())
    assert found.threads is not None
    assert [thread.name for thread in found.threads][1:] == [r"\x1b[2Jvcpu"]
    assert found.limits is not None
    assert found.limits["nofile"] is not None
    kinds = {entry.kind: entry for entry in found.descriptors or ()}
    assert kinds["memory"].target == r"/memfd:\x1b]0;owned\x07 (deleted)"
    assert kinds["directory"].target == "/"
    assert {"pipe", "inet", "unix"} <= set(kinds)
    bound = [entry.target for entry in found.descriptors or () if entry.kind == "unix"]
    # The kernel prints such a path in two lines: it is seen up to its line feed.
    assert any(target == seen.plain(str(path).partition("\n")[0]) for target in bound)
    for text in (json.dumps(dataclasses.asdict(found)), "\n".join(confinement.lines(shown(found)))):
        assert "\x1b" not in text


def shown(process: Process) -> results.Isolation:
    report = Isolation("qemu", os.geteuid() == 0, {}, "/run/x", Host("6", True, True, False), (process,))
    return results.isolation(json.loads(json.dumps(isolation.describe(report))))


def test_seals_are_asked_of_the_kernel() -> None:
    fd = os.memfd_create("ram", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW)
        own = isolation.worker("vmm", os.getpid())
        assert own is not None
        (memory,) = (entry for entry in own.descriptors or () if entry.number == fd)
        assert (memory.kind, memory.seals) == ("memory", ("grow", "write"))
    finally:
        os.close(fd)


def test_a_file_that_is_called_like_sealed_memory_is_none(tmp_path: Path) -> None:
    # Only a path in a root of one's own can begin so; what is asked for is its seals, and it has none.
    with (tmp_path / "x").open("w") as file:
        held = os.open(f"/proc/self/fd/{file.fileno()}", os.O_PATH | os.O_CLOEXEC)
        try:
            assert isolation._seals(held) is None
        finally:
            os.close(held)


def test_whose_a_file_is_is_told_by_its_inode(tmp_path: Path) -> None:
    """Of what was given, what it writes to now, and what it has besides; this process in a VMM's place."""
    ticks = procfs.start_ticks(os.getpid())
    assert ticks is not None
    ram = os.memfd_create("ram", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    root, top, state = (tmp_path / name for name in ("root", "top", "state.db"))
    for path in (root, top, state):
        path.touch()
    modes = ((root, os.O_RDONLY), (top, os.O_RDWR), (state, os.O_RDWR))
    fds = [os.open(path, mode | os.O_CLOEXEC) for path, mode in modes]
    reader, writer = os.pipe()
    try:
        own = given.files([ram, fds[0], reader])
        assert sorted(own.values()) == ["read", "read-write"]
        record = MachineRecord("qemu", "m", tmp_path, *(os.getpid(), ticks) * 2, 0, {"files": own})
        root.rename(tmp_path / "elsewhere")
        found = isolation.report(record, [top])
        assert (found.files_known, found.clone) == (True, False)
        by_number = {entry.number: entry for entry in found.processes[0].descriptors or ()}
        assert [by_number[fd].given for fd in (ram, *fds, reader)] == [
            "read-write",
            "read",
            "read-write",
            None,
            None,
        ]
        given.note(record, state.stat(), "write")
        by_number = {entry.number: entry for entry in isolation.report(record).processes[0].descriptors or ()}
        assert [by_number[fd].given for fd in fds[1:]] == [None, "write"]
        given.forget_written(record)
        assert given.of(record) == own
        assert len(own) == 2
        assert not isolation.report(dataclasses.replace(record, extra={"base": "x"})).files_known
    finally:
        for fd in (ram, *fds, reader, writer):
            os.close(fd)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a mount namespace")
def test_a_file_opened_in_a_mount_namespace_of_its_own_is_of_its_root() -> None:
    script = "import sys; own = open('/etc/hostname'); print(own.fileno(), flush=True); sys.stdin.read()"
    with Path("/etc/passwd").open() as inherited:
        child = subprocess.Popen(
            ["unshare", "--mount", sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[inherited.fileno()],
        )
        with child:
            assert child.stdin is not None
            assert child.stdout is not None
            opened = int(child.stdout.readline())
            found = isolation.worker("vmm", child.pid)
            child.stdin.close()
        assert found is not None
        by_number = {entry.number: entry for entry in found.descriptors or ()}
        assert by_number[opened].given == "root"
        assert by_number[inherited.fileno()].given is None


def test_another_process_under_the_same_pid_is_not_looked_at(tmp_path: Path) -> None:
    ticks = procfs.start_ticks(os.getpid())
    assert ticks is not None
    record = MachineRecord("qemu", "m", tmp_path, os.getpid(), ticks, os.getpid(), ticks + 1, 0)
    with pytest.raises(ConflictError, match="has ended"):
        isolation.report(record)
    assert isolation.worker("gateway", 2**22 + 1) is None


def test_what_may_not_be_read_is_told_and_does_not_hold() -> None:
    if os.geteuid() != 0:
        pytest.skip("as an ordinary user nobody else's process is there for certain")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # another user looks at a process of root's
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        # A change of uid makes it undumpable; then its own /proc is root's.
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
        found = isolation.worker("vmm", os.getppid())
        os.write(writer, json.dumps(None if found is None else dataclasses.asdict(found)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        body = json.loads(pipe.read())
    os.waitpid(child, 0)
    assert body["descriptors"] is None
    assert body["root"] is None
    assert any(words.startswith("fd: Permission denied") for words in body["unseen"])


# -- promises -----------------------------------------------------------------------------------------------

UID = 0x7000_0001
CAPS: Mapping[str, tuple[str, ...]] = dict.fromkeys(promises.EVERY_SET, ())


SEALED = ("seal", "shrink", "grow", "write")


def a_thread(**changes: Any) -> Thread:
    return dataclasses.replace(Thread(10, "qemu", "filter", 2, True, ()), **changes)


def a_vmm(**changes: Any) -> Process:
    spaces = {name: Namespace(f"{name}:[2]", False) for name in promises.ISOLATED}
    spaces["user"] = Namespace("user:[1]", True)
    whole = Process(
        role="vmm",
        pid=10,
        name="qemu",
        executable="/qemu",
        executable_sha256="0" * 64,
        uids=(UID,) * 4,
        gids=(UID,) * 4,
        groups=(),
        dumpable=True,
        capabilities=CAPS,
        threads=(a_thread(),),
        namespaces=spaces,
        pid_inside=1,
        companions=(),
        root=Root(False, ("/qemu", "/dev/null"), False, ("/dev/null (device null)",), (), (), True),
        mounts=(Mount("/", "ext4", ("ro",), False), Mount("/proc", "proc", ("ro",), False)),
        descriptors=(
            Descriptor(0, "device null", "read-write", "/dev/null"),
            Descriptor(3, "memory", "read", "/memfd:ram (deleted)", SEALED, "read-write"),
            Descriptor(4, "unix", "read-write", "/run/x/qmp.sock"),
            Descriptor(12, "file", "read", "/blobs/root", given="read"),
            Descriptor(13, "file", "read-write", "/s/upper.qcow2", given="read-write"),
        ),
        limits={"core": 0, "nofile": 1024, "fsize": 1, "as": 1, "nproc": 128},
        cgroup=Cgroup(
            2,
            "/vm",
            False,
            {"memory.max": "9", "memory.swap.max": "0", "pids.max": "64", "cpu.max": "100000 100000"},
        ),
        oom_score_adj=500,
    )
    return dataclasses.replace(whole, **changes)


def a_report(process: Process | None = None, **changes: Any) -> Isolation:
    host = Host("6.12", cgroup2=True, landlock=True, swap=False)
    whole = Isolation("qemu", True, {"landlock": 4}, "/run/x", host, (process or a_vmm(),))
    return dataclasses.replace(whole, **changes)


def told(report: Isolation) -> list[str]:
    return [str(found) for found in promises.compare(report, promises.expected("qemu", report.as_root))]


def space(name: str) -> dict[str, Namespace]:
    return {**(a_vmm().namespaces or {}), name: Namespace(f"{name}:[1]", True)}


def root(**changes: Any) -> Root:
    whole = a_vmm().root
    assert whole is not None
    return dataclasses.replace(whole, **changes)


def also(*more: Descriptor) -> tuple[Descriptor, ...]:
    return (*(a_vmm().descriptors or ()), *more)


def memory(seals: tuple[str, ...], given: str | None) -> tuple[Descriptor, ...]:
    first, _, *rest = a_vmm().descriptors or ()
    return (first, Descriptor(3, "memory", "read-write", "/memfd:ram", seals, given), *rest)


def group(**changes: Any) -> Cgroup:
    whole = a_vmm().cgroup
    assert whole is not None
    return dataclasses.replace(whole, **changes)


def test_what_is_as_promised_differs_in_nothing() -> None:
    assert told(a_report()) == []
    assert isolation.describe(a_report())["ok"] is True


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"uids": (0, 0, 0, 0)}, "vmm: it has root's uid"),
    ({"uids": (UID, UID, 0, UID)}, "vmm: it has root's uid"),
    ({"uids": (UID, UID, 5, UID)}, f"vmm: its uids differ: {UID}, {UID}, 5, {UID}"),
    ({"uids": None}, "vmm: its uids and gids cannot be seen"),
    ({"gids": (0,) * 4}, "vmm: it is of root's group"),
    ({"groups": (27,)}, "vmm: it has supplementary groups: 27"),
    ({"capabilities": {**CAPS, "bounding": ("kill", "chown")}}, "vmm: its bounding set has kill, chown"),
    ({"capabilities": None}, "vmm: its capabilities cannot be seen"),
    (
        {"threads": (a_thread(), a_thread(tid=11, seccomp="off", seccomp_filters=0))},
        "vmm: 11 (qemu): no seccomp filter: off",
    ),
    ({"threads": (a_thread(seccomp_filters=1),)}, "vmm: 10 (qemu): 1 of 2 seccomp filters"),
    (
        {"threads": tuple(a_thread(tid=tid, no_new_privs=False) for tid in (1, 2))},
        "vmm: all 2 threads: without no_new_privs",
    ),
    ({"threads": (a_thread(effective=("kill",)),)}, "vmm: 10 (qemu): effective capabilities"),
    ({"threads": (a_thread(apart=("net",)),)}, "vmm: 10 (qemu): in other namespaces than its process: net"),
    ({"threads": None}, "vmm: its threads cannot be seen"),
    *(
        ({"namespaces": space(name)}, f"vmm: it is in the server's {name} namespace")
        for name in promises.ISOLATED
    ),
    ({"companions": (12,)}, "vmm: 1 more process lives in its pid namespace: 12"),
    ({"root": root(shared=True)}, "vmm: its root is the server's: every file of the host has a name for it"),
    ({"root": None}, "vmm: its root cannot be seen"),
    ({"root": root(working_directory_inside=False)}, "vmm: its working directory is not its root"),
    ({"root": root(special=("/bin/su",))}, "vmm: set-user-id files lie in its root: /bin/su"),
    (
        {"root": root(devices=("/x (device 8:0)",))},
        "vmm: devices lie in its root that it does not need: /x (device 8:0)",
    ),
    ({"root": root(writable=("/tmp",))}, "vmm: it can write in its root: /tmp"),
    ({"mounts": (Mount("/", "ext4", ("rw",), False),)}, "vmm: its root is not mounted read-only"),
    ({"mounts": (Mount("/", "ext4", ("ro",), True),)}, "vmm: mounts are not private: /"),
    (
        {"mounts": (*(a_vmm().mounts or ()), Mount("/p", "proc", ("rw",), False))},
        "vmm: /p is a writable /proc",
    ),
    (
        {"mounts": (*(a_vmm().mounts or ()), Mount("/s", "sysfs", ("ro",), False))},
        "vmm: /s is a sysfs, which it does not need",
    ),
    (
        {"descriptors": also(Descriptor(5, "directory", "path", "/"))},
        "vmm: descriptor 5 (/) is a directory, which it does not need",
    ),
    (
        {"descriptors": also(Descriptor(5, "inet", "read-write", "s"))},
        "vmm: descriptor 5 (s) is a inet, which it does not need",
    ),
    (
        {"descriptors": also(Descriptor(5, "unix", "read-write", "/run/y/qmp.sock"))},
        "vmm: descriptor 5 (/run/y/qmp.sock) is a socket of somebody else's",
    ),
    (
        {"descriptors": also(Descriptor(5, "memory", "read", "m", ("write",), "read-write"))},
        "vmm: descriptor 5 (m) is memory of a template that is not sealed",
    ),
    (
        {"descriptors": memory((), "read-write")},
        "vmm: descriptor 3 (/memfd:ram) is memory of a template that is not sealed",
    ),
    (
        {"descriptors": memory(SEALED, None)},
        "vmm: descriptor 3 (/memfd:ram) is memory that was not given to it",
    ),
    (
        {"descriptors": (a_vmm().descriptors or ())[:1]},
        "vmm: it has no memory of its template open, so none that is known to be sealed",
    ),
    (
        {"descriptors": also(Descriptor(5, "file", "read-write", "/s/state.db"))},
        "vmm: descriptor 5 (/s/state.db) is a file that was not given to it",
    ),
    (
        {"descriptors": also(Descriptor(5, "file", "read", "/etc/shadow", given="root"))},
        "vmm: descriptor 5 (/etc/shadow) is a file that was not given to it",
    ),
    (
        {"descriptors": also(Descriptor(5, "file", "read-write", "/blobs/root", given="read"))},
        "vmm: descriptor 5 (/blobs/root) is open for read-write, and was given to it to be read",
    ),
    ({"descriptors": None}, "vmm: its descriptors cannot be seen"),
    ({"limits": {**(a_vmm().limits or {}), "core": None}}, "vmm: its limit of core is unlimited, not 0"),
    ({"limits": {**(a_vmm().limits or {}), "nofile": 5000}}, "vmm: its limit of nofile is 5000, not 4096"),
    ({"limits": {**(a_vmm().limits or {}), "nproc": None}}, "vmm: it has no limit of nproc"),
    ({"cgroup": group(shared=True)}, "vmm: it is in no cgroup of its own"),
    ({"cgroup": None}, "vmm: it is in no cgroup of its own"),
    ({"cgroup": group(limits={**group().limits, "pids.max": "max"})}, "vmm: its cgroup has no pids.max"),
    ({"cgroup": group(limits={**group().limits, "cpu.max": "max 100000"})}, "vmm: its cgroup has no cpu.max"),
    (
        {"unseen": ("fdinfo/3: Permission denied",)},
        "vmm: not seen, so not known to hold: fdinfo/3: Permission denied",
    ),
]


def test_memory_without_a_seal_is_a_booted_machines_own_or_what_its_state_is_written_to() -> None:
    assert told(a_report(a_vmm(descriptors=memory((), "read-write")), clone=False)) == []
    assert told(a_report(a_vmm(descriptors=memory((), None)), clone=False)) == [
        "vmm: descriptor 3 (/memfd:ram) is memory that was not given to it"
    ]
    assert told(a_report(a_vmm(descriptors=memory(("grow",), "read-write")), clone=False)) != []
    state = Descriptor(20, "memory", "write", "/memfd:state", given="write")
    assert told(a_report(a_vmm(descriptors=also(state)))) == []


def test_files_in_a_root_of_its_own_are_those_of_a_vmm_that_opens_them_by_name() -> None:
    opened = Descriptor(5, "file", "read-write", "/upper", given="root")
    foreign = Descriptor(6, "file", "read-write", "/s/state.db")
    for driver in ("firecracker", "cloud-hypervisor"):
        vmm = a_vmm(descriptors=also(opened, foreign))
        found = promises.compare(a_report(vmm, driver=driver), promises.expected(driver, root=True))
        assert [str(one) for one in found] == [
            "vmm: descriptor 6 (/s/state.db) is a file that was not given to it"
        ]


def test_every_thread_of_cloud_hypervisor_but_the_first_has_its_own_filter_under_ours() -> None:
    def filters(*counts: int) -> list[str]:
        threads = tuple(a_thread(tid=10 + n, seccomp_filters=count) for n, count in enumerate(counts))
        report = a_report(a_vmm(threads=threads), driver="cloud-hypervisor")
        return [str(one) for one in promises.compare(report, promises.expected("cloud-hypervisor", True))]

    assert filters(1, 2, 3) == []
    assert filters(1, 2, 1) == ["vmm: 12 (qemu): 1 of 2 seccomp filters"]
    assert filters(0, 2) == ["vmm: 10 (qemu): 0 of 1 seccomp filters"]


def test_of_a_machine_whose_files_were_not_written_down_none_is_known_to_be_its_own() -> None:
    assert told(a_report(a_vmm(descriptors=also()), files_known=False)) == [
        "vmm: which files are its own was not written down when it started: pause and resume it"
    ]


@pytest.mark.parametrize(("changes", "words"), BROKEN, ids=[words for _, words in BROKEN])
def test_each_promise_that_does_not_hold_is_told_alone(changes: dict[str, Any], words: str) -> None:
    assert told(a_report(a_vmm(**changes))) == [words]
    body = isolation.describe(a_report(a_vmm(**changes)))
    assert body["ok"] is False
    assert [f"{entry['process']}: {entry['words']}" for entry in body["differences"]] == [words]


def test_landlock_is_what_the_shim_says_of_it() -> None:
    assert told(a_report(said={})) == ["vmm: no landlock ruleset was put over it"]


def test_what_the_host_cannot_give_is_missing_and_not_broken() -> None:
    host = Host("5.10", cgroup2=False, landlock=False, swap=True)
    user = {**(a_vmm().namespaces or {}), "user": Namespace("user:[3]", False)}
    vmm = a_vmm(uids=(1000,) * 4, gids=(1000,) * 4, groups=(27,), namespaces=user, cgroup=group(shared=True))
    body = isolation.describe(a_report(vmm, as_root=False, host=host, said={}))
    assert body["ok"] is True
    assert [entry["name"] for entry in body["missing"]] == ["uid", "cgroup", "landlock"]
    shared = isolation.describe(a_report(as_root=False, said={}))
    assert {"namespaces", "landlock"} == {entry["name"] for entry in shared["differences"]}


def test_what_the_host_refused_the_shim_is_broken_for_root_and_missing_for_a_user() -> None:
    spaces = {name: Namespace(f"{name}:[1]", True) for name in seen.NAMESPACES}
    said = {"no-ns": "Operation_not_permitted", "landlock": "6", "seccomp": "1"}
    vmm = a_vmm(namespaces=spaces, root=root(shared=True))
    body = isolation.describe(a_report(vmm, said=said))
    assert {entry["name"] for entry in body["differences"]} == {"namespaces", "root", "ns"}
    body = isolation.describe(a_report(vmm, as_root=False, said=said))
    assert body["ok"] is True
    words = [entry["words"] for entry in body["missing"]]
    assert "the host allows it no namespaces of its own: Operation not permitted" in words
    assert "its root is the server's: every file of the host has a name for it" in words
    # A filter that could be put on by anybody is not excused.
    body = isolation.describe(a_report(vmm, as_root=False, said={**said, "landlock": ""}))
    assert [entry["name"] for entry in body["differences"]] == ["landlock"]


def test_a_cgroup_that_could_not_be_had_is_missing_with_its_reason() -> None:
    said = {"landlock": "6", "no-cgroup": "our_cgroup_/x_is_not_delegated"}
    body = isolation.describe(a_report(a_vmm(cgroup=group(shared=True)), said=said))
    assert body["ok"] is True
    (entry,) = body["missing"]
    assert "our cgroup /x is not delegated" in entry["words"]


def test_a_proc_of_others_is_told() -> None:
    said = {"landlock": "6", "proc": "shared"}
    assert told(a_report(said=said)) == ["vmm: its /proc shows the server's processes too"]


def test_every_driver_has_its_promise_and_no_other() -> None:
    for driver in ("qemu", "firecracker", "cloud-hypervisor"):
        for as_root in (True, False):
            parts = promises.expected(driver, as_root)
            assert {"vmm", "shim", "gateway", "intercept"} == set(parts)
            assert parts["vmm"].filters_min >= 1
            assert "kill" not in parts["vmm"].capabilities
    with pytest.raises(ValueError, match="nothing is promised"):
        promises.expected("bochs", root=True)


def test_the_keeper_has_the_right_to_end_it_and_no_other() -> None:
    kill = {**CAPS, "effective": ("kill",), "permitted": ("kill",)}
    keeper = a_vmm(
        role="shim",
        uids=(0,) * 4,
        gids=(0,) * 4,
        capabilities=kill,
        threads=(a_thread(effective=("kill",), seccomp="off"),),
    )
    assert told(a_report(keeper)) == []
    more = dataclasses.replace(keeper, capabilities={**kill, "effective": ("kill", "sys_admin")})
    assert told(a_report(more)) == ["shim: its effective set has sys_admin"]


def test_a_socket_of_another_kind_is_found_out() -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as netlink:
        netlink.bind((0, 0))
        own = isolation.worker("vmm", os.getpid())
        assert own is not None
        assert {entry.number: entry.kind for entry in own.descriptors or ()}[netlink.fileno()] == "netlink"
