"""Settings, from the environment and from nowhere else. No I/O beyond reading it.

A plain dataclass and not pydantic-settings: the CLI must start in 150 ms, and importing pydantic is
most of that. `LLM4AGENTS_URL` picks a remote server; everything else is about the local one.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal

from llm4agents import limits, protected
from llm4agents.errors import InvalidRequestError

_PREFIX = "LLM4AGENTS_"
VMMS: Final = ("firecracker", "cloud-hypervisor", "qemu")
LOG_LEVELS: Final = ("debug", "info", "warning", "error", "critical")
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off", ""}


@dataclass(frozen=True, slots=True)
class PoolWish:
    """So many machines of one template and shape, resumed ahead. No shape: the template's own."""

    template: str
    wanted: int
    vcpus: int | None = None
    memory_mib: int | None = None


_POOL = re.compile(r"([A-Za-z0-9._-]{1,128})(?:/(\d{1,3})x(\d{1,6}))?=(\d{1,4})")

_IO_MAX = re.compile(r"\d+:\d+( [rw](bps|iops)=(\d+|max))+")


def pool_of(text: str) -> tuple[PoolWish, ...]:
    """`NAME[/VCPUSxMIB]=N,…` as wishes. Raises ValueError naming the part that cannot be read."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _POOL.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r}: expected NAME=N or NAME/VCPUSxMIB=N")
        name, vcpus, memory_mib, wanted = match.groups()
        found.append(
            PoolWish(
                name,
                int(wanted),
                int(vcpus) if vcpus else None,
                int(memory_mib) if memory_mib else None,
            )
        )
    return tuple(found)


def rate_of(text: str) -> tuple[int | None, int | None]:
    """`BYTES[/OPERATIONS]`, either empty for no bound, as numbers. Raises ValueError."""
    parts = text.split("/")
    if len(parts) > 2 or any(part and not (part.isdecimal() and 0 < int(part) < 1 << 63) for part in parts):
        raise ValueError(text)
    numbers = [int(part) if part else None for part in (*parts, "")]
    return numbers[0], numbers[1]


@dataclass(frozen=True, slots=True)
class Settings:
    """What an operator or a user can set; each field is `LLM4AGENTS_<FIELD>` in the environment."""

    state: Path
    """Store, logs, disks of sandboxes. One server per state directory."""
    cache: Path
    """Templates and what they are built from, by content. Safe to delete while no server runs."""
    run_dir: Path
    """`LLM4AGENTS_RUN`: sockets and deadlines of live VMs; short, a socket's path has 107 bytes at most."""
    url: str | None = None
    """A remote server's base URL. Unset: the local server over its unix socket."""
    api_key: str | None = None
    ca_file: Path | None = None
    """`LLM4AGENTS_CA_FILE`: what a client trusts, beside its system's certificates, when it calls `url` (PEM)."""
    autostart: bool = True
    """Whether the first call may start the local server."""
    require_kvm: bool = False
    """Refuse to create sandboxes in software emulation."""
    vmm: str | None = None
    """The VMM of sandboxes that name none (one of VMMS); unset means by proof."""
    nested: Literal["allow", "refuse"] = "allow"
    """`refuse`: no sandbox here gets a `/dev/kvm`, whatever its create says."""
    cgroup: str | None = None
    """The cgroup (v2) below which each VMM gets its own; None: the one delegated to us, if any."""
    io_max: tuple[str, ...] = ()
    """Of each VMM, lines of cgroup v2's `io.max` (`8:0 rbps=1048576 wiops=100`), between semicolons."""
    accel: str | None = None
    """Force `kvm` or `tcg`; unset means by proof."""
    qemu: str = "qemu-system-x86_64"
    cloud_hypervisor: str = "cloud-hypervisor"
    firecracker: str = "firecracker"
    jailer: str = "jailer"
    """Firecracker's, of the same release."""
    disk_rate: tuple[int | None, int | None] = (None, None)
    """`LLM4AGENTS_DISK_RATE="BYTES[/OPERATIONS]"`: what each writable disk may do a second (Firecracker)."""
    network_rate: tuple[int | None, int | None] = (None, None)
    """`LLM4AGENTS_NETWORK_RATE="BYTES[/PACKETS]"`: the same for its NIC, in each direction."""
    server_idle_exit_s: float = limits.SERVER_IDLE_EXIT_S
    log_level: str = "info"
    memory_commit: float = limits.MEMORY_COMMIT
    """The part of a guest's memory that admission charges for it; 1 = never promise more than there is."""
    memory_reserve_mib: int | None = None
    """Memory that sandboxes leave to the host; None: 5% of it, 512 MiB at least."""
    pool: tuple[PoolWish, ...] = ()
    """`LLM4AGENTS_POOL="python=2,base/1x512=1"`: machines kept ready, by template and (optionally) shape."""
    webhooks: bool = True
    """Whether jobs may have the server call URLs."""
    protected_paths: tuple[str, ...] = ()
    """Patterns, between colons or line ends, of paths that leave no sandbox here, whatever a client allows."""
    otel: bool = False
    """Send spans to OpenTelemetry (needs the extra `otel`)."""
    vault_key: Path | None = None
    """The file with the key of the secrets, instead of `vault.key` in the state directory."""
    ca: Path | None = None
    """The directory of the node's CA, instead of `ca` in the state directory. Nodes that share a cache or templates
    share their CA, or each builds templates of its own."""
    network: str = "none"
    """The network of a create that says nothing: a profile, or rules or an object as JSON (docs/howto/network.md)."""
    network_floor: Path | None = None
    """A file of rule lines that no sandbox's rules can widen."""
    network_private: tuple[str, ...] = ()
    """`LLM4AGENTS_NETWORK_PRIVATE`: addresses and networks, between commas, that are no ordinary ones (private,
    loopback, metadata, this host's) and that callers with a key may name in rules and webhooks all the same."""
    barrier: Literal["auto", "off"] = "auto"
    """`off`: no sandbox gets a link; `auto`: every one does where the host can make one."""
    listen: str | None = None
    """`LLM4AGENTS_LISTEN=HOST:PORT`: where the server listens beside its unix socket, for clients that have a key."""
    domain: str | None = None
    """Ports of sandboxes are `PORT-ID.DOMAIN`; also what a local CA's certificate is for."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    """Certificate chain and key (PEM) of the listener; both or neither."""
    tls_local: bool = False
    """`LLM4AGENTS_TLS_LOCAL=1`: a certificate of a CA of the server's own (`STATE/tls/ca.pem`) instead."""
    insecure_http: bool = False
    """Whether to listen without TLS on an address that is not this host's own: a proxy before it has it."""
    drain_s: float = limits.LISTEN_DRAIN_S
    """How long a listening server that is told to leave (SIGTERM) lets calls under way go on."""
    public_url: str | None = None
    """How clients reach the server, when a proxy stands before it."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks whose `X-Forwarded-*` and `Forwarded` are believed, between commas."""
    registry: str | None = None
    """`LLM4AGENTS_REGISTRY=HOST[:PORT][/PREFIX]`: where images are that are named without a host."""
    registries: str = ""
    """`LLM4AGENTS_REGISTRIES`: registries that may lie at private addresses, be spoken to without TLS or be elsewhere
    than their name says, between commas: `HOST`, `http://HOST:PORT`, `NAME=[http://]HOST[:PORT][/PREFIX]`."""
    registration: bool = False
    """Whether `POST /v1/register` takes invite codes."""

    @property
    def socket_path(self) -> Path:
        return self.run_dir / "server.sock"

    @property
    def ca_directory(self) -> Path:
        return self.ca or self.state / "ca"

    @property
    def server_log(self) -> Path:
        return self.state / "server.log"


