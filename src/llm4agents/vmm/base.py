"""The contract every VMM driver meets; `tests/contract` runs one suite against each.

Not here: what a sandbox is (engine), what its disks hold (images), what is said over the channel
(guest). A driver knows machines: boot one, freeze it, clone it, end it.

A *machine* is one VMM process. It is started through the shim (`shim/`), which jails it, is its parent,
keeps its deadline and writes down how it ended; so a machine outlives the server that started it and
any later server can adopt it from its `MachineRecord` alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

Accelerator = Literal["kvm", "tcg"]
TAP_NAME = "tap0"
"""Of the one tap in a sandbox's network namespace (`barrier.link`)."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What only some drivers can do; asked for here, never by a method that some lack."""

    vmm: str
    version: str
    accelerator: Accelerator
    why_not_kvm: str | None
    """None when KVM is used; else the reason the probe found, in words for `doctor`."""
    private_memory_clone: bool
    differential_pause: bool
    nested: bool
    cpu: str = ""
    """What the guest sees as its processor, as far as it depends on this host; part of the identity."""
    tsc_khz: int = 0
    """Time-stamp counter of this host, measured; a snapshot's clock runs at the rate it was booted with."""
    jail: Mapping[str, str] = field(default_factory=dict)
    """What this host gives to the jail around the VMM, as a trial found it (`vmm.jail.cell.missing` has the words)."""
    disk_format: Literal["qcow2", "raw"] = "qcow2"
    """What a clone's writable disks are: layers over the template's (`qcow2`), or whole sparse files that are copied
    from it (`raw`; then `Disk.backing` is empty, `switch_disk` is refused, and a layer is a copy too)."""
    bounds_files: bool = True
    """Whether `Machine.limit_files` bounds what a guest can fill; where not, the guest's own quota is all there is."""
    stops_when_full: bool = True
    """Whether a host without room stops the machine before the write (`disk_full`); where not, the guest gets an
    I/O error (`io_error` is not told either)."""


@dataclass(frozen=True, slots=True)
class Disk:
    """One block device. `slot` names it to the driver: `root`, `upper`, `vol0`…"""

    slot: str
    path: Path
    format: Literal["raw", "qcow2"]
    read_only: bool
    backing: tuple[Path, ...] = ()
    """For qcow2: the files it lies over, nearest first; all but the last are qcow2 too."""
    base_format: Literal["raw", "qcow2"] = "raw"
    """Of the last of `backing`."""
    lasts: bool = False
    """What it holds outlives the machine (a volume): the guest's flushes reach the host's disk, and the file (of one
    that lies over others the last of those) is locked as long as the VMM lives, for itself alone or (that) to be read
    by many. ConflictError when another has it."""


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """The shape of a machine. A clone's shape is its template's: other memory or vCPUs do not load."""

    vcpus: int
    memory_mib: int
    kernel: Path
    """Uncompressed ELF vmlinux."""
    initrd: Path
    disks: tuple[Disk, ...]
    """`root` (EROFS, read-only), `upper` (writable). Volume slots are added by the driver."""
    kernel_release: str = ""
    kernel_args: tuple[str, ...] = ()
    nested: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one machine lives on this host; made by the engine, one per machine, never shared.

    `run_dir` (exists, mode 0700, ours) gets sockets, serial log, deadline and exit record. `deadline_unix`
    (seconds, wall clock) is written to `run_dir/deadline` before the VMM starts; None = no deadline.
    Descriptors stay the caller's, who closes them once the machine has started.
    """

    id: str
    run_dir: Path
    deadline_unix: float | None = None
    tap: int | None = None
    """The tap the guest's NIC is connected to; None: to nothing."""
    netns: int | None = None
    """The namespace that the tap is in, for a VMM that opens it by `TAP_NAME` and not by descriptor."""
    release_tap: Callable[[], None] | None = None
    """Closes the caller's `tap`: a tap has one holder, so a driver whose VMM opens it by name calls this first."""
    serve: Mapping[str, int] = field(default_factory=dict)
    """What is held open as long as the VMM lives and can be had again by name (`vmm.shim.fetch`)."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A frozen machine on disk: directory with `manifest.json` (written last, atomically) and its parts.

    `full` (of `Machine.snapshot`): `memory`, `state`. `diff` (of `Machine.checkpoint`): `pages`, `state`; of use
    only together with the full one whose digest `base` is.

    `identity` (JSON-able, equal strings) says which machines can load it: driver, VMM version, accelerator,
    CPU model and TSC, kernel digest, device layout, memory, vCPUs. A mismatch is a VersionMismatchError.
    """

    path: Path
    spec: MachineSpec
    identity: dict[str, str]
    memory_bytes: int
    """Bytes of memory that are not zero (what it costs on disk); of a diff, those of its pages."""
    kind: Literal["full", "diff"] = "full"
    base: str | None = None
    """Of a diff: the digest of the full snapshot it differs from."""
    pages_bytes: int = 0
    """Of a diff: the size of `pages`."""
    state_bytes: int = 0
    """Of a diff: the size of `state`."""
    bare: bool = False
    """Of a full one merged from a base and a diff: `state` is that of the devices alone, as in a diff."""
    parts: dict[str, str] = field(default_factory=dict)
    """Of a diff: the SHA-256 of each part."""


