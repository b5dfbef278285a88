"""Where files of a sandbox land on this machine, and which must not: `llm4agents.protected`, with this disk's links.

For whoever writes what came out of a sandbox. Not here: writing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llm4agents import limits, protected
from llm4agents.errors import ProtectedPathError

HINT = "allow_protected=True (--allow-protected) copies it all the same; look at it first"


@dataclass(frozen=True, slots=True)
class ProtectedPath:
    """Something that was left out of a copy: its path, as far as it is below what was copied, and why."""

    path: str
    reason: str


if TYPE_CHECKING:
    _Path = Path
else:
    _Path = type(
        Path()
    )  # the class that Path makes here: Path itself cannot be subclassed before Python 3.12


class Downloaded(_Path):
    """The path on this machine, as any other Path, and what is not in it."""

    protected: Sequence[ProtectedPath] = ()
    """What was left out since this machine would obey it, at most limits.PROTECTED_REPORTED_MAX of them."""
    protected_count: int = 0
    left_out: int = 0
    """Links that lead out of what was copied, devices, sockets."""


class Guard:
    """What may be made below `target`. `allow`: all that the patterns `never` (the operator's) do not forbid."""

    def __init__(self, target: Path, *, allow: bool = False, never: Sequence[str] = ()) -> None:
        given, real = os.path.abspath(target), os.path.realpath(target)  # noqa: PTH100 (both: with links and without)
        self._tops = [given] if given == real else [given, real]
        self._target, self._allow, self._never = Path(real), allow, tuple(never)
        self.found: list[ProtectedPath] = []
        self.count = 0

    def why_not(self, parts: Sequence[str], kind: protected.Kind = "file") -> str | None:
        """The reason not to make that path below the target; None when it may be made."""
        for top in self._tops:
            reason = protected.match(
                "/".join((top, *parts)), self._never, kind=kind, defaults=not self._allow
            )
            if reason is not None:
                return reason
        return None if self._allow or kind == "directory" else self._bare(parts)

    def _bare(self, parts: Sequence[str]) -> str | None:
        """Any directory with a HEAD (and `objects`, `refs`) is a repository; then what else is in it counts."""
        names = [protected.components(part) for part in (*self._target.parts[1:], *parts)]
        folded = [name[-1] if name else "" for name in names]
        if ".git" in folded or (len(folded) > 1 and folded[-2].endswith(".git")):
            return None  # a repository by its name: its configuration and hooks are protected by theirs
        whole = [*self._target.parts, *parts]
        if folded[-1:] == ["head"]:
            where = Path(*whole[:-1])
            if any(os.path.lexists(where / name) for name in ("config", "hooks")):
                return protected.BARE
        for at, name in enumerate(folded, 1):
            obeyed = name == "hooks" or (name == "config" and at == len(folded))
            if obeyed and os.path.lexists(Path(*whole[:at]) / "HEAD"):
                return protected.BARE
        return None

    def refuses(self, parts: Sequence[str], kind: protected.Kind = "file") -> bool:
        """Whether it must not be made; then it is in the report."""
        reason = self.why_not(parts, kind)
        if reason is not None:
            self.report("/".join(parts), reason)
        return reason is not None

    def refuses_link(self, parts: Sequence[str], to: Sequence[str], *, symbolic: bool) -> bool:
        """The same of a link to `to`, below the target too."""
        if self.refuses(parts, "link" if symbolic else "file"):
            return True
        # Of a symbolic one it is not known what is there: a directory above protected ones is nothing by itself.
        if self.why_not(to, "directory" if symbolic else "file") is None:
            return False
        self.report("/".join(parts), protected.LINKED)
        return True

    def report(self, path: str, reason: str) -> None:
        self.count += 1
        if len(self.found) < limits.PROTECTED_REPORTED_MAX:
            self.found.append(ProtectedPath(path, reason))

    def check(self) -> None:
        """That the target itself may be a file. Raises ProtectedPathError."""
        if (reason := self.why_not(())) is not None:
            never = reason == protected.OPERATOR
            raise ProtectedPathError(
                f"{self._tops[0]} is protected: {reason}",
                hint="there is no way around the operator's list" if never else HINT,
                path=self._tops[0],
                reason=reason,
            )
