"""What tests of the gateway alone begin with: a pool of links, a gateway, a guest that has joined it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.barrier import gate as lab
from tests.barrier.gate import Gate, Joined
from tests.barrier.guestside import Guest, Pool


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with lab.pool() as pool:
        yield pool


@pytest.fixture
def gate() -> Iterator[Gate]:
    with lab.gateway() as gate:
        yield gate


@pytest.fixture
def box(pool: Pool, gate: Gate) -> Iterator[tuple[Joined, Guest]]:
    """A sandbox with profile `none`."""
    with lab.guest_on(pool) as (link, guest):
        yield gate.join(link, "none"), guest
