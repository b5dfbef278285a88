"""What is said to a bash that runs cells, and what its output means. Pure: no I/O.

An interactive bash without a terminal is fed lines on stdin. Interactive, because then a SIGINT ends the cell
and not the shell; `source`d from a here-document, because then it behaves like a script and not like a prompt
(no job messages, `return`, line numbers in errors), and `declare` stays global. Marks with a random token go
to the shell's own stdout and stderr, so that both are known to have been read to the end of the cell.
"""

from __future__ import annotations

import codecs
import re
import secrets
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llm4agents.errors import InvalidRequestError

ARGV = ("/bin/bash", "--noprofile", "--norc", "--noediting", "-i")
ENVIRONMENT = {"PS1": "", "PS2": ""}
"""Prompts would be printed to stderr."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OUT, _ERR, _CELL = 250, 251, 252
"""Descriptors that a cell's own redirections are not likely to touch."""
_STATUS_IF_DISCARDED = 130
"""What bash says of a command that SIGINT ended; a discarded cell has set no status."""


@dataclass(frozen=True, slots=True)
class Started:
    """The shell is past reading the cell: from now on it can be interrupted."""

    cell: int


@dataclass(frozen=True, slots=True)
class Ended:
    """One of the two streams of a cell has ended; stdout's says the status."""

    cell: int
    stream: int
    status: int | None


Item = str | Started | Ended


def token() -> str:
    """What marks begin with. A letter first: printf would take an octal digit for a part of the NUL before it."""
    return f"L{secrets.token_hex(16)}"


def hello(token: str) -> bytes:
    """The first lines: settings, and the marks of cell 0 (what was printed before them is of no interest)."""
    settings = "set +o history +H; unset HISTFILE MAILCHECK PS1 PS2; PS1= PS2=; exec {o}>&1 {e}>&2\n"
    return settings.format(o=_OUT, e=_ERR).encode() + farewell(token, 0)


def cell(token: str, number: int, code: str, env: Mapping[str, str]) -> bytes:
    """The lines that run a cell and end it. Raises InvalidRequestError for what bash cannot take."""
    if "\0" in code:
        raise InvalidRequestError("bash code has no NUL in it")
    for name in env:
        if not _NAME.fullmatch(name):
            raise InvalidRequestError(f"{name!r} cannot be a variable of bash", hint="letters, digits and _")
    variables = "".join(f"{name}={shlex.quote(value)} " for name, value in env.items())
    # The empty lines are a sacrifice: a SIGINT that comes while the shell waits for input eats a character.
    head = (
        f"\n\n__l4a=; builtin printf '\\0{token}+{number}\\0' >&{_OUT}; "
        f"{variables}source /dev/fd/{_CELL} {_CELL}<<'{token}' </dev/null; __l4a=$?\n"
    )
    text = f"{head}{code}\n{token}\n".encode("utf-8", "replace")
    return text + farewell(token, number)


def farewell(token: str, number: int) -> bytes:
    """The lines that say how a cell ended. Saying them twice does no harm."""
    return (
        f"\nbuiltin printf '\\0{token}:{number}:%s\\0' \"${{__l4a:-{_STATUS_IF_DISCARDED}}}\" >&{_OUT}; "
        f"builtin printf '\\0{token}.{number}\\0' >&{_ERR}\n"
    ).encode()


class Scanner:
    """Splits one stream of the shell into text and marks. What looks like the beginning of a mark waits."""

    def __init__(self, token: str, stream: int) -> None:
        self._stream = stream
        self._start = b"\0" + token.encode()
        self._mark = re.compile(re.escape(self._start) + rb"([+:.])([0-9]{1,9})(?::([0-9]{1,3}))?\0")
        self._held = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> Iterator[Item]:
        """The items that `data` completes. Bytes that are not UTF-8 are replaced."""
        held = self._held + data
        at = 0
        for mark in self._mark.finditer(held):
            if mark.start() > at and (text := self._decoder.decode(held[at : mark.start()])):
                yield text
            at = mark.end()
            number = int(mark[2])
            if mark[1] == b"+":
                yield Started(number)
            else:
                if text := self._decoder.decode(b"", final=True):
                    yield text
                yield Ended(number, self._stream, None if mark[3] is None else int(mark[3]))
        keep = self._beginning(held, at)
        self._held = held[keep:]
        if text := self._decoder.decode(held[at:keep]):
            yield text

    def rest(self) -> str:
        """What waited, when nothing more comes."""
        held, self._held = self._held, b""
        return self._decoder.decode(held, final=True)

    def _beginning(self, data: bytes, at: int) -> int:
        """Where, from `at` on, a mark begins that the next bytes may complete; the end of `data` if none does."""
        found = data.find(b"\0", max(at, len(data) - len(self._start) - 16))
        while found >= 0:
            tail = data[found:]
            head, rest = tail[: len(self._start)], tail[len(self._start) :]
            if self._start.startswith(head) and not rest.strip(b"+:.0123456789"):
                return found
            found = data.find(b"\0", found + 1)
        return len(data)
