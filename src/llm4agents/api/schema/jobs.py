"""Jobs: what is started, or scheduled, and left. Models and operations. Pure."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field

from llm4agents.api.schema.kinds import DEFAULT_SANDBOX, NOW, Answer, Json, Operation, Operations


class Run(Answer):
    """One run of a job."""

    job: str
    sandbox: str
    process: str
    sequence: int
    state: Literal["starting", "running", "exited", "done", "failed", "lost", "cancelled"]
    due_at: float
    started_at: float | None
    ended_at: float | None
    result: dict[str, Json] | None = Field(
        description="`exit_code`, `signal`, `timed_out`, the end of its output (`output_b64` from `output_start` to "
        "`output_end`); or a `reason`; or what it `waits` for."
    )
    told: dict[str, Json] | None = Field(
        description="How its webhook was told: `tries`, `next_at`, `answered`, `last`."
    )


class Job(Answer):
    """A job, as it was asked for, and what has become of it."""

    id: str
    sandbox: str
    argv: list[str] | None
    command: str | None
    code: str | None
    env: dict[str, str]
    cwd: str | None
    user: str | int
    timeout_s: float | None
    on_exit: Literal["none", "pause", "kill"]
    webhook: str | None
    every_s: float | None = None
    at: float | None = None
    state: Literal["waiting", "running", "ended", "cancelled"]
    created_at: float
    next_at: float | None
    ended_at: float | None
    runs: int
    last: Run | None


class JobMade(Job):
    webhook_secret: str | None = Field(
        default=None,
        description="What its webhook's messages are signed with. In this answer and never again.",
    )


class JobList(Answer):
    data: list[Job]


class JobPage(JobList):
    next: str | None = Field(description="`after` of the next page; null: this is the last.")


class RunList(Answer):
    data: list[Run]


class RunOutput(Answer):
    process: str
    sequence: int
    state: str
    start: int
    offset: int = Field(description="`from` of the next call.")
    data_b64: str
    more: bool = Field(description="There may be more.")


RUN: Final[dict[str, Any]] = {
    "job": "job_0123456789abcdef",
    "sandbox": DEFAULT_SANDBOX,
    "process": "job_0123456789abcdef.1",
    "sequence": 1,
    "state": "running",
    "due_at": NOW,
    "started_at": NOW + 0.1,
    "ended_at": None,
    "result": None,
    "told": None,
}
JOB: Final[dict[str, Any]] = {
    "id": "job_0123456789abcdef",
    "sandbox": DEFAULT_SANDBOX,
    "argv": None,
    "command": "make report",
    "code": None,
    "env": {},
    "cwd": None,
    "user": "user",
    "timeout_s": None,
    "on_exit": "none",
    "webhook": None,
    "state": "running",
    "created_at": NOW,
    "next_at": None,
    "ended_at": None,
    "runs": 1,
    "last": RUN,
}
_S = "/v1/sandboxes/{sandbox}/jobs"
_J = f"{_S}/{{job}}"
_STATE = "Only those in one of these states, by commas: `waiting`, `running`, `ended`, `cancelled`."
_JOB = {"sandbox": "$request.path.sandbox", "job": "$response.body#/id"}

OPERATIONS: Final[Operations] = {
    ("POST", _S): Operation(
        "jobs_create",
        "Jobs",
        "Start a job",
        (JobMade,),
        words="Now, at a time (`at`), or again and again (`every_s`). It needs nobody to wait for it, and a paused "
        "sandbox is resumed for it.",
        status=201,
        reach="sandbox",
        body={"command": "make report", "on_exit": "pause"},
        example=JOB,
        links={"get": ("jobs_get", _JOB), "cancel": ("jobs_cancel", _JOB)},
    ),
    ("GET", _S): Operation(
        "jobs_list",
        "Jobs",
        "List a sandbox's jobs",
        (JobList,),
        reach="sandbox",
        parameters={"state": _STATE},
        example={"data": [JOB]},
    ),
    ("GET", "/v1/jobs"): Operation(
        "jobs_list_all",
        "Jobs",
        "List the project's jobs",
        (JobPage,),
        words="The newest first.",
        parameters={"state": _STATE, "after": "`next` of the page before."},
        example={"data": [JOB], "next": None},
    ),
    ("GET", _J): Operation(
        "jobs_get",
        "Jobs",
        "Look at a job",
        (Job,),
        reach="sandbox",
        parameters={"run": "Which run's end is waited for.", "wait_s": "How long to wait for that."},
        example=JOB,
    ),
    ("DELETE", _J): Operation(
        "jobs_cancel",
        "Jobs",
        "Cancel a job",
        (Job,),
        words="No more runs; one under way is killed.",
        reach="sandbox",
        example={**JOB, "state": "cancelled", "ended_at": NOW + 5},
    ),
    ("POST", f"{_J}/run"): Operation(
        "jobs_run_now",
        "Jobs",
        "Have a waiting job run at once",
        (Job,),
        reach="sandbox",
        example=JOB,
    ),
    ("GET", f"{_J}/runs"): Operation(
        "jobs_runs", "Jobs", "Its runs, newest first", (RunList,), reach="sandbox", example={"data": [RUN]}
    ),
    ("GET", f"{_J}/output"): Operation(
        "jobs_output",
        "Jobs",
        "What a run has said",
        (RunOutput,),
        words="Of one that goes on the sandbox is asked, which is resumed for it; of one that has ended the last 64 "
        "KiB are kept.",
        reach="guest",
        parameters={
            "run": "Which; else the newest.",
            "from": "Which byte to begin with.",
            "wait_s": "While there is nothing: how long to wait for something.",
        },
        example={
            "process": "job_0123456789abcdef.1",
            "sequence": 1,
            "state": "running",
            "start": 0,
            "offset": 3,
            "data_b64": "NDIK",
            "more": True,
        },
    ),
}
