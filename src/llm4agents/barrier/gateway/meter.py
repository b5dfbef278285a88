"""What a rule lets through: so many bytes in all, so many a second. Pure arithmetic over a clock that is passed in.

Both directions together, and all connections of one sandbox that the rule allowed, share one meter. Bytes are counted
as they are relayed: what a guest's own TLS adds is part of them, TCP's headers are not.
"""

from __future__ import annotations

_BURST_BYTES_MIN = 65_536


class Meter:
    """`rate`: bytes a second, one second's worth (64 KiB at least) in hand; `most`: bytes ever. None: no bound."""

    __slots__ = ("_at", "_burst", "_room", "most", "rate", "used")

    def __init__(self, rate: int | None, most: int | None, used: int = 0) -> None:
        self.rate, self.most, self.used = rate, most, used
        self._burst = float(max(rate or 0, _BURST_BYTES_MIN))
        self._room, self._at = self._burst, 0.0

    @property
    def spent(self) -> bool:
        return self.most is not None and self.used >= self.most

    def room(self, now: float) -> int:
        """How many bytes may be moved now; 0: none yet (see `wait`), or none ever again (`spent`)."""
        room = 1 << 30
        if self.rate is not None:
            if self._at:
                self._room = min(self._burst, self._room + (now - self._at) * self.rate)
            self._at = now
            room = int(self._room)
        if self.most is not None:
            room = min(room, self.most - self.used)
        return max(0, room)

    def wait(self) -> float:
        """Seconds until moving bytes is worth while again."""
        return (
            0.0
            if not self.rate
            else max(0.005, min(1.0, (min(self._burst, 16_384) - self._room) / self.rate))
        )

    def take(self, count: int) -> None:
        self.used += count
        if self.rate is not None:
            self._room -= count
