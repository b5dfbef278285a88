"""Starting a VMM through the shim (`shim/`): what it is told, and what it answers.

Not here: what the VMM is. Every driver starts its VMM this way, so that jail, deadline and exit record are
one piece of code.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from llm4agents import binaries, limits
from llm4agents.errors import BootError, HostSetupError
from llm4agents.vmm.base import Exit
from llm4agents.vmm.waiting import readable

Act = Literal["kill", "stop"]
NAME = "llm4agents-shim"
"""Its argv[0] ends in the machine's directory: for `ps`, and for `running`."""
FIRST_FD = 3
"""The VMM's descriptors are numbered from here, in the order of `Launch.fds`."""
HANDSHAKE_TIMEOUT_S = 10.0
EXIT_BYTES_MAX = 262_144
DEADLINE, EXIT = "deadline", "exit"
LINK_SOCKET = "link.sock"
FETCH_TIMEOUT_S = 5.0
SERVED_MAX = 16
LOGS = ("serial.log", "serial.log.1", "vmm.log", "vmm.log.1")


@dataclass(frozen=True, slots=True)
class Bind:
    """An open file or directory of the host (`fd`, opened in our own mount namespace) that is seen at `path`.

    `path` exists (a file or a directory, as the source), is absolute and has no `..`; in a Jail it lies inside the
    root, in a Launcher it is the host's. What is read-only is without devices and programs, too.
    """

    fd: int
    path: str
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class Jail:
    """What the shim makes around a VMM. What this host cannot give is left out, and `Started.jail` says so."""

    root: int
    """Descriptor of the directory that becomes its root, read-only (`vmm.jail.closure`)."""
    binds: Sequence[Bind] = ()
    cgroup: int | None = None
    """Descriptor of the directory of a cgroup (v2) of its own; it is removed when the VMM has ended."""
    user: bool = False
    """Through a user namespace: what an ordinary user can."""
    need: Sequence[str] = ()
    """Of `ns`, `root`, `landlock`, `seccomp`: what is not left out but an error where it cannot be made."""
    memfd: bool = False
    """It may make memfds, as one does that has a booted guest's memory in them. No rlimit counts those."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """Instead of a Jail: `argv` is a VMM's own jailer, which becomes the VMM by `execve` (no fork, no daemon).

    Only for root. It runs with all rights in a pid namespace and in a mount namespace whose `binds` nobody else
    sees; `Launch.uid` and `gid` stay None, ids are the jailer's. Processes it leaves behind end with the VMM, the
    VMM with the shim. The whole of `cgroup`, also what a jailer made below it, is removed when the VMM has ended.
    """

    binds: Sequence[Bind] = ()
    cgroup: int | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """One VMM to start. `argv[0]` is absolute; `fds` are ours and become the VMM's 3, 4, 5…"""

    argv: Sequence[str]
    env: dict[str, str]
    fds: Sequence[int]
    run_dir: Path
    rlimits: dict[str, int]
    hold: Sequence[int] = ()
    """Descriptors the shim keeps open while the VMM lives (the lease of its uid)."""
    serve: Mapping[str, int] = field(default_factory=dict)
    """Descriptors the shim holds as long and hands, by name, to who asks at `serve_socket` (`fetch`)."""
    serve_socket: int | None = None
    """The listening socket of `run_dir/LINK_SOCKET`."""
    uid: int | None = None
    gid: int | None = None
    unlink: Sequence[str] = ()
    """Names in `run_dir` removed when the VMM has ended."""
    jail: Jail | None = None
    launcher: Launcher | None = None
    """At most one of both."""


@dataclass(frozen=True, slots=True)
class Started:
    vmm_pid: int
    vmm_start_ticks: int
    shim_pid: int
    shim_start_ticks: int
    jail: dict[str, str] = field(default_factory=dict)
    """What the shim could do of `Launch.jail`, as it says itself; {} without one."""


