"""What requests look like: strict, unknown fields refused. Answers are plain dicts (docs/design/interfaces.md)."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from llm4agents import limits
from llm4agents.engine import attached, names, network

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=128)]


def _path(value: object) -> str:
    """Also a name that is not UTF-8: its bytes are lone surrogate escapes, which pydantic's own text refuses."""
    try:
        length = len(value.encode("utf-8", "surrogateescape")) if isinstance(value, str) else 0
    except UnicodeEncodeError:
        length = 0
    if not 1 <= length <= limits.PATH_BYTES_MAX:
        raise ValueError(f"a path is text of 1 to {limits.PATH_BYTES_MAX} bytes")
    return str(value)


Path = Annotated[str, PlainValidator(_path), WithJsonSchema({"type": "string", "minLength": 1})]


IdleSeconds = Annotated[float, Field(gt=0, le=limits.IDLE_TIMEOUT_S_MAX)]
KeepSeconds = Annotated[float, Field(gt=0, le=limits.KEEP_S_MAX)]
OnTimeout = Literal["kill", "pause"]
NetworkValue = str | list[Any] | dict[str, Any]
"""A profile, rule lines, or an object: the engine reads it, whose errors name the line."""


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_text(cls, value: object) -> object:
        todo = [value]
        while todo:
            one = todo.pop()
            if isinstance(one, str):
                # A byte that is no UTF-8 travels as a surrogate escape; any other lone surrogate stands for nothing.
                if not one.isascii():
                    try:
                        one.encode("utf-8", "surrogateescape")
                    except UnicodeEncodeError:
                        raise ValueError("text has half of a surrogate pair in it") from None
            elif isinstance(one, dict):
                todo += [*one.keys(), *one.values()]
            elif isinstance(one, list):
                todo += one
        return value


def _env(value: dict[str, str]) -> dict[str, str]:
    if (
        sum(len(name.encode()) + len(text.encode()) + 2 for name, text in value.items())
        > limits.ENV_BYTES_MAX
    ):
        raise ValueError(f"more than {limits.ENV_BYTES_MAX} bytes of environment")
    for name, text in value.items():
        if not name or "=" in name or "\0" in name + text:
            raise ValueError(f"{name!r} cannot be a variable: names have no '=', and neither part a NUL")
    return value


class WithEnv(Body):
    env: dict[str, str] = Field(default_factory=dict)

    @field_validator("env")
    @classmethod
    def _check_env(cls, value: dict[str, str]) -> dict[str, str]:
        return _env(value)


class Traffic(Body):
    """Who may reach a sandbox's ports: whoever has its project's key, its token or a signed URL; or anybody."""

    public: bool = False


class SetTraffic(Body):
    public: bool | None = None
    rotate: bool = False
    """Tokens and signed URLs that were given out hold no more."""


class PortUrl(Body):
    port: Annotated[int, Field(ge=1, le=65_535)]
    path: Annotated[str, Field(min_length=1, max_length=4_096, pattern=r"^/[!-~]*$")] = "/"
    expires_s: Annotated[float, Field(ge=1, le=limits.PORT_URL_S_MAX)] | None = limits.PORT_URL_S
    """Of the signature; null: none, for a sandbox that is public, or who has its token."""


class Mount(Body):
    """A volume by id or name, at a path of the guest."""

    volume: Name
    path: Path
    mode: Literal["rw", "ro"] = "rw"

    def wish(self) -> attached.Mount:
        return attached.Mount(self.volume, self.path, self.mode)


class Create(WithEnv):
    template: Name = limits.DEFAULT_TEMPLATE
    timeout_s: Annotated[float, Field(gt=0, le=limits.IDLE_TIMEOUT_S_MAX)] = limits.IDLE_TIMEOUT_S
    life_s: Annotated[float, Field(gt=0, le=limits.LIFE_S_MAX)] = limits.LIFE_S_MAX
    memory_mib: int | None = None
    """None: what the template says."""
    vcpus: int | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    require_kvm: bool = False
    vmm: Name | None = None
    nested: bool = False
    disk_mib: Annotated[int, Field(ge=limits.DISK_MIB_MIN, le=limits.DISK_GIB * 1024)] | None = None
    pids: Annotated[int, Field(ge=limits.PIDS_MIN, le=limits.PIDS_MAX)] | None = None
    output_bytes_per_s: Annotated[int, Field(ge=limits.OUTPUT_BYTES_PER_S_MIN, le=1 << 40)] | None = None
    wait_s: Annotated[float, Field(ge=0, le=limits.WAIT_S_MAX)] = 0.0
    on_timeout: OnTimeout = "kill"
    auto_resume: bool = True
    keep_s: KeepSeconds = limits.KEEP_S
    network: NetworkValue | None = None
    protect: Annotated[list[Path], Field(max_length=4 * limits.PROTECT_PATHS_MAX)] = Field(
        default_factory=list
    )

    traffic: Traffic | None = None
    volumes: Annotated[list[Mount], Field(max_length=limits.VOLUMES_PER_SANDBOX_MAX)] = Field(
        default_factory=list
    )

    @field_validator("metadata")
    @classmethod
    def _check_metadata(cls, value: dict[str, str]) -> dict[str, str]:
        return _metadata(value)


