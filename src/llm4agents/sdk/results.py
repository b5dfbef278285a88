"""What SDK calls return: plain frozen data, built from the wire by pure functions. No I/O here.

Unknown fields of a newer server are ignored; missing ones of an older server get their empty value.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from llm4agents.errors import ProgramFailedError

Channel = Literal["stdout", "stderr"]


class EmulationWarning(UserWarning):
    """Sandboxes run in software emulation because KVM cannot be used here; once per process."""


@dataclass(frozen=True, slots=True)
class Result:
    """One value a cell showed: the last expression's (`main`), or one of `display()` or a figure.

    `data` is as it travels: MIME type → text, binary types in base64. The properties decode it; one that
    the value does not have is None.
    """

    data: dict[str, Any]
    main: bool = False

    def _text(self, mime: str) -> str | None:
        value = self.data.get(mime)
        return None if value is None else "".join(value) if isinstance(value, list) else str(value)

    def _bytes(self, mime: str) -> bytes | None:
        value = self._text(mime)
        return None if value is None else base64.b64decode(value)

    @property
    def text(self) -> str | None:
        """text/plain: what the interactive interpreter would print."""
        return self._text("text/plain")

    @property
    def html(self) -> str | None:
        """text/html, for example a data frame as a table."""
        return self._text("text/html")

    @property
    def markdown(self) -> str | None:
        return self._text("text/markdown")

    @property
    def svg(self) -> str | None:
        """image/svg+xml, as text."""
        return self._text("image/svg+xml")

    @property
    def png(self) -> bytes | None:
        """image/png: the bytes of the file."""
        return self._bytes("image/png")

    @property
    def jpeg(self) -> bytes | None:
        return self._bytes("image/jpeg")

    @property
    def pdf(self) -> bytes | None:
        return self._bytes("application/pdf")

    @property
    def latex(self) -> str | None:
        return self._text("text/latex")

    @property
    def javascript(self) -> str | None:
        return self._text("application/javascript")

    @property
    def json(self) -> Any:
        """application/json, decoded."""
        value = self.data.get("application/json")
        return json.loads(value) if isinstance(value, str) else value

    def __str__(self) -> str:
        return self.text if self.text is not None else f"<{', '.join(sorted(self.data)) or 'nothing'}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """Jupyter shows the value as the cell in the sandbox would have."""
        bundle = dict(self.data)
        if "application/json" in bundle:
            bundle["application/json"] = self.json
        return {m: v for m, v in bundle.items() if (not include or m in include) and m not in (exclude or ())}


@dataclass(frozen=True, slots=True)
class ExecutionError:
    """The Python exception that ended a cell (or `InterpreterDied`, `TimedOut`, `KeyboardInterrupt`)."""

    name: str
    value: str
    traceback: str

    def __str__(self) -> str:
        return f"{self.name}: {self.value}"


@dataclass(frozen=True, slots=True)
class Execution:
    """What a cell did. An exception in the cell is a result (`error`), not an exception here; see `check`."""

    results: list[Result] = field(default_factory=list)
    stdout: str = ""
    stderr: str = ""
    error: ExecutionError | None = None
    status: Literal["ok", "error", "interrupted", "died", "timed_out"] = "ok"
    execution_count: int = 0
    duration_ms: float | None = None
    """As the server measured it, in milliseconds; None from a server that does not say."""
    truncated: bool = False
    """Whether output beyond CODE_OUTPUT_BYTES_MAX was dropped."""

    @property
    def text(self) -> str | None:
        """text/plain of the last expression's value, or None when the cell ended in no value."""
        main = self._main()
        return None if main is None else main.text

    def _main(self) -> Result | None:
        return next((result for result in reversed(self.results) if result.main), None)

    def check(self) -> Execution:
        """Itself; raises ProgramFailedError when the cell ended in an error."""
        if self.error is not None or self.status != "ok":
            raise ProgramFailedError(
                f"the code failed: {self.error or self.status}",
                status=self.status,
                traceback=self.error.traceback if self.error else "",
            )
        return self

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        shown = self._main() or next(iter(reversed(self.results)), None)
        if shown is not None:
            return shown._repr_mimebundle_(include, exclude)
        text = self.error.traceback if self.error else self.stdout
        return {"text/plain": text}


