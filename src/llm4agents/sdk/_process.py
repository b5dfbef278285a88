"""Pure decisions about processes: request bodies, messages of a live view, where a pattern is in what was said."""

from __future__ import annotations

import base64
import codecs
import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any, Final

from llm4agents.errors import InvalidRequestError, LLM4AgentsError, ProtocolError
from llm4agents.sdk import _wire, results

LOG_TEXT_MAX: Final = 1_048_576
"""Characters of one line that `wait_for_log` looks at; what is before them in an endless line is not."""
SHELL: Final = "if [ -x /bin/bash ]; then exec /bin/bash -l; else exec /bin/sh -l; fi"
_HEAD_BYTES: Final = 9
_CHANNELS: Final = {1: "stdout", 2: "stderr"}
_ALPHABET: Final = string.ascii_lowercase + string.digits


def new_id() -> str:
    return "proc_" + "".join(secrets.choice(_ALPHABET) for _ in range(16))


def path_of(sandbox: str, process: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", process) or not process.strip("."):
        raise InvalidRequestError(f"{process[:80]!r} is not a process id", hint="processes.list() shows them")
    return f"/v1/sandboxes/{sandbox}/processes/{process}"


def start_body(
    cmd: str | Sequence[str],
    *,
    id: str | None,
    tag: str | None,
    env: Mapping[str, str] | None,
    cwd: str | None,
    user: str | None,
    stdin: bool | str | bytes,
    tty: tuple[int, int] | None,
    term: str | None,
    timeout: float | None,
    keep_bytes: int | None,
    full: str,
) -> dict[str, Any]:
    """POST …/processes."""
    fed = stdin if isinstance(stdin, str | bytes) else None
    body = _wire.exec_body(cmd, env=env, cwd=cwd, user=user, stdin=fed, timeout=timeout, stream=False)
    del body["stream"]
    if stdin is True:
        body["stdin"] = True
    if tty is not None:
        rows, cols = tty
        body["tty"] = _wire.without_none({"rows": rows, "cols": cols, "term": term})
    body.update(id=id, tag=tag, keep_bytes=keep_bytes, full=full)
    return _wire.without_none(body)


def manner(id: str | None, tag: str | None, on_disconnect: str) -> dict[str, Any]:
    """What an exec's body says of how its process is managed."""
    kill = "kill" if on_disconnect == "kill" else None
    return _wire.without_none({"id": id, "tag": tag, "on_disconnect": kill})


def stdin_body(data: str | bytes, eof: bool) -> dict[str, Any]:
    raw = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else bytes(data)
    return {"data_b64": base64.b64encode(raw).decode("ascii"), "eof": eof}


def output_of(event: Mapping[str, Any]) -> results.Output | None:
    """The piece of output that an event is, or None."""
    kind = event.get("type")
    if kind == "stdout" or kind == "stderr":
        data = base64.b64decode(event.get("data_b64") or "")
        return results.Output(kind, data, int(event.get("offset") or 0))
    return None


def piece(message: bytes) -> results.Output:
    """A binary message of a live view."""
    channel = _CHANNELS.get(message[0]) if len(message) > _HEAD_BYTES else None
    if channel is None:
        raise ProtocolError("the server sent a piece of output that is none", hint="is it LLM4Agents?")
    offset = int.from_bytes(message[1:_HEAD_BYTES], "little")
    return results.Output(channel, message[_HEAD_BYTES:], offset)  # type: ignore[arg-type]


def told(message: str) -> tuple[str, dict[str, Any]]:
    """A text message of a live view: ("started" | "exit", its body). Raises the error that it tells of."""
    try:
        body = json.loads(message)
        (kind, value) = next(iter(body.items()))
    except (ValueError, AttributeError, StopIteration):
        raise ProtocolError(f"the server said {message[:80]!r}", hint="is it LLM4Agents?") from None
    if kind == "error" and isinstance(value, dict):
        error: LLM4AgentsError = _wire.error_of(int(value.get("status") or 500), json.dumps(value).encode())
        raise error
    return str(kind), value if isinstance(value, dict) else {}


class Search:
    """Looks for a pattern in the lines that a process says, each of its channels on its own."""

    def __init__(self, pattern: str | re.Pattern[str]) -> None:
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise InvalidRequestError(f"{pattern!r} is no regular expression: {error}") from None
        self._open: dict[str, str] = {}
        self._decoders: dict[str, codecs.IncrementalDecoder] = {}

    def feed(self, output: results.Output) -> str | None:
        """The line (without its end) in which the pattern is, as soon as it is there."""
        channel = output.channel
        if channel not in self._decoders:
            self._decoders[channel] = codecs.getincrementaldecoder("utf-8")("replace")
        text = self._open.get(channel, "") + self._decoders[channel].decode(output.data)
        *lines, rest = text.split("\n")
        self._open[channel] = rest[-LOG_TEXT_MAX:]
        for line in (*lines, self._open[channel]):
            if self._pattern.search(line):
                return line.rstrip("\r")
        return None