def _metadata(value: dict[str, str]) -> dict[str, str]:
    if sum(len(k.encode()) + len(v.encode()) for k, v in value.items()) > limits.METADATA_BYTES_MAX:
        raise ValueError(f"more than {limits.METADATA_BYTES_MAX} bytes of metadata")
    return value


class Capture(Body):
    bytes_max: int | None = None


class Timeout(Body):
    timeout_s: IdleSeconds | None = None
    on_timeout: OnTimeout | None = None
    keep_s: KeepSeconds | None = None
    auto_resume: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Timeout:
        if not self.model_fields_set:
            raise ValueError("give timeout_s, on_timeout, keep_s or auto_resume")
        return self


class Network(Body):
    network: NetworkValue


class Why(Body):
    url: Annotated[str, Field(min_length=1, max_length=8_192)]


class Nothing(Body):
    pass


class Resume(Body):
    cold: bool = False
    timeout_s: IdleSeconds | None = None


LeaveVolumes = Literal["refuse", "leave"]
"""What is made of a sandbox that writes to a volume: nothing, or something without it."""


class Fork(Body):
    volumes: LeaveVolumes = "refuse"
    count: Annotated[int, Field(ge=1, le=limits.FORKS_MAX)] = 1
    timeout_s: IdleSeconds | None = None
    metadata: dict[str, str] = Field(default_factory=dict)

    @field_validator("metadata")
    @classmethod
    def _check_metadata(cls, value: dict[str, str]) -> dict[str, str]:
        return _metadata(value)


class Snapshot(Body):
    name: Name
    description: Annotated[str, Field(max_length=1024)] = ""
    volumes: LeaveVolumes = "refuse"


VolumeName = Annotated[str, Field(min_length=1, max_length=63)]
SizeMib = Annotated[int, Field(ge=limits.VOLUME_MIB_MIN, le=limits.VOLUME_MIB_MAX)]


class _NewVolume(Body):
    name: VolumeName
    metadata: dict[str, str] = Field(default_factory=dict)

    @field_validator("metadata")
    @classmethod
    def _check_metadata(cls, value: dict[str, str]) -> dict[str, str]:
        return _metadata(value)


class NewVolume(_NewVolume):
    """`source`: the volume or snapshot, by id or name, that it begins as a copy of; then `size_mib` may be left out."""

    size_mib: SizeMib | None = None
    source: Name | None = None

    @model_validator(mode="after")
    def _check(self) -> NewVolume:
        if self.size_mib is None and self.source is None:
            raise ValueError("give size_mib, or a source")
        return self


class VolumeSnapshot(_NewVolume):
    pass


class VolumeClone(_NewVolume):
    size_mib: SizeMib | None = None


class VolumeResize(Body):
    size_mib: SizeMib


class Detach(Body):
    volume: Name


