"""`job`: commands that are started, or scheduled, and left."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llm4agents.cli import options

if TYPE_CHECKING:
    from llm4agents.sdk._jobs import JobInfo
    from llm4agents.sdk._sync.jobs import Job

Id = Annotated[str, typer.Argument(metavar="ID", help="A sandbox, or a unique beginning of its id.")]
Which = Annotated[str, typer.Argument(metavar="JOB", help="As `job ls` shows it.")]
TIMED_OUT = 124


def start(
    id: Id,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- CMD...", help="One word runs in a shell; several as they are."),
    ] = None,
    code: Annotated[str | None, typer.Option("--code", "-c", help="A Python program instead.")] = None,
    at: Annotated[
        str | None, typer.Option(help="When: RFC 3339 with an offset, or unix seconds. Default: now.")
    ] = None,
    every: Annotated[float | None, typer.Option(help="Again each so many seconds (60 at least).")] = None,
    on_exit: Annotated[
        str, typer.Option(help="What then happens to the sandbox: none, pause, kill.")
    ] = "none",
    webhook: Annotated[str | None, typer.Option(help="A URL that is sent each run's result.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds until a run is killed; 0: no limit.")] = 0,
    cwd: Annotated[str | None, typer.Option(help="Default: the user's home.")] = None,
    env: options.Env = None,
    user: options.User = None,
    json: options.Json = False,
) -> None:
    """Start a job, or schedule it, and print its id."""
    from llm4agents import Sandbox
    from llm4agents.cli import ids, output

    words = command[1:] if command and command[0] == "--" else command
    if bool(words) == (code is not None):
        raise typer.BadParameter("give a command, or --code", param_hint="CMD")
    cmd: Any = None if not words else words[0] if len(words) == 1 else words
    wanted: Any = on_exit
    job = Sandbox.connect(ids.resolve(id)).jobs.start(
        cmd,
        code=code,
        at=float(at) if at is not None and at.replace(".", "", 1).isdecimal() else at,
        every=every,
        on_exit=wanted,
        webhook=webhook,
        env=options.pairs(env, "--env"),
        cwd=cwd,
        user=user,
        timeout=timeout,
    )
    if json:
        output.emit({**job.last_info.raw, "webhook_secret": job.webhook_secret})
        return
    print(job.id)
    if job.webhook_secret is not None:
        output.say(f"webhook secret (shown this once): {job.webhook_secret}")


def ls(
    id: Annotated[str | None, typer.Argument(metavar="ID", help="Only of this sandbox.")] = None,
    state: Annotated[str | None, typer.Option(help="waiting, running, ended or cancelled.")] = None,
    json: options.Json = False,
) -> None:
    """List jobs."""
    from llm4agents.cli import ids, output
    from llm4agents.sdk._jobs import info_of
    from llm4agents.sdk._sync.observe import Observer

    with Observer() as observer:
        found = observer.jobs(state)
    if id is not None:
        wanted = ids.resolve(id)
        found = [job for job in found if job["sandbox"] == wanted]
    if json:
        output.emit({"jobs": found})
        return
    rows = [
        (job.id, job.sandbox, job.state, job.runs, output.when(job.next_at), _ended(job), _what(job))
        for job in map(info_of, found)
    ]
    output.table(("JOB", "SANDBOX", "STATE", "RUNS", "NEXT", "LAST", "COMMAND"), rows)


def show(id: Id, job: Which, json: options.Json = False) -> None:
    """Show a job's runs, the newest first."""
    from llm4agents.cli import output

    found = _job(id, job)
    runs = found.runs()
    if json:
        output.emit({**found.last_info.raw, "run_list": [_run(run) for run in runs]})
        return
    rows = [
        (
            run.sequence,
            run.state,
            output.when(run.started_at or run.due_at),
            output.when(run.ended_at),
            _end(run),
            run.reason or "",
        )
        for run in runs
    ]
    output.table(("RUN", "STATE", "STARTED", "ENDED", "EXIT", "REASON"), rows)


def output_(
    id: Id,
    job: Which,
    run: Annotated[int | None, typer.Option(help="Which run; default the newest.")] = None,
) -> None:
    """Print what a run has said."""
    sys.stdout.buffer.write(_job(id, job).output(run))
    sys.stdout.buffer.flush()


def wait(
    id: Id,
    job: Which,
    timeout: Annotated[float, typer.Option(help="Seconds; 0: no limit.")] = 0,
) -> None:
    """Wait for the end of a job's run; exits with its exit code."""
    from llm4agents.cli import output
    from llm4agents.errors import TimedOutError

    try:
        run = _job(id, job).wait(timeout or None)
    except TimedOutError as error:
        output.report(error)
        raise typer.Exit(TIMED_OUT) from None
    if run.state != "done":
        output.say(f"{run.state}: {run.reason or 'killed'}")
        raise typer.Exit(1)
    raise typer.Exit(128 + (run.signal or 0) if run.exit_code is None else run.exit_code)


def run(id: Id, job: Which) -> None:
    """Have a waiting job run now; its rhythm stays."""
    _job(id, job).run_now()


def cancel(id: Id, job: Which) -> None:
    """Cancel a job; a run under way is killed."""
    _job(id, job).cancel()


def _job(id: str, job: str) -> Job:
    from llm4agents.cli import ids
    from llm4agents.sdk._jobs import info_of
    from llm4agents.sdk._sync.jobs import Job
    from llm4agents.sdk._sync.transport import transport

    wanted = ids.resolve(id)
    if not job.startswith("job_"):
        job = f"job_{job}"
    path = f"/v1/sandboxes/{wanted}/jobs/{job}"
    # Not through Sandbox.connect: the jobs of a sandbox that has ended can be looked at too.
    way = transport()
    return Job(way, info_of(way.json("GET", path, sandbox=wanted)))


def _what(job: JobInfo) -> str:
    raw = job.raw
    text = raw.get("command") or raw.get("code") or " ".join(raw.get("argv") or ())
    line = str(text).strip().splitlines()[0]
    return line if len(line) <= 40 else f"{line[:39]}…"


def _end(run: Any) -> str:
    if run.timed_out:
        return "timed out"
    return (
        ""
        if run.exit_code is None and run.signal is None
        else str(run.exit_code if run.signal is None else -run.signal)
    )


def _ended(job: JobInfo) -> str:
    return "" if job.last is None else f"{job.last.state} {_end(job.last)}".strip()


def _run(run: Any) -> dict[str, Any]:
    import dataclasses

    return {**dataclasses.asdict(run), "output": run.text}
