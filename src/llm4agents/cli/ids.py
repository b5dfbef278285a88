"""Sandbox ids on the command line may be cut short, as long as they mean one."""

from __future__ import annotations

from llm4agents.errors import InvalidRequestError, SandboxNotFoundError

ID_CHARS = len("sbx_") + 20
ENDED = ("killed", "failed")


def resolve(given: str) -> str:
    """The id that `given` means: whole, or a unique beginning (`sbx_` is optional). Live ones first."""
    if len(given) == ID_CHARS and given.startswith("sbx_"):
        return given
    if not given.removeprefix("sbx_"):
        raise InvalidRequestError(f"{given!r} is no sandbox's id", hint="is a variable of your shell empty?")
    from llm4agents import Sandbox
    from llm4agents.sdk._wire import unique_prefix

    known = Sandbox.list()
    found = unique_prefix(given, (info.id for info in known if info.state not in ENDED))
    found = found or unique_prefix(given, (info.id for info in known))
    if not found:
        raise SandboxNotFoundError(f"no sandbox {given}", hint="llm4agents ls shows what exists")
    if len(found) > 1:
        raise InvalidRequestError(
            f"{given} may mean {', '.join(sorted(found)[:5])}", hint="give more of the id"
        )
    return found[0]