def descriptors(launch: Launch) -> list[int]:
    """Every descriptor the shim is given for it, in the order `encode` has their numbers in. Pure."""
    jail, launcher = launch.jail, launch.launcher
    given = [*launch.fds, *launch.hold, *launch.serve.values()]
    given += [] if launch.serve_socket is None else [launch.serve_socket]
    given += [] if jail is None else [jail.root]
    for part in (jail, launcher):
        if part is not None:
            given += [bind.fd for bind in part.binds]
            given += [] if part.cgroup is None else [part.cgroup]
    return given


def encode(launch: Launch, placed: Sequence[int], status: int) -> bytes:
    """The configuration the shim reads; there, `descriptors(launch)` have the numbers `placed`. Pure."""
    jail, launcher = launch.jail, launch.launcher
    place = iter(placed)
    records: list[tuple[str, str | int]] = [("arg", arg) for arg in launch.argv]
    records += [("env", f"{name}={value}") for name, value in launch.env.items()]
    records += [("fd", next(place)) for _ in launch.fds] + [("hold", next(place)) for _ in launch.hold]
    records += [("serve", f"{name}:{next(place)}") for name in launch.serve]
    if launch.serve_socket is not None:
        records.append(("serve_socket", next(place)))
    if jail is not None:
        records += [("jail", next(place)), ("userns", int(jail.user)), ("memfd", int(jail.memfd))]
        records += [("need", name) for name in jail.need]
    for part in (jail, launcher):
        if part is not None:
            for bind in part.binds:
                records.append(("bind", f"{next(place)}:{'ro' if bind.read_only else 'rw'}:{bind.path}"))
            if part.cgroup is not None:
                records.append(("cgroup", next(place)))
    if launcher is not None:
        records.append(("launcher", 1))
    records += [("rlimit", f"{name}:{value}") for name, value in launch.rlimits.items()]
    records += [("unlink", name) for name in launch.unlink]
    if launch.uid is not None and launch.gid is not None:
        records += [("uid", launch.uid), ("gid", launch.gid)]
    records += [
        ("status", status),
        ("run_dir", str(launch.run_dir)),
        ("grace_ms", round(limits.KEEPER_GRACE_S * 1000)),
        ("console_bytes_max", limits.SERIAL_LOG_BYTES_MAX),
        ("oom_score_adj", 500),
    ]
    return b"".join(os.fsencode(f"{key}={value}") + b"\0" for key, value in records)


async def start(launch: Launch) -> Started:
    """Start it and return when it has become the VMM (its `execve` succeeded).

    The caller keeps its own copies of the descriptors. Raises BootError with the shim's words when it could
    not, HostSetupError when there is no shim.
    """
    binary = str(binaries.path(binaries.SHIM))
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    config = os.memfd_create("shim-config", os.MFD_CLOEXEC)
    try:
        sources = [*descriptors(launch), writer]
        # Above every descriptor that is copied, so that no copy lands on one still to be copied.
        base = max([*sources, config, 2]) + 1
        placed = list(range(base, base + len(sources)))
        os.set_blocking(writer, True)
        os.write(config, encode(launch, placed[:-1], placed[-1]))
        os.lseek(config, 0, os.SEEK_SET)
        actions = [
            (os.POSIX_SPAWN_DUP2, source, target) for source, target in zip(sources, placed, strict=True)
        ]
        actions.append((os.POSIX_SPAWN_DUP2, config, 0))
        try:
            # Blocks for the vfork and exec of a small static binary: 1 ms, less than a thread would take.
            pid = os.posix_spawn(binary, [f"{NAME} {launch.run_dir}"], {}, file_actions=actions)  # noqa: ASYNC221
        except OSError as error:
            raise HostSetupError(f"the shim {binary} cannot be started: {error.strerror}") from error
        os.close(writer)
        writer = -1
        try:
            answer = await asyncio.wait_for(_read_line(reader), HANDSHAKE_TIMEOUT_S)
        except TimeoutError:
            answer = "error: the shim did not answer"
        except asyncio.CancelledError:
            _end(pid)
            raise
        return _parse(answer, pid)
    finally:
        for fd in (reader, writer, config):
            if fd >= 0:
                os.close(fd)