@dataclass(frozen=True, slots=True)
class MachineRecord:
    """What a later server needs to adopt a machine; JSON-able through `to_json`/`from_json`."""

    driver: str
    id: str
    run_dir: Path
    shim_pid: int
    shim_start_ticks: int
    vmm_pid: int
    vmm_start_ticks: int
    uid: int
    """The uid the VMM runs under: unique to the machine as root, else our own."""
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        values = ((name, getattr(self, name)) for name in self.__slots__)
        return {name: str(value) if isinstance(value, Path) else value for name, value in values}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> MachineRecord:
        return cls(**{**body, "run_dir": Path(body["run_dir"])})


@dataclass(frozen=True, slots=True)
class Exit:
    """How a VMM ended, from the shim's record (`run_dir/exit`), readable after a server's crash."""

    code: int | None
    signal: int | None
    reason: Literal["exited", "stopped", "deadline", "lost"]
    console_tail: str


@dataclass(frozen=True, slots=True)
class Stats:
    cpu_ns: int
    pss_bytes: int
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class MachineEvent:
    """Something a machine reports of itself.

    `disk_full`: the host had no room for a write; the machine is *paused* before it, nothing is lost or
    corrupt, and `resume` tries the write again. `io_error`: a write or read failed for another reason and the
    guest was told. `paused`, `resumed`: as it says, whoever asked. `ended`: always the last.
    """

    kind: Literal["disk_full", "io_error", "paused", "resumed", "ended"]
    detail: str = ""


class Channel(Protocol):
    """The raw byte stream to the guest's agent, before any protocol. A non-blocking connected socket's fd."""

    def fileno(self) -> int: ...
    def close(self) -> None: ...


class Checkpoint(Protocol):
    """What `Machine.checkpoint` copied. Not a pause before `durable` has returned."""

    @property
    def path(self) -> Path: ...
    @property
    def pages_bytes(self) -> int: ...
    @property
    def state_bytes(self) -> int: ...

    async def durable(self, *, sync: bool = True, also: Awaitable[None] | None = None) -> Snapshot:
        """Digest and fsync every part, then write `manifest.json`. Raises CapacityError (directory removed).

        `also` is done before the manifest is written: what else must be on disk for the snapshot to be one.

        Without `sync` it does not survive the host: for one that is used up at once.
        """

    async def discard(self) -> None:
        """Remove the directory. Idempotent."""


