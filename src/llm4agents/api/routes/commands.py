"""What a request wants to run, as the engine has it. Shared by the routes of commands and of processes."""

from __future__ import annotations

from llm4agents.api import context, models
from llm4agents.engine import calls
from llm4agents.engine.processes import Command


def of(body: models.Exec | models.Start, timeout_s: float | None) -> Command:
    """`timeout_s` None = no limit."""
    return Command(
        argv=body.argv if body.argv is not None else calls.shell(body.command or ""),
        env=body.env,
        cwd=None if body.cwd is None else context.guest_path(body.cwd),
        user=context.user_of(body.user),
        stdin=body.stdin_bytes(),
        timeout_s=timeout_s,
    )
