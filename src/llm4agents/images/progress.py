"""How a build says what it is doing. Not for drawing it: that is the CLI's."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called as a build moves on; must not block and must not raise.

    `step` is one of a few words that stay the same (`kernel`, `rootfs`, `wheels`, `disk`, `wait`…), `detail`
    a line for people, `fraction` how much of this step is done (0 to 1) or None when nobody can know.
    """

    def __call__(self, step: str, detail: str, fraction: float | None) -> None: ...


def silent(step: str, detail: str, fraction: float | None) -> None:
    """The Progress of somebody who does not look."""
