"""What an agent gets to see of results: text it can read, pictures it can look at, no more than it can hold. Pure."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence

from mcp_types import ContentBlock, ImageContent, TextContent

from llm4agents.errors import LLM4AgentsError
from llm4agents.sdk._landing import Downloaded
from llm4agents.sdk.results import ExecResult, Execution, FileInfo, Result, SandboxInfo

TEXT_CHARS_MAX = 60_000
"""Of one piece of text: its beginning and its end are kept. About what agents take of one answer."""
IMAGE_BYTES_MAX = 3_750_000
"""Models refuse larger pictures (5 MB in base64), and with them the whole conversation."""
PROTECTED_NAMED_MAX = 20
ASK_THE_USER = "if they are wanted, ask the user to copy them: llm4agents cp --allow-protected"
_BARE_OBJECT = re.compile(r"<.* object( at 0x[0-9a-f]+)?>", re.DOTALL)
_MAGIC = ((b"\x89PNG\r\n\x1a\n", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"GIF8", "image/gif"))


def text(said: str) -> TextContent:
    return TextContent(type="text", text=cut(said))


def cut(said: str, most: int = TEXT_CHARS_MAX) -> str:
    """`said`, or its beginning and end with a word about what is missing."""
    if len(said) <= most:
        return said
    head, tail = most * 2 // 3, most // 3
    left = len(said) - head - tail
    return (
        f"{said[:head]}\n[… {left} characters left out: write it to a file and read parts …]\n{said[-tail:]}"
    )


def image(data: bytes, mime: str) -> ContentBlock:
    if len(data) > IMAGE_BYTES_MAX:
        return text(f"[a picture of {len(data)} bytes ({mime}) is too large to show: make it smaller]")
    return ImageContent(type="image", data=base64.b64encode(data).decode("ascii"), mime_type=mime)


def image_type(data: bytes) -> str | None:
    """The MIME type of a picture that models can look at."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((mime for magic, mime in _MAGIC if data.startswith(magic)), None)


def result(found: Result) -> list[ContentBlock]:
    """One rich result in its most telling form: a picture, else what reads best as text."""
    if found.png is not None:
        return [image(found.png, "image/png")]
    if found.jpeg is not None:
        return [image(found.jpeg, "image/jpeg")]
    plain = found.text
    if plain is not None and _BARE_OBJECT.fullmatch(plain):
        plain = None  # `<IPython.core.display.HTML object>`: what it displays says more
    as_json = None if found.json is None else json.dumps(found.json, ensure_ascii=False)
    forms = (found.markdown, plain, found.html, as_json, found.latex, found.svg, found.javascript, found.text)
    said = next((form for form in forms if form), None)
    return [] if said is None else [text(said)]


def execution(done: Execution) -> list[ContentBlock]:
    """Of a cell: what it printed, its results, how it failed."""
    blocks: list[ContentBlock] = []
    if done.stdout:
        blocks.append(text(done.stdout))
    if done.stderr:
        blocks.append(text(f"[stderr]\n{done.stderr}"))
    for found in done.results:
        blocks.extend(result(found))
    if done.error is not None:
        said = done.error.traceback or f"{done.error.name}: {done.error.value}"
        blocks.append(text(f"[{done.status}]\n{said}"))
    elif done.status != "ok":
        blocks.append(text(f"[{done.status}]"))
    return blocks or [text("[done, no output]")]


def command(done: ExecResult) -> list[ContentBlock]:
    """Of a command: output, and how it ended unless that was with 0."""
    blocks: list[ContentBlock] = []
    if done.stdout:
        blocks.append(text(done.stdout))
    if done.stderr:
        blocks.append(text(f"[stderr]\n{done.stderr}"))
    if done.timed_out:
        blocks.append(text("[killed: it ran longer than timeout_s]"))
    elif done.exit_code is None:
        blocks.append(text(f"[killed by signal {done.signal}]"))
    elif done.exit_code or not blocks:
        blocks.append(text(f"[exit code {done.exit_code}]"))
    return blocks


def entries(found: Sequence[FileInfo]) -> str:
    """One line a file: kind, size, path."""
    lines = [
        f"{entry.path}/"
        if entry.is_dir
        else f"{entry.path}  {entry.size} bytes" + (f" -> {entry.target}" if entry.target else "")
        for entry in found
    ]
    return "\n".join(lines) or "[empty]"


def sandboxes(found: Sequence[SandboxInfo]) -> str:
    lines = [
        f"{info.id}  {info.state}  template {info.template}"
        + (f"  {json.dumps(info.metadata, ensure_ascii=False)}" if info.metadata else "")
        for info in found
    ]
    return "\n".join(lines) or "[no sandboxes]"


def downloaded(done: Downloaded) -> str:
    """Where to, and what was left out."""
    if not done.protected_count:
        return f"copied to {done}"
    lines = [f"{found.path!r}: {found.reason}" for found in done.protected[:PROTECTED_NAMED_MAX]]
    more = done.protected_count - len(lines)
    return cut(
        f"copied to {done}, without {done.protected_count} protected paths:\n"
        + "\n".join([*lines, *([f"… and {more} more"] if more else []), f"({ASK_THE_USER})"])
    )


def problem(error: LLM4AgentsError) -> str:
    """An error in one line, with what to do and whether it may have happened."""
    said = error.message + (f" ({error.hint})" if error.hint else "")
    return said if error.outcome != "unknown" else f"{said} [it may have run, wholly or in part]"