def load(env: Mapping[str, str]) -> Settings:
    """Settings from `env`; raises InvalidRequestError naming the variable that cannot be read."""

    def text(name: str) -> str | None:
        return env.get(_PREFIX + name) or None

    def boolean(name: str, default: bool) -> bool:
        raw = env.get(_PREFIX + name)
        if raw is None:
            return default
        if raw.lower() in _TRUE | _FALSE:
            return raw.lower() in _TRUE
        raise InvalidRequestError(f"{_PREFIX}{name}={raw!r} is neither 1 nor 0")

    def seconds(name: str, default: float) -> float:
        raw = text(name)
        try:
            value = default if raw is None else float(raw)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise InvalidRequestError(f"{_PREFIX}{name}={raw!r} is not a number of seconds")
        return value

    def number(name: str, default: float | None, low: float, high: float) -> float | None:
        raw = text(name)
        try:
            value = default if raw is None else float(raw)
        except ValueError:
            value = float("nan")
        if value is not None and not low <= value <= high:
            raise InvalidRequestError(f"{_PREFIX}{name}={raw!r} is not a number from {low:g} to {high:g}")
        return value

    def rate(name: str) -> tuple[int | None, int | None]:
        try:
            return rate_of(text(name) or "")
        except ValueError:
            raise InvalidRequestError(
                f"{_PREFIX}{name}={text(name)!r}: expected BYTES or BYTES/OPERATIONS, a second, each a number above 0",
                hint="for example 104857600/2000",
            ) from None

    def pool() -> tuple[PoolWish, ...]:
        try:
            return pool_of(text("POOL") or "")
        except ValueError as error:
            raise InvalidRequestError(f"{_PREFIX}POOL: {error}") from None

    def io_max() -> tuple[str, ...]:
        lines = tuple(filter(None, (line.strip() for line in (text("IO_MAX") or "").split(";"))))
        for line in lines:
            if _IO_MAX.fullmatch(line) is None:
                raise InvalidRequestError(
                    f"{_PREFIX}IO_MAX: {line!r} is no line of io.max",
                    hint="for example 8:0 rbps=104857600 wiops=1000 (the disk's numbers: lsblk)",
                )
        return lines

    def patterns(name: str) -> tuple[str, ...]:
        found = tuple(filter(None, (part.strip() for part in re.split(r"[:\n]", text(name) or ""))))
        for pattern in found:
            if (problem := protected.problem(pattern)) is not None:
                raise InvalidRequestError(
                    f"{_PREFIX}{name}: {problem}", hint="for example .git/hooks:/etc/*:**/secrets"
                )
        return found

    def networks(name: str) -> tuple[str, ...]:
        found = tuple(filter(None, (part.strip() for part in (text(name) or "").split(","))))
        for part in found:
            try:
                ipaddress.ip_network(part)
            except ValueError:
                raise InvalidRequestError(
                    f"{_PREFIX}{name}: {part!r} is neither an address nor a network",
                    hint="for example 10.1.0.0/16,127.0.0.1",
                ) from None
        return found

    def directory(name: str, xdg: str, default: str) -> Path:
        raw = text(name)
        if raw is not None:
            return Path(raw).absolute()
        base = env.get(xdg) or Path(env.get("HOME") or Path.home()) / default
        return Path(base).absolute() / "llm4agents"

    def path(name: str) -> Path | None:
        raw = text(name)
        return None if raw is None else Path(raw).absolute()

    def one_of(name: str, allowed: tuple[str, ...]) -> str | None:
        raw = text(name)
        if raw is not None and raw.lower() not in allowed:
            raise InvalidRequestError(f"{_PREFIX}{name}={raw!r}: expected one of {', '.join(allowed)}")
        return raw and raw.lower()

    state = directory("STATE", "XDG_STATE_HOME", ".local/state")
    run = text("RUN")
    if run is None:
        uid = os.geteuid() if hasattr(os, "geteuid") else 0  # Windows: a client of remote servers only
        tag = hashlib.sha256(os.fsencode(state)).hexdigest()[:10]
        base = env.get("XDG_RUNTIME_DIR") or ("/run" if uid == 0 else "/tmp")  # noqa: S108 (owner and mode are checked on use)
        run_dir = Path(base) / f"llm4agents-{uid}-{tag}"
    else:
        run_dir = Path(run).absolute()
    reserve = number("MEMORY_RESERVE_MIB", None, 0, 1 << 30)
    return Settings(
        state=state,
        cache=directory("CACHE", "XDG_CACHE_HOME", ".cache"),
        run_dir=run_dir,
        url=text("URL"),
        api_key=text("API_KEY"),
        ca_file=path("CA_FILE"),
        autostart=boolean("AUTOSTART", True),
        require_kvm=boolean("REQUIRE_KVM", False),
        vmm=one_of("VMM", VMMS),
        cgroup=text("CGROUP"),
        io_max=io_max(),
        nested="refuse" if one_of("NESTED", ("allow", "refuse")) == "refuse" else "allow",
        accel=one_of("ACCEL", ("kvm", "tcg")),
        qemu=text("QEMU") or "qemu-system-x86_64",
        cloud_hypervisor=text("CLOUD_HYPERVISOR") or "cloud-hypervisor",
        firecracker=text("FIRECRACKER") or "firecracker",
        jailer=text("JAILER") or "jailer",
        disk_rate=rate("DISK_RATE"),
        network_rate=rate("NETWORK_RATE"),
        server_idle_exit_s=seconds("SERVER_IDLE_EXIT_S", limits.SERVER_IDLE_EXIT_S),
        log_level=one_of("LOG_LEVEL", LOG_LEVELS) or "info",
        memory_commit=number("MEMORY_COMMIT", limits.MEMORY_COMMIT, 0.01, 1.0) or limits.MEMORY_COMMIT,
        memory_reserve_mib=None if reserve is None else int(reserve),
        pool=pool(),
        webhooks=boolean("WEBHOOKS", True),
        protected_paths=patterns("PROTECTED_PATHS"),
        otel=boolean("OTEL", False),
        vault_key=path("VAULT_KEY"),
        ca=path("CA"),
        network=text("NETWORK") or "none",
        network_floor=path("NETWORK_FLOOR"),
        network_private=networks("NETWORK_PRIVATE"),
        barrier="off" if one_of("BARRIER", ("auto", "off")) == "off" else "auto",
        listen=text("LISTEN"),
        domain=text("DOMAIN"),
        tls_cert=path("TLS_CERT"),
        tls_key=path("TLS_KEY"),
        tls_local=boolean("TLS_LOCAL", False),
        insecure_http=boolean("INSECURE_HTTP", False),
        drain_s=seconds("DRAIN_S", limits.LISTEN_DRAIN_S),
        public_url=text("PUBLIC_URL"),
        trusted_proxies=tuple(filter(None, (p.strip() for p in (text("TRUSTED_PROXIES") or "").split(",")))),
        registry=text("REGISTRY"),
        registries=text("REGISTRIES") or "",
        registration=boolean("REGISTRATION", False),
    )


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The process's settings, read once."""
    return load(os.environ)
