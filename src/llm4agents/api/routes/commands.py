"""What a request wants to run, as the engine has it. Shared by the routes of commands and of processes."""

from __future__ import annotations

from fastapi import Request

from llm4agents.api import context, models
from llm4agents.engine import calls
from llm4agents.engine.processes import Command


def of(body: models.Exec | models.Start, timeout_s: float | None, request: Request) -> Command:
    """`timeout_s` None = no limit. Who says neither user nor directory has those of the template."""
    return Command(
        argv=body.argv if body.argv is not None else calls.shell(body.command or ""),
        env=body.env,
        cwd=context.directory(body.cwd, request),
        user=context.user_of(body.user, request),
        stdin=body.stdin_bytes(),
        timeout_s=timeout_s,
    )
