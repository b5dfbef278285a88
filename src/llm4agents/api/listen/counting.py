"""Who holds how many connections, and who must make room; token buckets. No I/O."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from llm4agents import limits


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a client may make the listener hold, and for how long; tests have smaller ones."""

    connections: int = limits.LISTEN_CONNECTIONS_MAX
    per_address: int = limits.LISTEN_CONNECTIONS_PER_ADDRESS_MAX
    requests: int = limits.LISTEN_REQUESTS_MAX
    crowded: int = limits.LISTEN_REQUESTS_CROWDED
    handshake_s: float = limits.LISTEN_HANDSHAKE_S
    head_s: float = limits.LISTEN_HEAD_S
    head_bytes: int = limits.LISTEN_HEAD_BYTES_MAX
    headers: int = limits.LISTEN_HEADERS_MAX
    keep_alive_s: int = limits.LISTEN_KEEP_ALIVE_S
    linger_s: float = limits.LISTEN_LINGER_S
    gone_s: float = limits.LISTEN_GONE_S
    stall_s: float = limits.LISTEN_BODY_STALL_S
    body_bytes_per_s: int = limits.LISTEN_BODY_BYTES_PER_S_MIN
    bodies_bytes: int = limits.LISTEN_BODIES_BYTES_MAX
    streams: int = limits.LISTEN_STREAMS_MAX
    resets: tuple[int, int] = (limits.LISTEN_RESETS_BURST, limits.LISTEN_RESETS_PER_S)
    control: tuple[int, int] = (limits.LISTEN_CONTROL_BURST, limits.LISTEN_CONTROL_PER_S)
    messages: tuple[int, int] = (limits.WEBSOCKET_MESSAGES_BURST, limits.WEBSOCKET_MESSAGES_PER_S)


class Bucket:
    """A token bucket: `burst` at once, then `per_s`."""

    __slots__ = ("_at", "_burst", "_left", "_per_s")

    def __init__(self, shape: tuple[int, int]) -> None:
        self._burst, self._per_s = shape
        self._left, self._at = float(self._burst), time.monotonic()

    def take(self, count: int = 1) -> float:
        """Takes `count`, also what is not there; the seconds until that is made good, 0 when it was there."""
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s) - count
        self._at = now
        return max(0.0, -self._left / self._per_s)


class Budget:
    """Bytes that all clients together may have lying here unfinished. Small shares are given also from an empty one."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0

    def take(self, count: int, held: int) -> bool:
        """`held`: what whoever asks has already."""
        if self.used + count > self.limit and held + count > limits.LISTEN_SHARE_BYTES:
            return False
        self.used += count
        return True

    def give(self, count: int) -> None:
        self.used -= count


@dataclass(eq=False, slots=True)
class Ticket:
    """One connection's place. `close` ends it at once; a connection that waits for a request says `idle`."""

    address: str
    close: Callable[[], None]
    _idle: dict[Ticket, None]

    def busy(self) -> None:
        self._idle.pop(self, None)

    def idle(self) -> None:
        self._idle.setdefault(self)


class Connections:
    """All connections of a listener. When there is room for no more, the one that is idle longest makes room."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._held: dict[Ticket, None] = {}
        self._idle: dict[Ticket, None] = {}
        """In the order in which they began to wait."""
        self._of: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        """By reason: `address`, `full`, `evicted`, `handshake`."""

    def __len__(self) -> int:
        return len(self._held)

    @property
    def idle(self) -> int:
        return len(self._idle)

    def enter(self, address: str, close: Callable[[], None], *, counted: bool) -> Ticket | None:
        """A place for a new connection, None when its address has its share or all places are at work.

        `counted`: whether its address has a share (a trusted proxy's has none).
        """
        if counted and self._of[address] >= self._bounds.per_address:
            self.refused["address"] += 1
            return None
        if len(self._held) >= self._bounds.connections and not self._make_room():
            self.refused["full"] += 1
            return None
        ticket = Ticket(address, close, self._idle)
        self._held[ticket] = None
        self._of[address] += 1
        ticket.idle()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Idempotent."""
        ticket.busy()
        if self._held.pop(ticket, ticket) is None:
            self._of[ticket.address] -= 1
            if not self._of[ticket.address]:
                del self._of[ticket.address]

    def close_idle(self) -> None:
        for ticket in list(self._idle):
            self.leave(ticket)
            ticket.close()

    def close_all(self) -> None:
        for ticket in list(self._held):
            self.leave(ticket)
            ticket.close()

    def _make_room(self) -> bool:
        oldest = next(iter(self._idle), None)
        if oldest is None:
            return False
        self.refused["evicted"] += 1
        self.leave(oldest)
        oldest.close()
        return True
