"""What runs in a sandbox: commands, processes, code, ports that listen. Models and operations. Pure."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field

from llm4agents.api.schema.kinds import Answer, Json, Lines, Operation, Operations


class Nothing(Answer):
    """It is done."""


class _Ending(Answer):
    exit_code: int | None
    signal: int | None = Field(description="What killed it; then there is no exit code.")
    timed_out: bool


class ExecResult(_Ending):
    """How a command ended and what it said; the first 16 MiB of each channel."""

    id: str
    duration_ms: float
    stdout: str
    stdout_truncated: bool
    stdout_b64: str | None = Field(
        default=None, description="Only when it is not UTF-8: the bytes, in base64."
    )
    stderr: str
    stderr_truncated: bool
    stderr_b64: str | None = None


class ExecStartedLine(Answer):
    type: Literal["started"]
    pid: int
    id: str = Field(description="The process, which can be attached to.")


class OutputLine(Answer):
    """A piece of output. `offset`: how many bytes it had said before, on both channels together."""

    type: Literal["stdout", "stderr"]
    offset: int
    data_b64: str = Field(description="Bytes, in base64.")


class ExecExitLine(_Ending):
    type: Literal["exit"]
    duration_ms: float
    offset: int


class Process(_Ending):
    """A managed process: it goes on whoever comes and goes, and its newest output can be read again."""

    id: str
    pid: int
    tag: str | None
    argv: list[str]
    cwd: str
    user: str
    tty: bool
    stdin: bool
    started_at: float
    running: bool
    start: int = Field(description="Where what can be read of its output begins.")
    offset: int = Field(description="How much it has said in all.")
    attached: int = Field(description="How many are attached to it.")


class ProcessList(Answer):
    data: list[Process]


class ProcessOutput(_Ending):
    """What there is of its output."""

    data: list[OutputLine]
    offset: int = Field(description="`from` of the next call.")
    gap: int = Field(description="How many bytes before this are not kept any more.")
    running: bool
    more: bool = Field(description="There is more already.")


class ProcessStartedLine(Answer):
    type: Literal["started"]
    id: str
    pid: int
    offset: int
    gap: int
    tty: bool


class ProcessExitLine(_Ending):
    type: Literal["exit"]
    offset: int


class CodeResultBase(Answer):
    main: bool = Field(description="Whether it is the value of the last expression.")
    data: dict[str, Json] = Field(description="By MIME type; images and PDF in base64.")


class CodeError(Answer):
    """The exception that ended the cell."""

    name: str
    value: str
    traceback: str


Status = Literal["ok", "error", "interrupted", "died", "timed_out"]


class CodeResult(Answer):
    """How a cell ended. Code that raises, times out or is interrupted is a result and no problem."""

    status: Status
    execution_count: int
    duration_ms: float
    results: list[CodeResultBase]
    stdout: str
    stderr: str
    error: CodeError | None
    truncated: bool = Field(description="Something was left out, because it was too much.")


class CodeTextLine(Answer):
    type: Literal["stdout", "stderr"]
    text: str


class CodeResultLine(CodeResultBase):
    type: Literal["result"]


class CodeErrorLine(CodeError):
    type: Literal["error"]


class CodeEndLine(Answer):
    type: Literal["end"]
    status: Status
    execution_count: int
    duration_ms: float


class Context(Answer):
    """Where cells run: its variables are kept between them."""

    id: str
    language: str
    cwd: str | None


class ContextList(Answer):
    data: list[Context]


class Port(Answer):
    """A TCP port that a process of the guest listens on."""

    port: int = Field(ge=1, le=65_535)
    address: str


class PortList(Answer):
    data: list[Port]


_ENDED: Final = {"exit_code": 0, "signal": None, "timed_out": False}
_OUTPUT: Final = {"type": "stdout", "offset": 0, "data_b64": "NDIK"}
PROCESS: Final[dict[str, Any]] = {
    "id": "proc_0123456789abcdef",
    "pid": 412,
    "tag": "web",
    "argv": ["python3", "-m", "http.server", "8000"],
    "cwd": "/home/user",
    "user": "user",
    "tty": False,
    "stdin": False,
    "started_at": 1_790_000_003.5,
    "running": True,
    "exit_code": None,
    "signal": None,
    "timed_out": False,
    "start": 0,
    "offset": 0,
    "attached": 0,
}
_CONTEXT: Final = {"id": "ctx_0123456789ab", "language": "python", "cwd": "/home/user"}
_CODE_END: Final = {"status": "ok", "execution_count": 1, "duration_ms": 4.1}
_S = "/v1/sandboxes/{sandbox}"
_P = f"{_S}/processes/{{process}}"
_PROCESS = {"sandbox": "$request.path.sandbox", "process": "$response.body#/id"}

OPERATIONS: Final[Operations] = {
    ("POST", f"{_S}/exec"): Operation(
        "commands_exec",
        "Commands",
        "Run a command",
        (
            ExecResult,
            Lines(
                "ExecLine",
                (ExecStartedLine, OutputLine, ExecExitLine),
                "With `stream`: its output as it comes, then how it ended.",
                (
                    {"type": "started", "pid": 412, "id": "proc_0123456789abcdef"},
                    _OUTPUT,
                    {"type": "exit", **_ENDED, "duration_ms": 18.4, "offset": 3},
                ),
            ),
        ),
        words="An exit code is a result and no problem. The command is a process that outlives who started it: a "
        "client that goes away leaves it running, unless `on_disconnect` is `kill`.",
        reach="guest",
        body={"command": "echo 42"},
        example={
            "id": "proc_0123456789abcdef",
            **_ENDED,
            "duration_ms": 18.4,
            "stdout": "42\n",
            "stdout_truncated": False,
            "stderr": "",
            "stderr_truncated": False,
        },
    ),
    ("POST", f"{_S}/processes"): Operation(
        "processes_start",
        "Processes",
        "Start a process and leave it to itself",
        (Process,),
        status=201,
        reach="guest",
        body={"argv": ["python3", "-m", "http.server", "8000"], "tag": "web"},
        example=PROCESS,
        links={"get": ("processes_get", _PROCESS), "end": ("processes_end", _PROCESS)},
    ),
    ("GET", f"{_S}/processes"): Operation(
        "processes_list",
        "Processes",
        "List processes",
        (ProcessList,),
        words="Those that run, and those that ended and are not forgotten.",
        reach="guest",
        example={"data": [PROCESS]},
    ),
    ("GET", _P): Operation(
        "processes_get",
        "Processes",
        "Look at a process",
        (Process,),
        reach="guest",
        example=PROCESS,
        parameters={"wait_s": "Wait so long for its end."},
    ),
    ("DELETE", _P): Operation(
        "processes_end",
        "Processes",
        "End a process and forget it",
        (Process,),
        reach="guest",
        example={**PROCESS, "running": False, "signal": 9},
    ),
    ("GET", f"{_P}/output"): Operation(
        "processes_output",
        "Processes",
        "What a process has said",
        (
            ProcessOutput,
            Lines(
                "ProcessLine",
                (ProcessStartedLine, OutputLine, ProcessExitLine),
                "With `follow`: its output from there on as it comes, then how it ended.",
            ),
        ),
        reach="guest",
        parameters={
            "from": "Which byte to begin with.",
            "wait_s": "While there is nothing: how long to wait for something.",
        },
        example={
            "data": [_OUTPUT],
            "offset": 3,
            "gap": 0,
            "running": True,
            "exit_code": None,
            "signal": None,
            "timed_out": False,
            "more": False,
        },
    ),
    ("POST", f"{_P}/stdin"): Operation(
        "processes_write_stdin",
        "Processes",
        "Write to its standard input",
        (Nothing,),
        words="`eof`: and end it.",
        reach="guest",
        body={"data_b64": "NDIK", "eof": True},
        example={},
    ),
    ("POST", f"{_P}/signal"): Operation(
        "processes_signal",
        "Processes",
        "Send it a signal",
        (Nothing,),
        reach="guest",
        body={"signal": "TERM"},
        example={},
    ),
    ("POST", f"{_P}/resize"): Operation(
        "processes_resize",
        "Processes",
        "Resize its terminal",
        (Nothing,),
        reach="guest",
        body={"rows": 40, "cols": 120},
        example={},
    ),
    ("POST", f"{_S}/code"): Operation(
        "code_run",
        "Code",
        "Run a cell",
        (
            CodeResult,
            Lines(
                "CodeLine",
                (CodeTextLine, CodeResultLine, CodeErrorLine, CodeEndLine),
                "With `stream`: what it says and shows as it comes, then `end`. Its own exception has no `outcome`, a "
                "problem has one.",
                ({"type": "stdout", "text": "42\n"}, {"type": "end", **_CODE_END}),
            ),
        ),
        words="In an interpreter that keeps its variables from cell to cell. A client that goes away "
        "interrupts its cell.",
        reach="guest",
        body={"code": "print(6 * 7)"},
        example={
            **_CODE_END,
            "results": [],
            "stdout": "42\n",
            "stderr": "",
            "error": None,
            "truncated": False,
        },
    ),
    ("POST", f"{_S}/code/interrupt"): Operation(
        "code_interrupt",
        "Code",
        "Interrupt the cell that runs",
        (Nothing,),
        reach="guest",
        body={"context": "default"},
        example={},
    ),
    ("POST", f"{_S}/code/restart"): Operation(
        "code_restart",
        "Code",
        "Start a context anew",
        (Nothing,),
        words="Its variables are gone.",
        reach="guest",
        body={"context": "default"},
        example={},
    ),
    ("GET", f"{_S}/contexts"): Operation(
        "contexts_list", "Code", "List contexts", (ContextList,), reach="guest", example={"data": [_CONTEXT]}
    ),
    ("POST", f"{_S}/contexts"): Operation(
        "contexts_create",
        "Code",
        "Create a context",
        (Context,),
        status=201,
        reach="guest",
        body={"language": "python"},
        example=_CONTEXT,
    ),
    ("DELETE", f"{_S}/contexts/{{ident}}"): Operation(
        "contexts_remove",
        "Code",
        "Remove a context",
        (Nothing,),
        words="And end what runs in it.",
        reach="guest",
        example={},
    ),
    ("GET", f"{_S}/ports"): Operation(
        "ports_list",
        "Ports",
        "Ports that are listened on",
        (PortList,),
        reach="guest",
        example={"data": [{"port": 8000, "address": "0.0.0.0"}]},  # noqa: S104 (of a guest)
    ),
    ("GET", f"{_S}/ports/{{port}}/wait"): Operation(
        "ports_wait",
        "Ports",
        "Wait until a port is listened on",
        (Port,),
        reach="guest",
        parameters={"timeout_s": "How long at most; then it is a problem (504)."},
        example={"port": 8000, "address": "0.0.0.0"},  # noqa: S104 (of a guest)
    ),
}
