"""What goes first of a thing that many keep within one bound. Pure.

Whoever has most gives way, with what he has used least recently. So one who keeps little loses nothing to one who
keeps much, and one who is alone has all of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Held(Generic[T]):
    """One thing that is kept. `size` in whatever the bound is in; `fixed`: it counts, and cannot go now."""

    owner: str
    used: float
    item: T
    size: int = 1
    fixed: bool = False


def surplus(held: Iterable[Held[T]], most: int) -> list[T]:
    """What is to go so that the rest is `most` together, in that order; all that can go when that is not enough."""
    total, sizes, free = 0, defaultdict[str, int](int), defaultdict[str, list[Held[T]]](list)
    for one in held:
        total += one.size
        sizes[one.owner] += one.size
        if not one.fixed:
            free[one.owner].append(one)
    for mine in free.values():
        mine.sort(key=lambda one: one.used, reverse=True)
    gone: list[T] = []
    while total > most and free:
        owner = max(free, key=lambda name: (sizes[name], -free[name][-1].used))
        one = free[owner].pop()
        if not free[owner]:
            del free[owner]
        sizes[owner] -= one.size
        total -= one.size
        gone.append(one.item)
    return gone
