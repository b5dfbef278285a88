"""What all attacks share: a lab, a server in it, and a sandbox whose root is the attacker.

There is one of each for the whole directory (each case sets its own policy); after each case and each file the barrier
must stand as before, and after the last one nothing may be left.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.barrier.attacks.guest import GATEWAY, INTERCEPTOR, Case, Guest
from tests.barrier.lab import Lab, laboratory
from tests.conftest import _nodes
from tests.support import Node

GROWTH_BYTES_MAX = 32 * 1_048_576
"""Of the gateway's and the interceptor's memory, over all cases of a file."""


@pytest.fixture(scope="session")
def templates() -> None:
    """The lab has no package registries: templates and the interceptor's environment are made before, in the cache
    that the lab's servers use too."""
    for make in _nodes():
        node = make().start()
        sandbox = node.create("python", network=["allow GET intercepted.example.com/*"])
        node.call("DELETE", f"/v1/sandboxes/{sandbox}")
        node.stop()


@pytest.fixture(scope="package", autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """In place of the one for each file: the server outlives them."""
    yield
    mine = f"-{os.getpid()}-"
    assert not [path for path in Path(tempfile.gettempdir()).glob("l4a-*") if mine in path.name]
    assert not [path for path in Path("/run/netns").glob("l4a-lab-*") if str(os.getpid()) in path.name]


@pytest.fixture(scope="package")
def lab(templates: None) -> Iterator[Lab]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    with laboratory() as lab:
        yield lab


@pytest.fixture(scope="package")
def node(lab: Lab) -> Iterator[Node]:
    """A server on the lab's host."""
    for make in _nodes():
        yield make(within=lab.enter(), **lab.environment).start()


@pytest.fixture(scope="package")
def guest(node: Node, lab: Lab) -> Iterator[Guest]:
    guest = Guest(node, lab)
    yield guest
    guest.kill()


@pytest.fixture(scope="module")
def steady(guest: Guest) -> Iterator[None]:
    """Over a file, gateway and interceptor stay the processes they were, and their memory stays flat."""
    before = {module: guest.lab.rss(module) for module in (GATEWAY, INTERCEPTOR)}
    assert len(before[GATEWAY]) == 1, guest.lab.processes()
    yield
    for module, was in before.items():
        now = guest.lab.rss(module)
        assert not was or now.keys() == was.keys(), (
            f"{module} was restarted: {was} {now}\n{guest.node.log()[-3000:]}"
        )
        growth = sum(now.values()) - sum(was.values())
        assert not was or growth < GROWTH_BYTES_MAX, f"{module} grew by {growth / 1_048_576:.1f} MiB"


@pytest.fixture
def case(guest: Guest, steady: None) -> Iterator[Case]:
    """One attack; afterwards the gateway is the process it was."""
    before = guest.lab.rss(GATEWAY).keys()
    yield Case(guest)
    assert guest.lab.rss(GATEWAY).keys() == before, "the gateway was restarted"