@dataclass(frozen=True, slots=True)
class Output:
    """A piece of a running command's output, as it came."""

    channel: Channel
    data: bytes
    offset: int | None = None
    """Of its first byte in all that the process has said."""

    @property
    def text(self) -> str:
        """UTF-8 with replacement; a character cut by the piece's end shows as U+FFFD."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended. A non-zero exit is a result, not an exception; see `check`."""

    exit_code: int | None
    """None when a signal ended it."""
    signal: int | None = None
    stdout_bytes: bytes = b""
    stderr_bytes: bytes = b""
    timed_out: bool = False
    duration_ms: float | None = None
    stdout_truncated: bool = False
    """Whether more than EXEC_OUTPUT_BYTES_MAX came; the rest was dropped. Stream it to see all."""
    stderr_truncated: bool = False

    @property
    def stdout(self) -> str:
        """UTF-8 with replacement; `stdout_bytes` has what was really written."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    def check(self) -> ExecResult:
        """Itself; raises ProgramFailedError, with the end of stderr, unless it exited with 0 in time."""
        if self.ok:
            return self
        how = (
            "ran out of time"
            if self.timed_out
            else f"was ended by signal {self.signal}"
            if self.signal
            else f"exited with {self.exit_code}"
        )
        tail = self.stderr[-2_000:].strip()
        raise ProgramFailedError(
            f"the command {how}" + (f": {tail}" if tail else ""),
            exit_code=self.exit_code,
            signal=self.signal,
            timed_out=self.timed_out,
        )


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A process of a sandbox as the server knew it when asked."""

    id: str
    pid: int
    tag: str | None = None
    argv: list[str] = field(default_factory=list)
    cwd: str = ""
    user: str = ""
    tty: bool = False
    stdin: bool = False
    started_at: datetime | None = None
    running: bool = False
    exit_code: int | None = None
    """None while it runs, and when a signal ended it."""
    signal: int | None = None
    timed_out: bool = False
    start: int = 0
    """Offset of the oldest byte of its output that can still be read."""
    offset: int = 0
    """How much it has said in all."""

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    def check(self) -> ProcessInfo:
        """Itself; raises ProgramFailedError unless it has exited with 0 in time (or still runs)."""
        if not self.running and not self.ok:
            how = f"was ended by signal {self.signal}" if self.signal else f"exited with {self.exit_code}"
            raise ProgramFailedError(
                f"process {self.id} {'ran out of time' if self.timed_out else how}",
                exit_code=self.exit_code,
                signal=self.signal,
                timed_out=self.timed_out,
            )
        return self


@dataclass(frozen=True, slots=True)
class ProcessOutput:
    """What a process has said from an offset on, as far as it was there."""

    pieces: list[Output]
    offset: int
    """Where to read on."""
    gap: int = 0
    """Bytes that are missing before the first piece: they were no longer kept."""
    running: bool = False
    more: bool = False
    """There was more than one answer holds."""

    @property
    def data(self) -> bytes:
        """Both channels, in the order they came."""
        return b"".join(piece.data for piece in self.pieces)

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Port:
    """A TCP port of the guest on which something listens."""

    port: int
    address: str


