"""Who may reach a port of a sandbox. The gate lets everybody come as far as here."""

from __future__ import annotations

from llm4agents.api.context import Context
from llm4agents.engine.principal import NOBODY, Principal
from llm4agents.errors import AuthenticationError, ForbiddenError, SandboxNotFoundError


def check(context: Context, principal: Principal, sandbox: str) -> None:
    """Raises AuthenticationError, ForbiddenError, SandboxNotFoundError (also for another project's)."""
    if principal.actor == NOBODY:
        raise AuthenticationError("this port is private", hint="send an API key of its project as X-API-KEY")
    if principal.sees_all:
        return
    row = context.engine.find(sandbox)
    if row is None or not principal.sees(row.project):
        raise SandboxNotFoundError(f"there is no sandbox {sandbox}", hint="llm4agents ls shows them")
    if not principal.may("sandboxes"):
        raise ForbiddenError("this needs a key with the scope sandboxes", needs=["sandboxes"])