async def fetch(run_dir: Path) -> dict[str, int]:
    """Copies of the descriptors the shim of a live VMM holds (`Launch.serve`), by name; the caller closes them.

    {} when it has none, or no longer lives.
    """
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        )
        try:
            directory = os.open(run_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, directory)
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                # Through the descriptor: a socket's path has 107 bytes at most, a run_dir may be longer.
                while sock.connect_ex(f"/proc/self/fd/{directory}/{LINK_SOCKET}") == errno.EAGAIN:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)  # others are before us in its queue
                await readable(sock.fileno())
            size = array.array("i").itemsize
            names, ancillary, _, _ = sock.recvmsg(
                4096, socket.CMSG_SPACE(SERVED_MAX * size), socket.MSG_CMSG_CLOEXEC
            )
        except (OSError, TimeoutError):
            return {}
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % size])
    keys = names.decode().split(",") if names else []
    if len(keys) != len(fds):
        for fd in fds:
            os.close(fd)
        return {}
    return dict(zip(keys, fds, strict=True))


def running(machines: Path) -> dict[int, Path]:
    """The shims whose machine's directory is (or was) right below `machines`: pid to directory."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                argv0 = os.fsdecode((entry / "cmdline").read_bytes().partition(b"\0")[0])
                name, _, directory = argv0.partition(" ")
                if name == NAME and Path(directory).parent == machines:
                    found[int(entry.name)] = Path(directory)
    return found


def _parse(answer: str, pid: int) -> Started:
    words = answer.split()
    if len(words) in (5, 6) and words[0] == "ok":
        vmm, vmm_ticks, own, own_ticks = map(int, words[1:5])
        said = (word.partition("=") for word in ",".join(words[5:]).split(",") if word)
        return Started(vmm, vmm_ticks, own, own_ticks, {name: value for name, _, value in said})
    _end(pid)
    why = answer.removeprefix("error: ").strip() or "the shim ended without an answer"
    raise BootError(f"the virtual machine monitor could not be started: {why}")


def _end(pid: int) -> None:
    """End a shim that is our child and is of no use; its VMM goes with it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 9)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


async def _read_line(fd: int) -> str:
    """What the pipe holds up to its end or a newline; at most 4 KiB."""
    text = b""
    while len(text) < 4096:
        await readable(fd)
        part = os.read(fd, 4096)
        text += part
        if not part or part.endswith(b"\n"):
            break
    return text.decode(errors="replace")


def write_deadline(run_dir: Path, unix: float | None, act: Act = "kill") -> None:
    """Set, move or (None) lift the deadline the shim keeps, and what it does then; whole or not at all."""
    temporary = run_dir / f".{DEADLINE}.{os.getpid()}"
    words = "" if unix is None else f"{unix:.3f}{' stop' if act == 'stop' else ''}\n"
    temporary.write_text(words)
    temporary.rename(run_dir / DEADLINE)


def read_deadline(run_dir: Path) -> tuple[float, Act] | None:
    """The deadline (unix seconds) as it was last written, and what happens then; None when there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        words = (run_dir / DEADLINE).read_text().split()
        return float(words[0]), "stop" if words[1:] == ["stop"] else "kill"
    return None


def read_exit(run_dir: Path) -> Exit:
    """How the VMM of `run_dir` ended; reason `lost` when the shim could not write it down."""
    body: Any = None
    with contextlib.suppress(OSError, ValueError):
        raw = (run_dir / EXIT).open("rb").read(EXIT_BYTES_MAX)
        body = json.loads(raw)
    if not isinstance(body, dict) or body.get("reason") not in ("exited", "stopped", "deadline"):
        return Exit(code=None, signal=None, reason="lost", console_tail=console_tail(run_dir))
    tail = str(body.get("console_tail") or "")
    stderr = str(body.get("stderr_tail") or "")
    return Exit(
        body.get("code"), body.get("signal"), body["reason"], tail + (f"\n[vmm] {stderr}" if stderr else "")
    )


def console_tail(run_dir: Path, bytes_max: int = 8192) -> str:
    """The end of the serial console's log, of a VM alive or not; empty when there is none."""
    tail = b""
    for name in ("serial.log.1", "serial.log"):
        with contextlib.suppress(OSError), (run_dir / name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - bytes_max))
            tail += file.read(bytes_max)
    return tail[-bytes_max:].decode(errors="replace")