@dataclass(frozen=True, slots=True)
class Traffic:
    """Who may reach a sandbox's ports through its server: anybody (`public`), or whoever has a right to."""

    public: bool
    token: str = field(repr=False)
    """As the header `X-Traffic-Token` it opens every port, until `traffic(rotate=True)`."""
    domain: str | None = None
    """Ports are `PORT-ID.DOMAIN` (the `_` of the id as `-`); None: the server has no domain."""


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file, directory or link. `size` in bytes, `mode` the permission bits, `mtime` unix seconds."""

    name: str
    path: str
    kind: Literal["file", "directory", "symlink", "other"]
    size: int
    mode: int
    uid: int
    gid: int
    user: str
    group: str
    mtime: float
    target: str | None = None

    @property
    def is_dir(self) -> bool:
        return self.kind == "directory"

    @property
    def is_file(self) -> bool:
        return self.kind == "file"


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """A sandbox as the server knew it when asked. Sizes in the unit of the name, times in UTC."""

    id: str
    template: str
    state: str
    reason: str | None = None
    created_at: datetime | None = None
    started_at: datetime | None = None
    ends_at: datetime | None = None
    """When it ends at the latest, if nothing is done with it until then."""
    idle_timeout_s: float | None = None
    vcpus: int | None = None
    memory_mib: int | None = None
    disk_gib: float | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    accelerator: str | None = None
    vmm: str | None = None
    """The virtual machine monitor it is on."""
    nested: bool = False
    """Whether its guest has a `/dev/kvm` that works."""
    boot_id: str | None = None
    limits: dict[str, int] | None = None
    """What the create bounded beyond vCPUs and memory: `disk_mib`, `pids`, `output_bytes_per_s`."""
    on_timeout: str | None = None
    """`kill` or `pause`: what happens when its time is up."""
    auto_resume: bool | None = None
    keep_s: float | None = None
    paused_at: datetime | None = None
    pause: dict[str, Any] | None = None
    """Of a paused one: `pages_bytes`, `memory` (false: only `resume(cold=True)`), `pause_ms`, `durable_ms`."""
    parent: str | None = None
    network: dict[str, Any] | None = None
    """What was asked for: `profile`, `rules`, `rewrite`, `credentials` (names of secrets, no values)."""
    protect: list[str] = field(default_factory=list)
    """Paths that only the guest's root could change."""
    traffic: dict[str, Any] | None = None
    """`public`: whether anybody may reach its ports."""
    volumes: list[dict[str, Any]] = field(default_factory=list)
    """Attached ones: `volume` (id), `name`, `path`, `mode`, and `error` when it could not be mounted at a resume."""
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The server's whole answer."""


@dataclass(frozen=True, slots=True)
class NetworkInfo:
    """What a sandbox may reach, from `sandbox.network.get()` and `sandbox.update_network()`."""

    network: dict[str, Any]
    """`profile`, `rules`, `rewrite`, `credentials`: as asked."""
    link: bool
    """Whether its machine has a NIC that leads to the gateway; without one nothing can be reached."""
    problem: str | None = None
    """Why it is not as it should be; None when all is well."""
    cut: int = 0
    """Of an update: connections that ended for it."""
    capture: dict[str, Any] | None = None
    """What `sandbox.network.capture()` returns; None when nothing was captured."""
    warnings: tuple[str, ...] = ()
    """Rules that allow more than is probably meant, each in a sentence."""


def network_info(body: dict[str, Any]) -> NetworkInfo:
    return NetworkInfo(
        dict(body.get("network") or {}),
        bool(body.get("link")),
        body.get("problem"),
        int(body.get("cut") or 0),
        body.get("capture"),
        tuple(map(str, body.get("warnings") or ())),
    )


@dataclass(frozen=True, slots=True)
class Isolation:
    """How the processes around a sandbox are confined, from `sandbox.isolation()`."""

    ok: bool
    """Everything that SPECIFICATION.md promises on such a host holds."""
    driver: str
    differences: tuple[str, ...]
    """What does not hold, in words."""
    missing: tuple[str, ...]
    """What this host cannot give (an ordinary user's server, no cgroup v2…), in words."""
    report: dict[str, Any]
    """All of it: `processes` (by `role`: uids, capabilities, threads, namespaces, root, descriptors…), `host`."""


def isolation(body: dict[str, Any]) -> Isolation:
    words = {
        name: tuple(f"{entry.get('process')}: {entry.get('words')}" for entry in body.get(name) or ())
        for name in ("differences", "missing")
    }
    return Isolation(
        bool(body.get("ok")), str(body.get("driver")), words["differences"], words["missing"], body
    )


_FIRST_DAY, _LAST_DAY = -62_135_510_400, 253_402_128_000  # 0001-01-02, 9999-12-30


def parse_time(value: Any) -> datetime | None:
    """RFC 3339 text or unix seconds, as an aware UTC datetime; the first or last day there is (in any zone) for a time
    beyond all years, which a file of a guest can have."""
    if value is None:
        return None
    if isinstance(value, int | float):
        return datetime.fromtimestamp(min(max(value, _FIRST_DAY), _LAST_DAY), UTC)
    parsed = datetime.fromisoformat(str(value))
    return parsed.replace(tzinfo=UTC) if parsed.tzinfo is None else parsed.astimezone(UTC)


