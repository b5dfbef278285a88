"""Which files of this machine an agent may name: those below one directory, links followed."""

from __future__ import annotations

import os
from pathlib import Path

from llm4agents.errors import InvalidRequestError


def inside(root: Path, name: str) -> Path:
    """The path that `name` means below `root`. Raises InvalidRequestError when it leads out of it."""
    top = root.resolve()
    # Links are followed first: what counts is where the bytes would come from or go to.
    path = (top / name).resolve()
    if path != top and top not in path.parents:
        raise InvalidRequestError(
            f"{name} is not below {top}", hint="only files of that directory can be copied"
        )
    return path


def check_tree(root: Path, path: Path) -> None:
    """Refuse a directory with a link that leads out of `root`: a copy of it would follow the link.

    Raises InvalidRequestError.
    """
    for directory, names, files in os.walk(path):
        for name in (*names, *files):
            entry = Path(directory, name)
            if entry.is_symlink():
                inside(root, str(entry))
