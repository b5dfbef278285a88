"""When many calls are under way, nobody has more than a share of them: others are still served. No I/O."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from llm4agents.errors import CapacityError


class Crowd:
    """Calls under way, by who makes them. Past half of `most` of them together, each has at most `share`."""

    def __init__(self, most: int, share: int) -> None:
        self._half, self._share = most // 2, share
        self._of: Counter[str] = Counter()
        self.under_way = 0

    @contextlib.contextmanager
    def inside(self, who: str) -> Iterator[None]:
        """Raises CapacityError."""
        if self.under_way >= self._half and self._of[who] >= self._share:
            raise CapacityError(
                f"this server has much to do, and {self._of[who]} calls of yours are under way",
                hint="end some, or call again in a second",
                retry_after_s=1,
            )
        self._of[who] += 1
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1
            self._of[who] -= 1
            if not self._of[who]:
                del self._of[who]
