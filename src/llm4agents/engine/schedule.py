"""When a job is due, when a webhook is tried again, what a schedule may be. Pure: times are unix seconds."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Final

from llm4agents.errors import InvalidRequestError

EVERY_S_MIN: Final = 60.0
EVERY_S_MAX: Final = 366 * 86_400.0
AHEAD_S_MAX: Final = 5 * 366 * 86_400.0
"""How far ahead `at` may be."""

RETRY_S: Final = (5.0, 15.0, 60.0, 300.0, 900.0, 1800.0, 3600.0, 7200.0, 10800.0, 14400.0)
"""Between the tries of a webhook: eleven tries in eleven hours."""


def moment(at: object) -> float:
    """`at` of a request: unix seconds, or RFC 3339 with its offset. Raises InvalidRequestError."""
    if isinstance(at, int | float) and not isinstance(at, bool):
        if math.isfinite(at) and at >= 0:
            return float(at)
    elif isinstance(at, str):
        try:
            found = datetime.fromisoformat(at)
        except ValueError:
            found = None
        if found is not None and found.tzinfo is not None:
            try:
                return found.astimezone(UTC).timestamp()
            except OverflowError:  # past the last year there is
                pass
    raise InvalidRequestError(
        f"at={at!r} is no moment", hint="unix seconds, or RFC 3339 with an offset: 2030-01-31T08:00:00Z"
    )


def first(at: float | None, every_s: float | None, now: float) -> float:
    """When a new job is due first: at `at` (now, if that has passed), else now. Raises InvalidRequestError."""
    if every_s is not None and not EVERY_S_MIN <= every_s <= EVERY_S_MAX:
        raise InvalidRequestError(f"every_s={every_s:g}: {EVERY_S_MIN:.0f} to {EVERY_S_MAX:,.0f} seconds")
    if at is not None and at > now + AHEAD_S_MAX:
        raise InvalidRequestError(f"at={at:g} is more than five years ahead", hint="is it in milliseconds?")
    return now if at is None else max(at, now)


def following(due_at: float, every_s: float | None, now: float) -> float | None:
    """When it is due after the run that was due at `due_at`: the next beat of its own rhythm that has not passed.

    Beats that were missed, because nothing could run or because the run took longer, are not made up for: the one
    late run was for all of them. None: no more.
    """
    if every_s is None:
        return None
    beats = max(1, math.floor((now - due_at) / every_s) + 1)
    following_at = due_at + beats * every_s
    return following_at if following_at > now else following_at + every_s


def retry_at(tries: int, now: float) -> float | None:
    """When a webhook that has failed `tries` times is tried again; None: never."""
    return now + RETRY_S[tries - 1] if tries <= len(RETRY_S) else None


def sleep_s(dues: list[float], now: float, most: float) -> float:
    """How long a timer may sleep before the first of `dues`; at most `most`, so that a stepped clock is noticed."""
    return min([most, *(max(0.0, due - now) for due in dues)])
