"""A short storm; `scripts/bench storm` is the long one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.reliability.storm import Storm, server_pid
from tests.support import Node, eventually, sdk_of

pytestmark = pytest.mark.vm


def test_a_server_killed_at_random_moments_loses_doubles_and_orphans_nothing(
    nodes: Callable[..., Node],
) -> None:
    node = nodes()
    with sdk_of(node):
        outcome = asyncio.run(Storm(node, kills=8, clients=4).run())
        assert outcome.kills == 8 and outcome.operations > 8
        assert (outcome.lost, outcome.doubled, outcome.broken, outcome.orphans) == ([], [], [], []), outcome
    # The last server was started by the SDK: it is ours to end.
    last = server_pid(node.state)
    node.http.post("/v1/server/stop", json={"keep": False})
    eventually(lambda: server_pid(node.state) in (None, 0) or server_pid(node.state) != last)
