"""Files of a sandbox: one, many, changes. Models and operations. Pure."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field

from llm4agents.api.schema.kinds import BYTES, Answer, Lines, Operation, Operations, Raw
from llm4agents.api.schema.running import Nothing

Kind = Literal["file", "directory", "symlink", "other"]


class Written(Answer):
    path: str
    size: int


class Entry(Answer):
    """A file. A name that is not UTF-8 has its bytes as lone surrogate escapes (`\\udcXX`)."""

    name: str
    path: str
    kind: Kind
    size: int
    mode: int = Field(description="Permission bits.")
    uid: int
    gid: int
    user: str
    group: str
    mtime: float
    target: str | None = Field(description="Where a symbolic link points.")


class Listing(Answer):
    entries: list[Entry]
    truncated: bool = Field(description="There are more than fit.")


class Unpacked(Answer):
    path: str
    entries: int
    bytes: int
    skipped: int


class AttributesChanged(Answer):
    changed: int


class FoundFile(Answer):
    path: str
    kind: Kind
    size: int
    mtime: float


class FoundLine(Answer):
    path: str
    line: int
    column: int
    text: str


class Found(Answer):
    matches: list[FoundFile | FoundLine]
    files: int = Field(description="How many were looked at.")
    truncated: bool


class WatchingLine(Answer):
    """From here on nothing is missed."""

    type: Literal["watching"]
    path: str


class ChangeLine(Answer):
    type: Literal["created", "modified", "removed", "moved", "attributes", "overflow"]
    path: str | None
    to: str | None = Field(description="Where it was moved.")
    kind: str | None


class WatchEndLine(Answer):
    """What was watched has gone."""

    type: Literal["end"]


ENTRY: Final[dict[str, Any]] = {
    "name": "data.csv",
    "path": "/home/user/data.csv",
    "kind": "file",
    "size": 1_048_576,
    "mode": 420,
    "uid": 1000,
    "gid": 1000,
    "user": "user",
    "group": "user",
    "mtime": 1_790_000_004.5,
    "target": None,
}
_F = "/v1/sandboxes/{sandbox}/files"
FILE: Final = Raw(
    BYTES,
    "The file's bytes.",
    {
        "X-File-Size": "Its size in bytes when it was opened.",
        "X-File-Mode": "Its permission bits, decimal.",
        "X-File-Mtime": "When it was changed, Unix time with a fraction.",
        "X-Protected-Paths": "A JSON list: patterns of what must not be written on a client's machine either.",
    },
)
_TAR = "application/x-tar"
TAR_READ: Final = Raw(
    _TAR,
    "What is in it, as a tar; after the archive's end a block `LLM4AGENTS-TAR {…}` says what was left out.",
    {"X-Protected-Paths": "A JSON list: patterns of what must not be written on a client's machine either."},
)

OPERATIONS: Final[Operations] = {
    ("GET", _F): Operation(
        "files_read",
        "Files",
        "Read a file",
        (FILE,),
        words="Streams: `X-File-Size` says how much there is, and a body that is cut failed on its way.",
        reach="guest",
        parameters={"offset": "Which byte to begin with.", "length": "How many at most."},
    ),
    ("PUT", _F): Operation(
        "files_write",
        "Files",
        "Write a file",
        (Written,),
        words="Whole, in the place of what was there; or not at all.",
        reach="guest",
        parameters={"mode": "Its permission bits, decimal.", "parents": "Make the directories above it."},
        body=Raw(BYTES, "The file's bytes, of any length."),
        example={"path": "/home/user/data.csv", "size": 1_048_576},
    ),
    ("GET", f"{_F}/stat"): Operation(
        "files_stat",
        "Files",
        "Look at a file",
        (Entry,),
        reach="guest",
        parameters={"follow": "Of a symbolic link: what it points to."},
        example=ENTRY,
    ),
    ("GET", f"{_F}/list"): Operation(
        "files_list",
        "Files",
        "List a directory",
        (Listing,),
        reach="guest",
        parameters={"depth": "How many levels down."},
        example={"entries": [ENTRY], "truncated": False},
    ),
    ("POST", f"{_F}/mkdir"): Operation(
        "files_mkdir",
        "Files",
        "Make a directory",
        (Nothing,),
        reach="guest",
        body={"path": "/home/user/out"},
        example={},
    ),
    ("POST", f"{_F}/move"): Operation(
        "files_move",
        "Files",
        "Move a file",
        (Nothing,),
        reach="guest",
        body={"from": "/home/user/a", "to": "/home/user/b"},
        example={},
    ),
    ("POST", f"{_F}/remove"): Operation(
        "files_remove",
        "Files",
        "Remove a file",
        (Nothing,),
        reach="guest",
        body={"path": "/home/user/out", "recursive": True},
        example={},
    ),
    ("GET", f"{_F}/tar"): Operation(
        "files_tar_read",
        "Files",
        "Read a directory",
        (TAR_READ,),
        reach="guest",
        more_parameters=(
            {
                "name": "exclude",
                "in": "query",
                "required": False,
                "description": "A pattern of what is left out; may be given several times.",
                "schema": {"type": "array", "items": {"type": "string"}, "maxItems": 100},
            },
        ),
    ),
    ("PUT", f"{_F}/tar"): Operation(
        "files_tar_write",
        "Files",
        "Write a directory",
        (Unpacked,),
        reach="guest",
        parameters={"preserve_owner": "As the archive says, and not `user`'s."},
        body=Raw(_TAR, "A tar, not compressed."),
        example={"path": "/home/user/project", "entries": 12, "bytes": 40_960, "skipped": 0},
    ),
    ("POST", f"{_F}/attributes"): Operation(
        "files_set_attributes",
        "Files",
        "Change mode, owner or time",
        (AttributesChanged,),
        reach="guest",
        body={"path": "/home/user/run.sh", "mode": 493},
        example={"changed": 1},
    ),
    ("POST", f"{_F}/link"): Operation(
        "files_link",
        "Files",
        "Make a link",
        (Nothing,),
        reach="guest",
        body={"path": "/home/user/latest", "target": "/home/user/out"},
        example={},
    ),
    ("POST", f"{_F}/search"): Operation(
        "files_search",
        "Files",
        "Find files, or lines in them",
        (Found,),
        words="By `name` (a pattern), by `content`, or both.",
        reach="guest",
        body={"path": "/home/user", "content": "TODO"},
        example={
            "matches": [{"path": "/home/user/a.py", "line": 3, "column": 5, "text": "    # TODO: more"}],
            "files": 4,
            "truncated": False,
        },
    ),
    ("GET", f"{_F}/watch"): Operation(
        "files_watch",
        "Files",
        "Hear of changes",
        (
            Lines(
                "WatchLine",
                (WatchingLine, ChangeLine, WatchEndLine),
                "`watching` once nothing is missed any more, then a line for each change.",
                ({"type": "watching", "path": "/home/user"},),
            ),
        ),
        reach="guest",
        parameters={"recursive": "Also in directories below."},
    ),
}