class Machine(Protocol):
    """A live (or just ended) VMM process. Methods raise ConflictError when its state forbids the call."""

    @property
    def record(self) -> MachineRecord: ...

    @property
    def channel_cut(self) -> bool:
        """Whether a snapshot or checkpoint since `channel()` has ended the connection it gave (Firecracker: the guest
        resets it when it runs again). After `resume` another is made, and the session goes on over that."""

    async def channel(self) -> Channel:
        """Connect to the guest's agent channel. One connection at a time; connecting replaces none.

        The first call after `boot` or `restore` hands out a connection made before the guest ran, since a
        guest whose port nobody holds may lose what it writes. Bytes sent to a paused machine are lost.
        """

    async def pause(self) -> None:
        """Stop the vCPUs. Idempotent."""

    async def resume(self) -> None:
        """Run the vCPUs. Idempotent."""

    async def snapshot(self, directory: Path) -> Snapshot:
        """Write a full snapshot of the paused machine into `directory` (must not exist). It stays paused.

        Only a machine from `boot` can be snapshotted this way here (its memory is a shared file).
        """

    async def checkpoint(self, directory: Path, *, base: Snapshot) -> Checkpoint:
        """Copy what differs from `base` of a *paused* machine, cloned from it or resumed over it, into `directory`.

        Returns when everything is copied (not yet durable): from then on the machine may go on. `directory` is
        made (0700; its parent exists). Raises CapacityError when the host's disk is full, ConflictError when the
        machine runs or its memory may not be read (`Capabilities.differential_pause`); then `directory` is gone
        and the machine as it was.
        """

    async def switch_disk(self, slot: str, overlay: Disk) -> None:
        """Of a paused machine: writes go to `overlay` from now on.

        `overlay.path` is an empty qcow2 of the same size that the caller made; the file the slot had becomes its
        read-only backing, complete, and is not written to again.
        """

    async def disk_inode(self, slot: str) -> int | None:
        """The inode of the image the guest's `slot` is written to now; None when that cannot be told."""

    async def flush_disks(self) -> None:
        """Everything the guest has written is in the files (not fsynced)."""

    async def set_deadline(self, unix: float | None, *, act: Literal["kill", "stop"] = "kill") -> None:
        """Move the deadline the shim keeps. Takes effect at once, also when it moves nearer.

        `act`: what the shim does then. `stop`: the VMM stands still (SIGSTOP) until it is adopted.
        """

    def limit_files(self, bytes_max: int) -> None:
        """Let no file of the VMM grow beyond that many bytes from now on: a guest's write that would is an I/O error
        for the guest (event `io_error`), and the machine goes on. Cannot be raised again where we are not root."""

    async def stop(self) -> Exit:
        """End the VMM now (no guest shutdown), wait for it, leave nothing but `run_dir/exit`. Idempotent."""

    async def wait(self) -> Exit:
        """Return when the VMM has ended, however that came about."""

    async def stats(self) -> Stats:
        """What the VMM process costs now; ConflictError when it has ended."""

    def events(self) -> AsyncIterator[MachineEvent]:
        """What happens to it from the call on (adopted: also what it was found in); ends with it.

        Each call is a reader of its own with a bounded queue: one that does not read loses the oldest.
        """

    async def detach(self) -> None:
        """Let go of it and leave it running, for `adopt` by another server. Then only `record` is usable."""


class Driver(Protocol):
    """Makes machines. Holds no per-sandbox state but sealed template memory."""

    name: str

    async def capabilities(self) -> Capabilities:
        """What this host can do with this VMM; runs the boot probe once and caches its answer on disk.

        Raises HostSetupError when the VMM cannot run here at all, naming what to install.
        """

    def identity(self, spec: MachineSpec, capabilities: Capabilities) -> dict[str, str]:
        """The identity a snapshot of `spec` would have if made now. Pure."""

    def refuses(self, kernel_release: str, capabilities: Capabilities) -> str | None:
        """Why this VMM must not run that guest kernel (a pair known to fail), None when it may. Pure."""

    async def boot(self, spec: MachineSpec, placement: Placement) -> Machine:
        """Cold boot. Returns when the VMM runs; the caller waits for the agent (BOOT_TIMEOUT_S), may retry.

        Raises BootError (details: `console_tail`), HostSetupError (an unreadable file, a pair of VMM and kernel
        known to fail), CapacityError.
        """

    async def restore(
        self,
        snapshot: Snapshot,
        placement: Placement,
        disks: tuple[Disk, ...],
        *,
        diff: Snapshot | None = None,
    ) -> Machine:
        """Clone: map the snapshot's memory privately, load its state with `disks` in its slots; paused.

        With `diff` (a checkpoint over `snapshot`) the clone gets those pages and that state. Its bytes are
        checked as they are read, so `diff` may come from `load` without a look at its parts.
        The caller connects the channel, then calls `resume`. Raises VersionMismatchError when this host would
        make another identity or `diff` lies over another snapshot, CorruptSnapshotError when a part of `diff` is
        not what was written, BootError when it does not load, and what `boot` raises.
        """

    async def adopt(self, record: MachineRecord) -> Machine | None:
        """The live machine of that record, or None when it is gone (its exit record, if any, is in run_dir).

        One that its deadline stopped is continued. One that lives but cannot be talked to any more is ended
        first, and None returned.
        """

    async def release(self, snapshot_path: Path) -> None:
        """Let go of what is held for clones of that snapshot (sealed memory). Idempotent."""

    async def close(self) -> None:
        """Let go of everything held; machines live on."""