def _base64(value: str, what: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error:
        raise ValueError(f"{what} is not base64") from None


ProcessId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Tag = Annotated[str, Field(max_length=128)]


class _Command(WithEnv):
    argv: list[str] | None = None
    command: str | None = None
    cwd: Path | None = None
    user: str | None = None
    timeout_s: Seconds | None = None
    id: ProcessId | None = None
    tag: Tag | None = None

    @model_validator(mode="after")
    def _check(self) -> _Command:
        if (self.argv is None) == (self.command is None):
            raise ValueError("give either argv or command")
        words = self.argv if self.argv is not None else [self.command or ""]
        if not words or not words[0].strip():
            raise ValueError("the command is empty")
        if any("\0" in word for word in words):
            raise ValueError("a command has no NUL in it")
        if sum(len(word.encode("utf-8", "surrogatepass")) + 1 for word in words) > limits.ARGV_BYTES_MAX:
            raise ValueError(f"the command is longer than {limits.ARGV_BYTES_MAX} bytes; write it to a file")
        self.stdin_bytes()
        return self

    def stdin_bytes(self) -> bytes | Literal[True] | None:
        raise NotImplementedError


class Exec(_Command):
    stdin: str | None = None
    """Base64."""
    stream: bool = False
    on_disconnect: Literal["detach", "kill"] = "detach"

    def stdin_bytes(self) -> bytes | None:
        return None if self.stdin is None else _base64(self.stdin, "stdin")


class Tty(Body):
    rows: Annotated[int, Field(ge=1, le=10_000)] = 24
    cols: Annotated[int, Field(ge=1, le=10_000)] = 80
    term: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[!-~]+$")] = "xterm-256color"


class Start(_Command):
    """`timeout_s` missing is none: a process of the background."""

    stdin: bool | str = False
    """True keeps it open for writes; base64 is fed to it, and then it ends."""
    tty: Tty | None = None
    keep_bytes: Annotated[int, Field(ge=65_536, le=16_777_216)] | None = None
    full: Literal["drop", "block"] = "drop"

    def stdin_bytes(self) -> bytes | Literal[True] | None:
        if isinstance(self.stdin, str):
            return _base64(self.stdin, "stdin")
        return True if self.stdin else None


class Stdin(Body):
    data_b64: str = ""
    eof: bool = False

    @model_validator(mode="after")
    def _check(self) -> Stdin:
        self.data()
        return self

    def data(self) -> bytes:
        return _base64(self.data_b64, "data_b64")


class Signal(Body):
    signal: int | str


class Resize(Body):
    rows: Annotated[int, Field(ge=1, le=10_000)]
    cols: Annotated[int, Field(ge=1, le=10_000)]


class Code(WithEnv):
    code: Annotated[str, Field(max_length=limits.CODE_BYTES_MAX)]
    context: Name = "default"
    language: Name | None = None
    timeout_s: Seconds | None = None
    stream: bool = False


class Context(Body):
    context: Name = "default"
    language: Name | None = None


class NewContext(WithEnv):
    language: Name | None = None
    cwd: Path | None = None


class Mkdir(Body):
    path: Path
    parents: bool = True
    mode: Annotated[int, Field(ge=0, le=0o7777)] = 0o755
    exist_ok: bool = True
    user: str | None = None


class Move(Body):
    source: Path = Field(alias="from")
    to: Path
    overwrite: bool = True
    user: str | None = None


class Remove(Body):
    path: Path
    recursive: bool = False
    missing_ok: bool = False
    user: str | None = None


class Build(Body):
    vcpus: int | None = None
    memory_mib: int | None = None
    vmm: Name | None = None
    nested: bool = False
    force: bool = False


class LocalFile(Body):
    file: Path


class Backup(LocalFile):
    with_disks: bool = False


class Stop(Body):
    keep: bool = False


class Prune(Body):
    all: bool = False


def wait(value: float | None, default: float) -> float | None:
    """A `timeout_s` of the wire as the engine has it: None there means the default, 0 means none."""
    return default if value is None else (value or None)


def sandbox(row: Any) -> dict[str, Any]:
    """A sandbox as the wire has it."""
    return {
        "id": row.id,
        "template": names.shown(row.template),
        "project": row.project,
        "state": row.state,
        "reason": row.reason,
        "created_at": row.created_at,
        "started_at": row.started_at,
        "ended_at": row.ended_at,
        "ends_at": row.life_ends_at if row.paused_at is None else row.paused_at + row.keep_s,
        "idle_timeout_s": row.idle_timeout_s,
        "vcpus": row.vcpus,
        "memory_mib": row.memory_mib,
        "disk_gib": row.disk_gib,
        "metadata": row.metadata,
        "accelerator": row.accelerator,
        "vmm": row.vmm,
        "nested": row.nested,
        "boot_id": row.boot_id,
        "limits": row.limits,
        "on_timeout": row.on_timeout,
        "auto_resume": row.auto_resume,
        "keep_s": row.keep_s,
        "paused_at": row.paused_at,
        "pause": row.pause,
        "parent": row.parent,
        "network": row.network or network.NONE,
        "protect": row.protect or [],
        "traffic": {"public": bool((row.traffic or {}).get("public"))},
        "volumes": attached.shown(row),
    }
