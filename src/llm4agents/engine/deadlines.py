"""When a sandbox's time is up. Pure."""

from __future__ import annotations

IDLE, LIFE = "idle_timeout", "life_end"


def idle_since(
    *,
    life_ends_wall_s: float,
    idle_timeout_s: float,
    kept_wall_s: float | None,
    boottime_s: float,
    wall_s: float,
) -> float:
    """Since when (CLOCK_BOOTTIME) an adopted sandbox has been idle, from the deadline its shim keeps.

    One whose deadline is the end of its life was in use when its server died: it is idle from now on.
    """
    if kept_wall_s is None or kept_wall_s >= life_ends_wall_s:
        return boottime_s
    return min(boottime_s, boottime_s - (wall_s - kept_wall_s) - idle_timeout_s)


def next_deadline(
    *,
    life_ends_wall_s: float,
    idle_timeout_s: float,
    idle_since_s: float | None,
    boottime_s: float,
    wall_s: float,
) -> tuple[float, str]:
    """Seconds until the sandbox ends if nothing more happens (≤ 0: now), and which deadline that is.

    `idle_since_s` (CLOCK_BOOTTIME) is None while a call is under way: then only the end of its life counts.
    Idleness is measured on CLOCK_BOOTTIME, which nobody steps; the end of life is a wall-clock promise.
    """
    life = life_ends_wall_s - wall_s
    if idle_since_s is None:
        return life, LIFE
    idle = idle_since_s + idle_timeout_s - boottime_s
    return (idle, IDLE) if idle < life else (life, LIFE)
