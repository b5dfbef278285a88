"""What `sandbox.jobs` returns and sends: plain data and request bodies. Pure."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from llm4agents.errors import InvalidRequestError
from llm4agents.sdk import _wire
from llm4agents.sdk.results import parse_time

OnExit = Literal["none", "pause", "kill"]
RUN_OVER = frozenset({"done", "failed", "lost", "cancelled"})


@dataclass(frozen=True, slots=True)
class JobRun:
    """One run. `state`: starting, running, exited, then done (its result is known), failed (could not be started),
    lost (its machine went) or cancelled. `reason` says why for failed and lost."""

    sequence: int
    state: str
    due_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None
    exit_code: int | None
    signal: int | None
    timed_out: bool
    reason: str | None
    output: bytes
    """The last 64 KiB of what it said, both channels as they came; of one that has ended."""
    process: str
    told: dict[str, Any] | None
    """The webhook's tries, and when it was answered."""

    @property
    def ok(self) -> bool:
        """It ended by itself, with 0."""
        return self.state == "done" and self.exit_code == 0

    @property
    def text(self) -> str:
        return self.output.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class JobInfo:
    """A job. `state`: waiting (until `next_at`), running, ended or cancelled. `raw` is the server's answer."""

    id: str
    sandbox: str
    state: str
    next_at: datetime | None
    every_s: float | None
    on_exit: str
    webhook: str | None
    runs: int
    last: JobRun | None
    raw: dict[str, Any]


def run_of(body: Mapping[str, Any]) -> JobRun:
    result = body.get("result") or {}
    return JobRun(
        sequence=int(body["sequence"]),
        state=str(body["state"]),
        due_at=parse_time(body.get("due_at")),
        started_at=parse_time(body.get("started_at")),
        ended_at=parse_time(body.get("ended_at")),
        exit_code=result.get("exit_code"),
        signal=result.get("signal"),
        timed_out=bool(result.get("timed_out")),
        reason=result.get("reason"),
        output=base64.b64decode(result.get("output_b64") or ""),
        process=str(body.get("process") or ""),
        told=body.get("told"),
    )


def info_of(body: Mapping[str, Any]) -> JobInfo:
    last = body.get("last")
    return JobInfo(
        id=str(body["id"]),
        sandbox=str(body["sandbox"]),
        state=str(body["state"]),
        next_at=parse_time(body.get("next_at")),
        every_s=body.get("every_s"),
        on_exit=str(body.get("on_exit") or "none"),
        webhook=body.get("webhook"),
        runs=int(body.get("runs") or 0),
        last=None if last is None else run_of(last),
        raw=dict(body),
    )


def body_of(
    cmd: str | Sequence[str] | None,
    *,
    code: str | None,
    at: datetime | float | str | None,
    every: float | None,
    on_exit: OnExit,
    webhook: str | None,
    env: Mapping[str, str] | None,
    cwd: str | None,
    user: str | None,
    timeout: float | None,
) -> dict[str, Any]:
    """POST …/jobs. Raises InvalidRequestError."""
    if (cmd is None) == (code is None):
        raise InvalidRequestError("give a command, or code=")
    if isinstance(at, datetime):
        if at.tzinfo is None:
            raise InvalidRequestError("at= has no time zone", hint="datetime.now(UTC) + …, or unix seconds")
        at = at.isoformat()
    body: dict[str, Any] = {"code": code}
    if cmd is not None:
        body["command" if isinstance(cmd, str) else "argv"] = (
            cmd if isinstance(cmd, str) else [*map(str, cmd)]
        )
    body.update(
        at=at,
        every_s=None if every is None else _wire.seconds("every", every),
        on_exit=on_exit,
        webhook=webhook,
        env=_wire.env_of(env),
        cwd=None if cwd is None else _wire.path_of(cwd),
        user=user,
        timeout_s=_wire.seconds("timeout", timeout) or None,
    )
    return _wire.without_none(body)
