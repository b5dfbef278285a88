"""Whether what a path names is the caller's: else the answer is the one for what never was, word by word.

Templates have no entry here: a name is looked up in the caller's own project (`context.template`), so no other's can be
named. What a body or a query names is its route's to look up in the caller's project.
"""

from __future__ import annotations

from collections.abc import Mapping

from llm4agents.api.context import Context
from llm4agents.engine.principal import Principal
from llm4agents.errors import NotFoundError, SandboxNotFoundError


def check(context: Context, params: Mapping[str, str], principal: Principal) -> None:
    """Raises NotFoundError for a sandbox or volume that is not his, or not at all: here, before a word of the request
    is read, since what a route says of the request itself would tell the one from the other."""
    if (sandbox := params.get("sandbox")) is not None:
        row = context.engine.find(sandbox)
        if row is None or not principal.sees(row.project):
            raise SandboxNotFoundError(f"there is no sandbox {sandbox[:80]}", hint="llm4agents ls shows them")
    if (volume := params.get("volume")) is not None:
        project = context.engine.projects.owner_of_volume(volume)
        if project is None or not principal.sees(project):
            raise NotFoundError(f"there is no volume {volume[:80]}", hint="llm4agents volume ls shows them")