@dataclass(frozen=True, slots=True)
class CodeContext:
    """A context of `sandbox.contexts`; `run_code` takes it, or its id."""

    id: str
    language: str
    cwd: str | None = None
    """Where its cells begin, if that was said."""


def code_context(body: dict[str, Any]) -> CodeContext:
    return CodeContext(str(body.get("id")), str(body.get("language")), body.get("cwd"))


def context_id(context: str | CodeContext) -> str:
    return context.id if isinstance(context, CodeContext) else context


def sandbox_info(body: dict[str, Any]) -> SandboxInfo:
    known = {name: body[name] for name in SandboxInfo.__slots__ if name in body and name != "raw"}
    for name in ("created_at", "started_at", "ends_at", "paused_at"):
        known[name] = parse_time(body.get(name))
    known["metadata"] = dict(body.get("metadata") or {})
    return SandboxInfo(**{"template": "", "state": "", **known, "raw": body})


def process_info(body: dict[str, Any]) -> ProcessInfo:
    known = {name: body[name] for name in ProcessInfo.__slots__ if name in body}
    known["started_at"] = parse_time(body.get("started_at"))
    return ProcessInfo(**{"id": "", "pid": 0, **known})


def file_info(body: dict[str, Any]) -> FileInfo:
    empty: dict[str, Any] = {"name": "", "path": "", "kind": "other"}
    empty.update({"size": 0, "mode": 0, "uid": 0, "gid": 0, "user": "", "group": "", "mtime": 0.0})
    return FileInfo(**{**empty, **{name: body[name] for name in FileInfo.__slots__ if name in body}})


def result(body: dict[str, Any]) -> Result:
    return Result(data=dict(body.get("data") or {}), main=bool(body.get("main")))


def execution_error(body: dict[str, Any]) -> ExecutionError:
    traceback = body.get("traceback") or ""
    return ExecutionError(
        name=str(body.get("name") or "Error"),
        value=str(body.get("value") or ""),
        traceback="\n".join(traceback) if isinstance(traceback, list) else str(traceback),
    )


def execution(body: dict[str, Any]) -> Execution:
    """A waited-for cell, from the server's one answer."""
    status: Any = body.get("status") or ("error" if body.get("error") else "ok")
    error = execution_error(body["error"]) if body.get("error") else _error_of_status(status)
    return Execution(
        results=[result(item) for item in body.get("results") or ()],
        stdout=str(body.get("stdout") or ""),
        stderr=str(body.get("stderr") or ""),
        error=error,
        status=status,
        execution_count=int(body.get("execution_count") or 0),
        duration_ms=body.get("duration_ms"),
        truncated=any(bool(value) for name, value in body.items() if name.endswith("truncated")),
    )


def _error_of_status(status: str) -> ExecutionError | None:
    words = {
        "timed_out": ("TimedOut", "the cell ran longer than its timeout and was interrupted"),
        "interrupted": ("KeyboardInterrupt", "the cell was interrupted"),
        "died": ("InterpreterDied", "the interpreter ended; the next cell gets a fresh one"),
        "error": ("Error", "the cell failed"),
    }
    if status not in words:
        return None
    name, value = words[status]
    return ExecutionError(name, value, f"{name}: {value}")


def exec_result(body: dict[str, Any]) -> ExecResult:
    """A waited-for command, from the server's one answer."""

    def output(name: str) -> bytes:
        encoded = body.get(f"{name}_b64")
        if encoded is not None:
            return base64.b64decode(encoded)
        return str(body.get(name) or "").encode("utf-8", "surrogateescape")

    return exec_end(body, output("stdout"), output("stderr"))


def exec_end(body: dict[str, Any], stdout: bytes, stderr: bytes, *, truncated: bool = False) -> ExecResult:
    return ExecResult(
        exit_code=body.get("exit_code"),
        signal=body.get("signal"),
        stdout_bytes=stdout,
        stderr_bytes=stderr,
        timed_out=bool(body.get("timed_out")),
        duration_ms=body.get("duration_ms"),
        stdout_truncated=truncated or bool(body.get("stdout_truncated")),
        stderr_truncated=truncated or bool(body.get("stderr_truncated")),
    )
