"""Every operation of the API. A new module of operations is added here. Pure."""

from __future__ import annotations

from typing import Final

from llm4agents.api.schema import access, files, jobs, network, node, running, sandboxes, templates, volumes
from llm4agents.api.schema.kinds import Operation, Operations

MODULES: Final = (sandboxes, running, files, network, jobs, templates, volumes, access, node)


def _all() -> Operations:
    found: dict[tuple[str, str], Operation] = {}
    for module in MODULES:
        if both := found.keys() & module.OPERATIONS.keys():
            raise ValueError(f"described twice: {sorted(both)}")
        found.update(module.OPERATIONS)
    return found


OPERATIONS: Final = _all()

TAGS: Final = {
    "Sandboxes": "A microVM of one's own: created, paused, resumed, forked, ended.",
    "Commands": "Commands that are waited for.",
    "Processes": "Commands that are left running, looked at again, talked to.",
    "Code": "Cells of code in an interpreter that keeps its variables.",
    "Files": "Files of a sandbox. Paths are absolute, or taken from the working directory.",
    "Ports": "Servers that run in a sandbox.",
    "Network": "What a sandbox may reach, and what it did.",
    "Secrets": "Credentials that are put into requests outside of the sandbox, which never sees them.",
    "Jobs": "Commands that are started or scheduled, and left; their sandbox may pause meanwhile.",
    "Templates": "What sandboxes are created from.",
    "Volumes": "Disks that outlive sandboxes.",
    "Access": "Keys, projects, invites, the audit.",
    "Observe": "What happens and what it takes.",
    "Node": "The machine that the server runs on. For its operator.",
    "Server": "The server itself.",
}
