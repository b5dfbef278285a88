"""/v1/sandboxes/{id}/jobs and /v1/jobs: commands that are started, or scheduled, and left."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from llm4agents import limits
from llm4agents.api import context, models
from llm4agents.api.answers import Json, unless_gone
from llm4agents.engine import jobs, schedule
from llm4agents.errors import InvalidRequestError

router = APIRouter(prefix="/v1")

STATES = ("waiting", "running", "ended", "cancelled")
Limit = Annotated[int, Query(ge=1, le=1000)]


class Job(models.WithEnv):
    """`timeout_s` missing or 0: none. `at`: unix seconds or RFC 3339."""

    argv: list[str] | None = None
    command: str | None = None
    code: str | None = None
    cwd: models.Path | None = None
    user: str | None = None
    timeout_s: models.Seconds | None = None
    at: float | str | None = None
    every_s: models.Seconds | None = None
    on_exit: Literal["none", "pause", "kill"] = "none"
    webhook: Annotated[str, Field(min_length=1, max_length=limits.WEBHOOK_URL_BYTES_MAX)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Job:
        given = [what for what in (self.argv, self.command, self.code) if what is not None]
        if len(given) != 1:
            raise ValueError("give one of argv, command and code")
        words = self.argv if self.argv is not None else [self.command or self.code or ""]
        if not words or not words[0].strip():
            raise ValueError("there is nothing to run")
        if any("\0" in word for word in words):
            raise ValueError("a command has no NUL in it")
        if sum(len(word.encode("utf-8", "surrogatepass")) + 1 for word in words) > limits.ARGV_BYTES_MAX:
            raise ValueError(
                f"it is longer than {limits.ARGV_BYTES_MAX} bytes; write it to a file and run that"
            )
        return self


def _describe(here: context.Context, job: Any) -> dict[str, Any]:
    return jobs.describe(job, here.engine.jobs.last_run(job))


@router.post("/sandboxes/{sandbox}/jobs", status_code=201)
async def add(sandbox: str, body: Job, request: Request) -> Response:
    """The job, with the secret of its webhook, which no other answer has."""
    here = context.of(request)
    spec = {
        "argv": body.argv,
        "command": body.command,
        "code": body.code,
        "env": body.env,
        "cwd": context.directory(body.cwd, request),
        "user": context.user_of(body.user, request),
        "timeout_s": body.timeout_s or None,
        "on_exit": body.on_exit,
        "webhook": body.webhook,
    }
    at = None if body.at is None else schedule.moment(body.at)
    guarded = not context.principal(request).sees_all
    made, secret = here.engine.jobs.add(
        context.check_id(sandbox), spec, at=at, every_s=body.every_s, guarded=guarded
    )
    more = {} if secret is None else {"webhook_secret": secret}
    return Json({**_describe(here, made), **more}, status_code=201)


@router.get("/sandboxes/{sandbox}/jobs")
async def of_sandbox(
    sandbox: str, request: Request, state: str | None = None, limit: Limit = 100
) -> Response:
    here = context.of(request)
    here.engine.get(context.check_id(sandbox))
    found = here.engine.jobs.find(sandbox, _states(state), limit)
    return Json({"data": [_describe(here, job) for job in found]})


@router.get("/jobs")
async def of_node(
    request: Request,
    state: str | None = None,
    limit: Limit = 100,
    after: Annotated[str | None, Query(max_length=64)] = None,
) -> Response:
    here, visible = context.of(request), context.principal(request).visible
    found = here.engine.jobs.find(None, _states(state), limit + 1, visible, after)
    following = found[limit - 1].id if len(found) > limit else None
    return Json({"data": [_describe(here, job) for job in found[:limit]], "next": following})


@router.get("/sandboxes/{sandbox}/jobs/{job}")
async def get(
    sandbox: str,
    job: str,
    request: Request,
    run: Annotated[int, Query(ge=1)] = 1,
    wait_s: Annotated[float, Query(ge=0, le=60)] = 0.0,
) -> Response:
    """The job; with `wait_s` when its run number `run` has ended, or after that time."""
    here = context.of(request)
    if wait_s:
        waiting = here.engine.jobs.wait(context.check_id(sandbox), job, run, wait_s)
        return Json(_describe(here, await unless_gone(request, waiting)))
    return Json(_describe(here, here.engine.jobs.get(context.check_id(sandbox), job)))


@router.delete("/sandboxes/{sandbox}/jobs/{job}")
async def cancel(sandbox: str, job: str, request: Request) -> Response:
    here = context.of(request)
    return Json(_describe(here, await here.engine.jobs.cancel(context.check_id(sandbox), job)))


@router.post("/sandboxes/{sandbox}/jobs/{job}/run")
async def run_now(sandbox: str, job: str, request: Request) -> Response:
    here = context.of(request)
    return Json(_describe(here, here.engine.jobs.run_now(context.check_id(sandbox), job)))


@router.get("/sandboxes/{sandbox}/jobs/{job}/runs")
async def runs(sandbox: str, job: str, request: Request, limit: Limit = 100) -> Response:
    """Newest first."""
    here = context.of(request)
    found = here.engine.jobs.get(context.check_id(sandbox), job)
    return Json({"data": [jobs.describe_run(run, found) for run in here.engine.jobs.runs(found, limit)]})


@router.get("/sandboxes/{sandbox}/jobs/{job}/output")
async def output(
    sandbox: str,
    job: str,
    request: Request,
    run: Annotated[int, Query(ge=1)] | None = None,
    start: Annotated[int, Query(ge=0, alias="from")] = 0,
    wait_s: Annotated[float, Query(ge=0, le=60)] = 0.0,
) -> Response:
    """What the newest run, or run number `run`, has said from an offset on. Of one that goes on this asks the
    sandbox, which is resumed for it; of one that has ended the last 64 KiB are kept."""
    here = context.of(request)
    found = here.engine.jobs.get(context.check_id(sandbox), job)
    return Json(await here.engine.jobs.output(found, run, start, wait_s))


def _states(state: str | None) -> tuple[str, ...]:
    wanted = tuple(state.split(",")) if state else ()
    if unknown := [name for name in wanted if name not in STATES]:
        raise InvalidRequestError(f"{unknown[0]!r} is no state of a job", hint=f"one of {', '.join(STATES)}")
    return wanted
