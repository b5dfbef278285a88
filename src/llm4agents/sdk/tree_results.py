"""What searches and watches of a sandbox's files give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["file", "directory", "symlink", "other"]


@dataclass(frozen=True, slots=True)
class FileMatch:
    """A file by name (`kind`, `size` in bytes, `mtime` in unix seconds), or a line by content.

    `line` and `column` (in bytes) count from 1; `text` is the line, at most 512 bytes of it around the match.
    """

    path: str
    kind: Kind = "file"
    size: int | None = None
    mtime: float | None = None
    line: int | None = None
    column: int | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Iterate for the matches. `files`: how many were looked at; `truncated`: there may be more than `max`."""

    matches: list[FileMatch]
    files: int
    truncated: bool

    def __iter__(self) -> Iterator[FileMatch]:
        return iter(self.matches)

    def __len__(self) -> int:
        return len(self.matches)


@dataclass(frozen=True, slots=True)
class FileChange:
    """Something happened to `path`; `to` is where it was moved. After `overflow`, changes are missing: look anew."""

    event: Literal["created", "modified", "removed", "moved", "attributes", "overflow"]
    path: str
    to: str | None
    kind: Kind


def file_match(body: dict[str, Any]) -> FileMatch:
    return FileMatch(**{name: body[name] for name in FileMatch.__slots__ if name in body})


def search_result(body: dict[str, Any]) -> SearchResult:
    matches = [file_match(match) for match in body.get("matches") or ()]
    return SearchResult(matches, int(body.get("files") or 0), bool(body.get("truncated")))


def file_change(body: dict[str, Any]) -> FileChange:
    return FileChange(body["type"], str(body.get("path")), body.get("to"), body.get("kind") or "other")
